"""What MkDocs does beyond ``docs/``: pages from elsewhere in the repository, links between them, a check of the result.

- Markdown files at the root, ``results/`` and the scripts of ``examples/`` become pages at the same paths, so that a
  link which works in the repository works on the site.
- ``reference/cli.md`` is made from the commands themselves.
- Pages that nobody has placed in the navigation are listed all the same.
- A built page that would load anything from another host is an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from website.command_line import command_line_page  # noqa: E402 - hooks are loaded as files, not from a package

_log = logging.getLogger("mkdocs.hooks.repository")
_RESULTS = (".md", ".png", ".json")
_LINK = re.compile(r"(\]\()(?![a-z]+:|#)([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCED = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)
_LOADS = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//[^\s\">]+"
    r"|<link\b(?=[^>]*\brel=\"?(?:stylesheet|preconnect|preload|icon))[^>]*\bhref=\"?(?:https?:)?//[^\s\">]+"
    r"|url\(['\"]?(?:https?:)?//[^)]+|@import\s+['\"](?:https?:)?//[^'\"]+"
)


def _elsewhere() -> Iterator[tuple[str, Path]]:
    """The path on the site, and the file, of everything that is shown and not in ``docs/``."""
    for path in sorted(ROOT.glob("*.md")):
        if path.name != "README.md":  # the first page of the site is docs/index.md
            yield path.name, path
    for path in sorted((ROOT / "results").rglob("*")):
        if path.suffix in _RESULTS:
            yield path.relative_to(ROOT).as_posix(), path
    yield "CITATION.cff", ROOT / "CITATION.cff"
    for path in sorted((ROOT / "examples").rglob("*.py")):
        yield path.relative_to(ROOT).with_suffix(".md").as_posix(), path


def on_config(config: MkDocsConfig) -> None:
    """Places what nobody has placed: pages of ``docs/`` under "How to", reports under "Results"."""
    assert config.nav is not None
    sections = {name: entries for part in config.nav for name, entries in part.items()}
    placed = set(_named(config.nav))
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in sorted((ROOT / "docs").glob("*.md"))]
    sections["How to"] += [page for page in pages if page not in placed]
    reports = [name for name, _ in _elsewhere() if name.startswith("results/") and name.endswith(".md")]
    sections["Results"] += [{_title(name): name} for name in reports if name not in placed and "-smoke/" not in name]
    sections["Results"].append({"Smoke runs": [{_title(name): name} for name in reports if "-smoke/" in name]})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from elsewhere, and the reference of the command line."""
    for name, path in _elsewhere():
        if path.suffix == ".py":
            shown = path.relative_to(ROOT).as_posix()
            text = f"---\nsearch:\n  exclude: true\n---\n# `{shown}`\n\n```python\n{path.read_text('utf-8')}```\n"
            files.append(File.generated(config, name, content=text))
        else:
            files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, "reference/cli.md", content=command_line_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links that hold in the repository into links that hold on the site."""
    here = page.file.src_uri
    elsewhere = dict(_elsewhere())
    in_repository = elsewhere[here].relative_to(ROOT).as_posix() if here in elsewhere else f"docs/{here}"

    def moved(found: re.Match[str]) -> str:
        start, target, end = found.groups()
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), target))
        on_site = _on_site(wanted)
        if files.get_file_from_path(on_site) is None:
            if (ROOT / wanted).exists():
                _log.warning(f"{in_repository} links to {wanted}, which is not on the site: name it as code instead")
            return found[0]  # MkDocs says that it is missing
        return f"{start}{posixpath.relpath(on_site, posixpath.dirname(here) or '.')}{end}"

    parts = _FENCED.split(markdown)
    return "".join(part if n % 2 else _LINK.sub(moved, part) for n, part in enumerate(parts))


def on_post_build(config: MkDocsConfig) -> None:
    """Refuses a site that would ask another host for anything."""
    found = [
        f"{path.relative_to(config.site_dir)}: {loaded}"
        for path in sorted(Path(config.site_dir).rglob("*"))
        if path.suffix in (".html", ".css")
        for loaded in what_is_loaded_from_elsewhere(path.read_text("utf-8"))
    ]
    if found:
        raise PluginError("the site must work without a network, but loads\n" + "\n".join(found[:20]))


def what_is_loaded_from_elsewhere(text: str) -> list[str]:
    """Returns the parts of a page or style sheet that a browser would fetch from another host; links are none."""
    return _LOADS.findall(text)


def _on_site(wanted: str) -> str:
    """Where a file of the repository is on the site."""
    if wanted == "README.md":
        return "index.md"
    if wanted.startswith("docs/"):
        return wanted.removeprefix("docs/")
    if wanted.startswith("examples/"):
        return wanted.removesuffix(".py") + ".md"
    return f"{wanted}/README.md" if (ROOT / wanted).is_dir() else wanted


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from _named(part)


def _title(name: str) -> str:
    """``results/best-results-cpu/README.md`` is ``best-results-cpu``; other files have their own name, too."""
    _, *folders, last = name.removesuffix(".md").split("/")
    return ": ".join([*folders, *([] if last == "README" else [last])])
