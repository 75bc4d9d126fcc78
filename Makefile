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

# What the tests of the live page run; where there is none and apt-get may install one, `make test` does.
BROWSERS := chromium chromium-browser google-chrome google-chrome-stable
HAS_BROWSER = $(firstword $(SPARSESPEC_NO_BROWSER) $(foreach name,$(BROWSERS),$(shell command -v $(name))))
APT = $(if $(filter 0,$(shell id -u)),,sudo -n )apt-get

.PHONY: setup run test lint browser clean

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

browser:
	$(if $(HAS_BROWSER),,-$(APT) update && $(APT) install -y --no-install-recommends chromium)

test: lint browser
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
