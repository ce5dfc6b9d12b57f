# Every target sets itself up: a fresh clone needs python3 (3.11 or newer), make and, for the fast optimizer, a C++
# compiler.

PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
BUILD_INPUTS := pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/slideformer/native/csrc/*)

.PHONY: quickstart test lint soak gpu native clean

# Fine-tunes a small real model through the sliding engine, and asks it the same questions before and after.
quickstart: $(READY)
	$(VENV)/bin/python examples/quickstart.py

# Two files at a time: a test waits for delays and child processes about as long as it computes.
test: lint
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# Kills runs at random moments for MINUTES and counts; `make test` does it for half a minute.
MINUTES ?= 10
soak: $(READY)
	PYTHONPATH=src $(VENV)/bin/python tests/faults/campaign.py --minutes $(MINUTES)

# On a machine with a GPU and torch for it; takes whatever python3 is there.
gpu: native
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m pytest tests/gpu

# The native library inside the tree, without pip or a network: PYTHONPATH=src then finds it.
native:
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m slideformer.native.build

# The tools that build the package come first, pinned like everything else; without build isolation they are what pip
# builds it with, so two runs install the same.
$(READY): $(BUILD_INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), slideformer needs 3.11 or newer: make PYTHON=python3.11" >&2; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt scikit-build-core cmake ninja
	rm -f src/slideformer/native/*.so
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/slideformer/native/*.so .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
