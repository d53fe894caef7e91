PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Without the constraints torch may come with several gigabytes of CUDA libraries.
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install train test lint format clean

help: ## Show this list.
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1	/'

install: $(STAMP) ## Create .venv once and install the package into it.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 10) else f"Python 3.10 or newer is needed, {sys.executable} is {v.major}.{v.minor}; choose another with: make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(PIP_INSTALL) -e '.[box2d,dev]'
	@touch $@

train: install ## Train ADMMDQN on CartPole-v1 with two learners.
	$(BIN)/rllib train file tuned_examples/cartpole-admm-dqn.yaml

lint: install ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint ## Check style and types, and run the tests.
	$(BIN)/pytest

format: install ## Rewrite the sources in the project's format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment and everything generated.
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
