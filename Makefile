# `make demo` installs and shows what the library does; `make test` installs what is missing and checks everything.
# Another Python: `make test PYTHON=python3.13`, with a fresh $(VENV).
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# One process a core, four at most: each takes about a gigabyte.
PARALLEL := -n auto --maxprocesses 4 --dist worksteal
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

# Where this is set, each of the many processes that the tests start would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-slow test-integrations coverage format lint docs docs-serve tutorials figures tables support-table bench bench-quick bench-parts release-check clean

help:  ## list the targets (what a bare `make` does)
	@awk -F ':.*## *' '/^[a-z-]+:.*## / { printf "%-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/installed  ## install, train classifiers of digits in three ways, write a report (two minutes)
	$(BIN)/spectral-dp compare --config examples/demo.toml --seeds 5 --jobs 2 --out runs/demo
	$(BIN)/spectral-dp report runs/demo --out runs/demo/report.html

test: lint  ## install what is missing, lint, check types, run the tests
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: $(VENV)/installed-dev  ## run the tests that train and audit at length
	$(BIN)/python -m pytest -m slow

test-integrations: $(VENV)/installed-integrations  ## run the tests with transformers, peft and Lightning
	$(BIN)/python -m pytest tests/integrations tests/test_examples.py
	$(BIN)/python -m pytest -m 'slow or not slow' tests/test_tutorials.py

coverage: $(VENV)/installed-dev  ## run the tests and print which lines and branches they leave out
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

format: $(VENV)/installed-dev  ## format the code, and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(VENV)/installed-dev  ## check format, style and types; change nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/installed-docs  ## build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/installed-docs  ## show the documentation at http://127.0.0.1:8000 while you write it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

tutorials: $(VENV)/installed-integrations  ## run the scripts of the tutorials, and write their pages and figures
	$(BIN)/python -m website.tutorials

figures: $(VENV)/installed  ## draw the figures of the documentation
	$(BIN)/python examples/mechanism.py --figure docs/noise_spectrum.png
	$(BIN)/python examples/priors.py --figures docs
	$(BIN)/python examples/mechanism_steps.py --figures docs
	$(BIN)/python -m website.accuracy_figure

tables: $(VENV)/installed  ## write the tables of README and pages from results/
	$(BIN)/python -m website.result_tables

support-table: $(VENV)/installed-integrations  ## try which layers and models are supported, and write docs/supported.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.support.support_table --out docs/supported.md

# Hours, on a machine that does nothing else. What is remeasured later (--models, --curves) takes its place there.
bench: $(VENV)/installed-dev  ## time training beside Opacus and plain PyTorch (hours)
	for part in overheads training growth distributed; do $(BIN)/python benchmarks/bench_$$part.py --out results/bench || exit 1; done

bench-quick: $(VENV)/installed-dev  ## race the five main workloads, and compare ratios with those committed (five minutes)
	$(BIN)/python benchmarks/bench_quick.py

bench-parts: $(VENV)/installed-dev  ## time the parts: transforms, mechanism, gradients, accounting
	for part in accounting block_circulant gradients mechanism transforms; do \
		$(BIN)/python benchmarks/bench_$$part.py || exit 1; done

release-check: $(VENV)/installed-dev  ## build the wheel, install it into a fresh environment, and use it there
	$(BIN)/python release/check_wheel.py

clean:  ## remove the virtual environment and all caches
	rm -rf $(VENV) .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site src/*.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing (a few minutes the first time) ..."
	$(PIP) --editable '.[cli]'
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing with development tools (a few minutes the first time) ..."
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/installed

$(VENV)/installed-integrations: $(VENV)/installed-dev
	@echo "Installing transformers, peft and Lightning ..."
	$(PIP) --editable '.[dev,transformers,peft,lightning]'
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed-dev
	@echo "Installing MkDocs ..."
	$(PIP) --editable '.[dev,docs]'
	@touch $@
