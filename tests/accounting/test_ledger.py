"""The ledger: what was recorded is what is reported, and whose steps it lists can be told."""

import copy
import hashlib
import json
import math
import pickle
import struct
import time

import dp_accounting
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.accounting import ledger_of

from spectral_dp.accounting import Ledger, delta, epsilon
from spectral_dp.accounting.privacy_loss import MAX_STEPS
from spectral_dp.relations import Relation

ADD, REPLACE = Relation.ADD_OR_REMOVE_ONE, Relation.REPLACE_ONE


def test_ledger_of_one_phase_is_epsilon():
    one_by_one = ledger_of(*[(1.1, 0.02)] * 300)
    assert one_by_one.phases == ((1.1, 0.02, 300),)
    assert one_by_one.phases == ledger_of((1.1, 0.02, 300)).phases
    assert one_by_one.steps == 300
    assert one_by_one.epsilon(1e-5) == epsilon(1.1, 0.02, 300, 1e-5)
    assert one_by_one.delta(1.0) == delta(1.1, 0.02, 300, 1.0)
    assert one_by_one.epsilon(1e-5, accountant="rdp") == epsilon(1.1, 0.02, 300, 1e-5, accountant="rdp")


def test_ledger_keeps_phases_apart_and_ignores_their_order():
    there, back = ledger_of((1.0, 0.01, 100), (2.0, 0.01, 100)), ledger_of((2.0, 0.01, 100), (1.0, 0.01, 100))
    assert there != back
    assert there.epsilon(1e-5) == pytest.approx(back.epsilon(1e-5), rel=1e-9)
    assert ledger_of((1.0, 0.01, 60), (2.0, 0.01, 100), (1.0, 0.01, 40)).epsilon(1e-5) == there.epsilon(1e-5)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_dropping_any_phase_shows(accountant):
    """Negative control: a ledger that forgets a phase, the unsampled one included, reports less."""
    phases = [(1.0, 0.01, 200), (1.5, 0.05, 50), (4.0, 1.0, 1)]
    whole = ledger_of(*phases).epsilon(1e-5, accountant=accountant)
    for missing in range(len(phases)):
        rest = phases[:missing] + phases[missing + 1 :]
        assert ledger_of(*rest).epsilon(1e-5, accountant=accountant) < 0.99 * whole


def test_one_step_without_noise_spoils_everything():
    ledger = ledger_of((1.0, 0.01, 100), (0.0, 0.01, 1), (1.0, 0.01, 100))
    assert ledger.epsilon(1e-5) == math.inf
    assert ledger.delta(1.0) == 1.0
    assert ledger.epsilon(1e-5, accountant="rdp") == math.inf


def test_empty_ledger_spent_nothing():
    assert Ledger().epsilon(1e-5) == 0
    assert Ledger().delta(0.0) == 0
    assert Ledger().steps == 0


def test_replace_one_ledger_accounts_for_replace_one():
    phases = [(0.5, 0.2, 20), (1.0, 0.1, 20)]
    replaced, added = ledger_of(*phases, relation=REPLACE), ledger_of(*phases)
    assert replaced != added
    assert replaced.epsilon(1e-5) < 0.9 * added.epsilon(1e-5)
    assert Ledger.from_state_dict(replaced.state_dict()).relation is REPLACE


def test_recording_is_cheap_enough_for_every_step():
    ledger = Ledger()
    start = time.perf_counter()
    for _ in range(10_000):
        ledger.record(1.1, 0.01)
    assert time.perf_counter() - start < 2  # about 50 ms
    assert ledger.steps == 10_000


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(1e-6, 1), st.integers(1, 10**6)), max_size=5),
    st.sampled_from(list(Relation)),
)
def test_state_survives_json(phases, relation):
    """Catches a field lost, or a float rounded, on the way through a checkpoint."""
    ledger = ledger_of(*phases, relation=relation)
    restored = Ledger.from_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert restored == ledger
    assert restored.phases == ledger.phases


def test_a_ledger_never_grows_beyond_what_it_can_restore():
    ledger = ledger_of((1.1, 0.02, MAX_STEPS))
    with pytest.raises(ValueError, match="steps must be"):
        ledger.record(1.1, 0.02)
    assert Ledger.from_state_dict(ledger.state_dict()) == ledger


def test_restored_ledger_goes_on_where_it_stopped():
    ledger = ledger_of((1.1, 0.02, 100))
    restored = Ledger.from_state_dict(ledger.state_dict())
    restored.record(1.1, 0.02, 50)
    assert ledger.steps == 100
    assert restored.phases == ((1.1, 0.02, 150),)


