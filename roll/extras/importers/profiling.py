"""Profiling of other systems, as ``profiler``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from roll.extras.importers.draft import Draft

_VERL = {
    "actor_rollout_ref.actor": "actor_train",
    "actor_rollout_ref.ref": "reference",
    "actor_rollout_ref.rollout": "actor_infer",
    "critic": "critic",
}
_VERL_CONTENTS = {"shapes": "shapes", "stack": "stacks", "memory": "memory"}
_BY_STEP = ("capture-range", "capture-range-end", "kill")
"""Options of nsys with which verl records single steps; a process is recorded whole here."""
_MINDSPEED = "profiler_config.integrated"
_MINDSPEED_STAGES = {
    "actor_generate": "actor_infer",
    "actor_compute_log_prob": "actor_train",
    "actor_update": "actor_train",
    "reference_compute_log_prob": "reference",
}


def profiler_of_verl(draft: Draft) -> None:
    """``global_profiler`` and the roles' ``profiler``; before them there was ``trainer.profile_steps``, of nsys."""
    if timeline := next((key for key in _TIMELINES if draft.theirs(key)), None):
        draft.derive(timeline, "profiler.ray_timeline", True, "in output_dir/<exp_name>/profile")
    steps, tool = draft.theirs("global_profiler.steps"), draft.theirs("global_profiler.tool")
    options = "global_profiler.global_tool_config.nsys.worker_nsight_options"
    if not steps and (steps := draft.theirs("trainer.profile_steps")):
        tool, options = "nsys", "trainer.worker_nsight_options"
    chosen = [theirs for theirs, role in _VERL.items() if role in draft.ours and _verl_records(draft, theirs)]
    if not steps or tool is None or not chosen:
        return
    keys = [f"{theirs}.profiler.{name}" for theirs in chosen for name in ("enable", "all_ranks", "ranks")]
    draft.derive(keys, "profiler.roles", [_VERL[theirs] for theirs in chosen])
    everywhere = any(draft.theirs(f"{theirs}.profiler.all_ranks") for theirs in chosen)
    ranks = {int(rank) for theirs in chosen for rank in draft.theirs(f"{theirs}.profiler.ranks") or ()}
    draft.derive(keys, "profiler.ranks", None if everywhere else sorted(ranks))
    if tool == "nsys":
        given = draft.theirs(options) or {}
        kept = {key: str(value) for key, value in given.items() if value is not None and key not in _BY_STEP}
        draft.derive([options, "global_profiler.tool"], "profiler.nsight", kept, "whole processes, not single steps")
        return
    switches = _verl_switches(draft, tool, [f"{theirs}.profiler" for theirs in chosen])
    _record(draft, ["global_profiler.steps", "global_profiler.tool"], steps, switches)


def profiler_of_verl_supervised(draft: Draft) -> None:
    """The steps of ``trainer.profile_interval``, both ends, where ``profiler`` is switched on."""
    interval = draft.theirs("trainer.profile_interval")
    if not draft.theirs("profiler.enable") or not isinstance(interval, list) or int(interval[0]) < 1:
        return
    keys = ["trainer.profile_interval", "profiler.enable", "profiler.tool"]
    tool = draft.theirs("profiler.tool")
    ranks = None if draft.theirs("profiler.all_ranks") else [int(rank) for rank in draft.theirs("profiler.ranks") or ()]
    draft.derive(["profiler.all_ranks", "profiler.ranks"], "profiler.ranks", [0] if ranks == [] else ranks)
    if tool == "nsys":
        draft.derive(keys, "profiler.nsight", {}, "whole processes, not single steps")
        return
    switches = _verl_switches(draft, tool, ["profiler"])
    _record(draft, keys, range(int(interval[0]), int(interval[1]) + 1), switches)


def _verl_switches(draft: Draft, tool: object, sections: Sequence[str]) -> list[str]:
    """What is recorded beside times, by the tool and its sections."""
    contents = [name for each in sections for name in draft.theirs(f"{each}.tool_config.torch.contents") or ()]
    asked = [_VERL_CONTENTS[name] for name in contents if name in _VERL_CONTENTS]
    return ["memory"] if tool == "torch_memory" else asked


_TIMELINES = ("ray_kwargs.timeline_json_file", "ray_init.timeline_json_file")


def profiler_of_roll(draft: Draft) -> None:
    """Every step of rank 0 there; of one step's trace the others are copies."""
    if str(draft.theirs("system_envs.RAY_PROFILING", "0")) == "1":
        draft.derive("system_envs.RAY_PROFILING", "profiler.ray_timeline", True, "in output_dir/<exp_name>/profile")
    asked = [key for key in ("profiler_timeline", "profiler_memory") if draft.theirs(key)]
    if asked:
        _record(draft, asked, [2], ["stacks" if key == "profiler_timeline" else "memory" for key in asked])


def profiler_of_chatlearn(draft: Draft) -> None:
    """The third step of the first replica, after two that it leaves out."""
    if draft.theirs("runtime_args.profiler_dir"):
        _record(draft, ["runtime_args.profiler_dir"], [3], [])
    if draft.theirs("runtime_args.nsys"):
        draft.derive("runtime_args.nsys", "profiler.nsight", {}, "Ray starts the processes under nsys")


def profiler_of_mindspeed(draft: Draft) -> None:
    """Steps from one up to another."""
    if not draft.theirs(f"{_MINDSPEED}.profile"):
        return
    keys = [f"{_MINDSPEED}.{name}" for name in ("profile", "profile_step_start", "profile_step_end")]
    start, end = (int(draft.theirs(key, default)) for key, default in zip(keys[1:], (1, 2), strict=True))
    names = {"shapes": "record_shapes", "stacks": "with_stack", "memory": "with_memory"}
    switches = [ours for ours, theirs in names.items() if draft.theirs(f"{_MINDSPEED}.profile_{theirs}")]
    _record(draft, keys, range(max(1, start), max(end, start + 1, 2)), switches)
    role = _MINDSPEED_STAGES.get(str(draft.theirs(f"{_MINDSPEED}.stage")))
    if role in draft.ours:
        draft.derive(f"{_MINDSPEED}.stage", "profiler.roles", [role], "whole steps of the role")
    ranks = draft.theirs(f"{_MINDSPEED}.profile_ranks", "all")
    draft.derive(f"{_MINDSPEED}.profile_ranks", "profiler.ranks", None if ranks == "all" else list(ranks))


def _verl_records(draft: Draft, theirs: str) -> bool:
    """Tells whether a role is recorded: switched on (what there was no switch for before), on any rank."""
    base = f"{theirs}.profiler"
    return bool(
        draft.theirs(f"{base}.enable", True) and (draft.theirs(f"{base}.all_ranks") or draft.theirs(f"{base}.ranks"))
    )


def _record(draft: Draft, keys: Sequence[str], steps: Iterable[Any], switches: Iterable[str]) -> None:
    """Has PyTorch's profiler record those of the steps that there are."""
    most = draft.get("max_steps")
    kept = sorted({int(step) for step in steps if most is None or int(step) <= most}) or [1]
    draft.derive(keys, "profiler.steps", kept, "in output_dir/<exp_name>/profile")
    for switch in dict.fromkeys(switches):
        draft.derive(keys, f"profiler.{switch}", True)
