"""LSTM, GRU and RNN: gates of all layers, directions and steps against a loop over samples in float64."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.hostile import worst_move
from tests.support.recorded_models import check_losses
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from spectral_dp.gradients import ModelGradients
from spectral_dp.gradients.rules import recurrent
from spectral_dp.gradients.rules.recurrent import RecurrentRule
from spectral_dp.gradients.uses import Recorded

KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}
OUTPUTS = ("out", "h", "c", "all")


class Reader(nn.Module):
    """A recurrent layer behind a dense one, so that gradients flow on to what is before it."""

    def __init__(self, layer, n, *, packed=False, initial=False):
        super().__init__()
        self.layer, self.packed = layer, packed
        self.embed = nn.Linear(n, layer.input_size)
        states = layer.num_layers * (2 if layer.bidirectional else 1)
        self.sizes = [(states, layer.proj_size or layer.hidden_size)]
        if layer.mode == "LSTM":
            self.sizes.append((states, layer.hidden_size))
        self.starts = nn.ModuleList(nn.Linear(n, math.prod(size)) for size in self.sizes) if initial else None

    def forward(self, x, lengths):
        first = self.layer.batch_first
        hx = None
        if self.starts is not None:
            hx = [
                start(x[:, 0]).unflatten(1, size).transpose(0, 1).contiguous()
                for start, size in zip(self.starts, self.sizes, strict=True)
            ]
            hx = tuple(hx) if len(hx) == 2 else hx[0]
        x = self.embed(x)
        if not first:
            x = x.transpose(0, 1)
        if self.packed:
            x = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False)
        out, states = self.layer(x, hx)
        if self.packed:
            out = pad_packed_sequence(out, batch_first=first, total_length=5)[0]
        h, *c = states if isinstance(states, tuple) else (states,)
        by_sample = [out if first else out.transpose(0, 1), h.transpose(0, 1)] + [t.transpose(0, 1) for t in c]
        return by_sample


def loss_on(outputs):
    def losses(model, x, lengths):
        out, h, *c = model(x, lengths)
        parts = {"out": [out], "h": [h], "c": c or [h], "all": [out, h, *c]}[outputs]
        return sum((part.sin() * (k + 1)).flatten(1).sum(1) for k, part in enumerate(parts))

    return losses


def batch(n=4, samples=3):
    return torch.randn(samples, 5, n, dtype=torch.float64), torch.randint(1, 6, (samples,))


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    layers=st.integers(1, 3),
    bidirectional=st.booleans(),
    bias=st.booleans(),
    batch_first=st.booleans(),
    packed=st.booleans(),
    initial=st.booleans(),
    proj=st.booleans(),
    outputs=st.sampled_from(OUTPUTS),
    hidden=st.integers(2, 5),
    inputs=st.integers(1, 4),
    samples=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_equals_a_loop_over_samples(
    kind, layers, bidirectional, bias, batch_first, packed, initial, proj, outputs, hidden, inputs, samples, seed
):
    torch.manual_seed(seed)
    options = {"proj_size": 1 + seed % (hidden - 1)} if proj and kind == "lstm" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        layer = KINDS[kind](
            inputs, hidden, layers, bidirectional=bidirectional, bias=bias, batch_first=batch_first, **options
        )
    model = Reader(layer, 4, packed=packed, initial=initial).double()
    check_losses(model, loss_on(outputs), *batch(samples=samples))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_dropout_between_layers_is_that_of_the_forward_pass(kind, packed, bidirectional, batch_first):
    torch.manual_seed(0)
    layer = KINDS[kind](3, 4, 3, dropout=0.5, bidirectional=bidirectional, batch_first=batch_first)
    check_losses(Reader(layer, 4, packed=packed).double(), loss_on("all"), *batch(), draws=True)


def test_control_a_second_draw_is_refused(monkeypatch):
    """The masks of another draw give another output, and the rule sees it."""
    monkeypatch.setattr("spectral_dp.gradients.recording.random_state.RandomState._restore", lambda self: None)
    model = Reader(nn.LSTM(3, 8, 2, dropout=0.5, batch_first=True), 4).double()
    with pytest.raises(RuntimeError, match=r"another output.*drew other random numbers"):
        check_losses(model, loss_on("out"), *batch(samples=6), draws=True)


def test_dropout_in_evaluation_is_none():
    model = Reader(nn.GRU(3, 4, 2, dropout=0.5, batch_first=True), 4).double().eval()
    check_losses(model, loss_on("all"), *batch())


@pytest.mark.parametrize("frozen", [["weight_ih_l0"], ["weight_hh_l0", "bias_hh_l0"], ["weight_ih_l0", "weight_hh_l0"]])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_frozen_parameters(kind, frozen):
    layer = KINDS[kind](3, 4, batch_first=True)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    check_losses(Reader(layer, 4).double(), loss_on("all"), *batch())


@pytest.mark.parametrize("kind", KINDS)
def test_two_uses_are_added_before_the_norm(kind):
    class Twice(Reader):
        def forward(self, x, lengths):
            first = super().forward(x, lengths)
            return [a + b for a, b in zip(first, super().forward(x.cos(), lengths), strict=True)]

    check_losses(Twice(KINDS[kind](3, 4, batch_first=True), 4).double(), loss_on("all"), *batch())


def test_an_output_changed_in_place_is_computed_again():
    class InPlace(Reader):
        def forward(self, x, lengths):
            out, *states = super().forward(x, lengths)
            return [out.mul_(2), *states]

    check_losses(InPlace(nn.LSTM(3, 4, batch_first=True), 4).double(), loss_on("all"), *batch())


def test_nothing_of_the_size_of_batch_times_parameters_is_kept():
    model = nn.LSTM(8, 32, batch_first=True)
    gradients = ModelGradients(model)
    assert isinstance(gradients.blocks[0][0].rule, RecurrentRule)
    model(torch.randn(6, 3, 8))[0].sum().backward()
    (capture,) = gradients._recorder._captures.found[model]
    gradients.remove()
    assert isinstance(capture.kept, Recorded)
    (one,) = capture.kept.x.maps
    assert (one.x.shape, one.dA.shape) == ((6, 3, 40), (6, 3, 128))


def test_the_generator_is_only_kept_where_it_was_drawn_from():
    model = nn.LSTM(2, 2, 2, dropout=0.5)
    gradients, seen = ModelGradients(model), []
    original = RecurrentRule.open
    RecurrentRule.open = lambda self, call, dA: seen.append(call.random_state) or original(self, call, dA)
    try:
        for training in (True, False):
            model.train(training)
            model(torch.randn(3, 2, 2))[0].sum().backward()
    finally:
        RecurrentRule.open = original
        gradients.remove()
    assert seen[0] is not None
    assert seen[1] is None


@pytest.mark.parametrize("kind", KINDS)
def test_under_activation_checkpointing(kind):
    class Saving(Reader):
        def forward(self, x, lengths):
            return checkpoint(super().forward, x, lengths, use_reentrant=False)

    check_losses(Saving(KINDS[kind](3, 4, 2, batch_first=True), 4).double(), loss_on("all"), *batch())


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_under_autocast(kind):
    """Norms are those of float32 to the precision of the forward pass, and dropout is recognised all the same."""
    torch.manual_seed(0)
    model = Reader(KINDS[kind](3, 16, 2, dropout=0.5, batch_first=True), 4)
    norms = []
    x, lengths = batch()
    for enabled in (False, True):
        gradients = ModelGradients(model)
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = loss_on("out")(model, x.float(), lengths).sum()
        loss.backward()
        norms.append(gradients.take().squared_norms().sum(0))
        gradients.remove()
    assert torch.allclose(*norms, rtol=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_empty_batch_has_zero_sums(kind, dropout):
    model = Reader(KINDS[kind](3, 4, 2, bidirectional=True, batch_first=True, dropout=dropout), 4)
    gradients = ModelGradients(model)
    loss_on("all")(model, torch.randn(0, 5, 4), torch.zeros(0).long()).sum().backward()
    recorded = gradients.take()
    gradients.remove()
    assert recorded.squared_norms().shape == (2, 0)
    assert all(not bool(value.any()) for value in recorded.clipped_sums(torch.ones(0)).values())


def test_an_unbatched_sequence_is_refused():
    model = nn.LSTM(2, 2)
    gradients = ModelGradients(model)
    with pytest.raises(ValueError, match="unbatched"):
        model(torch.randn(3, 2))[0].sum().backward()
    gradients.remove()


def move_of(make):
    return worst_move(make, 12, 6, outputs=lambda model, x: model(x)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_no_record_moves_the_sums_further_than_the_bound(kind):
    assert 0.5 < move_of(lambda: KINDS[kind](6, 5, batch_first=True, bidirectional=True)) <= 1 + 1e-5


def test_control_norms_of_steps_added_up_are_caught(monkeypatch):
    """A rule that forgets that the steps share their weights clips too little."""
    monkeypatch.setattr(
        "spectral_dp.gradients.rules.dense_maps.token_norms",
        lambda x, dA: (x.square().sum(2) * dA.square().sum(2)).sum(1),
    )
    assert move_of(lambda: nn.RNN(6, 5, batch_first=True)) > 1.2


def test_control_gates_of_another_order_are_caught(monkeypatch):
    monkeypatch.setattr(recurrent, "CELLS", {**recurrent.CELLS, "LSTM": recurrent.CELLS["GRU"]})
    with pytest.raises((AssertionError, RuntimeError)):
        check_losses(Reader(nn.LSTM(3, 4, batch_first=True), 4).double(), loss_on("all"), *batch())


SHARED = [("weight_hh_l1", "weight_hh_l0"), ("weight_ih_l0_reverse", "weight_ih_l0"), ("bias_hh_l0", "bias_ih_l0")]


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize(("name", "other"), SHARED)
def test_a_parameter_that_layers_or_directions_share_gets_the_sum_of_its_gradients(kind, name, other):
    """The maps of the second name were dropped: the parameter was trained on the uses of the first alone."""
    torch.manual_seed(0)
    layer = KINDS[kind](3, 3, num_layers=2, bidirectional=True, batch_first=True)
    setattr(layer, name, getattr(layer, other))
    check_losses(Reader(layer, 4, packed=True, initial=True).double(), loss_on("all"), *batch())


@pytest.mark.parametrize("was_training", [False, True])
def test_dropout_is_that_of_the_forward_pass_in_whatever_mode_the_backward_pass_finds_the_layer(was_training):
    torch.manual_seed(0)
    model = Reader(nn.LSTM(3, 3, num_layers=2, dropout=0.5, batch_first=True), 4).double()

    def losses(model, *inputs):
        model.train(was_training)
        value = loss_on("out")(model, *inputs)
        model.train(not was_training)
        return value

    check_losses(model, losses, *batch(samples=6), draws=was_training)
