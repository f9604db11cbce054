"""Broken releases of private channel statistics, in place of ``release_moments``: each has one fault, named after it.

The audit of the normalisation must catch all of them.
"""

import math

import torch

from spectral_dp import Relation
from spectral_dp.accounting import Ledger
from spectral_dp.features.normalization import JOINT_BOUND, release_moments
from spectral_dp.mechanism.clipping import Clipped, clip_and_sum
from spectral_dp.mechanism.perturbation import add_noise


def _noisy(total, noise_multiplier, ledger, noise, relation=None):
    ledger.record(noise_multiplier, 1.0)
    return add_noise(Clipped(total, JOINT_BOUND), noise_multiplier, noise, relation or ledger.relation)


def _clipped(parts):
    return torch.stack([clip_and_sum(part, JOINT_BOUND).value for part in parts]).sum(0)


def without_noise(parts, *, noise_multiplier, ledger, noise):
    ledger.record(noise_multiplier, 1.0)
    return _clipped(parts)


def without_charge(parts, *, noise_multiplier, ledger, noise):
    return release_moments(parts, noise_multiplier=noise_multiplier, ledger=Ledger(ledger.relation), noise=noise)


def charged_as_sampled(parts, *, noise_multiplier, ledger, noise):
    ledger.record(noise_multiplier, 0.1)
    return without_charge(parts, noise_multiplier=noise_multiplier, ledger=ledger, noise=noise)


def charged_for_one_half(parts, *, noise_multiplier, ledger, noise):
    """Means and squares each have sensitivity 1, but together √2."""
    ledger.record(noise_multiplier * math.sqrt(2), 1.0)
    return without_charge(parts, noise_multiplier=noise_multiplier, ledger=ledger, noise=noise)


def half_the_noise(parts, *, noise_multiplier, ledger, noise):
    ledger.record(noise_multiplier, 1.0)
    return add_noise(Clipped(_clipped(parts), JOINT_BOUND), noise_multiplier / 2, noise, ledger.relation)


def noise_on_the_means_alone(parts, *, noise_multiplier, ledger, noise):
    means, squares = _clipped(parts).chunk(2)
    return torch.cat([_noisy(means, noise_multiplier, ledger, noise), squares])


def the_same_noise_on_both_halves(parts, *, noise_multiplier, ledger, noise):
    total = _clipped(parts)
    drawn = _noisy(torch.zeros(len(total) // 2).double(), noise_multiplier, ledger, noise)
    return total + drawn.repeat(2)


def the_same_noise_at_every_release(parts, *, noise_multiplier, ledger, noise):
    scale = noise_multiplier * Clipped(torch.zeros(1), JOINT_BOUND).sensitivity(ledger.relation)
    total = _clipped(parts)
    ledger.record(noise_multiplier, 1.0)
    return total + scale * torch.randn(len(total), generator=torch.Generator().manual_seed(7)).double()


def clipped_after_the_sum(parts, *, noise_multiplier, ledger, noise):
    total = torch.stack([part.nan_to_num(0, 0, 0).sum(0) for part in parts]).sum(0)
    return _noisy(_clipped([total[None]]), noise_multiplier, ledger, noise)


def halves_clipped_by_themselves(parts, *, noise_multiplier, ledger, noise):
    """A record contributes ``JOINT_BOUND`` to each half, so √2 times as much as is declared."""
    halves = zip(*(part.chunk(2, dim=1) for part in parts), strict=True)
    return _noisy(torch.cat([_clipped(half) for half in halves]), noise_multiplier, ledger, noise)


def divided_by_the_number_of_records(parts, *, noise_multiplier, ledger, noise):
    parts = list(parts)
    records = max(1, sum(map(len, parts)))
    return release_moments(parts, noise_multiplier=noise_multiplier, ledger=ledger, noise=noise) * 2 / (1 + records)


def clipped_in_the_first_part_alone(parts, *, noise_multiplier, ledger, noise):
    """Shows only if the records come in several parts, as they do in a run."""
    first, *others = [part for part in parts if len(part)] or [next(iter(parts))]
    total = torch.stack([_clipped([first]), *(part.nan_to_num(0, 0, 0).sum(0) for part in others)]).sum(0)
    return _noisy(total, noise_multiplier, ledger, noise)


def noise_for_one_record_more_or_less(parts, *, noise_multiplier, ledger, noise):
    return _noisy(_clipped(parts), noise_multiplier, ledger, noise, Relation.ADD_OR_REMOVE_ONE)


#: An audit that catches each of them.
BROKEN = {
    without_noise: "noise law",
    without_charge: "accounting",
    charged_as_sampled: "accounting",
    charged_for_one_half: "accounting",
    half_the_noise: "noise law",
    noise_on_the_means_alone: "linear map",
    the_same_noise_on_both_halves: "linear map",
    the_same_noise_at_every_release: "noise law",
    clipped_after_the_sum: "neighbours",
    halves_clipped_by_themselves: "neighbours",
    divided_by_the_number_of_records: "batch size",
    clipped_in_the_first_part_alone: "neighbours",
}

#: Those that only show for neighbours by replacement.
REPLACE_ONE = {noise_for_one_record_more_or_less: "noise law"}
