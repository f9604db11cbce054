"""Opacus' schedulers of noise and clipping act on our optimizer, are accounted for, and are kept in checkpoints."""

from collections import Counter

import dp_accounting
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from tests.support.opacus_runs import BATCH, N, private_run, train

from spectral_dp import CheckpointError, PrivacyEngine
from spectral_dp.accounting import Phase

schedulers = pytest.importorskip("opacus.schedulers")

NOISE = {
    "exponential": lambda o: schedulers.ExponentialNoise(o, gamma=0.9),
    "step": lambda o: schedulers.StepNoise(o, step_size=2, gamma=1.5),
    "lambda": lambda o: schedulers.LambdaNoise(o, noise_lambda=lambda epoch: 1 / (1 + epoch)),
}
CLIP = {
    "exponential": lambda o: schedulers.ExponentialGradClip(o, gamma=0.9),
    "step": lambda o: schedulers.StepGradClip(o, step_size=2, gamma=0.5),
    "lambda": lambda o: schedulers.LambdaGradClip(o, scheduler_function=lambda epoch: 1 / (1 + epoch)),
}


def run(**options):
    engine = PrivacyEngine(seed=5, reproducibility_over_privacy=True)
    return private_run(engine=engine, noise_multiplier=2.0, **options)


@pytest.mark.parametrize(("name", "kinds"), [("noise_multiplier", NOISE), ("max_grad_norm", CLIP)])
@pytest.mark.parametrize("kind", NOISE)
def test_they_set_the_same_values_as_in_opacus(name, kinds, kind):
    values = []
    for library in ("opacus", "spectral_dp"):
        _, _, optimizer, _ = private_run(library, noise_multiplier=2.0, max_grad_norm=3.0)
        scheduler = kinds[kind](optimizer)
        values.append([getattr(optimizer, name)])
        for _ in range(4):
            scheduler.step()
            values[-1].append(getattr(optimizer, name))
    assert values[0] == values[1]
    assert len(set(values[0])) > 2


def oracle(sigmas):
    """Epsilon by dp_accounting for Poisson steps of these noise multipliers."""
    accountant = PLDAccountant()
    for sigma, steps in Counter(sigmas).items():
        step = dp_accounting.PoissonSampledDpEvent(BATCH / N, dp_accounting.GaussianDpEvent(sigma))
        accountant.compose(step, steps)
    return accountant.get_epsilon(1e-3)


class TestTheLedger:
    def test_epsilon_is_that_of_the_noise_of_every_step(self):
        engine, model, optimizer, loader = run()
        scheduler = NOISE["exponential"](optimizer)
        for _ in range(3):
            train(model, optimizer, loader)
            scheduler.step()
        sigmas = [2.0 * 0.9**epoch for epoch in range(3) for _ in range(len(loader))]
        assert engine.accountant.history == [
            Phase(pytest.approx(2.0 * 0.9**epoch), BATCH / N, len(loader)) for epoch in range(3)
        ]
        assert engine.get_epsilon(1e-3) == pytest.approx(oracle(sigmas), rel=1e-3)
        # Negative controls: ledgers that miss the schedule, or apply it an epoch late, would say something else.
        assert engine.get_epsilon(1e-3) > 1.05 * oracle([2.0] * len(sigmas))
        assert engine.get_epsilon(1e-3) > 1.02 * oracle([2.0] * len(loader) + sigmas[: -len(loader)])

    def test_a_schedule_at_every_batch_begins_after_the_rehearsal(self):
        """The loop is the user's: it steps the schedulers in the rehearsal, too."""
        engine, model, optimizer, loader = run()
        noise, clip = NOISE["exponential"](optimizer), CLIP["exponential"](optimizer)

        def both():
            noise.step()
            clip.step()

        train(model, optimizer, loader, after_step=both)
        steps = len(loader)
        assert [phase.noise_multiplier for phase in engine.accountant.history] == pytest.approx(
            [2.0 * 0.9**step for step in range(steps)]
        )
        assert optimizer.max_grad_norm == pytest.approx(0.9**steps)
        assert noise.last_epoch == clip.last_epoch == steps

    def test_a_budget_follows_the_schedule(self):
        _, model, optimizer, loader = run()
        plan = PrivacyEngine()
        _, optimizer, loader = plan.make_private_with_epsilon(
            module=model,
            optimizer=optimizer.original_optimizer,
            data_loader=loader,
            target_epsilon=2.0,
            target_delta=1e-3,
            epochs=4,
            max_grad_norm=1.0,
            stop_at_budget=True,
        )
        scheduler = schedulers.ExponentialNoise(optimizer, gamma=0.7)
        for _ in range(4):
            train(model, optimizer, loader)
            scheduler.step()
        assert plan.get_epsilon(1e-3) <= 2.0
        assert len(plan.accountant) < 4 * len(loader), "less noise than planned lasts for fewer steps"


