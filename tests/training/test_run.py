"""Nothing is mixed: a checkpoint continues its own run, or is refused and changes nothing."""

import warnings

import pytest
import torch
from tests.support.checkpoints import go_on, refused, save, trained
from tests.support.private_runs import BATCH, cnn, setup, task, train, weights

from spectral_dp import CheckpointError, PrivacyEngine, SpectralConfig
from spectral_dp.mechanism.filters import AdaptiveFilter, Filter
from spectral_dp.mechanism.gains import Gains
from spectral_dp.training import checkpoint


class TestResuming:
    def test_goes_on_as_if_never_interrupted(self, tmp_path):
        """With seeded noise and batches, to the last digit: model, optimizer, ledger, sampler, noise."""
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader, epochs=3)

        first, other, opt, load = setup()
        train(other, opt, load)
        save(tmp_path / "run.pt", first, other, note="halfway")
        second, resumed, opt, load = setup()
        extra = second.load_checkpoint(path=tmp_path / "run.pt", module=resumed)
        train(resumed, opt, load, epochs=2)
        assert extra == {"note": "halfway"}
        torch.testing.assert_close(weights(resumed), weights(model), rtol=0, atol=0)
        assert second.accountant.ledger.phases == engine.accountant.ledger.phases
        assert second.accountant.ledger.continues(first.accountant.ledger)
        assert second.get_epsilon(1e-3) == engine.get_epsilon(1e-3)

    def test_in_the_middle_of_an_epoch_and_of_a_logical_step(self, tmp_path):
        """What was summed of an incomplete step is not saved (it has no noise yet); the step is drawn again."""
        engine, model, optimizer, loader = setup(max_physical_batch_size=8)
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if optimizer.steps == 3 and not loader.current.is_last:
                break
        save(tmp_path / "run.pt", engine, model)
        second, resumed, opt, load = setup(max_physical_batch_size=8)
        second.load_checkpoint(path=tmp_path / "run.pt", module=resumed)
        train(resumed, opt, load)
        assert second.accountant.ledger.steps == 6

    def test_the_second_run_of_an_engine(self, tmp_path):
        """Its ledger holds the first run too."""

        def second_run(engine, model):
            return engine.make_private(
                module=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=torch.utils.data.DataLoader(task(), batch_size=80),
                noise_multiplier=1.5,
                max_grad_norm=1.0,
            )

        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        optimizer.zero_grad()
        train(*second_run(engine, model))
        save(tmp_path / "run.pt", engine, model)
        resumed = PrivacyEngine(seed=7, reproducibility_over_privacy=True)
        other, _, _ = second_run(resumed, cnn())
        resumed.load_checkpoint(path=tmp_path / "run.pt", module=other)
        assert resumed.accountant.ledger == engine.accountant.ledger
        assert resumed.accountant.ledger.steps == 9

    def test_filters_keep_what_they_learnt(self, tmp_path):
        config = SpectralConfig(conv_filter=AdaptiveFilter())
        engine, model, optimizer, loader = setup(spectral=config)
        train(model, optimizer, loader)
        save(tmp_path / "run.pt", engine, model)
        second, resumed, opt, _ = setup(spectral=config)
        second.load_checkpoint(path=tmp_path / "run.pt", module=resumed)
        assert opt.gradients.filter_state() == optimizer.gradients.filter_state() != {}

    def test_a_secret_run_saves_no_secrets(self, tmp_path):
        model = cnn()
        engine = PrivacyEngine()
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=torch.utils.data.DataLoader(task(), batch_size=BATCH),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        save(tmp_path / "run.pt", engine, model)
        state = checkpoint.load(tmp_path / "run.pt")
        assert state["noise"] == {}
        assert set(state["sampler"]) == {"epoch", "step", "size", "batch_size", "seed"}
        assert state["sampler"]["seed"] is None

    @pytest.mark.parametrize(
        "other",
        [{"noise_multiplier": 2.0}, {"max_grad_norm": 0.5}, {"spectral": SpectralConfig(conv_ratio=0.5)}],
        ids=str,
    )
    def test_another_configuration_is_refused_and_changes_nothing(self, tmp_path, other):
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        save(tmp_path / "run.pt", engine, model)
        second, resumed, _, _ = setup(**other)
        before = weights(resumed).clone()
        with pytest.raises(CheckpointError, match="other settings"):
            second.load_checkpoint(path=tmp_path / "run.pt", module=resumed)
        torch.testing.assert_close(weights(resumed), before)
        assert second.accountant.ledger.steps == 0

    def test_going_back_in_the_same_engine_is_refused(self, tmp_path):
        """Choosing the best of several checkpoints uses all the steps: the ledger must not forget the later ones."""
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        save(tmp_path / "run.pt", engine, model)
        train(model, optimizer, loader)
        with pytest.raises(CheckpointError, match=r"12 steps and the saved one, of the same run, lists 6 only"):
            engine.load_checkpoint(path=tmp_path / "run.pt", module=model)
        assert engine.accountant.ledger.steps == 12

    def test_another_architecture_is_refused_and_changes_nothing(self, tmp_path):
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        save(tmp_path / "run.pt", engine, model)
        other = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(64, 3))
        second, other, _, _ = setup(other)
        before = weights(other).clone()
        with pytest.raises(CheckpointError, match=r"3\.weight"):
            second.load_checkpoint(path=tmp_path / "run.pt", module=other)
        torch.testing.assert_close(weights(other), before)

    def test_a_failure_half_way_through_loading_changes_nothing(self, tmp_path):
        engine, model, optimizer, loader = setup()
        train(model, optimizer, loader)
        save(tmp_path / "run.pt", engine, model)
        state = checkpoint.load(tmp_path / "run.pt")
        state["sampler"]["step"] = 99  # read last, after model and optimizer have been restored
        checkpoint.save(state, tmp_path / "run.pt")
        second, resumed, opt, _ = setup()
        before = weights(resumed).clone()
        with pytest.raises(ValueError, match="position"):
            second.load_checkpoint(path=tmp_path / "run.pt", module=resumed)
        torch.testing.assert_close(weights(resumed), before)
        assert (second.accountant.ledger.steps, opt.steps) == (0, 0)

    def test_filters_of_ones_own_resume(self, tmp_path):
        class EveryOther(Filter):
            def gains(self, transform, shape, step=0):
                kept = torch.zeros(shape, dtype=torch.bool)
                kept.view(-1)[::2] = True
                return Gains(pre=kept, post=kept)

        engine, model, optimizer, loader = setup(spectral=SpectralConfig(conv_filter=EveryOther()))
        train(model, optimizer, loader)
        save(tmp_path / "run.pt", engine, model)
        second, resumed, _, _ = setup(spectral=SpectralConfig(conv_filter=EveryOther()))
        second.load_checkpoint(path=tmp_path / "run.pt", module=resumed)
        torch.testing.assert_close(weights(resumed), weights(model))


