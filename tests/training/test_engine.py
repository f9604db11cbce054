import copy
import math
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
from tests.support.privacy_checks import ScriptedNoise
from tests.support.private_runs import BATCH, N, cnn, setup, task, train, weights
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from spectral_dp import BudgetExhausted, PrivacyEngine, Relation, SpectralConfig, convert_linear
from spectral_dp.accounting import Phase, epsilon
from spectral_dp.gradients import LayerConfig
from spectral_dp.mechanism.clipping import AutomaticClipping, FlatClipping, NonFiniteWarning
from spectral_dp.mechanism.filters import AdaptiveFilter
from spectral_dp.mechanism.noise import SecureNoise


@pytest.fixture(autouse=True)
def _empty_batches_have_no_mean():
    with warnings.catch_warnings():
        yield


class TestDropIn:
    def test_the_example_of_the_readme_trains_and_accounts(self):
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader, epochs=2)
        assert engine.get_epsilon(1e-3) == pytest.approx(epsilon(1.0, BATCH / N, 12, 1e-3))
        assert engine.accountant.get_epsilon(delta=1e-3) == engine.get_epsilon(1e-3)

    def test_with_epsilon_spends_the_budget_and_no_more(self):
        model = cnn()
        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(task(), batch_size=BATCH),
            target_epsilon=4.0,
            target_delta=1e-3,
            epochs=3,
            max_grad_norm=1.0,
        )
        train(model, optimizer, loader, epochs=3)
        assert 3.99 < engine.get_epsilon(1e-3) <= 4.0

    @pytest.mark.parametrize("stop", [False, True])
    def test_with_epsilon_leaves_room_for_other_releases(self, stop):
        """Statistics of the records beside training are within the same budget, and all planned steps are made."""
        model, engine, other = cnn(), PrivacyEngine(), Phase(5.0, 1.0, 1)
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(task(), batch_size=BATCH),
            target_epsilon=4.0,
            target_delta=1e-3,
            epochs=3,
            max_grad_norm=1.0,
            other_releases=[other],
            stop_at_budget=stop,
        )
        engine.accountant.ledger.record(*other)
        train(model, optimizer, loader, epochs=3)
        assert engine.accountant.ledger.steps == 1 + 3 * len(loader)
        assert 3.99 < engine.get_epsilon(1e-3) <= 4.0

    def test_a_private_loader_can_be_made_private_for_another_run(self):
        """As the published Opacus example does when it averages over several runs."""
        _, _, _, loader = setup(max_physical_batch_size=9)
        model = cnn()
        engine = PrivacyEngine()
        model, optimizer, again = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        assert again is not loader
        assert again.is_private
        train(model, optimizer, again)
        assert engine.accountant.history[0].sample_rate == BATCH / N

    def test_the_model_is_the_users_own(self):
        model = cnn()
        keys = list(model.state_dict())
        _, private, optimizer, _ = setup(model)
        assert private is model
        assert list(model.state_dict()) == keys
        copy.deepcopy(model)
        assert isinstance(optimizer, torch.optim.Optimizer)

    @pytest.mark.parametrize("accountant", ["pld", "rdp", "prv"])
    def test_accountants(self, accountant):
        engine = PrivacyEngine(accountant=accountant, seed=0, reproducibility_over_privacy=True)
        _, model, optimizer, loader = setup(engine=engine)
        train(model, optimizer, loader)
        name = "rdp" if accountant == "rdp" else "pld"
        assert engine.get_epsilon(1e-3) == pytest.approx(epsilon(1.0, BATCH / N, 6, 1e-3, accountant=name))

    def test_release_equals_opacus_with_noise_off(self):
        opacus = pytest.importorskip("opacus", reason="the baseline, from the 'baseline' extra")
        x, y = task().tensors
        ours, theirs = cnn(), cnn()
        as_it_is = {"poisson_sampling": False, "sample_rate": 1.0, "rehearsal": False}
        _, _, optimizer, loader = setup(ours, engine=PrivacyEngine(relation=Relation.REPLACE_ONE), lr=0.0, **as_it_is)
        optimizer.noise = ScriptedNoise()
        loader.data_loader = [(x[:BATCH], y[:BATCH])]
        train(ours, optimizer, loader)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module, opt, _ = opacus.PrivacyEngine().make_private(
                module=theirs,
                optimizer=torch.optim.SGD(theirs.parameters(), lr=0.0),
                data_loader=DataLoader(task(), batch_size=BATCH),
                noise_multiplier=0.0,
                max_grad_norm=1.0,
                poisson_sampling=False,
            )
            F.cross_entropy(module(x[:BATCH]), y[:BATCH]).backward()
            opt.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-7)

    def test_huge_noise_destroys_accuracy_and_little_noise_does_not(self):
        """Privacy is on: the noise really reaches the weights."""
        accuracies = []
        for sigma in (0.3, 1e4):
            _, model, optimizer, loader = setup(noise_multiplier=sigma, lr=1.0, dataset=task())
            train(model, optimizer, loader, epochs=12)
            x, y = task().tensors
            accuracies.append(float((model(x).argmax(1) == y).double().mean()))
        assert accuracies[0] > 0.8
        assert accuracies[1] < 0.6


