"""The other common idiom of Opacus scripts: physical batches that fit into memory."""

import pytest
import torch
from tests.support.opacus_runs import N, private_run, train

from spectral_dp import PrivacyEngine, Relation
from spectral_dp.utils.batch_memory_manager import BatchMemoryManager


def run(**options):
    return private_run(engine=PrivacyEngine(seed=3, reproducibility_over_privacy=True), **options)


def managed(optimizer, loader, limit):
    return BatchMemoryManager(data_loader=loader, max_physical_batch_size=limit, optimizer=optimizer)


@pytest.mark.parametrize("limit", [1, 3, 5, 100])
def test_only_memory_changes(limit):
    """Same batches, noise, weights and ledger as without; a logical step is one entry."""
    ends = []
    for with_manager in (False, True):
        engine, model, optimizer, loader = run(batch=12)
        if with_manager:
            with managed(optimizer, loader, limit) as smaller:
                for _ in range(2):
                    train(model, optimizer, smaller)
        else:
            for _ in range(2):
                train(model, optimizer, loader)
        assert len(engine.accountant) == optimizer.steps == 2 * len(loader)
        ends.append((engine.accountant.history, model.weight))
    assert ends[0][0] == ends[1][0]
    torch.testing.assert_close(ends[0][1], ends[1][1])


def test_physical_batches_keep_the_limit_from_the_first():
    """The small batches of the rehearsal too."""
    _, model, optimizer, loader = run(batch=N)
    sizes = []
    with managed(optimizer, loader, 5) as smaller:
        for x, y in smaller:
            sizes.append(len(x))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert max(sizes) == 5


def test_the_limit_ends_with_the_block():
    _, _, optimizer, loader = run(max_physical_batch_size=8)
    with managed(optimizer, loader, 4) as smaller, managed(optimizer, smaller, 6) as same:
        assert same is smaller is loader
        assert loader.max_physical_batch_size == 4, "the smaller of all limits"
    assert loader.max_physical_batch_size == 8
    with pytest.raises(KeyError), managed(optimizer, loader, 2):
        raise KeyError
    assert loader.max_physical_batch_size == 8


def test_gradients_are_cleared_after_the_step_in_other_scripts():
    engine, model, optimizer, loader = run(batch=12)
    with managed(optimizer, loader, 3) as smaller:
        for x, y in smaller:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(engine.accountant) == len(loader)


def test_a_piece_left_out_is_an_error():
    """As without it: what is skipped would be missing in the ledger."""
    _, model, optimizer, loader = run(rehearsal=False)

    def only_the_last(batches):
        for x, y in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            if loader.current.is_last:
                optimizer.step()

    with managed(optimizer, loader, 3) as smaller, pytest.raises(RuntimeError, match="was not stepped"):
        only_the_last(smaller)


def test_what_it_cannot_limit_is_refused():
    _, _, optimizer, loader = run()
    with pytest.raises(ValueError, match="at least 1, got 0"):
        managed(optimizer, loader, 0)
    with pytest.raises(TypeError, match="make_private of spectral_dp returned, got SGD"):
        managed(optimizer.original_optimizer, loader, 4)
    engine = PrivacyEngine(relation=Relation.REPLACE_ONE)
    *_, optimizer, counting = private_run(engine=engine, poisson_sampling=False, sample_rate=1.0)
    with pytest.raises(TypeError, match=r"CountingLoader makes its own batches.*smaller batch_size"):
        managed(optimizer, counting, 4)
