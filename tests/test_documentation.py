"""What the pages name is there: commands with their flags, targets of make, scripts, extras, links and anchors."""

import importlib.util
import re
import subprocess
import sys
import tomllib

import pytest
import typer
from PIL import Image
from website import accuracy_figure, result_tables

from spectral_dp.cli import app
from tests.support.pages import PAGES, ROOT, WITH_RESULTS, anchors, commands, links, mentioned_commands

MAKEFILE = (ROOT / "Makefile").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def problem_of(words):
    """What is wrong with a command line, or None. Nothing is run; programs that are not ours are not looked into."""
    while "=" in words[0]:  # variables of the environment
        words = words[1:]
    program, *arguments = words
    if program == "spectral-dp":
        return _cli_problem(arguments)
    if program == "make":
        targets = [word for word in arguments if "=" not in word and not word.startswith("-")]
        missing = [target for target in targets if not re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE)]
        return f"make has no target {missing}" if missing else None
    if "pip" in (program, *arguments[:2]):
        named = re.findall(r"\[([\w,]+)\]", " ".join(arguments))
        missing = {extra for extras in named for extra in extras.split(",")} - set(EXTRAS)
        return f"there is no extra {missing}" if missing else None
    if program in ("python", "torchrun"):
        return _script_problem(arguments)
    return None


def _cli_problem(arguments):
    """Parses, as the program itself would, but does not run."""
    command, name = typer.main.get_command(app), "spectral-dp"
    while hasattr(command, "commands") and arguments:
        name, *arguments = arguments
        if name.startswith("-"):
            return None  # such as --version
        if name not in command.commands:
            return f"there is no command {name!r}"
        command = command.commands[name]
    try:  # help is printed while it is parsed
        command.make_context(name, [word for word in arguments if word != "--help"])
    except Exception as error:
        return f"{type(error).__name__}: {getattr(error, 'message', error)}"
    return None


def _script_problem(arguments):
    script = next((word for word in arguments if word.endswith(".py")), None)
    if script is None or script.startswith(("mine", "train", "your")):  # the reader's own
        return None
    if not (ROOT / script).exists():
        return f"there is no {script}"
    text = "".join(path.read_text() for path in (ROOT / script).parent.glob("*.py"))  # options may be defined beside it
    flags = [word.partition("=")[0] for word in arguments[arguments.index(script) :] if word.startswith("--")]
    missing = [flag for flag in flags if f'"{flag}"' not in text]
    return f"{script} has no {missing}" if missing else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_are_valid(page):
    problems = {" ".join(words): problem_of(words) for words in commands(page.read_text())}
    assert {line: problem for line, problem in problems.items() if problem} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_within_sentences_exist(page):
    """There, arguments may be left out. The changelog also names what was, and several commands at once."""
    if page.name == "CHANGELOG.md":
        return
    problems = {" ".join(words): problem_of(words) or "" for words in mentioned_commands(page.read_text())}
    assert {line: problem for line, problem in problems.items() if problem and "MissingParameter" not in problem} == {}


@pytest.mark.parametrize(
    "line",
    [
        "spectral-dp trian",
        "spectral-dp train --epsilom 2",
        "spectral-dp train --epochs many",
        "spectral-dp data get",
        "make demmo",
        "pip install 'spectral-dp[clii]'",
        "python examples/nothing.py",
        "python benchmarks/bench_training.py --modells lenet5",
        "OMP_NUM_THREADS=1 spectral-dp budgett",
    ],
)
def test_negative_control_wrong_command_lines_are_found(line):
    (words,) = commands(f"```sh\n{line}  # a comment\n```\n")
    assert problem_of(words)


@pytest.mark.parametrize("page", WITH_RESULTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page):
    for path, anchor in links(page.read_text()):
        target = (page.parent / path) if path else page
        if target.resolve() == ROOT / "docs/reference/cli.md":
            continue  # made when the site is built, from the commands
        assert target.exists(), f"{page.name} links to {path}"
        if anchor:
            assert anchor in anchors(target.read_text()), f"{page.name} links to {path}#{anchor}"


def test_negative_control_links_and_anchors_are_read():
    text = (
        "# A *b*, `c_d`\n[x](one.md#two) and `[y](z.md)`\n```\n# no heading [q](r.md)\n```\n[web](https://x.y) [s](#t)"
    )
    assert links(text) == [("one.md", "two"), ("", "t")]
    assert anchors(text) == ["a-b-c_d"]


