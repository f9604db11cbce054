import json

from spectral_dp.experiments.planning.evidence import Cell, alike_but_for, check_guidelines, read_evidence

COMMON = {"dataset": "mnist", "model": "model1", "method": "dpsgd", "epsilon": 2.0, "batch_size": 500, "epochs": 5}
COMMON |= {"max_grad_norm": 0.1, "learning_rate": 0.01, "block_size": 0, "conv_ratio": 0.0, "linear_ratio": 0.0}


def cell(accuracy, **others):
    return Cell("a-cpu", "tuned", "row", COMMON | others, accuracy, 3)


def verdicts(cells):
    return {guideline.text: guideline.verdict for guideline in check_guidelines(cells)}


def test_results_of_smoke_runs_and_empty_cells_are_no_evidence(tmp_path):
    def report(name, scale, runs):
        cells = [{"row": "x", "settings": COMMON, "mean_percent": 90.0 if runs else None, "runs": runs}]
        content = {"scale": scale, "panels": [{"origin": "tuned", "settings": {"flip": False}, "cells": cells}]}
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(content))

    report("a-smoke", "smoke", {"s": {}})
    report("b-cpu", "cpu", {"r0": {}, "r1": {}})
    report("c-cpu", "cpu", {"r0": {}, "r1": {}})  # the same runs in another table
    report("d-cpu", "cpu", {})
    (found,) = read_evidence(tmp_path)
    assert (found.source, found.runs, found.settings["flip"]) == ("b-cpu", 2, False)
    assert read_evidence(tmp_path / "nowhere") == []


def test_only_results_that_differ_in_one_setting_alone_are_compared():
    """Catches a comparison of runs that differ in more, which says nothing of the one setting."""
    cells = [cell(90, batch_size=256), cell(95, batch_size=4096), cell(99, batch_size=2048, epochs=50)]
    (group,) = alike_but_for(cells, "batch_size")
    assert [each.settings["batch_size"] for each in group] == [4096, 256]
    assert alike_but_for(cells, "epochs") == []


def test_guidelines_are_judged_by_the_runs():
    large = "large batches, beginning with B = 2048"
    assert set(verdicts([]).values()) == {"not tested"}
    assert verdicts([cell(90, batch_size=256), cell(95, batch_size=4096)])[large] == "held"
    assert verdicts([cell(97, batch_size=256), cell(95, batch_size=4096)])[large] == "did not hold"
    two = [cell(90, batch_size=256), cell(95, batch_size=4096)]
    two += [cell(97, batch_size=256, epochs=9), cell(95, batch_size=4096, epochs=9)]
    assert verdicts(two)[large] == "mixed"


def test_the_ratio_is_judged_beside_dp_sgd_of_the_same_table():
    half = "keep at least half of the coefficients"
    dpsgd = cell(90)
    assert verdicts([dpsgd, cell(95, method="spectral", layer_ratios={"fc1": 0.9})])[half] == "did not hold"
    assert verdicts([dpsgd, cell(95, method="spectral", conv_ratio=0.25)])[half] == "held"
    assert verdicts([dpsgd, cell(85, method="spectral", conv_ratio=0.25)])[half] == "not tested"
    assert verdicts([dpsgd, cell(95, method="spectral", conv_ratio=0.25, epochs=50)])[half] == "not tested"
