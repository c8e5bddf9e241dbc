"""``pretrain: tiny``: makes the embedded model and teaches it the task's language before RL begins.

It imitates imperfect demonstrations, so the policy learns the answer format and a little of the task: enough success to
learn from, and most of the task still to learn. It trains as the SFT pipeline does, on the run's own workers, which
also measure it.
Everything is kept under ``output_dir/tiny/`` and used again by runs with the same recipe.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from roll.configs.pipeline import PipelineConfig
from roll.configs.rl import RLConfig
from roll.configs.training import TrainingArguments
from roll.configs.warm_start import SupervisedStartConfig
from roll.data.batch import Batch
from roll.models.tiny import RECIPE_VERSION, make_tiny_model
from roll.pipeline.roles import Roles
from roll.pipeline.session import RunFailedError, RunSession
from roll.pipeline.sft.training import SupervisedTraining
from roll.utils.seeding import derive_seed

logger = logging.getLogger(__name__)

REPORT = "warm_start.json"


class WarmStartError(RunFailedError):
    """The warm start missed the window of success that the configuration asks for."""


class Teacher(Protocol):
    """What a pipeline brings to its warm start."""

    @property
    def settings(self) -> SupervisedStartConfig:
        """How long to learn, and the window of success to end in."""

    @property
    def min_valid(self) -> float:
        """Least share of answers in the right format."""

    def demonstrations(self) -> Batch:
        """What to imitate: the tokens with loss mask 1."""

    def measure(self, num_episodes: int) -> tuple[float, float]:
        """The current policy's sampled success, and the share of its answers that are in the right format."""


def tiny_folder(config: PipelineConfig, recipe: Mapping[str, Any]) -> Path:
    """Where the model of this recipe lives: ``init`` (untrained) and ``warm`` below it.

    Args:
        config: the run's configuration.
        recipe: what else the warm start depends on, JSON values.
    """
    full = {
        "version": RECIPE_VERSION,
        "seed": config.seed,
        "heads": config.tiny_num_heads,
        "template": config.actor_train.data_args.template,
        "temperature": config.scoring_temperature,
        **recipe,
    }
    digest = hashlib.blake2b(json.dumps(full, sort_keys=True).encode(), digest_size=6).hexdigest()
    return Path(config.output_dir).expanduser().resolve() / "tiny" / digest


def ensure_init(folder: Path, config: PipelineConfig) -> Path:
    """The untrained model, made if it is not there."""
    path = folder / "init"
    if not (path / "config.json").exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        make_tiny_model(path, derive_seed(config.seed, "tiny"), config.tiny_num_heads)
    return path


def ensure_warm(folder: Path, config: RLConfig, session: RunSession, roles: Roles, teacher: Teacher) -> Path:
    """The warm-started model, trained if it is not there.

    Args:
        folder: see ``tiny_folder``.
        config: the run's configuration.
        session: shows and times the phases.
        roles: the run's roles; they are set up anew afterwards.
        teacher: demonstrations and measurements; asked only once the policy's roles are set up.

    Raises:
        WarmStartError: success or format ended outside the window.
    """
    init, warm = ensure_init(folder, config), folder / "warm"
    if (warm / REPORT).exists():
        logger.info("warm start: using %s", warm)
        return warm
    with session.phase("warm start"):
        roles.setup_policy(str(init), teacher.settings.max_steps, _training_args(config, teacher.settings))
        report = _train(config, session, roles, teacher)
        building = warm.with_name("warm.building")
        shutil.rmtree(building, ignore_errors=True)
        roles.actor.save_model(building)
        (building / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        shutil.rmtree(warm, ignore_errors=True)
        building.rename(warm)
    return warm


def _training_args(config: RLConfig, settings: SupervisedStartConfig) -> TrainingArguments:
    """The actor's, with the warm start's learning rate and the schedule that suits a short run."""
    return config.actor_train.training_args.model_copy(
        update={
            "learning_rate": settings.learning_rate,
            "weight_decay": 0.01,
            "adam_beta2": 0.98,
            "lr_scheduler_type": "linear",
            "warmup_steps": 20,
            "min_lr_ratio": 0.1,
        }
    )


def _train(config: RLConfig, session: RunSession, roles: Roles, teacher: Teacher) -> dict[str, float]:
    """Supervised steps until sampled success is in the middle of the window, measured on episodes of its own."""
    settings = teacher.settings
    training = SupervisedTraining(
        roles.actor,
        teacher.demonstrations(),
        batch_size=settings.batch_size,
        max_steps=settings.max_steps,
        seed=derive_seed(config.seed, "warm start"),
    )
    goal = (settings.min_success + settings.max_success) / 2
    report: dict[str, float] = {}
    for start in range(0, settings.max_steps, settings.eval_steps):
        done = min(start + settings.eval_steps, settings.max_steps)
        history = training.train(start + 1, done)
        roles.sync_weights(done)
        success, valid_rate = teacher.measure(settings.eval_episodes)
        report = {"steps": done, "loss": history[-1]["actor/loss"], "success": success, "valid_rate": valid_rate}
        session.display.note(
            "warm start: step {steps}, loss {loss:.3f}, success {success:.1%}, valid {valid_rate:.1%}".format(**report)
        )
        if success >= goal and valid_rate >= teacher.min_valid:
            break
    if (
        not settings.min_success <= report["success"] <= settings.max_success
        or report["valid_rate"] < teacher.min_valid
    ):
        raise WarmStartError(
            f"after {report['steps']:.0f} steps success is {report['success']:.1%} and valid answers are "
            f"{report['valid_rate']:.1%}; expected {settings.min_success:.0%} to {settings.max_success:.0%} and at "
            f"least {teacher.min_valid:.0%} (warm_start.min_success, max_success, min_valid)"
        )
    return report
