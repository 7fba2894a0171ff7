# Two commands for a fresh machine: `make demo` and `make test`. Everything lives in .venv.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-full check lint format bench clean

# The environment, with the versions that development and CI use.
$(READY): pyproject.toml requirements/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint requirements/constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY)  ## The main job on this machine: a small hybrid model, twice, held against itself.
	$(BIN)/detrun pair recipes/hybrid-cpu.yaml --set cluster=local
	@echo 'the command is $(BIN)/detrun; docs/first-use.md goes on from here'

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

check: lint  ## Before every commit: under two minutes.
	$(BIN)/pytest -m 'not slow and not cluster and not frameworks and not full' -n 2 -q

test: lint  ## Everything, on a real Slurm cluster that is brought up on this machine where it can be installed.
	$(BIN)/pytest -m 'not cluster and not frameworks and not full' -n 2
	$(BIN)/pytest -m 'frameworks and not full' -n 2
	$(BIN)/pytest -m cluster

test-full: test  ## Also the tests of which there are many of a kind, and the benchmarks.
	$(BIN)/pytest -m 'full and not frameworks' -n 2
	$(BIN)/pytest -m 'full and frameworks'
	$(MAKE) bench

bench: $(READY)  ## What things cost and how long they take here, as JSON below benchmarks/results.
	$(BIN)/python -m benchmarks

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .frameworks .detrun .hypothesis .pytest_cache .mypy_cache .ruff_cache dist build
