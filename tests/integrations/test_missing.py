"""Without the package, an integration can be imported, and says what to install when it is used."""

import importlib
import sys

import pytest

import spectral_dp.integrations


@pytest.mark.parametrize(
    ("package", "name"), [("transformers", "PrivateTrainer"), ("lightning", "DifferentialPrivacy")]
)
def test_the_error_names_the_extra(package, name, monkeypatch):
    for module in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"spectral_dp.integrations.{package}", raising=False)
    monkeypatch.setattr(spectral_dp.integrations, package, None, raising=False)  # put back with the rest
    module = importlib.import_module(f"spectral_dp.integrations.{package}")
    with pytest.raises(ImportError, match=rf"{name} needs {package}.*pip install 'spectral-dp\[{package}\]'") as caught:
        getattr(module, name)(target_delta=1e-5, max_grad_norm=1.0)
    assert "\n" not in str(caught.value)
    sys.modules.pop(f"spectral_dp.integrations.{package}")
