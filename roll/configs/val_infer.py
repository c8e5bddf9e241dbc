"""``val_infer``: replicas of the policy that evaluate, beside those of the rollouts."""

from __future__ import annotations

from pydantic import Field

from roll.configs.base import Config
from roll.configs.devices import DeviceMapping
from roll.configs.worker import EnvironmentVariables, WorkerConfig

VAL_INFER = "val_infer"
"""Name of their section and their cluster."""


class ValInferConfig(Config):
    """Generating workers for evaluations alone; their engine, its options and their size are those of actor_infer."""

    device_mapping: DeviceMapping = Field(
        default=None,
        description="Their devices, none of them actor_infer's; they can be those of a role that is idle during an "
        "evaluation, such as actor_train. null: one CPU process, outside the device plan.",
    )
    worker_cls: str | None = Field(
        default=None, description="package.module:Class of the process. null: that of actor_infer."
    )
    system_envs: EnvironmentVariables = Field(
        default_factory=dict, description="Environment variables of these processes, over those of actor_infer."
    )

    def worker_config(self, actor_infer: WorkerConfig) -> WorkerConfig:
        """The cluster."""
        return actor_infer.model_copy(
            update={
                "device_mapping": self.device_mapping,
                "world_size": None,
                "worker_cls": self.worker_cls or actor_infer.worker_cls,
                "system_envs": {**actor_infer.system_envs, **self.system_envs},
            }
        )
