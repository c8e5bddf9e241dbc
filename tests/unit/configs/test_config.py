"""Loading a configuration: composition, strictness, rules across sections, and all mistakes at once."""

import json
import math
import re
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.configs import SHIPPED
from roll.configs.agentic import JUDGE_CLUSTER, AgenticConfig
from roll.configs.batches import describe_batches
from roll.configs.engines.megatron import MegatronConfig
from roll.configs.env import EnvManagerConfig, Mixture
from roll.configs.loader import load_config
from roll.configs.offline import SFTConfig
from roll.configs.preference import DPOConfig
from roll.configs.problems import NOTHING, ConfigErrors, ConfigProblem
from roll.configs.rlvr import RLVRConfig
from roll.configs.schema import leaf_paths
from roll.configs.worker import GeneratingArguments, WorkerConfig, parse_device_mapping
from roll.extras.importers.convert import convert
from roll.extras.importers.draft import Kind
from roll.extras.plan.plan import hosted_models
from roll.pipeline.cli import report
from roll.preflight.choices import CHECKS, describe_placement
from roll.preflight.models import trusted_code
from tests.support.configs import problems_of, words_of

ROOT = Path(__file__).resolve().parents[3]
RATE = "actor_train.training_args.learning_rate"
TP = "tensor_model_parallel_size"
TRAINER, GENERATOR = (f"{role}.strategy_args.strategy_name" for role in ("actor_train", "actor_infer"))

MINIMAL = """
pretrain: tiny
num_nodes: 1
adv_estimator: reinforce
rollout_batch_size: 16
val_batch_size: 8
custom_envs:
  Lake: {env_type: frozen_lake, env_manager_cls: traj}
  Boxes: {env_type: sokoban, env_config: {dim_room: [6, 6]}}
train_env_manager: {env_groups: 4, group_size: 4, tags: [Lake]}
val_env_manager: {env_groups: 8, tags: [Lake, Boxes]}
actor_train:
  training_args: {learning_rate: 1e-3, per_device_train_batch_size: 2, gradient_accumulation_steps: 4}
  device_mapping: list(range(0,2))
actor_infer:
  strategy_args: {strategy_name: hf_infer}
  device_mapping: [0]
"""


@pytest.fixture
def load(tmp_path):
    """Loads MINIMAL, or the given text, with overrides."""

    def _load(*overrides, text=MINIMAL, checks=CHECKS[AgenticConfig]):
        (tmp_path / "mine.yaml").write_text(text)
        return load_config(AgenticConfig, "mine", tmp_path, overrides, checks)

    return _load


@pytest.fixture
def problems(load):
    """The problems of MINIMAL with overrides, by path."""
    return partial(problems_of, load)


@pytest.mark.parametrize("name", ["agentic_sokoban", "agentic_sokoban_qwen2.5_0.5b"])
def test_held_out_boards_never_occur_in_training(name):
    config = load_config(AgenticConfig, name, SHIPPED)
    assert config.exp_name == name and "SimpleSokobanHeldOut" not in config.train_env_manager.tags
    splits = {tag: config.custom_envs[tag].env_config["split"] for tag in ("SimpleSokobanHeldOut", "SimpleSokoban")}
    assert splits == {"SimpleSokobanHeldOut": "eval", "SimpleSokoban": "train"}


def test_environments_that_are_trained_on_have_a_teacher(load, problems):
    section = "{pretrain: org/model, tag_included: [%s], strategy_args: {strategy_name: hf_infer}}"
    config = load(f"teachers={{a: {section % 'Lake'}}}")  # Boxes are evaluated alone
    assert list(config.roles) == ["actor_train", "actor_infer", "teachers.a"]
    untaught = problems(f"teachers={{a: {section % 'Boxes'}}}")["teachers"]
    assert untaught.expected == "a teacher for every tag; Lake has none"
    unknown = problems(f"teachers={{a: {section % 'Lake,Lakes'}}}")["teachers.a.tag_included"]
    assert unknown.expected == "existing tags: Lake, Boxes"
    assert "it belongs to RLVR" in problems("teacher_prompt='{prompt}'")["teacher_prompt"].hint


def test_values_defaults_interpolation_and_overrides(load, problems):
    config = load("actor_infer.generating_args.max_new_tokens=${response_length}", "response_length=99")
    told = (config.exp_name, config.seed, config.actor_train.training_args.learning_rate)
    assert (*told, config.actor_infer.generating_args.max_new_tokens) == ("mine", 42, 1e-3, 99)
    config = load("critic.infer_batch_size=3", "+max_steps=5", "++seed=7", "actor_train.device_mapping=range(2,4)")
    told = (config.critic.infer_batch_size, config.max_steps, config.seed, config.actor_train.device_mapping)
    assert told == (3, 5, 7, [2, 3])
    assert load("~rollout_batch_size", "~val_batch_size").rollout_batch_size == 128
    assert "nothing_here" in problems("~nothing_here")


def test_an_override_inside_a_linked_section_keeps_its_other_keys():
    overrides = ["custom_envs.SimpleSokoban.max_steps=7", "custom_env.SimpleSokoban.step_timeout=9.5"]
    config = load_config(AgenticConfig, "agentic_sokoban", SHIPPED, overrides)
    tag = config.custom_envs["SimpleSokoban"]
    assert (tag.max_steps, tag.step_timeout, tag.env_type) == (7, 9.5, "sokoban")
    assert config.custom_envs["SimpleSokobanHeldOut"].max_steps == 6


def test_included_files_are_found_under_both_spellings(tmp_path):
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "traj_envs.yaml").write_text("custom_env: {Lake: {env_type: frozen_lake}}\n")
    for include in ("traj_envs@_here_", "config/traj_envs@_here_", "../config/traj_envs@_here_"):
        text = MINIMAL.replace("Lake: {env_type: frozen_lake, env_manager_cls: traj}", "Lake: ${custom_env.Lake}")
        (folder / "main.yaml").write_text(f"defaults: [{include}, _self_]\n{text}")
        assert load_config(AgenticConfig, "main", folder).custom_envs["Lake"].env_type == "frozen_lake"


def test_engine_presets_are_read_through_a_link_and_otherwise_left_alone(load):
    presets = "deepspeed_zero2: {zero_optimization: {stage: 2}}\ndeepspeed_zero3: {zero_optimization: {stage: 3}}\n"
    strategy = "actor_train.strategy_args={strategy_name:deepspeed_train,strategy_config:${deepspeed_zero2}}"
    config = load(strategy, "actor_train.strategy_args.strategy_config.steps_per_print=5", text=MINIMAL + presets)
    options = {"zero_optimization": {"stage": 2}, "steps_per_print": 5}
    assert config.actor_train.strategy_args.strategy_config == options


