# Every install this project needs is here; CI calls the same targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The exact release matters: unpinned, pip takes gigabytes of CUDA libraries on a CPU machine.
TORCH ?= torch==2.13.0
export HF_HUB_OFFLINE = 1

.PHONY: setup demo test check serve bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: setup
	@$(BIN)/python -m gemserve.demo

test: setup
	$(BIN)/python -m pytest -q

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile

serve: setup
	$(BIN)/gemserve serve

bench: setup
	$(BIN)/gemserve eval needle --methods none,gemfilter,sieve --lengths 1024,4096 --samples 10

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
