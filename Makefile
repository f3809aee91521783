# Two commands matter: `make demo` and `make test`. Both set up .venv in this folder first, once.
PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt

.PHONY: help demo test lint check-bits benchmark clean

help:
	@echo "make demo         install, then run the built-in models with and without speculation"
	@echo "make test         install, then ruff, mypy --strict and the tests (with a sample of check-bits)"
	@echo "make lint         ruff and mypy only"
	@echo "make check-bits   speculation is invisible to the bit, at length (SAMPLE=7: a sample with that seed)"
	@echo "make benchmark    speed against transformers on an inflated pair; about 20 minutes on 2 cores"
	@echo "make clean        remove .venv and the caches"

demo: $(VENV)/.installed
	$(BIN)/draftproof demo

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src

# One thread a process, a process a core: tests are many small passes, and threads that wait for each other crawl on a busy machine.
test: lint
	OMP_NUM_THREADS=$(or $(OMP_NUM_THREADS),1) $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not gpu"

check-bits: $(VENV)/.installed-dev
	DRAFTPROOF_BITS=$(if $(SAMPLE),sample DRAFTPROOF_BITS_SEED=$(SAMPLE),full) $(BIN)/python -m pytest -m bits --timeout 3600 tests/bits

benchmark: $(VENV)/.installed
	$(BIN)/python benchmarks/engine.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "found Python %d.%d, expected 3.11 or newer: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $@
