"""Words of the command line: each means what it would mean in a file, or is refused with its key and a hint."""

import logging
import math
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from roll.configs import SHIPPED, config_groups
from roll.configs.arguments import argument_problems, plain_problems, takes
from roll.configs.batches import describe_batches
from roll.configs.compose import compose_config
from roll.configs.loader import load_config
from roll.configs.overrides import parse_overrides
from roll.configs.rlvr import RLVRConfig
from roll.pipeline.programs import PROGRAMS, configurations
from roll.preflight.choices import CHECKS
from roll.utils.registry import import_path
from tests.support.configs import problems_of


def read(*words: str) -> dict[str, Any]:
    overrides, problems = parse_overrides(words)
    assert not problems
    return {override.key: override.value for override in overrides}


SAME = [
    *(r'["\n"]', r'"a\tb\u00e9"', r"'\n'", r"\n", r"[\n]", "'it''s'", "null", "~", "Null", '"null"', "true"),
    *("True", "yes", "off", "1e-4", "1E3", "-3", "+3", ".5", "5.", "0x1f", "1_000", ".inf", "größe", "😀", "a=b=c"),
    *("[größe, '</s>']", "<|im_end|>", "[<|im_end|>]", "x:y", "a,b", "list(range(0,2))", '{"x.y": 1}', "[]", "{}"),
    *("{a: 1, b: [x, {c: null}]}", "[1,]", "  padded  ", "https://h:8/v1", "C:/x", "5%", "int(3.7)"),
]  # fmt: skip


@pytest.mark.parametrize("value", SAME)
def test_a_value_means_what_it_means_in_a_file(value):
    expected = OmegaConf.to_container(OmegaConf.create(f"key: {value}"))
    assert read(f"key={value}") == expected
    assert type(read(f"key={value}")["key"]) is type(expected["key"])  # type: ignore[index,call-overload]


def test_links_need_no_quotes_in_collections_and_colons_no_space():
    assert read("a=[${b},{c:${d.e},f:${oc.env:X,${y}}}]") == {"a": ["${b}", {"c": "${d.e}", "f": "${oc.env:X,${y}}"}]}
    assert read("a={b:1,c:[x,y],d:{e:true},f:tests.x:Y,g:'u v',h:null}") == {
        "a": {"b": 1, "c": ["x", "y"], "d": {"e": True}, "f": "tests.x:Y", "g": "u v", "h": None}
    }
    assert math.isnan(read("a=.nan")["a"])


OTHERWISE = [
    *("[a, None]", "{b: None}", "", " ", "a #b", "#b", "b: c", '"x', "[a", "{a: b: c}", "@x", "%x", "`x`", "*x"),
    *("!x y", "&x", "=", "{{ x }}", "{% if x %}", "one\ntwo", '"one\ntwo"', "|", ">-", "- x", "a: ", "[" * 3000),
    *("\udcff", "1" * 5000),
]  # fmt: skip


@pytest.mark.parametrize("value", OTHERWISE)
def test_a_value_that_yaml_would_read_otherwise_or_not_at_all_is_refused_with_a_way_to_write_it(value):
    overrides, (problem,) = parse_overrides([f"some.key={value}"])
    assert not overrides and problem.path == "some.key" and problem.got == value and "some.key=" in problem.hint
    if value.strip() and value.isprintable():  # the hint, through a shell, is the text
        command = problem.hint.removeprefix("for this exact text: ")
        word = subprocess.run(["sh", "-c", f"printf %s {command}"], capture_output=True, text=True, check=True).stdout
        assert shlex.split(command) == [word] and read(word) == {"some.key": value}


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("a@b=1", "a.b=1"), ("a.b[0]=1", "a.b=[…]"), ("~a=1", "takes no value"), ("a..b=1", "is not a key"),
        (".a=1", "is not a key"), ("=1", "is not a key"), ("a b=1", "is not a key"), ('a."x.y"=1', "the mapping"),
        ("a", "key=value"), ("a/b=1", "is not a key"), ("@a=1", "is not a key"), ("a:b=1", "is not a key"),
    ],
)  # fmt: skip
def test_what_is_no_key_is_refused(word, hint):
    overrides, (problem,) = parse_overrides([word])
    assert not overrides and problem.path == word and hint in problem.hint


def test_signs_before_a_key_and_keys_that_come_twice(caplog):
    assert read("+a=1", "++b.c=2", "d-e=3") == {"a": 1, "b.c": 2, "d-e": 3}
    ((deleted,), _) = parse_overrides(["~a.b"])
    assert deleted.deletes and deleted.path == ("a", "b")
    with caplog.at_level(logging.WARNING):
        assert read("a=1", "b=2", "a=3", "b=2") == {"a": 3, "b": 2}
    assert [record.getMessage() for record in caplog.records] == ["a is given twice: the last value counts, not 1"]


