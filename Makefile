# Everything runs in .venv, which is made on first use. `make help` lists the targets.
# The first Python here that is new enough; where none is, the check below says so.
PYTHON ?= $(shell for candidate in python3 python3.14 python3.13 python3.12 python3.11; do \
            $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$candidate && break; \
          done || echo python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/installed
DATA   ?= ../shared/data
# Where Python must not keep what it compiles, each start would compile all that it imports.
export UV_COMPILE_BYTECODE ?= $(if $(PYTHONDONTWRITEBYTECODE),1,0)
LOWEST := build/lowest
# Two processes, each file of tests in one of them, in the order of tests/conftest.py.
TWO    := -n 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help install demo test tests test-fast test-random test-lowest lint types check format docs bench thrift clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## make .venv and install Gati with everything for development

demo: $(STAMP) ## train, explore, compose and evaluate on handwritten digits (about 2 minutes)
	$(BIN)/gati demo

# Types take a minute on one core: meanwhile the tests begin. Whatever fails, the rest still runs.
test: $(STAMP) ## lint, types and all tests: what continuous integration runs
	@$(MAKE) --no-print-directory --keep-going -j 2 check tests

tests: $(STAMP)
	@fast=0; slow=0; \
	$(BIN)/python -m pytest -m "not slow" $(TWO) || fast=$$?; \
	$(BIN)/python -m pytest -m slow $(TWO) --durations=12 || slow=$$?; \
	test $$fast -eq 0 || echo "make test: the fast half failed (status $$fast)" >&2; \
	test $$slow -eq 0 || echo "make test: the slow half failed (status $$slow)" >&2; \
	test $$fast -ne 0 && exit $$fast; exit $$slow

test-fast: $(STAMP) ## three quarters of the tests: those that take two minutes
	$(BIN)/python -m pytest -m "not slow" $(TWO)

test-random: $(STAMP) ## the same, with examples of property tests that are new each time
	$(BIN)/python -m pytest -m "not slow" $(TWO) --hypothesis-profile random

# A bound that is too low is found by nothing else: every other environment has the versions of constraints.txt.
# It needs uv and its index of packages, and on Linux downloads the build of torch for GPUs, gigabytes.
test-lowest: $(STAMP) ## the fast tests with the oldest dependencies that pyproject.toml allows
	$(BIN)/python -m uv venv --quiet --clear $(LOWEST)
	$(BIN)/python -m uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct -e '.[dev]'
	$(LOWEST)/bin/python -m pytest -m "not slow" $(TWO)

check: lint types ## lint and types

lint: $(STAMP) ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy --strict gati services

# The theme announces its successor at every build; that is no warning about our pages.
docs: $(STAMP) ## guides and API reference as a site in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "build/site/index.html"

bench: $(STAMP) ## CIFAR-10 ResNets against themselves without caches, as JSON (needs DATA)
	$(BIN)/python benchmarks/resnet_cifar10.py --data $(DATA)

thrift: ## write services/wire/gen from thrift/gati.thrift (needs the Thrift compiler)
	rm -rf build/thrift && mkdir -p build/thrift && thrift --gen py -out build/thrift thrift/gati.thrift
	mkdir -p services/wire/gen && cp build/thrift/services/wire/gen/*.py services/wire/gen/

clean: ## remove .venv and everything built; runs/ and demo/ stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch first and alone: the exact version then resolves to the build (CPU or GPU) that fits this machine,
# and nothing installed after it can replace it. uv installs the rest in a tenth of pip's time; pip does it where
# uv cannot, as it does not know pip's settings: a mirror, a folder of wheels.
$(STAMP): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Gati needs Python 3.11 or newer, found: $$($(PYTHON) --version 2>&1); try make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "error: no venv module: on Debian and Ubuntu, apt-get install python3-venv" >&2; exit 2; }
	@echo "installing torch and the rest into $(VENV); this takes a few minutes"
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet -c constraints.txt uv
	$(BIN)/python -m uv pip install --quiet --python $(BIN)/python -c constraints.txt -e '.[dev]' || \
	  $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $(STAMP)
