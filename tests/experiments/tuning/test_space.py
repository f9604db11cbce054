import pytest

from spectral_dp.experiments.settings import SettingsError
from spectral_dp.experiments.tuning.space import Dimension, SearchSpace, parse_dimensions, read_dimensions, with_point

FLAGS = [
    "learning_rate=0.1..10:log",
    "batch_size=64,128",
    "epochs=2..5",
    "layer_ratios.fc1=0..0.9",
    "optimizer=sgd,adam",
]
TABLE = {
    "learning-rate": {"low": 0.1, "high": 10, "log": True},
    "batch_size": [64, 128],
    "epochs": {"low": 2, "high": 5},
    "layer_ratios.fc1": {"low": 0.0, "high": 0.9},
    "optimizer": ["sgd", "adam"],
}


def test_flags_and_tables_say_the_same():
    assert parse_dimensions(FLAGS) == read_dimensions(TABLE)


@pytest.mark.parametrize("sampler", ["random", "quasi-random"])
def test_candidates_are_within_the_ranges_and_depend_on_the_seed_alone(sampler):
    space = SearchSpace(tuple(parse_dimensions(FLAGS)), sampler)
    points = space.points(50)
    assert points == space.points(50)
    assert points[:20] == space.points(20)  # more candidates add to those that are there
    assert points != SearchSpace(space.dimensions, sampler, seed=1).points(50)
    assert all(0.1 <= point["learning_rate"] <= 10 for point in points)
    assert {point["epochs"] for point in points} == {2, 3, 4, 5}
    assert {point["batch_size"] for point in points} == {64, 128}
    assert sum(point["learning_rate"] < 1 for point in points) == pytest.approx(
        25, abs=10
    )  # logarithm: the middle is 1


def test_quasi_random_points_fill_the_space_evenly():
    space = SearchSpace((Dimension("learning_rate", 0.0, 16.0),))
    assert sorted(int(point["learning_rate"]) for point in space.points(16)) == list(range(16))


def test_a_candidate_is_the_given_settings_with_its_values():
    given = {"model": "model1", "layer-ratios": {"fc2": 0.5}, "epsilon": 1.0}
    settings = with_point(given, {"layer_ratios.fc1": 0.25, "learning_rate": 3.0})
    assert settings.layer_ratios == {"fc1": 0.25, "fc2": 0.5}
    assert (settings.learning_rate, settings.epsilon) == (3.0, 1.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["learning_rate"], "write NAME=LOW..HIGH"),
        (["learning_rate=1..2", "learning_rate=3..4"], "once a name"),
        (["learning_rate=2..1"], "low < high"),
        (["learning_rate=0..1:log"], "above 0"),
        (["learning_rate=a..b"], "must be numbers"),
        (["optimizer=1..2"], "list the values"),
        (["layer_ratios=0..1"], "with the name of a part"),
        (["epochs.x=0..1"], "without the name of a part"),
        (["epsilon=1,2"], "no setting that can be searched"),
        (["seed=0..9"], "no setting that can be searched"),
        (["validation_size=10,20"], "no setting that can be searched"),
        (["nonsense=1,2"], "no setting that can be searched"),
    ],
)
def test_bad_ranges_are_named(flags, message):
    with pytest.raises(SettingsError, match=message):
        parse_dimensions(flags)


def test_a_search_needs_something_to_search():
    with pytest.raises(SettingsError, match="nothing to search"):
        SearchSpace(())
    with pytest.raises(SettingsError, match="given twice"):
        SearchSpace((Dimension("epochs", 1, 2), Dimension("epochs", 1, 2)))


def test_a_candidate_that_cannot_be_run_is_named():
    space = SearchSpace((Dimension("momentum", 0.5, 2.0),))
    with pytest.raises(SettingsError, match=r"the candidate .*momentum must be in"):
        space.candidates({}, 8)
