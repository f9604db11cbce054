"""Private least squares: the joint release of Gram matrix and moments, its bound, its noise, and what is charged."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from tests.support.head_records import CLASSES, HOSTILE, clusters
from tests.support.silent import Silent

from spectral_dp import Relation
from spectral_dp.accounting import Ledger
from spectral_dp.heads import HeadError, private_least_squares, random_projection
from spectral_dp.heads.least_squares import (
    gram_and_moments,
    joint_bound,
    packed,
    ridge_of_noise,
    ridge_solution,
    unpacked,
)
from spectral_dp.heads.records import unit_rows
from spectral_dp.mechanism.clipping import clip_and_sum
from spectral_dp.mechanism.noise import SeededNoise
from spectral_dp.mechanism.release import release_sum

WEIGHTS = [0.25, 1.0, 3.0]


def made(rows, labels, sigma=1.0, **options):
    common = {"noise_multiplier": sigma, "ledger": Ledger(), "noise": Silent(), "records": max(len(rows), 1)}
    return private_least_squares(rows, labels, CLASSES, **common | options)


def contributions(x, labels, w, *, off_diagonal=2**0.5):
    """What each record contributes, formed one by one: the oracle."""
    found = []
    for row, label in zip(x.double(), labels, strict=True):
        outer = torch.outer(row, row)
        triangle = [outer[i, j] * (1 if i == j else off_diagonal) for i in range(len(row)) for j in range(i, len(row))]
        moments = torch.zeros(CLASSES, len(row)).double()
        moments[label] = w * row
        found.append(torch.cat([torch.stack(triangle), moments.flatten()]))
    return torch.stack(found)


class TestWhatIsReleased:
    @pytest.mark.filterwarnings("ignore:some contributions")
    @pytest.mark.parametrize("w", WEIGHTS)
    @pytest.mark.parametrize("length", [0.3, 1.0, 20.0, math.inf])
    def test_it_is_the_clipped_sum_of_the_vectors_of_the_records(self, w, length):
        x, labels = clusters(9, features=5)
        x = unit_rows(x)
        x[0] *= length
        dense = clip_and_sum(contributions(x, labels, w), joint_bound(w))
        found = gram_and_moments(x, labels, CLASSES, w)
        assert torch.allclose(found.value, dense.value, rtol=1e-12, atol=1e-12)
        assert (found.max_norm, found.nonfinite) == (dense.max_norm, dense.nonfinite)

    @pytest.mark.parametrize("centre", [None, torch.linspace(-1, 1, 12)])
    @pytest.mark.parametrize("dimensions", [12, 6])
    def test_without_noise_it_is_the_ridge_regression(self, centre, dimensions):
        rows, labels = clusters(300)
        projection = random_projection(12, dimensions)
        head = made(rows, labels, 1e-9, centre=centre, projection=projection)
        x = unit_rows(rows, centre, projection).numpy()
        y = np.eye(CLASSES)[labels]
        weight = np.linalg.solve(x.T @ x / 300 + 1e-6 * np.eye(dimensions), x.T @ y / 300).T
        weight = weight if projection is None else weight @ projection.numpy().T
        assert torch.allclose(head.weight.double(), torch.from_numpy(weight), rtol=1e-3, atol=1e-3)
        if centre is not None:
            assert torch.allclose(head.bias, -head.weight @ centre, atol=1e-3)

    def test_it_classifies_with_noise(self):
        rows, labels = clusters(2000)
        head = made(rows, labels, 5.0, noise=SeededNoise(0, reproducibility_over_privacy=True))
        test, expected = clusters(500, seed=1)
        assert (head.module()(test.float()).argmax(1) == expected).float().mean() > 0.95

    def test_parts_do_not_matter(self, monkeypatch):
        rows, labels = clusters(50)
        whole = made(rows, labels)
        monkeypatch.setattr("spectral_dp.heads.records._ROWS_AT_ONCE", 7)
        assert torch.allclose(made(rows, labels).weight, whole.weight, atol=1e-5)

    def test_without_records_there_is_noise_alone(self):
        assert made(*clusters(0), noise=None).weight.isfinite().all()

    @pytest.mark.parametrize("relation", list(Relation))
    def test_noise_has_the_claimed_law_and_no_other(self, relation):
        """In every number of the joint vector: accepts the right scale, rejects two thirds and three halves of it."""
        noise, w = SeededNoise(1, reproducibility_over_privacy=True), 2.0
        part = gram_and_moments(torch.zeros(0, 40).double(), torch.zeros(0).long(), CLASSES, w)
        drawn = release_sum([part], noise_multiplier=3.0, ledger=Ledger(relation), noise=noise)
        scale = 3.0 * math.sqrt(1 + w**2) * (1 if relation is Relation.ADD_OR_REMOVE_ONE else 2)
        for stretch in (drawn[:820], drawn):
            p_value = {f: stats.kstest(stretch / (f * scale), "norm").pvalue for f in (2 / 3, 1, 3 / 2)}
            assert p_value[1] > 1e-3
            assert max(p_value[2 / 3], p_value[3 / 2]) < 1e-6

    def test_the_vector_has_the_frobenius_norm_and_can_be_undone(self):
        x = torch.randn(7, 6).double()
        gram, moments = x.T @ x, torch.randn(CLASSES, 6).double()
        vector = packed(gram, moments, 0.5)
        assert vector.norm() == pytest.approx(math.hypot(gram.norm(), 0.5 * moments.norm()))
        for one, two in zip(unpacked(vector, 6, 0.5), (gram, moments), strict=True):
            assert torch.allclose(one, two)


@pytest.mark.filterwarnings("ignore:some contributions")
class TestSensitivity:
    @pytest.mark.parametrize("w", WEIGHTS)
    @pytest.mark.parametrize("prepare", [unit_rows, lambda rows: rows], ids=["unit", "raw"])
    @pytest.mark.parametrize("others", [0, 30])
    @pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
    def test_one_record_moves_the_sum_by_at_most_the_bound(self, change, others, prepare, w):
        """Raw records too: the bound must not rest on somebody having made them of unit length."""
        rest, labels = clusters(others, seed=1)
        rows = torch.cat([rest.double(), change(torch.randn(12).double())[None]])
        labels = torch.cat([labels, torch.tensor([2])])
        with_it = gram_and_moments(prepare(rows), labels, CLASSES, w)
        without = gram_and_moments(prepare(rows[:-1]), labels[:-1], CLASSES, w)
        assert (with_it.value - without.value).norm() <= with_it.sensitivity()

    @pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
    def test_replacing_one_and_its_class_moves_it_by_at_most_what_is_declared(self, change):
        x, y = clusters(5)
        rows, labels = x.double(), y.clone()
        rows[0], labels[0] = change(-rows[0]), (labels[0] + 1) % CLASSES
        one, two = gram_and_moments(rows, labels, CLASSES), gram_and_moments(x.double(), y, CLASSES)
        assert (one.value - two.value).norm() <= one.sensitivity(Relation.REPLACE_ONE)

    @pytest.mark.parametrize("w", WEIGHTS)
    def test_the_bound_is_reached(self, w):
        found = gram_and_moments(unit_rows(torch.randn(1, 12)), torch.tensor([1]), CLASSES, w)
        assert found.value.norm() > 0.9999 * found.max_norm

    def test_negative_control_without_the_clip_it_is_exceeded(self):
        assert contributions(torch.full((1, 12), 1.0), [1], 1.0).norm() > joint_bound(1.0)

    def test_negative_control_other_weights_than_declared_exceed_it(self):
        """Doubles whose vector is not the one that the bound was computed for, on a record of unit length."""
        x = unit_rows(torch.ones(1, 12))
        assert contributions(x, [1], 1.0).norm() <= joint_bound(1.0) + 1e-12
        whole_matrix_of_root_two = contributions(x, [1], 1.0, off_diagonal=2.0)
        assert whole_matrix_of_root_two.norm() > 1.1 * joint_bound(1.0)
        moments_of_weight_two = contributions(x, [1], 2.0)
        assert moments_of_weight_two.norm() > 1.1 * joint_bound(1.0)
        each_within_a_bound_of_its_own = 1.0
        assert contributions(x, [1], 1.0).norm() > 1.1 * each_within_a_bound_of_its_own


class TestSolution:
    def test_negative_eigenvalues_count_as_zero(self):
        gram, moments = torch.diag(torch.tensor([4.0, -1.0])).double(), torch.ones(1, 2).double()
        assert ridge_solution(gram, moments, 0.5).tolist() == [[pytest.approx(1 / 4.5), pytest.approx(2.0)]]

    def test_the_ridge_is_half_of_what_noise_alone_has_as_its_largest_eigenvalue(self):
        d, deviation = 200, 3.0
        noise = torch.randn(d * (d + 1) // 2 + d, generator=torch.Generator().manual_seed(0)).double() * deviation
        gram, _ = unpacked(noise, d, 1.0)
        assert ridge_of_noise(deviation, d) == pytest.approx(torch.linalg.eigvalsh(gram).max().item() / 2, rel=0.1)

    def test_hardly_any_noise_leaves_a_least_ridge(self):
        assert ridge_of_noise(0.0, 5) > 0


class TestAccounting:
    def test_is_charged_as_one_unsampled_gaussian_before_it_is_released(self):
        ledger = Ledger()

        class Failing(Silent):
            def normal(self, shape, **_):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            made(*clusters(10), 8.0, ledger=ledger, noise=Failing())
        assert ledger.phases == ((8.0, 1.0, 1),)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"projection": random_projection(11, 5)}, "11 features does not fit records of 12"),
            ({"projection": torch.ones(12)}, "a finite matrix"),
            ({"projection": torch.ones(12, 0)}, "a finite matrix"),
            ({"projection": torch.full((12, 5), torch.nan)}, "a finite matrix"),
            ({"centre": torch.zeros(1)}, "for each of the 12 features"),
            ({"records": 0}, "must be positive"),
            ({"records": math.nan}, "must be positive and finite"),
            ({"moment_weight": 0.0}, "must be positive"),
            ({"moment_weight": math.inf}, "must be positive and finite"),
            ({"noise_multiplier": -1.0}, "at least 0"),
        ],
    )
    def test_what_is_refused_is_not_charged(self, options, message):
        ledger = Ledger()
        with pytest.raises(HeadError, match=message):
            made(*clusters(10), **{"ledger": ledger} | options)
        assert ledger.steps == 0

    def test_too_many_features_say_how_to_have_fewer(self):
        with pytest.raises(HeadError, match=r"project to 256 dimensions or fewer.*random_projection"):
            made(torch.zeros(3, 300), torch.zeros(3).long())
