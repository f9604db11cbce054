"""What ranks do in tests: each function runs on every rank of a process group (see ``processes.py``)."""

import math
import os
import runpy
import signal
import time
import warnings
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from spectral_dp import AdaptiveFilter, BlockCirculantLinear, PrivacyEngine, SpectralConfig, models
from spectral_dp.accounting import Ledger
from spectral_dp.experiments import trainer
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.mechanism.clipping import Clipped
from spectral_dp.mechanism.noise import NoiseSource, SecureNoise, SeededNoise
from spectral_dp.mechanism.release import release_sum
from spectral_dp.relations import Relation
from spectral_dp.training.distributed import shares
from spectral_dp.training.distributed.joining import share_model, stop_together
from spectral_dp.training.distributed.ranks import Ranks, current_ranks
from spectral_dp.training.distributed.shares import NoiseShare, RankNoise, SharedNoise
from tests.support.private_runs import BATCH, N, setup, task, train, weights

# The ranks themselves.


def meetings():
    ranks = current_ranks()
    assert ranks is current_ranks()
    alike = ranks.meet("here", {"x": 1.5})
    flags = [ranks.meet("here", flag=ranks.rank == 1).flag, ranks.meet("here").flag]
    return ranks.rank, ranks.size, ranks.is_first, alike.ranks, alike.flag, flags


def tensors():
    """Sums of several shapes and dtypes, and what rank 0 has."""
    ranks = current_ranks()
    own = [torch.full((2, 3), float(ranks.rank + 1)), torch.arange(4.0).double() * ranks.rank, torch.zeros(0)]
    meeting = ranks.meet("here")
    added = ranks.added(own, meeting.ranks)
    matrix = torch.full((3, 2), float(ranks.rank)).T  # not contiguous
    ranks.take_over([matrix], "here")
    return added, matrix, ranks.of_first(lambda: {"from": ranks.rank}, "here")


def values_of_all():
    ranks = current_ranks()
    return ranks.of_each(f"rank {ranks.rank}", "here")


def failing_on_the_first():
    def fail():
        raise FileNotFoundError("no such file")

    ranks = current_ranks()
    words = None
    try:
        ranks.of_first(fail, "reading")
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    return words, ranks.meet("afterwards").ranks


def differing(what):
    """Ranks that disagree get the same error, and get it again at whatever they do next."""
    ranks = current_ranks()
    odd = ranks.rank == 1
    words = []
    for _ in range(2):
        try:
            if what == "place" and odd:
                ranks.of_first(lambda: None, "load_checkpoint")
            ranks.meet("a release", {"noise multiplier": 1.2 if odd else 1.0, "relation": "x"})
        except RuntimeError as error:
            words.append(str(error))
    return words


def others_added():
    ranks = current_ranks()
    ranks.added([torch.ones(2)], ranks.size + 1)


def in_a_group_that_is_gone():
    ranks = current_ranks()
    dist.destroy_process_group()
    ranks.meet("a release")


def losing_the_last(when):
    """The last rank is killed, leaves, sleeps, or has an error; the others tell how long they waited, and for whom."""
    ranks = current_ranks()
    began, is_last = time.monotonic(), ranks.rank == ranks.size - 1
    try:
        meeting = None if is_last and when == "before the meeting" else ranks.meet("a release")
        if is_last and when == "slow":
            time.sleep(1.5)
        elif is_last and when == "error":
            ranks.tell(ValueError("a record that cannot be read"))
            return None
        elif is_last and when == "left the group":  # its script caught an error, and does something else now
            dist.destroy_process_group()
            return None
        elif is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.added([torch.ones(3)], meeting.ranks)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return None


# Noise in shares.


class Silent(NoiseSource):
    is_private = False

    def normal(self, shape, *, dtype=torch.float32, device="cpu"):
        return torch.zeros(tuple(shape), dtype=dtype, device=device)


class Averaging(Ranks):
    """As gradients are in DistributedDataParallel."""

    def added(self, tensors, ranks):
        return [tensor / ranks for tensor in super().added(tensors, ranks)]


def noisy_totals(mistake, values, bound, sigma, relation):
    """The total of clipped sums (on rank r: ``values`` times r + 1), with noise in shares."""
    ranks = Averaging() if mistake == "average" else current_ranks()
    noise = Silent() if mistake == "forget" and ranks.rank == 1 else SecureNoise()
    kept = NoiseShare
    if mistake == "full":
        shares.NoiseShare = lambda noise, ranks: NoiseShare(noise, 1)
    try:
        own = [Clipped(value * (ranks.rank + 1), bound) for value in values]
        return list(SharedNoise(ranks, dict)(own, sigma, noise, Relation(relation)))
    finally:
        shares.NoiseShare = kept


def seeded_noise(seed, requests):
    noise = RankNoise(SeededNoise(seed, reproducibility_over_privacy=True), current_ranks().rank)
    return [noise.normal(shape) for shape in requests], noise.state_dict()


