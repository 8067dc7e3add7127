# `make demo` and `make test` need nothing but Python >= 3.10; what they install goes to $(VENV), and the demo's model to a cache folder.
# Nothing is downloaded again until pyproject.toml or a pin changes, so both work offline afterwards.
#
#   make test TRANSFORMERS=5.17.0 VENV=.venv-oldest PYTHON=python3.12 PYTEST_ARGS="-k snapkv"
#   make demo DEMO_ARGS="--context-tokens 4000 --budget 0.125"

PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
# transformers 5.21 and later need Python 3.11.
TRANSFORMERS ?= $(shell $(PYTHON) -c "import sys; print('5.24.0' if sys.version_info >= (3, 11) else '5.20.2')")
DEMO_ARGS ?=
# Tests run side by side (at most four: some hold a real model), each in one thread: tiny models gain nothing from more.
WORKERS ?= auto
PYTEST_ARGS ?=

RUN := $(VENV)/bin/python
# A version without a pin file of its own lets pip choose what goes with it.
PINS := requirements/constraints.txt $(wildcard requirements/transformers-$(TRANSFORMERS).txt)
# The versions are part of the stamp's name, so asking for others installs them.
STAMP := $(VENV)/.installed-transformers-$(TRANSFORMERS)-torch-$(TORCH)

.PHONY: help demo test lint ci format docs clean

help:
	@echo "make demo | test | lint | ci | format | docs | clean    (variables: PYTHON VENV TORCH TRANSFORMERS DEMO_ARGS WORKERS PYTEST_ARGS)"

demo: $(STAMP)
	$(RUN) examples/quickstart.py $(DEMO_ARGS)

test: $(STAMP)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal $(PYTEST_ARGS)

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

ci: lint test

format: $(STAMP)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# The site is written to site/; the pictures are drawn from the tables of the pages, and are kept in git.
docs: $(STAMP)
	$(RUN) docs/figures.py
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

$(STAMP): pyproject.toml setup.py $(PINS)
	@$(PYTHON) -c "import sys; sys.exit('Python >= 3.10 is needed, $(PYTHON) is ' + sys.version.split()[0]) if sys.version_info < (3, 10) else None"
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.installed-*
	$(RUN) -m pip install $(addprefix -c ,$(PINS)) torch==$(TORCH) transformers==$(TRANSFORMERS) -e ".[demo,test,docs]"
	touch $@

clean:
	rm -rf .venv .venv-oldest build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
