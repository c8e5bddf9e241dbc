"""The numbers that follow from a configuration, in words."""

from __future__ import annotations

from roll.configs.agentic import AgenticConfig
from roll.configs.env import EnvManagerConfig


def describe_batches(config: AgenticConfig) -> list[str]:
    """How episodes are collected and how they become optimizer steps, one sentence each."""
    return [
        _rollout_line("each step", config.rollout_batch_size, config.train_env_manager),
        _rollout_line("each evaluation", config.val_batch_size, config.val_env_manager),
        *(_train_line(config, role) for role in ("actor_train", "critic") if role in config.roles),
    ]


def _rollout_line(when: str, episodes: int, manager: EnvManagerConfig) -> str:
    spread = ", ".join(f"{count} {tag}" for tag, count in manager.groups_per_tag.items())
    redundant = f" ({manager.group_size_redundancy} redundant)" if manager.group_size_redundancy else ""
    members = manager.group_size + manager.group_size_redundancy
    return (
        f"{when}: {_count(episodes // manager.group_size, 'group')} × {manager.group_size} = "
        f"{_count(episodes, 'episode')}, played by {_count(manager.env_groups, 'group')} of environments ({spread}) × "
        f"{members}{redundant} = {_count(manager.num_envs, 'environment')} at once"
    )


def _train_line(config: AgenticConfig, role: str) -> str:
    worker, arguments = config.roles[role], config.roles[role].training_args
    steps = config.optimizer_steps_per_epoch
    epochs = "" if config.ppo_epochs == 1 else f" × {config.ppo_epochs} epochs = {steps * config.ppo_epochs}"
    return (
        f"{role}: global batch {worker.global_train_batch_size} episodes = {arguments.per_device_train_batch_size} per "
        f"device × {arguments.gradient_accumulation_steps} accumulated × {worker.data_parallel_size} data-parallel; "
        f"{config.rollout_batch_size} episodes make {_count(steps, 'optimizer step')}{epochs} per step"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
