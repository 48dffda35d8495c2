# Everything runs in .venv, made with plain pip on first use. `make help` lists the targets.

PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
VENV := .venv
BIN := $(VENV)/bin
DATA ?= openmoji
NEEDS_PYTHON := lightning-dalle needs Python 3.11 or newer with venv and pip, and found none: make PYTHON=/path/to/python ...

.DEFAULT_GOAL := help
.PHONY: help quickstart test avx2 lint format format-check types contracts notebooks bench clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

quickstart: $(VENV)/.quickstart-installed ## Train the whole recipe on real pictures and write runs/quickstart/report.html (DATA=openmoji, shapes, moving-shapes or animated-emoji)
	$(BIN)/lightning-dalle quickstart --data $(DATA)

# A file stays on one worker, with what its fixtures made; four of about a gigabyte each are enough on any machine.
test: $(VENV)/.dev-installed ## Run the tests
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile

avx2: export ATEN_CPU_CAPABILITY := avx2
avx2: export DNNL_MAX_CPU_ISA := AVX2
avx2: export ONEDNN_MAX_CPU_ISA := AVX2
avx2: export MKL_ENABLE_INSTRUCTIONS := AVX2
avx2: $(VENV)/.dev-installed ## As on a CPU without bfloat16: test attention, and hold an update of each small recipe against its budget
	$(BIN)/python -m pytest tests/unit/ops/attention
	$(BIN)/python -m tests.benchmarks.recipe_budgets

lint: $(VENV)/.dev-installed ## Look for mistakes with ruff
	$(BIN)/ruff check

format: $(VENV)/.dev-installed ## Lay out the code with ruff
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

format-check: $(VENV)/.dev-installed ## Check the layout of the code
	$(BIN)/ruff format --check

types: $(VENV)/.dev-installed ## Check the types with mypy
	$(BIN)/mypy

contracts: $(VENV)/.dev-installed ## Check that imports run down the layers only
	$(BIN)/lint-imports

notebooks: $(VENV)/.dev-installed ## Run the notebooks, with their fast parameters
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=600 notebooks

bench: $(VENV)/.dev-installed ## Measure attention and sampling on two threads and renew tests/benchmarks/README.md (best on an idle machine)
	$(BIN)/python -m tests.benchmarks

clean: ## Remove caches and built files; .venv and runs stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# A stamp is renewed when the dependencies may have changed.
$(VENV)/.quickstart-installed: pyproject.toml | $(BIN)/pip
	$(BIN)/pip install -e '.[quickstart]'
	touch $@

$(VENV)/.dev-installed: pyproject.toml | $(BIN)/pip
	$(BIN)/pip install -e '.[dev]'
	touch $@ $(VENV)/.quickstart-installed

$(BIN)/pip:
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(NEEDS_PYTHON)" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(NEEDS_PYTHON)" >&2; exit 1; }
