import pytest
import torch
from torch import nn

from spectral_dp.experiments import trainer
from spectral_dp.experiments.optimizers import make_optimizer, settled
from spectral_dp.experiments.run_directory import RunDirectory
from spectral_dp.experiments.settings import SettingsError
from spectral_dp.training.denoising.adam_bc import AdamBC
from spectral_dp.training.denoising.kalman import KalmanGradients
from spectral_dp.training.denoising.low_pass import LowPassGradients

MODEL = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2))


def test_optimizers_by_name(tiny):
    assert type(make_optimizer(tiny(), MODEL)) is torch.optim.SGD
    assert type(make_optimizer(tiny(optimizer="adam"), MODEL)) is torch.optim.Adam
    assert type(make_optimizer(tiny(optimizer="adam-bc"), MODEL)) is AdamBC
    low = make_optimizer(tiny(gradient_filter="low-pass", optimizer="adam-bc"), MODEL)
    assert type(low) is LowPassGradients
    assert (low.gain, type(low.original_optimizer)) == (0.1, AdamBC)
    kalman = make_optimizer(tiny(gradient_filter="kalman", gradient_filter_gain=0.3), MODEL)
    assert type(kalman) is KalmanGradients
    assert kalman.gain == 0.3


def test_a_rate_of_ones_own_for_a_layer(tiny):
    groups = make_optimizer(tiny(layer_rates={"2": 0.1}), MODEL).param_groups
    assert [(group["rate"], len(group["params"])) for group in groups] == [(1.0, 2), (0.1, 2)]
    with pytest.raises(SettingsError, match="no such layers as fc9; there are 0, 2"):
        make_optimizer(tiny(layer_rates={"fc9": 0.1}), MODEL)


@pytest.mark.parametrize(
    "others",
    [{"optimizer": "adam-bc", "learning_rate": 0.01}, {"gradient_filter": "low-pass"}, {"gradient_filter": "kalman"}],
    ids=str,
)
def test_runs_with_them_spend_what_others_do_and_resume(tmp_path, tiny, monkeypatch, others):
    plain = trainer.run(tiny(epochs=1), RunDirectory(tmp_path / "plain"))
    settings = tiny(epochs=1, layer_rates={"fc2": 0.5}, **others)
    summary = trainer.run(settings, RunDirectory(tmp_path / "run"))
    assert summary["epsilon"] == plain["epsilon"]
    assert summary["steps"] == plain["steps"]


def test_what_is_evaluated_are_the_weights_and_not_those_ahead():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = KalmanGradients(torch.optim.SGD([parameter], lr=0.1))
    for _ in range(3):
        optimizer.noise_std = {parameter: 1.0}
        parameter.grad = torch.ones(2)
        optimizer.step()
    with settled(optimizer):
        assert torch.allclose(parameter.detach(), torch.full((2,), 0.7))
    with settled(torch.optim.SGD([parameter])), settled(None):
        pass
