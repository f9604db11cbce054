"""What samples share has an entry for each of them: exact against a loop over samples, or refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.recorded_models import check, run
from tests.support.sharing_models import EXACT, REFUSED, Sharing, make
from torch import nn
from torch.utils.checkpoint import checkpoint

from spectral_dp.gradients import ModelGradients


@settings(max_examples=6, deadline=None)
@given(samples=st.integers(1, 7), tokens=st.integers(1, 6), seed=st.integers(0, 99))
@pytest.mark.parametrize("name", EXACT)
def test_is_exact(name, samples, tokens, seed):
    torch.manual_seed(seed)
    check(make(name), torch.randn(samples, tokens, 6).double())


@pytest.mark.parametrize("name", EXACT)
def test_as_many_samples_as_positions(name):
    """A table of B positions looks like B samples: taken for them, every sample would count in all B clips."""
    torch.manual_seed(0)
    check(make(name), torch.randn(4, 4, 6).double())


@pytest.mark.parametrize("name", EXACT)
def test_batches_of_changing_sizes_and_of_none(name):
    torch.manual_seed(0)
    model = make(name)
    gradients = ModelGradients(model)
    for samples in (5, 0, 1, 3, 2, 0):
        model(torch.randn(samples, 4, 6).double()).sum().backward()
        batch = gradients.take()
        assert batch.squared_norms().shape[1] == samples
        assert all(bool(v.isfinite().all()) for v in batch.clipped_sums(torch.ones(samples)).values())
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    gradients.remove()


@pytest.mark.parametrize("samples", [2, 4, 5])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_apart_is_refused(name, samples):
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match=REFUSED[name]) as error:
        run(make(name), torch.randn(samples, 4, 6).double())
    assert not any(digit in str(error.value) for digit in "23456789"), "the realised batch size is private"


@pytest.mark.parametrize("name", EXACT)
def test_in_bfloat16(name):
    torch.manual_seed(0)
    model, x = make(name), torch.randn(5, 3, 6)
    gradients, batch, dA = run(model.double(), x.double())
    expected = batch.squared_norms().sum(0)
    gradients.remove()
    model.float()
    gradients = ModelGradients(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    (out.float() * dA.float()).sum().backward()
    norms = gradients.take().squared_norms().sum(0)
    gradients.remove()
    torch.testing.assert_close(norms, expected, rtol=0.1, atol=0.1)


def test_views_of_a_sample_add_up():
    torch.manual_seed(0)
    model, x = make("tokens and positions"), torch.randn(6, 4, 6).double()
    gradients = ModelGradients(model)
    model(x).square().sum().backward()
    batch = gradients.take(views=2)
    gradients.remove()
    for b in range(3):
        model.zero_grad()
        model(x[2 * b : 2 * b + 2]).square().sum().backward()
        norm = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
        torch.testing.assert_close(batch.squared_norms().sum(0)[b], norm)


def test_the_model_computes_what_it_computed():
    for name in EXACT:
        torch.manual_seed(0)
        model, x = make(name), torch.randn(5, 4, 6).double()
        expected = model(x)
        gradients = ModelGradients(model)
        torch.testing.assert_close(model(x), expected)
        gradients.remove()


def test_dropout_of_what_samples_share_drops_the_same_for_all():
    class Dropped(Sharing):
        def forward(self, x):
            return self.out(x * 0 + nn.functional.dropout(self.gate, 0.5))

    torch.manual_seed(0)
    model = Dropped().double()
    gradients = ModelGradients(model)
    out = model(torch.randn(5, 2, 6).double())
    gradients.remove()
    assert bool((out == out[:1]).all())


def test_nothing_as_large_as_the_batch_is_copied():
    """The entries of a parameter are views of it, also beside what has rows of samples."""
    model = make("scaled")
    gradients = ModelGradients(model)
    seen = []
    model.register_forward_pre_hook(lambda m, _: seen.append(m.gate.wide))
    model(torch.randn(5, 4, 6).double())
    gradients.remove()
    assert seen[0].shape == (5, 6)
    assert seen[0].untyped_storage().data_ptr() == model.gate.untyped_storage().data_ptr()


def test_a_shared_tensor_that_leaves_the_model_is_refused_when_it_is_used():
    class Penalty(Sharing):
        def forward(self, x):
            return self.out(x * self.gate), self.gate

    model = Penalty().double()
    gradients = ModelGradients(model)
    out, gate = model(torch.randn(5, 4, 6).double())
    with pytest.raises(RuntimeError, match="weight_decay"):
        (out.sum() + gate.square().sum()).backward()
    gradients.remove()


class Times(torch.autograd.Function):
    """Torch does not ask a tensor subclass about a function of one's own."""

    @staticmethod
    def forward(ctx, x, gate):
        return x * gate.detach()

    @staticmethod
    def backward(ctx, dA):
        return dA, dA.flatten(0, -2).sum(0)


def times(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * gate)


def scripted(x, gate):
    return torch.jit.script(times)(x, gate)


def checkpointed(m, x):
    return m.out(checkpoint(lambda h, gate: torch.tanh(h * gate), m.layer(x), m.gate, use_reentrant=True))


NOT_FOLLOWED = {
    "a function of one's own": lambda m, x: m.out(Times.apply(m.layer(x), m.gate)),
    "a scripted function": lambda m, x: m.out(scripted(m.layer(x), m.gate)),
    "a reentrant checkpoint": checkpointed,
    "positions in a scripted function": lambda m, x: m.out(scripted(m.layer(x), m.positions(torch.arange(4)))),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_a_gradient_that_is_not_followed_is_an_error(name):
    """It was left out: the parameter got noise alone."""
    torch.manual_seed(0)
    model = type("Model", (Sharing,), {"forward": NOT_FOLLOWED[name]})().double()
    with pytest.raises(RuntimeError, match="cannot be followed through"):
        run(model, torch.randn(3, 4, 6).double())


def test_code_may_ask_whether_a_parameter_needs_a_gradient():
    """Told that it does not, a model took another way, which trained less."""

    def forward(m, x):
        gate = m.gate if m.gate.requires_grad and (m.gate * 2).requires_grad == torch.is_grad_enabled() else 1
        return m.out(torch.tanh(m.layer(x) * gate))

    torch.manual_seed(0)
    check(type("Model", (Sharing,), {"forward": forward})().double(), torch.randn(3, 4, 6).double())


def test_what_has_only_the_shape_of_a_parameter():
    def forward(m, x):
        return m.out(x * (m.gate + torch.zeros_like(m.gate) + m.gate.new_ones(6)))

    torch.manual_seed(0)
    check(type("Model", (Sharing,), {"forward": forward})().double(), torch.randn(3, 4, 6).double())
