"""Where a record first depends on others is named: the innermost module, or the code before it."""

import torch
from torch import nn

from spectral_dp.training.rehearsal.trace import Meeting, first_difference, traced


class Block(nn.Module):
    def __init__(self, couples_before=False):
        super().__init__()
        self.inner, self.norm, self.couples_before = nn.Linear(6, 6), nn.LayerNorm(6), couples_before

    def forward(self, x):
        h = self.norm(x)
        return self.inner(h - h.mean(0) if self.couples_before else h)


class Centre(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def meeting(model, views=1, first=lambda x: x):
    torch.manual_seed(0)
    a, others, strangers = torch.randn(1, 6), torch.randn(3, 6), torch.randn(3, 6)
    traces = []
    for mates in (others, strangers):
        with traced(model, 4, views, 0) as visits:
            model(first(torch.cat([a, mates])))
        traces.append(visits)
    assert not any(module._forward_hooks for module in model.modules())
    return first_difference(*traces, 1e-5)


def test_nothing_is_found_where_records_do_not_meet():
    assert meeting(nn.Sequential(nn.Linear(6, 6), Block(), nn.Linear(6, 2))) is None


def test_the_module_that_makes_them_meet_is_found():
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(Centre(), nn.ReLU()), nn.Linear(6, 2))
    assert meeting(model) == Meeting("1.0", "Centre", at_input=False, is_first=False)


def test_code_between_modules_is_found_at_the_next():
    model = nn.Sequential(nn.Linear(6, 6), Block(couples_before=True))
    assert meeting(model) == Meeting("1.inner", "Linear", at_input=True, is_first=False)


def test_code_before_the_model_is_found():
    met = meeting(nn.Sequential(nn.Linear(6, 6)), first=lambda x: x - x.mean(0))
    assert met == Meeting("0", "Linear", at_input=True, is_first=True)


def test_all_views_of_a_record_are_followed():
    model = nn.Sequential(nn.Linear(6, 6))
    assert meeting(model, views=2, first=lambda x: x.repeat_interleave(2, 0)) is None
    assert meeting(model, views=2, first=lambda x: x.repeat(2, 1)) is not None


def test_rows_of_other_shapes_are_not_compared():
    model = nn.Sequential(nn.Tanh())
    traces = []
    for length in (5, 7):
        with traced(model, 2, 1, 0) as visits:
            model(torch.ones(2, length))
        traces.append(visits)
    assert first_difference(*traces, 1e-5) is None


def test_nothing_is_noted_without_a_position():
    model = nn.Sequential(nn.Tanh())
    with traced(model, 2, 1, None) as visits:
        model(torch.ones(2, 3))
    assert visits == []
