# The commands of developers and of the CI machine. `make help` lists them.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3.14 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
SCALE ?= 1
TIERD_DEPTH ?= nightly
PYTEST := $(BIN)/python -m pytest
SPREAD := -n $(or $(WORKERS),auto) --dist loadfile --no-loadscope-reorder
# Two workers more than cores: nightly tests often wait for disks, clocks and pauses.
SPREAD_AT_NIGHT := -n $(or $(WORKERS),$(shell echo $$(($$(nproc) + 2)))) --dist loadfile --no-loadscope-reorder

# A night starts a thousand daemons; without bytecode files each would compile the whole package.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench coverage mutate mutate-kernels nightly figures weekly gpu proto reference docs clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {split($$1, name, ":"); printf "make %-14s %s\n", name[1], $$2}' $(MAKEFILE_LIST)

# --- .venv, made on demand: the daemon's packages, and on top of them the tools of the checks -----

.venv/.made:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; install one or set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	touch $@

.venv/.base: .venv/.made pyproject.toml $(wildcard tierd/native/*.cpp tierd/native/*/*.h)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

.venv/.dev: .venv/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# --- for people -----------------------------------------------------------------------------------

demo: .venv/.base ## run a daemon, a worker and a small model; show time saved by each tier
	$(BIN)/tierd demo

test: lint ## run all checks that a commit must pass
	$(PYTEST) -m "not slow and not gpu" $(SPREAD)

lint: .venv/.dev ## run ruff, its formatter and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.dev ## fix and format every file
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

proto: .venv/.dev ## generate the stubs in tierd/_proto from proto/
	$(BIN)/python tools/gen_proto.py

reference: .venv/.base ## generate configs/reference.toml from tierd/settings.py
	$(BIN)/python tools/gen_reference.py

.venv/.docs: .venv/.base
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]' || \
		{ echo "make docs: Sphinx, MyST and furo cannot be installed here; deploy/docs reads without them" >&2; exit 1; }
	touch $@

docs: .venv/.docs ## generate deploy/docs/reference, and all pages as HTML in build/docs
	$(BIN)/python tools/gen_docs.py
	$(BIN)/python -m sphinx --quiet --fail-on-warning --builder html deploy/docs build/docs

# --- long checks: SCALE=0.1 makes them short; figures go to build/figures.jsonl ------------------

# An engine's tests use one core, so two engines run at a time.
nightly: ## run every kind of test in depth, slow ones too; SCALE= scales their counts
	rm -f build/figures.jsonl
	$(MAKE) --keep-going nightly-unit+contract+property+sim+system nightly-alone; first=$$?; \
	$(MAKE) --keep-going --jobs 2 --output-sync=target nightly-torch test-engines mutate-kernels && exit $$first
	$(MAKE) figures

figures: .venv/.dev ## show the figures of the last deep run as a table
	$(BIN)/python -m tools.figures

weekly: ## run nightly with the full counts
	$(MAKE) nightly TIERD_DEPTH=weekly

nightly-%: .venv/.dev ## run one part (unit, contract, property, sim, system) or several (sim+property)
	TIERD_DEPTH=$(TIERD_DEPTH) SCALE=$(SCALE) $(PYTEST) -m "not gpu and not alone" $(SPREAD_AT_NIGHT) --timeout 3600 --durations 30 $(patsubst %,tests/%,$(subst +, ,$*))

nightly-alone: .venv/.dev ## run the tests that measure times in depth, one at a time
	TIERD_DEPTH=$(TIERD_DEPTH) SCALE=$(SCALE) $(PYTEST) -m alone -n 0 --timeout 3600 --durations 10

nightly-torch: ## test the worker against torch and transformers in their own environment
	test -d .venv-torch || $(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 'transformers>=5' --editable '.[dev]'
	.venv-torch/bin/python -m pytest tests/unit/worker tests/unit/kernels tests/unit/integrations tests/system/test_worker_logits.py tests/system/test_worker_pages.py tests/system/test_worker_kernels.py tests/system/test_worker_device.py tests/system/test_worker_e4m3.py

# --- engines: each in its own environment, with exactly the packages that its tests ran with ------

ENGINES := vllm32 vllm31 sglang lmcache hf hf519

test-engines: $(ENGINES:%=test-engine-%) ## test unmodified vLLM, SGLang, LMCache, transformers; test-engine-hf for one

test-engine-%: .venv-%/.engine
	.venv-$*/bin/python -m pytest -n 0 -p no:cacheprovider --timeout 1200 tests/engines/$(shell echo $* | tr -d 0-9)

.venv-%/.engine: tests/engines/requirements/%.txt pyproject.toml
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

.PRECIOUS: .venv-%/.engine

mutate: .venv/.dev ## remove checks, one at a time, and show which test fails
	$(BIN)/python -m tools.mutate

mutate-kernels: .venv/.dev ## break barriers, waits and masks of the kernels, one by one; show failing checks
	$(BIN)/python -m tools.kernel_mutants

COVERED := tests/unit/server tests/unit/tiers tests/unit/client tests/system/test_fuzz_rpc.py tests/system/test_fuzz_session.py

coverage: .venv/.dev ## measure tested branches of services and decoders; fails below 95 % in any module
	mkdir -p build
	$(BIN)/python -m coverage run --branch --source=tierd --data-file=build/coverage -m pytest -n 0 $(COVERED) -k "not over_a_socket" -m "not slow" --timeout 600
	$(BIN)/python -m coverage json --data-file=build/coverage -q -o build/coverage.json
	$(BIN)/python -m tools.branches build/coverage.json

bench: .venv/.dev ## measure against the machine's limits: a table, and build/bench.json
	$(BIN)/python -m tools.bench

bench-peers: .venv/.dev ## run the same work on other caches, each in its own environment in build/peers
	$(BIN)/python -m tools.bench.peers

bench-start: .venv/.dev ## measure starts with ten million blocks on NVMe, and calls meanwhile
	$(BIN)/python -m tools.bench.many_start

gpu: .venv/.dev ## probe, check and measure a GPU (8 minutes): build/gpu.json, cuda/RESULTS.md
	$(BIN)/python -m tools.gpu

clean: ## remove build outputs, but not .venv
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
