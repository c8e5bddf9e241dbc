"""The numbers that follow from a configuration, in words."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.agentic import AgenticConfig
from roll.configs.env import EnvManagerConfig
from roll.configs.offline import OfflineConfig
from roll.configs.pipeline import TINIES, PipelineConfig
from roll.configs.rl import RLConfig
from roll.configs.rlvr import RLVRConfig
from roll.configs.worker import WorkerConfig


def describe_batches(config: PipelineConfig) -> list[str]:
    """Sentences on how episodes are collected and how they become optimizer steps, and on what nobody reads."""
    return [*_batch_lines(config), *describe_unread(config)]


def _batch_lines(config: PipelineConfig) -> list[str]:
    if isinstance(config, OfflineConfig):
        return list(_offline_lines(config))
    if isinstance(config, RLVRConfig):
        lines = list(_prompt_lines(config))
        if config.eval_only:
            return lines
    else:
        assert isinstance(config, AgenticConfig)
        lines = [
            _episodes_line("each step", config.rollout_batch_size, config.train_env_manager),
            _episodes_line("each evaluation", config.val_batch_size, config.val_env_manager),
        ]
    assert isinstance(config, RLConfig)
    if config.overlaps:
        lines.append(
            f"asynchronous rollouts: at most {_count(config.groups_ahead, 'group')} ahead of the step, and "
            f"at most {_count(config.max_lag, 'step')} old when they are trained on; a step chooses from "
            f"{_count(config.window, 'draw')}"
        )
    if config.tools is not None:
        tools = config.tools
        names = [*tools.use, *(f"those of {name}" for name in tools.servers)]
        lines.append(
            f"tools: {', '.join(names)}; an episode has at most {_count(tools.max_turns, 'turn')} with calls, each of "
            f"at most {_count(tools.max_parallel_calls, 'call')} whose answers have at most "
            f"{_count(tools.max_tool_response_tokens, 'token')}, and at most {config.sequence_length:,} tokens in all"
        )
    lines += [_train_line(config, role) for role in ("actor_train", "critic") if role in config.roles]
    return lines


def _prompt_lines(config: RLVRConfig) -> Iterator[str]:
    prompts, num_answers = config.rollout_batch_size, config.num_return_sequences_in_group
    if not config.eval_only:
        yield (
            f"each step: {_count(prompts, 'prompt')} × {_count(num_answers, 'answer')} = "
            f"{_count(config.samples_per_step, 'sample')} of at most {config.prompt_length} prompt + "
            f"{config.train_sampling.max_new_tokens} answer tokens: at most "
            f"{config.samples_per_step * _longest(config):,} tokens"
        )
    if config.validation is not None:
        answers = _count(config.num_val_samples, "answer")
        if config.val_batch_size is None:
            yield f"each evaluation: every held-out prompt × {answers}"
        else:
            samples = _count(config.val_batch_size * config.num_val_samples, "sample")
            yield f"each evaluation: at most {_count(config.val_batch_size, 'prompt')} × {answers} = {samples}"


def _longest(config: RLVRConfig) -> int:
    if config.tools is not None:  # each of its turns may have as many
        return config.sequence_length
    return min(config.sequence_length, config.prompt_length + (config.train_sampling.max_new_tokens or 0))


def _episodes_line(when: str, episodes: int, manager: EnvManagerConfig) -> str:
    spread = ", ".join(f"{count} {tag}" for tag, count in manager.groups_per_tag.items())
    redundant = f" ({manager.group_size_redundancy} redundant)" if manager.group_size_redundancy else ""
    members = manager.group_size + manager.group_size_redundancy
    return (
        f"{when}: {_count(episodes // manager.group_size, 'group')} × {manager.group_size} = "
        f"{_count(episodes, 'episode')}, run by {_count(manager.env_groups, 'group')} of environments ({spread}) × "
        f"{members}{redundant} = {_count(manager.num_envs, 'environment')} at once"
    )


def _offline_lines(config: OfflineConfig) -> Iterator[str]:
    worker, samples = config.actor_train, f"{config.sample}s"
    if not config.eval_only:
        epochs, total = config.num_train_epochs, config.max_steps
        steps = f"{_count(epochs, 'epoch')} of optimizer steps" if epochs else _count(total, "optimizer step")
        each = "" if config.sequences_per_sample == 1 else f"{config.sequences_per_sample} × "
        yield (
            f"{steps}, each on {_global_batch(worker, samples)} of at most "
            f"{each}{config.sequence_length} tokens; {_micro_batches(worker, samples)}"
            f"{_warm_up(worker, None if epochs else total)}"
        )
    if config.validation is not None:
        answers = f", and {_count(config.validation.num_answers, 'answer')}" if config.actor_infer else ""
        most = config.val_batch_size
        samples = f"every held-out {config.sample}" if most is None else f"at most {_count(most, config.sample)}"
        yield f"each evaluation: {samples}{answers}"


def _global_batch(worker: WorkerConfig, noun: str) -> str:
    arguments = worker.training_args
    return (
        f"{worker.global_train_batch_size} {noun} = {arguments.per_device_train_batch_size} per device × "
        f"{arguments.gradient_accumulation_steps} accumulated × {worker.data_parallel_size} data-parallel"
    )


def _train_line(config: RLConfig, role: str) -> str:
    worker = config.roles[role]
    steps = config.optimizer_steps_per_epoch
    noun = "samples" if isinstance(config, RLVRConfig) else "episodes"
    noun = noun if config.sequences_per_sample == 1 else "pairs"
    data_epochs = config.total_epochs if isinstance(config, RLVRConfig) else None
    in_all = (
        f"{config.total_optimizer_steps} in all" if data_epochs is None else f"until total_epochs {data_epochs} end"
    )
    epochs = "" if config.ppo_epochs == 1 else f" × {config.ppo_epochs} epochs = {steps * config.ppo_epochs}"
    return (
        f"{role}: global batch {_global_batch(worker, noun)}; "
        f"{config.trained_per_step} {noun} make {_count(steps, 'optimizer step')}{epochs} per step, "
        f"{in_all}; {_micro_batches(worker, noun)}"
        f"{_warm_up(worker, None if data_epochs is not None else config.total_optimizer_steps)}"
    )


def _warm_up(worker: WorkerConfig, total: int | None) -> str:
    """A warning of a warm-up that outlasts the run, whose optimizer steps may not be known yet."""
    steps = worker.training_args.warmup_steps
    if not steps or total is None or steps < total:
        return ""
    return f"; warmup_steps {steps} are not finished when the run ends: the learning rate stays below its peak"


def _micro_batches(worker: WorkerConfig, noun: str) -> str:
    arguments = worker.training_args
    per_device = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    if worker.use_dynamic_batching_in_train:
        return f"micro-batches of at most {worker.max_tokens_per_microbatch_in_train} tokens"
    count = arguments.gradient_accumulation_steps
    return f"{_count(count, 'micro-batch', 'es')} per device and optimizer step, {per_device} {noun}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def describe_unread(config: PipelineConfig) -> Iterator[str]:
    """What is given for the tiny model alone, where models of another kind take its place, in a sentence each."""
    models = config.models
    taught = {"warm_start": "pretrain", "teacher_warm_start": "teacher_pretrain"}
    for key, chooser in taught.items():
        model = models.get(chooser)
        if model not in (None, *TINIES) and config.given(key):
            yield f"{key}: nothing reads it, since {chooser} is {model}: only tiny is trained before the run"
    sizes = [key for key in ("tiny_num_heads", "tiny_hidden_size", "tiny_num_layers") if config.given(key)]
    if sizes and not set(TINIES) & set(models.values()):
        yield f"{', '.join(sizes)}: nothing reads them, since no model is tiny"
