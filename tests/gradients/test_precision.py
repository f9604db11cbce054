"""Norms and sums are computed in full float32 wherever the process allows less. Simulated: this machine has no TF32."""

import contextlib
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from spectral_dp.gradients import LayerConfig, ModelGradients, precision
from spectral_dp.gradients.precision import full_precision
from spectral_dp.gradients.rules.conv import KernelConvRule
from spectral_dp.layers import BlockCirculantLinear
from spectral_dp.mechanism.clipping import ROUNDING_GUARD, clip_factors
from spectral_dp.mechanism.filters import LowPassFilter

C = 0.7
SWITCHES = [*precision._SWITCHES, ("generic", "all"), ("cuda", "all"), ("mkldnn", "all")]

needs_switches = pytest.mark.skipif(not precision._HAS_SWITCHES, reason="PyTorch before 2.9 has other ones")


def switches():
    return {switch: torch._C._get_fp32_precision_getter(*switch) for switch in SWITCHES}


@pytest.fixture
def restored():
    """Whatever a test sets is set back."""
    before = switches()
    yield
    torch.set_float32_matmul_precision("highest")
    for switch, value in reversed(before.items()):  # general ones first
        torch._C._set_fp32_precision_setter(*switch, "none")
        if switches()[switch] != value:
            torch._C._set_fp32_precision_setter(*switch, value)
    assert switches() == before


def ten_bits(t):
    """Rounds float32 numbers to the 10 explicit bits that TF32 has."""
    if not isinstance(t, torch.Tensor) or t.dtype not in (torch.float32, torch.complex64):
        return t
    bits = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).contiguous().view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.view_as_complex(rounded) if t.is_complex() else rounded


class Tensorfloat(TorchDispatchMode):
    """A device that computes float32 products in TF32, as far as PyTorch's switches allow it to."""

    PRODUCTS = ("mm", "bmm", "mv", "dot", "vdot")
    SUMS_OF_PRODUCTS = ("addmm", "addmv", "baddbmm", "baddbmm_")
    CONVOLUTIONS = ("convolution", "convolution_backward")

    def __init__(self):
        super().__init__()
        self.reduced = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        operation = "conv" if name in self.CONVOLUTIONS else "matmul"
        known = (*self.PRODUCTS, *self.SUMS_OF_PRODUCTS, *self.CONVOLUTIONS)
        if name in known and torch._C._get_fp32_precision_getter("cuda", operation) == "tf32":
            first = 1 if name in self.SUMS_OF_PRODUCTS else 0
            args = (*args[:first], *tree_map(ten_bits, args[first:]))
            self.reduced += 1
        return func(*args, **(kwargs or {}))