STRAY = "foo: {a: 1, b: '${foo.a}'}\nbar: '${baz.x}'\nbaz: {x: '${foo.a}'}\n"
VLLM_OPTIONS = "actor_infer.strategy_args={strategy_name:vllm,strategy_config:{fsdp_size:x}}"


def test_each_wrong_place_is_one_problem(problems):
    assert problems(text=MINIMAL + STRAY).keys() == {"foo", "bar", "baz"}, "sections that only stray sections read"
    option = "actor_infer.strategy_args.strategy_config.fsdp_size"  # of another engine
    assert problems(VLLM_OPTIONS, "tiny_num_heads=2").keys() == {option}
    assert problems("track_with=[tensorboard,5,null]").keys() == {"track_with.1", "track_with.2"}


def test_a_top_level_variable_must_be_referred_to_also_by_way_of_another(load, problems):
    assert load(text=MINIMAL + "one: 3\ntwo: ${one}\nmax_steps: ${two}\n").max_steps == 3
    text = MINIMAL + "my_steps: 12\nmax_steps: ${my_steps}\n"
    assert load("my_steps=13", text=text).max_steps == 13
    assert load("max_steps=14", text=text).max_steps == 14
    found = problems("my_stps=13", text=text)
    assert found["my_stps"].hint == "did you mean my_steps?"
    assert "my_steps" in problems(text=MINIMAL + "my_steps: 12\n")


def test_many_equal_problems_are_told_once(problems, load):
    tags = ",".join(f"Tag{i}" for i in range(50))
    with pytest.raises(ConfigErrors) as caught:
        load(f"train_env_manager.tags=[{tags}]", "train_env_manager.env_groups=50", "seed=x")
    assert len([p for p in caught.value.problems if p.path.startswith("train_env_manager.tags")]) == 50
    text = str(caught.value)
    assert text.count("train_env_manager.tags.") == 3 and "… and 49 more like it" in text and "seed: " in text
    assert report(caught.value, "mine").count("a key of custom_envs") == 1


def test_braces_that_are_no_placeholders_pass_and_numbers_in_the_environment_become_text(load):
    assert load(r"custom_envs.Lake.agent_template='\\boxed{answer} {{x}} {observation}'")
    assert load("system_envs.OMP_NUM_THREADS=1").system_envs == {"OMP_NUM_THREADS": "1"}


def test_dropout_of_the_model_is_refused_in_every_role(problems):
    dropout = "model_args.model_config_kwargs={attention_dropout:0.1}"
    found = problems(f"actor_train.{dropout}", f"actor_infer.{dropout}")
    assert all(path.endswith("model_config_kwargs.attention_dropout") for path in found) and len(found) == 2


def test_a_warm_up_beyond_the_run_is_told(load):
    args = "actor_train.training_args={per_device_train_batch_size:2,gradient_accumulation_steps:4,warmup_steps:10}"
    assert "warmup_steps 10 are not finished" in describe_batches(load("max_steps=5", args))[-1]
    assert "warmup_steps" not in describe_batches(load("max_steps=50", args))[-1]


def test_library_entries_are_checked_though_only_chosen_ones_are_read():
    wrong = ["custom_env.LargerSokoban.max_step=3", "custom_env.Smal.max_steps=3"]
    found = problems_of(load_config, AgenticConfig, "agentic_sokoban", SHIPPED, wrong)
    assert found["custom_env.LargerSokoban.max_step"].hint == "did you mean max_steps?"
    assert found["custom_env.Smal.env_type"].got is NOTHING


def test_unknown_configurations_links_to_nowhere_and_open_values_are_problems(tmp_path, problems):
    with pytest.raises(ConfigErrors, match=r"agentic_frozen_lake.*did you mean agentic_sokoban\?"):
        load_config(AgenticConfig, "agentic_sokobann", SHIPPED)
    with pytest.raises(ConfigErrors, match="existing folder"):
        load_config(AgenticConfig, "any", tmp_path / "none")
    assert {"seed", "max_steps", "logging_steps"} <= {*problems("seed=${nowhere}", "max_steps=???", "logging_steps=0")}