class TestWhatIsReleased:
    def test_physical_splits_give_the_same_release(self):
        results = []
        for limit in (None, 7, 1):
            _, model, optimizer, loader = setup(max_physical_batch_size=limit)
            train(model.double(), optimizer, _doubled(loader))
            results.append(weights(model))
        torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(results[0], results[2], rtol=1e-9, atol=1e-12)

    def test_filters_are_where_the_configuration_says(self):
        model = convert_linear(
            nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 4)),
            block_size=4,
        )
        config = SpectralConfig(conv_ratio=0.5, linear_ratio=0.5, layers={"4": LayerConfig()})
        _, model, optimizer, loader = setup(model, spectral=config)
        before = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer, loader)
        conv = (model[0].weight - before[0]).detach()
        dct = torch.fft.rfft2(conv)  # any transform: the update lives in few dimensions
        assert torch.linalg.matrix_rank(conv.flatten(1), tol=1e-6) <= 4
        assert dct.shape[-2:] == (3, 2)
        circulant = torch.fft.rfft((model[2].weight - before[2]).detach())
        assert float(circulant[..., 1:].abs().max()) < 1e-5, "only DC is left of a block of four at ratio 0.5"
        free = torch.fft.rfft((model[4].weight - before[4]).detach())
        assert float(free[..., 1:].abs().max()) > 1e-3, "overridden by name"

    @pytest.mark.parametrize(
        "options",
        [
            {"clipping": "per_layer"},
            {"clipping": "per_layer", "max_grad_norm": [0.5, 0.5]},
            {"clipping": "per_layer", "noise_allocation": "optimal"},
            {"clipping": "automatic"},
            {"spectral": SpectralConfig.paper(0.5, 0.5)},
            {"spectral": SpectralConfig(conv_filter=AdaptiveFilter())},
            {"loss_reduction": "sum"},
        ],
        ids=str,
    )
    def test_options_train(self, options):
        _, model, optimizer, loader = setup(**options)
        before = weights(model).clone()
        train(model, optimizer, loader, reduction=options.get("loss_reduction", "mean"))
        after = weights(model)
        assert bool(after.isfinite().all())
        assert not torch.equal(before, after)

    def test_frozen_layers_and_heads(self):
        model = cnn()
        model[0].requires_grad_(False)
        frozen = model[0].weight.clone()
        _, model, optimizer, loader = setup(model)
        train(model, optimizer, loader)
        torch.testing.assert_close(model[0].weight, frozen)
        assert model[0].weight.grad is None

    def test_augmentation_multiplicity(self):
        _, model, optimizer, loader = setup(augmentation_multiplicity=3)
        for x, y in loader:
            views = torch.stack([x, x.flip(-1), x.flip(-2)], dim=1).flatten(0, 1)
            optimizer.zero_grad()
            F.cross_entropy(model(views), y.repeat_interleave(3)).backward()
            optimizer.step()

    def test_gradient_accumulation_by_the_user(self):
        """Halves of a batch, each with its own backward pass, are other samples: the same release as in one piece."""
        results = []
        for halves in (False, True):
            _, model, optimizer, loader = setup(loss_reduction="sum")
            model.double()
            for x, y in _doubled(loader):
                optimizer.zero_grad()
                parts = [(x[::2], y[::2]), (x[1::2], y[1::2])] if halves else [(x, y)]
                for a, b in parts:
                    F.cross_entropy(model(a), b, reduction="sum").backward()
                optimizer.step()
            results.append(weights(model))
        torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)

    def test_weight_averages(self):
        _, model, optimizer, loader = setup()
        average = torch.optim.swa_utils.AveragedModel(model)
        train(model, optimizer, loader)
        average.update_parameters(model)
        torch.testing.assert_close(weights(average.module), weights(model))

    def test_empty_batches_step_with_noise_alone(self):
        dataset = task(60)
        model = cnn()
        engine = PrivacyEngine(seed=0, reproducibility_over_privacy=True)
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(dataset, batch_size=1),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            rehearsal=False,
        )
        sizes, moved = [], []
        for x, y in loader:
            before = weights(model).clone()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, reduction="mean").backward()
            optimizer.step()
            sizes.append(len(x))
            moved.append(float((weights(model) - before).norm()))
        assert 0 in sizes
        assert min(moved) > 0.1
        assert engine.accountant.ledger.steps == 60
        assert bool(weights(model).isfinite().all())


