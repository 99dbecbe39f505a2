# Every target installs what it needs into .venv and changes nothing else. One exception: as root on Debian,
# `make test` installs chromium if it is missing. Without chromium the browser tests are skipped.
PYTHON ?= python3
BIN := .venv/bin
# Many short-lived processes import torch. Without cached bytecode each of them would compile it again.
export PYTHONDONTWRITEBYTECODE :=
# Tests that only compute are distributed one by one; tests that measure time or start processes, file by file.
COMPUTE_TESTS := $(addprefix tests/,ir spec cost sim schedules evaluate planner sailor bubbletea/admit bubbletea/sim bubbletea/windows runtime/models)

.PHONY: demo test smoke check bench bench-quick bench-full docs test-slow chromium clean

demo: .venv/runtime
	$(BIN)/python examples/demo.py

test: .venv/dev chromium check
	$(BIN)/python -m pytest -n auto --durations=10 $(COMPUTE_TESTS)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations=15 $(addprefix --ignore=,$(COMPUTE_TESTS))

smoke: .venv/runtime
	$(BIN)/python -m atlas.launch.smoke

check: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file bench/mypy.ini bench/*.py

bench: .venv/dev
	$(BIN)/python bench/run.py --out out/bench.jsonl --resume

bench-full: .venv/dev
	$(BIN)/python bench/run.py --full --out out/bench-full.jsonl --resume

bench-quick: .venv/dev
	$(BIN)/python bench/run.py --quick --out out/bench-quick.jsonl

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir out/site
	@echo "out/site/index.html"

test-slow: .venv/dev chromium
	$(BIN)/python -m pytest -m slow

.venv/runtime: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e '.[runtime,serve,wan,png]'
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null || true  # on all cores; pip uses one
	@touch $@

.venv/dev: .venv/runtime
	$(BIN)/pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

.venv/docs: .venv/runtime
	$(BIN)/pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e '.[docs]'
	@touch $@

chromium:
	@command -v chromium >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } \
	  || echo "chromium is missing and cannot be installed here: browser tests will be skipped"

clean:
	rm -rf .venv out