WRONG = [
    # types and ranges
    *((f"seed={value}", "int") for value in ("abc", "1.0", "true", "'1'")), ("seed=-1", "int, at least 0"),
    (f"num_nodes={10**30}", "at most 10000"), (f"num_gpus_per_node={10**12}", "at most 1024"),
    (f"actor_train.world_size={10**30}", "at most 100000"), ("rollout_batch_size=1000000007", "at most 1000000"),
    *((f"{key}=99999999999999999999", "64 bits") for key in ("seed", "max_steps", "custom_envs.Lake.max_steps")),
    ("profiler.steps=[-99999999999999999999]", "64 bits"),
    ("whiten_advantages=1", "bool"), ("track_with=5", "str, or list of str"), ("system_envs.A=1.5", "str"),
    *((f"exp_name={name}", "matching") for name in ("a/b", "..", ".", ".hidden", "x" * 201)),
    ("resume_from_checkpoint=3", "bool, or str"), ("actor_train=3", "section"), ("critic=[1]", "section, or null"),
    *((f"{RATE}={value}", "more than 0") for value in ("fast", "0")),
    *((f"{RATE}={value}", "finite") for value in ("inf", "nan", "-inf")),
    ("actor_train.model_args.dtype=fp8", "one of: fp32, bf16, fp16, or null"),
    ("actor_infer.generating_args.num_beams=4", "only 1"), ("actor_infer.generating_args.top_p=1.5", "at most 1"),
    ("actor_train.device_mapping=[0,0]", "every device id once"), ("actor_train.device_mapping=[7,8]", "8"),
    ("custom_envs.Lake.max_steps=0", "int, at least 1"), ("train_env_manager.num_env_groups=4", "env_groups"),
    ("train_env_manager.tags=Lake", "list of str, at least 1 long write [Lake]"),
    ("train_env_manager.tags=[Lake,3]", "train_env_manager.tags.1 str"),
    # names, files and devices that do not exist
    ("train_env_manager.tags=[Lak]", "did you mean Lake?"), ("custom_envs.Lake.env_type=frozen_lak", "frozen_lake"),
    ("custom_envs.Lake.env_config.size=99", ""), ("custom_envs.Boxes.env_manager_cls=stepp", "did you mean step?"),
    (f"{GENERATOR}=vlm", "did you mean vllm?"), (f"{GENERATOR}=fsdp2_train", ""), (f"{TRAINER}=vllm", ""),
    (f"{TRAINER}=no_such_pkg.x:Y", ""), ("track_with=tensorbord", "tensorboard"), ("adv_estimator=reinforc", ""),
    ("actor_train.data_args.template=chatmll", "did you mean 'chatml'?"), ("pg_variant=dppo", "did you mean dppo_"),
    ("pretrain=./no/such/model", "nothing at this path"), ("val_env_manager.worker_cls=not a path", ""),
    ("resume_from_checkpoint=./no/such/checkpoint", ""),
    ("weight_update_deltas=true", "false: every generating worker is on the trainer's node"),
    # rules between keys
    *((override, "") for override in (
        "actor_train.training_args.gradient_accumulation_steps=3", "actor_train.num_gpus_per_worker=3",
        "actor_train.num_gpus_per_worker=2", "actor_train.world_size=3",
        "actor_train.strategy_args.strategy_config.fsdp_size=3", "train_env_manager.n_groups=[3]",
        "val_env_manager.n_groups=[8]", "val_env_manager.n_groups=[8,0]", "val_env_manager.tag_weights=[1]",
        "train_env_manager.tags=[Lake,Lake]", "train_env_manager.max_traj_per_env=0", "sequence_length=2000",
        "custom_envs.Lake.max_tokens_per_step=2000", "actor_infer.generating_args.max_new_tokens=2000",
        "actor_train.max_tokens_per_microbatch_in_infer=4096", "actor_infer.generating_args.do_sample=false",
        "train_env_manager.generating_args.temperature=0.5", "warm_start.min_success=0.5",
        "custom_envs.Lake.history_length=2", "track_with=[stdout,stdout]", "turn_level_gae=true",
        "custom_envs.Lake.agent_template='{obsrvation} {turn}'", "tracker_kwargs={wandb:{project:x}}",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("override", "words"), WRONG)
def test_a_wrong_value_is_one_problem_at_its_key(problems, override, words):
    ((path, problem),) = problems(override).items()
    assert path.startswith(override.partition("=")[0]) and words in f"{path} {problem.expected} {problem.hint}"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("max_stepz=3", "did you mean max_steps?"),
        ("actor_train.training_args.learning_rat=1", "did you mean learning_rate?"),
        ("actor_trian.infer_batch_size=1", "did you mean actor_train?"),
        ("learning_rate=1", "did you mean actor_train.training_args.learning_rate?"),
        ("max_new_tokens=1", "did you mean actor_infer.generating_args.max_new_tokens?"),
        ("local_rank=0", "remove it: every worker gets its rank from its cluster"),
        ("num_return_sequences_in_group=8", "group_size"),
        ("actor_train.strategy_args.strategy_config.fsdp_sise=2", "did you mean fsdp_size?"),
        ("custom_envs.Lake.env_configs={}", "did you mean env_config?"),
        ("custom_envs.Boxes.env_config.dim_rom=[6,6]", "did you mean dim_room?"),
        ("train_env_manager.num_env_group=3", "did you mean num_env_groups?"),
        ("trainer={total_epochs:3}", "top-level keys here: max_steps"),
        ("dataset_dir=data", "files are relative to the working folder"), ("clip_ratio=0.2", "use pg_clip"),
        ("actor_train.fsdp_size=2", "it belongs to strategy_args.strategy_config of a role with fsdp2_train"),
        ("actor_train.pg_variant=ppo", "pg_variant belongs to the top level"),
        ("actor_infer.dtype=bf16", "did you mean actor_infer.model_args.dtype?"),
        ("rollout_backend=vllm", "use actor_infer.strategy_args.strategy_name"),
        ("rule_of_reward={a:1}", "see docs/configuration.md"),
    ],
)  # fmt: skip
def test_unknown_keys_name_the_nearest_valid_one(problems, override, hint):
    ((path, problem),) = problems(override).items()
    assert path in (key := override.partition("=")[0], key.partition(".")[0])
    assert problem.expected == "no such key" and hint in problem.hint


def test_what_follows_from_other_keys_may_be_left_out(load, problems):
    strategy = "{strategy_name:vllm,strategy_config:{tensor_parallel_size:2}}"
    vllm = f"actor_infer={{strategy_args:{strategy},device_mapping:[8,9]}}"
    free = MINIMAL.replace("num_nodes: 1\n", "num_nodes: null\n")
    heads = "tiny_num_heads=2"
    config = load(vllm, heads, "prompt_length=100", "response_length=28", "sequence_length=null", text=free)
    assert (config.sequence_length, config.num_nodes, config.actor_infer.num_gpus_per_worker) == (128, 2, 2)
    config = load(vllm, heads, "actor_infer.num_gpus_per_worker=2", "num_nodes=3", "sequence_length=2048", text=free)
    assert (config.sequence_length, config.num_nodes) == (2048, 3)
    assert load("actor_infer.strategy_args.strategy_config=null").actor_infer.strategy_args.strategy_config == {}
    assert set(problems("prompt_length=many")) == {"prompt_length"}
    assert set(problems("num_gpus_per_node=0", text=free)) == {"num_gpus_per_node"}


NEWER = "{num_env_groups: 4, group_size: 4, tags: [Lake]}"


def test_newer_spellings_are_the_same_keys(load, problems):
    text = MINIMAL.replace("{env_groups: 4, group_size: 4, tags: [Lake]}", NEWER)
    config = load("train_env_manager.num_groups_partition=[4]", text=text)
    assert (config.train_env_manager.env_groups, config.train_env_manager.n_groups) == (4, [4])
    found = problems("train_env_manager.num_env_groups=zero", text=text)
    assert found["train_env_manager.num_env_groups"].expected == "int, at least 1"


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["rollout_batch_size=18", "actor_train.training_args.gradient_accumulation_steps=1",
          "actor_train.training_args.per_device_train_batch_size=9"], "rollout_batch_size"),
        (["val_env_manager.group_size=3"], "val_batch_size"),
        (["rollout_batch_size=24"], "actor_train.training_args.gradient_accumulation_steps"),
        (["actor_train.strategy_args={strategy_name:megatron_train,strategy_config:{tensor_model_parallel_size:4}}"],
         "actor_train.strategy_args.strategy_config.tensor_model_parallel_size"),
        (["val_env_manager.tag_weights=[1,0]"], "val_env_manager.tag_weights.1"),
        (["train_env_manager.n_groups=[4]", "train_env_manager.tag_weights=[1]"], "train_env_manager.tag_weights"),
        (["val_env_manager.env_groups=1"], "val_env_manager.tags"),
        (["rollout_batch_size=64", "train_env_manager.max_traj_per_env=2"], "train_env_manager.max_traj_per_env"),
        (["actor_train.use_dynamic_batching_in_train=true"], "actor_train.max_tokens_per_microbatch_in_train"),
        (["actor_train.use_dynamic_batching_in_train=true", "actor_train.max_tokens_per_microbatch_in_train=64"],
         "actor_train.max_tokens_per_microbatch_in_train"),
        (["adv_estimator=gae"], "critic"),
        (["use_kl_loss=true", "kl_loss_coef=0.1"], "reference"),
        (["num_nodes=2", "tiny_num_heads=2",
          "actor_infer={strategy_args:{strategy_name:sglang},num_gpus_per_worker:2,device_mapping:[7,8]}"],
         "actor_infer.device_mapping"),
        (["weight_update_deltas=true", "num_nodes=2", "actor_train.model_args.lora_target=q_proj"],
         "weight_update_deltas"),
        (["actor_infer.training_args.learning_rate=1"], "actor_infer.training_args"),
        (["actor_train.generating_args.temperature=0.5"], "actor_train.generating_args"),
        (["actor_infer.data_args.template=x.jinja"], "actor_infer.data_args"),
        (["actor_train.training_args.warmup_ratio=0.1", "actor_train.training_args.warmup_steps=3"],
         "actor_train.training_args.warmup_ratio"),
        (["custom_envs.Lake.agent={command:[echo],retries:3}"], "custom_envs.Lake.agent.retries"),
        (["custom_envs.Lake.agent={command:[echo],port:8000}"], "custom_envs.Lake.agent.port"),
        (["custom_envs.Lake.agent={command:[echo],dialect:hermez}"], "custom_envs.Lake.agent.dialect"),
        (["custom_envs.Boxes.agent={command:[echo]}", "custom_envs.Boxes.history_length=2"],
         "custom_envs.Boxes.history_length"),
        (["custom_envs.Lake.agent={command:[echo]}", "tools={use:{calculator:{tool:calculator,tags:[Lake]}}}"],
         "custom_envs.Lake.agent"),
        (["adv_estimator=gigpo", "custom_envs.Lake.env_manager_cls=step", "custom_envs.Lake.agent={command:[echo]}"],
         "custom_envs.Lake.agent"),
        (["track_with=stdout", "tracker_kwargs={colour:red}"], "tracker_kwargs"),
        (["custom_envs.Lake={env_type:single_turn,env_config:{items:[{prompt:a,answer:b}]}}"], "pretrain"),
    ],
)  # fmt: skip
def test_rules_between_keys(problems, overrides, path):
    assert list(problems(*overrides)) == [path]


