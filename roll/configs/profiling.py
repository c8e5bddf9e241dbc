"""Parts of a run that are recorded in detail, for finding out where its time and its memory go."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem


class ProfilerConfig(Config):
    """Recordings of single steps in the folder profile/ of the run; nothing is recorded unless asked."""

    steps: list[int] = Field(
        default_factory=list,
        description="Steps recorded by PyTorch's profiler as a Chrome trace per role and rank. A recorded step is "
        "slower.",
    )
    roles: list[str] = Field(
        default_factory=list,
        description="Recorded roles, such as actor_train; empty: all that have a model. Engines with separate "
        "processes (vllm, sglang) are recorded only by Nsight.",
    )
    ranks: list[int] | None = Field(default_factory=lambda: [0], description="Ranks of each role. null: all of them.")
    shapes: bool = Field(default=False, description="Record the shapes of operators' inputs.")
    stacks: bool = Field(default=False, description="Record where in the program operators are called; slow.")
    memory: bool = Field(
        default=False,
        description="Record the resident memory of the process as a counter of the trace, and on GPUs a snapshot of "
        "all memory with its history (a file for pytorch.org/memory_viz).",
    )
    ray_timeline: bool = Field(
        default=False, description="Write Ray's timeline of all calls (ray_timeline.json) when the run ends."
    )
    nsight: dict[str, str] | None = Field(
        default=None,
        description="Run the roles and ranks under Nsight Systems, by Ray; nsys must be on the PATH of their "
        "machines. Options of `nsys profile`; {} is CUDA, cuDNN, cuBLAS and NVTX. Processes are recorded from "
        "start to end.",
    )
    peak_tflops: float | None = Field(
        default=None,
        gt=0,
        description="Peak TFLOP/s of a trainer's device in its number format, for mfu/train. null: from its data "
        "sheet; unknown devices have no such metric.",
    )

    def profiled(self, role: str, world_size: int) -> list[int]:
        """The ranks of a role that are recorded."""
        if self.roles and role not in self.roles:
            return []
        return [rank for rank in range(world_size) if self.ranks is None or rank in self.ranks]

    def problems(self) -> Iterator[ConfigProblem]:
        for key in ("steps", "ranks"):
            least = 1 if key == "steps" else 0
            numbers = getattr(self, key)
            if numbers is not None and (min(numbers, default=least) < least or len(set(numbers)) < len(numbers)):
                yield self.problem(key, f"numbers of at least {least}, each once")
        if self.nsight is not None and self.nsight.keys() & {"o", "output"}:
            yield self.problem("nsight", "options without o and output: reports are in the run's folder")
