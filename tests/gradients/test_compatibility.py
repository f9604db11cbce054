import pytest
import torch
from torch import nn

from spectral_dp.gradients import ModelGradients, find_problems, fix


def test_batch_norm_in_training_mode_is_refused_with_the_replacement_named():
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8))
    with pytest.raises(ValueError, match=r"1 \(BatchNorm2d\).*nn\.GroupNorm"):
        ModelGradients(model)
    assert find_problems(model.eval()) == []


def test_frozen_batch_norm_in_training_mode_mixes_samples_all_the_same():
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8).requires_grad_(False))
    with pytest.raises(ValueError, match="BatchNorm2d"):
        ModelGradients(model)


def test_batch_norm_without_running_statistics_mixes_in_eval_mode_too():
    assert find_problems(nn.BatchNorm1d(4, track_running_stats=False).eval())


@pytest.mark.filterwarnings("ignore:no rule for BatchNorm2d")
def test_turning_training_mode_on_later_is_noticed_before_anything_is_released():
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8)).eval().requires_grad_(True)
    model[1].requires_grad_(False)
    gradients = ModelGradients(model)
    model.train()
    model(torch.randn(3, 1, 5, 5)).sum().backward()
    with pytest.raises(ValueError, match="BatchNorm2d"):
        gradients.take()
    gradients.remove()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(6), nn.BatchNorm2d(48), nn.BatchNorm3d(7, affine=False)])
def test_fix_replaces_batch_norm_by_group_norm(norm):
    model = nn.Sequential(nn.Identity(), nn.ModuleDict({"inner": norm}))
    fixed = fix(model)
    replaced = fixed[1]["inner"]
    assert isinstance(replaced, nn.GroupNorm)
    assert replaced.num_channels == norm.num_features
    assert norm.num_features % replaced.num_groups == 0
    assert find_problems(fixed) == []
    assert model[1]["inner"] is norm, "the given model is unchanged"
    if norm.affine:
        torch.testing.assert_close(replaced.weight, norm.weight)
        assert replaced.weight is not norm.weight


def test_fix_of_one_batch_norm_under_two_names():
    norm = nn.BatchNorm2d(4)
    fixed = fix(nn.Sequential(norm, nn.ReLU(), norm))
    assert isinstance(fixed[0], nn.GroupNorm)
    assert fixed[0] is fixed[2]


def test_fix_of_the_root_itself():
    assert isinstance(fix(nn.BatchNorm2d(4)), nn.GroupNorm)


def test_instance_norm_that_tracks_statistics():
    model = nn.Sequential(nn.InstanceNorm2d(3, affine=True, track_running_stats=True))
    with pytest.raises(ValueError, match="track_running_stats=False"):
        ModelGradients(model)
    fixed = fix(model)
    assert find_problems(fixed) == []
    assert fixed(torch.randn(2, 3, 4, 4)).shape == (2, 3, 4, 4)
    assert "0.running_mean" not in fixed.state_dict()
