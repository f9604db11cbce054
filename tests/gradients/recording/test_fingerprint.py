"""Any value that changes changes the fingerprint, and reading it is as quick as memory."""

import time
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from spectral_dp.gradients.recording.fingerprint import Fingerprint, held, numbers_in


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(7, dtype=torch.float64),
        torch.randn(3, 5),
        torch.randn(3, 5).T,
        torch.randn(9)[1:],
        torch.randn(9)[1::2],
        torch.randn(20_006)[::2],
        torch.randn(4, 6)[:, 3],
        torch.randn(5, dtype=torch.complex64),
        torch.randn(5).half(),
        torch.randint(5, (11,), dtype=torch.int8),
        torch.tensor([True, False, True]),
        torch.tensor(1.0),
        torch.randn(100_003),
        torch.full((5,), torch.nan),
    ],
    ids=lambda t: f"{t.dtype} {tuple(t.shape)}",
)
def test_any_single_number_that_changes_is_seen(value):
    module = nn.Module()
    module.register_buffer("b", value)
    before = Fingerprint(module)
    assert Fingerprint(module).changes(before) == []
    for index in {0, value.numel() // 2, value.numel() - 1}:
        kept = value.clone()
        position = np.unravel_index(index, value.shape) if value.ndim else ()
        value[position] = ~value[position] if value.dtype == torch.bool else value[position].nan_to_num(0) + 1
        assert Fingerprint(module).changes(before) == ["b"]
        value.copy_(kept)
        assert Fingerprint(module).changes(before) == []


@pytest.mark.parametrize("size", [2, 3, 4096, 8192])
def test_values_that_change_places_in_a_short_tensor_are_seen(size):
    """As rows of a bank of earlier samples do: no sum would tell."""
    module = nn.Module()
    module.bank = torch.arange(size, dtype=torch.float32)
    before = Fingerprint(module)
    module.bank[[0, size - 1]] = module.bank[[size - 1, 0]]
    assert Fingerprint(module).changes(before) == ["bank"]


def test_bytes_belong_to_the_tensor_that_holds_them():
    """All are copied at once: a value that moves to the next tensor changes both."""
    module = nn.Module()
    module.a, module.b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    before = Fingerprint(module)
    module.a[2], module.b[0] = 4.0, 3.0
    assert Fingerprint(module).changes(before) == ["a", "b"]


def test_empty_tensors_and_other_layouts_are_taken():
    module = nn.Module()
    module.register_buffer("empty", torch.zeros(0, 3))
    module.register_buffer("meta", torch.zeros(3, device="meta"))
    module.sparse = torch.eye(3).to_sparse()
    module.register_buffer("expanded", torch.ones(1).expand(2, 4))
    assert Fingerprint(module).changes(Fingerprint(module)) == []


def test_a_fingerprint_is_as_quick_as_memory():
    """Stated in the module: some 0.1 ms a million parameters; ten times that would be noticed in training."""
    module = nn.Linear(1000, 4000)
    Fingerprint(module)
    best = min(_seconds(lambda: Fingerprint(module)) for _ in range(10))
    assert best < 4 * 1e-3


def _seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def test_numbers_are_found_in_lists_of_lists():
    tensor = torch.ones(1)
    assert list(numbers_in({"a": [1, (tensor, 2.0)], "b": deque([3.0]), "c": "text"})) == [tensor, 2.0, 3.0]
    endless = [tensor]
    endless.append(endless)
    assert len(list(numbers_in(endless))) == 4


def test_vocabularies_are_not_read_entry_by_entry():
    """They would take longer than the step."""
    module = nn.Module()
    module.vocabulary = {f"word {i}": i for i in range(100_000)}
    Fingerprint(module)
    assert min(_seconds(lambda: Fingerprint(module)) for _ in range(5)) < 1e-3


def test_whole_numbers_are_left_out():
    module = nn.BatchNorm1d(3)
    module.calls, module.scale = 3, 0.5
    assert set(held(module)) == {"weight", "bias", "running_mean", "running_var", "scale", "eps", "momentum"}
