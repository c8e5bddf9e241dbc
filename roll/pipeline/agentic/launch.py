"""Sets the agentic pipeline up on its clusters and runs it."""

from __future__ import annotations

from collections.abc import Mapping

from roll.configs.agentic import JUDGE_CLUSTER, MANAGERS, AgenticConfig
from roll.configs.batches import describe_batches
from roll.distributed.cluster.cluster import Cluster
from roll.pipeline.agentic.env_roles import EnvRoles
from roll.pipeline.agentic.pipeline import AgenticPipeline
from roll.pipeline.launch import MODEL_WORKERS, WorkerClasses, launch
from roll.pipeline.programs import AGENTIC
from roll.pipeline.rl import set_losses
from roll.pipeline.roles import Roles
from roll.pipeline.session import RunSession
from roll.pipeline.start import Start, teacher_weights
from roll.rollout.env_worker import EnvironmentWorker
from roll.rollout.judge_worker import JudgeWorker
from roll.utils.signals import SignalGuard


def run_agentic(config: AgenticConfig, started: float | None = None) -> int:
    """Runs the agentic pipeline to its end and returns the exit code, see ``launch``."""
    players = dict.fromkeys(MANAGERS, EnvironmentWorker)
    workers: WorkerClasses = {**MODEL_WORKERS, **players, JUDGE_CLUSTER: JudgeWorker}
    return launch(config, AGENTIC, _run, workers, notes=describe_batches(config), started=started)


def _run(
    config: AgenticConfig, session: RunSession, signals: SignalGuard, clusters: Mapping[str, Cluster], start: Start
) -> None:
    roles = Roles(config, clusters)
    envs = EnvRoles(config, clusters, roles, config.tokenizer_path or start.model_path, on_tick=signals.check)
    envs.probe()
    envs.begin_setup()
    teacher_path = teacher_weights(config, AGENTIC, session, roles, envs)
    model_path = start.weights(session, roles, envs)
    with session.phase("setup"):
        roles.setup(model_path, config.total_optimizer_steps, teacher_path)
        set_losses(roles, config)
        envs.wait_ready()
    AgenticPipeline(config, session, roles, signals, envs).run()
