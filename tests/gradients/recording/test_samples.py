"""Whose a row is: what one tensor in two batches tells of it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from spectral_dp.gradients.recording.samples import (
    calls_under_way,
    keywords_of_call,
    number_of_samples,
    relation,
    some_samples,
)

sizes = st.integers(2, 4)


def without_first(frames, layout):
    """``(B, k1, k2, ...)`` folded into rows in a layout, with all samples and without the first."""
    return tuple(layout(t).flatten(0, 2) for t in (frames, frames[1:]))


@settings(max_examples=40, deadline=None)
@given(samples=sizes, outer=st.integers(1, 4), inner=st.integers(1, 3), seed=st.integers(0, 99))
def test_rows_of_a_sample_side_by_side(samples, outer, inner, seed):
    torch.manual_seed(seed)
    frames = torch.randn(samples, outer, inner, 5)
    assert relation(*without_first(frames, lambda t: t), samples) == "rows"


@settings(max_examples=40, deadline=None)
@given(samples=sizes, outer=st.integers(2, 4), inner=st.integers(1, 3), seed=st.integers(0, 99))
def test_what_is_interleaved_is_not_told_to_be_rows(samples, outer, inner, seed):
    """Rows b, B + b, ... of a sample: taken for neighbours, samples would be clipped with parts of each other."""
    torch.manual_seed(seed)
    frames = torch.randn(samples, outer, inner, 5)
    assert relation(*without_first(frames, lambda t: t.transpose(0, 1)), samples) == "unknown"


@settings(max_examples=40, deadline=None)
@given(samples=sizes, length=st.integers(1, 6), seed=st.integers(0, 99))
def test_what_is_the_same_in_both_is_shared_however_long_it_is(samples, length, seed):
    torch.manual_seed(seed)
    table = torch.randn(length, 3)
    assert relation(table, table.clone(), samples) == "shared"
    assert relation(table, table + torch.randn_like(table), samples) == "unknown", "it depends on the samples"


def test_rows_that_are_all_alike_prove_nothing():
    alike = torch.ones(6, 5)
    assert relation(alike, alike[2:], 3) == "unknown", "two rows a sample, in any order"
    assert relation(alike[:3], alike[:2], 3) == "rows", "one row a sample has one order only"


def test_a_sample_that_is_not_finite_is_compared_where_it_is():
    x = torch.randn(3, 4)
    x[1, 2], x[2, 0] = torch.nan, torch.inf
    assert relation(x, x[1:], 3) == "rows"
    assert relation(x, x[1:].nan_to_num(), 3) == "unknown"


def test_a_huge_sample_does_not_make_interleaved_rows_look_like_neighbours():
    frames = torch.randn(3, 2, 1, 5)
    frames[2] *= 1e30
    assert relation(*without_first(frames, lambda t: t.transpose(0, 1)), 3) == "unknown"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_every_kind_of_number(dtype):
    x = torch.arange(12).view(3, 4).remainder(5).to(dtype)
    assert relation(x, x[1:].clone(), 3) == "rows"


def test_the_number_of_samples_is_that_of_the_first_tensor_or_as_expected():
    x, mask = torch.randn(4, 7), torch.ones(7, 7)
    assert number_of_samples((x, mask), {}) == 4
    assert number_of_samples((), {"scale": 2.0, "x": {"ids": x}}) == 4
    assert number_of_samples((mask, x), {}, expected=4) == 4
    assert number_of_samples((x,), {}, expected=5) == 4, "of a batch that the loader did not hand out"
    assert number_of_samples((torch.tensor(1.0), "text"), {}) is None


def test_some_samples_are_copies():
    x, mask = torch.randn(4, 7), torch.ones(7, 7)
    few = some_samples(({"x": x}, mask), 4, slice(1, 3))
    few[0]["x"].zero_()
    assert few[0]["x"].shape == (2, 7)
    assert few[1].shape == (7, 7)
    assert bool(x.all())


def test_keywords_of_the_call_are_found_from_a_hook_that_is_not_given_them():
    seen = []
    handle = nn.modules.module.register_module_forward_pre_hook(lambda m, _: seen.append(keywords_of_call(m)))
    try:
        nn.Linear(3, 2)(input=(x := torch.randn(4, 3)))
    finally:
        handle.remove()
    assert seen[0]["input"] is x
    assert keywords_of_call(nn.Linear(1, 1)) is None


def test_a_single_row_before_others_tells_no_number():
    """Taken for one sample, all samples would be clipped as one."""
    time_step, x = torch.ones(1), torch.ones(4, 2)
    assert number_of_samples((time_step, x), {}) is None
    assert number_of_samples((time_step, x), {}, expected=4) == 4
    assert number_of_samples((time_step, x), {}, expected=1) == 1
    assert number_of_samples((x[:1], time_step), {}) == 1


def test_calls_that_are_under_way():
    class CallsItself(nn.Module):
        def forward(self, depth):
            return self(depth - 1) if depth else calls_under_way(self)

    module = CallsItself()
    assert [module(depth) for depth in (0, 1, 2)] == [1, 2, 3]
    assert calls_under_way(module) == 0
