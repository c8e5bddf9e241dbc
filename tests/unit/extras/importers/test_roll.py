"""ROLL's files: what their engines, teachers, rewards and devices say together."""

from pathlib import Path

import pytest
import yaml

from roll.configs.agentic import AgenticConfig
from roll.configs.compose import compose_config
from roll.configs.loader import load_composed
from roll.configs.pipeline import PipelineConfig
from roll.configs.rlvr import RLVRConfig
from roll.extras.importers.convert import Imported, convert, report
from roll.extras.importers.draft import Kind
from roll.preflight.choices import CHECKS

RUNS = Path(__file__).parent / "files" / "roll" / "run"
RLVR, AGENTIC = RUNS / "rlvr.yaml", RUNS / "agentic.yaml"
OPTIONS = "actor_train.strategy_args.strategy_config"


def loaded(imported: Imported, tmp_path: Path) -> PipelineConfig:
    """The result as ``roll train`` would read it."""
    (tmp_path / "mine.yaml").write_text(imported.text)
    return load_composed(imported.schema, "mine", compose_config("mine", tmp_path, ()))


def kinds(imported: Imported, kind: Kind) -> set[str]:
    return {outcome.key for outcome in imported.outcomes if outcome.kind == kind}


PRESET = """
deepspeed_zero2:
  fp16: {enabled: auto, loss_scale: 0}
  bf16: {enabled: auto}
  zero_optimization: {stage: 2}
"""


def test_a_preset_may_leave_the_data_type_to_the_model_and_another_type_is_told(tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "deepspeed_zero2.yaml").write_text(PRESET)
    (tmp_path / "config" / "traj_envs.yaml").write_text((RUNS.parent / "config" / "traj_envs.yaml").read_text())
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / "agentic.yaml"
    file.write_text(AGENTIC.read_text())
    imported = convert("roll", [file])
    assert f"{OPTIONS}.fp16" in kinds(imported, Kind.DROPPED), report(imported)
    assert f"{OPTIONS}.fp16" not in kinds(imported, Kind.IMPOSSIBLE)
    words = [f"{OPTIONS}={{fp16: {{enabled: true}}}}"]
    assert f"{OPTIONS}.fp16" in kinds(convert("roll", [AGENTIC], words), Kind.IMPOSSIBLE)


def test_devices_of_the_model_that_is_asked_count(tmp_path):
    words = ["+reward={model_args: {model_name_or_path: a/judge}, strategy_args: {strategy_name: vllm}, "]
    words[0] += "device_mapping: 'list(range(8,10))'}"
    config = loaded(convert("roll", [AGENTIC], [*words, "num_gpus_per_node=8"]), tmp_path)
    assert isinstance(config, AgenticConfig) and config.judge is not None
    assert (config.judge.device_mapping, config.num_nodes) == ([8, 9], 2)


FSDP2 = """
{fsdp_size: 2, param_dtype: bfloat16, reduce_dtype: float32, apply_expert_patch: false,
 wrap_policy: {transformer_layer_cls_to_wrap: [Qwen2DecoderLayer]}}
"""


def test_options_of_fsdp2_by_their_longer_names(tmp_path):
    words = ["actor_train.strategy_args.strategy_name=fsdp2_train", f"{OPTIONS}={''.join(FSDP2.split(chr(10)))}"]
    imported = convert("roll", [RLVR], words)
    config = loaded(imported, tmp_path)
    assert isinstance(config, RLVRConfig)
    assert kinds(imported, Kind.IMPOSSIBLE) == {f"{OPTIONS}.tensor_model_parallel_size"}, report(imported)
    options = config.actor_train.strategy_args.strategy_config
    assert options == {"fsdp_size": 2, "param_dtype": "bf16", "reduce_dtype": "fp32"}


@pytest.mark.parametrize(
    ("given", "asked", "taken", "kind"),
    [
        ("bf16", "bfloat16", "bf16", Kind.DROPPED),
        ("bf16", "auto", "bf16", Kind.DROPPED),
        ("null", "float16", "fp16", Kind.DERIVED),
        ("bf16", "float32", "bf16", Kind.IMPOSSIBLE),
    ],
)
def test_the_data_type_among_the_options_of_an_engine(given, asked, taken, kind, tmp_path):
    key = "actor_infer.strategy_args.strategy_config.dtype"
    imported = convert("roll", [RLVR], [f"actor_infer.model_args.dtype={given}", f"+{key}={asked}"])
    config = loaded(imported, tmp_path)
    assert isinstance(config, RLVRConfig) and config.actor_infer.model_args.dtype == taken
    assert key in kinds(imported, kind)


