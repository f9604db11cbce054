"""What the engine's methods are said to take is what they take."""

import inspect
from typing import Required, get_origin, get_overloads, get_type_hints

import pytest

from spectral_dp import PrivacyEngine
from spectral_dp.training.criterion import GhostMode, PlainMode
from spectral_dp.training.engine import GhostParts, PrivateParts
from spectral_dp.training.options import BudgetOptions, PrivateOptions, with_arguments_of


class TestTypes:
    """What type checkers read (the overloads and their options) is what the implementations take."""

    @pytest.mark.parametrize(
        ("method", "options"),
        [(PrivacyEngine.make_private, PrivateOptions), (PrivacyEngine.make_private_with_epsilon, BudgetOptions)],
    )
    def test_overloads_take_the_arguments_that_are_spelled_out(self, method, options):
        taken, listed = inspect.signature(method).parameters, get_type_hints(options)
        types = get_type_hints(method)
        for overload in get_overloads(method):
            own = inspect.signature(overload).parameters.keys() - {"options"}
            assert own | listed.keys() == taken.keys()
            assert own.isdisjoint(listed)
        assert {name: types[name] for name in listed} == listed
        without_default = {name for name in listed if taken[name].default is inspect.Parameter.empty}
        marked = get_type_hints(options, include_extras=True)
        assert without_default == {name for name, hint in marked.items() if get_origin(hint) is Required}

    @pytest.mark.parametrize("method", [PrivacyEngine.make_private, PrivacyEngine.make_private_with_epsilon])
    def test_only_ghost_mode_returns_the_criterion(self, method):
        hints = [get_type_hints(overload) for overload in get_overloads(method)]
        assert [(h["grad_sample_mode"], h["return"]) for h in hints] == [
            (PlainMode, PrivateParts),
            (GhostMode, GhostParts),
        ]


def inner(*, given, computed, other=2):
    return given, computed, other


@with_arguments_of(inner, without="computed")
def outer(*, own=1, **options):
    """Its own words."""
    return inner(computed=own, **options)


class TestArgumentsOfAnotherFunction:
    def test_they_are_shown_with_their_defaults(self):
        assert str(inspect.signature(outer)) == "(*, own=1, given, other=2)"
        assert (outer.__name__, outer.__doc__) == ("outer", "Its own words.")

    def test_they_are_handed_on(self):
        assert outer(given=5) == (5, 1, 2)
        assert outer(given=5, own=3, other=4) == (5, 3, 4)

    @pytest.mark.parametrize("given", [{}, {"given": 1, "misspelled": 2}, {"given": 1, "computed": 2}])
    def test_too_many_or_too_few_are_an_error(self, given):
        with pytest.raises(TypeError):
            outer(**given)

    def test_before_anything_is_done(self):
        """Catches a calibration of seconds that ends in an error about a misspelled argument."""
        with pytest.raises(TypeError, match="misspelled"):
            PrivacyEngine().make_private_with_epsilon(
                module=None,
                optimizer=None,
                data_loader=None,
                target_epsilon=1,
                target_delta=1e-5,
                epochs=1,
                max_grad_norm=1,
                misspelled=1,
            )
