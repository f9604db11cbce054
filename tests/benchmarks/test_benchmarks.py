"""The benchmark's own arithmetic and bookkeeping: numbers that decide whether a goal is reached must be right."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import bench_distributed
import bench_quick
import entries as kept
import goals
import pytest
import race
import torch
import worker
from bench_growth import CURVES, slopes
from contestants import CONTESTANTS, contestants_for
from entries import Entry
from race import Measured, Terms
from spread import Spread, log_log_slope, paired_ratio
from stopwatch import PrivateTraining
from torch import nn
from torch.utils.data import TensorDataset
from workloads import Workload

from spectral_dp import SpectralConfig
from spectral_dp.gradients import ModelGradients
from spectral_dp.gradients.rules.fallback import FallbackRule

BENCHMARKS = Path(race.__file__).parent


def entry(name="lenet5", size=256, made_by=None, **seconds):
    """Contestants by name, with what a step took them in each round; memory 100 MB for each second."""
    measured = [
        Measured(n.replace("_", " "), list(s), next((100 * t for t in s if t is not None), None), 1)
        for n, s in seconds.items()
    ]
    return Entry(name, size, made_by or {"command": "python x", "commit": "a"}, measured)


class TestSpread:
    def test_median_between_its_quartiles(self):
        assert Spread.of([5, 1, 2, 4, 3]) == Spread(2, 3, 4)

    def test_one_value_and_none(self):
        assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)
        assert Spread.of([]) is None

    def test_ratios_are_of_the_same_round(self):
        # The machine was ten times slower in the second round: the ratio of the medians would be 11.
        assert paired_ratio([None, 20.0, 2.0], [1.0, 10.0, 1.0]) == Spread(2.0, 2.0, 2.0)

    def test_rounds_that_only_one_took_part_in_do_not_count(self):
        assert paired_ratio([None, 3.0, 8.0], [1.0, 1.0, None]) == Spread(3.0, 3.0, 3.0)
        assert paired_ratio([None], [1.0]) is None

    @pytest.mark.parametrize("exponent", [-0.5, 0.0, 1.0, 1.7])
    def test_slope_of_a_power_law(self, exponent):
        sizes = [64, 128, 256, 1024]
        assert log_log_slope(sizes, [3.0 * s**exponent for s in sizes]) == pytest.approx(exponent)

    def test_a_point_has_no_slope(self):
        assert log_log_slope([64], [1.0]) is None


class TestGoals:
    def judged(self, *entries):
        return {(j["workload"], j["quantity"]): j for j in goals.judge(list(entries)) if j["batch"] != 64}

    def test_a_reached_goal_is_not_missed(self):
        found = self.judged(entry(plain=[1.0, 2.0], spectral=[1.0, 2.0], opacus_ghost=[4.0, 8.0]))
        assert [found["lenet5", q]["verdict"] for q in goals.QUANTITIES] == ["reached"] * 3
        assert found["lenet5", "time / best Opacus"]["measured"] == pytest.approx(0.25)

    def test_a_missed_goal_says_by_how_much(self):
        found = self.judged(entry(plain=[1.0, 2.0], spectral=[1.8, 3.6], opacus_ghost=[2.0, 4.0]))
        assert found["lenet5", "time / plain"]["verdict"] == "missed by 20.0 %"
        assert found["lenet5", "time / best Opacus"]["verdict"] == "missed by 50.0 %"

    def test_other_batches_and_workloads_do_not_count(self):
        found = self.judged(entry(size=64, plain=[1.0], spectral=[1.0]), entry("model1", plain=[1.0], spectral=[1.0]))
        assert {j["verdict"] for j in found.values()} == {"not measured"}

    def test_the_best_mode_of_opacus_is_the_quickest_that_finished(self):
        measured = entry(plain=[1.0], opacus_hooks=[None], opacus_ghost=[3.0], opacus_functorch=[2.0]).measured
        assert kept.best_opacus(measured).contestant == "opacus functorch"

    def test_every_goal_is_of_a_workload_that_is_measured(self):
        from bench_training import WORKLOADS

        for goal in goals.GOALS:
            model, block_size, batches = WORKLOADS[goal.workload]
            assert goal.batch in batches
            assert goal.contestant in contestants_for(Workload(model, goal.batch, block_size))

    def test_sequences_are_judged_at_their_batch_without_a_filter(self):
        found = self.judged(entry("lstm", 32, plain=[1.0], dpsgd=[3.0], opacus_hooks=[20.0]))
        assert found["lstm", "time / plain"]["verdict"] == "missed by 50.0 %"
        assert found["lstm", "time / best Opacus"]["verdict"] == "reached"
        assert ("bert, lora", "time / best Opacus") not in found

    def test_slopes_judge_ours_in_the_batch_size_only(self):
        points = [entry("batch size, lenet5", b, plain=[b * 1.0], spectral=[b**1.2]) for b in (64, 128, 256)]
        plain, ours = slopes(points)
        assert "time_verdict" not in plain
        assert ours["time_slope"] == pytest.approx(1.2)
        assert ours["time_verdict"].startswith("missed by 14.3")
        width = [entry("width, mlp", w, dpsgd=[w**2.0]) for w in (256, 512)]
        assert "time_verdict" not in slopes(width)[0]


class TestQuick:
    """The guard must see what is slower, and must not mind a slower machine."""

    COMMITTED = entry(plain=[1.0], spectral=[1.2], opacus_ghost=[2.0])

    def compared(self, *runs):
        return {c.quantity: c for c in bench_quick.compare([self.COMMITTED], runs)}

    def test_a_slower_machine_is_no_regression(self):
        slow = entry(plain=[10.0, 20.0], spectral=[12.0, 24.0], opacus_ghost=[20.0, 40.0])
        found = self.compared(slow)
        assert not any(c.is_worse for c in found.values())
        assert found["time / plain"].change == pytest.approx(0)

    def test_a_slower_step_is(self):
        slower = entry(plain=[1.0], spectral=[1.6], opacus_ghost=[2.0])
        found = self.compared(slower, slower, self.COMMITTED)
        assert found["time / plain"].is_worse, "the median of three runs"
        assert found["time / best Opacus"].is_worse
        assert not self.compared(slower, self.COMMITTED, self.COMMITTED)["time / plain"].is_worse

    def test_more_memory_is_even_where_time_is_the_same(self):
        greedy = entry(plain=[1.0], spectral=[1.2], opacus_ghost=[2.0])
        greedy.measured[1].memory_mb *= 1.25
        found = self.compared(greedy)
        assert found["memory / plain"].is_worse
        assert not found["time / plain"].is_worse

    def test_what_failed_or_was_never_committed_does_not_pass(self):
        failed = entry(plain=[1.0], spectral=[None], opacus_ghost=[2.0])
        with pytest.raises(ValueError, match="a contestant failed"):
            self.compared(failed)
        with pytest.raises(ValueError, match="nothing is committed of model2"):
            self.compared(entry("model2", plain=[1.0], spectral=[1.0], opacus_ghost=[1.0]))

    def test_all_its_workloads_are_committed(self):
        committed = {e.name for e in kept.load(bench_quick.COMMITTED / "training.json") if e.size == bench_quick.BATCH}
        assert len(bench_quick.WORKLOADS) == 5
        assert committed >= set(bench_quick.WORKLOADS)


class TestEntries:
    def test_only_what_was_measured_again_is_replaced(self, tmp_path):
        old = [entry(size=64, plain=[1.0]), entry(size=256, plain=[1.0])]
        (tmp_path / "x.json").write_text(json.dumps(kept.as_json(old)))
        new = entry(size=256, plain=[7.0], made_by={"command": "python y", "commit": "b"})
        merged = kept.merge(kept.load(tmp_path / "x.json"), [new])
        assert merged == [old[0], new]
        assert [e.made_by["commit"] for e in merged] == ["a", "b"]

    def test_no_file_no_entries(self, tmp_path):
        assert kept.load(tmp_path / "x.json") == []

    def test_without_plain_there_are_no_ratios(self):
        (standing,) = entry(plain=[None]).standings()
        assert (standing.time, standing.over_plain, standing.memory_over_plain) == (None, None, None)


class TestContestants:
    @pytest.mark.parametrize("name", [n for n in CONTESTANTS if "opacus" not in n])
    def test_at_rest_they_hold_no_gradients(self, name, monkeypatch):
        built = []
        build = Workload.build
        monkeypatch.setattr(Workload, "build", lambda *a, **k: built.append(build(*a, **k)) or built[-1])
        in_order = name.endswith(", channels last")
        work = Workload("conv stack", 2, width=16) if in_order else Workload("mlp", 2, 8, width=16)
        step = CONTESTANTS[name](work)
        before = [p.detach().clone() for p in built[0].parameters()]
        step()
        assert all(p.grad is None for p in built[0].parameters())
        assert not any(torch.equal(p, q) for p, q in zip(before, built[0].parameters(), strict=True))

    def test_forms_in_blocks_run_only_where_there_are_blocks(self):
        assert "plain, blocks" in contestants_for(Workload("model1", 2, 8))
        assert "plain, blocks" not in contestants_for(Workload("model1", 2))

    def test_orders_of_channels_run_only_where_there_are_convolutions(self):
        assert "plain, channels last" in contestants_for(Workload("model2", 2))
        assert "plain, channels last" not in contestants_for(Workload("model1", 2))
        x, _ = Workload("model2", 2, channels_last=True).batch()
        assert x.stride(1) == 1

    @pytest.mark.parametrize("model", ["bert", "torch encoder", "bert, lora", "bert, biases", "bert, head", "lstm"])
    def test_models_of_sequences_train_what_plain_trains(self, model):
        """Catches a part that only one of the two trains, and a model that falls back to the slow way."""
        work = Workload(model, 2, width=8)
        assert not any(name.startswith("spectral") for name in contestants_for(work))
        built = work.build()
        gradients = ModelGradients(built)
        trained = [p for p in built.parameters() if p.requires_grad]
        x, y = work.batch()
        nn.functional.cross_entropy(built(x), y).backward()
        sums = gradients.take().clipped_sums(torch.ones(2))
        rules = [layer.rule for block in gradients.blocks for layer in block]
        gradients.remove()
        assert not any(isinstance(rule, FallbackRule) for rule in rules)
        nn.functional.cross_entropy(built(x), y).backward()
        assert set(sums) == set(trained)
        for parameter, total in sums.items():
            torch.testing.assert_close(total, parameter.grad, rtol=1e-3, atol=1e-6)

    @pytest.mark.parametrize("name", CURVES)
    def test_every_point_of_a_curve_has_a_model(self, name):
        curve = CURVES[name]
        work = curve.work(curve.sizes[0])
        assert work.build(dense=True)(work.batch()[0][:1].detach()).shape[0] == 1
        assert set(curve.contestants) <= set(CONTESTANTS)


FAKE_WORKER = """
import json, os, signal, sys
name = json.loads(sys.argv[1])["contestant"]
def answer(**facts): print(json.dumps(facts), flush=True)
if name == "broken":
    raise ValueError("no such thing")