def test_pld_agrees_with_dp_accounting_on_a_heterogeneous_run():
    """Catches a phase composed with another's parameters: dp_accounting gets the events as run."""
    ledger, theirs = Ledger(), dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
    for sigma, rate, steps in [(1.0, 0.01, 300), (2.0, 0.05, 100), (1.5, 1.0, 2), (1.0, 0.01, 50)]:
        ledger.record(sigma, rate, steps)
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma))
        theirs.compose(dp_accounting.SelfComposedDpEvent(event, steps))
    assert ledger.epsilon(1e-5) == pytest.approx(theirs.get_epsilon(1e-5), rel=2e-3)
    assert ledger.delta(4.0) == pytest.approx(theirs.get_delta(4.0), rel=2e-2)


PHASES = st.lists(st.tuples(st.sampled_from([0.0, 0.7, 1.1]), st.sampled_from([0.01, 1.0]), st.integers(1, 4)))


def saved(ledger):
    """What comes back from a file."""
    return json.loads(json.dumps(ledger.state_dict()))


def restored(ledger):
    return Ledger.from_state_dict(saved(ledger))


def head_of(state):
    """The chain written down a second time: it pins the encoding, and lets the tests below forge."""
    digest = hashlib.sha256(f"spectral-dp ledger 1\n{state['identity']}\n{state['relation']}\n".encode()).digest()
    for writer, sigma, rate, steps in state["entries"]:
        digest = hashlib.sha256(digest + bytes.fromhex(writer) + struct.pack(">ddQ", sigma, rate, steps)).digest()
    return digest.hex()


class TestTheChain:
    def test_is_what_it_is_said_to_be(self):
        state = saved(ledger_of((1.1, 0.01, 7), (0.9, 0.01)))
        assert state["head"] == head_of(state)
        assert [len(state["identity"]), len(state["entries"]), len(state["head"])] == [32, 2, 64]

    @pytest.mark.parametrize(
        "edit",
        [
            lambda s: s["entries"][0].__setitem__(1, 50.0),  # more noise than there was: a smaller epsilon
            lambda s: s["entries"][0].__setitem__(1, math.nextafter(1.1, 2)),
            lambda s: s["entries"][1].__setitem__(2, 1e-6),  # a lower rate
            lambda s: s["entries"][0].__setitem__(3, 1),  # fewer steps
            lambda s: s["entries"].reverse(),
            lambda s: s["entries"].pop(),
            lambda s: s["entries"].clear(),
            lambda s: s["entries"].append(list(s["entries"][0])),
            lambda s: s["entries"][0].__setitem__(0, "0" * 16),
            lambda s: s.update(relation="replace_one"),
            lambda s: s.update(identity="0" * 32),
            lambda s: s.update(head="0" * 64),
            lambda s: s.update(head=None),
        ],
    )
    def test_an_edited_ledger_is_refused(self, edit):
        state = saved(ledger_of((1.1, 0.01, 7), (0.9, 0.02)))
        assert Ledger.from_state_dict(state).steps == 8  # the control: as it was, it loads
        edit(state)
        with pytest.raises(ValueError, match="changed after it was written"):
            Ledger.from_state_dict(state)

    def test_is_no_signature(self):
        """It holds no secret: whoever can write the file can compute a head for it, and the docs must say so."""
        state = saved(ledger_of((1.1, 0.01, 7)))
        state["entries"][0][1] = 50.0
        state["head"] = head_of(state)
        assert Ledger.from_state_dict(state).phases[0].noise_multiplier == 50.0

    @settings(max_examples=50)
    @given(PHASES, st.sampled_from(list(Relation)))
    def test_remembers_the_head_of_every_step(self, phases, relation):
        """Catches merging that changes a link of the past, here or on the way through a file."""
        ledger = Ledger(relation)
        heads = [ledger.head]
        for sigma, rate, steps in phases:
            ledger = restored(ledger)  # another writer
            for _ in range(steps):
                ledger.record(sigma, rate)
                heads.append(ledger.head)
        assert [restored(ledger).head_after(step) for step in range(ledger.steps + 1)] == heads
        assert len(set(heads)) == len(heads)
        with pytest.raises(ValueError, match=f"no head after {len(heads)}"):
            ledger.head_after(len(heads))

    def test_of_very_many_steps_is_quick(self):
        """Catches hashing step by step, which would take minutes."""
        ledger = ledger_of(*[(1.0 + k, 0.01, MAX_STEPS) for k in range(100)])
        start = time.perf_counter()
        assert restored(ledger) == ledger
        assert time.perf_counter() - start < 0.5  # about 1 ms