OPTIMIZER, MOMENTUM = (f"actor_train.training_args.{name}" for name in ("optimizer", "muon_momentum"))
RATES, ADAPTER = f"{RATE}_of={{model.layers: 1.0e-4}}", "actor_train.model_args.lora_target=q_proj"
CRITIC = "critic={training_args:{per_device_train_batch_size:%d,gradient_accumulation_steps:4},world_size:2}"
TRAINED, GENERATED = (f"{role}.strategy_args.strategy_config" for role in ("actor_train", "actor_infer"))
WEIGHTED = "train_infer_correction.is_weight.enabled=true"
OVERLAP = ("async_generation_ratio=1", WEIGHTED, "max_steps=2")
IN_FLIGHT = ("partial_rollout=false", "kv_after_update=keep")
MORE = ("is_use_additional_prompts=true", "max_additional_running_prompts=1")
PAIRS = ("actor_infer.num_gpus_per_worker=2", "actor_infer.device_mapping=[0, 1]", "tiny_num_heads=2")
ALONE = "no such key without async_generation_ratio: nothing reads it"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((f"{OPTIMIZER}=muon",), {}),
        ((f"{MOMENTUM}=0.9",), {MOMENTUM: "no such key with optimizer adamw: read with muon"}),
        ((f"{OPTIMIZER}=sgd",), {OPTIMIZER: "one of: adamw, muon"}),
        ((f"{OPTIMIZER}=muon", f"{TRAINER}=deepspeed_train"), {OPTIMIZER: "adamw with deepspeed_train"}),
        ((f"{OPTIMIZER}=muon", ADAPTER), {OPTIMIZER: "adamw with actor_train.model_args.lora_target: a factor of an "
                                                     "adapter is not the matrix that the layer multiplies by"}),
        ((RATES,), {}),
        ((RATES, ADAPTER),
         {f"{RATE}_of": "nothing with actor_train.model_args.lora_target: the model's own parts stay"}),
        ((RATES, f"{OPTIMIZER}=muon"), {f"{RATE}_of": "nothing with optimizer muon"}),
        (("adv_estimator=gae", CRITIC % 2), {}),
        (("adv_estimator=gae", CRITIC % 1),
         {"critic.training_args.gradient_accumulation_steps": "the global batch (1 per device × 4 accumulated × 2 "
                                                              "data-parallel = 8) to be that of actor_train"}),
        # rollouts beside the training, in steps of 4 groups
        (("async_generation_ratio=1", "actor_train.model_update_frequency=2"),
         {"train_infer_correction.is_weight.enabled": "true with async_generation_ratio 1",
          "actor_train.model_update_frequency": "1 with async_generation_ratio"}),
        (("rollout_window=0.5",), {"rollout_window": ALONE}),
        (("async_generation_ratio=-1",), {"async_generation_ratio": "float, at least 0"}),
        *(((f"async_generation_ratio={endless}",), {"async_generation_ratio": "float, at least 0, finite"})
          for endless in ("1e400", ".nan")),
        (("async_generation_ratio=0.24", WEIGHTED),
         {"async_generation_ratio": "0, or at least 0.25: one of the 4 groups of a step"}),
        (("async_generation_ratio=0.24", WEIGHTED, *MORE), {}),
        ((*OVERLAP, *MORE, "rollout_window=0.5"),
         {"rollout_window": "0 with is_use_additional_prompts: a step takes the first groups that finish"}),
        ((*OVERLAP, *IN_FLIGHT, "max_running_groups=2"), {}),
        (("max_running_groups=2",), {}),
        (IN_FLIGHT, {"partial_rollout": ALONE, "kv_after_update": ALONE}),
        ((*OVERLAP, *IN_FLIGHT, f"{GENERATOR}=sglang"), {"kv_after_update": "recompute with sglang"}),
        # replicas that evaluate
        (("val_infer={device_mapping: [1]}", "num_gpus_per_node=2"), {}),  # the trainer's: they take turns
        (("val_infer={}",), {}),
        (("val_infer={device_mapping: [0, 1]}",), {"val_infer.device_mapping":
          "none of actor_infer's devices, such as 0: rollouts continue there; or no val_infer"}),
        (("val_infer={device_mapping: [9]}", "num_gpus_per_node=3"), {"val_infer.device_mapping":
          "ids from 0 to 2 (num_nodes 1 × num_gpus_per_node 3), each worker's on one node"}),
        (("val_infer={device_mapping: [2]}", f"{GENERATOR}=vllm", *PAIRS),
         {"val_infer.device_mapping": "a multiple of actor_infer.num_gpus_per_worker = 2 devices"}),
        # options of engines
        ((f"{GENERATOR}=vllm", f"{GENERATED}.gpu_memory_utilization=60", "tiny_num_heads=2"),
         {f"{GENERATED}.gpu_memory_utilization": "float, more than 0, at most 1"}),
        ((f"{TRAINER}=deepspeed_train", f"{TRAINED}.train_batch_size=8"), {f"{TRAINED}.train_batch_size":
          "training_args.per_device_train_batch_size and gradient_accumulation_steps"}),
    ],
)  # fmt: skip
def test_what_keys_expect_of_each_other(problems, overrides, expected):
    assert {path: problem.expected for path, problem in problems(*overrides).items()} == expected


