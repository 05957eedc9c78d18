# The commands of the project. Another interpreter: make test PYTHON=python3.12. Arguments for pytest: make test ARGS="-k lake".
.POSIX:
SHELL = /bin/sh
PYTHON = python3
ARGS =
BIN = .venv/bin
PIP = $(BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: install quickstart test lint bench docs clean

# What it takes to play, serve and train.
install: .venv/train

# Train a small policy to play, on this machine's CPU, and look at it: runs/quickstart/.
quickstart: install
	$(BIN)/envkit train examples/quickstart.yaml --output runs/quickstart

# All tests. Those that need Docker or bubblewrap are skipped, with the reason, where that is missing.
test: .venv/dev
	docker/install-missing
	docker/with-daemon $(BIN)/pytest $(ARGS)

lint: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports

# Each file compares with a peer in one run and prints a ratio.
bench: .venv/dev
	for file in benchmarks/bench_*.py; do $(BIN)/python "$$file" || exit 1; done

# The reference of the training file, written from envkit/config.py.
docs: .venv/dev
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: then pip takes the wheel that suits the machine from wherever its own settings point,
# such as a folder of CPU wheels, and nothing that follows replaces it.
.venv/train: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"envkit needs Python 3.11 or newer, not {v[0]}.{v[1]}: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(PIP) install torch==2.13.0
	$(PIP) install --editable ".[train,serve]"
	touch $@

.venv/dev: .venv/train
	$(PIP) install --editable ".[dev]"
	touch $@
