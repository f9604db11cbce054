"""Forward passes in which layers whose backward pass is taken over meet what samples share."""

import pytest
import torch
from tests.support.recorded_models import check, check_losses, run
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

from spectral_dp.gradients import ModelGradients
from spectral_dp.gradients.recording.knowledge import Knowledge
from spectral_dp.gradients.recording.passes import Pass
from spectral_dp.gradients.rules.held import HeldRule


class Mixed(nn.Module):
    """Held parameters, shared positions, and a recurrent layer and an attention between them."""

    def __init__(self, forward, **options):
        super().__init__()
        self.embed, self.positions, self.out = nn.Linear(6, 6), nn.Embedding(8, 6), nn.Linear(6, 2)
        self.lstm, self.attention = nn.LSTM(6, 6, **options), nn.MultiheadAttention(6, 2, **options)
        self.gate, self.token = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(1, 1, 6))
        self.register_buffer("grid", torch.randn(4, 4, 6))
        self.run, self.first = forward, options["batch_first"]

    def attend(self, q, k):
        q, k = (t if self.first else t.transpose(0, 1) for t in (q, k))
        out = self.attention(q, k, k)[0]
        return out if self.first else out.transpose(0, 1)

    def read(self, x):
        out = self.lstm(x if self.first else x.transpose(0, 1))[0]
        return out if self.first else out.transpose(0, 1)

    def forward(self, x):
        return self.out(self.run(self, x))


def between(m, x):
    x = torch.cat([m.token.expand(len(x), -1, -1), m.embed(x)], 1) + m.positions(torch.arange(x.shape[1] + 1))
    return m.gate * m.attend(x * m.gate, m.read(x)) + m.positions(torch.arange(x.shape[1]))


def of_the_batch_itself(m, x):
    return m.gate * (m.read(x) + m.attend(x, x))


def of_what_was_made_of_it(m, x):
    """Neither needs a gradient nor is what the model was given: a trial tells that it has rows of samples."""
    return m.gate * m.read(x.cos()) + m.attend(x.sin(), x.cos())


def learnt_queries(m, x):
    return m.attend(m.token.expand(len(x), -1, -1) * m.gate, m.embed(x))


EXACT = (between, of_the_batch_itself, of_what_was_made_of_it, learnt_queries)


@pytest.mark.parametrize("samples", [1, 2, 4, 5])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("forward", EXACT)
def test_is_exact(forward, batch_first, samples):
    torch.manual_seed(samples)
    check(Mixed(forward, batch_first=batch_first).double(), torch.randn(samples, 4, 6).double())


def test_the_parameters_are_held_and_not_run_again():
    gradients = ModelGradients(Mixed(between, batch_first=True))
    gradients.remove()
    assert {type(rule).__name__ for block in gradients.blocks for _, rule in block} == {
        HeldRule.__name__, "LinearRule", "EmbeddingRule", "RecurrentRule", "AttentionRule",
    }  # fmt: skip


@pytest.mark.parametrize("forward", EXACT)
def test_dropout_inside_is_that_of_the_forward_pass(forward):
    """Trial runs in between draw no numbers."""
    torch.manual_seed(0)
    model = Mixed(forward, batch_first=True).double()
    model.attention.dropout = 0.5
    model.lstm = nn.LSTM(6, 6, 2, dropout=0.5, batch_first=True).double()
    check_losses(model, lambda m, x: m(x).sin().flatten(1).sum(1), torch.randn(5, 4, 6).double(), draws=True)


def test_an_empty_batch():
    model = Mixed(between, batch_first=False)
    gradients = ModelGradients(model)
    model(torch.randn(0, 4, 6)).sum().backward()
    batch = gradients.take()
    gradients.remove()
    assert batch.squared_norms().shape[1] == 0
    assert all(not bool(v.any()) for v in batch.clipped_sums(torch.ones(0)).values())