def test_hub_names_and_home_folders_are_accepted_but_no_folders_without_a_model(load, problems, tmp_path, monkeypatch):
    assert load("pretrain=Qwen/Qwen2.5-0.5B-Instruct").pretrain
    for name in ("model", "adapter", "checkpoint-3"):
        (tmp_path / name).mkdir()
    assert "config.json" in problems(f"pretrain={tmp_path}/model")["pretrain"].expected
    (tmp_path / "model" / "config.json").write_text("{}")
    assert "no model_type" in problems(f"pretrain={tmp_path}/model")["pretrain"].hint
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    assert load(f"pretrain={tmp_path}/model").pretrain
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "roll export ~/adapter" in problems("pretrain='~/adapter'")["pretrain"].hint
    assert "did you mean" in problems("pretrain='~/adaptor'")["pretrain"].hint
    assert load("resume_from_checkpoint='~/checkpoint-3'").resume_from_checkpoint == "~/checkpoint-3"
    found = problems("pretrain=~nobody-here/m", "plugins=[~nobody-here/p.py]", "max_steps=0")
    assert found.keys() == {"pretrain", "plugins", "max_steps"}
    assert found["plugins"].got == "~nobody-here/p.py" and "user of this machine" in found["pretrain"].expected
    assert load("system_envs.X='~5 of them'").system_envs == {"X": "~5 of them"}


def test_the_folder_of_a_run_is_answered_with_the_model_saved_in_it(problems, tmp_path):
    run = tmp_path / "run"
    checkpoint = run / "checkpoints" / "checkpoint-30"
    checkpoint.mkdir(parents=True)
    (run / "config.yaml").touch()
    assert "no complete checkpoint" in problems(f"pretrain={run}")["pretrain"].hint
    (checkpoint / "manifest.json").write_text('{"files": {}}')
    (run / "summary.json").write_text(f'{{"checkpoint": "{checkpoint}"}}')
    for folder in (run, checkpoint):
        assert problems(f"pretrain={folder}")["pretrain"].hint.endswith(f"is {checkpoint}/actor_train")


def test_all_mistakes_are_reported_at_once_in_order_of_their_keys(problems):
    wrong = ("seed=x", "max_stepz=1", "rollout_batch_size=18", "custom_envs.Lake.env_type=nope", "track_with=nobody",
             "val_env_manager.n_groups=[1,1]", "actor_infer.strategy_args.strategy_config.speed=1", "nonsense",
             "pretrain=./missing", "actor_train.device_mapping=[9]", "actor_train.training_args.weight_decay=-1",
             "a..b=5", ".a=3", "=5", "größe=3")  # fmt: skip
    found = problems(*wrong)
    assert list(found) == sorted(found)
    assert set(found) >= {each if each in wrong[-4:] else each.partition("=")[0] for each in wrong}
    assert all("is not a key" in found[word].hint for word in wrong[-4:])


def test_a_wrong_value_causes_no_further_problems_in_rules_that_use_it(problems):
    """group_size falls back to its default 1, and 18 episodes would not be reported anyway."""
    envs, args = "train_env_manager", "actor_train.training_args"
    batch = (f"{args}.per_device_train_batch_size=1", f"{args}.gradient_accumulation_steps=9")
    assert {*problems(f"{envs}.group_size=four", "rollout_batch_size=18", *batch)} == {f"{envs}.group_size"}
    # A misspelt key stands for the one it was meant to be, unless that one is given too.
    assert {*problems(f"{envs}.env_group=1", f"~{envs}.env_groups", f"{envs}.n_groups=[3]")} == {f"{envs}.env_group"}
    both = problems(f"{envs}.max_traj_per_en=1", f"{envs}.max_traj_per_env=0")
    assert {*both} == {f"{envs}.max_traj_per_en", f"{envs}.max_traj_per_env"}
    assert {*problems("adv_estimator=gea", "turn_level_gae=true")} == {"adv_estimator"}


def test_checks_of_upper_layers_run_although_other_sections_are_wrong(problems):
    def no_seed_7(config: AgenticConfig) -> list[ConfigProblem]:
        return [ConfigProblem("seed", config.seed, "another seed")] if config.seed == 7 else []

    assert set(problems("seed=7", "max_steps=0", checks=[no_seed_7])) == {"seed", "max_steps"}


def test_problems_tell_path_value_expectation_and_hint():
    text = str(ConfigProblem("a.b", {"x": [1, "é"]}, "int", "did you mean c?"))
    assert text == 'a.b: got {"x": [1, "é"]}, expected int (did you mean c?)'
    assert str(ConfigProblem("a", NOTHING, "str")) == "a: got nothing, expected str"
    assert len(str(ConfigProblem("a", "y" * 1000, "str"))) < 120


@pytest.mark.parametrize(
    ("strategy", "options", "data_parallel"),
    [
        ("fsdp2_train", {}, 16),
        ("deepspeed_train", {"zero_optimization": {"stage": 2}}, 16),
        ("megatron_train", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 4),
        ("megatron_train", {"context_parallel_size": 4, "expert_model_parallel_size": 4}, 4),
    ],
)
def test_global_batch_follows_the_documented_arithmetic(strategy, options, data_parallel):
    batch = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 5}
    section = {"strategy_name": strategy, "strategy_config": options}
    values = {"device_mapping": [*range(16)], "strategy_args": section, "training_args": batch}
    worker = WorkerConfig.model_validate(values)
    assert worker.data_parallel_size == data_parallel
    assert worker.global_train_batch_size == 3 * 5 * data_parallel


def test_options_that_only_the_engine_knows_are_passed_on(load):
    options = load(f"{TRAINER}=megatron_train", f"{TRAINED}.batch_p2p_comm=false").actor_train.strategy_args.typed()
    assert isinstance(options, MegatronConfig) and options.model_extra == {"batch_p2p_comm": False}


@pytest.mark.parametrize("option", ["fsdp2.fsdp_sze=2", "fsdp2.fsdp_size=x", f"megatron.{TP}=0", "deepspeed.bf16=true"])
def test_wrong_options_of_a_strategy_leave_the_critic_to_be_checked(problems, option):
    engine, _, option = option.partition(".")
    key = f"actor_train.strategy_args.strategy_config.{option}"
    found = problems("adv_estimator=gae", "critic={world_size:2,infer_batch_size:0}", f"{TRAINER}={engine}_train", key)
    assert {key.partition("=")[0], "critic.infer_batch_size"} <= found.keys()


