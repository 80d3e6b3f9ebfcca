# `make run` and `make test` are all a new machine needs; both begin with `make setup`.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
HOST   ?= 127.0.0.1
PORT   ?= 8080
PRESET ?= small
FUZZ   ?= 50
MARKS  ?= not slow and not quiet

.DEFAULT_GOAL := help
.PHONY: help setup setup-test setup-train setup-ray run test check audit fuzz load bench lock clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(BIN)/python:
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Souschef needs Python 3.11 or newer, {sys.executable} is {v[0]}.{v[1]}")'
	$(PYTHON) -m venv $(VENV)

# A stamp a lock: the environment is remade only when its lock changes.
$(VENV)/runtime.stamp: requirements/runtime.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements/build.txt
	$(BIN)/python -m pip install --progress-bar on --require-hashes -r requirements/runtime.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/test.stamp: requirements/test.txt $(VENV)/runtime.stamp
	$(BIN)/python -m pip install --progress-bar on --require-hashes -r requirements/test.txt
	touch $@

$(VENV)/ray.stamp: requirements/ray.txt $(VENV)/runtime.stamp
	$(BIN)/python -m pip install --progress-bar on --require-hashes -r requirements/ray.txt
	touch $@

# Not locked: which build of PyTorch fits is the machine's affair.
$(VENV)/train.stamp: $(VENV)/runtime.stamp
	$(BIN)/python -m pip install --progress-bar on torch==2.13.0
	touch $@

setup: $(VENV)/runtime.stamp  ## the environment, from the locked dependencies
setup-test: $(VENV)/test.stamp  ## the same with what the tests need
setup-train: $(VENV)/train.stamp  ## the same with PyTorch, for `edge-agent distill`
setup-ray: $(VENV)/ray.stamp  ## the same with Ray, for the cloud service on several machines

run: setup  ## fetch and build the model on the first start, then serve on HOST:PORT
	exec $(BIN)/edge-agent serve --preset $(PRESET) --host $(HOST) --port $(PORT)

test: setup-test  ## the tests, without the slowest (MARKS="not quiet" for those too)
	$(BIN)/python -m pytest -m "$(MARKS)" $(PYTEST_ARGS)

check: setup-test  ## ruff, mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

audit: setup-test  ## bandit, and known holes in the locked dependencies; docs/security.md answers what is skipped
	$(BIN)/python -m bandit -q -r edge_agent cloud_service shared --skip B101,B311,B404,B603,B610
	$(BIN)/python -m pip_audit --strict --disable-pip --require-hashes -r requirements/runtime.txt

fuzz: setup-test  ## FUZZ times as many random examples as `make test` tries, others every time
	FUZZ_FACTOR=$(FUZZ) $(BIN)/python -m pytest --timeout 7200 tests/test_fuzz_api.py tests/test_fuzz_session.py tests/test_fuzz_parsers.py

load: setup-test  ## two hundred clients on a queue of 32, for two minutes
	$(BIN)/python -m tests.load --seconds 120

bench: setup-test  ## ratios against llama.cpp, side by side in one run
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

lock: setup-test  ## resolve the dependencies anew into requirements/
	$(BIN)/python -m pip install --quiet uv
	printf "hatchling\neditables\n" | $(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-header -q -o requirements/build.txt -
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-header -q -o requirements/runtime.txt pyproject.toml
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-header -q -c requirements/runtime.txt --extra test -o requirements/test.txt pyproject.toml
	$(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --no-header -q -c requirements/test.txt --extra ray -o requirements/ray.txt pyproject.toml

clean:  ## remove the environment (models in the cache directory stay)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
