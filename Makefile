# Set-up and every check of this repository. Needs make and Python >= 3.11; `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt
SOURCES := automodel automodel_kernels tests bench

# A stamp is written only after its installation succeeded, and is older than a changed pyproject.toml or
# constraints.txt; so an interrupted installation is repeated and a finished one costs nothing.
CREATED := $(VENV)/.stamp-created
INSTALLED := $(VENV)/.stamp-installed
INSTALLED_DEV := $(VENV)/.stamp-installed-dev
REQUIREMENTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help quickstart test lint types contracts unit wheel-check bench tables format clean

help:
	@echo "make quickstart   train the small hybrid model; sets up $(VENV) on first use"
	@echo "make test         everything that must pass: lint, types, contracts, unit, wheel-check"
	@echo "make lint         ruff format --check and ruff check"
	@echo "make types        mypy --strict on both packages"
	@echo "make contracts    import-linter: the layers"
	@echo "make unit         pytest, without benchmarks"
	@echo "make wheel-check  build the wheel, install it elsewhere and train with it"
	@echo "make bench        the benchmarks"
	@echo "make tables       compile every kernel for every GPU; writes automodel_kernels/resources.json"
	@echo "make format       let ruff rewrite the sources"
	@echo "make clean        remove $(VENV), builds and tool caches; runs/ stays"

quickstart: $(INSTALLED)
	$(BIN)/automodel run hybrid_tiny

test: lint types contracts unit wheel-check

lint: $(INSTALLED_DEV)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)

types: $(INSTALLED_DEV)
	$(BIN)/mypy --strict

contracts: $(INSTALLED_DEV)
	$(BIN)/lint-imports --no-logo

unit: $(INSTALLED_DEV)
	$(BIN)/python -m pytest

wheel-check: $(INSTALLED_DEV)
	$(BIN)/python tests/wheel_check.py

bench: $(INSTALLED_DEV)
	$(BIN)/python -m pytest bench --benchmark-only

tables: $(INSTALLED_DEV)
	$(BIN)/python -m automodel_kernels.resources

format: $(INSTALLED_DEV)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks *.egg-info
	find $(SOURCES) -name __pycache__ -type d -exec rm -rf {} +

# An environment that somebody else made is kept; one without a working pip is made anew.
$(CREATED):
	@command -v $(PYTHON) >/dev/null 2>&1 \
		|| { echo "$(PYTHON) was not found: install Python 3.11 or newer, or name one with 'make PYTHON=...'" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed, and $(PYTHON) is $$($(PYTHON) --version 2>&1):" \
			"name another one with 'make PYTHON=python3.11'" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(INSTALLED): $(REQUIREMENTS) | $(CREATED)
	$(PIP_INSTALL) setuptools
	$(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

$(INSTALLED_DEV): $(REQUIREMENTS) | $(CREATED)
	$(PIP_INSTALL) setuptools
	$(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $(INSTALLED) $@
