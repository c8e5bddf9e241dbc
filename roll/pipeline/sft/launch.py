"""Reads the conversations, sets the SFT pipeline up on its clusters and runs it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from roll.configs.batches import describe_batches
from roll.configs.data import DataArguments
from roll.configs.prompts import REWARD_CLUSTER, ROLLOUT_CLUSTER
from roll.configs.sft import SFTConfig
from roll.data.conversations import Conversations, Scoring, load_conversations
from roll.data.prompts import Prompt
from roll.data.renderer import ChatRenderer
from roll.distributed.cluster.cluster import Cluster
from roll.pipeline.launch import EXIT_USAGE, MODEL_WORKERS, WorkerClasses, launch
from roll.pipeline.programs import SFT
from roll.pipeline.prompt_roles import PromptRoles
from roll.pipeline.rlvr.datasets import load_renderer, make_data
from roll.pipeline.roles import Roles
from roll.pipeline.session import RunSession
from roll.pipeline.sft.pipeline import SFTPipeline
from roll.pipeline.sft.training import SupervisedTraining, steps_per_epoch
from roll.pipeline.start import Start
from roll.rollout.prompt_worker import PromptWorker
from roll.rollout.reward_worker import RewardWorker
from roll.utils.seeding import derive_seed
from roll.utils.signals import SignalGuard


@dataclass(frozen=True)
class Datasets:
    """What is imitated and what is held out."""

    train: Conversations | None
    """``None`` with ``eval_only``."""
    val: Conversations | None
    questions: tuple[Prompt, ...] | None
    """Held-out questions to answer, where something generates."""

    def describe(self) -> list[str]:
        """What was read, a line for each dataset."""
        found = {"training data": self.train, "held-out data": self.val}
        return [f"{name}: {data.report}" for name, data in found.items() if data is not None]


def run_sft(config: SFTConfig, started: float | None = None) -> int:
    """Runs the SFT pipeline to its end and returns the exit code, see ``launch``; 2 for wrong data."""
    try:
        if config.data_generator is not None:
            make_data(config.data_generator)
        datasets = load_datasets(config, load_renderer(config))
    except (OSError, ValueError) as error:  # a DataError is a ValueError
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    if config.num_train_epochs is not None and datasets.train is not None:
        batch_size = config.actor_train.global_train_batch_size
        steps = config.num_train_epochs * steps_per_epoch(datasets.train.batch.num_sequences, batch_size)
        config = config.model_copy(update={"max_steps": steps})
    workers: WorkerClasses = {
        **MODEL_WORKERS,
        ROLLOUT_CLUSTER: PromptWorker,
        **{f"{REWARD_CLUSTER}{name}": RewardWorker for name in config.rewards},
    }
    notes = [*describe_batches(config), *datasets.describe()]
    return launch(config, SFT, partial(_run, datasets=datasets), workers, notes=notes, started=started)


def load_datasets(config: SFTConfig, renderer: ChatRenderer) -> Datasets:
    """The conversations that the run needs.

    Raises:
        DataError: everything that is wrong in the files, by file and line.
    """
    train = None if config.eval_only else _load(config, config.actor_train.data_args, renderer)
    validation = config.validation
    if validation is None:
        return Datasets(train, None, None)
    scoring = Scoring(tuple(config.domains), validation.solution) if config.rewards else None
    val = _load(config, validation.data_args, renderer, scoring)
    if config.actor_infer is None:
        return Datasets(train, val, None)
    fitting = (p for p in val.questions if len(renderer.prompt(p.messages)) <= config.prompt_length)
    questions = tuple(prompt for prompt, _ in zip(fitting, range(validation.num_answers), strict=False))
    if not questions:
        raise ValueError(
            f"prompt_length: seen {config.prompt_length}, expected room for at least one of the held-out questions"
        )
    return Datasets(train, val, questions)


def _load(
    config: SFTConfig, data: DataArguments, renderer: ChatRenderer, scoring: Scoring | None = None
) -> Conversations:
    return load_conversations(
        data,
        renderer=renderer,
        max_tokens=config.sequence_length,
        overflow=config.sample_overflow,
        last_only=config.train_on == "last",
        scoring=scoring,
        seed=config.seed,
    )


def _run(
    config: SFTConfig,
    session: RunSession,
    signals: SignalGuard,
    clusters: Mapping[str, Cluster],
    start: Start,
    *,
    datasets: Datasets,
) -> None:
    model_path = start.model_path
    roles = Roles(config, clusters)
    prompts = None
    if datasets.questions is not None:
        prompts = PromptRoles(config, clusters, roles, model_path, None, datasets.questions, on_tick=signals.check)
        prompts.begin_setup()
    training = None
    with session.phase("setup"):
        roles.setup(model_path, model_path, config.total_optimizer_steps)
        if datasets.train is not None:
            training = SupervisedTraining(
                roles.actor,
                datasets.train.batch,
                batch_size=config.actor_train.global_train_batch_size,
                max_steps=config.max_steps,
                seed=derive_seed(config.seed, "sft"),
                loss_agg_mode=config.loss_agg_mode,
            )
        if prompts is not None:
            prompts.wait_ready()
    held_out = datasets.val.batch if datasets.val is not None else None
    if held_out is not None:
        held_out = held_out.select(torch.arange(min(config.val_batch_size, held_out.num_sequences)))
    SFTPipeline(config, session, roles, signals, training, held_out, prompts).run()
