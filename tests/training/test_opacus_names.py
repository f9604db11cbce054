"""What scripts read of an Opacus optimizer, and set on it."""

import dataclasses

import pytest
import torch
from tests.support.opacus_runs import BATCH, private_run, records, train
from tests.support.privacy_checks import noise_off
from torch import nn

from spectral_dp.mechanism.clipping import Clipping, FlatClipping

pytest.importorskip("opacus")

READ = ("max_grad_norm", "noise_multiplier", "expected_batch_size", "loss_reduction", "secure_mode")


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_the_same_names_and_values_as_opacus():
    _, _, ours, loader = private_run(max_grad_norm=1.5, noise_multiplier=0.7)
    _, model, theirs, _ = private_run("opacus", max_grad_norm=1.5, noise_multiplier=0.7)
    assert {name: getattr(ours, name) for name in READ} == {name: getattr(theirs, name) for name in READ} | {
        "secure_mode": True  # always, here
    }
    model(torch.randn(5, 4)).sum().backward()
    assert ours.accumulated_iterations == theirs.accumulated_iterations == 1
    assert [p.shape for p in ours.params] == [p.shape for p in theirs.params]
    assert type(ours.original_optimizer) is type(theirs.original_optimizer) is torch.optim.SGD
    assert ours.expected_batch_size == loader.batch_size == BATCH


def test_frozen_parameters_are_not_among_params():
    _, model, optimizer, _ = private_run()
    model.bias.requires_grad_(False)
    assert optimizer.params == [model.weight]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("grad_samples", "never formed.*parameter.grad after step"),
        ("summed_grad", "carries no noise.*nobody accounts for"),
        ("clip_and_accumulate", r"the one order that is private: call step\(\)"),
        ("add_noise", r"call step\(\)"),
        ("scale_grad", r"call step\(\)"),
        ("pre_step", r"call step\(\)"),
        ("signal_skip_step", "spectral_dp.utils.batch_memory_manager"),
        ("nonsense", "no attribute 'nonsense'$"),
    ],
)
def test_what_is_not_here_says_why(name, words):
    _, _, optimizer, _ = private_run()
    assert not hasattr(optimizer, name)
    with pytest.raises(AttributeError, match=words):
        getattr(optimizer, name)


class TestTheStepHook:
    def test_runs_once_a_logical_step_and_sees_what_was_released(self):
        seen = []
        _, model, optimizer, loader = private_run(max_physical_batch_size=4)
        optimizer.attach_step_hook(lambda _: seen.append("replaced"))
        optimizer.attach_step_hook(lambda o: seen.append((o, model.weight.grad.clone())))
        before = model.weight.detach().clone()
        train(model, optimizer, loader)
        assert [o for o, _ in seen] == [optimizer] * len(loader)
        torch.testing.assert_close(before - 0.1 * sum(grad for _, grad in seen), model.weight)

    def test_it_does_not_replace_the_accounting(self):
        """In Opacus it does: the ledger is its first step hook."""
        engine, model, optimizer, loader = private_run()
        optimizer.attach_step_hook(lambda _: None)
        train(model, optimizer, loader)
        assert len(engine.accountant) == len(loader)


def noise_scale(optimizer, model, loader, bound):
    """The deviation of the released noise over what ``bound`` asks for, where the signal is zero."""
    optimizer.max_grad_norm = bound
    x, _ = next(iter(loader))
    optimizer.zero_grad()
    (0 * model(x)).sum().backward()
    optimizer.step()
    return float(model.weight.grad.std()) * optimizer.expected_batch_size / (optimizer.noise_multiplier * bound)


def wide_run(**options):
    return private_run(model=nn.Linear(100, 100), dataset=records(width=100), rehearsal=False, **options)


