# `make` lists what can be made. Everything runs in .venv, built from pyproject.toml and constraints.txt.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
RECIPE ?= tiny-llama
ARGS ?=

# The interpreter that .venv is made from: make setup PYTHON=/path/to/python3.11
ifndef PYTHON
PYTHON := $(firstword $(foreach name,python3.11 python3,$(shell $(name) -c 'import sys; print(sys.executable)' 2>/dev/null)))
endif

# With ARGS="-k tiles" one of several runs may find nothing to do (exit code 5): that is no failure.
pytest = $(BIN)/python -m pytest $(1) $(ARGS) || test $$? -eq 5

.DEFAULT_GOAL := help
.PHONY: help setup browser train test lint format docs bench bench-edge soak clean fuzz

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## build .venv with everything that training and testing need

$(INSTALLED): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "cleave_dask needs Python 3.11 or newer, found: $$("$(PYTHON)" --version 2>/dev/null || echo none)." >&2; \
		echo "Install one, then: make $(or $(MAKECMDGOALS),setup) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv $(VENV); }
	@echo "installing cleave-dask[train,dev] and its dependencies into $(VENV); the first time takes minutes"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@touch $@

train: setup ## train a tiny Llama on four device processes of this machine (RECIPE=tiny-opt ARGS="--steps 50")
	@$(BIN)/cleave train $(RECIPE) $(ARGS)

test: lint browser ## check style and types, then run all tests: units, clusters, browser, short chaos (ARGS="-k tiles")
	$(call pytest,-m unit -n auto)
	$(call pytest,-m "not unit and not bench" --durations 15)

browser: ## install Chromium for the browser tests, where that can be done (Debian, as root)
	@test -z "$$CLEAVE_BROWSER" || exit 0; \
	for name in chromium chromium-browser google-chrome google-chrome-stable; do \
		if command -v $$name >/dev/null; then exit 0; fi; \
	done; \
	if [ "$$(id -u)" = 0 ] && [ -f /etc/debian_version ] && command -v apt-get >/dev/null; then \
		echo "installing Debian's chromium for the browser tests"; \
		export DEBIAN_FRONTEND=noninteractive; \
		timeout 120 apt-get update -qq -o Acquire::Retries=1 && \
		timeout 300 apt-get install -y -qq --no-install-recommends chromium >/dev/null && exit 0; \
		echo "chromium could not be installed with apt-get" >&2; \
	fi; \
	echo "browser tests will be skipped: install chromium or Chrome, or set CLEAVE_BROWSER to one" >&2

lint: setup ## check style (ruff) and types (mypy)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: setup ## rewrite the sources in the house style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: setup ## build the documents as a site in site/, strictly (ARGS="--site-dir /tmp/site")
	$(BIN)/python -m mkdocs build --strict --quiet $(ARGS)

bench: setup ## measure seconds per step against plain torch
	$(BIN)/python benchmarks/overhead.py $(ARGS)

bench-edge: setup ## measure this package and its peers on shaped links, side by side; root (ARGS="--settings edge-8 --quick")
	$(BIN)/python -m benchmarks.edge $(ARGS)

soak: setup ## train for an hour while devices are killed, stopped and started (ARGS="--minutes 5")
	$(BIN)/python benchmarks/soak.py $(ARGS)

fuzz: setup ## give every parser of device bytes examples for 120 s, 16 minutes together (SECONDS=3600)
	FUZZ_SECONDS=$(or $(SECONDS),120) $(BIN)/python -m pytest tests/runtime/test_fuzzing.py -s --timeout 0 $(ARGS)

clean: ## remove .venv, caches and build output; checkpoints stay
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
