# Every target makes .venv from a bare Python when it is missing or older than
# the lock file, and starts at once when it is up to date.

PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
  $$python -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' \
  2> /dev/null && echo $$python && break; done)
WORKERS ?= 2
PYTEST_FLAGS ?=
BENCH_FLAGS ?=

INSTALLED := .venv/installed

.PHONY: install quickstart test test-slow check format bench bench-peers lock \
  clean
.DEFAULT_GOAL := install

install: $(INSTALLED)

# --no-deps: the lock is the whole answer, nothing is resolved again; `pip
# check` then says whether it still fits the ranges.
$(INSTALLED): requirements.lock requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or later with ensurepip" \
	  "found; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --no-deps --requirement requirements.lock
	.venv/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	.venv/bin/pip check
	@touch $@

quickstart: $(INSTALLED)
	.venv/bin/python -m scalerl_jax.main --config=experiments/quickstart.py \
	  --workdir=runs/quickstart

test: $(INSTALLED)
	.venv/bin/python -m pytest -n $(WORKERS)

test-slow: $(INSTALLED)
	.venv/bin/python -m pytest -n $(WORKERS) -m "slow and not device" \
	  $(PYTEST_FLAGS)

# Seconds before minutes: format, lint, floors, types.
check: $(INSTALLED)
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/lint-imports
	.venv/bin/pyright

format: $(INSTALLED)
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

bench: $(INSTALLED)
	.venv/bin/python -m benchmarks.bench
	.venv/bin/python -m benchmarks.decoding
	.venv/bin/python -m benchmarks.fitting

# The same work on Tunix, transformers and TRL, in environments of their own
# below build/peers (5 GB, made on first use), beside ours.
bench-peers: $(INSTALLED)
	.venv/bin/python -m benchmarks.peers.run $(BENCH_FLAGS)

# New exact versions: resolves the ranges in a throw-away environment.
lock:
	$(PYTHON) -m venv build/lock --clear
	build/lock/bin/pip install --quiet --requirement requirements-dev.txt
	{ sed '/^[^#]/,$$d' requirements.lock; build/lock/bin/pip freeze --all \
	  --exclude pip; } > build/requirements.lock
	mv build/requirements.lock requirements.lock
	rm -r build/lock

clean:
	rm -rf build dist *.egg-info .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -r {} +