def test_normalisations_that_nothing_reads_are_left_out(tmp_path):
    words = ["+reward_norm=batch", "+reward_shift=true", "+reward_scale=true", "+use_reward_norm=true"]
    words += ["norm_mean_type=null", "norm_std_type=null"]
    imported = convert("roll", [RLVR], words)
    config = loaded(imported, tmp_path)
    assert isinstance(config, RLVRConfig)
    assert (config.reward_norm, config.reward_shift, config.reward_scale) == ("batch", True, False)
    assert {"reward_scale", "use_reward_norm"} <= kinds(imported, Kind.DROPPED)


def test_a_single_teacher_judges_every_tag_of_a_students_own_samples(tmp_path):
    files, key = [RUNS / "opd.yaml"], "teacher.tag_included"
    tags = "[gsm8k, sums]"
    words = [f"++rewards={{one: {{worker_cls: a.MathRuleRewardWorker, tag_included: {tags}}}}}"]
    assert key in kinds(convert("roll", files, [*words, f"+{key}={tags}"]), Kind.DROPPED)
    imported = convert("roll", files, [*words, f"+{key}=[sums]"])
    (told,) = [each for each in imported.outcomes if each.key == key]
    assert told.kind == Kind.IMPOSSIBLE and "gsm8k" in told.note
    words = ["+student_pretrain=Qwen/Qwen2.5-0.5B", "+is_pure_opd=true"]
    imported = convert("roll", [RUNS / "opd.yaml"], words)
    assert imported.schema is RLVRConfig


def test_checkpoints_of_another_machine_and_rollout_loops_of_ones_own_are_told():
    imported = convert("roll", [RLVR], ["resume_from_checkpoint=/nowhere/checkpoint-50"], CHECKS)
    assert "resume_from_checkpoint" in kinds(imported, Kind.TO_DO) and not imported.problems
    own = "roll.distributed.scheduler.user_defined_rollout_loop.UserDefinedRolloutLoop"
    key = "user_defined_rollout_loop_cls"
    assert key in kinds(convert("roll", [RLVR], [f"+{key}={own}"]), Kind.DROPPED)
    assert key in kinds(convert("roll", [RLVR], [f"+{key}=mine.Loop"]), Kind.IMPOSSIBLE)


WRAPPED = """
{wrapper_args: {tool_reward: 0.1, max_tool_uses: 2},
 tool_configs: [{tool_id: python_code, tool_args: {timeout: 3}}, {tool_id: mcp, tool_args: {server_url: 'http://a/mcp'}},
 {tool_id: search, tool_args: {topk: 3}}]}
"""


def test_tools_that_an_environment_is_wrapped_in_are_those_of_its_tag(tmp_path):
    base = "custom_envs.Boxes.tool_wrapper"
    imported = convert("roll", [AGENTIC], [f"+{base}={''.join(WRAPPED.split(chr(10)))}"])
    config = loaded(imported, tmp_path)
    assert isinstance(config, AgenticConfig) and config.tools is not None
    program, server = config.tools.use["python"], config.tools.servers["mcp"]
    assert (program.tool, program.args, program.tags) == ("python", {"wall_seconds": 3.0}, ["Boxes"])
    assert (server.url, server.tags, config.tools.max_turns) == ("http://a/mcp", ["Boxes"], 2)
    told = {each.key: each.got for each in imported.outcomes if each.kind == Kind.IMPOSSIBLE}
    assert told == {f"{base}.tool_configs": "search", f"{base}.wrapper_args.tool_reward": 0.1}


def test_a_tool_of_several_environments_has_their_tags_and_the_most_time(tmp_path):
    words = [
        "train_env_manager.tags=[Boxes,Shop]",
        "custom_env.Shop.env_type=sokoban",
        "train_env_manager.n_groups=null",
    ]
    for tag, seconds in (("Boxes", 9), ("Shop", 4)):
        entry = f"{{tool_id: python_code, tool_args: {{timeout: {seconds}}}}}"
        words.append(f"+custom_envs.{tag}.tool_wrapper={{tool_configs: [{entry}]}}")
    python = convert("roll", [AGENTIC], words)
    found = yaml.safe_load(python.text)["tools"]["use"]["python"]
    assert (found["tags"], found["args"]) == (["Boxes", "Shop"], {"wall_seconds": 9.0})


