import pytest
import typer

from spectral_dp.cli.ranks import among_ranks, run_as_ranks
from spectral_dp.experiments.settings import Settings, SettingsError


@pytest.mark.parametrize("code", [0, 3])
def test_this_command_is_run_in_every_process(monkeypatch, code):
    asked = []
    monkeypatch.setattr("spectral_dp.cli.ranks.run_ranks", lambda *given: asked.append(given) or code)
    monkeypatch.setattr("sys.argv", ["spectral-dp", "train", "--processes", "2"])
    ended = None
    try:
        run_as_ranks(Settings().resolved(), 2)
    except typer.Exit as exit:
        ended = exit.exit_code
    ((command, processes),) = asked
    assert (command[-4:], processes) == (["spectral_dp", "train", "--processes", "2"], 2)
    assert ended == (code or None)


def test_what_one_process_does_alone_is_refused_once(monkeypatch):
    """Catches a message from each process instead of one."""
    monkeypatch.setattr("spectral_dp.cli.ranks.run_ranks", lambda *_: pytest.fail("processes were started"))
    with pytest.raises(SettingsError, match="trains in one process"):
        run_as_ranks(Settings(method="nonprivate").resolved(), 2)


def test_a_process_by_itself_is_the_first():
    with among_ranks("cpu") as is_first:
        assert is_first
