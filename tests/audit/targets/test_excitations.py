"""Records make the gradients they promise, through the step of the library."""

import dataclasses

import pytest
import torch
from tests.support import small_targets as small
from tests.support.block_map import find_block_map
from torch import nn

from spectral_dp import BlockCirculantLinear, SpectralConfig, audit
from spectral_dp.audit.targets.excitations import MOST_DIRECTIONS, chosen_directions, spread
from spectral_dp.audit.targets.noise_control import Script
from spectral_dp.audit.targets.target import Kind
from spectral_dp.gradients import LayerConfig
from spectral_dp.mechanism.filters import LowPassFilter

FAR = dataclasses.replace(small.CLAIM, max_grad_norm=1e6)  # nothing is clipped


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.norm(self.embedding(x))).mean(1)


MODELS = {
    "small": (small.model, torch.zeros(small.SHAPE)),
    "strided": (lambda: nn.Conv2d(4, 6, (3, 2), stride=2, padding=1, dilation=(1, 2), groups=2), torch.zeros(4, 9, 8)),
    "reflected": (lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), torch.zeros(1, 6, 6)),
    "one dimension": (lambda: nn.Conv1d(2, 3, 5, padding=2), torch.zeros(2, 12)),
    "tokens": (lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), BlockCirculantLinear(4, 6, 3)), torch.zeros(3, 5)),
    "embedding": (lambda: nn.Embedding(5, 3, padding_idx=4), torch.tensor([1, 2])),
    "cut blocks": (lambda: nn.Sequential(nn.Flatten(), BlockCirculantLinear(10, 7, 4)), torch.zeros(1, 2, 5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_record_makes_the_gradient_it_promises(name):
    """The gradient at its support is the signal, and nothing else moves but a bias, by one."""
    make, example = MODELS[name]
    target = audit.SpectralTarget(make(), FAR, batch=example[None], seed=0)
    generator = torch.Generator().manual_seed(0)
    for block in target.blocks(3, generator):
        direction = torch.randn(len(block.labels), generator=generator)
        released = target.release([block.record(direction, 100.0)], Script())
        signal = 100 * (direction / direction.norm()).double() @ block.basis
        at = released[block.support][: len(signal)]
        if block.name != "bias":
            torch.testing.assert_close(at, signal, rtol=1e-4, atol=1e-3)
        assert released.norm() == pytest.approx(100, rel=1e-3)


def test_layers_without_a_recipe_get_records_all_the_same():
    target = audit.SpectralTarget(Tokens(), small.CLAIM, batch=torch.tensor([[1, 2, 5]]), seed=0)
    generator = torch.Generator().manual_seed(0)
    assert {b.layer for b in target.blocks(2, generator)} == {"embedding", "norm", "head"}
    noise = audit.find_noise_map(target)
    assert audit.check_linear_map(target, noise, target.blocks(2, generator), generator).ok
    assert all(v.ok for v in audit.check_neighbours(target, generator))


def test_rows_of_padding_are_no_part_of_an_embedding():
    target = audit.SpectralTarget(nn.Embedding(5, 3, padding_idx=4), small.CLAIM, batch=torch.tensor([[1, 2]]), seed=0)
    names = [block.name for block in target.blocks(2, torch.Generator().manual_seed(0))]
    assert names == ["row 0", "row 3"], "the ends of what is trained"


@pytest.mark.parametrize("tokens", [5, 3])
def test_filtered_embeddings_are_looked_at_in_their_spectrum(tokens):
    """With fewer tokens than rows, too, of which a sample cannot reach all."""
    spectral = SpectralConfig(layers={"": LayerConfig(LowPassFilter(0.4))})
    batch = torch.arange(tokens)[None]
    target = audit.SpectralTarget(nn.Embedding(5, 3), small.CLAIM, batch=batch, spectral=spectral, seed=0)
    generator = torch.Generator().manual_seed(0)
    blocks = target.blocks(2, generator)
    assert [block.name for block in blocks] == ["column 0", "column 2"]
    noise = audit.find_noise_map(target)
    maps = find_block_map(target, noise, blocks[0])
    assert torch.linalg.matrix_rank(maps.Sigma, tol=1e-3) == 3
    assert torch.linalg.matrix_rank(maps.A, tol=1e-3) == 3
    assert audit.check_linear_map(target, noise, blocks, generator).ok


def test_filtered_dense_layers_are_looked_at_in_their_spectrum():
    model = nn.Sequential(nn.Flatten(), nn.Linear(32, 3))
    spectral = SpectralConfig(linear_ratio=0.5, input_layouts={"1": (2, 4, 4)})
    target = audit.SpectralTarget(model, small.CLAIM, input_shape=(2, 4, 4), spectral=spectral, seed=0)
    generator = torch.Generator().manual_seed(0)
    block = target.blocks(2, generator)[0]
    maps = find_block_map(target, audit.find_noise_map(target), block)
    kept = (maps.A.norm(dim=0) > 0.5).sum()
    assert 1 < kept <= 8
    torch.testing.assert_close(maps.A.norm(dim=0) > 1e-3, maps.A.norm(dim=0) > 0.99)


def test_of_many_the_first_and_the_last_are_always_tried():
    """Mistakes hide at the ends of a spectrum, which a random choice would rarely look at."""
    generator = torch.Generator().manual_seed(0)
    assert spread(3, 5, generator) == [0, 1, 2]
    for _ in range(20):
        chosen = spread(1000, 5, generator)
        assert (chosen[0], chosen[-1], len(chosen), len(set(chosen))) == (0, 999, 5, 5)
    directions = chosen_directions(torch.eye(MOST_DIRECTIONS + 1), generator)
    assert len(directions.labels) == MOST_DIRECTIONS
    assert (directions.kinds[0], directions.kinds[-1]) == (Kind.DC, Kind.LAST)
