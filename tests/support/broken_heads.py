"""Broken one-shot heads, in place of what clips and sums their records, or of ``release_sum``: each has one fault.

The audit of the heads must catch all of them.
"""

import torch

from spectral_dp import Relation
from spectral_dp.accounting import Ledger
from spectral_dp.heads.class_means import class_sums
from spectral_dp.heads.least_squares import gram_and_moments, joint_bound, packed
from spectral_dp.mechanism.clipping import Clipped, clip_each, row_norms
from spectral_dp.mechanism.release import release_sum


def _factors(x, w=1.0):
    """What every number of a record's contribution is multiplied by, and the records without those not finite."""
    lengths = row_norms(x)
    norms = torch.hypot(lengths.square(), w * lengths)
    finite = x.where(norms.isfinite()[:, None], 0.0)
    return (joint_bound(w) / (norms * (1 + 1e-5))).clamp(max=1).nan_to_num(0)[:, None], finite


def _rows(x, labels, classes):
    return x.new_zeros(classes, x.shape[1]).index_add_(0, labels, x)


def gram_without_clip(x, labels, classes):
    """Forgets to clip, and says that it did."""
    x = x.nan_to_num(0, 0, 0)
    return Clipped(packed(x.T @ x, _rows(x, labels, classes), 1.0), joint_bound())


def gram_without_its_factor(x, labels, classes):
    """Clips the moments, but not the Gram matrix."""
    c, x = _factors(x)
    return Clipped(packed(x.T @ x, _rows(c * x, labels, classes), 1.0), joint_bound())


def moments_without_their_factor(x, labels, classes):
    """Clips the Gram matrix, but not the moments."""
    c, x = _factors(x)
    return Clipped(packed((c * x).T @ x, _rows(x, labels, classes), 1.0), joint_bound())


def moments_of_another_weight(x, labels, classes):
    """Weights the moments twice as much as the bound allows for."""
    c, x = _factors(x)
    return Clipped(packed((c * x).T @ x, _rows(c * x, labels, classes), 2.0), joint_bound(1.0))


def clipped_by_the_gram_matrix_alone(x, labels, classes):
    """Forgets the moments in the norm."""
    c = clip_each(x, joint_bound(), row_norms(x).square()).value
    x = x.where(row_norms(x).isfinite()[:, None], 0.0)
    return Clipped(packed(c.T @ x, _rows(c, labels, classes), 1.0), joint_bound())


def bound_of_the_gram_matrix_alone(x, labels, classes):
    """Declares the bound of the Gram matrix, but the moments stand beside it."""
    return Clipped(gram_and_moments(x, labels, classes).value, 1.0)


def both_triangles_in_one(x, labels, classes):
    """Weights what is off the diagonal by two, not by the root of two."""
    c, x = _factors(x)
    gram, d = (c * x).T @ x, x.shape[1]
    row, column = torch.triu_indices(d, d)
    triangle = gram[row, column] * torch.where(row == column, 1.0, 2.0)
    return Clipped(torch.cat([triangle, _rows(c * x, labels, classes).flatten()]), joint_bound())


def not_finite_ones_kept(x, labels, classes):
    """Leaves records that are not finite in the Gram matrix, where a factor of zero does not end them."""
    clipped = clip_each(x, joint_bound(), torch.hypot(row_norms(x).square(), row_norms(x)))
    return Clipped(packed(clipped.value.T @ x, _rows(clipped.value, labels, classes), 1.0), joint_bound())


def divided_by_the_number_of_records(x, labels, classes):
    return Clipped(gram_and_moments(x, labels, classes).value / max(1, len(x)), joint_bound())


def means_without_clip(x, labels, classes):
    """Forgets to clip, and says that it did."""
    return Clipped(_rows(x.nan_to_num(0, 0, 0), labels, classes), 1.0)


def in_the_rows_of_two_classes(x, labels, classes):
    """Adds a record to the row of its class, and to the next one: √2 times the bound."""
    one = class_sums(x, labels, classes).value
    return Clipped(one + one.roll(1, 0), 1.0)


def every_row_clipped_by_itself(x, labels, classes):
    """Clips after the sum."""
    return Clipped(clip_each(_rows(x.nan_to_num(0, 0, 0), labels, classes), 1.0).value, 1.0)


def without_noise(parts, *, noise_multiplier, ledger, noise):
    ledger.record(noise_multiplier, 1.0)
    return torch.stack([part.value for part in parts]).sum(0)


def without_charge(parts, *, noise_multiplier, ledger, noise):
    """Charges a ledger that nobody reads."""
    return release_sum(parts, noise_multiplier=noise_multiplier, ledger=Ledger(ledger.relation), noise=noise)


def half_the_noise(parts, *, noise_multiplier, ledger, noise):
    ledger.record(noise_multiplier, 1.0)
    return release_sum(parts, noise_multiplier=noise_multiplier / 2, ledger=Ledger(ledger.relation), noise=noise)


def noise_for_one_record_more_or_less(parts, *, noise_multiplier, ledger, noise):
    ledger.record(noise_multiplier, 1.0)
    other = Ledger(Relation.ADD_OR_REMOVE_ONE)
    return release_sum(parts, noise_multiplier=noise_multiplier, ledger=other, noise=noise)


#: What catches each of those that clip and sum the records, and of which method they are.
SUMS = {
    gram_without_clip: ("least-squares", "neighbours"),
    gram_without_its_factor: ("least-squares", "neighbours"),
    moments_without_their_factor: ("least-squares", "neighbours"),
    moments_of_another_weight: ("least-squares", "neighbours"),
    clipped_by_the_gram_matrix_alone: ("least-squares", "neighbours"),
    bound_of_the_gram_matrix_alone: ("least-squares", "noise law"),
    both_triangles_in_one: ("least-squares", "neighbours"),
    not_finite_ones_kept: ("least-squares", "neighbours, not finite"),
    divided_by_the_number_of_records: ("least-squares", "batch size"),
    means_without_clip: ("class-means", "neighbours"),
    in_the_rows_of_two_classes: ("class-means", "neighbours"),
    every_row_clipped_by_itself: ("class-means", "batch size"),
}

#: What catches each of those that release the sum.
RELEASES = {without_noise: "noise law", without_charge: "accounting", half_the_noise: "noise law"}


def _without_clip(z, max_norm, norms=None):
    return Clipped(z.nan_to_num(0, 0, 0), max_norm)


def _more_moments(gram, moments, moment_weight):
    return packed(gram, moments, 2 * moment_weight)


#: Faults within ``gram_and_moments``: a name in its module, and what stands there.
WITHIN = {"clip_each": _without_clip, "packed": _more_moments}
