import itertools
import math

import pytest

from spectral_dp.accounting import epsilon
from spectral_dp.experiments.planning.batch_sizes import BatchSize, batch_size_figure, batch_size_table, choose


@pytest.fixture(scope="module")
def table():
    return batch_size_table(4000, 5, 2.0, 1e-5, "rdp")


def test_every_line_is_within_the_budget(table):
    assert [line.batch_size for line in table] == [64, 128, 256, 512]
    for line in table:
        assert line.steps == 5 * math.ceil(4000 / line.batch_size)
        spent = epsilon(line.noise_multiplier, line.batch_size / 4000, line.steps, 1e-5, accountant="rdp")
        assert 1.95 < spent <= 2.0


def test_the_ratio_rises_with_the_batch_size_and_levels_off(table):
    ratios = [line.signal_to_noise for line in table]
    growth = [after / before for before, after in itertools.pairwise(ratios)]
    assert all(1 < factor < math.sqrt(2) for factor in growth)
    assert growth == sorted(growth, reverse=True)


def test_figures_of_a_line():
    line = BatchSize(100, 400, 2.0)
    assert (line.noise_per_step, line.noise_of_run, line.signal_to_noise) == (0.02, 0.4, 1000.0)
    assert line.to_dict()["signal_to_noise"] == 1000.0


def test_the_smallest_batch_size_that_is_nearly_as_good_and_leaves_enough_steps():
    lines = [BatchSize(64, 4000, 1.0), BatchSize(256, 1000, 1.1), BatchSize(1024, 250, 1.9), BatchSize(4096, 60, 3.0)]
    assert choose(lines).batch_size == 1024
    assert choose(lines, least_steps=500).batch_size == 256
    assert choose(lines, least_steps=10**6).batch_size == 4096


def test_few_records_have_a_table_too():
    assert batch_size_table(40, 2, 3.0, 1e-3, "rdp")
    assert batch_size_table(16, 2, 3.0, 1e-3, "rdp")


def test_the_figure_has_three_panels(table):
    assert len(batch_size_figure(table, table[0]).axes) == 3
