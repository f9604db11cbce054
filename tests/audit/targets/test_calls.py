"""What layers are called with, and which part of it belongs to which sample."""

import pytest
import torch
from tests.support import sequence_targets as sequences
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from spectral_dp.audit.targets.calls import arguments_at, first_output, trace, weighed, with_gains
from spectral_dp.audit.targets.samples import InputForm


class Odd(nn.Module):
    """Layers with samples in the second dimension, in several rows each, or shared by all."""

    def __init__(self):
        super().__init__()
        self.rnn, self.shared, self.folded = nn.GRU(4, 4), nn.Embedding(5, 4), nn.Linear(4, 4)
        self.unused = nn.Linear(1, 1)

    def forward(self, x):
        x = x + self.shared(torch.arange(5))
        x = self.folded(x.flatten(0, 1)).view_as(x)
        return self.rnn(x.transpose(0, 1))[0][-1]


def test_the_dimension_of_the_samples_is_seen():
    torch.manual_seed(0)
    batch = torch.randn(5, 5, 4)  # as many samples as steps: sizes alone would not tell
    form = InputForm(batch)
    seen = trace(Odd(), form, form.samples(batch))
    assert (seen["rnn"].output_axis, seen["rnn"].output_shape, seen["rnn"].argument_axes) == (1, (5, 4), (1,))
    assert (seen["shared"].output_axis, seen["shared"].output_shape) == (None, (5, 4))
    assert torch.equal(seen["shared"].x, torch.arange(5))
    assert (seen["folded"].output_axis, seen["folded"].output_shape) == (0, (4,))
    assert "unused" not in seen


def test_packed_sequences_are_as_long_as_the_longest():
    target = sequences.recurrent()
    assert target._seen["lstm"].output_shape == (sequences.STEPS, sequences.WIDTH)
    assert target._seen["lstm"].output_axis == 0


def test_arguments_are_those_that_the_model_hands_over():
    torch.manual_seed(0)
    model, batch = Odd(), torch.randn(2, 5, 4)
    form = InputForm(batch)
    (x,), kwargs = arguments_at(model, model.rnn, form, form.samples(batch))
    assert kwargs == {}
    torch.testing.assert_close(model(batch), model.rnn(x)[0][-1])
    assert not x.requires_grad
    assert not model.rnn._forward_pre_hooks, "nothing stays behind"


@pytest.mark.parametrize("axis", [0, 1])
def test_gains_multiply_the_numbers_of_their_sample(axis):
    x, mask, gains = torch.ones(4, 4), torch.ones(4, dtype=torch.bool), torch.tensor([1.0, 10.0])
    (one, two, other), kwargs = with_gains(((x, x, mask), {"flag": 1}), [axis, axis, 0, None], gains)
    assert one is two, "queries, keys and values that are one tensor stay one"
    assert one.movedim(axis, 0)[:, 0].tolist() == [1, 1, 10, 10], "two rows each, side by side"
    assert other is mask
    assert kwargs == {"flag": 1}


def test_gains_of_packed_sequences():
    packed = pack_sequence([torch.ones(1, 2), torch.ones(3, 2)], enforce_sorted=False)
    (gained,), _ = with_gains(((packed,), {}), [0], torch.tensor([1.0, 10.0]))
    padded, lengths = pad_packed_sequence(gained, batch_first=True)
    assert lengths.tolist() == [1, 3]
    assert padded[:, :, 0].tolist() == [[1, 0, 0], [10, 10, 10]]


def test_the_first_real_output_is_found():
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    assert first_output((packed, None)).shape == (2, 3, 2)
    assert first_output({"count": torch.tensor(1), "logits": torch.ones(2)}).tolist() == [1, 1]
    assert first_output(torch.tensor(1)) is None


def test_weights_are_cut_to_the_output():
    weights = torch.tensor([[1.0, 100.0], [10.0, 100.0]])
    assert weighed(torch.ones(2, 1), 0, weights) == 11
    assert weighed(torch.ones(4), 0, torch.tensor([1.0, 10.0])) == 22, "two rows each"