# Joining.


def release_beside_training():
    """A release of its own within a group: what it says, and what was charged."""
    ledger = Ledger()
    try:
        release_sum([Clipped(torch.zeros(3), 1.0)], noise_multiplier=1.0, ledger=ledger)
    except RuntimeError as error:
        return str(error), ledger.steps
    return "", ledger.steps


def model_of_rank(differ=""):
    ranks = current_ranks()
    model = nn.Sequential(nn.Linear(3, 4 if differ == "shape" and ranks.rank else 5), nn.LayerNorm(5))
    model.register_buffer("seen", torch.tensor(ranks.rank))
    share_model(ranks, model)
    return {name: value.clone() for name, value in model.state_dict().items()}


def stopping():
    """Rank 1 must stop at its third question, and is the only one to know."""
    ranks = current_ranks()
    asked = []

    def must_stop():
        asked.append(0)
        return ranks.rank == 1 and len(asked) == 3

    ask = stop_together(ranks, lambda: True, must_stop)
    never = stop_together(ranks, lambda: False, must_stop)
    assert not never()
    assert not asked
    while not ask():
        pass
    return len(asked)


# Whole runs.


def network(kind):
    """Small networks for images of 6 x 6, of every kind of layer that filters differ for; the same on every rank."""
    torch.manual_seed(5)
    if kind == "convolution":
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3))
    if kind == "block-circulant":
        return nn.Sequential(nn.Flatten(), BlockCirculantLinear(36, 16, 8), nn.Tanh(), nn.Linear(16, 3))
    if kind == "dense":
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, 3))
    encoder = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Flatten(1, 2), encoder, nn.Flatten(), nn.Linear(36, 3))


FILTERS = {
    "convolution": SpectralConfig(conv_ratio=0.5),
    "block-circulant": SpectralConfig(linear_ratio=0.5),
    "dense": SpectralConfig(linear_ratio=0.75, input_layouts={"1": (1, 6, 6)}),
    "adaptive": SpectralConfig(conv_filter=AdaptiveFilter(0.25)),
}


def fixed_run(kind, *, records=N, batch_size=BATCH, steps=8, views=1, spectral=None, physical=None, **options):
    """Weights after some steps in float64, on batches from a seed, without noise unless it is asked for.

    Args:
        physical: The largest physical batch of each rank.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    x, y = task(records).tensors
    model = network(kind).double()
    options = {"noise_multiplier": 0.0, "max_grad_norm": 0.5} | options
    _, _, optimizer, loader = setup(
        model,
        dataset=TensorDataset(x.double(), y),
        batch_size=batch_size,
        spectral=FILTERS[spectral] if spectral else None,
        augmentation_multiplicity=views,
        max_physical_batch_size=physical and physical[rank % len(physical)],
        rehearsal=False,
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no noise
        while optimizer.steps < steps:
            for x, y in loader:
                optimizer.zero_grad()
                both = torch.stack([x, x.flip(-1)], 1).flatten(0, 1) if views == 2 else x
                nn.functional.cross_entropy(model(both), y.repeat_interleave(views)).backward()
                optimizer.step()
                if optimizer.steps == steps:
                    break
    return weights(model)


def fixed_run_by_name(options):
    return fixed_run(**options)


def fixed_runs(asked):
    return {name: fixed_run(**options) for name, options in asked.items()}


def averaging_run(options):
    """Every sum over ranks is divided by their number, as in DistributedDataParallel."""
    plain = Ranks.added
    Ranks.added = lambda self, tensors, ranks: [tensor / ranks for tensor in plain(self, tensors, ranks)]
    try:
        return fixed_run(**options)
    finally:
        Ranks.added = plain


class Noisy(Dataset):
    """Records with random numbers, from the global generator or from one of the dataset's own."""

    def __init__(self, own):
        self._records, self._generator = task(), torch.Generator() if own else None
        if own:
            self._generator.seed()

    def __len__(self):
        return len(self._records)

    def __getitem__(self, i):
        x, y = self._records[i]
        return x + torch.randn(x.shape, generator=self._generator), y


def private_run(differ=None, epochs=2, options=None):
    """Trains the small network with secret noise and batches, and returns its weights, ledger and epsilon.

    Args:
        differ: The options in which rank 1 differs.
        epochs: The number of epochs.
        options: The options of all ranks.
    """
    own = differ if differ and dist.get_rank() == 1 else {}
    engine, model, optimizer, loader = setup(engine=PrivacyEngine(), **(options or {}) | own)
    train(model, optimizer, loader, epochs)
    return weights(model), engine.accountant.ledger.state_dict(), engine.get_epsilon(1e-3)