class TestACheckpointContinuesItsOwnRunOnly:
    def test_another_run_with_as_many_steps_is_refused(self, tmp_path):
        """Reproduced before: the ledger said 10 steps after 20 releases."""
        engine, model, _, _ = trained(10)
        save(tmp_path / "own.pt", engine, model)
        other, its_model, _, _ = trained(10)
        save(tmp_path / "other.pt", other, its_model)
        refused(engine, model, tmp_path / "other.pt", "lists 10 of another run")
        engine.load_checkpoint(path=tmp_path / "own.pt", module=model)  # the controls: its own checkpoint,
        new, fresh, _, _ = setup()
        new.load_checkpoint(path=tmp_path / "other.pt", module=fresh)  # and an engine that has released nothing
        assert new.accountant.ledger == other.accountant.ledger

    def test_another_run_with_more_steps_is_refused(self, tmp_path):
        engine, model, _, _ = trained(3)
        other, its_model, _, _ = trained(10)
        save(tmp_path / "other.pt", other, its_model)
        refused(engine, model, tmp_path / "other.pt", "lists 10 of another run")

    @pytest.mark.parametrize("shared", [0, 4])
    def test_two_continuations_of_one_checkpoint_are_not_mixed(self, tmp_path, shared):
        """Same identity, same settings, equally many equal steps: yet each has released what the other has not."""
        engine, model, _, _ = trained(shared)
        save(tmp_path / "shared.pt", engine, model)
        other, its_model, its_optimizer, its_loader = setup()
        other.load_checkpoint(path=tmp_path / "shared.pt", module=its_model)
        go_on(its_model, its_optimizer, its_loader, 6)
        save(tmp_path / "other.pt", other, its_model)
        engine.load_checkpoint(
            path=tmp_path / "other.pt", module=model
        )  # the control: the first may go on as the other
        assert engine.accountant.ledger.steps == shared + 6
        twin, twin_model, twin_optimizer, twin_loader = setup()
        with pytest.warns(UserWarning, match="another engine is at step"):
            twin.load_checkpoint(path=tmp_path / "shared.pt", module=twin_model)
        go_on(twin_model, twin_optimizer, twin_loader, 6)
        assert twin.accountant.ledger.phases == other.accountant.ledger.phases
        refused(twin, twin_model, tmp_path / "other.pt", "both continued the same run")

    def test_the_second_run_of_another_engine_is_refused(self, tmp_path):
        """The steps of an engine's earlier runs count: they are on its ledger."""
        engine, model, _, _ = trained(6)
        setup(model, engine)
        other, its_model, _, _ = trained(6)
        setup(its_model, other)
        save(tmp_path / "other.pt", other, its_model)
        refused(engine, model, tmp_path / "other.pt", "lists 6 of another run")
        save(tmp_path / "own.pt", engine, model)
        engine.load_checkpoint(path=tmp_path / "own.pt", module=model)  # the control

    def test_going_back_with_a_new_engine_is_warned_of(self, tmp_path):
        """Killed and resumed, or gone back on purpose: a file cannot tell, but within a process it is known."""
        engine, model, optimizer, loader = trained(6)
        save(tmp_path / "run.pt", engine, model)
        new, fresh, _, _ = setup()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            new.load_checkpoint(path=tmp_path / "run.pt", module=fresh)  # the control: nothing came after it
        go_on(model, optimizer, loader, 3)
        del engine, optimizer, loader  # what was released stays released
        new, fresh, _, _ = setup()
        with pytest.warns(
            UserWarning, match=r"checkpoint of step 6 does not list: another engine is at step 9"
        ) as seen:
            new.load_checkpoint(path=tmp_path / "run.pt", module=fresh)
        assert seen[0].filename == __file__

    def test_the_ledger_stays_one_object(self, tmp_path):
        """Catches an account that somebody looked up before loading, and that shows nothing of it."""
        engine, model, _, _ = trained(6)
        save(tmp_path / "run.pt", engine, model)
        new, fresh, optimizer, loader = setup()
        looked_up = new.accountant.ledger
        new.load_checkpoint(path=tmp_path / "run.pt", module=fresh)
        go_on(fresh, optimizer, loader, 1)
        assert looked_up.steps == new.accountant.ledger.steps == 7


