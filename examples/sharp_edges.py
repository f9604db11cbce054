"""Sharp edges of private training, each shown by a few lines that cut: what is refused, and what nobody can see.

    python examples/sharp_edges.py            # all of them
    python examples/sharp_edges.py skipped_step training_loss

docs/sharp-edges.md explains them. Each demonstration prints REFUSED with the error, or NOT COVERED with what leaks.
"""

import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp import PrivacyEngine, SeededNoise, perturb_sum
from spectral_dp.accounting import calibrate_noise, epsilon

DATA = TensorDataset(torch.randn(200, 8, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 2)


def private(model: nn.Module, **options):
    engine = PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(DATA, batch_size=40)
    made = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0, **options
    )
    return (engine, *made)


def train(model: nn.Module, loss=nn.functional.cross_entropy, **options) -> None:
    _, model, optimizer, loader = private(model, **options)
    for x, y in loader:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


def refused(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        print(f"REFUSED, {type(error).__name__}: {' '.join(str(error).split())[:400]}")
    else:
        raise AssertionError("this was expected to be refused")


class Centred(nn.Module):
    """Subtracts the mean over the batch: every record changes the output of every other."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x):
        return self.layer(x - x.mean(0))


class Remembers(nn.Module):
    """Keeps a running mean of raw inputs, which would be saved with the weights."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        with torch.no_grad():
            self.seen += x.sum(0)
        return self.layer(x)


def batch_statistics():
    """A model that centres its batch."""
    refused(lambda: train(Centred()))


def batch_norm():
    """BatchNorm in training mode."""
    refused(lambda: train(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))))


def wrong_reduction():
    """A loss that is a sum where a mean is expected."""
    refused(lambda: train(nn.Linear(8, 2), lambda out, y: nn.functional.cross_entropy(out, y, reduction="sum")))


def memory_in_the_model():
    """A model that keeps something of its inputs."""
    refused(lambda: train(Remembers()))


def skipped_step():
    """A batch that is drawn and not stepped, because of what it holds."""

    def loop():
        _, model, optimizer, loader = private(nn.Linear(8, 2))
        for x, y in loader:
            if len(x) > 30 and not loader.current.is_rehearsal:
                continue
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    refused(loop)


def shuffled_batches():
    """Accounting for Poisson sampling while batches are shuffled."""
    refused(lambda: private(nn.Linear(8, 2), poisson_sampling=False))


def training_loss():
    """The loss on raw data, printed beside the model: it tells who was there."""
    model = nn.Linear(8, 2)
    x, y = DATA.tensors
    with_record = nn.functional.cross_entropy(model(x), y, reduction="sum").item()
    without = nn.functional.cross_entropy(model(x[1:]), y[1:], reduction="sum").item()
    print(
        f"NOT COVERED: the summed training loss is {with_record:.4f} with a record and {without:.4f} without it, and "
        "no noise lies between them. Do not publish losses, norms or counts of raw data"
    )


def stopping_early():
    """A loop that ends because of what a batch holds."""
    engine, model, optimizer, loader = private(nn.Linear(8, 2))
    marked = DATA.tensors[0][0]
    for _ in range(5):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            found = not loader.current.is_rehearsal and (x == marked).all(1).any()
            if found:
                break
        if found:
            break
    steps = engine.accountant.ledger.steps
    print(
        f"NOT COVERED: this loop stopped after {steps} steps, when a certain record had come. The ledger lists these "
        "steps and cannot know why they ended. Decide by what was released or held out"
    )


def several_records_of_one_person():
    """The unit of privacy is a record. A person with several has less."""
    sigma = calibrate_noise(2.0, 1e-5, 0.02, 1000)
    parts = ", ".join(f"{n} records: {epsilon(sigma / n, 0.02, 1000, 1e-5):.1f}" for n in (1, 2, 4))
    print(
        f"NOT COVERED: epsilon for a person with {parts} (if all of them are drawn together). Join what belongs to one "
        "person into one record"
    )


def looking_twice():
    """Ten runs with different settings, and the best is published: together they have spent more."""
    sigma = calibrate_noise(2.0, 1e-5, 0.02, 1000)
    together = epsilon(sigma, 0.02, 10_000, 1e-5)
    print(
        f"NOT COVERED: each of ten runs has epsilon 2.0, and all ten together {together:.1f}. Tune on public data, or "
        "account for the choice (docs/tuning.md)"
    )


def known_seed():
    """Noise from a seed that somebody knows."""
    records = torch.nn.functional.normalize(torch.randn(20, 16), dim=1)
    options = {"max_norm": 1.0, "noise_multiplier": 5.0}
    release = perturb_sum(records, **options, noise=SeededNoise(7, reproducibility_over_privacy=True))
    again = perturb_sum(0 * records, **options, noise=SeededNoise(7, reproducibility_over_privacy=True))
    left = (release - again - records.sum(0)).abs().max()
    print(
        f"NOT COVERED: whoever knows the seed draws the same noise and subtracts it; what is left differs from the "
        f"true sum by {left:.0e}. Seeds are for tests, and reproducibility_over_privacy says so"
    )


REFUSED = [batch_statistics, batch_norm, wrong_reduction, memory_in_the_model, skipped_step, shuffled_batches]
NOT_COVERED = [training_loss, stopping_early, several_records_of_one_person, looking_twice, known_seed]
EDGES = {edge.__name__: edge for edge in [*REFUSED, *NOT_COVERED]}


def main() -> None:
    asked = sys.argv[1:] or list(EDGES)
    if unknown := set(asked) - set(EDGES):
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}. Choose from {', '.join(EDGES)}")
    for name in asked:
        print(f"\n{name}: {EDGES[name].__doc__}")
        EDGES[name]()


if __name__ == "__main__":
    main()