def test_batches_are_described_in_words(load):
    assert describe_batches(load("ppo_epochs=2")) == [
        "each step: 4 groups × 4 = 16 episodes, run by 4 groups of environments (4 Lake) × 4 = 16 environments at once",
        "each evaluation: 8 groups × 1 = 8 episodes, run by 8 groups of environments (4 Lake, 4 Boxes) × 1 = "
        "8 environments at once",
        "actor_train: global batch 16 episodes = 2 per device × 4 accumulated × 2 data-parallel; 16 episodes make "
        "1 optimizer step × 2 epochs = 2 per step, 1000 in all; 4 micro-batches per device and optimizer step, 8 "
        "episodes",
    ]


@pytest.mark.parametrize("groups", range(3, 9))
@pytest.mark.parametrize("per_worker", [0, 1, 5, 100])
def test_groups_are_spread_evenly_and_workers_hold_them_all(groups, per_worker):
    manager = EnvManagerConfig(env_groups=groups, group_size=4, tags=["a", "b", "c"], max_env_num_per_worker=per_worker)
    shares = list(manager.groups_per_tag.values())
    assert sum(shares) == groups and max(shares) - min(shares) <= 1
    workers = math.ceil(groups * 4 / per_worker) if per_worker else 1
    assert manager.num_workers == manager.worker_config().num_workers == workers


WEIGHTS = st.lists(st.one_of(st.integers(1, 50), st.floats(0.01, 9.0)), min_size=1, max_size=6)


@given(weights=WEIGHTS, seed=st.integers(0, 9))
def test_each_share_is_right_to_within_one_at_every_length(weights, seed):
    mixture, total, counts = Mixture(weights, seed), sum(map(Fraction, map(str, weights))), Counter[int]()
    for length in range(1, 80):
        counts[mixture[length - 1]] += 1
        assert all(abs(counts[k] - length * Fraction(str(w)) / total) < 1 for k, w in enumerate(weights))


def test_whole_rounds_are_exact_and_the_order_depends_on_the_seed_alone():
    mixture = Mixture([0.7, 0.1, 0.2])
    for start in range(0, 300, 10):
        assert Counter(mixture[start + n] for n in range(10)) == {0: 7, 1: 1, 2: 2}

    def order(seed: int) -> list[int]:
        mixture = Mixture([1, 1, 1], seed)
        return [mixture[n] for n in range(30)]

    backwards = Mixture([1, 1, 1], 5)
    assert order(5) == order(5) == [backwards[n] for n in reversed(range(30))][::-1]
    assert len({tuple(order(seed)) for seed in range(6)}) > 1


def test_weights_spread_groups_and_sampling_arguments_fall_back_to_the_actors(load):
    config = load("val_env_manager.tag_weights=[3,1]")
    assert config.val_env_manager.groups_per_tag == {"Lake": 6, "Boxes": 2}
    assert "(6 Lake, 2 Boxes)" in describe_batches(config)[1]
    config = load("val_env_manager.generating_args.temperature=0.0", "actor_infer.generating_args.top_k=5")
    train, val = map(config.sampling, (config.train_env_manager, config.val_env_manager))
    assert (train.top_k, train.max_new_tokens, val.temperature) == (5, config.response_length, 0.0)


def test_roles_are_those_that_the_algorithm_needs(load):
    both = ["critic.world_size=2", "reference.world_size=1"]
    assert list(load(*both).roles) == ["actor_train", "actor_infer"]
    reference = load(*both, "use_kl_loss=true", "kl_loss_coef=0.01")
    assert list(reference.roles) == ["actor_train", "actor_infer", "reference"]


@pytest.mark.parametrize(
    ("ratio", "window", "extra", "ahead", "draws", "lag"),
    [(1, 0, 0, 4, 1, 1), (2, 0.5, 0, 8, 6, 4), (0.5, 0, 0, 2, 1, 1), (1, 0, 3, 7, 11, 5)],
)
def test_how_far_rollouts_run_ahead_is_told_in_groups_and_steps(load, ratio, window, extra, ahead, draws, lag):
    """Steps of 4 groups."""
    more = (f"is_use_additional_prompts={bool(extra)}", f"max_additional_running_prompts={extra}")
    config = load(f"async_generation_ratio={ratio}", f"rollout_window={window}", WEIGHTED, *more)
    assert (config.groups_ahead, config.window, config.max_lag) == (ahead, draws, lag)
    told = (f"{ahead} groups ahead of the step", f"{lag} step", f"{draws} draw")
    assert all(words in describe_batches(config)[2] for words in told)
    assert load("async_generation_ratio=3", WEIGHTED, "max_steps=2").max_lag == 1, "none is older than the run"


def record(step: int, ahead: int = 4) -> str:
    line = {"step": step, "groups": 4, "ahead": ahead, "window": 1, "taken": {}, "settled": {}}
    return json.dumps(line) + "\n"


@pytest.fixture
def schedule(tmp_path):
    """That of a whole run of two steps of 4 groups."""
    (tmp_path / "schedule.jsonl").write_text(record(1) + record(2))
    return tmp_path / "schedule.jsonl"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("{}\n", "line 1 is not one of a schedule.jsonl"),
        (record(1) + record(2, ahead=8), "it has 4, 4 and 1 and 4, 8 and 1"),
        (record(1), "it has 1 steps, the last is 1"),
        (record(2) + record(3), "it has 2 steps, the last is 3"),
    ],
)
def test_a_schedule_to_repeat_is_that_of_a_whole_run_under_the_same_limits(load, problems, schedule, text, words):
    load(*OVERLAP, f"replay_schedule={schedule}")
    schedule.unlink() if text is None else schedule.write_text(text)
    found = problems(*OVERLAP, f"replay_schedule={schedule}")
    assert found.keys() == {"replay_schedule"} and words in found["replay_schedule"].hint


def test_a_run_is_repeated_only_by_an_engine_that_waits_for_weights(problems, schedule):
    assert "replay_schedule" in problems("max_steps=2", f"replay_schedule={schedule}")
    found = problems(*OVERLAP, f"replay_schedule={schedule}", f"{GENERATOR}=vllm", "generate_opt_level=0")
    assert found[GENERATOR].expected == "hf_infer with replay_schedule"
    assert found["generate_opt_level"].expected == "1 with replay_schedule"


