# Two commands for a newcomer: `make demo` and `make test`. Everything they need goes into .venv.

PYTHON ?= $(firstword $(foreach version,3.12 3.13 3.11,$(if $(shell command -v python$(version) 2>/dev/null && python$(version) -c pass 2>/dev/null && echo ok),python$(version))) python3)
VENV := .venv
BIN := $(VENV)/bin
# Engine processes are started many times: without their bytecode each start costs seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-beside test-alone test-fast test-all test-patches lint docs tool engine build constraints clean

demo: engine
	$(BIN)/python scripts/demo.py

# Two parts, both run whatever the first one says; either's failure fails `make test`.
test: lint engine
	$(MAKE) --no-print-directory --keep-going -j1 test-beside test-alone

# Most tests, on two cores: a file stays in one process, with what its tests share.
test-beside: tool
	@echo "== tests that may run beside others, in two processes"
	$(BIN)/python -m pytest -m "not alone and not slow" -n 2 --dist loadfile $(PYTEST) $(OR_NONE)

# One after the other: shared servers, the patch tests on both engines, and what measures time.
test-alone: tool
	@echo "== tests that run alone: real servers, the series on both engines, what measures time"
	$(BIN)/python -m pytest -m "alone and not slow" $(PYTEST) $(OR_NONE)

# `make test PYTEST="-k word"` may select nothing in one of the parts: pytest says 5.
OR_NONE = $(if $(PYTEST),|| test $$? = 5)

test-fast: tool
	$(BIN)/python -m pytest -m "not engine and not environments and not alone and not slow" -n 3 $(PYTEST)

test-all: lint engine
	$(BIN)/python -m pytest $(PYTEST)

test-patches: engine
	$(BIN)/python -m tests.patches.series_run

lint: tool
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/sglang-bw patches lint

# The documentation as a folder of pages, site/; a warning is an error.
docs: tool
	$(BIN)/python -m scripts.pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

build: tool
	$(BIN)/sglang-bw build

# The tool in an environment of its own, for developing.
tool: $(VENV)/.tool
$(VENV)/.tool: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable . --group dev
	touch $@

# The patched engine with its locked dependencies; does nothing when they are there already.
engine: tool
	$(BIN)/sglang-bw install --device $(or $(DEVICE),auto)

# For bundles: every file of each release has its hash there, so that one list does for all Pythons and machines.
TOOL_LOCK := sglang_bw/bundle/tool.txt

# The versions agree with the engine's lock, so that installing the engine replaces nothing of the tool.
constraints: tool
	sed -i '2,$$d' constraints.txt
	$(BIN)/uv pip compile --quiet pyproject.toml --group dev --universal --python-version 3.11 --no-header --no-annotate \
		--constraint patches/0.5.23/locks/cpu-3.11-x86_64.txt >> constraints.txt
	sed -i '2,$$d' $(TOOL_LOCK)
	$(BIN)/uv pip compile --quiet pyproject.toml --generate-hashes --only-binary :all: --python-version 3.11 --python-platform x86_64-manylinux_2_34 \
		--no-header --no-annotate --constraint constraints.txt >> $(TOOL_LOCK)

clean:
	rm -rf $(VENV) .cache dist site
