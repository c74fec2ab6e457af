# Two commands for a newcomer: `make demo` and `make test`. Everything they need goes into .venv.

PYTHON ?= $(firstword $(foreach version,3.12 3.13 3.11,$(if $(shell command -v python$(version) 2>/dev/null && python$(version) -c pass 2>/dev/null && echo ok),python$(version))) python3)
VENV := .venv
BIN := $(VENV)/bin
# Engine processes are started many times: without their bytecode each start costs seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-all test-patches lint tool engine build clean

demo: engine
	$(BIN)/python scripts/demo.py

test: lint engine
	$(BIN)/python -m pytest -m "not slow" $(PYTEST)

test-fast: tool
	$(BIN)/python -m pytest -m "not engine and not slow" -n 2 $(PYTEST)

test-all: lint engine
	$(BIN)/python -m pytest $(PYTEST)

test-patches: engine
	$(BIN)/python -m tests.patches.series_run

lint: tool
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/sglang-bw patches lint

build: tool
	$(BIN)/sglang-bw build

# The tool in an environment of its own, for developing.
tool: $(VENV)/.tool
$(VENV)/.tool: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@

# The patched engine with its locked dependencies; does nothing when they are there already.
engine: tool
	$(BIN)/sglang-bw install --device $(or $(DEVICE),auto)

clean:
	rm -rf $(VENV) .cache dist
