VENV := .venv
BIN := $(VENV)/bin
# What the environment was made with; before there is one, python3.
PYTHON ?= $(shell $(BIN)/python -c 'print("$(BIN)/python")' 2>/dev/null || echo python3)
LEAST := $(shell sed -n 's/^requires-python = ">=\(.*\)"/\1/p' pyproject.toml)
export TORCH

.PHONY: demo test lint bench fuzz gpu-check lock check-lock check-triton check-wheel clean set-up set-up-dev python

demo: set-up
	$(BIN)/asymgrpo compare --config demo

test: set-up-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

lint: set-up-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: set-up-dev
	for file in $$(grep -l __main__ benchmarks/*.py); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

fuzz: set-up-dev
	OMP_NUM_THREADS=1 $(BIN)/python scripts/fuzz.py --inputs 100000

# Every combination of types, engines and scorers, trained on the GPU of this machine.
gpu-check: set-up-dev
	$(BIN)/python scripts/gpu_check.py --jobs 8

# Resolves pyproject.toml anew, for every supported Python and platform, into constraints.txt.
lock: .tools/.ready
	.tools/bin/python scripts/lock.py $(if $(UPGRADE),--upgrade)

# That the pins hold: a table of every supported Python and platform.
check-lock: .tools/.ready
	.tools/bin/python scripts/lock.py --check

# The kernels with the Triton that torch brings and with the newest.
check-triton: set-up-dev .tools/.ready
	.tools/bin/python scripts/check_triton.py $(BIN)/python

# That the wheel has all that it needs, away from the checkout.
check-wheel: set-up-dev .tools/.ready
	.tools/bin/python scripts/check_wheel.py $(BIN)/python

clean:
	rm -rf $(VENV) .tools build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

set-up: python
	@$(PYTHON) scripts/set_up.py

set-up-dev: python
	@$(PYTHON) scripts/set_up.py dev

python:
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON) here: pass PYTHON=, Python $(LEAST) or newer" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < tuple(map(int, "$(LEAST)".split("."))))' || \
	{ echo "asymgrpo needs Python $(LEAST) or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1): pass another, as in PYTHON=python3.12" >&2; exit 2; }

.tools/.ready: | python
	@$(PYTHON) -m venv .tools
	@.tools/bin/python -m pip install --quiet --disable-pip-version-check uv build
	@touch $@
