# `make demo`, `make test` and `make lint` need nothing but make and Python 3.10 or newer: each sets up .venv first.
# test-cuda and bench-gpu use $(PYTHON) with its torch as it is, and install nothing.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
VERSIONS ?=
AREAS ?=

PY := $(VENV)/bin/python
CLEAN := $(PY) examples/clean_env.py
READY := $(VENV)/.ready
READY_FOR_DEMO := $(VENV)/.ready-for-demo

.PHONY: demo test test-cuda test-versions test-mutants test-rooms test-many test-waits test-triton test-peers bench bench-gpu bench-peers figures soak stragglers hostile chaos lint docs docs-serve wheel-test venv clean
.DELETE_ON_ERROR:

demo: $(READY_FOR_DEMO)
	@$(CLEAN) examples/demo.py $(ARGS)

# Four at a time on two cores, because many tests wait for a process or a time limit; in the order of tests/conftest.py.
test: $(READY)
	@$(CLEAN) -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

# What needs a GPU: with the torch (2.11 or newer, built with CUDA) and the pytest of $(PYTHON). One GPU is enough.
test-cuda:
	@$(PYTHON) tests/cuda/run.py $(ARGS)

# With the oldest and newest torch and frameworks, on the CPU; the environments (8 GB each) stay in .venvs.
test-versions:
	@$(PYTHON) -m tests.versions.run_versions $(VERSIONS) -- $(ARGS)

# Small changes of the code that a test must notice: half an hour or more. make test-mutants AREAS="engine --sample 2"
test-mutants: $(READY)
	@$(CLEAN) -m tests.stress.mutation $(AREAS)

# Each feature taken out of a copy of the tree, as CONTRIBUTING.md says, and the tests of the rest: a quarter of an hour.
# make test-rooms ARGS="auto"
test-rooms: $(READY)
	@$(CLEAN) -m tests.stress.rooms $(ARGS)

# All hooks with 16 and 32 ranks, as processes on two cores, and 300 random runs with shards: some minutes. As root also shards over two machines.
test-many: $(READY)
	@SHARDS_CASES=100 $(CLEAN) -m pytest -q tests/sharded/test_shards.py -k random $(ARGS)
	@$(CLEAN) -m pytest -q -s tests/stress/many_ranks.py tests/stress/shards_over_machines.py $(ARGS)

# Each wait for a stream taken out in turn: a test on the simulated accelerator must notice. Some minutes.
test-waits: $(READY)
	@$(CLEAN) -m tests.stress.waits $(ARGS)

# Triton's kernels in Triton's interpreter. Installs Triton, 1 GB, which `make test` does without.
test-triton: $(READY)
	@$(PY) -c "import triton" 2>/dev/null || $(PY) -m pip install triton
	@$(CLEAN) -m pytest tests/compressors/quantized/test_triton_bits.py tests/sharded/test_shards_triton.py $(ARGS)

# Tests that ship inside torch and Accelerate, with our hooks and beside them without: some 10 minutes.
# make test-peers ARGS="torch"; others from a checkout: make test-peers ARGS="torchft --source /path/to/torchft"
test-peers: $(READY)
	@$(CLEAN) tests/peers/peers.py $(ARGS)

# 50,000 steps on 2 ranks for each of three hooks: half an hour. make soak ARGS="--steps 1000"
soak: $(READY)
	@$(CLEAN) -m tests.stress.soak $(ARGS)

# One rank of three is slow, stopped, or gone: who waits how long, and what is read. 10 minutes, most of them asleep.
stragglers: $(READY)
	@$(CLEAN) -m tests.stress.stragglers $(ARGS)

# About 4,700 damaged or hostile payloads, files, folders and settings, twelve times what `make test` has: some minutes.
hostile: $(READY)
	@HOSTILE_TIMES=12 $(CLEAN) -m pytest -q -s tests/checkpoint/test_hostile_payloads.py tests/checkpoint/test_hostile_files.py $(ARGS)

