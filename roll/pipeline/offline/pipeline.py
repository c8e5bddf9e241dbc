"""Runs on a fixed dataset: reading it, its optimizer steps, and evaluation on held-out samples and responses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor

from roll.algorithms.quantities import Quantity, logprobs
from roll.algorithms.types import LossContext, LossFn, TokenScores
from roll.configs.batches import describe_batches
from roll.configs.data import DataArguments
from roll.configs.distill import DistillConfig
from roll.configs.offline import OfflineConfig, SFTConfig
from roll.data.batch import Batch
from roll.data.conversations import Conversations, Scoring, load_conversations
from roll.data.prompts import Prompt
from roll.data.renderer import ChatRenderer
from roll.data.row_pictures import with_items
from roll.distributed.strategy.base import Metrics
from roll.pipeline.cli import EXIT_USAGE
from roll.pipeline.launch import launch
from roll.pipeline.loop import TrainingLoop, mean_metrics
from roll.pipeline.model_cluster import ModelCluster, plan_optimizer_steps
from roll.pipeline.programs import Program
from roll.pipeline.prompts import (
    TRIAL_SECONDS,
    Datasets,
    PromptRolloutWorkers,
    accuracy_metrics,
    check_error_rates,
    make_data,
    prompt_workers,
    tell,
)
from roll.pipeline.rollouts import MAX_SHOWN, collect, keep_episodes
from roll.pipeline.start import RunContext
from roll.preflight.models import media_refused
from roll.preflight.templates import policy_renderer
from roll.report.render import save_answers
from roll.rewards.scoring import References
from roll.rollout.metrics import rollout_metrics
from roll.utils.hashing import derive_seed

Prepare: TypeAlias = Callable[[Batch, Tensor], Batch]
"""Gets the rows of an optimizer step, and which of the dataset they are."""


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Optimizer steps of one pass; samples that do not fill another step are spread over the others."""
    return max(1, num_samples // batch_size)


def first_samples(batch: Batch, count: int | None) -> Batch:
    """At most ``count`` samples from the start; ``None``: all."""
    return batch.select(batch.samples[:count].flatten())


class OfflineTraining:
    """Trains a model on a fixed set of samples (rows, or pairs of them), in reshuffled epochs.

    Args:
        build_loss: makes the loss of its further arguments, in the trainers.
        batch_size: samples of an optimizer step, at least.
        prepare: adds to the samples of a step what depends on the model as it is then; ``None``: nothing does.
    """

    def __init__(
        self,
        actor: ModelCluster,
        data: Batch,
        build_loss: Callable[..., LossFn],
        *loss_args: Any,
        batch_size: int,
        max_steps: int,
        seed: int,
        prepare: Prepare | None = None,
    ) -> None:
        self._actor = actor
        self._data = data
        self._prepare = prepare
        self._samples = data.samples
        self._per_epoch = steps_per_epoch(len(self._samples), batch_size)
        epochs = -(-max_steps // self._per_epoch)
        self._steps = plan_optimizer_steps(len(self._samples), self._per_epoch, epochs, seed)[:max_steps]
        actor.call("set_loss", build_loss, *loss_args)

    def rows(self, step: int) -> Tensor:
        """int64: what optimizer step number ``step``, counted from 1, learns from."""
        return self._samples[self._steps[step - 1]].flatten()

    def batch(self, step: int) -> Batch:
        """The same, as it lies in the data."""
        return self._data.select(self.rows(step))

    def epochs(self, step: int) -> float:
        """Number of times that the data has been met after that many steps."""
        return step / self._per_epoch

    def train(self, first: int, last: int) -> list[Metrics]:
        """Takes the optimizer steps from number ``first`` to ``last``; the metrics of each."""
        steps = [self.rows(step) for step in range(first, last + 1)]
        if self._prepare is None:
            return self._actor.train(self._data, steps)
        history = []
        for rows in steps:
            batch = self._prepare(self._data.select(rows), rows)
            history += self._actor.train(batch, [torch.arange(batch.num_sequences)])
        return history


_OF_REWARDS = ("success", "reward", "task_reward", "penalty", "valid_rate")
"""Ends of the names of metrics that mean nothing where no verifier has judged."""


@dataclass(frozen=True)
class Parts:
    """Parts that a pipeline is made of."""

    run: RunContext
    """Its roles are set up with the starting weights."""
    train: Batch | None
    """``None`` with ``eval_only``."""
    held_out: Batch | None
    """Samples that are measured, if there are any."""
    prompts: PromptRolloutWorkers | None
    """Has held-out questions answered, if something generates."""
    model_path: str
    """Folder of the starting weights."""
    teacher_path: str | None
    """Folder or hub name of the teacher, where there is one."""


class OfflinePipeline(TrainingLoop):
    """Trains on a fixed dataset (see ``TrainingLoop``).

    Args:
        build_loss: makes the loss of its further arguments, here and in the trainers.
        prepare: see ``OfflineTraining``.
    """

    config: OfflineConfig
    area: ClassVar[str]
    """Start of the names of the training metrics."""
    order: ClassVar[str] = ""
    """Name of the order of the samples, which separates it from others of the run's seed; else ``area``."""
    shown: ClassVar[Mapping[str, str]]
    """Metrics of ``measure_held_out`` that the run's summary keeps: the name there, and the metric."""
    words: ClassVar[Mapping[str, str]]
    """The same for people: the metric without ``eval/``, and a text with a place for its value."""

    def __init__(
        self,
        config: OfflineConfig,
        parts: Parts,
        build_loss: Callable[..., LossFn],
        *loss_args: Any,
        prepare: Prepare | None = None,
    ) -> None:
        super().__init__(config, parts.run.session, parts.run.roles, parts.run.signals)
        self.held_out, self.prompts = parts.held_out, parts.prompts
        self.loss = build_loss(*loss_args)
        self.training: OfflineTraining | None = None
        if parts.train is not None:
            self.training = OfflineTraining(
                self.roles.actor,
                parts.train,
                build_loss,
                *loss_args,
                batch_size=config.actor_train.global_train_batch_size,
                max_steps=config.max_steps,
                seed=derive_seed(config.seed, self.order or self.area),
                prepare=prepare,
            )

    def measure_held_out(self, batch: Batch) -> Metrics:
        """Metrics of the held-out samples, ``eval/…``: those of one optimizer step on all of them."""
        return self.as_one_step(self.roles.actor.logprobs(batch), batch)

    def as_one_step(self, scores: TokenScores, batch: Batch) -> Metrics:
        """The training metrics, ``eval/…``, of held-out samples as one optimizer step."""
        found = self.loss(scores, batch, LossContext.of(batch)).metrics
        return {name.replace(f"{self.area}/", "eval/"): float(value) for name, value in found.items()}

    def step(self, step: int) -> None:
        assert self.training is not None, "eval_only takes no step"
        with self.signals.deferred():  # a stop in here waits: half an update cannot be saved
            with self.update(step), self.session.phase("train") as span:
                history = self.training.train(step, step)
                self.count_bad_steps(history)
                self.utilisation.trained(span, self.training.batch(step), metrics=mean_metrics(history))
            metrics = mean_metrics(history) | self.roles.offload_manager.memory("train")
            self.unreported = metrics | {f"{self.area}/epoch": self.training.epochs(step)}

    def evaluate(self, name: str, step: int) -> Metrics:
        """Measures the held-out samples, and has their last questions answered."""
        metrics: Metrics = {}
        words = []
        if self.held_out is not None:
            with self.session.phase("eval"):
                metrics |= self.measure_held_out(self.held_out)
            words += [
                text.format(metrics[f"eval/{key}"]) for key, text in self.words.items() if f"eval/{key}" in metrics
            ]
        if self.prompts is not None:
            with self.session.phase("eval answers"):
                metrics |= self._answer(self.prompts, step)
        if "eval/success" in metrics:
            words.append(f"accuracy of answers {metrics['eval/success']:.1%}")
        if name != "step":
            shown = {**self.shown, "success": "eval/success"}
            self.session.summary["eval"][name] = {
                key: metrics[metric] for key, metric in shown.items() if metric in metrics
            } | {"episodes": int(metrics.get("eval/episodes", 0))}
        if words:
            self.session.display.note(f"evaluation {name} (step {step}): {', '.join(words)}")
        return metrics

    def _answer(self, prompts: PromptRolloutWorkers, step: int) -> Metrics:
        assert prompts.val is not None, "a generator comes with held-out data"
        config = self.config
        scored = bool(config.rewards)
        groups = collect(self.session, prompts.val, prompts.num_val_prompts, step)
        episodes = keep_episodes(self.session, step, groups)
        save_answers(episodes[:MAX_SHOWN], self.session.renders, step, scored=scored)
        metrics = rollout_metrics(groups, "eval")
        if scored:
            check_error_rates(groups, config)
            return metrics | accuracy_metrics(groups, config.num_val_samples, "eval")
        return {key: value for key, value in metrics.items() if not key.endswith(_OF_REWARDS)}


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
Take: TypeAlias = Callable[["OfflinePipeline"], None]
"""Takes steps of a pipeline."""


def run_offline(
    config: ConfigT,
    program: Program,
    load: Load[ConfigT],
    build: Build[ConfigT],
    started: float | None,
    check: Callable[[ConfigT, Samples], None] | None = None,
    *,
    take: Take = OfflinePipeline.run,
    needs: tuple[Quantity, ...] = (logprobs,),
) -> int:
    """Runs a pipeline to its end and returns the exit code, see ``launch``; 2 for wrong data.

    Args:
        check: raises ``ValueError`` where the run could not use what was read.
        take: takes the steps: by default all of the run, with its evaluations and checkpoints.
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
    body = partial(_run, datasets=datasets, build=build, take=take)
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


def _run(config: ConfigT, run: RunContext, *, datasets: Samples, build: Build[ConfigT], take: Take) -> None:
    run.roles.pictures = datasets.have_pictures
    prompts = None
    if datasets.questions is not None:
        prompts = PromptRolloutWorkers(config, run, None, datasets.questions)
        prompts.begin_setup()
    train = None if datasets.train is None else datasets.train.batch
    with run.set_up(config, prompts) as (model_path, teacher_path):
        pipeline = build(config, Parts(run, train, datasets.held_out, prompts, model_path, teacher_path))
    if pipeline is not None:
        take(pipeline)


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
        refused=media_refused(config),
    )
