"""What holds for imports of every system: files that are refused, trust, recordings, trackers, and the command."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.__main__ import main
from roll.configs.pipeline import ProfilerConfig
from roll.configs.schema import ROLES
from roll.extras.importers import chatlearn
from roll.extras.importers.convert import DERIVE as DERIVATIONS
from roll.extras.importers.convert import convert, report
from roll.extras.importers.draft import Draft
from roll.extras.importers.reading import Given, UnreadableError, read
from roll.extras.importers.table import DERIVE, rows
from tests.support.configs import put
from tests.unit.extras.importers.imported import DROPPED, GIVEN, ROLL, imported

CRITIC = ["algorithm.adv_estimator=gae", "critic.model.path=other/model"]


@pytest.mark.parametrize(
    ("system", "words", "trusted"),
    [
        ("verl", ["data.trust_remote_code=true"], {"actor_train", "actor_infer", "reference"}),
        ("verl", ["actor_rollout_ref.model.trust_remote_code=false", "data.trust_remote_code=false"], set()),
        ("verl", [*CRITIC, "critic.model.trust_remote_code=true"], {"critic"}),
        ("verl", ["actor_rollout_ref.model.trust_remote_code=true", CRITIC[0]],
         {"actor_train", "actor_infer", "reference", "critic"}),
        ("verl", ["data.trust_remote_code=true", "actor_rollout_ref.actor.strategy=megatron"], set()),
        ("verl_sft", ["model.trust_remote_code=true"], {"actor_train"}),
        ("chatlearn", ["models.policy.trust_remote_code=true", "runtime_args.train_backend=fsdp"],
         {"actor_train", "actor_infer", "reference"}),
        ("mindspeed", ["generate_config.trust_remote_code=true"], set()),
        ("roll", [f"{role}.model_args.trust_remote_code=true" for role in ("actor_train", "actor_infer", "reference")],
         set()),  # its trainer is Megatron
    ],
)  # fmt: skip
def test_code_that_comes_with_a_model_runs_where_they_ask(system, words, trusted):
    found = imported(system, *words)
    assert {role for role in ROLES if found.config.trusts(role)} == trusted
    assert {word.partition("=")[0] for word in words if "trust_remote_code=true" in word} <= found.notes.keys()


@pytest.mark.parametrize(
    ("system", "name", "word", "key"),
    [
        ("verl", "", "actor_rollout_ref.actor.policy_loss.loss_mode=nobodys", ""),
        ("verl", "", "a_key.of_nobody=1", ""),
        ("verl", "", "actor_rollout_ref.actor.optim.a_rate_of_nobody=1", ""),
        ("roll", "rlvr", "actor_train.mtp_training_mode=joint", ""),
        ("roll", "agentic", "train_env_manager.tags=[Shop]", "custom_envs.Shop.env_type"),
    ],
)
def test_what_changes_results_is_lost_and_told(system, name, word, key):
    found = imported(system, word, file=ROLL.get(name))
    key = key or word.partition("=")[0]
    assert found.exit_code == 1 and key in found.lost and key in report(found.result)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    files = {
        "list.yaml": ("- 1\n", "expected a mapping"),
        "broken.yaml": ("a: [1\n", "no YAML"),
        "other.sh": ("python train.py a=1\n", "no command that starts"),
        "including.yaml": ("defaults: [number]\n", "including.yaml: Invalid loaded object type: int"),
        "defaults0.yaml": ("defaults: 5\n", "defaults: expected a list, not int"),
        "defaults1.yaml": ("defaults: [1]\n", "Unsupported type in defaults"),
        "defaults2.yaml": ("defaults: one\n", "defaults: expected a list, not str"),
    }
    (tmp_path / "number.yaml").write_text("5\n")
    for name, (text, words) in files.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(UnreadableError, match=words):
            convert("verl", [tmp_path / name])
    with pytest.raises(UnreadableError, match="no such file"):
        convert("verl", [tmp_path / "none.yaml"])


@pytest.mark.parametrize(
    ("system", "word", "words"),
    [
        ("roll", "adv_estimator=[x]", "TypeError: unhashable type: 'list', near adv_estimator"),
        ("roll", "rewards.sums=[1]", "AttributeError: .* near rewards.sums"),
        ("mindspeed", "rl_config.mini_batch_size={a: 1}", "TypeError: .* near rl_config.mini_batch_size"),
    ],
)
def test_values_of_another_kind_than_a_key_has_are_refused(system, word, words):
    name = GIVEN[system].name
    with pytest.raises(UnreadableError, match=f"{name}: a value has another type than .* takes: {words}"):
        convert(system, [GIVEN[system]], [word])


def test_included_files_that_are_missing_are_told(tmp_path):
    file = tmp_path / "grpo.yaml"
    includes = "- ppo_trainer\n- actor@actor_rollout_ref.actor: dp\n- _self_"
    file.write_text(f"defaults:\n{includes}\nalgorithm: {{gamma: 0.9}}\n")
    found = imported("verl", file=file)
    assert re.findall(r"(\S+) was not found", found.remarks) == ["actor/dp", "ppo_trainer"]
    assert found.written["gamma"] == 0.9


def test_the_command_writes_and_reports(tmp_path, capsys):
    target, script = tmp_path / "mine.yaml", str(GIVEN["verl"])
    command = ["import", "verl", script, "trainer.total_training_steps=7", "-o"]
    assert main([*command, str(target)]) == 0
    assert yaml.safe_load(target.read_text())["max_steps"] == 7
    out = capsys.readouterr().out
    assert "the result is valid" in out and f"written to {target}" in out
    missing = str(tmp_path / "none" / "mine.yaml")
    wrong = {
        "no such file": ["import", "verl", missing],
        f"roll import verl: -o {missing}: No such file or directory": [*command, missing],
        "": ["import", "verl", "a=1"],
    }
    for words, line in wrong.items():
        assert main(line) == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("system", ["chatlearn", "mindspeed", "verl", "roll"])
def test_files_of_others_are_answered_with_the_command(system, capsys):
    assert main(["train", str(GIVEN[system])]) == 2
    err = capsys.readouterr().err
    if system == "roll":
        assert "rewards.sums.model_args" in err and "roll import roll" in err
    else:
        assert f"roll import {system} {GIVEN[system]} -o mine.yaml" in err and err.count("\n") == 1


FROM_PARTS = re.compile(r"no_(load|save)_(optim|rng)|(clip_ratio|swanlab|profile)_\w+|\w+_token_size|mstx|export_type")
"""Names of keys that the code puts together, and those of a profiler, of which one switch is read."""


@pytest.mark.parametrize("system", ["chatlearn", "mindspeed"])
def test_what_rows_leave_to_a_derivation_is_read_by_one(system):
    folder = Path(chatlearn.__file__).parent
    code = "".join((folder / name).read_text() for name in (f"{system}.py", "verl_tools.py", "common.py"))
    left = {row.name for row in rows(system) if row.how == DERIVE and row.name not in code}
    assert [name for name in sorted(left) if not FROM_PARTS.fullmatch(name)] == []


def drafted(system: str, keys: dict[str, Any]) -> Draft:
    """The whole run of a system with further keys."""
    given = copy.deepcopy(read(system, [GIVEN[system]], []))
    for key, value in keys.items():
        put(given.values, key, value)
    draft = Draft(system, Given(given.values, given.links, given.missing))
    draft.take_all()
    DERIVATIONS[system](draft)
    draft.tell_unused()
    return draft


ACTOR, MINDSPEED = "actor_rollout_ref.actor.profiler", "profiler_config.integrated"
TORCH = {"global_profiler.steps": [1, 3], "global_profiler.tool": "torch"}
MEMORY = {"global_profiler.steps": [1, 3], "global_profiler.tool": "torch_memory"}
NSIGHT = {"trace": "cuda", "capture-range": "cudaProfilerApi", "kill": None}
ENABLED = {f"{ACTOR}.enable": True, f"{ACTOR}.ranks": [0, 2]}
SHAPES = {
    "profiler.tool": "torch",
    "profiler.all_ranks": True,
    "profiler.tool_config.torch.contents": ["cpu", "shapes"],
}
SUPERVISED = {"profiler.enable": True, "trainer.profile_interval": [2, 3]}
STAGE = {f"{MINDSPEED}.profile_step_start": 2, f"{MINDSPEED}.profile_step_end": 4, f"{MINDSPEED}.profile": True,
         f"{MINDSPEED}.profile_record_shapes": True, f"{MINDSPEED}.stage": "actor_generate"}  # fmt: skip
ROLES_OF = {"roles": ["actor_train"]}


@pytest.mark.parametrize(
    ("system", "keys", "expected"),
    [
        ("verl_sft", SUPERVISED | SHAPES, {"steps": [2, 3], "ranks": None, "shapes": True}),
        ("verl_sft", SUPERVISED | {"profiler.tool": "nsys"}, {"ranks": [0], "nsight": {}}),
        ("verl", TORCH | ENABLED, {"steps": [1, 3], "ranks": [0, 2], **ROLES_OF}),
        ("verl", TORCH | {f"{ACTOR}.all_ranks": True, f"{ACTOR}.tool_config.torch.contents": ["cpu", "cuda", "stack"]},
         {"steps": [1, 3], "ranks": None, "stacks": True, **ROLES_OF}),
        ("verl", MEMORY | ENABLED, {"steps": [1, 3], "ranks": [0, 2], "memory": True, **ROLES_OF}),
        ("verl", {"trainer.profile_steps": [2], "trainer.worker_nsight_options": NSIGHT, f"{ACTOR}.all_ranks": True},
         {"nsight": {"trace": "cuda"}, "ranks": None, **ROLES_OF}),
        ("verl", TORCH | ENABLED | {f"{ACTOR}.enable": False}, None),
        ("verl", ENABLED, None),
        ("verl", {"ray_kwargs.timeline_json_file": "/tmp/t.json"}, {"ray_timeline": True}),
        ("roll", {"profiler_timeline": True}, {"steps": [2], "stacks": True}),
        ("roll", {"profiler_memory": True}, {"steps": [2], "memory": True}),
        ("roll", {"system_envs.RAY_PROFILING": "1"}, {"ray_timeline": True}),
        ("roll", {"system_envs.RAY_PROFILING": "0", "profiler_timeline": False}, None),
        ("chatlearn", {"runtime_args.profiler_dir": "./here"}, {"steps": [3]}),
        ("chatlearn", {"runtime_args.nsys": True}, {"nsight": {}}),
        ("mindspeed", STAGE, {"steps": [2, 3], "shapes": True, "roles": ["actor_infer"], "ranks": None}),
        ("mindspeed", {f"{MINDSPEED}.profile": False, f"{MINDSPEED}.profile_step_start": 2}, None),
    ],
)  # fmt: skip
def test_recordings(system, keys, expected):
    draft = drafted(system, keys)
    found = draft.get("profiler")
    assert found == expected
    if expected is None:
        told = {outcome.key: outcome.kind for outcome in draft.outcomes}
        assert all(told.get(key) == DROPPED for key in keys), "none goes without a word"
        return
    assert not list(ProfilerConfig.model_validate(found).problems())
    assert not draft.has("system_envs.RAY_PROFILING") or draft.get("system_envs.RAY_PROFILING") is None


SWANLAB = {"project": "p", "experiment_name": "e", "logdir": "here", "login_kwargs": {"api_key": "hunter2"}}


@pytest.mark.parametrize(
    ("system", "keys", "expected", "options"),
    [
        ("verl", {"trainer.logger": ["console", "swanlab"]}, ["stdout", "swanlab"], {"swanlab": {"project": "p"}}),
        ("verl", {"trainer.logger": ["mlflow"]}, "mlflow", {"experiment_name": "p"}),
        ("verl", {"trainer.logger": ["wandb", "trackio", "file"]}, ["wandb", "trackio"],
         {"wandb": {"project": "p"}, "trackio": {"project": "p"}}),
        ("roll", {"track_with": "swanlab", "tracker_kwargs": SWANLAB}, "swanlab",
         {"project": "p", "name": "e", "log_dir": "here"}),
    ],
)  # fmt: skip
def test_trackers(system, keys, expected, options):
    draft = drafted(system, {"trainer.project_name": "p", **keys} if system == "verl" else keys)
    assert (draft.get("track_with"), draft.get("tracker_kwargs")) == (expected, options)
