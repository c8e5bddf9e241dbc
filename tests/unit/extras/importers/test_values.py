"""Values that the other systems have as constants or defaults, and that are written out here."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll.configs.pipeline import ProfilerConfig
from roll.extras.importers import chatlearn
from roll.extras.importers.convert import DERIVE as DERIVATIONS
from roll.extras.importers.convert import Imported, convert
from roll.extras.importers.draft import Draft, Kind, value_at
from roll.extras.importers.reading import Given, read
from roll.extras.importers.table import DERIVE, rows
from roll.preflight.choices import CHECKS
from tests.unit.extras.importers.test_tables import GIVEN

FILES = Path(__file__).parent / "files"
ROLL = FILES / "roll" / "run"


def values(system: str, file: Path, *words: str) -> tuple[Imported, dict[str, Any]]:
    imported = convert(system, [file], words, CHECKS)
    return imported, yaml.safe_load(imported.text)


def kind_of(imported: Imported, key: str) -> set[Kind]:
    return {each.kind for each in imported.outcomes if key in each.key.split(", ")}


@pytest.mark.parametrize(("clip", "bound"), [(0.2, 1.4), (0.1, 1.2), (0.28, 1.56)])
def test_the_dual_clip_of_roll_follows_its_clip_range(clip, bound):
    words = ("dual_clip_loss=true", f"pg_clip={clip}", "actor_train.pg_variant=ppo", "use_topr_loss=false")
    _, config = values("roll", ROLL / "rlvr.yaml", *words)
    assert (config["dual_clip_loss"], config["dual_clip_c"]) == (True, bound)
    _, off = values("roll", ROLL / "rlvr.yaml", "dual_clip_loss=false")
    assert "dual_clip_c" not in off
    _, unread = values("roll", ROLL / "rlvr.yaml", "dual_clip_loss=true", "actor_train.pg_variant=cispo")
    assert "dual_clip_c" not in unread


def test_the_kl_loss_of_roll_is_k3():
    loss = ("use_kl_loss=true", "kl_loss_coef=0.01")
    _, alone = values("roll", ROLL / "rlvr.yaml", *loss, "add_token_level_kl=false")
    assert alone["kl_penalty"] == "k3"
    _, both = values("roll", ROLL / "rlvr.yaml", *loss, "add_token_level_kl=true", "kl_penalty=mse")
    assert (both["kl_penalty"], both["kl_loss_penalty"]) == ("mse", "k3")
    _, usual = values("roll", ROLL / "rlvr.yaml", *loss, "add_token_level_kl=true")
    assert usual["kl_loss_penalty"] == "k3" and usual.get("kl_penalty", "k1") in ("k1", "kl")


def test_a_distillation_of_roll_clips_no_gradients_unless_it_says_so():
    _, config = values("roll", ROLL / "distill.yaml")
    assert config["max_grad_norm"] >= 1e6
    _, bounded = values("roll", ROLL / "distill.yaml", "max_grad_norm=0.5")
    assert bounded["max_grad_norm"] == 0.5
    imported, zero = values("roll", ROLL / "rlvr.yaml", "max_grad_norm=0")
    assert zero["max_grad_norm"] >= 1e6 and not imported.problems


@pytest.mark.parametrize("name", ["dpo.yaml", "sft.yaml", "distill.yaml"])
def test_nodes_follow_from_the_devices_of_training_on_given_samples(name):
    words = ["num_gpus_per_node=2", "actor_train.device_mapping='list(range(0,4))'"]
    if name == "distill.yaml":
        words[1] = words[1].replace("actor_train", "student")
    if name == "sft.yaml":
        words[1] = words[1].replace("actor_train", "sft_train")
    imported, config = values("roll", ROLL / name, *words)
    assert config["num_nodes"] >= 2 and not any(each.path == "num_nodes" for each in imported.problems)


def test_a_tracker_that_is_not_here_is_left_to_the_user():
    imported, config = values("roll", ROLL / "rlvr.yaml", "track_with=ml_tracker", "tracker_kwargs={project: p}")
    assert config["track_with"] == "stdout" and "tracker_kwargs" not in config
    assert Kind.TO_DO in kind_of(imported, "track_with") and not imported.problems


def test_a_reward_worker_without_a_counterpart_trains_on_no_other_reward():
    imported, config = values("roll", ROLL / "rlvr.yaml", "rewards.sums.worker_cls=mine.rewards.PoemRewardWorker")
    (verifier,) = (each for each in config["rewards"]["sums"]["verifiers"] if each["name"] != "format")
    assert verifier == {"name": "custom", "args": {"path": "poem_reward_worker.py:score"}}
    assert imported.problems and value_at(config, "rewards.sums.verifiers") is not None
    assert Kind.IMPOSSIBLE in kind_of(imported, "rewards.sums.worker_cls")


VERL = FILES / "run_verl.sh"
SIZES = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 1}


def test_the_model_engine_of_verl_names_the_trainer():
    sizes = [f"actor_rollout_ref.actor.megatron.{key}={value}" for key, value in SIZES.items()]
    imported, config = values("verl", VERL, "model_engine=megatron", *sizes)
    strategy = config["actor_train"]["strategy_args"]
    assert strategy["strategy_name"] == "megatron_train"
    assert {key: strategy["strategy_config"].get(key, 1) for key in SIZES} == SIZES
    assert config["reference"]["strategy_args"]["strategy_name"] == "megatron_infer"
    assert Kind.UNKNOWN not in {each.kind for each in imported.outcomes}
    for engine in ("dp", "veomni"):
        _, config = values("verl", VERL, f"model_engine={engine}")
        assert config["actor_train"]["strategy_args"]["strategy_name"] == "fsdp2_train"
    other, _ = values("verl", VERL, "model_engine=torchtitan")
    assert kind_of(other, "model_engine") == {Kind.IMPOSSIBLE}


def test_the_gates_of_sapo_come_from_verl():
    gates = ("actor_rollout_ref.actor.tau_pos=0.8", "actor_rollout_ref.actor.tau_neg=1.2")
    _, config = values("verl", VERL, *gates, "actor_rollout_ref.actor.policy_loss.loss_mode=sapo")
    assert (config["sapo_tau_pos"], config["sapo_tau_neg"]) == (0.8, 1.2)
    imported, config = values("verl", VERL, *gates)
    assert "sapo_tau_pos" not in config and imported.exit_code == 0


def test_what_moves_the_optimizers_state_of_verl_loses_nothing():
    base = "actor_rollout_ref.actor.optim.override_optimizer_config"
    words = [f"{base}.optimizer_cpu_offload=true", f"{base}.optimizer_offload_fraction=1.0"]
    words += [
        "actor_rollout_ref.actor.megatron.offload.param.target=cpu",
        "actor_rollout_ref.rollout.server.timeout=60",
    ]
    imported, _ = values("verl", VERL, "model_engine=megatron", *words)
    assert all(kind_of(imported, word.partition("=")[0]) == {Kind.DROPPED} for word in words)
    assert imported.exit_code == 0


def test_a_supervised_trainer_with_an_engine_is_known_by_what_it_builds_on(tmp_path):
    file = tmp_path / "engine.yaml"
    data = "train_batch_size: 64, messages_key: messages, train_files: /d/a.parquet, max_length: 512, truncation: right"
    file.write_text(
        "defaults:\n- model@model: hf_model\n- engine@engine: fsdp\n- optim@optim: fsdp\n- _self_\n"
        f"data: {{{data}}}\ntrainer: {{n_gpus_per_node: 4, nnodes: 1, logger: [console]}}\n"
    )
    imported = convert("verl", [file], ["model.path=Qwen/Qwen2.5-0.5B", "optim.lr=2e-5"])
    config = yaml.safe_load(imported.text)
    assert imported.schema.__name__ == "SFTConfig"
    assert (config["sequence_length"], config["actor_train"]["training_args"]["learning_rate"]) == (512, 2e-5)


def test_devices_of_chatlearn_that_only_a_shell_knows_are_asked_for(tmp_path):
    content = yaml.safe_load((FILES / "chatlearn.yaml").read_text())
    content["models"]["policy"]["num_gpu"] = "${models.policy_trainer.num_gpu}"
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(content))
    script = tmp_path / "run.sh"
    start = "python chatlearn/entrypoint.py grpo --config-file grpo.yaml models.policy_trainer.num_gpu=${num_device}\n"
    script.write_text("#!/bin/bash\nnum_device=$(nvidia-smi -L | wc -l)\n" + start)
    asked = convert("chatlearn", [script])
    assert asked.exit_code == 1
    assert Kind.IMPOSSIBLE in kind_of(asked, "models.policy_trainer.num_gpu")
    (tmp_path / "common.sh").write_text("num_device=4\n")
    script.write_text("#!/bin/bash\nsource common.sh\n" + start)
    read = yaml.safe_load(convert("chatlearn", [script]).text)
    assert read["actor_infer"]["device_mapping"] == "list(range(0,4))" == read["actor_train"]["device_mapping"]


def test_devices_that_only_a_shell_knows_are_whole_nodes_that_hold_the_layout(tmp_path):
    content = yaml.safe_load((FILES / "chatlearn.yaml").read_text())
    content["models"]["policy"] |= {"num_gpu": "${models.policy_trainer.num_gpu}", "tensor_model_parallel_size": 16}
    content["models"]["ref_policy"]["num_gpu"] = "${models.policy_trainer.num_gpu}"
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(content))
    script = tmp_path / "run.sh"
    words = "runtime_args.train_backend=megatron models.policy_trainer.num_gpu=${num_device}"
    sizes = {"tensor": 4, "pipeline": 2, "context": 3}
    words += "".join(f" models.policy_trainer.{key}_model_parallel_size={size}" for key, size in sizes.items())
    words = words.replace("context_model", "context")
    start = f"python chatlearn/entrypoint.py grpo --config-file {tmp_path}/grpo.yaml {words}\n"
    script.write_text(start)
    assert values("chatlearn", script)[1]["actor_train"]["device_mapping"] == "list(range(0,48))"
    count = '[ -z "$GPUS_PER_NODE" ] && export GPUS_PER_NODE=$(nvidia-smi -L | wc -l)\n'
    script.write_text(f"{count}num_device=$((1 * $GPUS_PER_NODE))\n{start}")
    imported, config = values("chatlearn", script)
    assert config["actor_train"]["device_mapping"] == "list(range(0,48))" and config["num_nodes"] == 6
    (told,) = (each for each in imported.outcomes if "GPUS_PER_NODE" in each.note)
    assert told.kind == Kind.IMPOSSIBLE and told.key == "models.policy_trainer.num_gpu"
    assert config["actor_infer"]["num_gpus_per_worker"] == 8  # an engine stays on a node
    assert Kind.TO_DO in kind_of(imported, "models.policy.tensor_model_parallel_size")


def test_one_length_of_chatlearn_for_prompt_and_answer_is_shared(tmp_path):
    content = yaml.safe_load((FILES / "chatlearn.yaml").read_text())
    for key in ("max_prompt_tokens_length", "max_response_tokens_length"):
        del content["models"]["policy"][key]
    content["models"]["policy"]["seq_length"] = 2048
    (tmp_path / "old.yaml").write_text(yaml.safe_dump(content))
    imported, config = values("chatlearn", tmp_path / "old.yaml")
    lengths = [config.get(key) for key in ("prompt_length", "response_length")]
    assert lengths == [512, 1536] and config.get("sequence_length", 2048) == 2048
    assert Kind.IMPOSSIBLE in kind_of(imported, "models.policy.seq_length")


def test_agents_and_rollouts_of_several_episodes_of_chatlearn_are_reported_once():
    words = ("+runtime_args.task_type=agent", "+runtime_args.raw_chat=true", "+runtime_args.use_partial_rollout=true")
    words += ("+models.partial_rollout_manager={max_rollout_round: 2, rollout_ratio: [0.5, 0.5]}",)
    imported, _ = values("chatlearn", FILES / "chatlearn.yaml", *words)
    lost = {each.key for each in imported.outcomes if each.kind in (Kind.IMPOSSIBLE, Kind.UNKNOWN)}
    assert lost == {"runtime_args.task_type", "runtime_args.use_partial_rollout"}
    older, _ = values("chatlearn", FILES / "chatlearn.yaml", "+models.agent={num_cpu: 2, cpu_per_process: 1}")
    lost = {each.key for each in older.outcomes if each.kind in (Kind.IMPOSSIBLE, Kind.UNKNOWN)}
    assert lost == {"models.agent"}


FROM_PARTS = re.compile(r"no_(load|save)_(optim|rng)|(clip_ratio|swanlab|profile)_\w+|\w+_token_size|mstx|export_type")
"""Names of keys that the code puts together, and those of a profiler, of which one switch is read."""


@pytest.mark.parametrize("system", ["chatlearn", "mindspeed"])
def test_what_rows_leave_to_a_derivation_is_read_by_one(system):
    folder = Path(chatlearn.__file__).parent
    names = (f"{system}.py", "verl_tools.py", "common.py")
    code = "".join((folder / name).read_text() for name in names)
    left = {row.name for row in rows(system) if row.how == DERIVE and row.name not in code}
    assert [name for name in sorted(left) if not FROM_PARTS.fullmatch(name)] == []


def test_what_chatlearn_does_not_say_has_its_defaults():
    rate = "models.policy_trainer.optimizer"
    _, config = values("chatlearn", FILES / "chatlearn.yaml", f"++{rate}={{lr: 1.0e-6}}")
    arguments = config["actor_train"]["training_args"]
    assert arguments["lr_scheduler_type"] == "constant_with_warmup"
    assert (arguments["weight_decay"], arguments["adam_beta2"]) == (0.01, 0.95)
    assert config.get("loss_agg_mode", "token-mean") == "token-mean"
    falling = ("lr_decay_style=cosine", "min_lr=2.0e-7", "lr=1.0e-6", "lr_warmup_iters=5")
    _, config = values("chatlearn", FILES / "chatlearn.yaml", *(f"+{rate}.{word}" for word in falling))
    arguments = config["actor_train"]["training_args"]
    assert (arguments["lr_scheduler_type"], arguments["min_lr_ratio"], arguments["warmup_steps"]) == ("cosine", 0.2, 5)


def test_losses_of_mindspeed_are_means_over_tokens():
    for stage in ("ray_grpo", "ray_dapo"):
        _, config = values("mindspeed", FILES / "mindspeed.yaml", f"megatron_training.stage={stage}")
        assert config["loss_agg_mode"] == "token-mean"


VERL_FILE = "actor_rollout_ref.actor.profiler"
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
    DERIVATIONS[system](draft)
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
        (
            "verl",
            {**STEPS, f"{VERL_FILE}.enable": True, f"{VERL_FILE}.ranks": [0, 2]},
            {"steps": [1, 3], "ranks": [0, 2]},
        ),
        (
            "verl",
            {**STEPS, f"{VERL_FILE}.enable": True, f"{VERL_FILE}.all_ranks": True},
            {"steps": [1, 3], "ranks": None},
        ),
        (
            "verl",
            {
                **STEPS,
                f"{VERL_FILE}.all_ranks": True,
                f"{VERL_FILE}.tool_config.torch.contents": ["cpu", "cuda", "stack"],
            },
            {"steps": [1, 3], "ranks": None, "stacks": True},
        ),
        (
            "verl",
            {**STEPS, "global_profiler.tool": "torch_memory", f"{VERL_FILE}.enable": True, f"{VERL_FILE}.ranks": [0]},
            {"steps": [1, 3], "ranks": [0], "memory": True},
        ),
        (
            "verl",
            {
                "trainer.profile_steps": [2],
                "trainer.worker_nsight_options": {"trace": "cuda", "capture-range": "cudaProfilerApi", "kill": None},
                f"{VERL_FILE}.all_ranks": True,
            },
            {"nsight": {"trace": "cuda"}, "ranks": None},
        ),
        ("verl", {**STEPS, f"{VERL_FILE}.enable": False, f"{VERL_FILE}.ranks": [0]}, None),
        ("verl", {f"{VERL_FILE}.enable": True, f"{VERL_FILE}.ranks": [0]}, None),
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
def test_recordings(system, keys, expected):
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
def test_trackers_of_verl(names, expected, projects):
    draft = drafted("verl", {"trainer.logger": names, "trainer.project_name": "p"})
    assert draft.get("track_with") == expected and draft.get("tracker_kwargs") == projects


def test_trackers_and_recordings_of_other_runs_of_roll():
    options = {"project": "p", "experiment_name": "e", "logdir": "here", "login_kwargs": {"api_key": "hunter2"}}
    draft = drafted("roll", {"track_with": "swanlab", "tracker_kwargs": options})
    assert draft.get("track_with") == "swanlab"
    assert draft.get("tracker_kwargs") == {"project": "p", "name": "e", "log_dir": "here"}
    path = GIVEN["roll"].with_name("sft.yaml")
    text = convert("roll", [path], ["profiler_timeline=true"]).text
    assert yaml.safe_load(text)["profiler"] == {"steps": [2], "stacks": True}
