import collections
import copy
import io
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)
from torch.utils.data.sampler import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from spectral_dp.training.coins import SeededCoins
from spectral_dp.training.sampling import PhysicalBatch, PoissonLoader


class Numbers(Dataset):
    """Record i is i: not a TensorDataset, so it takes the general path."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        assert type(index) is int
        return index


def seeded_coins(seed=0):
    return SeededCoins(seed, reproducibility_over_privacy=True)


def seeded(dataset, batch_size, seed=0, **options):
    return PoissonLoader(dataset, batch_size=batch_size, coins=seeded_coins(seed), **options)


def seeded_from(data_loader, seed=0, **options):
    return PoissonLoader.from_data_loader(data_loader, coins=seeded_coins(seed), **options)


def logical(loader):
    """One iteration as a list of logical batches, each a list of physical ones."""
    steps, open_step = [], []
    for batch in loader:
        open_step.append(batch.tolist())
        assert loader.current.size == len(batch)
        if loader.current.is_last:
            steps.append(open_step)
            open_step = []
    assert not open_step
    return steps


def records(loader):
    return [list(itertools.chain(*step)) for step in logical(loader)]


# --- The batches ---


@pytest.mark.parametrize("batch_size", [1, 7, 10, 99, 100])
def test_rate_and_steps_are_exact(batch_size):
    loader = PoissonLoader(Numbers(100), batch_size=batch_size)
    assert loader.sample_rate == batch_size / 100
    assert len(loader) == math.ceil(100 / batch_size) == len(logical(loader))
    assert loader.expected_batch_size == batch_size


@pytest.mark.parametrize("steps", [3, 7, 9, 49, 118, 1000])
def test_a_rate_of_one_over_steps_makes_that_many_steps(steps):
    """Opacus sets sample_rate = 1 / len(data_loader); rounding must not add a step."""
    assert len(PoissonLoader(Numbers(60_000), batch_size=60_000 * (1 / steps))) == steps


def test_rate_one_takes_everything():
    assert records(PoissonLoader(Numbers(100), batch_size=100)) == [list(range(100))]


def test_secret_batches_never_repeat():
    """Epochs, loaders, copies and parallel iterations share no coins; nor does an epoch after one broken off."""
    loader = PoissonLoader(Numbers(64), batch_size=32)
    records(loader)
    loaders = [loader, copy.deepcopy(loader), pickle.loads(pickle.dumps(loader)), loader]
    batches = [tuple(b) for one in loaders for b in records(one)]
    batches += [tuple(x.tolist()) for pair in zip(loader, loader, strict=True) for x in pair]
    batches += [tuple(next(iter(loader)).tolist()) for _ in range(3)]
    assert len(set(batches)) == len(batches)
    assert loader.is_private


def test_a_seed_reproduces_the_run_and_every_epoch_differs():
    runs = [[records(loader) for _ in range(3)] for loader in (seeded(Numbers(64), 16, seed) for seed in (3, 3, 4))]
    assert runs[0] == runs[1]
    epochs = [tuple(map(tuple, epoch)) for epoch in runs[0] + runs[2]]
    assert len(set(epochs)) == 6


def test_the_global_generator_has_no_say():
    def draw():
        torch.manual_seed(0)
        return records(PoissonLoader(Numbers(64), batch_size=16))

    assert draw() != draw()


# --- Physical batches ---


@pytest.mark.parametrize("limit", [1, 3, 10, 64])
def test_splits_cover_each_logical_batch_once_and_in_order(limit):
    whole = records(seeded(Numbers(64), 10))
    split = logical(seeded(Numbers(64), 10, max_physical_batch_size=limit))
    assert [list(itertools.chain(*step)) for step in split] == whole
    for step in split:
        sizes = [len(part) for part in step]
        assert len(sizes) == max(1, math.ceil(sum(sizes) / limit))
        assert max(sizes) <= limit
        assert max(sizes) - min(sizes) <= 1


def test_current_describes_the_batch_at_hand():
    loader = seeded(Numbers(20), 10, max_physical_batch_size=4)
    assert loader.current is None
    for batch in loader:
        assert isinstance(loader.current, PhysicalBatch)
        assert loader.current.size == len(batch) <= 4
    assert loader.current.is_last


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_change_nothing(persistent):
    """Prefetching workers run several batches ahead: what `current` says must not."""
    options = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": persistent}
    plain = seeded_from(DataLoader(Numbers(12), batch_size=2), max_physical_batch_size=2)
    parallel = seeded_from(DataLoader(Numbers(12), batch_size=2, **options), max_physical_batch_size=2)
    expected = [logical(plain) for _ in range(4)]
    assert any(step == [[]] for epoch in expected for step in epoch), "no empty batch to test with"
    assert any(len(step) > 1 for epoch in expected for step in epoch), "no split batch to test with"
    assert logical(parallel) == expected[0]
    next(iter(parallel))  # an epoch broken off with batches under way
    assert [logical(parallel), logical(parallel)] == expected[2:]


def test_options_of_the_loader_are_kept():
    def init(worker):
        raise AssertionError("not started here")

    generator = torch.Generator()
    given = DataLoader(
        Numbers(10),
        batch_size=2,
        shuffle=True,
        num_workers=1,
        worker_init_fn=init,
        timeout=7,
        prefetch_factor=5,
        persistent_workers=True,
        multiprocessing_context="spawn",
        generator=generator,
        drop_last=True,
    )
    inner = PoissonLoader.from_data_loader(given)
    for name in ("dataset", "collate_fn", "num_workers", "worker_init_fn", "timeout", "prefetch_factor"):
        assert getattr(inner, name) == getattr(given, name)
    assert inner.persistent_workers
    assert inner.generator is generator
    assert inner.multiprocessing_context is given.multiprocessing_context


@pytest.mark.parametrize(
    "choose",
    [
        lambda d: d,
        lambda d: Subset(d, range(40)),
        lambda d: Subset(d, [*range(0, 40, 2), *range(1, 40, 2)]),
        lambda d: Subset(Subset(d, torch.randperm(40)), np.arange(40)[::-1]),
    ],
    ids=["tensors", "range", "list", "subset of a subset"],
)
def test_whole_batches_of_tensors_equal_those_of_single_records(choose, monkeypatch):
    dataset = choose(TensorDataset(torch.randn(40, 3, 2, dtype=torch.float64), torch.arange(40), torch.rand(40) > 0.5))
    fast, general = (seeded(dataset, 1, max_physical_batch_size=3) for _ in range(2))
    general._plain = False
    expected = [(general.current, batch) for batch in general]
    looked_at, look = [], TensorDataset.__getitem__
    monkeypatch.setattr(TensorDataset, "__getitem__", lambda *args: looked_at.append(1) or look(*args))
    for batch, (current, same) in zip(fast, expected, strict=True):
        assert type(batch) is type(same)
        assert fast.current == current
        torch.testing.assert_close(batch, same, rtol=0, atol=0)
    sizes = [current.size for current, _ in expected]
    assert set(sizes) == {0, 1, 2, 3}
    assert len(looked_at) == 3 * sizes.count(0), "single records only to learn what an empty batch looks like"


def test_whole_batches_are_only_for_plain_tensor_datasets():
    class Flipped(TensorDataset):
        def __getitem__(self, index):
            return tuple(-t for t in super().__getitem__(index))

    for dataset in (Flipped(torch.ones(9)), Subset(Flipped(torch.ones(9)), range(9))):
        assert max(x.max() for (x,) in seeded(dataset, 9)) == -1
    from_the_end = seeded(Subset(TensorDataset(torch.arange(9)), [-1, 0]), 2)
    assert sorted(x for (batch,) in from_the_end for x in batch.tolist()) == [0, 8]
    with_collate = DataLoader(TensorDataset(torch.ones(9)), batch_size=9, collate_fn=lambda r: torch.zeros(len(r)))
    assert [x.tolist() for x in PoissonLoader.from_data_loader(with_collate)] == [[0.0] * 9]


# --- Empty batches ---

Pair = collections.namedtuple("Pair", "x y")


class Records(Dataset):
    def __init__(self, record, size=6):
        self.record, self.size = record, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.record(index)


def image(index):
    return torch.full((3, 4), float(index))


RECORDS = {
    "tensor": image,
    "number": lambda i: i,
    "tuple": lambda i: (image(i), i),
    "namedtuple": lambda i: Pair(image(i), i),
    "dict": lambda i: {"x": image(i).half(), "y": i, "name": f"record {i}"},
    "nested": lambda i: {"views": (image(i), {"mask": image(i) > 2}), "meta": [("a", "b"), 0.5]},
    "array": lambda i: (np.full((2, 2), i, dtype=np.int16), np.float64(i)),
}


def assert_empty_twin(empty, full):
    """Same structure, types, dtypes and shapes, but no record."""
    assert type(empty) is type(full)
    if isinstance(full, torch.Tensor):
        assert empty.shape == (0, *full.shape[1:])
        assert (empty.dtype, empty.device) == (full.dtype, full.device)
    elif isinstance(full, dict):
        assert list(empty) == list(full)
        for key in full:
            assert_empty_twin(empty[key], full[key])
    elif all(isinstance(x, str) for x in full):
        assert len(empty) == 0
    else:
        for a, b in zip(empty, full, strict=True):
            assert_empty_twin(a, b)


@pytest.mark.parametrize("kind", RECORDS)
def test_empty_batches_have_the_structure_of_full_ones(kind):
    dataset = Records(RECORDS[kind])
    loader = PoissonLoader.from_data_loader(DataLoader(dataset, batch_size=1))
    seen = {0: None}
    while seen[0] is None or len(seen) < 2:
        for batch in loader:
            seen[loader.current.size] = batch
            assert loader.current.is_last
    assert_empty_twin(seen[0], default_collate([dataset[1], dataset[2]]))


def empty_batch(collate_fn, record=image):
    return PoissonLoader.from_data_loader(
        DataLoader(Records(record), batch_size=1, collate_fn=collate_fn)
    )._empty_batch()


def test_empty_batches_of_custom_collates():
    """The axis that numbers the records is found, not assumed: first, second, packed, or the length of a list."""
    assert empty_batch(torch.stack).shape == (0, 3, 4)
    assert empty_batch(lambda r: torch.stack(r, dim=1)).shape == (3, 0, 4)
    assert empty_batch(torch.cat).shape == (0, 4)
    assert empty_batch(np.stack).shape == (0, 3, 4)
    assert empty_batch(lambda r: r) == []
    images, boxes = empty_batch(lambda r: (list(r), [{"box": x[0]} for x in r]))
    assert images == boxes == []
    encoding = empty_batch(lambda r: collections.UserDict(x=torch.stack(r), width=4, extra=None))
    assert type(encoding) is collections.UserDict
    assert encoding["x"].shape == (0, 3, 4)
    assert (encoding["width"], encoding["extra"]) == (4, None)


def test_a_collate_that_consumes_its_records_gets_fresh_ones():
    def collate(rows):
        return torch.stack([row.pop("x") for row in rows])

    assert empty_batch(collate, lambda i: {"x": image(i)}).shape == (0, 3, 4)


@pytest.mark.parametrize(
    "collate_fn",
    [
        lambda rows: torch.stack(rows).mean(0),
        lambda rows: torch.nn.functional.pad(torch.stack(rows), (0, 0, 0, 0, 0, 8 - len(rows))),
        lambda rows: object(),
        lambda rows: {"x": torch.stack(rows), "count": len(rows)},
    ],
    ids=["mean", "padded to 8", "object", "count"],
)
def test_a_batch_that_cannot_be_emptied_is_refused_at_once(collate_fn):
    """Handing out record 0 in place of nobody would break the guarantee."""
    with pytest.raises(TypeError, match="cannot make an empty batch"):
        empty_batch(collate_fn)
    PoissonLoader.from_data_loader(DataLoader(Records(image, 64), batch_size=64, collate_fn=collate_fn))


def test_a_model_trains_on_an_empty_batch():
    model = torch.nn.Linear(3, 2)
    x, y = PoissonLoader(TensorDataset(torch.randn(5, 3), torch.arange(5) % 2), batch_size=1)._empty_batch()
    torch.nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    assert model.weight.grad.count_nonzero() == 0


# --- Resuming ---


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 3, 8, 11])
def test_a_seeded_run_resumes_with_the_same_batches(stop, workers):
    """Prefetched batches must not count as handed out."""
    reference = seeded(Numbers(64), 8, max_physical_batch_size=3)
    whole = [batch for _ in range(2) for batch in records(reference)]
    options = {"num_workers": workers, "prefetch_factor": 4} if workers else {}
    killed = seeded_from(DataLoader(Numbers(64), batch_size=8, **options), max_physical_batch_size=3)
    done = 0
    for _ in itertools.chain(killed, killed):
        done += killed.current.is_last
        if done == stop:
            break
    assert killed.position == divmod(stop, 8)
    resumed = seeded(Numbers(64), 8, max_physical_batch_size=5)
    resumed.load_state_dict(through_a_file(killed.state_dict()))
    assert resumed.position == divmod(stop, 8)
    rest = records(resumed)
    assert len(rest) == 8 - stop % 8
    rest += records(resumed) if stop < 8 else []
    assert rest == whole[stop:]


def test_a_step_interrupted_between_physical_batches_is_repeated():
    loader = seeded(Numbers(10), 10, max_physical_batch_size=4)
    for _ in loader:
        if not loader.current.is_last:
            assert loader.position == (0, 0)
    assert loader.position == (1, 0)


def test_a_secret_run_resumes_at_the_place_but_with_fresh_coins():
    loader = PoissonLoader(Numbers(64), batch_size=8)
    epoch = iter(loader)
    for _ in range(3):
        next(epoch)
    state = through_a_file(loader.state_dict())
    assert state == {"epoch": 0, "step": 3, "size": 64, "batch_size": 8, "seed": None}, "nothing may foretell batches"
    ends = [[x.tolist() for x in epoch]]
    for _ in range(2):
        resumed = PoissonLoader(Numbers(64), batch_size=8)
        resumed.load_state_dict(state)
        ends.append(records(resumed))
        assert len(records(resumed)) == 8
    assert [len(end) for end in ends] == [5, 5, 5]
    assert ends[0] != ends[1] != ends[2] != ends[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 8}, "no position"),
        ({"step": -1}, "no position"),
        ({"epoch": 2**32}, "no position"),
        ({"epoch": True}, "no position"),
        ({"step": 1.0}, "no position"),
        ({"size": 63}, "size=63.*size=64"),
        ({"batch_size": 9}, "batch_size=9.*batch_size=8"),
        ({"seed": 1}, "seed=1.*seed=None"),
        ({"more": 1}, "not the state"),
    ],
)
def test_a_foreign_state_is_refused_and_changes_nothing(change, message):
    loader = PoissonLoader(Numbers(64), batch_size=8)
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict(loader.state_dict() | change)
    with pytest.raises(ValueError, match="not the state"):
        loader.load_state_dict({})
    assert loader.position == (0, 0)


# --- What is refused ---


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(10))


def test_iterable_datasets_are_refused():
    with pytest.raises(TypeError, match=r"Stream is not a map-style dataset.*__getitem__ and __len__"):
        PoissonLoader(Stream(), batch_size=2)
    with pytest.raises(TypeError, match="Stream is not a map-style dataset"):
        PoissonLoader.from_data_loader(DataLoader(Stream(), batch_size=2))


def test_empty_datasets_are_refused():
    with pytest.raises(ValueError, match="dataset is empty"):
        PoissonLoader(Numbers(0), batch_size=1)


@pytest.mark.parametrize("batch_size", [0, -1, 11, math.nan])
def test_impossible_batch_sizes_are_refused(batch_size):
    with pytest.raises(ValueError, match=r"at most the 10 records.*set batch_size=10"):
        PoissonLoader(Numbers(10), batch_size=batch_size)


def test_a_batch_size_above_the_dataset_is_refused():
    with pytest.raises(ValueError, match="got 64: set batch_size=10"):
        PoissonLoader.from_data_loader(DataLoader(Numbers(10), batch_size=64))


@pytest.mark.parametrize("limit", [0, -3])
def test_impossible_physical_batch_sizes_are_refused(limit):
    with pytest.raises(ValueError, match=f"max_physical_batch_size must be at least 1 or None, got {limit}"):
        PoissonLoader(Numbers(10), batch_size=2, max_physical_batch_size=limit)


def test_loaders_without_batches_are_refused():
    with pytest.raises(ValueError, match=r"batch_size=None.*set batch_size"):
        PoissonLoader.from_data_loader(DataLoader(Numbers(10), batch_size=None))


class Reversed(RandomSampler):
    pass


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": WeightedRandomSampler([1.0] * 10, 10), "batch_size": 2},
        {"sampler": SubsetRandomSampler(range(5)), "batch_size": 2},
        {"sampler": RandomSampler(range(10), replacement=True), "batch_size": 2},
        {"sampler": RandomSampler(range(10), num_samples=5), "batch_size": 2},
        {"sampler": Reversed(range(10)), "batch_size": 2},
        {"sampler": range(10), "batch_size": 2},
        {"batch_sampler": [[0, 1], [2]]},
        {"batch_sampler": BatchSampler(WeightedRandomSampler([1.0] * 10, 10), 2, False)},
    ],
)
def test_custom_samplers_are_refused(options):
    with pytest.raises(ValueError, match=r"of its own.*batch_size and shuffle only.*Subset"):
        PoissonLoader.from_data_loader(DataLoader(Numbers(10), **options))


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 2},
        {"batch_size": 2, "shuffle": True},
        {"batch_size": 2, "drop_last": True},
        {"batch_sampler": BatchSampler(RandomSampler(range(10)), 2, False)},
    ],
)
def test_the_usual_samplers_are_replaced(options):
    loader = PoissonLoader.from_data_loader(DataLoader(Numbers(10), **options))
    assert (len(loader), loader.sample_rate, loader.batch_size) == (5, 0.2, 2)


def test_a_loader_of_opacus_is_taken_over():
    opacus = pytest.importorskip("opacus.data_loader")
    given = opacus.DPDataLoader.from_data_loader(DataLoader(TensorDataset(torch.arange(60)), batch_size=7))
    loader = PoissonLoader.from_data_loader(given)
    assert len(loader) == len(given) == 9
    assert loader.sample_rate == pytest.approx(1 / 9, rel=1e-15)
    assert len([x for (x,) in loader]) == 9


def test_pieces_are_numbered_within_their_step():
    loader = seeded(TensorDataset(torch.arange(40.0)), 20, max_physical_batch_size=6)
    pieces = [loader.current.piece for _ in loader]
    firsts = [i for i, piece in enumerate(pieces) if piece == 0]
    assert len(firsts) == 2
    assert pieces == [*range(firsts[1]), *range(len(pieces) - firsts[1])]
