"""The methods that train by steps, behind the interface of ``method.py``: ours, Opacus' DP-SGD, and plain training.

A method owns optimizer, sampling and accounting. The trainer (``trainer.py``) takes batches from it, computes losses
and calls ``step``; it need not know whether the run is private.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from spectral_dp.accounting import Ledger, warn_if_delta_too_large
from spectral_dp.experiments.diagnostics import Watched
from spectral_dp.experiments.feature_data import statistics_phases, statistics_release
from spectral_dp.experiments.feature_stages import is_filtered_in_cache
from spectral_dp.experiments.fine_tuning import is_fine_tuned
from spectral_dp.experiments.method import PRETRAINED_ROWS, Batch, Method, TrainingData
from spectral_dp.experiments.one_shot import OneShotMethod
from spectral_dp.experiments.optimizers import make_optimizer
from spectral_dp.experiments.settings import ONE_SHOT, ResolvedSettings, SettingsError
from spectral_dp.experiments.spectral import spectral_config
from spectral_dp.features import FeatureDataset
from spectral_dp.training.engine import PrivacyEngine
from spectral_dp.training.optimizer import PrivateOptimizer


def start(settings: ResolvedSettings, model: nn.Module, data: TrainingData) -> Method:
    """Makes the method that the settings name, ready for the first step."""
    if settings.method in ONE_SHOT:
        warn_if_delta_too_large(settings.delta, len(data.train_images))
        return OneShotMethod(settings, model, data)
    settings.sampling(len(data.train_images))  # or an error: batches are too large
    if settings.method in ("nonprivate", "opacus") and statistics_phases(settings):
        raise SettingsError(
            f"method {settings.method} has no ledger for private statistics: use feature_norm group, and "
            "feature_gains generated"
        )
    if settings.method == "nonprivate":
        return NonPrivateMethod(settings, model, data)
    warn_if_delta_too_large(settings.delta, len(data.train_images))
    if settings.method == "opacus":
        return OpacusMethod(settings, model, data)
    return EngineMethod(settings, model, data)


class PrivateMethod(Method):
    """A method that an engine, ours or Opacus', makes private."""

    engine: Any

    def __init__(self, settings: ResolvedSettings) -> None:
        self._settings = settings

    def _make_private(self, model: nn.Module, options: Mapping[str, Any], **with_epsilon: Any) -> None:
        """Asks the engine for the noise multiplier of the settings, or else for their epsilon."""
        settings = self._settings
        common = {"module": model, "optimizer": make_optimizer(settings, model), **options}
        if settings.noise_multiplier is not None:
            made = self.engine.make_private(noise_multiplier=settings.noise_multiplier, **common)
        else:
            budget = {"target_epsilon": settings.epsilon, "target_delta": settings.delta, "epochs": settings.epochs}
            made = self.engine.make_private_with_epsilon(**budget, **common, **with_epsilon)
        self.model, self.optimizer, self._loader = made

    def epsilon(self) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a delta above 1/N it was warned at the start
            return float(self.engine.get_epsilon(self._settings.delta))

    def facts(self) -> dict[str, Any]:
        return {
            "relation": str(self._settings.relation),
            "noise_multiplier": self.optimizer.noise_multiplier,
            "sample_rate": self._loader.sample_rate,
            "expected_batch_size": self.optimizer.expected_batch_size,
        }


class EngineMethod(PrivateMethod):
    """Spectral-DP, or DP-SGD by the same engine."""

    resumes_within_epochs = True
    engine: PrivacyEngine
    optimizer: PrivateOptimizer

    def __init__(self, settings: ResolvedSettings, model: nn.Module, data: TrainingData) -> None:
        super().__init__(settings)
        self.engine = PrivacyEngine(
            accountant=settings.accountant,
            relation=settings.relation,
            seed=settings.seed if settings.reproducible else None,
            reproducibility_over_privacy=settings.reproducible,
        )
        self.steps_per_epoch = math.ceil(len(data.train_images) / settings.batch_size)
        self.spectral = spectral_config(settings, model, settings.epochs * self.steps_per_epoch)
        is_filtered = self.spectral.layer_configs(model) or is_filtered_in_cache(settings)
        if settings.method == "spectral" and not is_filtered:
            warnings.warn("these settings filter no layer of this model, so this is plain DP-SGD", stacklevel=2)
        options = {
            "data_loader": DataLoader(data.training(), batch_size=settings.batch_size),
            "max_grad_norm": settings.layer_max_grad_norms or settings.max_grad_norm,
            "clipping": settings.clipping,
            "noise_allocation": settings.noise_allocation,
            "spectral": self.spectral,
            "max_physical_batch_size": _physical_batch_size(settings, data),
            "augmentation_multiplicity": settings.augmentation_multiplicity,
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="delta")  # warned of already
            self._statistics = statistics_release(settings, model, data)
            self._make_private(model, options, stop_at_budget=True, other_releases=statistics_phases(settings))
        if settings.unsafe_diagnostics:
            self.diagnostics = self.optimizer.clipping = Watched(self.optimizer.clipping)

    def batches(self) -> Iterator[Batch]:
        if self._statistics is not None and not self.ledger.steps:  # a resumed run has them, in its checkpoint
            self._statistics.release(self.ledger)
        for *views, labels in self._loader:
            assert self._loader.current is not None
            yield Batch(_side_by_side(views), labels, self._loader.current.is_last, self._loader.current.is_rehearsal)
        self.epoch += 1

    @property
    def ledger(self) -> Ledger:
        return self.engine.accountant.ledger

    def facts(self) -> dict[str, Any]:
        return super().facts() | {
            "library": "spectral-dp",
            "accountant": self._settings.accountant,
            "steps": self.optimizer.steps,  # of training: the ledger may list other releases, too
            "clipping": repr(self.optimizer.clipping),
            "noise_source": "seeded, reproducible" if self._settings.reproducible else "operating system, AES-256",
            "spectral": self.spectral.describe(),
            **(self._statistics.facts() if self._statistics else {}),
        }

    def save(self, path: Path, extra: Mapping[str, Any]) -> None:
        self.engine.save_checkpoint(path=path, module=self.model, checkpoint_dict=extra)

    def load(self, path: Path) -> dict[str, Any]:
        extra = self.engine.load_checkpoint(path=path, module=self.model)
        self.epoch = self._loader.position[0]
        return extra


