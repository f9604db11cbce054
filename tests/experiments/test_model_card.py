"""The model card says what the run knows, promises nothing that does not hold, and asks for the rest."""

import json

import pytest
from tests.support.fabricated_runs import fabricate

from spectral_dp.experiments.model_card import NAME, write_model_card


def card(path, **settings):
    run = fabricate(path, **settings)
    summary, statement = run.summary(), json.loads(run.privacy.read_text())
    write_model_card(run.settings(), statement, summary, run.path)
    return (run.path / NAME).read_text()


def test_a_private_run(tmp_path):
    text = card(tmp_path / "run", method="dpsgd")
    assert text.startswith("# Model card: model1 on digits\n")
    assert "(1.5, 1e-05)-differential privacy with respect to adding or removing one record." in text
    assert "at most 4.482 times as probable" in text
    assert "the attacker is right at most" in text
    assert "640 records for training" in text  # 64 expected at a rate of 0.1
    assert text.count("**You:**") == 5 + 1  # questions, and the line that explains them
    assert "\n\n\n\n" not in text


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "nonprivate"}, "No privacy is guaranteed: none: ordinary training."),
        ({"epsilon": None, "noise_multiplier": 0.0}, "epsilon is infinite"),
        ({"reproducible": True}, "**This run is not private."),
    ],
)
def test_what_is_not_private_is_said_first(tmp_path, settings, said):
    text = card(tmp_path / "run", **settings)
    privacy = text.partition("## Privacy")[2].partition("## Evaluation")[0]
    assert said in privacy
    if "reproducible" not in settings:
        assert "the attacker is right" not in privacy