def private_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


class TestOneRecordCountsOnce:
    """What a release may depend on, with the noise off and gradients so large that every sample is clipped."""

    def run(self, **options):
        engine, model, optimizer, loader = setup(
            dataset=TensorDataset(1e3 * torch.randn(2, 1, 6, 6), torch.tensor([0, 1])),
            batch_size=2,  # all records in every batch
            lr=0.0,
            rehearsal=False,
            **options,
        )
        optimizer.noise = ScriptedNoise()
        return engine, model, optimizer, loader

    def step(self, model, optimizer, x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    def test_a_logical_step_that_was_broken_off_does_not_leak_into_the_next(self):
        _, model, optimizer, loader = self.run(max_physical_batch_size=1)
        for _ in range(3):
            for x, y in loader:
                self.step(model, optimizer, x, y)
                break
        train(model, optimizer, loader)
        assert float(private_gradient(model).norm()) * 2 <= 2 * (1 + 1e-6), "two records, at most one bound each"

    def test_a_last_part_that_was_skipped_is_missed(self):
        _, model, optimizer, loader = self.run(max_physical_batch_size=1)

        def all_but_the_last():
            for x, y in loader:
                if not loader.current.is_last:
                    self.step(model, optimizer, x, y)

        with pytest.raises(RuntimeError, match="was not stepped"):
            all_but_the_last()
        train(model, optimizer, loader)
        assert float(private_gradient(model).norm()) * 2 <= 2 * (1 + 1e-6)

    def test_without_poisson_sampling_a_batch_must_be_seen_once_too(self):
        engine = PrivacyEngine(relation=Relation.REPLACE_ONE)
        _, model, optimizer, loader = self.run(engine=engine, poisson_sampling=False, sample_rate=1.0)
        x, y = next(iter(loader))
        for _ in range(2):
            loss = F.cross_entropy(model(x), y)
            loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second backward pass through the same graph"):
            loss.backward()
        with pytest.raises(RuntimeError, match="exactly once"):
            optimizer.step()

    def test_a_batch_cannot_be_stepped_twice(self):
        """Two steps on one draw are not two draws: sampling would be accounted for twice, but happened once."""
        engine, model, optimizer, loader = self.run()
        x, y = next(iter(loader))
        self.step(model, optimizer, x, y)
        with pytest.raises(RuntimeError, match="stepped already"):
            self.step(model, optimizer, x, y)
        assert engine.accountant.ledger.steps == 1

    def test_zero_grad_forgets_what_was_recorded(self):
        _, model, optimizer, loader = self.run()
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            self.step(model, optimizer, x, y)
        assert float(private_gradient(model).norm()) * 2 <= 2 * (1 + 1e-6)


class TestTheLedgerIsToldTheTruth:
    def test_training_on_the_original_loader_is_refused(self):
        """Its batches are fixed or shuffled: accounted as Poisson, epsilon would be far too small."""
        engine, model, optimizer, _ = setup()
        x, y = task().tensors
        F.cross_entropy(model(x[:BATCH]), y[:BATCH]).backward()
        with pytest.raises(RuntimeError, match="that make_private returned"):
            optimizer.step()
        assert engine.accountant.ledger.steps == 0

    def test_the_rate_of_a_loader_cannot_be_changed(self):
        _, _, _, loader = setup()
        for name in ("sample_rate", "batch_size", "expected_batch_size"):
            with pytest.raises((AttributeError, ValueError), match="set"):
                setattr(loader, name, 1.0)
            assert loader.batch_size == loader.expected_batch_size == BATCH

    @pytest.mark.parametrize("change", ["clipping", "freeze"])
    def test_bounds_cannot_change_within_a_logical_step(self, change):
        """Samples clipped at 10 would be noised as if clipped at 1."""
        _, model, optimizer, loader = setup(max_physical_batch_size=8, clipping=FlatClipping(10.0), rehearsal=False)

        def run():
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                if change == "clipping":
                    optimizer.clipping = FlatClipping(1.0)
                else:
                    model[0].requires_grad_(False)

        with pytest.raises(RuntimeError, match="within a logical step"):
            run()

    def test_between_logical_steps_they_can(self):
        _, model, optimizer, loader = setup(max_physical_batch_size=8)
        train(model, optimizer, loader)
        optimizer.clipping = FlatClipping(0.5)
        train(model, optimizer, loader)

    def test_a_criterion_that_contradicts_the_reduction_is_refused(self):
        with pytest.raises(ValueError, match="give both the same"):
            setup(criterion=nn.CrossEntropyLoss(reduction="sum"))


class TestOnlyReleasedGradientsAreUsed:
    def test_foreign_parameters_cannot_be_added(self):
        _, _, optimizer, _ = setup()
        with pytest.raises(ValueError, match="made private"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})

    def test_own_parameters_can(self):
        model = cnn()
        engine = PrivacyEngine(seed=0, reproducibility_over_privacy=True)
        original = torch.optim.SGD(model[3].parameters(), lr=0.1)
        loader = DataLoader(task(), batch_size=BATCH)
        _, optimizer, loader = engine.make_private(
            module=model, optimizer=original, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.2})
        before = model[0].weight.detach().clone()
        train(model, optimizer, loader)
        assert not torch.equal(model[0].weight, before)

    def test_a_head_replaced_afterwards_is_refused(self):
        _, model, optimizer, loader = setup()
        model[3] = nn.Linear(64, 3)
        with pytest.raises(ValueError, match="change the model first"):
            train(model, optimizer, loader)

    def test_freezing_between_backward_and_step_does_not_let_a_plain_gradient_through(self):
        _, model, optimizer, loader = setup()
        for x, y in loader:
            optimizer.zero_grad()
            (F.cross_entropy(model(x), y) + F.conv2d(x, model[0].weight).mean()).backward()
            model[0].weight.requires_grad_(False)
            with pytest.raises(RuntimeError, match=r"outside its layer|did not release"):
                optimizer.step()
            break

    def test_hooks_of_the_optimizer(self):
        _, model, optimizer, loader = setup()
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        train(model, optimizer, loader)
        assert calls == ["before", "after"] * 6

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, pickle.dumps])
    def test_a_private_optimizer_is_not_copied(self, duplicate):
        """Torch lets a copy patch the class, so that no private optimizer of the process could step any more."""
        _, model, optimizer, loader = setup()
        with pytest.raises(TypeError, match="one run"):
            duplicate(optimizer)
        train(model, optimizer, loader)
        assert optimizer.steps == len(loader)


