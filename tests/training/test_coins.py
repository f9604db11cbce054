"""The law of Poisson sampling, through the loader that hands the batches out; and checks that reject other laws."""

import itertools
import os
import pickle

import numpy as np
import pytest
import torch
from tests.support.poisson import poisson_p_values, table
from torch.utils.data import DataLoader, TensorDataset

from spectral_dp import PrivacyEngine
from spectral_dp.training.coins import Coins, SecureCoins, SeededCoins
from spectral_dp.training.sampling import PoissonLoader

ALPHA = 1e-5  # the checks below also run on secret coins: one false alarm in thousands of runs
N, Q = 300, 0.1


def seeded(seed=0):
    return SeededCoins(seed, reproducibility_over_privacy=True)


def drawn_by_a_loader(coins, size=N, batch_size=N * Q, steps=600):
    """Which records each of so many steps of a Poisson loader holds."""
    loader = PoissonLoader(TensorDataset(torch.arange(size)), batch_size=batch_size, coins=coins)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    return table([x.tolist() for (x,) in itertools.islice(batches, steps)], size)


@pytest.mark.parametrize("coins", [None, SecureCoins(), seeded()], ids=["default", "secure", "seeded"])
def test_every_record_is_drawn_independently_at_the_rate(coins):
    drawn = drawn_by_a_loader(coins)
    assert drawn.shape == (600, N)
    assert drawn.max() == 1
    p_values = poisson_p_values(drawn, Q)
    assert min(p_values.values()) > ALPHA, p_values


# Negative controls: coins of another law, given to the loader, and batches drawn in other ways.


class Altered(Coins):
    """Seeded coins that somebody has meddled with."""

    is_private = False

    def __init__(self, meddle):
        self.meddle = meddle

    def tosses(self, size, sample_rate, epoch, first_step):
        return self.meddle(size, sample_rate, epoch, first_step)


@pytest.mark.parametrize("wrong", [2 / 3, 3 / 2])
def test_the_check_rejects_another_rate(wrong):
    p_values = poisson_p_values(drawn_by_a_loader(Altered(lambda n, q, *at: seeded().tosses(n, wrong * q, *at))), Q)
    assert p_values["rate"] < ALPHA
    assert p_values["inclusions of each record"] < ALPHA


def test_the_check_rejects_resampled_empty_batches():
    """Rejecting empty batches is a different mechanism: at an expected size of 1 it lifts the rate by half."""
    without_empty = Altered(lambda *at: filter(len, seeded().tosses(*at)))
    assert poisson_p_values(drawn_by_a_loader(without_empty, 50, 1, 3000), 0.02)["rate"] < ALPHA


def test_the_check_rejects_coins_tossed_once_an_epoch():
    """A generator seeded anew for each epoch repeats itself: the noise of two steps averages out on the same batch."""
    repeated = Altered(lambda n, q, epoch, step: seeded().tosses(n, q, 0, step))
    assert poisson_p_values(drawn_by_a_loader(repeated), Q)["steps an epoch apart"] < ALPHA


def test_the_check_rejects_shuffled_epochs():
    """The usual DataLoader: sizes fixed, every record once an epoch, never twice in a row."""
    shuffled = DataLoader(range(N), batch_size=30, shuffle=True)
    p_values = poisson_p_values(table([x.tolist() for _ in range(60) for x in shuffled], N), Q)
    assert p_values["size of each batch"] < ALPHA
    assert p_values["inclusions of each record"] < ALPHA
    assert p_values["consecutive steps"] < ALPHA


def test_the_check_rejects_batches_of_fixed_size():
    """Drawn afresh at every step, but without replacement: only the variance of the size gives it away."""
    rng = np.random.default_rng(0)
    p_values = poisson_p_values(table([rng.choice(N, 30, replace=False) for _ in range(600)], N), Q)
    assert p_values["size of each batch"] < ALPHA


def test_coins_beyond_one_chunk_are_fresh():
    size = 12 << 17
    drawn = next(seeded().tosses(size, 0.5, 0, 0))
    assert np.all(np.diff(drawn) > 0)
    chunks = table([drawn], size)[0].reshape(12, -1)
    assert min(poisson_p_values(chunks, 0.5).values()) > ALPHA


def test_coins_are_secret_unless_something_else_is_asked_for():
    loader = PoissonLoader(TensorDataset(torch.arange(9)), batch_size=3)
    assert type(loader.coins) is SecureCoins
    assert loader.is_private
    assert loader.state_dict()["seed"] is None


def test_a_seed_must_be_asked_for_in_so_many_words():
    with pytest.raises(ValueError, match="reproducibility_over_privacy=True"):
        SeededCoins(0)
    with pytest.raises(ValueError, match="reproducibility_over_privacy=True"):
        SeededCoins(0, reproducibility_over_privacy=1)
    assert not PoissonLoader(TensorDataset(torch.arange(9)), batch_size=3, coins=seeded()).is_private


def test_secret_coins_are_never_tossed_twice_and_nothing_of_them_is_kept():
    coins = SecureCoins()
    sources = [coins, coins, pickle.loads(pickle.dumps(coins)), SecureCoins()]
    batches = [tuple(batch) for source in sources for batch in itertools.islice(source.tosses(64, 0.5, 0, 0), 3)]
    assert len(set(batches)) == 12
    assert not vars(coins)


def test_seeded_coins_go_on_from_any_step():
    whole = [batch.tolist() for batch in itertools.islice(seeded(3).tosses(64, 0.3, 2, 0), 9)]
    rest = [batch.tolist() for batch in itertools.islice(seeded(3).tosses(64, 0.3, 2, 4), 5)]
    assert rest == whole[4:]


@pytest.mark.parametrize(("options", "kind"), [({}, SecureCoins), ({"seed": 7}, SeededCoins)])
def test_an_engine_chooses_the_coins_whatever_the_loader_it_is_given_has(options, kind):
    """Catches a seeded loader that makes a private run predictable."""
    engine = PrivacyEngine(**options, reproducibility_over_privacy=bool(options))
    model = torch.nn.Linear(1, 1)
    _, _, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=PoissonLoader(TensorDataset(torch.ones(9, 1)), batch_size=3, coins=seeded(1)),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert type(loader.coins) is kind
    assert loader.coins.seed == options.get("seed")
    assert loader.is_private is not bool(options)


@pytest.mark.parametrize("number", [os.getpid, lambda: 1])  # in a container of its own, a child has its parent's
@pytest.mark.parametrize(("coins", "is_shared"), [(SecureCoins(), False), (seeded(), True)])
def test_a_forked_process_has_batches_of_its_own(monkeypatch, coins, is_shared, number):
    """Two processes that went on with the same batches would not be two samples of the data."""
    monkeypatch.setattr(os, "getpid", number)
    tosses = coins.tosses(1000, 0.5, 0, 0)
    next(tosses)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        os.write(write, next(tosses).tobytes())  # fits into the pipe
        os._exit(0)
    os.waitpid(child, 0)
    drawn = os.read(read, 1 << 16)
    assert len(drawn) > 0
    assert (drawn == next(tosses).tobytes()) is is_shared