class TestIdentity:
    def test_equal_steps_of_two_runs_are_two_ledgers(self):
        one, other = ledger_of((1.1, 0.01, 10)), ledger_of((1.1, 0.01, 10))
        assert one.phases == other.phases
        assert one != other
        assert not one.continues(other)
        assert restored(one) == one  # the control
        assert restored(one).identity == one.identity

    @pytest.mark.parametrize(
        "another", [restored, copy.copy, copy.deepcopy, lambda ledger: pickle.loads(pickle.dumps(ledger))]
    )
    def test_two_continuations_differ_from_their_first_step(self, another):
        """Catches one that is taken for the other because both made equally many equal steps."""
        ledger = Ledger()
        twin = another(ledger)
        assert twin == ledger
        assert twin.identity == ledger.identity
        twin._entries = []  # not shared, where the copy was shallow
        for each in (ledger, twin):
            each.record(1.1, 0.01)
        assert twin.phases == ledger.phases
        assert twin.head != ledger.head
        assert not twin.continues(ledger)

    @pytest.mark.parametrize(("sign", "of_child"), [("os.getpid", lambda: -1), ("spectral_dp._processes._forks", -1)])
    def test_a_forked_process_writes_as_itself(self, monkeypatch, sign, of_child):
        ledger = ledger_of((1.1, 0.01, 5))
        child = copy.deepcopy(ledger)
        child._writer = ledger._writer  # as fork leaves it: memory, and all in it, is the parent's
        ledger.record(1.1, 0.01)
        monkeypatch.setattr(sign, of_child)
        child.record(1.1, 0.01)
        assert child.phases == ledger.phases
        assert child != ledger

    def test_steps_of_several_writers_spend_as_those_of_one(self):
        whole, parts = ledger_of((1.1, 0.01, 100)), ledger_of((1.1, 0.01, 40))
        parts = restored(parts)
        parts.record(1.1, 0.01, 60)
        assert parts.phases == whole.phases
        assert parts.epsilon(1e-5) == whole.epsilon(1e-5)


class TestLoading:
    def test_goes_forward(self):
        ledger = ledger_of((1.1, 0.01, 5))
        later = restored(ledger)
        later.record(1.1, 0.01, 5)
        for state in (saved(ledger), saved(later)):  # as it is; then as somebody else has continued it
            ledger.load_state_dict(state)
        assert ledger == later
        empty = Ledger()
        empty.load_state_dict(saved(later))
        assert empty == later

    def test_never_forgets(self):
        ledger = ledger_of((1.1, 0.01, 5))
        older = saved(ledger)
        elsewhere = restored(ledger)
        ledger.record(1.1, 0.01, 5)
        elsewhere.record(1.1, 0.01, 5)
        before = saved(ledger)
        for state, reason in [
            (older, "10 steps and the saved one, of the same run, lists 5 only"),
            (saved(ledger_of((1.1, 0.01, 10))), "lists 10 of another run"),
            (saved(ledger_of((1.1, 0.01, 20))), "lists 20 of another run"),
            (saved(elsewhere), "both continued the same run"),
            (saved(ledger_of((1.1, 0.01, 10), relation=Relation.REPLACE_ONE)), "under replace_one"),
        ]:
            with pytest.raises(ValueError, match=reason):
                ledger.load_state_dict(state)
            assert saved(ledger) == before

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"identity": "run 7"}, "16 bytes in hexadecimal"),
            ({"identity": None}, "16 bytes in hexadecimal"),
            ({"relation": "remove_two"}, "remove_two"),
            ({"entries": None}, "iterable"),
            ({"entries": "abc"}, "8 bytes in hexadecimal"),
            ({"entries": [[1.0, 0.1, 10]]}, "8 bytes in hexadecimal"),
            ({"entries": [["0" * 16, 1.0, 0.1]]}, "steps"),
            ({"entries": [["0" * 16, 1.0, 0.1, 10, 3]]}, "argument"),
            ({"entries": [["0" * 16, 1.0, 0.1, -10]]}, "steps"),
            ({"entries": [["0" * 16, 1.0, 0.1, True]]}, "steps"),
            ({"entries": [["0" * 16, math.nan, 0.1, 10]]}, "noise_multiplier"),
            ({"entries": [["0" * 16, "1.0", 0.1, 10]]}, "noise_multiplier"),
            ({"entries": [["0" * 16, 1.0, 0.0, 10]]}, "sample_rate"),
            ({"epsilon": 0}, "expected the keys"),
        ],
    )
    def test_malformed_state_is_refused_for_what_is_wrong(self, change, reason):
        with pytest.raises(ValueError, match=f"not the state of a ledger: .*{reason}"):
            Ledger.from_state_dict(saved(ledger_of((1.0, 0.1, 10))) | change)


def test_copies_that_sign_alike_stay_equal():
    """The processes that train together record the same releases, and their ledgers are one."""
    first, second = Ledger(), Ledger()
    second.sign_as(first.signature)
    for ledger in (first, second):
        ledger.record(1.0, 0.1)
    assert first == second
    assert first.state_dict() == second.state_dict()


def test_a_ledger_with_releases_of_its_own_is_no_copy_of_another():
    ledger = Ledger()
    ledger.record(1.0, 0.1)
    with pytest.raises(ValueError, match="so it is none of run"):
        ledger.sign_as(Ledger().signature)
    ledger.sign_as((ledger.identity, "00" * 8))
    assert ledger.steps == 1