def test_replicas_that_evaluate_are_the_generator_s_on_devices_of_their_own(load):
    assert "val_infer" not in load().clusters
    config = load("val_infer={device_mapping: [2]}", "num_gpus_per_node=3", "actor_infer.system_envs={A: '1'}")
    cluster = config.clusters["val_infer"]
    assert (cluster.device_mapping, cluster.system_envs) == ([2], {"A": "1"})
    assert cluster.strategy_args == config.actor_infer.strategy_args
    assert any("val_infer" in line for line in describe_placement(config))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("defaults: [bad]\n", "refers to itself"),
        ("a: &a {b: *a}\n", "refers to itself"),
        (f"a: {'[' * 3000}{']' * 3000}\n", "nested too deeply"),
        ("defaults: [5]\n", "Unsupported type in defaults"),
        ("defaults: agentic_sokoban\n", "defaults must be a list"),
        ("defaults: [agentic_sokobann]\n", 'got "agentic_sokobann".*did you mean agentic_sokoban?'),
        ("custom_envs: {null: 3}\n", "Incompatible key type 'NoneType' at custom_envs"),
        ("seed: ${\n", "no viable alternative at input '${' at seed"),
        ("exp_name: tête\n".encode("latin-1"), "utf-8"),
        ("a: [1\nb: 2\n", "bad.yaml"),
        *((text, "") for text in ("a: 1\na: 2\n", "defaults: [nowhere@_here_]\n", "- 1\n", "5\n")),
    ],
)
def test_why_a_file_cannot_be_composed_is_told(tmp_path, text, words):
    (tmp_path / "bad.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigErrors) as caught:
        load_config(AgenticConfig, "bad", tmp_path)
    assert all(each in str(caught.value) for each in words.split(".*"))
    assert "search path" not in str(caught.value) and "object_type" not in str(caught.value)


def test_lists_outside_of_hydras_grammar_are_lists(problems, load):
    text = MINIMAL.replace("Lake:", "Größe:").replace("Lake", "Größe")
    assert load("train_env_manager.tags=[Größe]", text=text).train_env_manager.tags == ["Größe"]
    assert problems("train_env_manager.tags=[Größe]")["train_env_manager.tags.0"].got == "Größe"
    assert problems("max_steps=[1")["max_steps"].got == "[1"


def test_a_list_in_place_of_a_section_hides_no_other_problem(problems):
    found = problems("train_env_manager.tags={a: 1}", "actor_train=[1]", "custom_envs.Lake=[1]", "max_stepz=1")
    assert "list of str" in found["train_env_manager.tags"].expected and "max_stepz" in found
    assert all("section" in found[path].expected for path in ("actor_train", "custom_envs.Lake"))


def test_a_file_with_another_kind_than_what_it_includes_hides_no_problem(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [rlvr_math, _self_]\nmax_stepz: 3\nactor_infer: [1]\n"
        "actor_train: {training_args: {learning_rate: -1e-3}, data_args: {file_name: '${exp_name}'}}\n"
        "rewards: {arithmetic: {verifiers: {name: math}}}\n"
    )
    told = {path: problem.got for path, problem in problems_of(load_config, RLVRConfig, "mine", tmp_path).items()}
    verifier = {"rewards.arithmetic.verifiers": {"name": "math"}}
    assert told == {"actor_infer": [1], RATE: -1e-3, "max_stepz": 3} | verifier


def test_all_wrong_options_of_trackers_are_told_without_their_values(problems):
    found = problems("track_with=[wandb,tensorboard]", "tracker_kwargs={wandb:{projekt:x,mode:1},mlflow:{}}")
    assert all(each in found["tracker_kwargs"].hint for each in ("'project'", "wandb.mode", "tracker_kwargs.mlflow"))
    found = problems("track_with=stdout", "tracker_kwargs={api_key:hunter2}")
    assert "api_key" in str(found["tracker_kwargs"]) and "hunter2" not in str(found["tracker_kwargs"])


@pytest.mark.parametrize(
    ("schema", "name", "key", "hint"),
    [
        (AgenticConfig, "agentic_sokoban", "rewards",
         "it belongs to RLVR and SFT and .*; here the environments give the rewards"),
        (RLVRConfig, "rlvr_math", "judge", "it belongs to the agentic pipeline$"),
        (RLVRConfig, "rlvr_math", "custom_envs", "it belongs to the agentic pipeline; this pipeline uses rewards"),
        (SFTConfig, "sft_math", "preference_loss", r"it belongs to preferences \(DPO\)$"),
        (SFTConfig, "sft_math", "teacher", "it belongs to the agentic pipeline and RLVR and .*responses$"),
    ],
)  # fmt: skip
def test_a_key_of_another_pipeline_is_told_whose_it_is(schema, name, key, hint):
    found = problems_of(load_config, schema, name, SHIPPED, [f"{key}={{}}"])[key]
    assert re.match(hint, found.hint), found.hint


@pytest.mark.parametrize(
    ("line", "path", "kind"),
    [
        *(("7: {a: 1}", "7", "int"), ("on: 1", "True", "bool"), ("system_envs: {1: a}", "system_envs.1", "int")),
        ("critic: {1.5: 1}", "critic.1.5", "float"),
        ("critic: {strategy_args: {strategy_config: {1: 2}}}", "critic.strategy_args.strategy_config.1", "int"),
    ],
)
def test_a_key_that_yaml_takes_for_no_text_is_told_beside_other_problems(problems, line, path, kind):
    found = problems("max_steps=0", text=f"{MINIMAL}\n{line}\n")
    assert "max_steps" in found and "text as the key" in found[path].expected
    assert found[path].hint == f"YAML reads it as {kind}: put it in quotes"


def test_a_stop_string_is_neither_empty_nor_a_spelled_escape():
    for text in ("", r"\n", r"\n\n", r"\t", r"\r\n"):
        (problem,) = GeneratingArguments(stop_strings=["</s>", text]).problems()
        assert problem.path == "stop_strings.1" and problem.got == text
    assert list(GeneratingArguments(stop_strings=["\n", "\\boxed", "\\\\", " "]).problems()) == []


@pytest.mark.parametrize(
    ("given", "length", "warned"),
    [
        ({"max_steps": 5}, "5 optimizer steps", True),
        ({"max_steps": 50}, "50 optimizer steps", False),
        ({"max_steps": 1}, "1 optimizer step", True),
        ({"num_train_epochs": 1}, "1 epoch of optimizer steps", False),
    ],
)
def test_the_length_of_a_run_on_given_samples(given, length, warned):
    training = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "warmup_steps": 10}
    actor = {"training_args": training, "device_mapping": [0], "strategy_args": {"strategy_name": "fsdp2_train"}}
    (line,) = describe_batches(DPOConfig.model_validate({"pretrain": "tiny", "actor_train": actor, **given}))
    assert line.startswith(f"{length}, each on 32 pairs = 16 per device × 2 accumulated × 1 data-par")
    assert ("warmup_steps 10 are not finished when the run ends" in line) == warned