class Scale(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return x * self.gain


CASES = {
    "dense": (lambda: nn.Linear(6, 5), (6,), {}),
    "dense, tokens": (lambda: nn.Linear(6, 5), (3, 6), {}),
    "with a layout": (lambda: nn.Linear(16, 5), (16,), {"0": LayerConfig(LowPassFilter(0.5), input_layout=(4, 4))}),
    "blocks": (lambda: BlockCirculantLinear(8, 8, 4), (8,), {}),
    "blocks, tokens": (lambda: BlockCirculantLinear(8, 8, 4), (64, 8), {}),
    "convolution, gram": (lambda: nn.Conv2d(2, 3, 3), (2, 5, 5), {}),
    "convolution, formed": (lambda: nn.Conv2d(2, 3, 3), (2, 5, 5), {}),
    "convolution, signal": (lambda: nn.Conv2d(2, 3, 3), (2, 5, 5), {"0": LayerConfig(support="signal")}),
    "normalisation": (lambda: nn.GroupNorm(1, 4), (4, 5), {}),
    "fallback": (lambda: Scale(6), (6,), {}),
}


def contributions(make, shape, spectral):
    """What one sample adds to the clipped sums, in bounds. Of some values, TF32 rounds all products upwards."""
    torch.manual_seed(0)
    model = nn.Sequential(make())
    gradients = ModelGradients(model, spectral)
    for value in torch.linspace(1, 2, 20).tolist():
        x = torch.full((1, *shape), 30 * value)
        x.flatten(1)[:, ::3] *= -1
        out = model(x)
        (out * value).sum().backward()
        batch = gradients.take()
        sums = batch.clipped_sums(clip_factors(batch.squared_norms().sum(0).sqrt(), C))
        yield float(torch.stack([z.double().square().sum() for z in sums.values()]).sum().sqrt()) / C
    gradients.remove()


@contextmanager
def simulated():
    torch._C._set_fp32_precision_setter("cuda", "matmul", "tf32")
    torch._C._set_fp32_precision_setter("cuda", "conv", "tf32")
    with Tensorfloat() as device:
        yield device


@needs_switches
@pytest.mark.filterwarnings("ignore:no rule for")
class TestABoundHoldsWhereTheDeviceRounds:
    @pytest.fixture(autouse=True)
    def _settings(self, restored, monkeypatch):
        self.monkeypatch = monkeypatch

    def worst(self, name):
        self.monkeypatch.setattr(KernelConvRule, "forms", lambda *_: "gram" not in name)
        with simulated() as device:
            worst = max(contributions(*CASES[name]))
        return worst, device

    @pytest.mark.parametrize("name", CASES)
    def test_with_every_rule(self, name):
        assert self.worst(name)[0] <= 1

    @pytest.mark.parametrize("name", CASES)
    def test_control_without_full_precision_the_guard_does_not_suffice(self, name):
        """Up to a thousandth above the bound, a hundred times the guard."""
        self.monkeypatch.setattr("spectral_dp.gradients.model.full_precision", nullcontext)
        worst, device = self.worst(name)
        assert device.reduced > 0
        assert worst > 1 + 10 * ROUNDING_GUARD

    def test_control_no_guard_suffices_where_terms_cancel(self):
        """Of tokens that cancel only rounding errors are left, and TF32 has thousands of times those of float32."""
        with simulated(), self.monkeypatch.context() as patch:
            patch.setattr("spectral_dp.gradients.model.full_precision", nullcontext)
            assert self.cancelling() > 10
        with simulated():
            assert self.cancelling() <= 1

    def cancelling(self):
        model = nn.Sequential(nn.Linear(1, 1, bias=False))
        gradients = ModelGradients(model)
        worst = 0.0
        for a in torch.linspace(1, 2, 60):
            x, dA = torch.stack([a, a.square()]).view(1, 2, 1), torch.stack([1e6 / a, -1e6 / a.square()]).view(1, 2, 1)
            (model(x) * dA).sum().backward()
            batch = gradients.take()
            (total,) = batch.clipped_sums(clip_factors(batch.squared_norms().sum(0).sqrt(), C)).values()
            worst = max(worst, float(total.double().norm()) / C)
        gradients.remove()
        return worst

    def test_forward_and_backward_pass_keep_their_precision(self):
        """They are not what is clipped, and a third of a step in full precision is enough."""
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        gradients = ModelGradients(model)
        with simulated() as device:
            out = model(torch.randn(4, 6))
            in_forward = device.reduced
            out.sum().backward()
            in_backward = device.reduced - in_forward
            gradients.take().squared_norms()
            assert device.reduced == in_forward + in_backward
        gradients.remove()
        assert (in_forward, in_backward) == (2, 1)


def set_high():
    torch.set_float32_matmul_precision("high")


def set_medium():
    torch.set_float32_matmul_precision("medium")


def set_one():
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def set_bfloat16():
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def set_all():
    torch.backends.fp32_precision = "tf32"


@needs_switches
class TestSwitches:
    @pytest.fixture(autouse=True)
    def _settings(self, restored):
        pass

    @pytest.mark.parametrize("setting", [lambda: None, set_high, set_medium, set_one, set_bfloat16, set_all])
    def test_are_off_inside_and_as_before_afterwards(self, setting):
        setting()
        before = switches()
        with full_precision():
            assert all(value in ("none", "ieee") for (_, operation), value in switches().items() if operation != "all")
        assert switches() == before

    def test_are_as_before_after_an_error(self):
        set_high()
        before = switches()
        with contextlib.suppress(KeyError), full_precision():
            raise KeyError
        assert switches() == before

    def test_go_on_following_the_general_one(self):
        """Set back to what it said, they would no longer notice when it is changed."""
        set_all()
        with full_precision():
            pass
        torch.backends.fp32_precision = "ieee"
        assert switches()["cuda", "matmul"] == "ieee"

    def test_stay_off_until_the_last_block_is_left(self):
        set_one()
        with full_precision():
            with full_precision():
                pass
            assert switches()["cuda", "matmul"] == "ieee"
        assert switches()["cuda", "matmul"] == "tf32"

    def test_stay_off_while_another_thread_needs_them(self):
        set_one()
        entered, leave, seen = threading.Event(), threading.Event(), []

        def other():
            with full_precision():
                entered.set()
                leave.wait(10)
                seen.append(switches()["cuda", "matmul"])

        thread = threading.Thread(target=other)
        with full_precision():
            thread.start()
            entered.wait(10)
        leave.set()
        thread.join()
        assert seen == ["ieee"]
        assert switches()["cuda", "matmul"] == "tf32"

    @pytest.mark.parametrize("setting", [lambda: None, set_high, set_medium])
    def test_of_older_versions(self, setting, monkeypatch):
        monkeypatch.setattr(precision, "_HAS_SWITCHES", False)
        setting()
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        with full_precision():
            assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("highest", False)
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
