# Every target makes the environment that it needs, in $(VENV), by itself.  To use an environment that exists:
#     make test PYTHON=/path/to/python VENV=
# (`VENV=none` is the same), and nothing is installed.

PYTHON ?= python3
VENV ?= .venv
# Installed before the rest, so that nothing else chooses a build of it (on Linux, PyPI's own carries gigabytes of CUDA).
TORCH ?= torch==2.13.0
# How many processes `make test` runs in.  The tests of a file stay in one: they share its workers.  Files keep their
# order: those that load numba come last (tests/conftest.py).
JOBS ?= 2
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test check format gpu-test gpu-bench bench clean

ifeq ($(filter-out none,$(VENV)),)
RUN := PYTHONPATH=$(CURDIR) $(PYTHON)
CORE :=
TEST :=
DEV :=
else
RUN := $(VENV)/bin/python
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
CORE := $(VENV)/.made-demo
TEST := $(VENV)/.made-test
DEV := $(VENV)/.made-dev
endif

help:
	@echo 'make demo       a pipeline of worker processes over real photographs (no GPU needed)'
	@echo 'make test       every test that needs no GPU'
	@echo 'make check      ruff, mypy --strict and the quick tests'
	@echo 'make format     ruff format, and the lint fixes that are safe'
	@echo 'make bench      the benchmarks of the host backend against torch RPC'
	@echo 'make gpu-test   the tests that need CUDA devices'
	@echo 'make gpu-bench  the benchmarks on CUDA devices'
	@echo 'PYTHON=... VENV= in front of any of them: run in an environment that exists, install nothing'

demo: $(CORE)
	$(RUN) -m transport.cli demo $(ARGS)

test: $(TEST)
	$(RUN) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(DEV)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(RUN) -m pytest -q -m 'not slow and not workers and not gpu and not gpu2' $(ARGS)

format: $(DEV)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# Fails, rather than skips, where there is no GPU.
gpu-test: $(TEST)
	STREAMRT_REQUIRE_GPU=1 $(RUN) -m pytest -m 'gpu or gpu2' $(ARGS)

bench: $(TEST)
	$(RUN) -m bench.rpc --device host --peer torch --json bench/results/rpc-host.json
	$(RUN) -m bench.agent --device host --json bench/results/agent-host.json
	$(RUN) -m bench.runtime --device host --json bench/results/runtime-host.json
	$(RUN) -m bench.guards --device host --json bench/results/guards-host.json
	$(RUN) -m bench.table

gpu-bench: $(TEST)
	$(RUN) -m bench.litmus --json bench/results/litmus.json
	$(RUN) -m bench.litmus --product --load --capture --json bench/results/litmus-product.json
	$(RUN) -m bench.rpc --device cuda --peer torch --json bench/results/rpc-cuda.json
	$(RUN) -m bench.agent --device cuda --json bench/results/agent-cuda.json
	$(RUN) -m bench.runtime --device cuda --json bench/results/runtime-cuda.json
	$(RUN) -m bench.guards --device cuda --json bench/results/guards-cuda.json
	$(RUN) -m bench.table

clean:
	rm -rf $(if $(filter-out none,$(VENV)),$(VENV)) build dist demo-output .mypy_cache .pytest_cache .ruff_cache .hypothesis

ifneq ($(filter-out none,$(VENV)),)
$(VENV)/.made-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo 'streamrt needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(CORE): pyproject.toml | $(VENV)/.made-venv
	$(PIP) -e '.[demo]'
	@touch $@

$(TEST): pyproject.toml | $(VENV)/.made-venv
	$(PIP) '$(TORCH)'
	$(PIP) -e '.[test]'
	@touch $@ $(CORE)

$(DEV): pyproject.toml | $(VENV)/.made-venv
	$(PIP) '$(TORCH)'
	$(PIP) -e '.[dev]'
	@touch $@ $(TEST) $(CORE)
endif
