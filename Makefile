# Everything is installed into .venv, in the versions of constraints.txt, and only when these change.

PYTHON ?= python3
MODEL ?=
PICTURES ?=

VENV := .venv
DEMO := runs/demo
RUN := $(VENV)/bin/python -m
INSTALL := $(RUN) pip install --quiet --constraint constraints.txt --editable

.DEFAULT_GOAL := help
.PHONY: help demo look test lint types unit format clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.core  ## train on handwritten digits (half a minute): figures and a report
	@if test -e $(DEMO)/report.html; then \
		$(RUN) vitrail evaluate $(DEMO) && echo "report     $(DEMO)/report.html"; \
	else \
		$(RUN) vitrail train --out $(DEMO) $$(test ! -e $(DEMO)/recipe.toml || echo --resume); \
	fi

look: $(VENV)/.core  ## show what a model sees: make look [MODEL=...] [PICTURES=...]
	@$(RUN) vitrail look $${MODEL:+--model "$$MODEL"} $${PICTURES:+"$$PICTURES"}

test: lint types unit  ## everything that must hold: lint, types, tests

lint: $(VENV)/.dev  ## ruff: rules and format
	$(RUN) ruff check
	$(RUN) ruff format --check

types: $(VENV)/.dev  ## mypy
	$(RUN) mypy

unit: $(VENV)/.dev  ## pytest, on several cores
	$(RUN) pytest --numprocesses auto --maxprocesses 8

format: $(VENV)/.dev  ## let ruff repair and format the code
	$(RUN) ruff check --fix
	$(RUN) ruff format

clean:  ## remove the environment and every cache
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis dist
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) ".[data]"
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(INSTALL) ".[data,dev,peers]"
	@touch $@
