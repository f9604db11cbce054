"""Audits through real processes: the step of a group holds what one process holds, and its own mistakes are caught."""

import dataclasses
import itertools
import math
import re

import pytest
import torch
from tests.support import group_doubles as doubles
from tests.support import small_targets as small

from spectral_dp.audit.targets.group import ScriptShare, chosen_coins
from spectral_dp.audit.targets.noise_control import Script

PROGRAMS = "tests.support.group_doubles:"


def audited(processes, audits, mistake, ranks=2, seed=0):
    """The verdicts of some audits, which every rank must agree on."""
    first, *others = processes.run(ranks, PROGRAMS + audits, mistake, seed, timeout=60.0)
    assert all(other == first for other in others)
    return first


def test_the_noise_of_all_ranks_is_that_of_the_claim(processes):
    """With the noise of a private run. The linear map is exact: the shares add up to the claimed multiplier."""
    found = audited(processes, "noise_audits", "none", seed=None)
    assert all(verdict.ok for verdict in found.values()), found
    assert found["linear map"].measured == pytest.approx(small.CLAIM.noise_multiplier, rel=1e-4)


@pytest.mark.parametrize(
    ("mistake", "share"),
    [("noise in full on every rank", math.sqrt(2)), ("one share only", math.sqrt(1 / 2))],
)
def test_control_shares_that_do_not_add_up_are_caught(processes, mistake, share):
    """Too much noise and too little: the linear map says how much there is, the law that it is not what is claimed."""
    found = audited(processes, "noise_audits", mistake)
    assert found["linear map"].measured == pytest.approx(share * small.CLAIM.noise_multiplier, rel=1e-4)
    assert {name for name, verdict in found.items() if not verdict.ok} == doubles.CAUGHT_BY[mistake]
    deviation = re.search("the deviation is ([0-9.]+) times the claimed one", found["noise law"].note)
    assert float(deviation[1]) == pytest.approx(share, rel=0.1)


def test_control_a_rank_that_repeats_its_noise_in_every_layer_is_caught(processes):
    """The deviation is right, and so is every layer by itself. Only side by side they show."""
    mistake = "one share that starts again in every layer"
    found = audited(processes, "noise_audits", mistake)
    assert {name for name, verdict in found.items() if not verdict.ok} == doubles.CAUGHT_BY[mistake]
    assert "two blocks share noise" in found["noise law"].note


@pytest.mark.parametrize(
    ("mistake", "rate"),
    [
        ("none", 0.1),
        ("shards sampled at rate qR", 0.2),
        ("every rank draws from all records", 0.2),
        ("one key for the coins of all ranks", 0.1),
    ],
)
def test_the_coins_of_all_ranks_are_audited(processes, mistake, rate):
    found = audited(processes, "sampling_audits", mistake)
    assert {name for name, verdict in found.items() if not verdict.ok} == doubles.CAUGHT_BY[mistake]
    assert found["sampling"].details["rate"] == pytest.approx(rate, abs=0.03)


@pytest.mark.parametrize("mistake", ["none", "division by the realised batch"])
def test_neighbours_are_audited_wherever_their_record_is(processes, mistake):
    """Records of a batch are dealt out to the ranks in turn, so hostile ones are tried on each of them."""
    found = audited(processes, "neighbour_audits", mistake)
    caught = {name for name, verdict in found.items() if not verdict.ok}
    assert caught >= doubles.CAUGHT_BY[mistake]
    assert bool(caught) == bool(doubles.CAUGHT_BY[mistake])


@pytest.mark.slow
@pytest.mark.parametrize("mistake", doubles.CAUGHT_BY)
def test_whole_reports(processes, mistake):
    (name, found), (_, other) = processes.run(2, PROGRAMS + "report", mistake, timeout=300.0)
    assert name == "spectral_dp, 2 processes"
    assert {v.audit: dataclasses.replace(v, seconds=0) for v in found.values()} == {
        v.audit: dataclasses.replace(v, seconds=0) for v in other.values()
    }
    caught = {name for name, verdict in found.items() if not verdict.ok}
    assert caught >= doubles.CAUGHT_BY[mistake]
    assert bool(caught) == bool(doubles.CAUGHT_BY[mistake])


class Rank:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def test_every_number_of_a_script_reaches_one_rank():
    scripts = [Script(torch.arange(18.0)) for _ in range(3)]
    served = [ScriptShare(script, Rank(rank, 3)) for rank, script in enumerate(scripts)]
    drawn = [torch.cat([share.normal((2, 2)).flatten(), share.normal((2,))]) for share in served]
    assert torch.equal(torch.cat(drawn).sort().values, torch.arange(18.0))
    assert drawn[1].tolist() == [4, 5, 6, 7, 14, 15]
    assert all(script.shapes == [(2, 2)] * 3 + [(2,)] * 3 for script in scripts)


def test_a_script_can_take_over_what_another_was_asked_for():
    script = Script()
    script.take_over([(2, 3), (4,)])
    assert (script.shapes, script.drawn) == ([(2, 3), (4,)], 10)


@pytest.mark.parametrize("records", [0, 1, 5, 6])
def test_chosen_records_are_dealt_out_to_all_ranks(records):
    dealt = [next(chosen_coins(Rank(rank, 3), records).tosses(100, 0.5, 0, 0)).tolist() for rank in range(3)]
    assert sorted(itertools.chain(*dealt)) == list(range(records))
    assert next(chosen_coins(None, records).tosses(100, 0.5, 0, 0)).tolist() == list(range(records))
