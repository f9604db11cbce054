"""Runs that make a linear head in one release, without steps: class means and least squares on cached features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spectral_dp.accounting import Ledger
from spectral_dp.experiments.feature_data import noise_source, planned_noise, statistics_phases, statistics_release
from spectral_dp.experiments.method import Batch, Method, TrainingData
from spectral_dp.experiments.settings import ResolvedSettings, SettingsError
from spectral_dp.heads import LinearHead, private_class_means, private_least_squares, random_projection
from spectral_dp.heads.class_means import BOUND
from spectral_dp.heads.least_squares import MOMENT_WEIGHT, joint_bound
from spectral_dp.models import ScatterLinear

_NOISE_OF_HEADS = 0x4EAD  # added to the seed of a reproducible run: its private statistics have another stream


class OneShotMethod(Method):
    """Class means or least squares as the method of a run: the weights of the model ``linear`` are one release.

    The noise is calibrated for a single unsampled Gaussian release, beside the private statistics if there are any.
    """

    steps_per_epoch = 1

    def __init__(self, settings: ResolvedSettings, model: nn.Module, data: TrainingData) -> None:
        _refuse(settings, model)
        assert isinstance(model, ScatterLinear)
        self._settings, self._data = settings, data
        self.model = self._head = model
        self._ledger = Ledger(settings.relation)
        self._statistics = statistics_release(settings, model, data)
        self.noise_multiplier = noise_of_head(settings)

    def release_at_once(self) -> bool:
        if self._statistics is not None:
            self._statistics.release(self._ledger)
        rows = _Normalised(self._data.train_images, self._head.normalization)
        noise = noise_source(self._settings, _NOISE_OF_HEADS)
        labels, classes, sigma = self._data.train_labels, self._data.classes, self.noise_multiplier
        made: LinearHead
        if self._settings.method == "class-means":
            made = private_class_means(rows, labels, classes, noise_multiplier=sigma, ledger=self._ledger, noise=noise)
        else:
            made = private_least_squares(
                rows,
                labels,
                classes,
                noise_multiplier=sigma,
                records=len(labels),
                ledger=self._ledger,
                projection=random_projection(self._head.fc.in_features, self._settings.head_dimensions),
                noise=noise,
            )
        self._head.fc.load_state_dict(made.module().state_dict())
        self.epoch += 1
        return True

    def batches(self) -> Iterator[Batch]:
        raise NotImplementedError("a one-shot head takes no steps: call release_at_once")

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    def epsilon(self) -> float:
        return self._ledger.epsilon(self._settings.delta, accountant=self._settings.accountant)

    def facts(self) -> dict[str, Any]:
        settings, records = self._settings, len(self._data.train_labels)
        return {
            "max_grad_norm": bound_of_head(settings),
            "sampling": "none: all records, in one release",
            "relation": str(settings.relation),
            "noise_multiplier": self.noise_multiplier,
            "sample_rate": 1.0,
            "expected_batch_size": records,
            "library": "spectral-dp",
            "accountant": settings.accountant,
            "steps": self._ledger.steps - len(statistics_phases(settings)),
            "clipping": _contribution(settings, self._head.fc.in_features),
            "noise_source": "seeded, reproducible" if settings.reproducible else "operating system, AES-256",
            **(self._statistics.facts() if self._statistics else {}),
        }

    def state(self) -> dict[str, Any]:
        return {"ledger": self._ledger.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._ledger.load_state_dict(state["ledger"])


def noise_of_head(settings: ResolvedSettings) -> float:
    """Returns the noise multiplier of the head, which is one release of all records."""
    return planned_noise(settings, sample_rate=1.0, steps=1)


def bound_of_head(settings: ResolvedSettings) -> float:
    """Returns the most that one record contributes to the release."""
    return BOUND if settings.method == "class-means" else joint_bound()


class _Normalised:
    """Features as the head's dense layer reads them: through its normalisation of channels, which is released."""

    def __init__(self, rows: Any, normalization: Callable[[Tensor], Tensor]) -> None:
        self._rows, self._normalization = rows, normalization
        self.shape = rows.shape

    def __len__(self) -> int:
        return len(self._rows)

    @torch.no_grad()
    def __getitem__(self, part: slice) -> Tensor:
        return self._normalization(self._rows[part].float())


def _contribution(settings: ResolvedSettings, features: int) -> str:
    if settings.method == "class-means":
        return f"a record's features at unit length in the row of its class, to norm {BOUND:g}"
    dimensions = min(features, settings.head_dimensions)
    return (
        f"the Gram matrix of a record's features ({dimensions} dimensions, unit length) and its moments times "
        f"{MOMENT_WEIGHT:g}, together to norm {joint_bound():.4f}"
    )


def _refuse(settings: ResolvedSettings, model: nn.Module) -> None:
    if not isinstance(model, ScatterLinear) or not isinstance(model.fc, nn.Linear):
        raise SettingsError(
            f"method {settings.method} makes a linear head of cached features, not {settings.model}: use model linear, "
            "with features, and without block_size"
        )
    unavailable = {
        "ema_decay": settings.ema_decay > 0,
        "ema_candidates": bool(settings.ema_candidates),
        "unsafe_diagnostics": settings.unsafe_diagnostics,
        "flip": settings.flip,
        "augmentation_multiplicity": settings.augmentation_multiplicity > 1,
    }
    if asked := [name for name, is_asked in unavailable.items() if is_asked]:
        raise SettingsError(f"method {settings.method} takes no steps, so it has no {', '.join(asked)}: leave out")