# 100 runs that are killed in six ways and must go on to the same weights: half an hour or more. make chaos ARGS="--runs 10 --fronts plain --deaths full"
chaos: $(READY)
	@$(CLEAN) -m tests.stress.chaos $(ARGS)

# Short runs of all benchmarks that need neither root nor a GPU; `python benchmarks/NAME.py --help` has the long ones.
bench: $(READY)
	@$(CLEAN) benchmarks/codec.py --ranks 1 4 --rounds 7
	@$(CLEAN) benchmarks/memory.py --ranks 4
	@$(CLEAN) benchmarks/launches.py
	@$(CLEAN) benchmarks/size.py
	@$(CLEAN) benchmarks/local_steps.py --ranks 2 --steps 300 --results /dev/null --settings 'task=digits every=5 inner=sqrt wire=int4'

# The numbers and pictures of README and docs: what each needs, or those that are named, measured beside printed.
# make figures ARGS="codec memory"
figures: $(READY)
	@$(CLEAN) benchmarks/figures.py $(ARGS)

# The cost of the hooks on a GPU, as a Markdown table: with the torch of $(PYTHON).
bench-gpu:
	@PYTHONPATH=. $(PYTHON) benchmarks/gpu.py --markdown $(ARGS)

# Time to plain DDP's loss with torch's hooks, Accelerate, torchft, hivemind and ours: two hours. Needs Linux and root.
# make bench-peers ARGS="--ranks 2 --parts time"; --parts alone prints the table of what is finished.
bench-peers: .venvs/peers/.ready
	@PYTHONPATH=. .venvs/peers/bin/python benchmarks/peers.py $(ARGS)

.venvs/peers/.ready: benchmarks/peers-requirements.txt constraints-dev.txt
	@$(PYTHON) -m venv .venvs/peers
	.venvs/peers/bin/python -m pip install --constraint constraints-dev.txt --requirement benchmarks/peers-requirements.txt --editable .
	@touch $@

# Builds dist/, and installs the wheel into an empty environment per front end, where two ranks train: some minutes.
# make wheel-test ARGS="plain lightning"
wheel-test: $(READY)
	@rm -rf dist
	@$(PY) -m build
	@$(PY) .ci/wheel_test.py $(ARGS)

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m basedpyright --pythonpath $(abspath $(PY))
	$(VENV)/bin/lint-imports --no-logo

# The site in site/; a link that leads nowhere is an error. docs-serve shows it on http://127.0.0.1:8000 while it is edited.
# zensical, the generator, needs Python 3.11.
docs: $(READY)
	@$(PY) -m zensical build --strict --clean

docs-serve: $(READY)
	@$(PY) -m zensical serve

venv: $(READY)

clean:
	rm -rf $(VENV) .venvs build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Installed once, and again when what is asked for changes. An environment that works is kept and only updated.
# The demo needs a third of the packages; the others come when something else is asked for.
$(READY_FOR_DEMO): pyproject.toml constraints-dev.txt
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "No '$(PYTHON)' found: install Python 3.10 or newer, or name one with 'make PYTHON=/path/to/python3'." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "commhooks needs Python 3.10 or newer, and '$(PYTHON)' is older: name a newer one with 'make PYTHON=python3.11'." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "'$(PYTHON)' cannot create virtual environments: install its venv package ('apt-get install python3-venv' on Debian and Ubuntu)." >&2; exit 1; }
	@echo "Setting up $(VENV): this is done once, downloads PyTorch and takes some minutes."
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install "pip>=23"
	$(PY) -m pip install --constraint constraints-dev.txt --editable ".[demo]"
	@touch $@

$(READY): $(READY_FOR_DEMO)
	@echo "Adding to $(VENV) what the tests, the linters and the site need: this is done once, too."
	$(PY) -m pip install --constraint constraints-dev.txt --editable ".[dev]"
	@touch $@
