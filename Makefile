# Everything a developer or CI runs. `make help` lists it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup weights demo test check check-deploy check-compiled fmt bench bench-prompt

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# torch first and pinned, so that pip takes the build the index settings of this machine offer.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[runner,dev]'
	touch $@

setup: $(STAMP) ## create .venv with everything in it

weights: $(STAMP) ## get the SmolLM2-135M-Instruct weights into models/
	$(BIN)/python -m runner.fetch

bench-prompt: weights ## CPU of the prompt pipeline on a growing conversation
	$(BIN)/python -m bench.prompt_pipeline

demo: weights ## two bundled engines and the gateway on :8080 (DEMO_ARGS=--once to stop after the table)
	$(BIN)/warmlane demo $(DEMO_ARGS)

# The runner's tests hold models: a process of their own, and one for its tiers, keeps memory low.
test: weights ## the whole test suite
	$(BIN)/python -m pytest $(TEST_ARGS) --ignore=tests/runner
	$(BIN)/python -m pytest $(TEST_ARGS) tests/runner --ignore-glob='*test_tiers*'
	$(BIN)/python -m pytest $(TEST_ARGS) $(wildcard tests/runner/test_tiers*.py)

check: $(STAMP) ## lint, format, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# `make test` runs these too; what starts whole fleets of pods is left to it.
check-deploy: $(STAMP) ## chart, compose file, images, Prometheus and Grafana files, without a cluster
	$(BIN)/python -m pytest tests/deploy --ignore tests/deploy/test_pod_commands.py \
		--ignore tests/deploy/test_compose_run.py

check-compiled: weights ## build the compiled wheel and run the tests of the hot path on it
	$(BIN)/python -m tests.check_compiled

fmt: $(STAMP) ## format the code and sort the imports
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .

bench: weights ## speed of the runner, of reading prompts and of one routing decision, as tables
	$(BIN)/python -m bench.runner_speed models/smollm2 --dtype bfloat16
	$(BIN)/python -m bench.prompt_reading
	$(BIN)/python -m bench.decision_cost
