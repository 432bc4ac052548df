# `make serve` and `make test` are all a newcomer needs; both create .venv and install into it.
PYTHON ?= python3
CONFIG ?= deployments/tiny-code.yaml
BENCH ?= pair
TEST_PROCESSES ?= 3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install serve test check format bench clean

help:  ## Show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

install: $(INSTALLED)  ## Create .venv and install everything into it

serve: $(INSTALLED)  ## Serve the embedded pair on http://127.0.0.1:8000 (PORT=, CONFIG=my.yaml)
	@$(BIN)/leadout serve $(CONFIG) $(if $(PORT),--port $(PORT))

test: $(INSTALLED)  ## Run all tests
	$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) $(ARGS)

check: $(INSTALLED)  ## Lint, types and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(INSTALLED)  ## Run benchmarks/$(BENCH).py; QUICK=1 for its short form
	$(BIN)/python -m benchmarks.$(BENCH) $(if $(QUICK),--quick) $(ARGS)

clean:  ## Remove what make created
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
