"""Settings as flags: every setting has one, flags win over the file, and refusals are one line."""

import inspect
import warnings
from dataclasses import fields

import pytest
import typer
from typer.testing import CliRunner

from spectral_dp.cli.options import plain_errors, with_settings
from spectral_dp.errors import SpectralDPError
from spectral_dp.experiments.settings import Settings


def invoke(*arguments):
    """Runs a command that notes what it is given; returns that (None if it did not run) and the result."""
    seen = []
    app = typer.Typer()

    @app.command()
    @with_settings
    def command(given: dict, name: str = "x") -> None:
        """Says what it does."""
        seen.append((given, name))

    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return (seen[0] if seen else None), result


def test_every_setting_has_a_flag():
    def command(given: dict, name: str = "x") -> None:
        """Says what it does."""

    made = with_settings(command)
    assert list(inspect.signature(made).parameters) == ["name", "config", *(field.name for field in fields(Settings))]
    assert "Says what it does." in invoke("--help")[1].output


def test_only_what_was_given_is_handed_on():
    """Defaults belong to the settings: a flag's own would count as asked for, and win over a file."""
    assert invoke()[0] == ({}, "x")
    given, _ = invoke("--epochs", 3, "--no-reproducible", "--name", "y")
    assert given == ({"epochs": 3, "reproducible": False}, "y")


def test_flags_win_over_the_file(tmp_path):
    (tmp_path / "run.toml").write_text('epochs = 5\nmodel = "lenet5"\n')
    given, _ = invoke("--config", tmp_path / "run.toml", "--epochs", 3)
    assert given[0] == {"epochs": 3, "model": "lenet5"}


def test_flags_that_are_repeated():
    given, _ = invoke("--layer-ratio", "fc1=0.5", "--layer-ratio", "fc2=0.25", "--dense-layer", "fc3")
    assert given[0] == {"layer_ratios": {"fc1": 0.5, "fc2": 0.25}, "dense_layers": ["fc3"]}


def test_options_of_features_are_numbers_where_they_read_as_such():
    options = ("scales=3", "ratio=0.5", "weights=a", "maps=false")
    given, _ = invoke(*(word for option in options for word in ("--feature-option", option)))
    assert given[0] == {"feature_options": {"scales": 3, "ratio": 0.5, "weights": "a", "maps": False}}
    assert "NAME=VALUE" in invoke("--feature-option", "scales")[1].output


@pytest.mark.parametrize("pair", ["fc1", "fc1=half", "=0.5"])
def test_a_ratio_that_is_none_says_how_to_write_it(pair):
    given, result = invoke("--layer-ratio", pair)
    assert given is None
    assert result.exit_code == 2
    assert "NAME=RATIO" in result.output


class TestPlainErrors:
    @pytest.mark.parametrize(
        ("error", "code", "line"),
        [
            (ValueError("a bad value"), 2, "error: a bad value"),
            (SpectralDPError("what to do"), 2, "error: what to do"),
            (FileNotFoundError(2, "No such file", "data.bin"), 1, "error: data.bin: No such file"),
            (OSError("the network is down"), 1, "error: the network is down"),
        ],
    )
    def test_are_one_line_and_an_exit_code(self, capsys, error, code, line):
        with pytest.raises(typer.Exit) as exited, plain_errors():
            raise error
        assert exited.value.exit_code == code
        assert capsys.readouterr() == ("", line + "\n")

    def test_are_shown_in_full_when_asked_for(self, monkeypatch):
        monkeypatch.setenv("SPECTRAL_DP_TRACEBACK", "1")
        with pytest.raises(ValueError, match="mine"), plain_errors():
            raise ValueError("mine")

    def test_mistakes_of_the_program_keep_their_traceback(self):
        with pytest.raises(ZeroDivisionError), plain_errors():
            _ = 1 / 0

    def test_warnings_are_lines_and_stay_warnings_afterwards(self, capsys):
        with plain_errors():
            warnings.warn("mind this", stacklevel=1)
        assert capsys.readouterr() == ("", "warning: mind this\n")
        with pytest.warns(UserWarning, match="again"):
            warnings.warn("again", stacklevel=1)