class TestAccounting:
    def test_changing_the_noise_is_recorded(self):
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        optimizer.noise_multiplier = 2.0
        train(model, optimizer, loader)
        assert [(p.noise_multiplier, p.steps) for p in engine.accountant.history] == [(1.0, 6), (2.0, 6)]

    def test_changing_the_rate_is_recorded(self):
        """A second run of the same engine, with other batches, goes on in the same ledger."""
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=optimizer.original_optimizer,
            data_loader=DataLoader(task(), batch_size=80),
            noise_multiplier=1.5,
            max_grad_norm=1.0,
        )
        train(model, optimizer, loader)
        phases = [(1.0, BATCH / N, 6), (1.5, 80 / N, 3)]
        assert [tuple(p) for p in engine.accountant.history] == phases
        assert engine.get_epsilon(1e-3) > epsilon(1.0, BATCH / N, 6, 1e-3)

    def test_beyond_the_budget_it_warns_once(self):
        engine, model, optimizer, loader = self.planned(stop_at_budget=False)
        train(model, optimizer, loader, epochs=2)
        with pytest.warns(UserWarning, match="budget of epsilon 4") as caught:
            train(model, optimizer, loader, epochs=2)
        assert len([w for w in caught if "budget" in str(w.message)]) == 1
        assert engine.get_epsilon(1e-3) > 4

    def test_or_stops_cleanly(self):
        engine, model, optimizer, loader = self.planned(stop_at_budget=True)
        train(model, optimizer, loader, epochs=5)
        assert engine.accountant.ledger.steps == 12
        assert engine.get_epsilon(1e-3) <= 4
        loader.stop_when = lambda: False
        x, y = next(iter(loader))
        before = weights(model).clone()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with pytest.raises(BudgetExhausted, match="12 steps"):
            optimizer.step()
        torch.testing.assert_close(weights(model), before)
        assert engine.accountant.ledger.steps == 12

    @pytest.mark.parametrize("change_at", [0, 5])
    def test_less_noise_than_planned_stops_earlier(self, change_at):
        engine, model, optimizer, loader = self.planned(stop_at_budget=True)
        for _ in range(3):
            for x, y in loader:
                if optimizer.steps == change_at:
                    optimizer.noise_multiplier = 0.7 * optimizer.noise_multiplier
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                try:
                    optimizer.step()
                except BudgetExhausted:
                    break
        assert engine.accountant.ledger.steps < 12
        assert engine.get_epsilon(1e-3) <= 4

    def test_the_budget_holds_for_a_second_run_of_the_engine(self):
        """It would be forgotten in silence."""
        engine, model, optimizer, loader = self.planned(stop_at_budget=True)
        train(model, optimizer, loader)
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=optimizer.original_optimizer,
            data_loader=DataLoader(task(), batch_size=BATCH),
            noise_multiplier=optimizer.noise_multiplier / 1.1,
            max_grad_norm=1.0,
        )
        train(model, optimizer, loader, epochs=4)
        assert 6 < engine.accountant.ledger.steps < 12
        assert engine.get_epsilon(1e-3) <= 4

    def test_the_budget_holds_after_a_call_that_was_refused(self):
        """The refused call has ended the run that had the budget."""
        engine, model, optimizer, loader = self.planned(stop_at_budget=True)
        train(model, optimizer, loader)
        sigma, mixing = optimizer.noise_multiplier, nn.Sequential(cnn(), nn.BatchNorm1d(3))
        for network in (mixing, cnn()):
            with pytest.raises(ValueError, match="depends on the others") if network is mixing else nullcontext():
                _, optimizer, loader = engine.make_private(
                    module=network,
                    optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
                    data_loader=DataLoader(task(), batch_size=BATCH),
                    noise_multiplier=sigma,
                    max_grad_norm=1.0,
                )
        train(network, optimizer, loader, epochs=4)
        assert engine.accountant.ledger.steps == 12
        assert engine.get_epsilon(1e-3) <= 4

    def planned(self, **options):
        model = cnn()
        engine = PrivacyEngine(seed=0, reproducibility_over_privacy=True)
        return engine, *engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(task(), batch_size=BATCH),
            target_epsilon=4.0,
            target_delta=1e-3,
            epochs=2,
            max_grad_norm=1.0,
            **options,
        )

    def test_replace_one_doubles_the_noise(self):
        engine = PrivacyEngine(relation=Relation.REPLACE_ONE, seed=0, reproducibility_over_privacy=True)
        _, model, optimizer, loader = setup(engine=engine)
        train(model, optimizer, loader)
        assert optimizer.relation is Relation.REPLACE_ONE
        assert engine.get_epsilon(1e-3) == pytest.approx(
            epsilon(1.0, BATCH / N, 6, 1e-3, relation=Relation.REPLACE_ONE)
        )