class TestCheckpoints:
    @pytest.mark.parametrize("kind", NOISE)
    def test_a_resumed_schedule_goes_on(self, kind, tmp_path):
        """Same noise, bounds, ledger and weights as in a run that was never interrupted."""
        ends = []
        for interrupted in (False, True):
            engine, model, optimizer, loader = run()
            given = {"noise_scheduler": NOISE[kind](optimizer), "grad_clip_scheduler": CLIP[kind](optimizer)}
            for epoch in range(4):
                if interrupted and epoch == 2:
                    engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer, **given)
                    engine, model, optimizer, loader = run()
                    given = {"noise_scheduler": NOISE[kind](optimizer), "grad_clip_scheduler": CLIP[kind](optimizer)}
                    engine.load_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer, **given)
                train(model, optimizer, loader)
                for scheduler in given.values():
                    scheduler.step()
            ends.append((engine.accountant.history, optimizer.noise_multiplier, optimizer.max_grad_norm, model.weight))
        assert ends[0][:3] == ends[1][:3]
        torch.testing.assert_close(ends[0][3], ends[1][3])

    def test_values_set_by_hand_are_kept_too(self, tmp_path):
        engine, model, optimizer, loader = run()
        train(model, optimizer, loader)
        optimizer.noise_multiplier, optimizer.max_grad_norm = 3.0, 0.5
        engine.save_checkpoint(path=tmp_path / "run.pt", module=model)
        engine, model, optimizer, loader = run()
        engine.load_checkpoint(path=tmp_path / "run.pt", module=model)
        assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == (3.0, 0.5)

    def test_another_beginning_is_another_run(self, tmp_path):
        engine, model, optimizer, _ = run()
        NOISE["exponential"](optimizer).step()
        engine.save_checkpoint(path=tmp_path / "run.pt", module=model)
        engine = PrivacyEngine(seed=5, reproducibility_over_privacy=True)
        _, other, _, _ = private_run(engine=engine, noise_multiplier=2.0 * 0.9)
        with pytest.raises(CheckpointError, match=r"noise_multiplier: saved 2\.0, now 1\.8"):
            engine.load_checkpoint(path=tmp_path / "run.pt", module=other)

    def test_a_scheduler_is_not_left_behind(self, tmp_path):
        engine, model, optimizer, _ = run()
        noise = NOISE["exponential"](optimizer)
        engine.save_checkpoint(path=tmp_path / "with.pt", module=model, noise_scheduler=noise)
        engine.save_checkpoint(path=tmp_path / "without.pt", module=model)
        noise.step()
        with pytest.raises(CheckpointError, match=r"would be lost: give it as load_checkpoint\(noise_scheduler=...\)"):
            engine.load_checkpoint(path=tmp_path / "with.pt", module=model)
        with pytest.raises(CheckpointError, match="no state of a noise_scheduler: leave it out"):
            engine.load_checkpoint(path=tmp_path / "without.pt", module=model, noise_scheduler=noise)
        assert (noise.last_epoch, optimizer.noise_multiplier) == (1, 1.8), "nothing was changed"

    def test_schedulers_of_another_optimizer_are_refused(self, tmp_path):
        engine, model, _, _ = run()
        _, _, other, _ = run()
        with pytest.raises(ValueError, match="noise_scheduler acts on another optimizer"):
            engine.save_checkpoint(path=tmp_path / "x.pt", module=model, noise_scheduler=NOISE["exponential"](other))

    def test_an_edited_schedule_is_refused(self, tmp_path):
        """Less noise than the ledger lists, by hand: the seal covers the schedule."""
        engine, model, _, _ = run()
        engine.save_checkpoint(path=tmp_path / "run.pt", module=model)
        state = torch.load(tmp_path / "run.pt", weights_only=True)
        state["schedule"]["noise_multiplier"] = 0.1
        torch.save(state, tmp_path / "run.pt")
        with pytest.raises(CheckpointError, match="seal"):
            engine.load_checkpoint(path=tmp_path / "run.pt", module=model)
