"""What other systems record in detail becomes ``profiler``; their trackers are those of the same names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from roll.configs.pipeline import ProfilerConfig
from roll.extras.importers.convert import DERIVE, convert
from roll.extras.importers.draft import Draft, Kind
from roll.extras.importers.reading import Given, read
from tests.unit.extras.importers.test_rows import GIVEN

VERL = "actor_rollout_ref.actor.profiler"
STEPS = {"global_profiler.steps": [1, 3], "global_profiler.tool": "torch"}
MINDSPEED = "profiler_config.integrated"


def drafted(system: str, keys: dict[str, Any]) -> Draft:
    """The whole run of a system's test file with further keys."""
    given = copy.deepcopy(read(system, [GIVEN[system]], []))
    for key, value in keys.items():
        *above, last = key.split(".")
        node = given.values
        for part in above:
            node = node.setdefault(part, {})
        node[last] = value
    draft = Draft(system, Given(given.values, given.links, given.missing))
    draft.take_all()
    DERIVE[system](draft)
    draft.tell_unused()
    return draft


@pytest.mark.parametrize(
    ("system", "keys", "expected"),
    [
        (
            "verl_sft",
            {
                "profiler.enable": True,
                "profiler.tool": "torch",
                "profiler.all_ranks": True,
                "profiler.tool_config.torch.contents": ["cpu", "shapes"],
                "trainer.profile_interval": [2, 3],
            },
            {"steps": [2, 3], "ranks": None, "shapes": True},
        ),
        (
            "verl_sft",
            {"profiler.enable": True, "profiler.tool": "nsys", "trainer.profile_interval": [2, 3]},
            {"ranks": [0], "nsight": {}},
        ),
        ("verl", {**STEPS, f"{VERL}.enable": True, f"{VERL}.ranks": [0, 2]}, {"steps": [1, 3], "ranks": [0, 2]}),
        ("verl", {**STEPS, f"{VERL}.enable": True, f"{VERL}.all_ranks": True}, {"steps": [1, 3], "ranks": None}),
        (
            "verl",
            {**STEPS, f"{VERL}.all_ranks": True, f"{VERL}.tool_config.torch.contents": ["cpu", "cuda", "stack"]},
            {"steps": [1, 3], "ranks": None, "stacks": True},
        ),
        (
            "verl",
            {**STEPS, "global_profiler.tool": "torch_memory", f"{VERL}.enable": True, f"{VERL}.ranks": [0]},
            {"steps": [1, 3], "ranks": [0], "memory": True},
        ),
        (
            "verl",
            {
                "trainer.profile_steps": [2],
                "trainer.worker_nsight_options": {"trace": "cuda", "capture-range": "cudaProfilerApi", "kill": None},
                f"{VERL}.all_ranks": True,
            },
            {"nsight": {"trace": "cuda"}, "ranks": None},
        ),
        ("verl", {**STEPS, f"{VERL}.enable": False, f"{VERL}.ranks": [0]}, None),
        ("verl", {f"{VERL}.enable": True, f"{VERL}.ranks": [0]}, None),
        ("verl", {"ray_kwargs.timeline_json_file": "/tmp/t.json"}, {"ray_timeline": True}),
        ("roll", {"profiler_timeline": True}, {"steps": [2], "stacks": True}),
        ("roll", {"profiler_memory": True}, {"steps": [2], "memory": True}),
        ("roll", {"system_envs.RAY_PROFILING": "1"}, {"ray_timeline": True}),
        ("roll", {"system_envs.RAY_PROFILING": "0", "profiler_timeline": False}, None),
        ("chatlearn", {"runtime_args.profiler_dir": "./here"}, {"steps": [3]}),
        ("chatlearn", {"runtime_args.nsys": True}, {"nsight": {}}),
        (
            "mindspeed",
            {
                f"{MINDSPEED}.profile": True,
                f"{MINDSPEED}.profile_step_start": 2,
                f"{MINDSPEED}.profile_step_end": 4,
                f"{MINDSPEED}.profile_record_shapes": True,
                f"{MINDSPEED}.stage": "actor_generate",
            },
            {"steps": [2, 3], "shapes": True, "roles": ["actor_infer"], "ranks": None},
        ),
        ("mindspeed", {f"{MINDSPEED}.profile": False, f"{MINDSPEED}.profile_step_start": 2}, None),
    ],
)
def test_recordings(system: str, keys: dict[str, Any], expected: dict[str, Any] | None) -> None:
    draft = drafted(system, keys)
    found = draft.get("profiler")
    if expected is None:
        assert found is None
        told = {outcome.key: outcome.kind for outcome in draft.outcomes}
        assert all(told.get(key) == Kind.DROPPED for key in keys), "none goes without a word"
        return
    if system == "verl" and "ray_timeline" not in expected:
        expected = {**expected, "roles": ["actor_train"]}
    assert found == expected
    assert not list(ProfilerConfig.model_validate(found).problems())
    assert not draft.has("system_envs.RAY_PROFILING") or draft.get("system_envs.RAY_PROFILING") is None


@pytest.mark.parametrize(
    ("names", "expected", "projects"),
    [
        (["console", "swanlab"], ["stdout", "swanlab"], {"swanlab": {"project": "p"}}),
        (["mlflow"], "mlflow", {"experiment_name": "p"}),
        (["wandb", "trackio", "file"], ["wandb", "trackio"], {"wandb": {"project": "p"}, "trackio": {"project": "p"}}),
    ],
)
def test_trackers_of_verl(names: list[str], expected: Any, projects: dict[str, Any]) -> None:
    draft = drafted("verl", {"trainer.logger": names, "trainer.project_name": "p"})
    assert draft.get("track_with") == expected and draft.get("tracker_kwargs") == projects


def test_trackers_and_recordings_of_other_runs_of_roll() -> None:
    options = {"project": "p", "experiment_name": "e", "logdir": "here", "login_kwargs": {"api_key": "hunter2"}}
    draft = drafted("roll", {"track_with": "swanlab", "tracker_kwargs": options})
    assert draft.get("track_with") == "swanlab"
    assert draft.get("tracker_kwargs") == {"project": "p", "name": "e", "log_dir": "here"}
    path = GIVEN["roll"].with_name("sft.yaml")
    text = convert("roll", [path], ["profiler_timeline=true"]).text
    assert yaml.safe_load(text)["profiler"] == {"steps": [2], "stacks": True}
