# Two commands do everything on a fresh machine: `make run` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PEERS := $(VENV)/.peers
TWO_AT_ONCE := --numprocesses 2 --no-loadscope-reorder
# Python compiles what is imported when it is imported; pip would compile all of every package, for a minute.
INSTALL := $(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable

# Every process that is started would compile all of torch anew: three seconds of its time, hundreds of times.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test tests quick soak lint bench clean

run: $(INSTALLED)  ## install, then train configs/tiny.toml; RUN="train.steps=50" changes settings
	$(BIN)/penstock train configs/tiny.toml $(RUN)

# Types are checked on one processor, while peers are installed on the other and the tests begin.
test: $(INSTALLED)  ## install, then lint, type-check and run every test
	$(MAKE) --jobs 2 lint tests

tests: $(PEERS)  ## every test
	$(BIN)/python -m pytest $(TWO_AT_ONCE)

quick: $(INSTALLED)  ## the tests to run while editing: under a minute
	$(BIN)/python -m pytest $(TWO_AT_ONCE) -m "not slow and not soak"

soak: $(INSTALLED) $(PEERS)  ## every test, with all combinations where `make test` takes pairs; an hour or two
	$(BIN)/python -m pytest $(TWO_AT_ONCE) -m "soak or not soak"

lint: $(INSTALLED)  ## style, layers and strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

bench: $(INSTALLED) $(PEERS)  ## everything that BENCHMARKS.md shows; Linux, root, an idle machine, an hour
	$(BIN)/python -m benchmarks.suite .

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) ".[dev]"
	touch $@

$(PEERS): $(INSTALLED)  # the other systems that the benchmark compares with; training does not need them
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(INSTALL) ".[peers]"
	touch $@
