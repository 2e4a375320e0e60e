# Everything a user or CI runs. The virtual environment is made on first use; nothing else is assumed installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.demo
RATINGS := .data/ml-100k.inter
EXTRAS := tf,serve,hdf5,jax,cloud,ray,redis,dev
# Without --no-compile, pip compiles each module of TensorFlow and Ray, of which tests import a tenth: Python compiles those itself.
INSTALL := pip install --quiet --disable-pip-version-check --no-compile
# The lowest versions that pyproject.toml allows, and the highest Python that it names.
OLDEST := tensorflow==2.19.1 keras==3.11.0
NEWEST_PYTHON ?= 3.13
# Where their interfaces are met; `make test-long` runs the unit and conformance tests of `make test` with both.
PRIVATE_NAMES := $(addprefix tests/contract/,test_optimizer_step.py test_saved_models.py)
OLDEST_TESTS := $(addprefix tests/unit/,layer export/graph checkpoint/keras) $(PRIVATE_NAMES) tests/e2e/test_road.py
NEWEST_TESTS := $(addprefix tests/unit/,config files serving/core serving/http) tests/e2e/test_road.py
MARKS := not nightly
ALL_UNITS := tests/unit tests/conformance $(PRIVATE_NAMES) tests/e2e/test_road.py

# Each process that a test starts would compile the project once more.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo load-tools test test-nightly test-docs test-clients test-console test-long test-oldest test-newest-python tpu-proof check docs package bench format clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m $(INSTALL) -e '.[$(EXTRAS)]'
	@touch $(STAMP) $(DEMO)

LIBRARY := tpuembed/native/_lookup.so
$(LIBRARY): $(wildcard tpuembed/native/src/*)  # an installation compiles it too
	@command -v cc gcc clang >/dev/null || [ -z "$$CI" ] || [ "$$(id -u)" != 0 ] || { apt-get -qq update && apt-get -qq install -y gcc libc6-dev; }
	-$(PYTHON) tpuembed/native/src/build.py

$(DEMO): pyproject.toml
	@echo "Installing TensorFlow and the server into $(VENV): 650 MB to download, 2.3 GB on the disk. Unpacking takes a minute."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[tf,serve]'
	@touch $(DEMO)

$(RATINGS): | $(STAMP)
	-$(BIN)/python tests/fetch_movielens.py $@  # without it one test says what it misses

demo: $(DEMO)  ## train, checkpoint, export, serve and predict, end to end; installs what this needs alone
	$(BIN)/tpuembed demo

test: $(STAMP) $(LIBRARY) $(RATINGS) load-tools  ## the test suite, or one room of it: make test AREA=export/plan
	$(BIN)/python -m pytest -n 2 -m "$(MARKS)" $(if $(AREA),tests/unit/$(AREA),tests)

load-tools:  # wrk and redis-server, where tests are those of CI; elsewhere tests without them are skipped by name
	@if [ -n "$$CI" ] && [ "$$(id -u)" = 0 ] && ! { command -v wrk && command -v redis-server; } >/dev/null; then \
	apt-get -qq update && apt-get -qq install -y wrk redis-server; fi

test-docs: $(STAMP) load-tools  ## the pages of docs/tutorials, docs/how-to and docs/migrate: what they do, and what they print
	$(BIN)/python -m pytest -n 2 --dist load tests/docs

.venv-clients/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m $(INSTALL) -r $<
	@touch $@

test-clients: $(STAMP) .venv-clients/.installed  ## tritonclient and KServe's SDK against a whole server, in an environment of their own
	$(BIN)/python -m pytest -n 0 -m nightly tests/clients

test-console: $(STAMP)  ## the server's console in a headless Chromium
	@command -v chromedriver >/dev/null || [ "$$(id -u)" != 0 ] || { apt-get -qq update && apt-get -qq install -y chromium chromium-driver; }
	$(BIN)/python -m pytest -n 0 -m nightly tests/e2e/test_serve_console.py

test-nightly: $(STAMP) $(LIBRARY) $(RATINGS) .venv-clients/.installed load-tools  ## what `make test` leaves out: whole matrices, big files, clusters, fuzzing, soaks, pages, other clients
	$(BIN)/python -m pytest -n 2 -m nightly --timeout 3600 tests

test-long: test test-nightly  ## both, and the unit tests of `make test` with the oldest TensorFlow and with the newest Python
	$(MAKE) test-oldest OLDEST_TESTS="$(ALL_UNITS)"
	$(MAKE) test-newest-python NEWEST_TESTS="$(ALL_UNITS)"

.venv-oldest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m $(INSTALL) -e '.[$(EXTRAS)]' $(OLDEST)
	@touch $@

test-oldest: .venv-oldest/.installed $(RATINGS)  ## the layer, graphs and one export end to end, with the oldest TensorFlow and Keras
	.venv-oldest/bin/python -m pytest -n 2 -m "$(MARKS)" --no-messages $(OLDEST_TESTS)

test-newest-python: $(STAMP)  ## what may differ between Pythons, with the newest one, if this machine has it
	$(BIN)/python tests/newest_python.py $(NEWEST_PYTHON) '.[$(EXTRAS)]' -n 2 -m "$(MARKS)" --no-messages $(NEWEST_TESTS)

tpu-proof: $(STAMP)  ## trace, lower and compile the TPU path without a TPU: build/tpu-proof.md
	$(BIN)/python -m tests.tpu --tests

check: $(STAMP)  ## ruff, mypy --strict, import-linter, and the sizes in tests/budget.json
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.budget

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m $(INSTALL) -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs  ## the documentation's site, under build/docs: a dead link or a broken docstring is an error
	$(BIN)/python -m sphinx --fail-on-warning --nitpicky --keep-going --quiet -d build/doctrees docs build/docs

package: $(STAMP)  ## sdist and wheel under dist/, checked by twine; the wheel installed and used in a fresh environment
	$(BIN)/python -m pytest -n 0 -m nightly tests/package

bench: $(STAMP) $(LIBRARY)  ## every benchmark, as JSON and a table under benchmarks/results/
	$(BIN)/python -m $(INSTALL) -e '.[bench]'
	$(BIN)/python -m benchmarks

format: $(STAMP)  ## rewrite the source as `make check` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what the targets made
	rm -rf build dist $(VENV) .venv-oldest .venv-newest .venv-clients .tpu-proof benchmarks/results/*.png .pytest_cache .mypy_cache .ruff_cache