PIPELINES = {name: found[0] for name, found in configurations(SHIPPED).items()}


def loaded(name: str, *overrides: str) -> Any:
    schema: Any = import_path(PROGRAMS[PIPELINES[name]].schema)
    return load_config(schema, name, SHIPPED, overrides, CHECKS[schema])


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
    roles = loaded(name, f"train={trainer}", f"infer={generator}").roles
    strategies = {role: worker.strategy_args.strategy_name for role, worker in roles.items()}
    assert strategies["actor_train"] == TRAINERS[trainer] and strategies["actor_infer"] == GENERATORS[generator]
    assert strategies.get("critic", TRAINERS[trainer]) == TRAINERS[trainer]
    assert ("critic" in strategies) == (name == "agentic_sokoban")


def test_options_of_a_replaced_engine_go_and_those_of_the_same_engine_stay():
    base = "rlvr_math_qwen2.5_0.5b"  # Megatron and vLLM
    before, same = composed(name=base), composed("train=megatron", "infer=vllm", name=base)
    for role in ("actor_train", "reference", "actor_infer"):
        assert same[role]["strategy_args"] == before[role]["strategy_args"]
    other = composed("train=fsdp2", name=base)
    assert other["actor_train"]["strategy_args"]["strategy_config"] == {"fsdp_size": -1}
    assert other["reference"]["strategy_args"]["strategy_name"] == "fsdp2_infer"
    assert other["actor_infer"] == before["actor_infer"]


def test_a_role_that_the_configuration_lacks_stays_away_and_overrides_and_presets_come_after():
    def options(*overrides: str) -> dict[str, Any]:
        values = composed(*overrides)
        assert "critic" not in values and "reference" not in values
        found: dict[str, Any] = values["actor_train"]["strategy_args"]["strategy_config"]
        return found

    key = "actor_train.strategy_args.strategy_config"
    assert options(f"{key}.tensor_model_parallel_size=2", "train=megatron") == {"tensor_model_parallel_size": 2}
    zero = options("train=deepspeed", f"{key}=${{deepspeed_zero3_cpuoffload}}")["zero_optimization"]
    assert (zero["stage"], zero["offload_param"]) == (3, {"device": "cpu"})
    assert options("train=deepspeed")["zero_optimization"]["stage"] == 2


def test_a_folder_of_ones_own_has_the_shipped_groups_and_its_own(tmp_path):
    (tmp_path / "data").mkdir()
    data = "# @package _global_\nactor_train: {data_args: {file_name: my.jsonl}}\n"
    (tmp_path / "data" / "mine.yaml").write_text(data)
    (tmp_path / "mine.yaml").write_text("defaults: [rlvr_math, _self_]\nseed: 3\n")
    values = composed("data=mine", "train=fsdp2", name="mine", folder=tmp_path)
    assert values["actor_train"]["data_args"]["file_name"] == "my.jsonl"
    assert values["actor_train"]["strategy_args"]["strategy_config"] == {"fsdp_size": -1}


@pytest.mark.parametrize(
    ("override", "path", "expected", "hint"),
    [
        ("train=megatrn", "train", "one of: deepspeed, fsdp2, megatron", "did you mean megatron?"),
        *((override, "train", "one of: deepspeed, fsdp2, megatron", "") for override in ("train=", "~train")),
        ("+rewards.ä.timeout=1", "+rewards.ä.timeout=1", "key=value", None),  # Hydra cannot read it
    ],
)
def test_an_unknown_choice_names_those_there_are(override, path, expected, hint):
    (problem,) = compose_config("rlvr_math", SHIPPED, [override]).problems
    assert (problem.path, problem.expected) == (path, expected) and hint in (None, problem.hint)


def test_the_lines_for_a_machine_without_a_gpu_work_as_they_stand(tmp_path):
    _, _, commented = (SHIPPED / "my_model.yaml").read_text().partition("#\n# defaults:")
    lines = [line.removeprefix("# ") for line in f"# defaults:{commented}".splitlines()]
    (tmp_path / "mine.yaml").write_text("\n".join(lines) + "\npretrain: org/model\n")
    config = load_config(RLVRConfig, "mine", tmp_path, (), CHECKS[RLVRConfig])
    types = {role: worker.model_args.dtype for role, worker in config.roles.items()}
    assert types == {"actor_train": "fp32", "actor_infer": "fp32"}
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
def test_what_is_for_the_tiny_model_alone_is_named_where_there_is_none(name, overrides, unread):
    schema: Any = import_path(PROGRAMS[PIPELINES[name]].schema)
    lines = describe_batches(load_config(schema, name, SHIPPED, overrides))
    assert [line.partition(":")[0] for line in lines if "nothing reads" in line] == unread


ARGS = "data_generator.args"
ENV, TOOL, DATA = "custom_envs.SimpleSokoban.env_config", "tools.use.s", "actor_train.data_args"


