# Each target works on a machine that has only Python 3.11+, git and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: setup demo test check fmt compile bench test-engine dashboards reference clean

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing what requirements.lock names into $(VENV)"
	@$(PIP) --require-hashes -r requirements.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

demo: compile
	$(BIN)/headway demo

test: check
	$(BIN)/python -m pytest -m "not engine" -n 2 --dist loadfile

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The decision core as C, where there is a compiler; the same files run uncompiled elsewhere.
compile: setup
	$(BIN)/python -m controlplane.scheduler.compile

bench: compile
	$(BIN)/python -m tests.benchmarks

# A real vLLM and a real llama.cpp, each in a virtual environment of its own; some minutes and 4 GB the
# first time. ENGINE_TESTS names a part of them.
ENGINE_TESTS ?= tests/engine tests/contract
test-engine: setup
	$(BIN)/python tests/engine/install_vllm.py
	$(BIN)/python tests/engine/install_llama_cpp.py
	$(BIN)/python -m pytest -m "engine and not slow" $(ENGINE_TESTS)

# What is made from the code: tests hold both to it.
dashboards: setup
	$(BIN)/python -m dashboards.generate

reference: setup
	$(BIN)/python -m tests.reference

clean:
	rm -rf $(VENV) .headway build *.egg-info