def test_every_room_has_a_page_of_reference():
    """With a paragraph of its own, and not only what is generated."""
    inside = {path.stem for path in (ROOT / "src/spectral_dp").iterdir() if path.suffix in ("", ".py")}
    on_one_page = {"errors", "files", "relations", "utils", "validators", "split_attention", "import_paths", "cli"}
    for room in sorted(
        inside - on_one_page - {"__init__", "__main__", "__pycache__", "_processes", "_public", "_version", "py"}
    ):
        page = (ROOT / f"docs/reference/{room}.md").read_text()
        heading, _, rest = page.partition("\n\n")
        assert heading == f"# `spectral_dp.{room}`"
        assert len(rest.partition(":::")[0].split()) > 30
        assert f"::: spectral_dp.{room}\n" in page


def test_tables_of_figures_are_those_of_the_results():
    """If this fails, run `make tables`: results were added, or somebody typed a figure by hand."""
    for page in result_tables.PAGES:
        text = (ROOT / page).read_text()
        assert "<!-- table: " in text
        assert result_tables.with_tables(text, page) == text, page


def test_negative_control_a_figure_that_was_typed_is_noticed():
    text = (ROOT / "README.md").read_text()
    assert (
        result_tables.with_tables(text.replace("| +1.", "| +2."), "README.md") == text != text.replace("| +1.", "| +2.")
    )


def test_the_figure_shows_the_committed_results():
    """If not: ``make figures``."""
    with Image.open(accuracy_figure.FIGURE) as picture:
        assert picture.text["Description"] == accuracy_figure.description()


def test_pages_in_the_navigation_exist():
    named = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    missing = [name for name in named if not (ROOT / name).exists() and not (ROOT / "docs" / name).exists()]
    assert missing == ["reference/cli.md"]  # made when the site is built


needs_mkdocs = pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs spectral-dp[docs]")


@needs_mkdocs
@pytest.mark.parametrize(
    ("text", "loads"),
    [
        ('<script src="https://cdn.example/x.js"></script>', True),
        ('<link rel="stylesheet" href="https://fonts.example/x.css">', True),
        ('<img alt="a" src="//example/x.png">', True),
        ("@font-face { src: url(https://fonts.example/x.woff2) }", True),
        ('<a href="https://example.org">a link is followed by the reader</a>', False),
        ('<script src="assets/x.js"></script><img src="x.png"><link rel="canonical" href="https://x">', False),
    ],
)
def test_what_comes_from_another_host_is_found(text, loads):
    from website.hooks import what_is_loaded_from_elsewhere

    assert bool(what_is_loaded_from_elsewhere(text)) == loads


@needs_mkdocs
def test_docstrings_become_markdown(tmp_path):
    import griffe
    from website.docstrings import DocstringsAsMarkdown

    table = "===  ======\n    bad  result\n    ===  ======\n    NaN  zero\n    ===  ======"
    text = f"See :func:`other` and :class:`~a.b.C`.\n\n    >>> 1 + 1\n    2\n\n    {table}\n    "
    (tmp_path / "room.py").write_text(f'def other():\n    """It."""\n\n\ndef one():\n    """{text}"""\n')
    extensions = griffe.load_extensions(DocstringsAsMarkdown)
    text = griffe.load("room", search_paths=[tmp_path], extensions=extensions)["one"].docstring.value
    assert '<autoref identifier="room.other" optional><code>other</code></autoref>' in text
    assert "`C`" in text
    assert "```pycon\n>>> 1 + 1\n2\n```" in text
    assert "| bad | result |\n|---|---|\n| NaN | zero |" in text


@needs_mkdocs
def test_the_reference_of_the_command_line_has_every_command_and_flag():
    from website.command_line import command_line_page
    from website.command_line import commands as all_commands

    page = command_line_page()
    for name, command in all_commands():
        section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        for flag in (flag for parameter in command.params for flag in parameter.opts if flag.startswith("--")):
            assert f"`{flag}" in section, f"{name} {flag}"


@needs_mkdocs
@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    """And asks no other host for anything, which website/hooks.py checks at the end."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for name in ("index", "quickstart", "reference/training", "reference/opacus", "results/index", "CHANGELOG"):
        assert (tmp_path / f"{name}.html").exists()
    assert "PrivacyEngine" in (tmp_path / "search/search_index.json").read_text()
