"""ModuleValidator under Opacus' name: what both find, and what both make of it."""

import pytest
from torch import nn

from spectral_dp.validators import ModuleValidator

theirs = pytest.importorskip("opacus.validators")


def norms(norm):
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm)


@pytest.mark.parametrize(
    "model",
    [
        norms(nn.BatchNorm2d(8)),
        norms(nn.InstanceNorm2d(8, affine=True, track_running_stats=True)),
        norms(nn.GroupNorm(2, 8)),
        norms(nn.BatchNorm2d(8)).eval(),
        norms(nn.GroupNorm(2, 8)).eval(),
    ],
    ids=["BatchNorm", "tracking InstanceNorm", "GroupNorm", "BatchNorm in evaluation", "GroupNorm in evaluation"],
)
def test_they_agree_with_opacus(model):
    assert ModuleValidator.is_valid(model) == theirs.ModuleValidator.is_valid(model)
    assert bool(ModuleValidator.validate(model)) == bool(theirs.ModuleValidator.validate(model))
    fixed = ModuleValidator.fix(model)
    assert fixed is not model
    assert ModuleValidator.is_valid(fixed.train())
    assert theirs.ModuleValidator.is_valid(fixed)


def test_errors_name_the_module_and_the_fix():
    (error,) = ModuleValidator.validate(norms(nn.BatchNorm2d(8)))
    assert "1 (BatchNorm2d)" in str(error)
    with pytest.raises(ValueError, match=r"1 \(BatchNorm2d\).*replace it by nn.GroupNorm"):
        ModuleValidator.validate(norms(nn.BatchNorm2d(8)), strict=True)
    with pytest.raises(ValueError, match=r"evaluation mode: call model.train\(\)"):
        ModuleValidator.validate(norms(nn.GroupNorm(2, 8)).eval(), strict=True)
    assert isinstance(ModuleValidator.fix_and_validate(norms(nn.BatchNorm2d(8)))[1], nn.GroupNorm)
