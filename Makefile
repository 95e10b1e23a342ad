PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed

# The oldest and the newest PyTorch that pyproject.toml takes, and the one of constraints.txt.
TORCHES := 2.11 2.13 2.15
MATRIX := $(addprefix tests/,accumulation agreement buffers checkpoints ddp drift failures fuzz gradients hooks local loops \
	modules second_order session sharding shares shm tools)
CLIENTS := .venv-clients
LAUNCHERS := .venv-launchers
DOCS := .venv/.docs-installed

# Ranks are processes, of which each would compile all modules anew where the environment forbids to keep what is compiled.
export PYTHONDONTWRITEBYTECODE :=

# Four workers share the tests, as tests/conftest.py says: on two cores, since ranks wait for each other. Each begins with
# ten seconds of imports; with three, a fifth of the processors' time is idle.
HERE := not soak and not hosts and not launchers
PYTEST := -m pytest -n 4 -m
# Tests of what is around the library: its pages, examples, command, package and benchmarks, and the tests' own tools.
# Tests that are slow by nature, and what tests say of PyTorch's own class, are marked `around` and run with them.
AROUND := tests/api tests/benchmarks tests/check tests/cli tests/clients tests/docs tests/examples tests/package tests/tools \
	tests/gradients/test_compile.py tests/gradients/test_tensor_parallel.py tests/session/test_restarts.py
# Nothing here is for `make test`.
ELSEWHERE := tests/hosts tests/launchers

.PHONY: train test test-around test-all test-matrix test-bare test-clients test-launchers test-hosts check format docs bench gpu soak mutants dist clean

train: $(READY)  ## the main job: a network on real handwritten digits; a process for each accelerator, or PROCESSES=2
	$(BIN)/python examples/launch.py $(if $(PROCESSES),--processes $(PROCESSES)) $(if $(MAX_RESTARTS),--max-restarts $(MAX_RESTARTS)) \
		examples/digits.py $(ARGS)

test: $(READY)  ## what the library does: about four minutes on two cores
	$(BIN)/python $(PYTEST) "$(HERE) and not around" $(AROUND:%=--ignore=%) $(ELSEWHERE:%=--ignore=%) $(ARGS)

test-around: $(READY)  ## pages, examples, command, package, benchmarks, tests' own tools; what is slow
	$(BIN)/python $(PYTEST) "$(HERE)" $(AROUND) $(ARGS)
	$(BIN)/python $(PYTEST) "around and $(HERE)" $(AROUND:%=--ignore=%) $(ARGS)

test-all: test test-around  ## both

# Each in an environment of its own, of some gigabytes where there is no build for the CPU alone. One version is
# `make test-torch-2.11`; with `make -k`, a version that fails does not keep the others from running.
test-matrix: $(TORCHES:%=test-torch-%)  ## the oldest and the newest PyTorch: 15 to 30 minutes each on two cores

test-torch-%: .venv-torch-%/.installed
	.venv-torch-$*/bin/python $(PYTEST) "$(HERE)" $(MATRIX) $(ARGS)

test-clients: $(CLIENTS)/.installed  ## programs that people run, and PyTorch's suite, in an environment of their own: 9 minutes
	$(CLIENTS)/bin/python -m pytest -m "not soak" tests/clients tests/docs $(ARGS)

# README's own environment: PyTorch alone. Tests that need NumPy are left out (tests/conftest.py).
test-bare: .venv-bare/.installed  ## what `make test` does, with torch and pytest alone
	.venv-bare/bin/python $(PYTEST) "$(HERE) and not around" $(filter-out %/check,$(AROUND:%=--ignore=%)) $(ARGS)

test-launchers: $(LAUNCHERS)/.installed  ## Open MPI, Ray, and what of MPICH and SLURM is on this machine (as root): 6 minutes
	$(LAUNCHERS)/bin/python -m pytest -m launchers tests/launchers $(ARGS)

test-hosts: $(READY)  ## several hosts on this machine, whose links fail: as root, with iproute2 and nftables; 5 minutes
	$(BIN)/python -m pytest -m "hosts and not soak" -n 4 tests/hosts $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(DOCS)  ## the documentation, in build/docs; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet docs build/docs
	@echo build/docs/index.html

bench: $(READY)
	for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

gpu: .venv-torch-2.15/.installed  ## what only a GPU can show, into benchmarks/results: under nine minutes
	.venv-torch-2.15/bin/python benchmarks/gpu.py $(ARGS)

soak: $(READY)
	$(BIN)/python -m pytest -m soak --timeout 3600 $(ARGS)

mutants: $(READY)  ## plants faults in the source, and says which of them the tests catch: tests/mutants/mutants.py
	$(BIN)/python tests/mutants/mutants.py $(ARGS)

dist: $(READY)  ## what goes to PyPI: a wheel, and the source archive
	rm -rf dist
	$(BIN)/python -m hatchling build

clean:
	rm -rf dist build .venv .venv-bare .venv-torch-* $(CLIENTS) $(LAUNCHERS) runs .pytest_cache .mypy_cache .ruff_cache

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "lockstep needs Python 3.11 or newer"'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev --editable .
	touch $@

$(DOCS): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group docs
	touch $@

.PRECIOUS: .venv-torch-%/.installed
.venv-torch-%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-torch-$*
	$(@D)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	grep -v '^torch=' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/constraints.txt 'torch==$*.*' --group test --group examples --editable .
	touch $@

.venv-bare/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-bare
	$(@D)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(@D)/bin/python -m pip install --quiet --constraint constraints.txt pytest pytest-timeout pytest-xdist --editable .
	touch $@

$(CLIENTS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(CLIENTS)/bin/python -m pip install --quiet --constraint constraints.txt --group test --group clients --editable .
	touch $@

$(LAUNCHERS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LAUNCHERS)
	$(LAUNCHERS)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(LAUNCHERS)/bin/python -m pip install --quiet --constraint constraints.txt --group test --group launchers --editable .
	touch $@
