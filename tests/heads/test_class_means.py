"""Private class means: what is released, how far one record moves it, its noise, and what is charged."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from tests.support.head_records import CLASSES, HOSTILE, clusters
from tests.support.silent import Silent

from spectral_dp import Relation
from spectral_dp.accounting import Ledger, gaussian_epsilon
from spectral_dp.heads import HeadError, private_class_means
from spectral_dp.heads.class_means import BOUND, class_sums
from spectral_dp.heads.records import unit_rows
from spectral_dp.mechanism.noise import SeededNoise
from spectral_dp.mechanism.release import release_sum


def made(rows, labels, sigma=1.0, **options):
    return private_class_means(
        rows, labels, CLASSES, **{"noise_multiplier": sigma, "ledger": Ledger(), "noise": Silent()} | options
    )


def released(rows, labels, *, sigma=1.0, relation=Relation.ADD_OR_REMOVE_ONE, noise=None):
    parts = [class_sums(rows, labels, CLASSES)]
    return release_sum(parts, noise_multiplier=sigma, ledger=Ledger(relation), noise=noise or Silent())


class TestWhatIsReleased:
    @pytest.mark.parametrize("centre", [None, torch.linspace(-1, 1, 12)])
    def test_without_noise_it_is_the_loop_over_records(self, centre):
        rows, labels = clusters(60)
        sums = np.zeros((CLASSES, 12))
        for row, label in zip(rows.double().numpy(), labels, strict=True):
            x = row - (0 if centre is None else centre.double().numpy())
            sums[label] += x / math.sqrt((x**2).sum())
        directions = torch.from_numpy(sums / np.linalg.norm(sums, axis=1, keepdims=True))
        head = made(rows, labels, centre=centre)
        assert torch.allclose(head.weight.double(), directions, atol=2e-5)
        if centre is not None:
            assert torch.allclose(head.bias.double(), -directions @ centre.double(), atol=1e-4)

    def test_it_classifies_with_noise(self):
        rows, labels = clusters(2000)
        head = made(rows, labels, 5.0, noise=SeededNoise(0, reproducibility_over_privacy=True))
        test, expected = clusters(500, seed=1)
        assert (head.module()(test.float()).argmax(1) == expected).float().mean() > 0.95

    def test_parts_do_not_matter(self, monkeypatch):
        rows, labels = clusters(50)
        whole = made(rows, labels)
        monkeypatch.setattr("spectral_dp.heads.records._ROWS_AT_ONCE", 7)
        assert torch.allclose(made(rows, labels).weight, whole.weight, atol=1e-6)

    def test_without_records_there_is_noise_alone(self):
        rows, labels = clusters(0)
        assert made(rows, labels, noise=None).weight.isfinite().all()

    @pytest.mark.parametrize("relation", list(Relation))
    def test_noise_has_the_claimed_law_and_no_other(self, relation):
        """Accepts the right scale, and rejects two thirds and three halves of it."""
        noise = SeededNoise(1, reproducibility_over_privacy=True)
        drawn = released(torch.zeros(0, 600).double(), torch.zeros(0).long(), sigma=3.0, relation=relation, noise=noise)
        scale = 3.0 * BOUND * (1 if relation is Relation.ADD_OR_REMOVE_ONE else 2)
        p_value = {f: stats.kstest(drawn.flatten() / (f * scale), "norm").pvalue for f in (2 / 3, 1, 3 / 2)}
        assert p_value[1] > 1e-3
        assert max(p_value[2 / 3], p_value[3 / 2]) < 1e-6


@pytest.mark.filterwarnings("ignore:some contributions")
class TestSensitivity:
    @pytest.mark.parametrize("prepare", [unit_rows, lambda rows: rows], ids=["unit", "raw"])
    @pytest.mark.parametrize("others", [0, 1, 30])
    @pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
    def test_one_record_moves_the_sum_by_at_most_the_bound(self, change, others, prepare):
        """Raw records too: the bound must not rest on somebody having made them of unit length."""
        rest, labels = clusters(others, seed=1)
        one = change(torch.randn(12).double())
        rows = torch.cat([rest.double(), one[None]])
        labels = torch.cat([labels, torch.tensor([2])])
        with_it, without = released(prepare(rows), labels), released(prepare(rows[:-1]), labels[:-1])
        assert (with_it - without).norm() <= BOUND

    @pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
    def test_replacing_one_and_its_class_moves_it_by_at_most_twice_the_bound(self, change):
        x, y = clusters(5)
        rows, labels = x.double(), y.clone()
        rows[0], labels[0] = change(-rows[0]), (labels[0] + 1) % CLASSES
        assert (released(rows, labels) - released(x.double(), y)).norm() <= 2 * BOUND

    def test_the_bound_is_reached(self):
        """Else there would be more noise than needed, or the tests above would see nothing."""
        assert released(torch.randn(1, 12).double() * 1e3, torch.tensor([1])).norm() > 0.9999 * BOUND

    def test_negative_control_without_the_clip_it_is_exceeded(self):
        rows = torch.randn(1, 12).double() * 1e3
        assert torch.zeros(CLASSES, 12).double().index_add_(0, torch.tensor([1]), rows).norm() > BOUND


class TestAccounting:
    def test_is_charged_as_one_unsampled_gaussian(self):
        ledger = Ledger()
        made(*clusters(10), sigma=8.0, ledger=ledger)
        assert ledger.phases == ((8.0, 1.0, 1),)
        assert ledger.epsilon(1e-5) == pytest.approx(gaussian_epsilon(8.0, 1e-5), rel=1e-3)

    def test_is_charged_before_it_is_released(self):
        ledger = Ledger()

        class Failing(Silent):
            def normal(self, shape, **_):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            made(*clusters(10), ledger=ledger, noise=Failing())
        assert ledger.steps == 1

    def test_what_is_refused_is_not_charged(self):
        ledger = Ledger()
        rows, labels = clusters(10)
        with pytest.raises(HeadError):
            made(rows, labels + CLASSES, ledger=ledger)
        with pytest.raises(HeadError, match="for each of the 12 features"):
            made(rows, labels, ledger=ledger, centre=torch.zeros(1))
        assert ledger.steps == 0

    def test_without_noise_nothing_is_guaranteed_and_it_says_so(self):
        ledger = Ledger()
        with pytest.warns(RuntimeWarning, match="not private"):
            made(*clusters(10), sigma=0.0, ledger=ledger)
        assert ledger.epsilon(1e-5) == math.inf
