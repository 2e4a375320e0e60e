# Everything a user or CI runs. The virtual environment is made on first use; nothing else is assumed installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RATINGS := .data/ml-100k.inter

.DEFAULT_GOAL := help
.PHONY: help demo test test-long tpu-proof check bench format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[tf,serve,hdf5,jax,cloud,ray,dev]'
	@touch $(STAMP)

$(RATINGS): | $(STAMP)
	-$(BIN)/python tests/fetch_movielens.py $@  # without it one test says what it misses

demo: $(STAMP)  ## train, checkpoint, export, serve and predict, end to end
	$(BIN)/tpuembed demo

test: $(STAMP) $(RATINGS)  ## the test suite
	$(BIN)/python -m pytest -n 2 -m "not long" tests

test-long: $(STAMP) $(RATINGS)  ## the tests of `make test` and those with big files, clusters, fuzzing and soaks
	$(BIN)/python -m pytest -n 2 -m "not long" tests
	$(BIN)/python -m pytest -m long --timeout 3600 tests

tpu-proof: $(STAMP)  ## trace, lower and compile the TPU path without a TPU: docs/tpu-proof.md
	$(BIN)/python -m tests.tpu --tests

check: $(STAMP)  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)  ## every benchmark, as JSON and a table under benchmarks/results/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	$(BIN)/python -m benchmarks

format: $(STAMP)  ## rewrite the source as `make check` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what the targets made
	rm -rf $(VENV) .tpu-proof benchmarks/results/*.png .pytest_cache .mypy_cache .ruff_cache
