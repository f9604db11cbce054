"""What cannot be recorded is refused, with words that name the fix."""

import pytest
import torch
from torch import nn

from spectral_dp.gradients import ModelGradients
from spectral_dp.gradients.recording.knowledge import Knowledge
from spectral_dp.gradients.recording.passes import Pass
from spectral_dp.gradients.recording.refusals import check_called_as_it_is, refuse_dependence, refuse_shared
from spectral_dp.gradients.recording.shared import Shared


def test_a_model_that_cannot_take_an_empty_batch_says_what_to_do():
    """As many published models: they reshape to (0, 7, -1, 8)."""

    class Reshapes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(x).view(len(x), -1, 2)

    model = Reshapes()
    gradients = ModelGradients(model)
    with pytest.raises(RuntimeError) as error:
        model(torch.randn(0, 4))
    (note,) = error.value.__notes__
    assert "optimizer.step() for it without" in note
    with pytest.raises(RuntimeError) as error:
        model(torch.randn(3, 5))
    assert not hasattr(error.value, "__notes__"), "not the fault of an empty batch"
    gradients.remove()


def test_parameters_that_were_replaced():
    layer = nn.Linear(2, 2)
    check_called_as_it_is(layer, list(layer.parameters()))
    with pytest.raises(RuntimeError, match="replaced by other tensors"):
        check_called_as_it_is(layer, [nn.Parameter(torch.ones(2))])


def test_what_samples_share_in_a_layer_that_needs_one_row_each():
    within = Pass(nn.Identity(), (), {}, 3, Knowledge(), lambda *_: None)
    shared = Shared.make(torch.ones(2), torch.ones(3, 2), 1, within)
    refuse_shared(nn.LSTM(2, 2), (torch.ones(3, 1, 2),), {})
    with pytest.raises(RuntimeError, match="one entry for each sample"):
        refuse_shared(nn.LSTM(2, 2), (), {"input": [shared]})


def test_a_loss_that_depends_on_what_is_not_recorded():
    x = torch.ones(2, requires_grad=True)
    x.register_hook(refuse_dependence("on the second output"))
    with pytest.raises(RuntimeError, match="depends on the second output"):
        x.sum().backward()
