"""Check B of the privacy proof where samples share positions, tokens and gates: no sample moves the sums beyond C."""

import math

import pytest
import torch
from tests.support.sharing_models import EXACT, make

from spectral_dp.gradients import ModelGradients
from spectral_dp.gradients.recording import captures
from spectral_dp.gradients.recording.passes import Pass
from spectral_dp.mechanism.clipping import clip_factors

C = 0.7
TOKENS = 3


def hostile_records():
    x = torch.randn(TOKENS, 6)
    nan, inf = x.clone(), x.clone()
    nan[1, 2], inf[0, 0] = math.nan, math.inf
    return [x, x * 1e6, x * 1e18, x * 1e30, torch.zeros_like(x), torch.ones_like(x) * 1e4, nan, inf]


def clipped_release(model, gradients, x):
    model(x).square().sum().backward()
    batch = gradients.take()
    c = clip_factors(batch.squared_norms().sum(0).sqrt(), C)
    return torch.cat([v.double().flatten() for v in batch.clipped_sums(c).values()])


def largest_move(model, size):
    gradients = ModelGradients(model)
    base = torch.randn(size, TOKENS, 6, dtype=next(model.parameters()).dtype)
    before = clipped_release(model, gradients, base)
    worst = 0.0
    for record in hostile_records():
        for place in (0, size):  # also as the first of those that a trial runs
            batch = torch.cat([base[:place], record[None].to(base.dtype), base[place:]])
            after = clipped_release(model, gradients, batch)
            assert bool(after.isfinite().all()), "a hostile sample made the release non-finite"
            worst = max(worst, float((after - before).norm()))
    gradients.remove()
    return worst


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", EXACT)
def test_no_sample_moves_the_sums_further_than_the_bound(name, dtype, size):
    torch.manual_seed(0)
    assert 0.5 * C < largest_move(make(name).to(dtype), size) <= C * (1 + 1e-5)


class TestControls:
    """The checks have power: without what this is about, they fail."""

    def test_a_table_of_positions_taken_for_samples_is_caught(self, monkeypatch):
        """As many positions as samples: its rows are clipped as if they were theirs, and each sample is in all."""
        monkeypatch.setattr(Pass, "is_shared", lambda *_: False)
        torch.manual_seed(0)
        model = make("positions without a row")
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith("positions"))
        gradients = ModelGradients(model)
        without_gradient = torch.full((TOKENS, TOKENS, 6), 40.0).double()  # tanh is flat there
        with_one = torch.cat([torch.randn(1, TOKENS, 6).double(), without_gradient[1:]])
        sums = []
        for x in (without_gradient, with_one):
            (1e6 * model(x).square()).sum().backward()
            batch = gradients.take()
            c = clip_factors(batch.squared_norms().sum(0).sqrt(), C)
            sums.append(batch.clipped_sums(c)[model.positions.weight])
        gradients.remove()
        assert float((sums[1] - sums[0]).norm()) > 1.5 * C

    def test_an_output_that_is_not_widened_is_caught(self, monkeypatch):
        monkeypatch.setattr(Pass, "is_shared", lambda *_: False)
        with pytest.raises((ValueError, RuntimeError)):
            largest_move(make("one row of positions"), 2)

    def test_rows_given_to_the_wrong_samples_are_caught(self, monkeypatch):
        """Interleaved rows that pass for neighbours give other norms than the loop over samples."""
        from tests.support.recorded_models import check

        monkeypatch.setattr(Pass, "is_shared", lambda *_: False)
        torch.manual_seed(0)
        with pytest.raises(AssertionError):
            check(make("interleaved input"), torch.randn(4, 3, 6).double())

    def test_entries_that_share_one_gradient_are_caught(self, monkeypatch):
        """What autograd does by itself: every entry gets the sum over the batch."""
        from tests.support.recorded_models import check

        original = captures.Captures.watch

        def summed(self, module, call, output, samples=None):
            if call.parameter is not None:
                output.register_hook(lambda dA: dA.sum(0, keepdim=True).expand_as(dA))
            original(self, module, call, output, samples)

        monkeypatch.setattr(captures.Captures, "watch", summed)
        torch.manual_seed(0)
        with pytest.raises(AssertionError):
            check(make("scaled"), torch.randn(4, 3, 6).double())
