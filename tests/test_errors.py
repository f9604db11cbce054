"""One base class for the package's own errors, beside the builtin classes that they are, too."""

import importlib
import inspect
import pkgutil

import pytest

import spectral_dp
from spectral_dp import SpectralDPError


def _own_errors():
    for info in pkgutil.walk_packages(spectral_dp.__path__, "spectral_dp."):
        module = importlib.import_module(info.name)
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == info.name and issubclass(kind, Exception) and not issubclass(kind, Warning):
                yield kind


def test_every_error_of_ours_has_the_base_class():
    found = set(_own_errors())
    assert not [kind for kind in found if not issubclass(kind, SpectralDPError)]
    assert {"BudgetExhausted", "CheckpointError", "DataError", "RehearsalError"} <= {kind.__name__ for kind in found}


def test_and_a_builtin_one():
    """Those who catch ``ValueError`` or ``RuntimeError``, as with Opacus, must go on catching them."""
    for kind in set(_own_errors()) - {SpectralDPError}:
        assert issubclass(kind, ValueError | RuntimeError), kind


@pytest.mark.parametrize("name", ["BudgetExhausted", "CheckpointError", "RehearsalError"])
def test_one_except_catches_what_users_meet(name):
    with pytest.raises(SpectralDPError, match="what to do"):
        raise getattr(spectral_dp, name)("what to do")
