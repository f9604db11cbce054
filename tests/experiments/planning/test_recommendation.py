from spectral_dp.experiments.planning.batch_sizes import BatchSize
from spectral_dp.experiments.planning.evidence import Cell
from spectral_dp.experiments.planning.recommendation import recommend

LINES = [BatchSize(256, 1000, 1.1), BatchSize(1024, 250, 1.9)]
COMMON = {"model": "lenet5", "method": "dpsgd", "optimizer": "sgd", "max_grad_norm": 0.5, "learning_rate": 10.0}


def advice(model="lenet5", recommended=None, cells=()):
    return {each.setting: each for each in recommend(LINES, 7, model, recommended or {}, cells)}


def test_everything_that_a_run_needs_is_recommended():
    found = advice()
    named = {"batch_size", "epochs", "noise_multiplier", "max_grad_norm", "learning_rate", "block_size", "conv_ratio"}
    assert named <= set(found)
    assert (found["batch_size"].value, found["epochs"].value, found["noise_multiplier"].value) == (1024, 7, 1.9)
    assert all(each.because for each in found.values())


def test_the_learning_rate_follows_tuned_results_in_units_of_the_bound():
    tuned = Cell("a-cpu", "tuned", "DP-SGD", COMMON, 97.0, 3)
    others = Cell("a-cpu", "paper", "DP-SGD", COMMON | {"learning_rate": 1.0}, 90.0, 3)
    found = advice(cells=[tuned, others])["learning_rate"]
    assert found.value == 10.0 * 0.5 / 0.1
    assert "1 tuned results of this network" in found.because
    assert "other networks" in advice(model="model2", cells=[tuned])["learning_rate"].because
    assert advice()["learning_rate"].value is None


def test_filters_come_with_what_was_measured_of_them():
    cells = [
        Cell("a-cpu", "tuned", "DP-SGD", COMMON, 97.0, 3),
        Cell("a-cpu", "tuned", "Spectral-DP", COMMON | {"method": "spectral"}, 97.5, 3),
    ]
    found = advice(recommended={"layer_ratios": {"fc1": 0.4}}, cells=cells)
    assert found["layer_ratios"].value == {"fc1": 0.4}
    assert "97.50 % with filters against 97.00 %" in found["layer_ratios"].because
    assert found["block_size"].value == 0
    assert "no committed result" in advice(recommended={"block_size": 8})["block_size"].because
