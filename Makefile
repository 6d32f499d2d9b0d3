# Every target works alone on a machine with make and Python >= 3.11: what it needs is installed first, into .venv.

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The first interpreter that is new enough; name another with `make PYTHON=...`.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-all lint type contracts check

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

setup: $(STAMP) ## install into .venv

serve: $(STAMP) ## serve the bundled models; more flags: make serve ARGS='--port 9000'
	$(BIN)/vidspec serve $(ARGS)

test: $(STAMP) ## run the tests
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-all: $(STAMP) ## run the slow tests too, and those that need CUDA where there is one
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP) ## ruff
	$(BIN)/ruff check .

type: $(STAMP) ## mypy --strict
	$(BIN)/mypy

contracts: $(STAMP) ## who may import whom
	$(BIN)/lint-imports

check: lint type contracts ## all three

# constraints.txt holds the versions that CI ran. Without it pip may mix a torch and a torchvision that do not fit.
$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "vidspec needs Python >= 3.11; name it with: make PYTHON=/path/to/python3"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment (Debian: apt install python3-venv)"; exit 1; }
	@echo "Installing into $(VENV); the first time, torch makes this a matter of minutes."
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
