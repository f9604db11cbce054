"""The rooms of the package: imports point one way, nothing goes round in circles, and modules are found by name."""

import ast
import importlib
import itertools
import pkgutil
import types
from collections import defaultdict
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import spectral_dp

SOURCE = Path(spectral_dp.__file__).parent

# From the ground up: a room may import from those before it, and from itself.
ROOMS = [
    "_version",
    "errors",
    "_processes",
    "relations",
    "files",
    "import_paths",
    "accounting",
    "mechanism",
    "priors",
    "split_attention",
    "layers",
    "gradients",
    "training",
    "_public",
    "utils",
    "validators",
    "integrations",
    "audit",
    "data",
    "pretrained",
    "features",
    "heads",
    "models",
    "experiments",
    "cli",
    "__main__",
]
LIBRARY = ROOMS[: ROOMS.index("data")]


def _modules(source):
    """The file of every module, by dotted name without the package's."""
    files = {path.relative_to(source).with_suffix("").parts: path for path in source.rglob("*.py")}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for parts, path in files.items()}


@lru_cache
def _imports(source, package="spectral_dp"):
    """Which modules each module imports, also within functions; what is imported for types alone counts, too."""
    modules = _modules(source)
    edges = defaultdict(set)
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} has a relative import"
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for target in targets:
                head, _, rest = target.partition(".")
                if head == package:
                    edges[name].add(rest if rest in modules else rest.rpartition(".")[0])
    return edges


def _between_children(edges, parent):
    """The graph between the modules and folders that lie directly in one folder."""
    depth = len(parent.split(".")) if parent else 0
    children = defaultdict(set)
    for name, targets in edges.items():
        for other in targets:
            inside = [n == parent or n.startswith(f"{parent}.") if parent else True for n in (name, other)]
            if all(inside) and parent not in (name, other):
                one, two = (n.split(".")[depth] for n in (name, other))
                if one != two:
                    children[one].add(two)
    return children


def _folders(source):
    return sorted(".".join(path.parent.relative_to(source).parts) for path in source.rglob("__init__.py"))


def _circle(edges):
    try:
        tuple(TopologicalSorter(edges).static_order())
    except CycleError as error:
        return error.args[1]
    return None


def test_rooms_import_from_the_rooms_below_only():
    known = {name.split(".")[0] for name in _modules(SOURCE)} - {""}
    assert known <= set(ROOMS), "a new room needs its place in this list"
    upwards = [
        f"{name} imports {other}"
        for name, targets in _imports(SOURCE).items()
        for other in targets
        if name and other and ROOMS.index(name.split(".")[0]) < ROOMS.index(other.split(".")[0])
    ]
    assert not upwards


def test_modules_do_not_import_in_circles():
    assert _circle(_imports(SOURCE)) is None


@pytest.mark.parametrize("folder", _folders(SOURCE))
def test_nor_do_folders(folder):
    """Two folders may not need each other, even where no two modules do."""
    assert _circle(_between_children(_imports(SOURCE), folder)) is None


def test_negative_control_circles_are_seen(tmp_path):
    """One between modules, and one between folders whose modules are in none."""
    for name, text in {
        "one/a.py": "from spectral_dp.two.c import x",
        "two/c.py": "",
        "two/d.py": "def f():\n    from spectral_dp.one.b import y",
        "one/b.py": "",
        "e.py": "import spectral_dp.f",
        "f.py": "from spectral_dp import e",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).with_name("__init__.py").touch()
    edges = dict(_imports(tmp_path))
    assert set(_circle(edges)) == {"e", "f"}
    assert set(_circle({name: edges[name] for name in ("one.a", "two.d")} | {"e": set()}) or ()) == set()
    del edges["f"]
    assert _circle(edges) is None
    assert set(_circle(_between_children(edges, ""))) == {"one", "two"}


def test_a_module_is_found_under_its_own_name():
    """Catches a function that hides the module it is in: ``import spectral_dp.data.load`` must give a module."""
    for info in pkgutil.walk_packages(spectral_dp.__path__, "spectral_dp."):
        if info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        parent, _, name = info.name.rpartition(".")
        assert getattr(importlib.import_module(parent), name) is module, info.name
        assert isinstance(module, types.ModuleType)


def test_no_function_has_the_name_of_its_module():
    named_alike = [
        name
        for name, path in _modules(SOURCE).items()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name == name.rpartition(".")[2]
    ]
    assert not named_alike


def test_public_names_can_be_imported_and_others_are_refused():
    """Catches a name that type checkers know and the interpreter does not, and one that was imported by the way."""
    body = ast.parse((SOURCE / "_public.py").read_text(encoding="utf-8")).body
    listed = [alias.asname for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted({*listed, "__version__"}) == sorted(spectral_dp.__all__)
    assert set(spectral_dp.__all__) <= set(dir(spectral_dp))
    for name in spectral_dp.__all__:
        assert getattr(spectral_dp, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LowPas'"):
        _ = spectral_dp.LowPas


def test_the_library_does_not_know_the_application():
    """What is installed without the extra must not need what only the extra brings."""
    extra = {"typer", "rich", "matplotlib", "PIL", "safetensors", "sklearn", "click"}
    found = [
        f"{name} imports {module}"
        for name, path in _modules(SOURCE).items()
        if name.split(".")[0] in LIBRARY
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for module in itertools.chain(
            (alias.name for alias in node.names) if isinstance(node, ast.Import) else (),
            [node.module] if isinstance(node, ast.ImportFrom) else (),
        )
        if module.split(".")[0] in extra
    ]
    assert not found
