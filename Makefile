# Everything a developer or a machine asks of this repository. `make help` lists it.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3.14 python3; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
SCALE ?= 1
TIERD_DEPTH ?= nightly
PYTEST := $(BIN)/python -m pytest
SPREAD := -n $(or $(WORKERS),auto) --dist loadfile --no-loadscope-reorder
# Two workers more than cores: the tests of a night wait for disks, clocks and pauses a good part of their time.
SPREAD_AT_NIGHT := -n $(or $(WORKERS),$(shell echo $$(($$(nproc) + 2)))) --dist loadfile --no-loadscope-reorder

# A night starts a thousand daemons; each would compile the whole package.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench coverage mutate mutate-kernels nightly figures weekly gpu proto reference docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / {split($$1, name, ":"); printf "make %-14s %s\n", name[1], $$2}' $(MAKEFILE_LIST)

# --- .venv, made on demand: what runs the daemon, and on top of it what checks it -------------------------------------

.venv/.made:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; install one or set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	touch $@

.venv/.base: .venv/.made pyproject.toml tierd/native/plane.cpp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

.venv/.dev: .venv/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# --- for people -------------------------------------------------------------------------------------------------------

demo: .venv/.base ## a daemon, a worker and a small model: what reusing KV from each tier saves
	$(BIN)/tierd demo

test: lint ## all checks that a commit must pass
	$(PYTEST) -m "not slow and not gpu" $(SPREAD)

lint: .venv/.dev ## ruff, its formatter, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/.dev ## puts every file into the formatter's shape
	$(BIN)/ruff check --fix --exit-zero --quiet .
	$(BIN)/ruff format .

proto: .venv/.dev ## the stubs in tierd/_proto from proto/
	$(BIN)/python tools/gen_proto.py

reference: .venv/.base ## configs/reference.toml from tierd/settings.py
	$(BIN)/python tools/gen_reference.py

.venv/.docs: .venv/.base
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]' || \
		{ echo "make docs: Sphinx, MyST and furo cannot be installed here; deploy/docs reads without them" >&2; exit 1; }
	touch $@

docs: .venv/.docs ## deploy/docs/reference from the code, and all pages as HTML in build/docs
	$(BIN)/python tools/gen_docs.py
	$(BIN)/python -m sphinx --quiet --fail-on-warning --builder html deploy/docs build/docs

# --- long checks: SCALE=0.1 makes them short; figures go to build/figures.jsonl ------------------

# An engine's tests keep one core busy: two of them are at work at a time.
nightly: ## every kind of test in depth, the slow ones too; SCALE= scales their counts
	rm -f build/figures.jsonl
	$(MAKE) --keep-going nightly-unit+contract+property+sim+system nightly-alone; first=$$?; \
	$(MAKE) --keep-going --jobs 2 --output-sync=target nightly-torch test-engines mutate-kernels && exit $$first
	$(MAKE) figures

figures: .venv/.dev ## what the last deep run found, as a table
	$(BIN)/python -m tools.figures

weekly: ## the same with the full counts
	$(MAKE) nightly TIERD_DEPTH=weekly

nightly-%: .venv/.dev ## one part alone: unit, contract, property, sim or system; or some together: sim+property
	TIERD_DEPTH=$(TIERD_DEPTH) SCALE=$(SCALE) $(PYTEST) -m "not gpu and not alone" $(SPREAD_AT_NIGHT) --timeout 3600 --durations 30 $(patsubst %,tests/%,$(subst +, ,$*))

nightly-alone: .venv/.dev ## what measures times in depth, with nothing else beside it
	TIERD_DEPTH=$(TIERD_DEPTH) SCALE=$(SCALE) $(PYTEST) -m alone -n 0 --timeout 3600 --durations 10

nightly-torch: ## the worker against torch and transformers, in an environment of their own
	test -d .venv-torch || $(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 'transformers>=5' --editable '.[dev]'
	.venv-torch/bin/python -m pytest tests/unit/worker tests/unit/kernels tests/unit/integrations tests/system/test_worker_logits.py tests/system/test_worker_pages.py tests/system/test_worker_kernels.py tests/system/test_worker_device.py tests/system/test_worker_e4m3.py

# --- engines: each in an environment of its own, of exactly the packages that it ran with ------------------------------------

ENGINES := vllm32 vllm31 sglang lmcache hf hf519

test-engines: $(ENGINES:%=test-engine-%) ## vLLM, SGLang, LMCache and transformers as they are, against a real daemon; test-engine-hf for one

test-engine-%: .venv-%/.engine
	.venv-$*/bin/python -m pytest -n 0 -p no:cacheprovider --timeout 1200 tests/engines/$(shell echo $* | tr -d 0-9)

.venv-%/.engine: tests/engines/requirements/%.txt pyproject.toml
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $<
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

.PRECIOUS: .venv-%/.engine

mutate: .venv/.dev ## takes checks away, one at a time, and says which test notices
	$(BIN)/python -m tools.mutate

mutate-kernels: .venv/.dev ## breaks barriers, waits and masks of the kernels, one at a time, and says what notices
	$(BIN)/python -m tools.kernel_mutants

COVERED := tests/unit/server tests/unit/tiers tests/unit/client tests/system/test_fuzz_rpc.py tests/system/test_fuzz_session.py

coverage: .venv/.dev ## branches of services and decoders that tests take; fails below 95 % of any module
	mkdir -p build
	$(BIN)/python -m coverage run --branch --source=tierd --data-file=build/coverage -m pytest -n 0 $(COVERED) -k "not over_a_socket" -m "not slow" --timeout 600
	$(BIN)/python -m coverage json --data-file=build/coverage -q -o build/coverage.json
	$(BIN)/python -m tools.branches build/coverage.json

bench: .venv/.dev ## measures against the machine's own limits: a table, and build/bench.json
	$(BIN)/python -m tools.bench

bench-peers: .venv/.dev ## the same work by other caches, side by side; each in an environment of its own below build/peers
	$(BIN)/python -m tools.bench.peers

bench-start: .venv/.dev ## starts with ten million blocks on NVMe, and calls among them
	$(BIN)/python -m tools.bench.many_start

gpu: .venv/.dev ## on a machine with a GPU: probes, checks and benchmarks in 8 minutes; build/gpu.json and cuda/RESULTS.md
	$(BIN)/python -m tools.gpu

clean: ## removes what building left, not .venv
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
