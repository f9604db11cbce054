"""Tests mirror the sources: whoever changes a module knows where its tests are."""

import ast
from pathlib import Path

import spectral_dp

SOURCE = Path(spectral_dp.__file__).parent
TESTS = Path(__file__).parent

#: Not modules of their own: what they hold is tested elsewhere.
WITHOUT = {"__init__.py", "__main__.py", "_public.py", "_version.py"}

#: Suites about more than one module.
CROSS_CUTTING = {
    "audit/test_sequence_models.py",  # a transformer and an LSTM through the audits
    "benchmarks/test_benchmarks.py",  # the programs beside the package
    "benchmarks/test_scaling_model.py",  # the cost model of several processes, likewise
    "gradients/rules/test_embedding_bag.py",  # of embedding.py, which has two kinds of layers
    "gradients/rules/test_transposed_linear.py",  # of linear.py, likewise
    "gradients/test_partial_training.py",  # adapters, biases only, the last layer only
    "gradients/test_torch_features.py",  # checkpointing, compilation, parametrisations and the like around a model
    "gradients/test_neighbours.py",  # check B of the privacy proof, through all rules
    "gradients/test_neighbours_of_shared.py",  # and through what samples share
    "gradients/test_transformers.py",  # published models as a whole
    "test_architecture.py",  # which room imports which
    "test_cost.py",  # what a step may cost
    "test_documentation.py",  # what the pages name is there
    "test_examples.py",
    "test_main.py",  # the command line as a whole
    "test_mirror.py",
    "test_opacus_script.py",  # a script written for Opacus
    "test_readme.py",
    "test_tutorials.py",  # scripts and pages of tutorials
    "test_tooling.py",  # the Makefile and its like
    "test_without_the_extra.py",  # the library without the application's dependencies
    "test_supported.py",  # the table of what is supported
    "training/distributed/test_faults.py",  # whole runs that lose a process
    "training/distributed/test_runs.py",  # whole runs in several processes
    "training/test_losses.py",  # losses through the engine
    "training/test_drawn_steps.py",  # drawn sequences of what a user may do in a loop
    "training/test_private_loaders.py",  # loaders of both kinds, as scripts use them
}


def _expected():
    modules = (path.relative_to(SOURCE) for path in SOURCE.rglob("*.py") if path.name not in WITHOUT)
    return {path.with_name(f"test_{path.name}").as_posix() for path in modules}


def _found():
    return {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}


def test_every_module_has_its_tests():
    assert sorted(_expected() - _found()) == []


def test_every_test_module_is_of_a_module_or_named_as_cross_cutting():
    assert sorted(_found() - _expected() - CROSS_CUTTING) == []


def test_no_suite_is_named_that_is_not_there_or_is_of_a_module():
    assert sorted(CROSS_CUTTING - _found()) == []
    assert sorted(CROSS_CUTTING & _expected()) == []


def test_every_test_module_tests_something():
    """Else an empty file would do for a counterpart."""
    for name in _found():
        nodes = ast.walk(ast.parse((TESTS / name).read_text(encoding="utf-8")))
        assert any(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in nodes), name


def test_test_modules_do_not_import_test_modules():
    """What several need is in ``tests/support``, and is no test itself."""
    imported = [
        f"{path.relative_to(TESTS)} imports {target}"
        for path in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for target in _targets(node)
        if any(part.startswith("test_") for part in target.split("."))
    ]
    assert imported == []


def _targets(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "", *(alias.name for alias in node.names if (node.module or "").startswith("tests"))]
    return []
