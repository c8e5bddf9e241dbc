"""Sets the agentic pipeline up on its clusters and runs it."""

from __future__ import annotations

from roll.algorithms.losses import policy_needs
from roll.configs.agentic import JUDGE_CLUSTER, MANAGERS, AgenticConfig
from roll.configs.batches import describe_batches
from roll.pipeline.agentic.env_roles import EnvRoles
from roll.pipeline.agentic.pipeline import AgenticPipeline
from roll.pipeline.launch import MODEL_WORKERS, WorkerClasses, launch
from roll.pipeline.programs import AGENTIC
from roll.pipeline.rl import set_losses
from roll.pipeline.start import Launched
from roll.rollout.env_worker import EnvironmentWorker
from roll.rollout.reward_worker import JudgeWorker


def run_agentic(config: AgenticConfig, started: float | None = None) -> int:
    """Runs the agentic pipeline to its end and returns the exit code, see ``launch``."""
    players = dict.fromkeys(MANAGERS, EnvironmentWorker)
    workers: WorkerClasses = {**MODEL_WORKERS, **players, JUDGE_CLUSTER: JudgeWorker}
    needs, notes = policy_needs(config), describe_batches(config)
    return launch(config, AGENTIC, _run, workers, needs=needs, notes=notes, started=started)


def _run(config: AgenticConfig, run: Launched) -> None:
    envs = EnvRoles(config, run)
    envs.probe()
    envs.begin_setup()
    with run.set_up(config, envs):
        set_losses(run.roles, config)
    AgenticPipeline(config, run, envs).run()
