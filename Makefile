# Every target works in a fresh clone: set-up happens once, in .venv, and again when pyproject.toml changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch first and alone: resolved together with the rest, pip may replace it by a larger build
TORCH := torch==2.13.0
# two workers on two cores need one thread each; bitwise tests need one thread anyway
export OMP_NUM_THREADS := 1

.PHONY: demo test browser check format bench scripts corpus trials corridor parting harm rivals screenshots depth-study \
	gallery docs clean

demo: $(VENV)/.ready
	$(BIN)/python examples/demo.py

test: $(VENV)/.ready-dev browser
	$(BIN)/python -m pytest -q -n 2

# the panels are tested in a real browser; their tests say so loudly where there is none, and fail with CI=true
browser:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null \
		&& apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } \
		|| echo "NO BROWSER: chromium is missing and could not be installed (Debian: apt-get install chromium)" >&2

# mypy looks for what is shipped inside the package where it will stand
flowscope/extras flowscope/integrations:
	ln -s ../$(notdir $@) $@

check: $(VENV)/.ready-dev flowscope/extras flowscope/integrations
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.ready-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.ready-bench
	$(BIN)/python benchmarks/overhead.py --write docs/overhead.md

scripts: $(VENV)/.ready
	$(BIN)/python benchmarks/public_scripts.py --write docs/public-scripts.md

# both halves of the labelled corpus, three seeds each: about an hour on two cores
corpus: $(VENV)/.ready-dev
	$(BIN)/python -m benchmarks.faults
	$(BIN)/python -m benchmarks.faults.second

# seeded faults and their healthy twins, then healthy models: about an hour on one core, most of it for the models
trials: $(VENV)/.ready-dev
	$(BIN)/python -m benchmarks.trials
	$(BIN)/python -m benchmarks.trials --scripts
	$(BIN)/python -m benchmarks.trials --zoo

# attacks on what is promised, with a new seed each time: about an hour on one core
harm: $(VENV)/.ready-dev
	$(BIN)/python -m benchmarks.harm --write

# seeds of healthy programs judged by groups of good runs, and harmful changes: about 15 minutes on one core
corridor: $(VENV)/.ready-dev
	$(BIN)/python -m benchmarks.corridor --write docs/corridor.md

# 32 pairs of runs with one fault each and 50 that are equal: about 15 minutes on one core
parting: $(VENV)/.ready-dev
	$(BIN)/python -m benchmarks.parting --write docs/reference.md

# mutants, published errors and reports, by every column: about 45 minutes on one core; what was trained is kept
rivals: $(VENV)/.ready-dev
	$(BIN)/python -m benchmarks.rivals --write docs/rivals.md

# trainers and libraries, each in an environment of its own under .stacks: half an hour, most of it for installing
stacks: $(VENV)/.ready-dev
	$(BIN)/python -m benchmarks.stacks --write docs/integrations.md

screenshots: $(VENV)/.ready-dev
	test -d runs/demo/post_ln_keel || $(BIN)/python examples/demo.py
	$(BIN)/python examples/screenshots.py

# twelve sick runs and their cures: about ten minutes on one core
gallery: $(VENV)/.ready-dev
	$(BIN)/python -m benchmarks.gallery

depth-study: $(VENV)/.ready-dev
	$(BIN)/python examples/depth_study.py

# the pages of docs/ as a site, in build/site
docs: $(VENV)/.ready-dev
	$(BIN)/python -m mkdocs build --strict

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install -q "$(TORCH)"
	$(BIN)/python -m pip install -q -e .
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(BIN)/python -m pip install -q -e ".[dev]"
	touch $@

$(VENV)/.ready-bench: $(VENV)/.ready
	$(BIN)/python -m pip install -q -e ".[bench]" || echo "some peers do not install here: the benchmark skips them"
	touch $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache runs