def released_noise(seed, sigma, bound):
    """What an engine releases of records whose gradients are zero, as sums: (steps, numbers)."""
    engine = PrivacyEngine() if seed is None else PrivacyEngine(seed=seed, reproducibility_over_privacy=True)
    model, data = nn.Linear(500, 3, bias=False), TensorDataset(torch.zeros(N, 500), torch.zeros(N).long())
    _, model, optimizer, loader = setup(
        model, engine, dataset=data, lr=0.0, noise_multiplier=sigma, max_grad_norm=bound, rehearsal=False
    )
    released = []
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        released.append(BATCH * model.weight.grad.flatten())
    return torch.stack(released)


def run_within_a_budget(differ=None):
    """Trains for longer than was planned for, and returns how many steps were made. Rank 1 may have another budget."""
    engine, model = PrivacyEngine(), network("convolution")
    budget = {"target_epsilon": 3.0, "target_delta": 1e-3, "epochs": 2, "stop_at_budget": True}
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(task(), batch_size=BATCH),
        max_grad_norm=1.0,
        **budget | (differ if differ and dist.get_rank() == 1 else {}),
    )
    train(model, optimizer, loader, 4)
    return optimizer.noise_multiplier, optimizer.steps, engine.get_epsilon(1e-3)


def resumed_run(path, steps, save_at=None):
    """Goes on with the checkpoint at a path, if there is one, to a number of steps; saves when it has made some."""
    engine, model, optimizer, loader = setup(spectral=FILTERS["adaptive"])
    if Path(path).exists():
        engine.load_checkpoint(path=path, module=model)
    while optimizer.steps < steps:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if optimizer.steps == save_at:
                engine.save_checkpoint(path=path, module=model)
            if optimizer.steps == steps:
                break
    return weights(model), engine.accountant.ledger.state_dict(), engine.get_epsilon(1e-3)


def parting(path):
    """Trains together, then each rank by itself with the same engine; the first loads what the second saved."""
    engine, model, optimizer, loader = setup(engine=PrivacyEngine(), rehearsal=False)
    train(model, optimizer, loader)
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ["WORLD_SIZE"] = "1"
    _, _, optimizer, loader = setup(model, engine, rehearsal=False)
    train(model, optimizer, loader, 1 + rank)
    if rank == 1:
        engine.save_checkpoint(path=path, module=model)
        return None
    while not Path(path).exists():
        time.sleep(0.05)
    engine.load_checkpoint(path=path, module=model)
    return None


def group_after_make_private(store):
    """Makes a run private without a group, and trains when there is one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    os.environ["WORLD_SIZE"] = "1"
    _, model, optimizer, loader = setup(engine=PrivacyEngine(), rehearsal=False)
    before = weights(model).clone()
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    try:
        train(model, optimizer, loader)
    except RuntimeError as error:
        return str(error), torch.equal(weights(model), before)
    return "", False


def loading_what_is_not_there(path):
    engine, model, _, _ = setup()
    engine.load_checkpoint(path=path, module=model)


def drifting_run():
    """Rank 1 changes its parameters by a little, by itself."""
    _, model, optimizer, loader = setup()
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0].bias += 1e-6
    train(model, optimizer, loader)


def refused_setup(what):
    model = network("convolution")
    data, options = task(), {}
    loader = DataLoader(data, batch_size=BATCH)
    if what == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif what == "sampler":
        loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    elif what == "no sampling":
        options = {"poisson_sampling": False, "sample_rate": 1.0}
    elif what == "fsdp":
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(model, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    PrivacyEngine(relation="replace_one").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        **options,
    )


def training_run(settings, path, stop_at):
    """Makes the run of a directory, or goes on with it. If ``stop_at`` is given, rank 1 is told to stop there."""

    class Tiny(nn.Module):
        def __init__(self, input_shape, classes):
            super().__init__()
            self.input_layouts = {"fc1": input_shape}
            self.fc1, self.fc2 = nn.Linear(math.prod(input_shape), 16), nn.Linear(16, classes)

        def forward(self, x):
            return self.fc2(self.fc1(x.flatten(1)).tanh())

    models.register_model("tiny", Tiny, spectral={"linear_ratio": 0.5})
    trainer._tensorboard = trainer.draw_run = lambda directory: None
    plain = trainer.Trainer._must_stop

    def must_stop(self):
        if stop_at == self.step and dist.get_rank() == 1:
            self._is_stopped = lambda: True
        return plain(self)

    trainer.Trainer._must_stop = must_stop
    try:
        return trainer.run(settings, RunDirectory(path), resume=True)
    except trainer.Interrupted as stopped:
        return str(stopped)
    finally:
        trainer.Trainer._must_stop = plain
        vars(models.registry)["_REGISTRY"].pop("tiny")


def example(path, epsilon, epochs, checkpoint):
    """Trains as an example does, in the group that is there."""
    return runpy.run_path(path)["train"](epsilon, epochs, checkpoint)
