"""Files to choose from on the command line: ``train=megatron infer=vllm`` with any configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.configs.batches import describe_batches
from roll.configs.compose import compose_config
from roll.configs.loader import load_composed, load_config
from roll.configs.rlvr import RLVRConfig
from roll.configs.shipped import SHIPPED, config_groups
from roll.pipeline.programs import PROGRAMS, configurations
from roll.preflight.choices import CHECKS
from roll.utils.registry import import_path

TRAINERS = {"fsdp2": "fsdp2_train", "deepspeed": "deepspeed_train", "megatron": "megatron_train"}
GENERATORS = {"hf": "hf_infer", "vllm": "vllm", "sglang": "sglang"}
PAIRS = [(trainer, generator) for trainer in TRAINERS for generator in GENERATORS]


def composed(*overrides: str, name: str = "rlvr_math", folder: Path = SHIPPED) -> dict[str, Any]:
    found = compose_config(name, folder, overrides)
    assert not found.problems
    return found.values


def test_the_shipped_groups_are_these():
    assert config_groups(SHIPPED) == {"infer": sorted(GENERATORS), "train": sorted(TRAINERS)}


@pytest.mark.parametrize(("trainer", "generator"), PAIRS)
@pytest.mark.parametrize("name", ["agentic_sokoban", "rlvr_math", "sft_math"])
def test_every_pair_of_engines_is_valid_with_the_demonstrations(name, trainer, generator):
    found = compose_config(name, SHIPPED, [f"train={trainer}", f"infer={generator}"])
    schema = import_path(PROGRAMS[configurations(SHIPPED)[name][0]].schema)
    config = load_composed(schema, name, found, CHECKS[schema])  # type: ignore[type-var, index, arg-type]
    strategies = {role: worker.strategy_args.strategy_name for role, worker in config.roles.items()}
    assert strategies["actor_train"] == TRAINERS[trainer] and strategies["actor_infer"] == GENERATORS[generator]
    assert strategies.get("critic", TRAINERS[trainer]) == TRAINERS[trainer]
    assert ("critic" in strategies) == (name == "agentic_sokoban")


def test_options_of_a_replaced_engine_go_and_those_of_the_same_engine_stay():
    base = "rlvr_math_qwen2.5_0.5b"  # Megatron and vLLM
    before = composed(name=base)
    same = composed("train=megatron", "infer=vllm", name=base)
    assert {role: same[role]["strategy_args"] for role in ("actor_train", "reference", "actor_infer")} == {
        role: before[role]["strategy_args"] for role in ("actor_train", "reference", "actor_infer")
    }
    other = composed("train=fsdp2", name=base)
    assert other["actor_train"]["strategy_args"]["strategy_config"] == {"fsdp_size": -1}
    assert other["reference"]["strategy_args"]["strategy_name"] == "fsdp2_infer"
    assert other["actor_infer"] == before["actor_infer"]


def test_a_role_that_the_configuration_lacks_stays_away_and_overrides_and_presets_come_after():
    values = composed("actor_train.strategy_args.strategy_config.tensor_model_parallel_size=2", "train=megatron")
    assert values["actor_train"]["strategy_args"]["strategy_config"] == {"tensor_model_parallel_size": 2}
    assert "critic" not in values and "reference" not in values
    link = "actor_train.strategy_args.strategy_config=${deepspeed_zero3_cpuoffload}"
    zero = composed("train=deepspeed", link)["actor_train"]["strategy_args"]["strategy_config"]["zero_optimization"]
    assert (zero["stage"], zero["offload_param"]) == (3, {"device": "cpu"})
    assert (
        composed("train=deepspeed")["actor_train"]["strategy_args"]["strategy_config"]["zero_optimization"]["stage"]
        == 2
    )


def test_a_folder_of_ones_own_has_the_shipped_groups_and_its_own(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text(
        "# @package _global_\nactor_train: {data_args: {file_name: my.jsonl}}\n"
    )
    (tmp_path / "mine.yaml").write_text("defaults: [rlvr_math, _self_]\nseed: 3\n")
    values = composed("data=mine", "train=fsdp2", name="mine", folder=tmp_path)
    assert values["actor_train"]["data_args"]["file_name"] == "my.jsonl"
    assert values["actor_train"]["strategy_args"]["strategy_config"] == {"fsdp_size": -1}


@pytest.mark.parametrize(
    ("override", "hint"), [("train=megatrn", "did you mean megatron?"), ("train=", ""), ("~train", "")]
)
def test_an_unknown_choice_names_those_there_are(override, hint):
    (problem,) = compose_config("rlvr_math", SHIPPED, [override]).problems
    assert (problem.path, problem.expected, problem.hint) == ("train", "one of: deepspeed, fsdp2, megatron", hint)


def test_a_key_that_hydra_cannot_read_is_a_problem_like_any_other():
    (problem,) = compose_config("rlvr_math", SHIPPED, ["+rewards.ä.timeout=1"]).problems
    assert (problem.path, problem.expected) == ("+rewards.ä.timeout=1", "key=value")


def test_the_lines_for_a_machine_without_a_gpu_work_as_they_stand(tmp_path: Path) -> None:
    _, _, commented = (SHIPPED / "my_model.yaml").read_text().partition("#\n# defaults:")
    lines = [line.removeprefix("# ") for line in f"# defaults:{commented}".splitlines()]
    (tmp_path / "mine.yaml").write_text("\n".join(lines) + "\npretrain: org/model\n")
    config = load_config(RLVRConfig, "mine", tmp_path, (), CHECKS[RLVRConfig])
    assert {role: worker.model_args.dtype for role, worker in config.roles.items()} == {
        "actor_train": "fp32",
        "actor_infer": "fp32",
    }
    assert config.samples_per_step == config.actor_train.global_train_batch_size
    assert config.num_devices == 2 and config.rewards.keys() == {"mine"}


@pytest.mark.parametrize(
    ("name", "overrides", "unread"),
    [
        ("agentic_sokoban", [], []),
        ("agentic_sokoban", ["pretrain=org/model"], ["warm_start"]),
        ("rlvr_math", ["pretrain=org/model", "tiny_num_layers=3"], ["warm_start", "tiny_num_layers"]),
        ("rlvr_distill", ["pretrain=org/model", "teacher_pretrain=org/other"], ["warm_start", "teacher_warm_start"]),
        ("dpo_math", ["pretrain=org/model", "~warm_start"], []),
    ],
)
def test_what_is_for_the_tiny_model_alone_is_named_where_there_is_none(
    name: str, overrides: list[str], unread: list[str]
) -> None:
    schema: Any = import_path(PROGRAMS[configurations(SHIPPED)[name][0]].schema)
    lines = describe_batches(load_config(schema, name, SHIPPED, overrides))
    assert [line.partition(":")[0] for line in lines if "nothing reads" in line] == unread