class NonPrivateMethod(Method):
    """Ordinary training, without any privacy: shuffled batches, the last one smaller."""

    def __init__(self, settings: ResolvedSettings, model: nn.Module, data: TrainingData) -> None:
        self.model, self.optimizer = model, make_optimizer(settings, model)
        self._images, self._labels = data.train_images, data.train_labels
        self._batch_size, self._seed = settings.batch_size, settings.seed
        self.steps_per_epoch = math.ceil(len(self._images) / self._batch_size)

    def batches(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
        for index in torch.randperm(len(self._images), generator=generator).split(self._batch_size):
            yield Batch(self._images[index], self._labels[index], True)
        self.epoch += 1


class OpacusMethod(PrivateMethod):
    """DP-SGD by Opacus itself: its sampling, per-sample gradients, noise and accountant (PRV, or RDP)."""

    def __init__(self, settings: ResolvedSettings, model: nn.Module, data: TrainingData) -> None:
        try:
            import opacus
        except ImportError as error:
            raise SettingsError("method opacus needs Opacus: pip install 'spectral-dp[baseline]'") from error
        _refuse_for_opacus(settings)
        super().__init__(settings)
        self._version = opacus.__version__
        self._generator = torch.Generator().manual_seed(settings.seed) if settings.reproducible else None
        if self._generator is None:
            torch.seed()  # Opacus draws its noise from torch's generator, which initialisation has seeded
        options = {
            "data_loader": DataLoader(data.training(), batch_size=settings.batch_size, generator=self._generator),
            "max_grad_norm": settings.max_grad_norm,
            "noise_generator": self._generator,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its secure mode and its own defaults
            self.engine = opacus.PrivacyEngine(accountant="prv" if settings.accountant == "pld" else "rdp")
            self._make_private(model, options)
        self.steps_per_epoch = len(self._loader)
        self._ledger = Ledger()

    def batches(self) -> Iterator[Batch]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing")
            for *views, labels in self._loader:
                yield Batch(_side_by_side(views), labels, True)
        self.epoch += 1

    @property
    def ledger(self) -> Ledger:
        """Opacus' history in a ledger of ours, whose chain tells whose steps they are; Opacus does the accounting."""
        if missing := sum(steps for *_, steps in self.engine.accountant.history) - self._ledger.steps:
            self._ledger.record(self.optimizer.noise_multiplier, self._loader.sample_rate, missing)
        return self._ledger

    def epsilon(self) -> float:
        return super().epsilon() if len(self.engine.accountant) else 0.0  # Opacus cannot account for no step

    def facts(self) -> dict[str, Any]:
        return super().facts() | {
            "library": f"opacus {self._version}",
            "accountant": self.engine.accountant.mechanism(),
            "steps": self.ledger.steps,
            "clipping": f"flat, {self._settings.max_grad_norm:g}",
            "noise_source": "seeded, reproducible" if self._settings.reproducible else "torch generator",
        }

    def state(self) -> dict[str, Any]:
        ledger = {"ledger": self.ledger.state_dict()}
        return ledger | ({"generator": self._generator.get_state()} if self._generator else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._ledger.load_state_dict(state["ledger"])
        self.engine.accountant.history = [tuple(phase) for phase in self._ledger.phases]
        if self._generator is not None:
            self._generator.set_state(state["generator"])  # else the noise of the first epochs would come again


def _physical_batch_size(settings: ResolvedSettings, data: TrainingData) -> int | None:
    """Returns what the settings say; else all at once, or as many as suit the size of features."""
    if settings.max_physical_batch_size is not None:
        return settings.max_physical_batch_size
    if isinstance(data, FeatureDataset):
        return data.physical_batch_size
    return PRETRAINED_ROWS if is_fine_tuned(settings) else None


def _side_by_side(views: Sequence[Tensor]) -> Tensor:
    """Returns the images, or features of several views of them as ``(B, V, ...)``."""
    return views[0] if len(views) == 1 else torch.stack(list(views), dim=1)


def _refuse_for_opacus(settings: ResolvedSettings) -> None:
    unavailable = {
        "augmentation_multiplicity": settings.augmentation_multiplicity > 1,
        "clipping": settings.clipping != "flat",
        "relation": str(settings.relation) != "add_or_remove_one",
        "max_physical_batch_size": settings.max_physical_batch_size is not None,
        "unsafe_diagnostics": settings.unsafe_diagnostics,
        "noise_multiplier 0": settings.noise_multiplier == 0,
        "optimizer adam-bc": settings.optimizer == "adam-bc",  # Opacus does not tell optimizers its noise
        "gradient_filter": settings.gradient_filter != "none",
    }
    if asked := [name for name, is_asked in unavailable.items() if is_asked]:
        raise SettingsError(f"method opacus does not have {', '.join(asked)} here: leave out, or use method dpsgd")
