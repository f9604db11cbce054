import json
import math

import numpy as np
import pytest
from tests.support.fabricated_runs import fabricate

from spectral_dp.experiments.comparison import Comparison, paired_difference, write_comparison
from spectral_dp.experiments.settings import Settings, SettingsError

METHODS = {"plain": "nonprivate", "DP-SGD": "dpsgd", "ρ = 0.5": "spectral"}


def compared(**configurations):
    return {label: Settings(**given).resolved() for label, given in configurations.items()}


def arms():
    return compared(**{label: {"method": method} for label, method in METHODS.items()})


def test_every_configuration_runs_with_every_seed():
    runs = Comparison(arms(), [3, 4]).runs().values()
    assert [(run.method, run.seed) for run in runs] == [(m, seed) for seed in (3, 4) for m in METHODS.values()]


def test_nothing_is_not_compared():
    with pytest.raises(SettingsError, match="at least one configuration and one seed"):
        Comparison(arms(), [])
    with pytest.raises(SettingsError, match="at least one configuration and one seed"):
        Comparison({}, [0])


def test_different_samples_are_not_compared():
    with pytest.raises(SettingsError, match="same test_size to be compared, got a: None, b: 50"):
        Comparison(compared(a={"method": "dpsgd"}, b={"test_size": 50}), [0])
    with pytest.raises(SettingsError, match="same delta"):
        Comparison(compared(a={"method": "dpsgd"}, b={"delta": 1e-6}), [0])


def test_the_baseline_is_dpsgd_ours_before_opacus():
    opacus = compared(Opacus={"method": "opacus"})
    assert Comparison(opacus | arms(), [0]).baseline == "DP-SGD"
    assert Comparison(opacus, [0]).baseline == "Opacus"
    assert Comparison(compared(a={}), [0]).baseline is None


def test_seeded_runs_are_marked():
    seeded = compared(a={"method": "dpsgd", "reproducible": True})
    assert "NOT private" in Comparison(seeded, [0]).caption()
    assert "NOT private" not in Comparison(compared(a={"method": "dpsgd"}), [0]).caption()
    assert "2 runs at a time" in Comparison(seeded, [0], jobs=2).caption()


def test_the_caption_names_the_settings_that_differ():
    """Catches a gain that seems to be of the method alone, where the learning rates differ too."""
    tuned = compared(a={"method": "dpsgd", "learning_rate": 2.0}, b={"method": "spectral", "linear_ratio": 0.5})
    assert "configurations differ in method, linear_ratio, learning_rate; " in Comparison(tuned, [0]).caption()
    assert "differ in" not in Comparison(compared(a={"method": "dpsgd"}), [0]).caption()


def test_paired_intervals_cover_at_the_stated_rate():
    """Over many made-up experiments; and, as a control, the interval of half the width does not."""
    rng = np.random.default_rng(0)
    covered = halved = 0
    for _ in range(2000):
        common = rng.normal(size=4)  # what a seed does to both
        found = paired_difference((common + 0.1 + 0.2 * rng.normal(size=4)).tolist(), common.tolist())
        covered += found.low <= 0.1 <= found.high
        halved += abs(found.mean - 0.1) <= (found.high - found.low) / 4
    assert 0.93 < covered / 2000 < 0.97
    assert halved / 2000 < 0.9


def test_one_seed_has_no_interval():
    found = paired_difference([0.9], [0.8])
    assert (found.low, found.high) == (None, None)
    assert math.isclose(found.mean, 0.1)


def test_the_table_the_files_and_the_baseline(tmp_path):
    accuracies = {"plain": (0.98, 0.97), "DP-SGD": (0.90, 0.92), "ρ = 0.5": (0.93, 0.94)}
    comparison = Comparison(arms(), [0, 1])
    labels = {method: label for label, method in METHODS.items()}
    for name, settings in comparison.runs().items():
        fabricate(tmp_path / name, accuracy=accuracies[labels[settings.method]][settings.seed], **settings.to_dict())
    table = write_comparison(comparison, tmp_path)
    assert table.headings[:3] == ("configuration", "accuracy %", "difference")
    assert [line[:2] for line in table.lines[:2]] == [("plain", "97.50 ± 0.71"), ("DP-SGD", "91.00 ± 1.41")]
    assert table.lines[1][2] == ""  # the baseline itself
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert written["baseline"] == "DP-SGD"
    spectral = written["rows"][2]
    assert spectral["accuracies"] == [0.93, 0.94]
    assert spectral["mean"] == pytest.approx(0.935)
    assert spectral["difference"]["mean"] == pytest.approx(0.025)
    assert written["rows"][1]["difference"] is None
    markdown = (tmp_path / "comparison.md").read_text()
    assert "| ρ = 0.5 | 93.50 ± 0.71 | +2.50 [" in markdown
    assert "assumes that these are public" in markdown
    assert {"accuracy-epochs.png", "accuracy-epsilon.png"} <= {path.name for path in tmp_path.iterdir()}
