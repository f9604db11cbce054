"""Without Poisson sampling, what can be accounted for is replace-one at rate 1; everything else is refused."""

import math

import pytest
import torch
from tests.support.loops import N, cnn, images, mean_loss, private, train
from tests.support.privacy_checks import ScriptedNoise
from torch import nn
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from spectral_dp import PrivacyEngine, Relation
from spectral_dp.training.coins import SecureCoins
from spectral_dp.training.loaders import private_loader
from spectral_dp.training.sampling import PoissonLoader

BATCH = 32
AS_IT_IS = {"poisson_sampling": False, "sample_rate": 1.0}


def replace_one():
    return PrivacyEngine(relation=Relation.REPLACE_ONE, seed=0, reproducibility_over_privacy=True)


def test_the_caller_must_say_what_to_account_for():
    with pytest.raises(ValueError, match=r"REPLACE_ONE and sample_rate=1\.0"):
        private(cnn, poisson_sampling=False)


def test_replace_one_at_rate_one_is_accounted_for():
    engine, model, optimizer, loader = private(cnn, engine=replace_one(), **AS_IT_IS)
    assert not isinstance(loader, PoissonLoader)
    train(model, optimizer, loader)
    assert [tuple(phase) for phase in engine.accountant.history] == [(1.0, 1.0, 7)]


def test_add_or_remove_one_is_refused_at_rate_one():
    with pytest.raises(ValueError, match="moves every later one"):
        private(cnn, **AS_IT_IS)


def test_shuffling_is_not_accounted_as_poisson_sampling():
    with pytest.raises(ValueError, match=r"not Poisson sampling at rate 0\.16"):
        private(cnn, engine=replace_one(), poisson_sampling=False, sample_rate=BATCH / N)


class Favourites(Sampler):
    """The same record again and again."""

    def __iter__(self):
        return iter([0] * N)

    def __len__(self):
        return N


def with_sampler(sampler):
    model, engine = cnn(), replace_one()
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(images(), batch_size=BATCH, sampler=sampler),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **AS_IT_IS,
    )
    train(model, optimizer, loader)
    return engine.accountant.ledger.steps


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler(torch.ones(N), N),
        WeightedRandomSampler(torch.ones(N), N, replacement=False),
        RandomSampler(range(N), replacement=True),
        RandomSampler(range(N), num_samples=2 * N),
        SubsetRandomSampler([0, 1, 1]),
        Favourites(),
    ],
    ids=["weighted", "chosen by weight", "replaced", "two rounds in one", "a subset that repeats", "of the user"],
)
def test_a_sampler_that_may_draw_a_record_twice_is_refused(sampler):
    with pytest.raises(ValueError, match="twice into one batch"):
        with_sampler(sampler)


@pytest.mark.parametrize("sampler", [None, RandomSampler(range(N)), SubsetRandomSampler(range(N))])
def test_samplers_that_draw_each_once_are_not(sampler):
    assert with_sampler(sampler) == math.ceil(N / BATCH)


def test_batches_of_a_rehearsal_are_no_larger_than_those_of_the_loader():
    """Records of all sizes, one at a time: no more of them fit into a batch."""
    ragged = [(torch.randn(1, 6, 6), 0), (torch.randn(1, 6, 9), 1)] * 5
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    options = {"data": lambda: ragged, "batch_size": 1, **AS_IT_IS}
    engine, model, optimizer, loader = private(lambda: model, engine=replace_one(), **options)
    train(model, optimizer, loader)
    assert engine.accountant.ledger.steps == len(ragged)


@pytest.mark.parametrize("rate", [0.0, -1.0, 1.5, math.nan])
def test_rates_that_are_none_are_refused_at_once(rate):
    with pytest.raises(ValueError, match="sample_rate must be"):
        private(cnn, engine=replace_one(), poisson_sampling=False, sample_rate=rate)


def releases(dataset):
    """The clipped sums of an epoch in order, in units of the bound, noise off."""
    options = {"lr": 0.0, "max_grad_norm": 1e-3, "rehearsal": False} | AS_IT_IS
    _, model, optimizer, loader = private(cnn, engine=replace_one(), data=lambda: dataset, **options)
    optimizer.noise = ScriptedNoise()
    sums = []
    for x, y in loader:
        optimizer.zero_grad()
        mean_loss(model, x, y).backward()
        optimizer.step()
        sums.append(torch.cat([p.grad.flatten() for p in model.parameters()]) * BATCH / 1e-3)
    return sums


def test_replacing_a_record_changes_one_batch_and_removing_it_all_later_ones():
    """The reason, measured: add-or-remove-one allows a movement of 1, and accounts for it at every step."""
    x, y = images().tensors
    changed = x.clone()
    changed[3] = -x[3]
    before = releases(TensorDataset(x, y))
    replaced = releases(TensorDataset(changed, y))
    moves = [float((a - b).norm()) for a, b in zip(before, replaced, strict=True)]
    assert 0 < moves[0] <= 2
    assert moves[1:] == [0.0] * 6
    removed = releases(TensorDataset(torch.cat([x[:3], x[4:]]), torch.cat([y[:3], y[4:]])))
    moves = [float((a - b).norm()) for a, b in zip(before, removed, strict=True)]
    assert min(moves) > 0.1
    assert max(moves[:-1]) > 1


def test_a_loader_as_it_is_is_accounted_without_sampling_whatever_it_says_of_itself():
    """Opacus' loaders have a sample_rate attribute of their own."""
    given = DataLoader(images(), batch_size=BATCH)
    given.sample_rate = given.expected_batch_size = 0.01
    loader = private_loader(
        given, poisson_sampling=False, sample_rate=1.0, relation=Relation.REPLACE_ONE, coins=SecureCoins()
    )
    assert (loader.sample_rate, loader.expected_batch_size) == (1.0, BATCH)