class TestPartsOfAnotherRun:
    """Catches a checkpoint that mixes two runs: weights of one beside the ledger of the other."""

    @pytest.mark.parametrize("method", ["save_checkpoint", "load_checkpoint"])
    def test_are_refused(self, tmp_path, method):
        engine, model, optimizer, _ = trained(2)
        _, stranger, its_optimizer, _ = trained(4)
        save(tmp_path / "run.pt", engine, model)
        use = getattr(engine, method)
        with pytest.raises(ValueError, match="not the optimizer that make_private returned last"):
            use(path=tmp_path / "run.pt", module=model, optimizer=its_optimizer)
        with pytest.raises(ValueError, match=r"not the model that was made private last.*checkpoint_dict"):
            use(path=tmp_path / "run.pt", module=stranger)
        use(path=tmp_path / "run.pt", module=model, optimizer=optimizer)  # the control

    def test_of_an_earlier_run_of_the_engine_are_refused(self, tmp_path):
        engine, model, optimizer, _ = trained(2)
        setup(model, engine)
        with pytest.raises(ValueError, match="not the optimizer"):
            engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)

    def test_a_wrapper_of_the_model_is_the_model(self, tmp_path):
        engine, model, _, _ = trained(2)
        wrapped = torch.nn.Sequential(model)
        engine.save_checkpoint(path=tmp_path / "run.pt", module=wrapped)
        engine.load_checkpoint(path=tmp_path / "run.pt", module=wrapped)


class TestWithinALogicalStep:
    """Loading drops what a logical step has summed: the rest of it must not be released as if it were whole."""

    @pytest.fixture
    def path(self, tmp_path):
        engine, model, _, _ = trained(6, max_physical_batch_size=8)
        save(tmp_path / "run.pt", engine, model)
        return tmp_path / "run.pt"

    @pytest.mark.parametrize("stepped", [False, True])
    def test_nothing_is_loaded(self, path, stepped):
        engine, model, optimizer, loader = setup(max_physical_batch_size=8, rehearsal=False)
        for x, y in loader:
            assert not loader.current.is_last
            if stepped:
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
            refused(engine, model, path, "middle of a logical step.*right after make_private", RuntimeError)
            break

    def test_nor_when_its_last_part_has_been_drawn(self, path):
        engine, model, optimizer, loader = setup(max_physical_batch_size=8)
        for x, y in loader:
            if loader.current.is_last:
                break
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        refused(engine, model, path, "middle of a logical step", RuntimeError)

    def test_a_batch_drawn_before_is_not_stepped_after(self, tmp_path):
        saved, model, _, _ = trained(6)
        save(tmp_path / "run.pt", saved, model)
        engine, model, optimizer, loader = setup()
        x, y = next(iter(loader))
        torch.nn.functional.cross_entropy(model(x), y).backward()
        engine.load_checkpoint(path=tmp_path / "run.pt", module=model)
        with pytest.raises(RuntimeError, match="before a batch was drawn"):
            optimizer.step()
        go_on(model, optimizer, loader, 1)  # the control: what is drawn now is
        assert engine.accountant.ledger.steps == 7
