"""What targets that are models have in common: samples through every layer, and through each alone."""

import dataclasses

import pytest
import torch
from tests.support import small_targets as small
from torch import nn
from torch.utils._pytree import tree_leaves

from spectral_dp import audit, convert_linear
from spectral_dp.audit.targets.excitations import Passage
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.audit.targets.target import SHORT

FAR = dataclasses.replace(small.CLAIM, max_grad_norm=1e6)  # nothing is clipped


def test_a_shape_or_a_batch():
    with pytest.raises(ValueError, match="give either input_shape"):
        audit.SpectralTarget(small.model(), small.CLAIM)


def test_dropout_is_no_part_of_the_release():
    """Else two releases of the same records would differ, and no exact audit could be made."""
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(36, 3))
    target = audit.SpectralTarget(model, small.CLAIM, input_shape=small.SHAPE, seed=0)
    records = target.ordinary(4, torch.Generator().manual_seed(0))
    assert torch.equal(target.release(records, Script()), target.release(records, Script()))
    assert model[1].p == 0.5, "a copy is audited"


@pytest.mark.parametrize("is_converted", [False, True])
def test_nor_is_that_inside_of_an_attention(is_converted):
    """It is a plain number there, and in modules that call F.dropout. The model must not be accused of it."""
    model = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.5, batch_first=True)
    model = convert_linear(model, block_size=4) if is_converted else model
    target = audit.SpectralTarget(model, small.CLAIM, batch=torch.randn(2, 3, 8), seed=0)
    records = target.ordinary(4, torch.Generator().manual_seed(0))
    assert torch.equal(target.release(records, Script()), target.release(records, Script()))
    assert model.self_attn.dropout == 0.5, "a copy is audited"


def test_a_model_that_draws_otherwise_is_refused():
    class Noisy(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.randn(len(x), 3)

    with pytest.raises(ValueError, match="draws random numbers in its forward pass"):
        audit.SpectralTarget(nn.Sequential(nn.Flatten(), Noisy(36, 3)), small.CLAIM, input_shape=small.SHAPE)


def test_one_record_for_several_layers_does_what_each_would_do():
    target = audit.SpectralTarget(small.model(), FAR, input_shape=small.SHAPE, seed=0)
    blocks = {block.layer: block for block in target.blocks(2, torch.Generator().manual_seed(0))}
    records = [block.record(torch.ones(len(block.labels)), 100.0) for block in blocks.values()]
    alone = [target.release([record], Script()) for record in records]
    assert len(alone) == 3
    torch.testing.assert_close(target.release([target.together(records)], Script()), sum(alone))


def test_mates_are_long_and_short_by_turns():
    """Batches of long records alone would not notice a clip that only acts on some lengths."""
    target = audit.SpectralTarget(small.model(), FAR, input_shape=small.SHAPE, seed=0)
    lengths = [target.release([mate], Script()).norm() / FAR.max_grad_norm for mate in target.mates(torch.Generator())]
    assert lengths == pytest.approx([1, SHORT[0], 1, SHORT[1]], rel=1e-3)


def test_hostile_records_say_whether_they_are_finite():
    target = small.target()
    for hostile in target.hostile(torch.Generator().manual_seed(0)):
        numbers = torch.cat([value.flatten() for value in tree_leaves(hostile.record) if torch.is_tensor(value)])
        assert bool(numbers.isfinite().all()) or not hostile.finite
        moved = target.release([hostile.record], Script()).norm()
        assert float(moved) <= small.CLAIM.max_grad_norm * (1 + 1e-5)


def test_a_layer_that_no_record_can_be_sent_to_is_named():
    """Catches a layer that is left out of the linear map without a word."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.unused, self.scale = nn.Linear(36, 3), nn.LSTM(2, 2), nn.PReLU()

        def forward(self, x):
            return self.scale(self.head(x.flatten(1)))

    target = audit.SpectralTarget(Shared(), small.CLAIM, input_shape=small.SHAPE, seed=0)
    assert target.left_out == ["unused"]
    generator = torch.Generator().manual_seed(0)
    found = audit.check_linear_map(target, audit.find_noise_map(target), target.blocks(1, generator), generator)
    assert found.ok
    assert "not looked at one by one: unused" in found.note
    assert small.target().left_out == []


def test_a_model_must_have_an_output_for_each_sample():
    class Total(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(36, 3)

        def forward(self, x):
            return self.head(x.flatten(1)).sum()

    with pytest.raises(ValueError, match="an entry for each sample"):
        audit.SpectralTarget(Total(), small.CLAIM, input_shape=small.SHAPE)


def test_samples_of_ones_own_are_tried():
    """As finite or not by what the model makes of them."""
    batch = torch.randn(3, *small.SHAPE)
    own = {"flat": torch.ones(1, *small.SHAPE), "hole": torch.full((1, *small.SHAPE), torch.nan)}
    target = audit.SpectralTarget(small.model(), small.CLAIM, batch=batch, hostile=own, seed=0)
    found = {h.name: h.finite for h in target.hostile(torch.Generator())}
    assert (found["flat"], found["hole"]) == (True, False)
    ordinary = target.ordinary(4, torch.Generator())
    assert all(torch.equal(record[0].sample[0], batch[k % 3]) for k, record in enumerate(ordinary))
    with pytest.raises(ValueError, match=r"hostile\['both'\] holds 2 samples"):
        audit.SpectralTarget(small.model(), small.CLAIM, batch=batch, hostile={"both": batch[:2]})


def test_a_gain_multiplies_what_reaches_the_layer():
    """Of a layer without a recipe; the gradient of a slope is linear in what comes in."""
    model = nn.Sequential(nn.Flatten(), nn.PReLU(), nn.Linear(36, 3))
    target = audit.SpectralTarget(model, FAR, input_shape=small.SHAPE, seed=0)
    u = torch.randn(36)
    one, ten = (Passage("1", target._samples[0], u, gain) for gain in (1.0, 10.0))
    torch.testing.assert_close(target.release([(ten,)], Script()), 10 * target.release([(one,)], Script()))
