# Every target works alone on a machine with make and Python >= 3.11: it first installs its dependencies into .venv.

VENV    := .venv
BIN     := $(VENV)/bin
SERVING := $(VENV)/.serving
TOOLS   := $(VENV)/.tools
# The first interpreter that is new enough; name another with `make PYTHON=...`.
PYTHON  ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
ARGS    ?=
# Two test files at a time. With three, on two cores, drafts are too slow for the tests that need draft tokens.
BESIDE  := --numprocesses 2 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-page test-all lint type contracts check

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{ printf "%-18s %s\n", $$1, $$2 }'

setup: $(TOOLS) ## install all of it into .venv

serve: $(SERVING) ## serve the bundled models; more flags: make serve ARGS='--port 9000'
	$(BIN)/vidspec serve $(ARGS)

test: $(TOOLS) ## run the tests
	$(BIN)/python -m pytest -m "not slow and not gpu and not page" $(BESIDE) $(ARGS)

test-page: $(TOOLS) ## drive the page in Chromium
	$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist worksteal tests/page $(ARGS)

test-all: $(TOOLS) ## run the slow tests too, and those that need CUDA where there is one
	$(BIN)/python -m pytest $(ARGS)

lint: $(TOOLS) ## ruff
	$(BIN)/ruff check .

type: $(TOOLS) ## mypy --strict
	$(BIN)/mypy

contracts: $(TOOLS) ## who may import whom
	$(BIN)/lint-imports

check: lint type contracts ## all three

# constraints.txt holds the versions that CI ran. Without it pip may install incompatible versions of torch and torchvision.
# uv, if installed, is several times faster than pip; with UV_TORCH_BACKEND=cpu it installs torch without CUDA.
$(SERVING) $(TOOLS): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV), the first time 3 GB to fetch and 6 GB on disk, nearly all of it torch with CUDA: minutes."
	@if command -v uv >/dev/null; then uv pip install --python $(BIN)/python -c constraints.txt -e '$(PACKAGE)'; \
	else $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '$(PACKAGE)'; fi
	@touch $@
$(SERVING): PACKAGE := .
$(TOOLS): PACKAGE := .[dev,otel,peers,ray,store]

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "vidspec needs Python >= 3.11; name it with: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment (Debian: apt install python3-venv)"; exit 1; }