class TestTheClippingBound:
    @pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer"])
    def test_the_noise_follows_it(self, clipping):
        _, model, optimizer, loader = wide_run(clipping=clipping, noise_multiplier=2.0)
        for bound in (1.0, 5.0, 0.2):
            assert noise_scale(optimizer, model, loader, bound) == pytest.approx(1, rel=0.05)
            assert optimizer.max_grad_norm == bound

    def test_negative_control_noise_that_does_not_follow_it_is_seen(self):
        @dataclasses.dataclass(frozen=True)
        class Stuck(FlatClipping):
            def noise_bounds(self, sizes):
                return [1.0] * len(sizes)

        _, model, optimizer, loader = wide_run(clipping=Stuck(1.0))
        assert noise_scale(optimizer, model, loader, 1.0) == pytest.approx(1, rel=0.05)
        assert noise_scale(optimizer, model, loader, 1.5) == pytest.approx(2 / 3, rel=0.05)

    def test_samples_are_clipped_by_it(self):
        _, model, optimizer, loader = private_run(batch=1, rehearsal=False, loss_reduction="sum")
        optimizer.noise = noise_off()
        for bound in (1.0, 0.25):
            optimizer.max_grad_norm = bound
            for x, y in loader:
                optimizer.zero_grad()
                (1e3 * nn.functional.cross_entropy(model(x), y, reduction="sum")).backward()
                optimizer.step()
                norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
                assert norm <= bound * loader.current.size
                if loader.current.size == 1:
                    assert norm == pytest.approx(bound, rel=1e-3)

    def test_bounds_of_layers(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
        _, _, optimizer, _ = private_run(model=model, clipping="per_layer", max_grad_norm=[1.0, 2.0])
        assert optimizer.max_grad_norm == [1.0, 2.0]
        optimizer.max_grad_norm = [3.0, 4.0]
        assert optimizer.clipping.noise_bounds([1, 1]) == [5.0, 5.0]
        with pytest.raises(ValueError, match="3 clipping bounds for 2 blocks"):
            optimizer.max_grad_norm = [1.0, 2.0, 3.0]
        assert optimizer.max_grad_norm == [3.0, 4.0]

    @pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), [1.0]])
    def test_impossible_bounds_are_refused(self, bound):
        _, _, optimizer, _ = private_run()
        with pytest.raises(ValueError, match=r"must be positive|give a number"):
            optimizer.max_grad_norm = bound
        assert optimizer.max_grad_norm == 1.0

    def test_a_clipping_of_ones_own_may_have_no_bound(self):
        class Own(Clipping):
            def factors(self, squared_norms):
                return FlatClipping(1.0).factors(squared_norms)

            def noise_bounds(self, sizes):
                return [1.0] * len(sizes)

        _, _, optimizer, _ = private_run(clipping=Own())
        assert not hasattr(optimizer, "max_grad_norm")
        with pytest.raises(AttributeError, match="read or set optimizer"):
            _ = optimizer.max_grad_norm
        with pytest.raises(AttributeError, match="names no bound: set optimizer"):
            optimizer.max_grad_norm = 1.0


@pytest.mark.parametrize("name", ["max_grad_norm", "noise_multiplier"])
def test_no_change_between_the_pieces_of_a_logical_step(name):
    """A schedule that follows the pieces would tell how many there were, and clip and noise by different bounds."""
    engine, model, optimizer, loader = private_run(max_physical_batch_size=2, rehearsal=False)

    def lower():
        setattr(optimizer, name, 0.9 * getattr(optimizer, name))

    with pytest.raises(RuntimeError, match=r"changed within a logical step.*secret"):
        train(model, optimizer, loader, after_step=lower)
    assert len(engine.accountant) == 0


@pytest.mark.parametrize("sigma", [float("nan"), -1.0])
def test_impossible_noise_is_refused_before_anything_is_released(sigma):
    engine, model, optimizer, loader = private_run(rehearsal=False)
    before = model.weight.detach().clone()
    optimizer.noise_multiplier = sigma
    with pytest.raises(ValueError, match="noise_multiplier"):
        train(model, optimizer, loader)
    assert len(engine.accountant) == 0
    assert torch.equal(before, model.weight)


@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_no_learning_rate_follows_the_pieces(lr):
    """The weights, and the rate itself, would tell without noise how many pieces there were: the size of the batch."""
    engine, model, optimizer, loader = private_run(max_physical_batch_size=2)
    optimizer.param_groups[0]["lr"] = lr
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(RuntimeError, match=r"changed within a logical step.*if loader.current.is_last: scheduler.step"):
        train(model, optimizer, loader, after_step=schedule.step)
    assert len(engine.accountant) == 0


def test_a_learning_rate_may_follow_the_logical_steps():
    engine, model, optimizer, loader = private_run(max_physical_batch_size=2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, optimizer, loader, after_step=lambda: loader.current.is_last and schedule.step())
    assert len(engine.accountant) == schedule.last_epoch == len(loader)
