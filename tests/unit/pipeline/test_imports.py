"""What a process of a run imports: seconds of its start, in each of them."""

import subprocess
import sys
from pathlib import Path

import pytest

from roll.models.tiny import make_tiny_model

MODELS = {"transformers.modeling_utils", "transformers.generation", "torch._dynamo", "sympy"}

ENV_WORKER = """
import asyncio, sys
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
print(*sys.modules)
"""

PROMPT_WORKER = """
import sys
import roll.pipeline.workers
from roll.models.tokenizer import load_tokenizer
from roll.rollout.prompt_worker import PromptWorker
from roll.rollout.reward_worker import RewardWorker
load_tokenizer(sys.argv[1])
print(*sys.modules)
"""

DRIVER = """
import sys
import roll.demo.warm_start
import roll.pipeline.agentic, roll.pipeline.rlvr, roll.pipeline.offline.sft
print(*sys.modules)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(path, seed=0)
    return path


@pytest.mark.parametrize(
    ("code", "unneeded"),
    [(ENV_WORKER, {"torch", *MODELS}), (PROMPT_WORKER, {"torch", *MODELS}), (DRIVER, MODELS)],
    ids=["environments", "prompts", "driver"],
)
def test_a_process_without_a_model_imports_what_it_needs_and_no_models(code, unneeded, model):
    done = subprocess.run([sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not unneeded & set(done.stdout.split())
