"""What a step of several processes consists of, each part measured by itself over a range of sizes.

Every part is a list of ``[size, seconds]``. The seconds are the least of some repetitions: what other programs take of
the processor only adds to them.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp import PrivacyEngine
from spectral_dp.mechanism.noise import NoiseSource, SecureNoise
from spectral_dp.training.coins import SecureCoins
from spectral_dp.training.distributed.ranks import current_ranks

Points = list[list[float]]

# Few milliseconds each, where that is enough: a short time is rarely interrupted by other programs.
SAMPLES = (32, 128, 512)
NUMBERS = (10_000, 100_000, 400_000)
RECORDS = (100_000, 1_000_000, 4_000_000)
BYTES = (40_000, 400_000, 4_000_000)
REPEATS, SHAPE = 25, (1, 32, 32)


class Silence(NoiseSource):
    """No noise: what drawing it costs is measured by itself."""

    is_private = False

    def normal(self, shape, *, dtype=torch.float32, device="cpu"):  # type: ignore[no-untyped-def]
        return torch.zeros(tuple(shape), dtype=dtype, device=device)


def least_seconds(act: Callable[[], object], repeats: int = REPEATS) -> float:
    """The shortest time that a function took, after one call that is not counted."""
    act()
    times = []
    for _ in range(repeats):
        began = perf_counter()
        act()
        times.append(perf_counter() - began)
    return min(times)


def parts_alone(model: nn.Module) -> dict[str, Points]:
    """Measures, in this process, clipped sums by samples, noise by numbers, and coins by records."""
    coins, noise = SecureCoins(), SecureNoise()
    return {
        "compute": [[n, _step_seconds(model, n)] for n in SAMPLES],
        "noise": [[n, least_seconds(lambda n=n: noise.normal((n,)))] for n in NUMBERS],  # type: ignore[misc]
        "sampling": [[n, least_seconds(lambda n=n: next(coins.tosses(n, 1e-4, 0, 0)))] for n in RECORDS],  # type: ignore[misc]
    }


def parts_together() -> dict[str, Points]:
    """Measures, on every rank of a group, all-reduces by bytes; the smallest is the meeting before a release."""
    ranks = current_ranks()
    assert ranks is not None
    points = [[0.0, least_seconds(lambda: ranks.meet("the benchmark"), 50)]]
    for count in BYTES:
        tensor = torch.zeros(count // 4)
        points.append([count, least_seconds(lambda tensor=tensor: dist.all_reduce(tensor))])  # type: ignore[misc]
    return {"all_reduce": points}


def _step_seconds(model: nn.Module, samples: int) -> float:
    """Of a private step on all of some samples, without the noise."""
    data = TensorDataset(torch.randn(samples, *SHAPE), torch.zeros(samples).long())
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data, batch_size=samples),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        rehearsal=False,
    )
    optimizer.noise = Silence()

    def step() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    return least_seconds(step)