class TestErrors:
    def test_batch_norm(self):
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
        engine = PrivacyEngine()
        assert not engine.is_compatible(module=model)
        with pytest.raises(ValueError, match="GroupNorm"):
            setup(model)
        fixed = engine.get_compatible_module(model)
        assert engine.is_compatible(module=fixed)
        _, model, optimizer, loader = setup(fixed)
        train(model, optimizer, loader)

    def test_no_trainable_parameter(self):
        with pytest.raises(ValueError, match="no trainable parameter"):
            setup(cnn().requires_grad_(False))

    def test_an_optimizer_of_another_model(self):
        with pytest.raises(ValueError, match="not the model's"):
            PrivacyEngine().make_private(
                module=cnn(),
                optimizer=torch.optim.SGD(cnn().parameters(), lr=0.1),
                data_loader=DataLoader(task(), batch_size=BATCH),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
            )

    def test_private_already(self):
        engine, model, optimizer, _ = setup()
        with pytest.raises(ValueError, match="private already"):
            engine.validate(module=model, optimizer=optimizer)
        with pytest.raises(TypeError, match="DataLoader"):
            engine.validate(module=model, data_loader=[1, 2])

    def test_another_model_is_trained(self):
        _, _, optimizer, loader = setup()
        other = cnn()
        x, y = next(iter(loader))
        F.cross_entropy(other(x), y).backward()
        with pytest.raises(RuntimeError, match="make_private returned"):
            optimizer.step()

    def test_two_backward_passes_over_the_same_samples(self):
        """Clipped by themselves, they would let a sample count twice."""
        _, model, optimizer, loader = setup()
        x, y = next(iter(loader))
        F.cross_entropy(model(x), y).backward()
        model(x).square().mean().backward()
        with pytest.raises(RuntimeError, match="add them and call backward"):
            optimizer.step()

    def test_nan_loss(self):
        _, model, optimizer, loader = setup(rehearsal=False)
        x, y = next(iter(loader))
        (F.cross_entropy(model(x), y) * math.nan).backward()
        with pytest.warns(NonFiniteWarning, match="check the loss for NaN"):
            optimizer.step()
        assert bool(weights(model).isfinite().all())

    def test_delta_too_large_and_epsilon_unreachable(self):
        def plan(**options):
            model = cnn()
            return PrivacyEngine().make_private_with_epsilon(
                **{
                    "module": model,
                    "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
                    "data_loader": DataLoader(task(), batch_size=BATCH),
                    "target_epsilon": 2.0,
                    "target_delta": 1e-3,
                    "epochs": 2,
                    "max_grad_norm": 1.0,
                }
                | options
            )

        with pytest.warns(UserWarning, match="1/N"):
            plan(target_delta=0.1)
        engine, _, _, _ = setup()
        with pytest.warns(UserWarning, match="1/N"):
            engine.get_epsilon(0.1)
        with pytest.raises(ValueError, match="out of reach"):
            plan(target_epsilon=1e-8, target_delta=1e-9, epochs=10**5)

    def test_losses_that_divide_by_the_batch(self):
        with pytest.raises(ValueError, match="class weights"):
            setup(criterion=nn.CrossEntropyLoss(weight=torch.ones(3)))
        setup(criterion=nn.CrossEntropyLoss())
        with pytest.raises(ValueError, match="predicted"):
            setup(noise_generator=torch.Generator())

    def test_automatic_clipping_needs_a_positive_stability(self):
        with pytest.raises(ValueError, match="stability"):
            AutomaticClipping(1.0, stability=0.0)

    def test_other_bad_input(self):
        with pytest.raises(ValueError, match="'flat', 'per_layer' or 'automatic'"):
            setup(clipping="adaptive")
        with pytest.raises(ValueError, match="per_layer"):
            setup(max_grad_norm=[1.0, 1.0])
        with pytest.raises(ValueError, match="3 clipping bounds for 2 blocks"):
            setup(max_grad_norm=[1.0, 1.0, 1.0], clipping="per_layer")
        with pytest.raises(ValueError, match="batch_first"):
            setup(batch_first=False)
        with pytest.raises(ValueError, match="'mean' or 'sum'"):
            setup(loss_reduction="none")
        with pytest.raises(ValueError, match="reproducibility_over_privacy"):
            PrivacyEngine(seed=0)
        with pytest.raises(ValueError, match="'pld' or 'rdp'"):
            PrivacyEngine(accountant="gdp")
        with pytest.raises(RuntimeError, match="make_private"):
            PrivacyEngine().save_checkpoint(path="x", module=cnn())

        class Stream(IterableDataset):
            def __iter__(self):
                yield from task()

        model = cnn()
        with pytest.raises(TypeError, match="map-style"):
            PrivacyEngine().make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(Stream(), batch_size=4),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
            )


