"""Without Poisson sampling, what can be accounted for is replace-one at rate 1; everything else is refused."""

import math

import pytest
import torch
from loops import N, cnn, images, mean_loss, private, train
from privacy_checks import ScriptedNoise
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from spectral_dp import PrivacyEngine, Relation
from spectral_dp.sampling import PoissonLoader

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


def test_drawing_with_replacement_is_refused():
    model = cnn()
    sampler = WeightedRandomSampler(torch.ones(N), N)
    with pytest.raises(ValueError, match="twice into one batch"):
        replace_one().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(images(), batch_size=BATCH, sampler=sampler),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            **AS_IT_IS,
        )


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