answer()
sys.stdin.readline()
if name == "greedy":
    answer(failure="out of memory"); sys.exit()
answer(seconds=60.0 if name == "slow" else 0.1, memory_mb=10.0)
made = 0
for line in sys.stdin:
    made += int(line)
    if name == "killed" and made > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    answer(seconds={"plain": 0.1, "slow": 60.0, "tenfold": 1.1}.get(name, 0.2), memory_mb=10.0 + made)
"""


class TestRace:
    @pytest.fixture
    def run(self, tmp_path, monkeypatch):
        (tmp_path / "worker.py").write_text(FAKE_WORKER)
        monkeypatch.setattr(race, "_WORKER", tmp_path / "worker.py")

        def run(*names, rounds=4):
            notes = []
            found = race.race(Workload("lenet5", 4), names, Terms(rounds, patience=30.0), notes.append)
            return {m.contestant: m for m in found}, notes

        return run

    def test_rounds_go_forwards_and_backwards(self, run):
        found, notes = run("plain", "other", rounds=2)
        order = [note.split(", ")[1] for note in notes if note.startswith("round")]
        assert order == ["plain", "other", "other", "plain"]
        assert found["other"].seconds == [0.2, 0.2]

    def test_all_make_as_many_steps_as_plain_in_a_quarter_second(self, run):
        found, _ = run("plain", "other", "tenfold")
        assert [m.steps_a_round for m in found.values()] == [2, 2, 1]

    def test_the_slow_take_part_in_fewer_rounds(self, run):
        found, _ = run("plain", "slow")
        assert found["slow"].seconds == [60.0, None, 60.0, None]

    def test_failures_are_reported_and_stop_nobody_else(self, run):
        found, _ = run("plain", "greedy", "killed", "broken")
        assert {n: m.failure for n, m in found.items()} == {
            "plain": None,
            "greedy": "out of memory",
            "killed": "out of memory",
            "broken": "ValueError: no such thing",
        }
        assert found["greedy"].times == found["killed"].times == found["broken"].times == []
        assert len(found["plain"].times) == 4


class TestWorker:
    def test_more_memory_than_allowed_is_a_failure_not_a_crash(self):
        script = (
            "import sys, worker; worker.serve(lambda: lambda: bytearray(10**9), sys.stdin, sys.stdout, most_mb=100)"
        )
        here = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
        ran = subprocess.run([sys.executable, "-c", script], input="begin\n", capture_output=True, text=True, env=here)
        assert [json.loads(line) for line in ran.stdout.splitlines()] == [{}, {"failure": "out of memory"}]
        assert ran.returncode == 0

    def test_memory_that_is_allowed_is_measured(self):
        script = "import sys, worker; worker.serve(lambda: lambda: b'x' * 10**8, sys.stdin, sys.stdout, most_mb=1000)"
        here = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
        ran = subprocess.run(
            [sys.executable, "-c", script], input="begin\n2\n", capture_output=True, text=True, env=here
        )
        warm, *answers = [json.loads(line) for line in ran.stdout.splitlines()]
        assert warm == {}
        assert len(answers) == 2
        assert all(90 < a["memory_mb"] < 120 for a in answers)

    def test_the_processor_has_a_clock_of_its_own(self):
        said = io.StringIO()
        with patch.object(worker, "_limit_memory"):  # it would hold for all tests that follow
            worker.serve(lambda: lambda: None, io.StringIO("begin\n2\n"), said, now=iter(range(0, 12, 3)).__next__)
        assert [json.loads(line).get("seconds") for line in said.getvalue().splitlines()] == [None, 3.0, 1.5]

    def test_torch_says_so_in_its_own_words(self):
        with pytest.raises(RuntimeError) as caught:
            torch.empty(2**48)
        assert worker.is_lack_of_memory(caught.value)
        assert not worker.is_lack_of_memory(RuntimeError("shapes do not match"))

    def test_other_errors_are_not_hidden(self, monkeypatch):
        monkeypatch.setattr(worker, "_limit_memory", lambda _: None)  # it would hold for all tests that follow

        def fail():
            raise RuntimeError("shapes do not match")

        with pytest.raises(RuntimeError, match="shapes"):
            worker.serve(lambda: fail, io.StringIO(), io.StringIO())


class TestStopwatch:
    def training(self, ratio):
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 2))
        dataset = TensorDataset(torch.randn(200, 1, 8, 8), torch.randint(2, (200,)))
        return PrivateTraining(model, dataset, 20, SpectralConfig(conv_ratio=ratio))

    def test_parts_of_a_step_add_up(self):
        (times,) = self.training(0.5).run(1)
        inner = ("squared_norms", "clipped_sums", "step", "fixed")
        assert times["private step"] == pytest.approx(sum(times[part] for part in inner))
        assert 0 < times["noise"] < times["fixed"] < times["total"]

    @pytest.mark.parametrize(("ratio", "kept_of_36"), [(0.0, 36), (0.5, 16)])
    def test_noise_is_drawn_for_kept_coordinates_only(self, ratio, kept_of_36):
        training = self.training(ratio)
        training.run(1)
        others = training.parameters - 36
        assert set(training.drawn) == {training.kept} == {others + kept_of_36}


def test_from_the_command_line_to_the_files(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "bench_training.py"), "--models", "lenet5", "--batches", "4"]
    options = ["--rounds", "2", "--threads", "1", "--contestants", "spectral", "--out", str(tmp_path)]
    ran = subprocess.run([*command, *options], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "training.json").read_text())
    (only,) = found["entries"]
    assert (only["name"], only["size"]) == ("lenet5", 4)
    assert [s["contestant"] for s in only["standings"]] == ["plain", "spectral"]
    assert all(s["time"]["median"] > 0 and s["memory_mb"] > 0 for s in only["standings"])
    assert {"torch", "python", "numpy", "opacus", "cpu", "threads", "date", "command"} <= set(only["made_by"])
    page = (tmp_path / "training.md").read_text()
    assert "| lenet5 | 4 | spectral |" in page
    assert "--contestants spectral" in page
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert "Goals" in ran.stdout


class TestDistributed:
    def test_the_kept_fraction_is_that_of_the_plan(self):
        assert bench_distributed.kept_fraction(0.0) == 1.0
        assert bench_distributed.kept_fraction(0.75) == pytest.approx(0.258, abs=1e-3)

    def test_efficiency_and_share_of_the_bytes(self):
        def result(name, processes, seconds, sent):
            return {"name": name, "processes": processes, "seconds": [seconds] * 3, "bytes": sent}

        rows = [result("plain DDP", 1, 0.1, 0.0), result("plain DDP", 2, 0.2, 1000.0)]
        for name, sent in ((bench_distributed.OURS, 1000.0), (bench_distributed.FILTERED, 300.0)):
            rows += [result(name, 1, 0.3, 0.0), result(name, 2, 0.4, sent)]
        shown = bench_distributed.sheet(rows).sections[0]
        assert [row[3] for row in shown] == ["", "0.50", "", "0.75", "", "0.75"]
        assert [row[5] for row in shown] == ["", "100.0 %", "", "100.0 %", "", "30.0 %"]
        judged = {row[0]: row[3] for row in bench_distributed.goals(rows).sections[0]}
        assert judged == {
            f"bytes of DDP's, {bench_distributed.OURS}": "reached",
            f"efficiency of DDP's, {bench_distributed.OURS}": "reached",
            f"bytes of DDP's, {bench_distributed.FILTERED}": "missed",  # 25.8 % is kept
            f"efficiency of DDP's, {bench_distributed.FILTERED}": "reached",
        }
