PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench fuzz gpu-check clean

demo: $(VENV)/.ready
	$(BIN)/asymgrpo compare --config recipes/demo.yaml

test: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.ready
	for file in $$(grep -l __main__ benchmarks/*.py); do echo "== $$file"; $(BIN)/python $$file || exit 1; done

fuzz: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python scripts/fuzz.py --inputs 100000

gpu-check: $(VENV)/.ready
	$(BIN)/python scripts/gpu_check.py --jobs 8

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch comes first and pinned: asked for as another package's dependency, pip may fetch a newer
# build with several gigabytes of CUDA libraries.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@
