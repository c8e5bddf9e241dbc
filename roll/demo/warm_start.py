"""``pretrain: tiny`` (or ``tiny_vl``): creates the embedded model and, before RL begins, trains it on demonstrations.

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
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from roll.algorithms.losses import build_sft_loss
from roll.configs.agentic import AgenticConfig
from roll.configs.data import DataArguments
from roll.configs.distill import DistillConfig
from roll.configs.pipeline import TINY_VL, PipelineConfig, SupervisedStartConfig
from roll.configs.preference import DPOConfig
from roll.configs.rlvr import RLVRConfig
from roll.configs.tools import ToolConfig, ToolsConfig
from roll.configs.worker import TrainingArguments
from roll.data.batch import Batch
from roll.data.conversations import load_conversations
from roll.demo.scripted_play import ScriptedPlay
from roll.models.tiny import RECIPE_VERSION, make_tiny_model, picture_config
from roll.pipeline.agentic import AgenticRolloutWorkers
from roll.pipeline.offline.pipeline import OfflineTraining
from roll.pipeline.prompts import PromptRolloutWorkers
from roll.pipeline.roles import Roles
from roll.pipeline.rollout_workers import RolloutWorkers
from roll.pipeline.session import RunFailedError, RunSession
from roll.pipeline.start import Start
from roll.preflight.templates import policy_renderer
from roll.rollout.metrics import rollout_metrics
from roll.rollout.rows import groups_to_batch
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.tool_box import told_tools
from roll.rollout.types import RolloutGroup
from roll.utils.hashing import derive_seed

logger = logging.getLogger(__name__)

REPORT = "warm_start.json"

RolesT = TypeVar("RolesT", bound=RolloutWorkers)


class WarmStartError(RunFailedError):
    """The warm start missed the window of success that the configuration asks for."""


class Untaught(Start):
    """The tiny model with random weights, created if it does not exist."""

    def __init__(self, config: PipelineConfig) -> None:
        self.config = config
        self.folder = _folder(config, self.recipe())
        init = self.folder / "init"
        if not (init / "config.json").exists():
            init.parent.mkdir(parents=True, exist_ok=True)
            pictures = config.pretrain == TINY_VL
            make_tiny_model(init, derive_seed(config.seed, "tiny"), *config.tiny_sizes, pictures=pictures)
        super().__init__(str(init))

    def recipe(self) -> Mapping[str, Any]:
        """JSON values that its weights depend on, beside the model itself."""
        return {}


class WarmStart(Untaught, Generic[RolesT]):
    """The tiny model after supervised training on demonstrations. Subclasses provide them and measure success."""

    config: AgenticConfig | RLVRConfig | DistillConfig | DPOConfig

    @property
    def settings(self) -> SupervisedStartConfig:
        """Length of learning, and the window of success to end in."""
        return self.config.warm_start

    @property
    def min_valid(self) -> float:
        """Least share of answers in the right format."""
        return 0.0

    @abstractmethod
    def demonstrations(self, rollouts: RolesT) -> Batch:
        """Samples to imitate: the tokens with loss mask 1. Made while the policy is being loaded."""

    @abstractmethod
    def measurement(self, rollouts: RolesT) -> RolloutScheduler:
        """Plays the episodes that tell the current policy's success."""

    def weights(self, session: RunSession, roles: Roles, rollouts: RolesT | None) -> str:
        """The warm-started model, trained if it is not there.

        Raises:
            WarmStartError: success or format ended outside the window.
            RunFailedError: it is not there, and no rollout workers are.
        """
        warm = self.folder / "warm"
        if (warm / REPORT).exists():
            logger.info("warm start: using %s", warm)
            return str(warm)
        if rollouts is None:
            raise RunFailedError(f"{warm}: the model that the run started from is gone, and nothing is played here")
        with session.phase("warm start"):
            roles.begin_policy(self.model_path, self.settings.max_steps, self._training_args())
            rollouts.wait_ready()
            demonstrations = self.demonstrations(rollouts)
            roles.finish_policy()
            roles.preload()
            report = self._train(session, roles, rollouts, demonstrations)
            building = warm.with_name("warm.building")
            shutil.rmtree(building, ignore_errors=True)
            roles.actor.save_model(building)
            (building / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            shutil.rmtree(warm, ignore_errors=True)
            building.rename(warm)
        return str(warm)

    def _training_args(self) -> TrainingArguments:
        """The actor's, with the warm start's learning rate and the schedule that suits a short run."""
        return self.config.actor_train.training_args.model_copy(
            update={
                "learning_rate": self.settings.learning_rate,
                "weight_decay": 0.01,
                "adam_beta2": 0.98,
                "lr_scheduler_type": "linear",
                "warmup_steps": 20,
                "min_lr_ratio": 0.1,
            }
        )

    def _train(self, session: RunSession, roles: Roles, rollouts: RolesT, demonstrations: Batch) -> dict[str, float]:
        """Supervised steps until sampled success is in the middle of the window, measured on episodes of its own."""
        settings = self.settings
        measurement = self.measurement(rollouts)
        training = OfflineTraining(
            roles.actor,
            demonstrations,
            build_sft_loss,
            batch_size=settings.batch_size,
            max_steps=settings.max_steps,
            seed=derive_seed(self.config.seed, "warm start"),
        )
        goal = (settings.min_success + settings.max_success) / 2
        report: dict[str, float] = {}
        for start in range(0, settings.max_steps, settings.eval_steps):
            done = min(start + settings.eval_steps, settings.max_steps)
            last = training.train(start + 1, done)[-1]
            roles.sync_weights(done)
            report = {"steps": done, "loss": last["actor/loss"], **self._measure(measurement)}
            said = "warm start: step {steps}, loss {loss:.3f}, success {success:.1%}, valid {valid_rate:.1%}"
            session.display.note(said.format(**report))
            if report["success"] >= goal and report["valid_rate"] >= self.min_valid:
                break
        self._check(report)
        return report

    def _measure(self, measurement: RolloutScheduler) -> dict[str, float]:
        groups = measurement.collect(self.settings.eval_episodes)
        if not any(group.trajectories for group in groups):
            raise WarmStartError(f"no episode could be run: {groups[-1].errors[-1]}")
        metrics = rollout_metrics(groups, "eval")
        return {"success": metrics["eval/success"], "valid_rate": metrics.get("eval/valid_rate", 0.0)}

    def _check(self, report: Mapping[str, float]) -> None:
        settings = self.settings
        in_window = settings.min_success <= report["success"] <= settings.max_success
        if not in_window or report["valid_rate"] < self.min_valid:
            raise WarmStartError(
                f"after {report['steps']:.0f} steps success is {report['success']:.1%} and valid answers are "
                f"{report['valid_rate']:.1%}; expected {settings.min_success:.0%} to {settings.max_success:.0%} and at "
                f"least {self.min_valid:.0%} (warm_start.min_success, max_success, min_valid)"
            )


class PlayStart(WarmStart[AgenticRolloutWorkers]):
    """Imitates scripted play in the training environments, part optimal and part random."""

    config: AgenticConfig

    def recipe(self) -> Mapping[str, Any]:
        config, manager = self.config, self.config.train_env_manager
        return {
            "warm_start": config.warm_start.model_dump(mode="json"),
            "tags": {tag: config.custom_envs[tag].model_dump(mode="json") for tag in manager.tags},
            **({} if manager.tag_weights is None else {"tag_weights": manager.tag_weights}),
        }

    @property
    def min_valid(self) -> float:
        return self.config.warm_start.min_valid

    def demonstrations(self, rollouts: AgenticRolloutWorkers) -> Batch:
        """Scripted turns; each episode starts from a board of its own.

        Raises:
            WarmStartError: no episode could be played.
        """
        settings, manager = self.config.warm_start, self.config.train_env_manager
        slots = tuple(groups * manager.group_size for groups in manager.groups_per_tag.values())
        name = "train_env_manager"
        player = ScriptedPlay(settings.expert_share)
        plan = rollouts.plan(name, "demonstrations", group_size=1, redundancy=0, slots_per_tag=slots, player=player)
        scheduler = rollouts.make_scheduler(plan, name)
        groups: list[RolloutGroup] = []
        turns = 0
        while turns < settings.demonstrations:
            played = scheduler.collect(plan.num_slots, first=len(groups))
            groups += played
            if not any(group.trajectories for group in played):
                raise WarmStartError(f"no demonstration could be run: {played[-1].errors[-1]}")
            turns += sum(len(trajectory.turns) for group in played for trajectory in group.trajectories)
        return groups_to_batch(groups, list(self.config.custom_envs))

    def measurement(self, rollouts: AgenticRolloutWorkers) -> RolloutScheduler:
        return rollouts.scheduler("train_env_manager", "warm start measurement", group_size=1, redundancy=0)


class AnswersStart(WarmStart[PromptRolloutWorkers]):
    """Imitates a file's responses. The right format is part of a right answer."""

    config: RLVRConfig | DistillConfig | DPOConfig

    def recipe(self) -> Mapping[str, Any]:
        config = self.config
        content = Path(config.warm_start.file_name).expanduser().read_bytes()
        tools = config.tools if isinstance(config, RLVRConfig) else None
        return {
            "warm_start": config.warm_start.model_dump(mode="json"),
            "demonstrations": hashlib.blake2b(content, digest_size=8).hexdigest(),
            **({} if tools is None else {"tools": tools.model_dump(mode="json")}),
        }

    def demonstrations(self, rollouts: PromptRolloutWorkers) -> Batch:
        """The file's rows, as SFT reads them.

        Raises:
            DataError: rows without the two columns, or longer than ``sequence_length``.
        """
        config, settings = self.config, self.config.warm_start
        told = (
            {"messages": settings.messages}
            if settings.messages
            else settings.model_dump(include={"prompt", "response"})
        )
        own = {name.rpartition(":")[2]: ToolConfig(tool=name) for name in settings.tools}
        run_tools = config.tools if isinstance(config, RLVRConfig) else None
        (tools,) = told_tools(ToolsConfig(use=own) if own else run_tools, [""]).values() or [None]
        return load_conversations(
            DataArguments(file_name=settings.file_name, **told),
            renderer=policy_renderer(config),
            max_tokens=config.sequence_length,
            tools=tools,
        ).batch

    def measurement(self, rollouts: PromptRolloutWorkers) -> RolloutScheduler:
        """One sampled answer to each of some training prompts."""
        return rollouts.measuring(self.settings.eval_episodes, derive_seed(self.config.seed, "warm start measurement"))


class TaughtStart(AnswersStart):
    """Imitates a file's responses, if one is given, and measures responses to held-out questions."""

    config: DistillConfig | DPOConfig

    @property
    def _taught(self) -> bool:
        return bool(self.config.warm_start.file_name)

    def recipe(self) -> Mapping[str, Any]:
        return super().recipe() if self._taught else {}

    def weights(self, session: RunSession, roles: Roles, rollouts: PromptRolloutWorkers | None) -> str:
        return super().weights(session, roles, rollouts) if self._taught else self.model_path


def _folder(config: PipelineConfig, recipe: Mapping[str, Any]) -> Path:
    """Folder of this recipe's model: ``init`` (untrained) and ``warm`` below it."""
    full = {
        "version": RECIPE_VERSION,
        "seed": config.seed,
        "heads": config.tiny_num_heads,
        "units": config.tiny_hidden_size,
        "layers": config.tiny_num_layers,
        "template": config.actor_train.data_args.template,
        **({"variables": variables} if (variables := config.actor_train.data_args.chat_template_kwargs) else {}),
        "temperature": config.scoring_temperature,
        **({"tower": picture_config()["vision_config"]} if config.pretrain == TINY_VL else {}),
        **recipe,
    }
    digest = hashlib.blake2b(json.dumps(full, sort_keys=True).encode(), digest_size=6).hexdigest()
    return Path(config.output_dir).expanduser().resolve() / "tiny" / digest
