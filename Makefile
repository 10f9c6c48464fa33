# make setup    a virtual environment in .venv with all that the other targets need
# make train    the demo run, resumed where it stopped; ARGS="--plan.dp 2" passes flags on
# make test     every test but the long ones, the soaks and those that need a GPU; WORKERS=1 runs them in one process
# make test-all  the long ones too, as for every change
# make strict   tests of the GPU path, on emulated GPUs; compiles them once for a version of torch
# make check    lint, format, types, import order
# make house    figures of the package's structure and words
# make bench    Superstep beside its peers; BENCH=name picks another module of bench/
# make proto    the Python of Tinker's messages, from their .proto
# make docs     the pages' tables and drawings, from the code; then the site, into build/docs
# make pictures the pictures of docs/pictures, as a browser shows the pages; needs chromium
# make clean    remove the environment and what the tools cached; runs are kept

PYTHON ?= python3
ARGS ?=
BENCH ?= train_vs_peers
WORKERS ?= 2
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup train test test-all strict check house bench proto docs pictures clean

setup: $(STAMP)

# torch goes first and by itself, so that the build installed here decides and not the one a dependent would pull in.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check torch==2.13.0
	$(BIN)/pip install -q --disable-pip-version-check -e ".[dev]"
	@touch $@

train: setup
	$(BIN)/superstep train --state.existing resume $(ARGS)

# Modules are compiled once, and not by each of the many processes that tests start.
test test-all: export PYTHONDONTWRITEBYTECODE =
test: LEFT_OUT = and not long
# Half of their time tests wait, for processes and for one another: on two cores three are done sooner.
test: WORKERS = 3
test test-all: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not gpu and not strict $(LEFT_OUT)" tests

strict: export PYTHONDONTWRITEBYTECODE =
strict: setup
	PYTHONPATH=tests/support $(BIN)/python -m pytest -p on_strict_device -m "strict and not slow" tests/strict

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

house: setup
	$(BIN)/python tests/support/house.py src/superstep

bench: setup
	$(BIN)/python -m bench.$(BENCH) $(ARGS)

# An older protoc than the newest: what it writes runs with its own version of protobuf and every newer one.
proto:
	$(PYTHON) -m venv build/protoc
	build/protoc/bin/pip install -q --disable-pip-version-check grpcio-tools==1.74.0 setuptools
	build/protoc/bin/python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src src/superstep/tune/tinker/tinker.proto

docs: setup
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_site.py build/docs

pictures: setup
	SUPERSTEP_PICTURES=1 $(BIN)/python -m pytest -q tests/observe/test_page_in_browser.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
	find src tests bench docs -name __pycache__ -type d -prune -exec rm -rf {} +
