"""The cost model: lines that fit, a ring that takes what rings take, and a page whose tables can be made again."""

import pytest
import scaling_model as scaling
from scaling_model import Costs, Line, Link, ring_seconds


def found(load=0.0):
    """Results as the benchmark writes them, of a machine whose costs are known."""
    seconds = [{"name": "spectral-dp", "processes": n, "seconds": [0.01 * n] * 3, "bytes": 0.0} for n in (1, 2)]
    parts = {
        "compute": [[n, 1e-3 + 1e-5 * n] for n in (32, 128, 512)],
        "noise": [[n, 8e-9 * n] for n in (1e4, 1e5, 1e6)],
        "sampling": [[n, 1e-4 + 2e-9 * n] for n in (1e5, 1e6, 1e7)],
        "all_reduce": [[n, 4e-4 + 1e-9 * n] for n in (0, 4e4, 4e6)],
    }
    facts = {"command": "python benchmarks/bench_distributed.py", "load": load}
    return {"made_by": facts, "batch_size": 256, "parameters": 1000, "results": seconds, "parts": parts}


def test_what_was_put_in_is_fitted():
    costs = Costs.fitted(found())
    assert (costs.compute.fixed, costs.compute.rate) == pytest.approx((1e-3, 1e-5))
    assert costs.noise.rate == pytest.approx(8e-9)
    assert costs.noise.fixed == pytest.approx(0, abs=1e-9)
    assert (costs.link.latency, costs.link.per_byte) == pytest.approx((2e-4, 1e-9))


def test_lines_never_fall_below_zero():
    """Catches a fit that predicts negative times for small sizes."""
    line = Line.through([[1.0, 1.0], [2.0, 3.0], [4.0, 9.0]])
    assert line.fixed == 0
    assert line.rate > 0


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_a_ring_takes_what_the_formula_says(workers):
    link = Link(1e-4, 1e-9)
    expected = 2 * (workers - 1) * (1e-4 + 1e-9 * 1e6 / workers)
    assert ring_seconds([link] * workers, 1e6) == pytest.approx(expected)
    assert ring_seconds([link], 1e6) == 0


def test_one_slow_link_delays_all():
    links = [Link(0.0, 2e-9), *[Link(0.0, 1e-9)] * 7]
    even = ring_seconds(links[1:] * 1 + [links[1]], 8e6)
    assert 1.8 * even < ring_seconds(links, 8e6) <= 2 * even


def test_bottlenecks_are_where_they_must_be():
    """Coins for many records on one worker, messages among many workers, bytes of large models on a slow link."""
    costs = Costs.fitted(found())

    def largest(**options):
        parts = costs.step(**{"workers": 8, "records": 1e4, "batch": 0.1, "parameters": 1000} | options)
        return max(parts, key=parts.get)

    assert largest(workers=1, records=1e9) == "sampling"
    assert largest(workers=1024) == "latency"
    assert largest(parameters=1e7) == "noise"
    assert largest(batch=10_000) == "compute"
    slow = Costs(costs.compute, costs.noise, costs.sampling, Link.of_speed(0.1), 1000)
    parts = slow.step(8, 1e4, 1, 1e7)
    assert max(parts, key=parts.get) == "traffic"


def test_a_filter_saves_traffic_and_noise_only():
    costs = Costs.fitted(found())
    whole, kept = (costs.step(8, 1e6, 256, 1e6, fraction) for fraction in (1.0, 0.25))
    assert kept["traffic"] == pytest.approx(whole["traffic"] / 4)
    assert kept["noise"] == pytest.approx(whole["noise"] / 4, rel=1e-3)
    assert (kept["compute"], kept["sampling"]) == (whole["compute"], whole["sampling"])


def test_the_tables_of_the_page_are_made_again_in_their_place():
    page = f"before\n{scaling.BEGIN}\nold\n{scaling.END}\nafter\n"
    made = scaling.with_tables(page, scaling.tables(found()))
    assert made.startswith("before\n")
    assert made.endswith(f"{scaling.END}\nafter\n")
    assert "old" not in made
    assert "| 1e9 | 1024 |" in made
    assert "provisional" not in made
    assert scaling.with_tables(made, scaling.tables(found())) == made
    with pytest.raises(ValueError, match="between which the tables go"):
        scaling.with_tables("no marks", "x")


def test_timings_beside_other_programs_are_called_provisional():
    assert "provisional" in scaling.tables(found(load=4.0))


def test_without_results_there_is_the_traffic_alone():
    made = scaling.tables(None)
    assert "no predictions in seconds" in made
    assert "| 100 | 64 |" in made
    assert "bottleneck" not in made
