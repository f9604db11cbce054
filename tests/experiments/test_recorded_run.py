"""Reading runs back: damage is found and named."""

import json
import re

import pytest
from tests.support.fabricated_runs import fabricate, layer

from spectral_dp.experiments.recorded_run import RecordedRun
from spectral_dp.experiments.run_directory import RunDirectoryError

ROW = {"epoch": 1, "step": 1, "epsilon": 1.0, "heldout_accuracy": 0.5, "seconds": 1.0}


class TestGuarantee:
    @pytest.mark.parametrize(
        ("given", "guarantee"),
        [
            ({}, "yes"),
            ({"is_finished": False}, "so far"),
            ({"method": "nonprivate"}, "none: ordinary training"),
            ({"reproducible": True}, "none: noise from a seed"),
            ({"epsilon": None, "noise_multiplier": 0.0}, "none: no noise"),
            ({"is_finished": False, "reproducible": True}, "none: noise from a seed"),
        ],
    )
    def test_guarantee(self, tmp_path, given, guarantee):
        assert RecordedRun.read(fabricate(tmp_path / "run", **given)).guarantee == guarantee


class TestDamage:
    @pytest.mark.parametrize(
        ("file", "content"),
        [
            ("metrics.jsonl", "{\n"),
            ("metrics.jsonl", "[1]\n"),
            ("metrics.jsonl", ""),
            ("metrics.jsonl", b"\xff\xfe\n"),
            ("metrics.jsonl", '{"epoch": 1}\n'),
            ("metrics.jsonl", json.dumps(ROW | {"epsilon": float("nan")}) + "\n"),
            ("metrics.jsonl", json.dumps(ROW | {"unsafe": [1.0]}) + "\n"),
            ("metrics.jsonl", json.dumps(ROW | {"unsafe": {"training_loss": "low"}}) + "\n"),
            ("layers.json", "{}"),
            ("layers.json", "7"),
            ("layers.json", '[{"name": "a"}]'),
            ("layers.json", json.dumps([layer("a", gains=[[1.0], [1.0, 0.0]])])),
            ("layers.json", json.dumps([layer("a", gains=[[[1.0]]])])),
            ("layers.json", json.dumps([layer("a", gains=[])])),
            ("layers.json", json.dumps([layer("a", gains=["x"])])),
            ("layers.json", json.dumps([layer("a", gains=[-1.0])])),
            ("privacy.json", "not JSON"),
            ("privacy.json", '{"private": true}'),
            ("summary.json", "[]"),
            ("config.json", '{"epochs": "many"}'),
            ("config.json", "{"),
        ],
    )
    def test_a_damaged_file_is_named_in_one_line(self, tmp_path, file, content):
        run = fabricate(tmp_path / "run")
        (run.path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ValueError, match=re.escape(str(run.path / file))) as caught:
            RecordedRun.read(run)
        assert "\n" not in str(caught.value)

    def test_a_sound_line_is_accepted(self, tmp_path):
        """The control: what was changed in the lines above is what was refused."""
        run = fabricate(tmp_path / "run")
        last = {name: run.metrics()[-1][name] for name in ("ledger_head", "heldout_accuracy")}
        sound = ROW | {"unsafe": {"training_loss": 1.0}} | last
        run.metrics_file.write_text(json.dumps(sound) + "\n")
        assert RecordedRun.read(run).has_unsafe

    @pytest.mark.parametrize("method", ["dpsgd", "nonprivate"])
    def test_a_finished_run_that_lost_its_last_evaluation(self, tmp_path, method):
        """An earlier evaluation would be counted as its result."""
        run = fabricate(tmp_path / "run", method=method)
        lines = run.metrics_file.read_text()
        run.metrics_file.write_text(lines[:-9])
        with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl is damaged: its last evaluation is not the one"):
            RecordedRun.read(run)
        run.metrics_file.write_text(lines)  # the control
        assert RecordedRun.read(run).is_finished

    def test_a_finished_run_without_its_statement(self, tmp_path):
        run = fabricate(tmp_path / "run")
        run.privacy.unlink()
        with pytest.raises(RunDirectoryError, match=r"has no privacy\.json"):
            RecordedRun.read(run)

    def test_a_line_cut_off_by_a_kill_is_no_damage(self, tmp_path):
        run = fabricate(tmp_path / "run", evaluated=2, is_finished=False)
        with run.metrics_file.open("a") as file:
            file.write('{"epoch": 3, "st')
        assert len(RecordedRun.read(run).rows) == 2
