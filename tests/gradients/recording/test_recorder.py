import copy
import gc
import pickle

import pytest
import torch
from tests.support.uses import keep_all
from torch import nn
from torch.nn.modules import module as torch_module

from spectral_dp.gradients import ModelGradients
from spectral_dp.gradients.recording.recorder import Recorder


def watch(model):
    return Recorder(
        {m: tuple(m.parameters(recurse=False)) for m in model.modules() if list(m.parameters(recurse=False))},
        keep_all,
    )


def small_model():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 3)).double()


def images(n=4):
    return torch.randn(n, 1, 4, 4, dtype=torch.float64)


def plain_output_gradients(model, x):
    """What the taps should see, by retaining gradients of an unwatched copy whose activations are not in place."""
    conv, _, flatten, linear = copy.deepcopy(model)
    a = conv(x)
    a.retain_grad()
    b = linear(flatten(a.relu()))
    b.retain_grad()
    b.square().sum().backward()
    return a.grad, b.grad


def test_records_inputs_and_output_gradients_through_in_place_activations():
    model, x = small_model(), images()
    with watch(model) as recorder:
        model(x).square().sum().backward()
        captures = recorder.take()
    expected_conv, expected_linear = plain_output_gradients(model, x)
    (conv,), (linear,) = captures[model[0]], captures[model[3]]
    torch.testing.assert_close(conv.kept.x.args[0], x)
    torch.testing.assert_close(conv.kept.dA, expected_conv)
    torch.testing.assert_close(linear.kept.dA, expected_linear)


def test_plain_weight_gradients_are_not_computed():
    """They are a third of a step, and they would be un-noised gradients lying about in .grad."""
    model = small_model()
    with watch(model):
        out = model(images())
        out.square().sum().backward()
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_the_first_layers_input_gradient_is_not_computed_either():
    model, x = small_model(), images()
    with watch(model):
        out = model[0](x)
        assert out.requires_grad, "so that the backward pass comes this far"
        assert x.grad is None
        assert out.grad_fn.name() == "AnchorBackward", "and no further: nothing behind the anchor"


def test_a_first_layer_whose_output_is_a_view():
    class Transposing(nn.Linear):
        def forward(self, x):
            return super().forward(x).transpose(0, 1)

    model = nn.Sequential(Transposing(3, 2), nn.ReLU(inplace=True))
    with watch(model) as recorder:
        model(torch.randn(4, 3)).sum().backward()
        assert model[0] in recorder.take()


def test_input_that_needs_a_gradient_still_gets_it():
    model, x = small_model(), images().requires_grad_()
    with watch(model):
        model(x).square().sum().backward()
    y = x.detach().clone().requires_grad_()
    model(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_forward_passes_without_backward_leave_nothing():
    model = small_model()
    with watch(model) as recorder:
        with torch.no_grad():
            model(images())
        model(images())  # an evaluation that forgot no_grad
        model.eval()
        model(images(7))
        model.train()
        model(images(3)).sum().backward()
        captures = recorder.take()
    assert [len(c.kept.dA) for c in captures[model[0]]] == [3]


def test_several_forward_passes_before_one_backward_are_all_there():
    model = small_model()
    with watch(model) as recorder:
        (model(images()).sum() + model(images()).square().sum()).backward()
        captures = recorder.take()
        assert recorder.take() == {}
    assert [len(c) for c in captures.values()] == [2, 2]


def test_unused_layers_have_no_record():
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    with watch(model) as recorder:
        model[1](torch.randn(4, 3)).sum().backward()
        assert list(recorder.take()) == [model[1]]


def test_a_layer_called_twice_is_recorded_twice():
    layer = nn.Linear(3, 3)
    with watch(layer) as recorder:
        layer(layer(torch.randn(4, 3)).relu()).sum().backward()
        assert len(recorder.take()[layer]) == 2


def test_frozen_layers_are_left_alone():
    model = small_model()
    model[0].requires_grad_(False)
    with watch(model) as recorder:
        out = model[0](images())
        assert not out.requires_grad
        model(images()).sum().backward()
        assert list(recorder.take()) == [model[3]]


def test_keyword_inputs_are_recorded():
    layer = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    with watch(layer) as recorder:
        layer(input=x).sum().backward()
        (capture,) = recorder.take()[layer]
    torch.testing.assert_close(capture.kept.x.kwargs["input"], x)


def test_an_input_changed_in_place_is_an_error_not_a_wrong_gradient():
    layer = nn.Linear(3, 3)
    x = torch.randn(4, 3)
    with watch(layer):
        out = layer(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="in place"):
            out.sum().backward()


def test_a_failing_forward_pass_leaves_parameters_trainable():
    model = small_model()
    with watch(model):
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 9, 4, 4, dtype=torch.float64))
        assert all(p.requires_grad for p in model.parameters())