@pytest.mark.parametrize(
    ("name", "override", "path"),
    [
        ("rlvr_math", f"{ARGS}.max_operand=99.5", f"{ARGS}.max_operand"),
        ("rlvr_math", f"{ARGS}.max_operand=true", f"{ARGS}.max_operand"),
        ("rlvr_math", f"{ARGS}.max_operand=.nan", f"{ARGS}.max_operand"),
        ("rlvr_math", f'{ARGS}.operations="+\\0"', f"{ARGS}.operations"),
        ("rlvr_math", f"{ARGS}.max_oprand=9", f"{ARGS}.max_oprand"),
        ("rlvr_math", f"{ARGS}.max_operand=5", ARGS),
        ("rlvr_math", f"{ARGS}.held_out_share=1", f"{ARGS}.held_out_share"),
        ("rlvr_math", "data_generator.path=roll.demo.arithmetic:nope", "data_generator.path"),
        ("rlvr_math", "tracker_kwargs={flush_secs: true}", "tracker_kwargs"),
        ("dpo_math", f"{ARGS}.forget_rate=3", f"{ARGS}.forget_rate"),
        ("dpo_math", f"{ARGS}.nothing=3", f"{ARGS}.nothing"),
        ("rlvr_tools", f"{ARGS}.call_rate=.inf", f"{ARGS}.call_rate"),
        ("rlvr_tools", f"{ARGS}={{call_rate: 0.9, slip_rate: 0.9}}", ARGS),
        ("rlvr_tools", f"{TOOL}={{tool: search, args: {{corpus: x, num_results: 99}}}}", f"{TOOL}.args.num_results"),
        ("rlvr_tools", f"{TOOL}={{tool: python, args: {{memory_mb: 1}}}}", f"{TOOL}.args"),
        ("rlvr_tools", f"{TOOL}={{tool: retrieval, args: {{url: 'ftp://x'}}}}", f"{TOOL}.args"),
        ("agentic_sokoban", f"{ENV}.num_boxes=true", f"{ENV}.num_boxes"),
        ("agentic_sokoban", f"{ENV}.num_boxes=1.0", f"{ENV}.num_boxes"),
        ("agentic_sokoban", f"{ENV}.dim_room=[6, true]", f"{ENV}.dim_room"),
        ("agentic_sokoban", f"{ENV}.step_penalty=.inf", f"{ENV}.step_penalty"),
        ("sft_math", 'exp_name="a\\0b"', "exp_name"),
        ("rlvr_math", f'{DATA}.chat_template_kwargs={{x: "\\uD800"}}', f"{DATA}.chat_template"),
    ],
)
def test_what_its_receiver_would_refuse_or_take_for_something_else_is_refused_before_the_run(name, override, path):
    assert [each for each in problems_of(loaded, name, override) if each.startswith(path)]


def test_all_problems_of_a_users_own_receiver_are_found_at_once_as_far_as_it_says(tmp_path):
    def check(**args: Any) -> None:
        if args.get("size", 1) > 3:
            raise ValueError("size: at most 3")

    @takes(check=check)
    def make(folder, size: int = 1, *, names: list[str] | None = None, share: float = 0.5, loose=None, must) -> None:  # type: ignore[no-untyped-def]
        """Makes something."""

    given = {"size": 1.5, "names": [3], "share": 1, "loose": {"any": [1]}, "more": 1}
    problems = argument_problems(make, given, given=1)
    assert [problem.path for problem in problems] == ["size", "names", "more", "must"]
    (problem,) = argument_problems(make, {"size": 9, "must": None}, given=1)
    assert problem.hint == "size: at most 3"
    assert argument_problems(dict, {"anything": 1}) == []
    nested = {"a": [1, {"b": float("nan"), "c": "\0"}], "d": b"x", "e": [True, None, "ü"]}
    assert [problem.path for problem in plain_problems(nested)] == ["a.1.b", "a.1.c", "d"]


def test_the_words_none_and_null_are_answered_with_what_they_stand_for(tmp_path):
    _, (problem,) = parse_overrides(["some.key=None"])
    assert problem.hint == "write some.key=null"
    none = "tokenizer_path: None\ntools: None\nactor_train: {data_args: {system_prompt: None}}\n"
    (tmp_path / "mine.yaml").write_text(f"defaults: [rlvr_math, _self_]\n{none}")
    told = problems_of(load_config, RLVRConfig, "mine", tmp_path, (), CHECKS[RLVRConfig])
    assert told.keys() >= {"tokenizer_path", "tools", f"{DATA}.system_prompt"}
    (problem,) = problems_of(loaded, "agentic_sokoban", "train_env_manager.query_filter_config=null").values()
    assert "leave the section out" in problem.hint and "type: " in problem.hint and "no_filter" in problem.hint