class Leaking(SecureNoise):
    """Leaves a gradient in a parameter, after the gradients were looked at and before the optimizer moves anything."""

    def __init__(self, parameter):
        super().__init__()
        self._parameter = parameter

    def normal(self, shape, **options):
        self._parameter.grad = torch.ones_like(self._parameter)
        return super().normal(shape, **options)


class TestLastLooks:
    """Checks that a correct loop never meets: what would leave without noise, or beside the budget, is stopped."""

    def test_a_gradient_that_appears_during_the_release_moves_nothing(self):
        """Catches a step that looks at plain gradients only before it calls noise sources and filters of one's own."""
        model = cnn()
        model[0].bias.requires_grad_(False)
        _, model, optimizer, loader = setup(model, rehearsal=False)
        optimizer.noise = Leaking(model[0].bias)
        before = weights(model).clone()
        with pytest.raises(RuntimeError, match="did not release"):
            train(model, optimizer, loader)
        assert torch.equal(weights(model), before)

    def test_parameters_beside_the_models_own_are_refused(self):
        model, other = cnn(), nn.Linear(2, 2)
        with pytest.raises(ValueError, match="not the model's"):
            PrivacyEngine().make_private(
                module=model,
                optimizer=torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1),
                data_loader=DataLoader(task(), batch_size=BATCH),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
            )

    def test_a_budget_is_not_planned_on_an_engine_that_has_spent(self):
        """Catches a plan of the whole epsilon beside steps that are in the ledger already."""
        engine, *made = setup(rehearsal=False)
        train(*made)
        model = cnn()
        with pytest.raises(ValueError, match="spent budget already"):
            engine.make_private_with_epsilon(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(task(), batch_size=BATCH),
                target_epsilon=1.0,
                target_delta=1e-5,
                epochs=1,
                max_grad_norm=1.0,
            )


def _doubled(loader):
    for x, y in loader:
        yield x.double(), y


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 3), (7 / (N / BATCH), 7), (2, 12), (0.4, 3)])
def test_part_of_an_epoch_counts_by_its_steps(epochs, steps):
    engine, model = PrivacyEngine(), cnn()
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(task(), batch_size=BATCH),
        target_epsilon=2.0,
        target_delta=1e-3,
        epochs=epochs,
        max_grad_norm=1.0,
    )
    assert engine._run.books.budget.planned.steps == steps
