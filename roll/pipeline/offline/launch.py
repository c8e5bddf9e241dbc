"""Reads the samples, sets a pipeline up on its clusters and runs it: what SFT, preferences and reward models share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from roll.algorithms.quantities import Quantity, logprobs
from roll.configs.batches import describe_batches
from roll.configs.data import DataArguments
from roll.configs.distill import DistillConfig
from roll.configs.offline import OfflineConfig, SFTConfig
from roll.data.batch import Batch
from roll.data.conversations import Conversations, Scoring, load_conversations
from roll.data.prompts import Prompt
from roll.data.renderer import ChatRenderer
from roll.data.row_pictures import with_items
from roll.pipeline.cli import EXIT_USAGE
from roll.pipeline.launch import launch
from roll.pipeline.offline.pipeline import OfflinePipeline, Parts
from roll.pipeline.offline.training import first_samples, steps_per_epoch
from roll.pipeline.programs import Program
from roll.pipeline.prompts import (
    TRIAL_SECONDS,
    Datasets,
    PromptRolloutWorkers,
    make_data,
    prompt_workers,
    tell,
)
from roll.pipeline.start import RunContext
from roll.preflight.models import pictures_refused
from roll.preflight.templates import policy_renderer
from roll.rewards.scoring import References

ConfigT = TypeVar("ConfigT", bound=OfflineConfig)
Load = Callable[[ConfigT, DataArguments, ChatRenderer, "Scoring | None"], Conversations]
"""Reads one dataset; with ``Scoring``, the questions in it bring what verifiers of answers want."""


@dataclass(frozen=True)
class Samples(Datasets[Conversations]):
    """The samples of a run, and what is measured on the held-out ones."""

    held_out: Batch | None
    """Those of ``val`` that are measured."""
    questions: tuple[Prompt, ...] | None
    """Held-out questions to answer, where something generates."""


Build: TypeAlias = Callable[[ConfigT, Parts], "OfflinePipeline | None"]
"""Makes the pipeline once the models are there; ``None``: all that was wanted is done."""


def run_offline(
    config: ConfigT,
    program: Program,
    load: Load[ConfigT],
    build: Build[ConfigT],
    started: float | None,
    check: Callable[[ConfigT, Samples], None] | None = None,
    *,
    needs: tuple[Quantity, ...] = (logprobs,),
) -> int:
    """Runs a pipeline to its end and returns the exit code, see ``launch``; 2 for wrong data.

    Args:
        check: raises ``ValueError`` where the run could not use what was read.
        needs: what the loss takes from the trained model, but for the comparison with a teacher.
    """
    try:
        if config.data_generator is not None:
            make_data(config.data_generator)
        datasets = load_datasets(config, policy_renderer(config), load)
        if check is not None:
            check(config, datasets)
    except (OSError, ValueError) as error:  # a DataError is a ValueError
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    if config.num_train_epochs is not None and datasets.train is not None:
        per_epoch = steps_per_epoch(len(datasets.train.batch.samples), config.actor_train.global_train_batch_size)
        config = config.model_copy(update={"max_steps": config.num_train_epochs * per_epoch})
    notes = [*describe_batches(config), *datasets.describe()]
    body = partial(_run, datasets=datasets, build=build)
    workers, data = prompt_workers(config), datasets.identities()
    return launch(config, program, body, workers, needs=needs, notes=notes, started=started, data=data)


def load_datasets(config: ConfigT, renderer: ChatRenderer, load: Load[ConfigT]) -> Samples:
    """The samples that the run needs.

    Raises:
        DataError: everything that is wrong in the files, by file and line.
    """
    train = None if config.eval_only else load(config, config.actor_train.data_args, renderer, None)
    validation = config.validation
    if validation is None:
        return Samples(train, None, None, None)
    scoring = None
    if config.rewards:
        references = References(config.rewards, TRIAL_SECONDS, tell, tell)
        scoring = Scoring(tuple(config.domains), validation.solution, references)
    val = load(config, validation.data_args, renderer, scoring)
    held_out = first_samples(val.batch, config.val_batch_size)
    if config.actor_infer is None:
        return Samples(train, val, held_out, None)
    asked = (p for p in val.questions if p.messages and p.messages[-1]["role"] != "assistant")
    fitting = (p for p in asked if _length(renderer, p) <= config.prompt_length)
    questions = tuple(prompt for prompt, _ in zip(fitting, range(validation.num_answers), strict=False))
    if not questions:
        raise ValueError(
            f"prompt_length: got {config.prompt_length}, expected room for at least one of the held-out questions"
        )
    return Samples(train, val, held_out, questions)


def _length(renderer: ChatRenderer, prompt: Prompt) -> int:
    return len(renderer.prompt(with_items(prompt.messages, renderer.pictures, blank=True), prompt.tools))


def _run(config: ConfigT, run: RunContext, *, datasets: Samples, build: Build[ConfigT]) -> None:
    run.roles.pictures = datasets.have_pictures
    prompts = None
    if datasets.questions is not None:
        prompts = PromptRolloutWorkers(config, run, None, datasets.questions)
        prompts.begin_setup()
    train = None if datasets.train is None else datasets.train.batch
    with run.set_up(config, prompts) as (model_path, teacher_path):
        pipeline = build(config, Parts(run, train, datasets.held_out, prompts, model_path, teacher_path))
    if pipeline is not None:
        pipeline.run()


def load_sft_data(
    config: SFTConfig | DistillConfig, data: DataArguments, renderer: ChatRenderer, scoring: Scoring | None = None
) -> Conversations:
    """Reads conversations; what is learnt of them is as ``train_on`` and ``distill_on_prompt`` say.

    Raises:
        DataError: everything that is wrong in the files.
    """
    return load_conversations(
        data,
        renderer=renderer,
        max_tokens=config.sequence_length,
        overflow=config.sample_overflow,
        last_only=config.train_on == "last",
        whole=isinstance(config, DistillConfig) and config.distill_on_prompt,
        scoring=scoring,
        seed=config.seed,
        no_pictures=pictures_refused(config),
    )
