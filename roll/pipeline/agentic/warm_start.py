"""``pretrain: tiny``: makes the embedded model and teaches it the game's language before RL begins.

The demonstrations are half optimal and half random, so the policy learns the answer format and a little of the game:
enough success to learn from, and most of the task still to learn. Training, generation and measurement are the run's
own workers. Everything is kept under ``output_dir/tiny/`` and used again by runs with the same recipe.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from pathlib import Path

from roll.agentic.metrics import rollout_metrics
from roll.agentic.trajectory import groups_to_batch
from roll.agentic.types import RolloutGroup
from roll.algorithms.losses import build_sft_loss
from roll.configs.agentic import AgenticConfig
from roll.configs.training import TrainingArguments
from roll.data.batch import Batch
from roll.models.tiny import RECIPE_VERSION, make_tiny_model
from roll.pipeline.agentic.env_roles import EnvRoles
from roll.pipeline.model_cluster import plan_optimizer_steps
from roll.pipeline.roles import Roles
from roll.pipeline.session import RunFailedError, RunSession
from roll.utils.seeding import derive_seed

logger = logging.getLogger(__name__)

REPORT = "warm_start.json"


class WarmStartError(RunFailedError):
    """The warm start missed the window of success that the configuration asks for."""


def tiny_folder(config: AgenticConfig) -> Path:
    """Where the model of this recipe lives: ``init`` (untrained) and ``warm`` below it."""
    recipe = {
        "version": RECIPE_VERSION,
        "seed": config.seed,
        "warm_start": config.warm_start.model_dump(mode="json"),
        "tags": {tag: config.custom_envs[tag].model_dump(mode="json") for tag in config.train_env_manager.tags},
        "template": config.actor_train.data_args.template,
        "temperature": config.actor_infer.generating_args.temperature,
    }
    digest = hashlib.blake2b(json.dumps(recipe, sort_keys=True).encode(), digest_size=6).hexdigest()
    return Path(config.output_dir).expanduser().resolve() / "tiny" / digest


def ensure_init(config: AgenticConfig) -> Path:
    """The untrained model's folder, made if it is not there."""
    path = tiny_folder(config) / "init"
    if not (path / "config.json").exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        make_tiny_model(path, seed=derive_seed(config.seed, "tiny"))
    return path


def ensure_warm(config: AgenticConfig, session: RunSession, roles: Roles, envs: EnvRoles) -> Path:
    """The warm-started model's folder, trained if it is not there.

    Args:
        config: the run's configuration.
        session: shows and times the phases.
        roles: the run's roles; they are set up anew afterwards.
        envs: the environment managers, being set up.

    Raises:
        WarmStartError: success or valid actions ended outside the window of ``warm_start``.
    """
    init, warm = ensure_init(config), tiny_folder(config) / "warm"
    if (warm / REPORT).exists():
        logger.info("warm start: using %s", warm)
        return warm
    settings = config.warm_start
    with session.phase("warm start"):
        roles.setup_policy(str(init), settings.max_steps, _training_args(config))
        roles.actor.call("set_loss", build_sft_loss)
        envs.wait_ready()
        report = _train(config, session, roles, envs, _demonstrate(config, envs))
        building = warm.with_name("warm.building")
        shutil.rmtree(building, ignore_errors=True)
        roles.actor.save(building)
        (building / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(warm, ignore_errors=True)
        building.rename(warm)
    return warm


def _training_args(config: AgenticConfig) -> TrainingArguments:
    """The actor's, with the warm start's learning rate and the schedule that suits a short run."""
    return config.actor_train.training_args.model_copy(
        update={
            "learning_rate": config.warm_start.learning_rate,
            "weight_decay": 0.01,
            "adam_beta2": 0.98,
            "lr_scheduler_type": "linear",
            "warmup_steps": 20,
            "min_lr_ratio": 0.1,
        }
    )


def _demonstrate(config: AgenticConfig, envs: EnvRoles) -> Batch:
    """Scripted turns to learn from; each episode starts from a board of its own."""
    manager = config.train_env_manager
    scheduler = envs.scheduler(
        "train_env_manager",
        "demonstrations",
        group_size=1,
        redundancy=0,
        slots_per_tag=tuple(groups * manager.group_size for groups in manager.groups_per_tag.values()),
        expert_share=config.warm_start.expert_share,
    )
    groups: list[RolloutGroup] = []
    turns = 0
    while turns < config.warm_start.demonstrations:
        played = scheduler.collect(len(groups), scheduler.plan.num_slots)
        groups += played
        if not any(group.trajectories for group in played):
            raise WarmStartError(f"no demonstration could be played: {played[-1].errors[-1]}")
        turns += sum(len(trajectory.turns) for group in played for trajectory in group.trajectories)
    return groups_to_batch(groups, list(config.custom_envs))


def _train(
    config: AgenticConfig, session: RunSession, roles: Roles, envs: EnvRoles, demonstrations: Batch
) -> dict[str, float]:
    """Supervised steps until sampled success is in the middle of the window, measured on boards of its own."""
    settings = config.warm_start
    steps_per_epoch = max(1, demonstrations.num_sequences // settings.batch_size)
    epochs = -(-settings.max_steps // steps_per_epoch)
    steps = plan_optimizer_steps(
        demonstrations.num_sequences, steps_per_epoch, epochs, derive_seed(config.seed, "warm start")
    )[: settings.max_steps]
    measure = envs.scheduler("train_env_manager", "warm start measurement", group_size=1, redundancy=0)
    goal = (settings.min_success + settings.max_success) / 2
    report: dict[str, float] = {}
    for start in range(0, len(steps), settings.eval_steps):
        history = roles.actor.train(demonstrations, steps[start : start + settings.eval_steps])
        done = start + len(history)
        roles.sync_weights(done)
        metrics = rollout_metrics(measure.collect(0, settings.eval_episodes), "warm_start")
        report = {
            "steps": done,
            "loss": history[-1]["actor/loss"],
            "success": metrics["warm_start/success"],
            "valid_rate": metrics["warm_start/valid_rate"],
        }
        session.display.note(
            "warm start: step {steps}, loss {loss:.3f}, success {success:.1%}, valid {valid_rate:.1%}".format(**report)
        )
        if report["success"] >= goal and report["valid_rate"] >= settings.min_valid:
            break
    if (
        not settings.min_success <= report["success"] <= settings.max_success
        or report["valid_rate"] < settings.min_valid
    ):
        raise WarmStartError(
            f"after {report['steps']:.0f} steps success is {report['success']:.1%} and valid actions are "
            f"{report['valid_rate']:.1%}; expected {settings.min_success:.0%} to {settings.max_success:.0%} and at "
            f"least {settings.min_valid:.0%} (warm_start.min_success, max_success, min_valid)"
        )
    return report
