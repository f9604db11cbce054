"""Run directories without a training run: the files that a trainer leaves, with made-up figures."""

import json

from spectral_dp.accounting import Ledger
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import ResolvedSettings
from spectral_dp.experiments.statement import privacy_statement, write_statement
from spectral_dp.files import write_json


def layer(name, *, gains=None, transform="dct", noise=0.01):
    """What is known of one layer; filtered where gains are given."""
    facts = {
        "name": name,
        "kind": "Conv2d",
        "parameters": 400,
        "released": 400 if gains is None else 160,
        "noise_std": noise,
        "noise_std_per_parameter": noise if gains is None else noise / 2,
    }
    return facts if gains is None else facts | {"transform": transform, "gains": gains}


SQUARE = [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
LAYERS = [
    layer("conv.weight", gains=SQUARE),
    layer("conv.bias"),
    layer("fc.weight", gains=[1.0] * 3 + [0.0] * 5, transform="fourier"),
]


def evaluation(epoch, *, accuracy=None, epsilon=0.0, unsafe=None):
    """A line of metrics.jsonl."""
    row = {
        "epoch": epoch,
        "step": 10 * epoch,
        "epsilon": epsilon,
        "heldout_accuracy": min(0.9, 0.5 + 0.02 * epoch) if accuracy is None else accuracy,
        "heldout_loss": 1.0,
        "learning_rate": 0.5,
        "seconds": 2.0 * epoch,
    }
    return row if unsafe is None else row | {"unsafe": unsafe}


UNSAFE = {"training_loss": 1.234567, "gradient_norm_median": 7.654321, "clipped_fraction": 0.987654}


def fabricate(path, *, evaluated=3, is_finished=True, accuracy=None, layers=None, **given):
    """Writes a run directory; further arguments are settings. The last evaluation has the accuracy."""
    common = {"block_size": 0, "conv_ratio": 0.0, "linear_ratio": 0.0}
    settings = ResolvedSettings(**common | ({} if given.get("method") == "nonprivate" else {"epsilon": 2.0}) | given)
    run = RunDirectory(path)
    path.mkdir(parents=True)
    write_json(run.config, settings.to_dict())
    write_json(run.layers, LAYERS if layers is None else layers)
    has_epsilon = settings.is_private and settings.noise_multiplier != 0
    rows = [
        evaluation(
            epoch,
            accuracy=accuracy if epoch == evaluated else None,
            epsilon=0.5 * epoch if has_epsilon else None,
            unsafe=UNSAFE if settings.unsafe_diagnostics else None,
        )
        for epoch in range(1, evaluated + 1)
    ]
    for row in rows:
        row["ledger_head"] = FabricatedMethod.ledger.head if settings.is_private else None
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if is_finished:
        method = FabricatedMethod(0.5 * evaluated if has_epsilon else float("inf"))
        statement = privacy_statement(settings, method, {"spectral_dp": "0"})
        write_statement(statement, run.path)
        write_json(run.summary_file, _summary(settings, statement, rows[-1]))
    return run


def _summary(settings, statement, last):
    names = ("dataset", "model", "method", "seed", "epochs")
    return {name: getattr(settings, name) for name in names} | {
        "heldout_accuracy": last["heldout_accuracy"],
        "best_heldout_accuracy": last["heldout_accuracy"],
        "private": statement["private"],
        "warnings": statement["warnings"],
        "epsilon": statement.get("epsilon"),
        "delta": settings.delta if settings.is_private else None,
        "noise_multiplier": statement.get("noise_multiplier"),
        "sample_rate": statement.get("sample_rate"),
        "steps": last["step"],
        "parameters": 400 * len(LAYERS),
        "seconds": 75.0,
        "step_seconds": 60.0,
        "peak_memory_mb": 512.0,
        "made_by": statement["made_by"],
    }


class FabricatedMethod:
    """As much of a method as its privacy statement asks for."""

    ledger = Ledger()

    def __init__(self, epsilon):
        self._epsilon = epsilon

    def epsilon(self):
        return self._epsilon

    def facts(self):
        return {
            "library": "spectral-dp",
            "accountant": "pld",
            "relation": "add_or_remove_one",
            "noise_multiplier": 1.23456,
            "sample_rate": 0.1,
            "expected_batch_size": 64,
            "steps": 30,
            "clipping": "FlatClipping(max_norm=1.0)",
            "noise_source": "operating system, AES-256",
            "spectral": {"conv_ratio": "0.5"},
        }