def test_views_changed_in_place_keep_their_hooks():
    """Otherwise the layer would silently stay untrained."""

    class Transposing(nn.Linear):
        def forward(self, x):
            return super().forward(x).transpose(0, 1)

    model = nn.Sequential(nn.Linear(3, 3), Transposing(3, 2), nn.ReLU(inplace=True))
    with watch(model) as recorder:
        model(torch.randn(4, 3)).sum().backward()
        assert set(recorder.take()) == {model[0], model[1]}


def test_a_second_output_that_the_loss_uses_is_an_error_not_an_untrained_layer():
    class Two(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return out, {"squares": out.square()}

    layer = Two(3, 2)
    with watch(layer) as recorder:
        first, others = layer(torch.randn(4, 3))
        first.sum().backward()
        assert len(recorder.take()[layer]) == 1
        with pytest.raises(RuntimeError, match="other than its first"):
            others["squares"].sum().backward()


def test_an_interrupted_forward_pass_does_not_leave_layers_frozen():
    class Interrupted(nn.Linear):
        interrupt = True

        def forward(self, x):
            if self.interrupt:
                raise KeyboardInterrupt
            return super().forward(x)

    model = nn.Sequential(Interrupted(3, 2))
    with watch(model) as recorder:
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(4, 3))
        model[0].interrupt = False
        model(torch.randn(4, 3)).sum().backward()
        assert model[0] in recorder.take()
        assert all(p.requires_grad for p in model.parameters())


def test_autocast():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with watch(model) as recorder:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(torch.randn(5, 3))
        out.float().sum().backward()
        captures = recorder.take()
    assert captures[model[2]][0].kept.dA.dtype == torch.bfloat16
    assert len(captures) == 2


def test_activation_checkpointing():
    model, x = small_model(), images()
    with watch(model) as recorder:
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).square().sum().backward()
        captures = recorder.take()
    torch.testing.assert_close(captures[model[0]][0].kept.dA, plain_output_gradients(model, x)[0])


def hooks():
    return [*torch_module._global_forward_hooks, *torch_module._global_forward_pre_hooks]


class TestTheModelStaysOrdinary:
    def test_no_trace_on_the_model(self):
        model = small_model()
        before = {name: dict(vars(m)) for name, m in model.named_modules()}
        keys = list(model.state_dict())
        recorder = watch(model)
        model(images()).sum().backward()
        assert list(model.state_dict()) == keys
        assert {name: dict(vars(m)) for name, m in model.named_modules()} == before
        recorder.remove()

    def test_copies_and_pickles_are_not_watched(self):
        model = small_model()
        with watch(model) as recorder:
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                other(images()).sum().backward()
                assert other[0].weight.grad is not None
            assert recorder.take() == {}

    def test_after_removal_training_is_plain_again(self):
        model = small_model()
        before = hooks()
        watch(model).remove()
        model(images()).sum().backward()
        assert model[0].weight.grad is not None
        assert hooks() == before

    def test_the_latest_recorder_of_a_model_wins(self):
        """As when a model is made private a second time: two at once would hide each other's gradients."""
        model, before = small_model(), hooks()
        first = watch(model)
        second = watch(nn.Sequential(model))
        model(images()).sum().backward()
        assert first.take() == {}
        assert set(second.take()) == {model[0], model[3]}
        second.remove()
        assert hooks() == before

    def test_another_may_come_while_one_looks_for_those_of_its_layers(self):
        """As when threads make their models private at once."""
        recorders, coming = [watch(small_model())], [small_model()]

        class MakesAnother(dict):
            def __iter__(self):
                if coming:
                    recorders.append(watch(coming.pop()))
                return super().__iter__()

        recorders[0]._watched = MakesAnother(recorders[0]._watched)
        recorders.append(watch(small_model()))
        assert len(recorders) == 3
        for recorder in recorders:
            recorder.remove()

    def test_a_forgotten_recorder_removes_itself(self):
        model = small_model()
        gc.collect()
        watch(model).remove()  # and with it what other tests have left behind
        before = hooks()
        recorder = watch(model)
        model(images()).sum().backward()
        del recorder
        gc.collect()
        watch(model).remove()  # not before: the collector may come while torch goes through its hooks
        assert hooks() == before


class SwitchesGradients(nn.Module):
    """Leaves gradients switched off, or on."""

    def __init__(self, leaves_on):
        super().__init__()
        self.leaves_on = leaves_on

    def forward(self, x):
        torch.set_grad_enabled(self.leaves_on)
        return x


@pytest.mark.parametrize("leaves_on", [True, False])
@pytest.mark.parametrize("begins_on", [True, False])
def test_a_part_that_switches_gradients_does_not_hide_the_end_of_a_pass(begins_on, leaves_on):
    """Else what is called afterwards would be taken to belong to it, with other samples."""
    net, switch = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), SwitchesGradients(leaves_on)
    gradients = ModelGradients(nn.ModuleList([net, switch]))
    with torch.set_grad_enabled(begins_on):
        switch(torch.randn(5, 3))
    torch.set_grad_enabled(True)
    net(torch.randn(4, 6)).sum().backward()
    assert gradients.take().size == 4
    gradients.remove()
