# make run: sets up what is missing and shows the engine at work. make test: every check.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Without an NVIDIA GPU this torch is installed first; where your index holds a CPU build of it, pip prefers that.
TORCH ?= torch==2.13.0
# Where $(PYTHON) has a torch already, as in CUDA containers, the environment uses that one.
HAS_TORCH = $(shell $(PYTHON) -c 'import torch' 2>/dev/null && echo yes)
HAS_GPU = $(shell command -v nvidia-smi)

# Test processes; each computes on one thread.
WORKERS ?= 2

.PHONY: setup run test lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(if $(HAS_TORCH),--system-site-packages) $(VENV)
	$(if $(HAS_TORCH)$(HAS_GPU),,$(BIN)/pip install '$(TORCH)')
	$(BIN)/pip install -e '.[dev,bench,server]'
	touch $@

run: setup
	$(BIN)/sparsespec bench throughput --dataset reasoning --compare none --show-answers

lint: setup
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