def test_an_environment_that_is_not_here_is_told_with_the_nearest():
    imported = convert("roll", [AGENTIC], ["custom_env.Boxes.env_type=webshop"])
    (told,) = [each for each in imported.outcomes if each.kind == Kind.IMPOSSIBLE]
    assert told.key == "custom_envs.Boxes.env_type" and "the nearest here is shop" in told.note


QUESTIONS = """
{env_type: roll_math, max_steps: 4, env_manager_cls: null, agent_template: "{observation}",
 env_config: {dataset_name: some/questions, split: train, question_key: problem, answer_key: null},
 tool_wrapper: {tool_configs: [{tool_id: search, tool_args: {search_url: 'http://a/retrieve', topk: 2}}]}}
"""


def test_questions_of_a_dataset_are_an_environment_of_one_turn_with_its_tools(tmp_path):
    imported = convert("roll", [AGENTIC], [f"custom_envs.Boxes={''.join(QUESTIONS.split(chr(10)))}"])
    config = loaded(imported, tmp_path)
    assert isinstance(config, AgenticConfig) and config.tools is not None
    env = config.custom_envs["Boxes"]
    columns = {"file_name": "some/questions", "prompt": "problem", "answer": "answer"}
    assert (env.env_type, env.env_config) == ("single_turn", {"dataset": columns, "scorer": "math"})
    search = config.tools.use["search"]
    assert (search.tool, search.args) == ("retrieval", {"url": "http://a/retrieve", "num_results": 2})
    assert not kinds(imported, Kind.IMPOSSIBLE), report(imported)
    assert "custom_envs.Boxes.env_config.dataset_name" in kinds(imported, Kind.TO_DO)


def test_a_game_that_tells_itself_is_told_by_the_template(tmp_path):
    words = ["custom_env.Boxes.env_type=sokoban_native_env", "custom_env.Boxes.agent_template=placeholder"]
    imported = convert("roll", [AGENTIC], words)
    config = loaded(imported, tmp_path)
    assert isinstance(config, AgenticConfig)
    env = config.custom_envs["Boxes"]
    assert (env.env_type, env.agent_template) == ("sokoban", None)


def test_the_generator_has_the_adapter_that_is_trained(tmp_path):
    words = ["+actor_train.model_args.lora_target=all-linear", "+actor_infer.model_args.lora_target='q_proj,v_proj'"]
    config = loaded(convert("roll", [AGENTIC], words), tmp_path)
    assert isinstance(config, AgenticConfig)
    assert (config.actor_train.model_args.lora_target, config.actor_infer.model_args.lora_target) == (
        "all-linear",
        None,
    )


def test_a_file_that_trains_nothing_is_an_evaluation(tmp_path):
    words = ["~actor_train", "~reference", "~val_env_manager", "~async_generation_ratio", "max_steps=9"]
    imported = convert("roll", [AGENTIC], words)
    config = loaded(imported, tmp_path)
    assert isinstance(config, AgenticConfig) and config.eval_only
    assert (config.val_batch_size, config.val_env_manager.env_groups, config.val_env_manager.tags) == (32, 8, ["Boxes"])
    assert "max_steps" in kinds(imported, Kind.DROPPED)


RUNNER = "roll.pipeline.agentic.agent_runner.gem_runner.GEMRunner"


def test_a_runner_that_plays_turns_is_the_manager_itself(tmp_path):
    words = [
        "env_manager_cls=roll.pipeline.agentic.env_manager.proxy_env_manager.ProxyEnvManager",
        f"+custom_env.Boxes.agent_runner_cls={RUNNER}",
    ]
    imported = convert("roll", [AGENTIC], words)
    config = loaded(imported, tmp_path)
    assert isinstance(config, AgenticConfig) and config.custom_envs["Boxes"].env_manager_cls == "traj"
    assert not kinds(imported, Kind.IMPOSSIBLE), report(imported)
    words[1] = "+custom_env.Boxes.agent_runner_cls=mine.Runner"
    assert kinds(convert("roll", [AGENTIC], words), Kind.IMPOSSIBLE) == {"custom_envs.Boxes.agent_runner_cls"}


@pytest.mark.parametrize(
    ("word", "told"), [("warmup_steps=20", True), ("warmup_ratio=0.1", True), ("warmup_steps=0", False)]
)
def test_a_warm_up_begins_otherwise_and_this_is_told(word, told):
    base = "actor_train.training_args"
    imported = convert("roll", [RLVR], [f"+{base}.warmup_steps=0", f"+{base}.warmup_ratio=0", f"+{base}.{word}"])
    assert any("rate k / W" in note for note in imported.notes) == told