REFUSED = {
    "positions": lambda m, x: x + m.read(m.positions(torch.arange(x.shape[1]))[None]),
    "gate": lambda m, x: x + m.attend(m.token * m.gate, m.token),
    "a buffer as long as the batch": lambda m, x: x + m.read(m.grid).sum(0),
    "one row": lambda m, x: x + m.attend(m.grid[:1], m.grid[:1]),
    "folded": lambda m, x: x + m.read(m.embed(x).unflatten(1, (2, 2)).flatten(0, 1)).flatten(0, 1).view_as(x),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_shared_or_folded_is_refused(name, batch_first):
    """Four samples: as many as the buffer has rows."""
    torch.manual_seed(0)
    model = Mixed(REFUSED[name], batch_first=batch_first).double()
    with pytest.raises(RuntimeError, match=r"one row for each sample|that all samples share") as error:
        run(model, torch.randn(4, 4, 6).double())
    assert not any(digit in str(error.value).replace("-1", "").replace("1, 1", "") for digit in "0123456789")


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out, self.inner = nn.LSTM(3, 4), nn.Linear(4, 2), nn.Identity()
        self.gate = nn.Parameter(torch.randn(4))

    def forward(self, x, lengths):
        x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.lstm(x)[1][0][0] * self.gate)


@pytest.mark.parametrize("samples", [1, 3, 5])
def test_packed_sequences_beside_a_held_parameter(samples):
    """The first sample is the longest, so the trial without it has fewer steps."""
    torch.manual_seed(0)
    lengths = torch.tensor([5, 1, 3, 2, 3])[:samples]
    check_losses(Packed().double(), lambda m, *a: m(*a).sin().sum(1), torch.randn(samples, 5, 3).double(), lengths)


def test_a_model_that_is_given_a_packed_sequence():
    class Direct(Packed):
        def forward(self, x):
            return self.out(self.lstm(x)[1][0][0] * self.gate)

    torch.manual_seed(0)
    model, xs = Direct().double(), [torch.randn(n, 3).double() for n in (2, 4, 1, 4)]
    gradients = ModelGradients(model)
    model(pack_sequence(xs, enforce_sorted=False)).sin().sum().backward()
    norms = gradients.take().squared_norms().sum(0)
    gradients.remove()
    for b, x in enumerate(xs):
        found = torch.autograd.grad(model(pack_sequence([x])).sin().sum(), list(model.parameters()))
        torch.testing.assert_close(norms[b], sum(g.square().sum() for g in found))


def a_pass(samples, x):
    tried = []
    return Pass(nn.Identity(), (x,), {}, samples, Knowledge(), lambda p, _: tried.append(p)), tried


def test_what_the_model_was_given_needs_no_trial():
    x = torch.randn(4, 3)
    current, tried = a_pass(4, x)
    assert not current.is_shared(1, nn.Linear(3, 3), x[:, :2], torch.randn(4, 3))
    current.check_one_row_each(2, nn.LSTM(3, 3), x, torch.randn(4, 1, 3))
    assert not tried
    made = torch.randn(4, 3, requires_grad=True)
    assert not current.is_shared(3, nn.Linear(3, 3), made, torch.randn(4, 3)), "made of it by other layers"
    assert not tried
    assert not current.is_shared(4, nn.Linear(3, 3), made, torch.randn(4, 4)), "nothing speaks against it"
    assert tried == [current], "samples could have changed places with a dimension that is as long"


def test_rows_that_no_trial_could_tell_are_refused():
    """A table of as many positions as there are samples looks the same."""
    current, _ = a_pass(4, torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="cannot be told apart"):
        current.is_shared(1, nn.Linear(3, 3), torch.randn(4, 3), torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="one row for each sample"):
        current.check_one_row_each(2, nn.LSTM(3, 3), torch.randn(4, 1, 3), torch.randn(4, 1, 3))


def test_a_pass_that_is_over_holds_no_batch():
    current, _ = a_pass(4, torch.randn(4, 3))
    current.end()
    assert (current.is_over, current.args, current.kwargs) == (True, (), {})
