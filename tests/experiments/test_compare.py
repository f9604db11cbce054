import json
import math

import numpy as np
import pytest
from tests.support.fabricated_runs import fabricate

from spectral_dp.experiments import compare
from spectral_dp.experiments.settings import Settings, SettingsError


def arms():
    return {
        label: Settings(method=method).resolved()
        for label, method in {"plain": "nonprivate", "DP-SGD": "dpsgd", "ρ = 0.5": "spectral"}.items()
    }


def test_every_configuration_runs_with_every_seed():
    cells = compare.cells(arms(), [3, 4])
    assert list(cells) == [
        "plain-seed3",
        "DP-SGD-seed3",
        "ρ-=-0.5-seed3",
        "plain-seed4",
        "DP-SGD-seed4",
        "ρ-=-0.5-seed4",
    ]
    assert cells["DP-SGD-seed4"].seed == 4


def test_a_seed_counted_twice_is_refused():
    with pytest.raises(SettingsError, match="repeat"):
        compare.cells(arms(), [1, 1])
    with pytest.raises(SettingsError, match="more than punctuation"):
        compare.cells({"a b": Settings(), "a-b": Settings(method="dpsgd")}, [0])


def test_different_samples_are_not_compared():
    with pytest.raises(SettingsError, match="same test_size to be compared, got a: None, b: 50"):
        compare.cells({"a": Settings(method="dpsgd"), "b": Settings(test_size=50)}, [0])
    with pytest.raises(SettingsError, match="same delta"):
        compare.cells({"a": Settings(method="dpsgd"), "b": Settings(delta=1e-6)}, [0])


def test_seeded_runs_are_marked():
    seeded = {"a": Settings(method="dpsgd", reproducible=True)}
    assert "NOT private" in compare.caption(seeded, 3, 1)
    assert "NOT private" not in compare.caption({"a": Settings(method="dpsgd")}, 3, 1)
    assert "2 runs at a time" in compare.caption(seeded, 3, 2)


def test_paired_intervals_cover_at_the_stated_rate():
    """Over many made-up experiments; and, as a control, the interval of half the width does not."""
    rng = np.random.default_rng(0)
    covered = halved = 0
    for _ in range(2000):
        common = rng.normal(size=4)  # what a seed does to both
        found = compare.paired_difference((common + 0.1 + 0.2 * rng.normal(size=4)).tolist(), common.tolist())
        covered += found.low <= 0.1 <= found.high
        halved += abs(found.mean - 0.1) <= (found.high - found.low) / 4
    assert 0.93 < covered / 2000 < 0.97
    assert halved / 2000 < 0.9


def test_one_seed_has_no_interval():
    found = compare.paired_difference([0.9], [0.8])
    assert (found.low, found.high) == (None, None)
    assert math.isclose(found.mean, 0.1)


def test_the_table_the_files_and_the_baseline(tmp_path):
    accuracies = {"plain": (0.98, 0.97), "DP-SGD": (0.90, 0.92), "ρ = 0.5": (0.93, 0.94)}
    runs = {}
    for (name, settings), accuracy in zip(
        compare.cells(arms(), [0, 1]).items(),
        [accuracies[label][seed] for seed in (0, 1) for label in arms()],
        strict=True,
    ):
        runs[name] = fabricate(tmp_path / name, accuracy=accuracy, **settings.to_dict())
    table = compare.write_comparison(tmp_path, arms(), runs, [0, 1])
    spectral = table[2]
    assert spectral.mean == pytest.approx(0.935)
    assert spectral.difference.mean == pytest.approx(0.025)
    assert table[1].difference is None  # the baseline itself
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert written["baseline"] == "DP-SGD"
    assert written["rows"][2]["accuracies"] == [0.93, 0.94]
    markdown = (tmp_path / "comparison.md").read_text()
    assert "| ρ = 0.5 | 93.50 ± 0.71 | +2.50 [" in markdown
    assert "assumes that these are public" in markdown
    assert {"accuracy-epochs.png", "accuracy-epsilon.png"} <= {path.name for path in tmp_path.iterdir()}
