"""One setting at a time; ``test_settings.py`` has them together."""

from typing import Literal

import pytest

from spectral_dp import Relation
from spectral_dp.experiments.setting_types import SettingsError, checked_setting, kind_of


@pytest.mark.parametrize(
    ("hint", "kind"),
    [(int, int), (int | None, int), (list[str], list[str]), (Literal["a", "b"] | None, Literal["a", "b"])],
)
def test_the_type_of_a_setting_that_may_be_left_out(hint, kind):
    assert kind_of(hint) == kind


@pytest.mark.parametrize(
    ("hint", "value", "checked"),
    [
        (float | None, None, None),
        (float, 1, 1.0),
        (Relation, "replace_one", Relation.REPLACE_ONE),
        (Literal["a", "b"], "b", "b"),
        (list[float], [1, 2.5], [1.0, 2.5]),
        (dict[str, float], {"fc1": 1}, {"fc1": 1.0}),
        (dict[str, bool | int | float | str], {"scales": 3, "maps": True}, {"scales": 3, "maps": True}),
    ],
)
def test_values_are_returned_in_the_type_of_their_setting(hint, value, checked):
    found = checked_setting("name", hint, value)
    assert found == checked
    assert type(found) is type(checked)


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    [
        (int, None, "name must be of type int, got None"),
        (int, True, "name must be of type int, got True"),
        (float, float("inf"), "name must be finite, got inf"),
        (Literal["a", "b"], "c", "name must be one of a, b, got 'c'"),
        (list[str], "fc1", "name must be a list of layer names"),
        (list[float], [True], "name must be a list of numbers"),
        (dict[str, float], {"fc1": "1"}, "name must map layer names to numbers"),
        (dict[str, bool | int | float | str], {"fc1": []}, "name must map names to numbers, texts"),
    ],
)
def test_others_are_refused_with_the_type(hint, value, message):
    with pytest.raises(SettingsError, match=message):
        checked_setting("name", hint, value)
