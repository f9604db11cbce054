"""Reading runs back: damage is found and named, and runs are told apart by what differs."""

import json
import re

import pytest
from tests.support.fabricated_runs import fabricate, layer

from spectral_dp.experiments.recorded_run import RecordedRun, differing, group_by_settings
from spectral_dp.experiments.run_directory import RunDirectoryError

ROW = {"epoch": 1, "step": 1, "epsilon": 1.0, "heldout_accuracy": 0.5, "seconds": 1.0}


@pytest.fixture
def grouped(tmp_path):
    """Groups fabricated runs, given as settings; returns how many runs are under each label."""

    def group(*runs):
        read = [RecordedRun.read(fabricate(tmp_path / str(i), **given)) for i, given in enumerate(runs)]
        return {group.label: len(group.runs) for group in group_by_settings(read)}

    return group


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


class TestGroups:
    def test_runs_that_differ_in_their_seed_belong_together(self, grouped):
        assert grouped({"seed": 1}, {"seed": 2}, {"method": "dpsgd"}) == {"spectral": 2, "dpsgd": 1}

    def test_finished_and_unfinished_runs_do_not(self, grouped):
        names = "spectral, model1, digits"
        assert grouped({}, {"seed": 1, "is_finished": False}) == {names: 1, f"{names} (unfinished)": 1}

    def test_labels_name_what_differs_and_no_more(self, grouped):
        noise = {"epsilon": None, "noise_multiplier": 1.5}
        labels = grouped({"epsilon": 1.0}, {"epsilon": 2.0}, noise, {"method": "dpsgd", "momentum": 0.5})
        assert list(labels) == [
            "spectral, epsilon 1",
            "spectral, epsilon 2",
            "spectral, noise multiplier 1.5",
            "dpsgd",
        ]

    def test_every_label_is_another(self, grouped):
        """Catches labels by what is set alone: a setting may differ by not being there."""
        labels = grouped({}, {"train_size": 100}, {"test_size": 100}, {"train_size": 100, "test_size": 100})
        assert len(labels) == 4

    def test_what_differs(self):
        assert differing([{"a": 1, "b": 2, "c": None}, {"a": 1, "b": 3, "c": 0}]) == ["b", "c"]


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
        sound = ROW | {"unsafe": {"training_loss": 1.0}, "ledger_head": run.metrics()[-1]["ledger_head"]}
        run.metrics_file.write_text(json.dumps(sound) + "\n")
        assert RecordedRun.read(run).has_unsafe

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
