# `make demo` installs and shows what the library does; `make test` installs what is missing and checks everything.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

.PHONY: demo test test-slow lint figures bench bench-parts clean

# Settings of the demonstration: chosen on a validation split of the digits (see docs/training.md).
DEMO := --dataset digits --model model1 --epsilon 3 --epochs 20 --batch-size 256 --max-grad-norm 0.1 --schedule cosine

demo: $(VENV)/installed
	$(BIN)/spectral-dp compare $(DEMO) --learning-rate 10 --arm dpsgd --arm spectral --seeds 3 --jobs 2 --out runs/demo
	$(BIN)/spectral-dp report runs/demo --out runs/demo/report.html

test: lint
	$(BIN)/python -m pytest

test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

figures: $(VENV)/installed
	$(BIN)/python examples/mechanism.py --figure docs/noise_spectrum.png

# Hours, on a machine that does nothing else. What is remeasured later (--models, --curves) takes its place there.
bench: $(VENV)/installed-dev
	for part in overheads training growth; do $(BIN)/python benchmarks/bench_$$part.py --out results/bench || exit 1; done

bench-parts: $(VENV)/installed-dev
	for part in accounting block_circulant gradients mechanism transforms; do \
		$(BIN)/python benchmarks/bench_$$part.py || exit 1; done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing (a few minutes the first time) ..."
	$(PIP) --editable .
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing with development tools (a few minutes the first time) ..."
	$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/installed