@pytest.mark.parametrize("what", ["config", "migration", "model"])
def test_the_pages_of_keys_of_other_systems_and_of_models_are_current(what):
    command = [sys.executable, str(ROOT / "scripts" / f"generate_{what}_docs.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("schema", [AgenticConfig, RLVRConfig])
def test_every_key_has_a_description(schema):
    assert [path for path, field in leaf_paths(schema) if not field.description] == []


def test_every_page_is_in_the_menu_of_the_site():
    named = re.findall(r'= "([\w/]+\.md)" }', (ROOT / "zensical.toml").read_text(encoding="utf-8"))
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert sorted(named) == sorted(pages)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("range(4)", [0, 1, 2, 3]),
        ("  [7]  ", [7]),
        ("list(range(0,8)) + list(range(16,24))", [*range(8), *range(16, 24)]),
        ("list(range(0, 8, 2)) + [1] + (list(range(9,11)))", [0, 2, 4, 6, 1, 9, 10]),
        ("list([5, 6])", [5, 6]),
        ("list(range(3, -1, -1))", [3, 2, 1, 0]),
        ([4, 2], [4, 2]),
        (None, None),
    ],
)
def test_expressions_and_lists_give_device_ids(text, devices):
    assert parse_device_mapping(text) == devices


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch /tmp/owned')", "open('/etc/passwd')", "(lambda: [0])()", "[0] * 1000000000",
        "[i for i in range(4)]", "list(map(int, '01'))", "list(range(*[0, 4]))", "list(range(stop=4))", "list(range(0,",
        "list(range(0, 4, 0))", "list(range(0, 10**9))", "list(range(0, 1000000000000))", "range()", "range(0)",
        "[0]" + " + [0]" * 100_000, "(" * 400 + "[0]" + ")" * 400, "[True]", "['0']", "[0.0]", "[0, 0]", "[-1]", "[]",
        "list()", "", "0", "0; 1", "\x00", [True], [0, "1"], {"0": 1}, 3, 4.0,
    ],
)  # fmt: skip
def test_anything_else_is_refused_without_being_run(text):
    with pytest.raises(ValueError, match=r"devic|expression|range"):
        parse_device_mapping(text)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=4))
def test_a_sum_of_ranges_agrees_with_python(ranges):
    text = " + ".join(f"list(range({start}, {start + length}, {step}))" for start, length, step in ranges)
    expected = [device for start, length, step in ranges for device in range(start, start + length, step)]
    refused = pytest.raises(ValueError, match="once") if len(set(expected)) < len(expected) else nullcontext()
    with refused:
        assert parse_device_mapping(text) == expected


@given(st.text(max_size=60))
def test_no_text_does_anything_but_parse_or_raise_a_value_error(text):
    try:
        devices = parse_device_mapping(text)
    except ValueError:
        return
    assert devices and all(type(device) is int and device >= 0 for device in devices)


# The section ``judge``: who asks, which devices it may have, and what of ROLL's cluster ``reward`` it becomes

ASKING = "Lake: {env_type: 'tests.support.judged_env:JudgedEnv', env_manager_cls: traj}"
JUDGED = MINIMAL.replace("Lake: {env_type: frozen_lake, env_manager_cls: traj}", ASKING).replace("tiny", "some/model")
ROLL_RUN = Path(__file__).parents[1] / "extras" / "importers" / "files" / "roll" / "run" / "agentic.yaml"


@pytest.fixture
def judged(load):
    """Loads MINIMAL with an environment that asks, with overrides."""
    return partial(load, text=JUDGED)


def test_it_is_a_cluster_of_its_own_and_a_model_that_counts(judged):
    words = "judge={model: some/judge, device_mapping: [0, 1], num_gpus_per_worker: 2, max_tokens: 9}"
    trust = "judge.engine.model_args.trust_remote_code=true"
    config = judged(words, trust)
    assert config.clusters[JUDGE_CLUSTER].num_workers == 1 and config.key_of(JUDGE_CLUSTER) == "judge"
    assert config.models["judge.model"] == "some/judge"
    assert any("judge.engine.model_args.trust_remote_code" in line for line in trusted_code(config))
    (hosted,) = hosted_models(config)
    assert (hosted.cluster, hosted.key, hosted.model) == (JUDGE_CLUSTER, "judge.model", "some/judge")
    assert hosted.judge is config.judge and hosted.worker.num_gpus_per_worker == 2


def test_who_asks_has_a_judge_and_a_judge_is_asked(judged, load):
    assert "the model that Lake (tests.support.judged_env:JudgedEnv) asks" in words_of(judged)["judge"]
    assert "no environment calls a model" in words_of(load, "judge={model: some/judge}")["judge"]


def test_everything_wrong_is_told_at_once(judged, tmp_path):
    trainer = "judge.engine.strategy_args.strategy_name=fsdp2_train"
    given = "judge={model: ./absent, max_tokens: 20, engine: {max_length: 20}}"
    found = words_of(judged, given, "judge.device_mapping=[0,1,9]", "judge.num_gpus_per_worker=2", trainer)
    expected = {
        "judge.model": "there is nothing at this path",
        "judge.max_tokens": "less than engine.max_length = 20",
        "judge.num_gpus_per_worker": "a divisor of 3",
        "judge.engine.strategy_args.strategy_name": "an engine that generates",
    }
    assert {key: words for key, words in expected.items() if words not in found.get(key, "")} == {}, found
    assert "ids from 0" in words_of(judged, "judge={model: a/b, device_mapping: [99]}")["judge.device_mapping"]
    (tmp_path / "blind").mkdir()
    (tmp_path / "blind" / "config.json").write_text('{"model_type": "llama"}')
    blind = words_of(judged, f"judge={{model: {tmp_path / 'blind'}, pictures: true}}")
    assert "blind takes no pictures" in blind["judge.pictures"]
    beside = words_of(judged, "judge={model: a/b, device_mapping: [1]}", "async_generation_ratio=1")
    assert "devices of no role that trains or computes log-probs" in beside["judge.device_mapping"]


def test_the_cluster_reward_of_roll_becomes_it():
    engine = "strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.5}}"
    words = "model_args: {model_name_or_path: some/judge, dtype: bf16}, generating_args: {max_new_tokens: 99, top_p: 1}"
    reward = f"+reward={{{words}, {engine}, device_mapping: 'list(range(0,2))', llm_proxy: {{proxy_type: policy}}}}"
    imported = convert("roll", [ROLL_RUN], [reward, "+train_env_manager.llm_proxy={proxy_type: policy}"])
    assert imported.schema is AgenticConfig
    outcomes = {outcome.key: outcome.kind for outcome in imported.outcomes if "llm_proxy" in outcome.key}
    assert set(outcomes.values()) == {Kind.DROPPED} and len(outcomes) == 2
    for told in ("model: some/judge", "max_tokens: 99", "strategy_name: vllm", "dtype: bf16"):
        assert told in imported.text
    assert any(outcome.kind is Kind.TO_DO and "asks = True" in outcome.note for outcome in imported.outcomes)
    other = convert("roll", [ROLL_RUN], ["+train_env_manager.llm_proxy={proxy_type: openai}"])
    told = {outcome.key for outcome in other.outcomes if outcome.kind is Kind.IMPOSSIBLE}
    assert "train_env_manager.llm_proxy.proxy_type" in told
