# Everything works from a fresh clone: each target sets up what it needs.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup train check test test-all chaos validate golden docs bench

setup: $(READY)

# torch is named so that pip takes the pinned version, never a newer one with other libraries.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Meshwright needs Python 3.11 or newer and $(PYTHON) is %d.%d: make PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make a .venv with pip in it: install its venv package (Debian: apt install python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --constraint constraints.txt torch==2.13.0 --editable '.[dev]'
	@touch $@

train: setup
	$(BIN)/meshwright train recipes/quickstart.toml

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

# Tests that start no ranks go side by side, as many as there are cores; those with ranks two at a
# time. Those in chaos fork members from their own process, which no other test may have used.
ALONE := tests/unit tests/golden tests/cli/test_cli_plan.py tests/cli/test_cli_bad_input.py
RANKS := tests/parity tests/gpu
COMMANDS := tests/cli $(patsubst %,--ignore %,$(filter tests/cli/%,$(ALONE)))

# With services, browsers and Slurm of their own, each file in one process.
SERVICE := tests/api tests/browser tests/slurm

test: check
	$(BIN)/pytest -n auto $(ALONE)
	$(BIN)/pytest -n 2 $(RANKS)
	$(BIN)/pytest -n 2 --dist loadfile $(SERVICE)
	@echo "tests/chaos, beside tests/cli: either waits much of its time"
	@$(BIN)/pytest tests/chaos >.chaos.log 2>&1 & chaos=$$!; \
	$(BIN)/pytest -n 2 --dist loadfile $(COMMANDS); commands=$$?; \
	wait $$chaos; chaos=$$?; cat .chaos.log; exit $$((commands + chaos))

# Everything, with every row of the acceptance matrix, whose table is written to docs/parity.md.
test-all: check
	TESTS=all $(BIN)/pytest -n auto $(ALONE)
	TESTS=all PARITY=all PARITY_TABLE=docs/parity.md $(BIN)/pytest $(RANKS)
	TESTS=all $(BIN)/pytest -n 2 --dist loadfile $(COMMANDS)
	TESTS=all $(BIN)/pytest tests/chaos
	CHAOS=all $(BIN)/pytest $(SERVICE)

# Every layout with every kind of redundancy, with losses at every moment of a step, and hundreds of
# random schedules of them; and random walks of runs through layouts.
chaos: setup
	CHAOS=all $(BIN)/pytest tests/chaos
	CHAOS=all $(BIN)/pytest tests/parity/test_parity_walks.py
	CHAOS=all $(BIN)/pytest tests/api

# Predicts the published runs of ../shared again, and writes the table of validation/RESULTS.md anew.
validate: setup
	$(BIN)/meshwright validate
	$(BIN)/python validation/refresh.py

# Write the golden texts anew after a change that is meant, then review their diff.
golden: setup
	REGENERATE_GOLDEN=1 $(BIN)/pytest tests/golden/test_golden.py tests/unit/control/test_cluster_emit.py

# The files, targets, commands and keys that the documents name are there.
docs: setup
	$(BIN)/pytest tests/golden/test_docs.py

# Refreshes benchmarks/RESULTS.md; the peers get an environment of their own.
bench: setup
	$(BIN)/python benchmarks/step_overhead.py --write
	$(BIN)/python benchmarks/axes.py --write
	$(BIN)/python benchmarks/peers_train.py --setup --write
	$(BIN)/python benchmarks/recovery.py --setup --write
	$(BIN)/python benchmarks/survival.py --write
	$(BIN)/python benchmarks/survival_cost.py --write
	$(BIN)/python benchmarks/data.py --setup --write
	$(BIN)/python benchmarks/data_starved.py --write
	$(BIN)/python benchmarks/checkpoint.py --setup --write
	$(BIN)/python benchmarks/service.py --write
