"""verl's runs as people's scripts spell them: what becomes of sizes, losses, teachers, tools and trainers."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from roll.configs.offline import SFTConfig
from roll.configs.rlvr import RLVRConfig
from roll.extras.importers.recognise import system_of
from roll.pipeline.programs import program_of
from tests.support.choice import one_in
from tests.unit.extras.importers.imported import DERIVED, DROPPED, GIVEN, IMPOSSIBLE, LOST, TO_DO, UNKNOWN, imported

SCRIPT = GIVEN["verl"].read_text()
MEGATRON = SCRIPT.replace("main_ppo \\", "main_ppo --config-name=ppo_megatron_trainer.yaml \\")
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
OPTIM, CORRECTION, REWARD = f"{ACTOR}.optim", "algorithm.rollout_correction", "reward_model"
TURNS, TEACHERS, LOSS = f"{ROLLOUT}.multi_turn", "distillation.teacher_models", "distillation.distillation_loss"
TRAINED = "actor_train.training_args"
GAE = "algorithm.adv_estimator=gae"
verl = partial(imported, "verl")


def test_a_launch_script(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    found = verl(f"{OPTIM}.weight_decay=0.1", lost=set())
    expected = {
        "actor_train.data_args.file_names": [f"/home/me/data/{name}/train.parquet" for name in ("gsm8k", "math")],
        "prompt_length": 512, "response_length": 768, "sequence_length": 1280, "exp_name": "a_run", "total_epochs": 3,
        "actor_train.global_train_batch_size": 16 * 8, "actor_train.max_tokens_per_microbatch_in_train": 2560,
        "actor_train.data_args.prompt_overflow": "left", "use_pg_clip_range": True, "pg_clip_low": 0.2,
        "pg_clip_high": 0.28, "dual_clip_loss": True, "dual_clip_c": 3.0, "kl_penalty": "low_var_kl",
        "kl_loss_coef": 0.002, f"{TRAINED}.weight_decay": 0.1, "reference.num_devices": 4,
        "val_sampling.num_return_sequences": 4, "val_sampling.temperature": 0.6,
    }  # fmt: skip
    assert found.schema is RLVRConfig and {key: found[key] for key in expected} == expected
    assert found.config.with_length(320).max_steps == 30 and set(found.config.domains.values()) == {"gsm8k", "math"}
    assert ("trainer.default_local_dir", TO_DO) in found.kinds  # $(date)


def corrected(*words: str) -> list[str]:
    return [f"{CORRECTION}.rollout_{word}" for word in words]


SERVICE = "http://sandbox:8080/run_code"
ISOLATED = ["data.train_files=taco/train.parquet", "data.val_files=taco/test.parquet"]
ISOLATED += [f"{REWARD}.sandbox_fusion.url={SERVICE}", f"{REWARD}.sandbox_fusion.max_concurrent=64"]
FUNCTION = [f"{REWARD}.reward_manager=batch", f"{REWARD}.reward_kwargs={{bonus: 2}}", f"{MODEL}.external_lib=json"]
FUNCTION += ["custom_reward_function.path=mine.py", "custom_reward_function.name=score_all"]
OLDER = [f"{REWARD}.enable=true", f"{REWARD}.model.path=/", f"{ACTOR}.use_token_level_loss=false"]
OLDER += ["custom_reward_function.overlong_buffer.enable=true", "custom_reward_function.overlong_buffer.len=128"]
NEWER = ["reward.reward_model.enable=true", "reward.reward_model.model_path=/", "trainer.n_gpus_per_node=4"]
NEWER += ["reward.reward_model.rollout.tensor_model_parallel_size=2"]
SIZES = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 1}
ENGINE = ["model_engine=megatron", *(f"{ACTOR}.megatron.{key}={size}" for key, size in SIZES.items())]
MOVED = f"{OPTIM}.override_optimizer_config.optimizer_"
MOVES = [f"{MOVED}cpu_offload", f"{MOVED}offload_fraction", f"{ACTOR}.megatron.offload.param.target"]
MOVES += [f"{ROLLOUT}.server.timeout"]
EXTRA = "megatron.override_transformer_config"
OWN = [f"{ACTOR}.strategy=megatron", GAE, f"{ACTOR}.{EXTRA}.recompute_granularity=full"]
OWN += [f"critic.{EXTRA}.recompute_granularity=selective", f"critic.{EXTRA}.apply_rope_fusion=true"]
OWN += [f"{ACTOR}.{EXTRA}.recompute_modules=[core_attn]", f"critic.{EXTRA}.key_of_nobody=1"]
HELD_OUT = f"{ROLLOUT}.val_kwargs"
CISPO = [f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_high=0.2"]
GATES = [f"{ACTOR}.tau_pos=0.8", f"{ACTOR}.tau_neg=1.2"]

# What is said: words, keys of the result, kinds of their keys: all that are lost, and those that matter here.
CASES = {
    **{f"{loss} averages each answer": ([f"{ACTOR}.policy_loss.loss_mode={loss}", f"{ACTOR}.loss_agg_mode=token-mean"],
        {"loss_agg_mode": "seq-mean-token-mean"}, {}) for loss in ("gspo", "sapo", "geo_mean")},
    "the gates of SAPO": ([*GATES, f"{ACTOR}.policy_loss.loss_mode=sapo"], {"sapo_tau_pos": 0.8, "sapo_tau_neg": 1.2},
        {}),
    "gates that nothing reads": (GATES, {"pg_variant": "ppo"}, {}),
    "a lower bound that no ratio reaches": ([*CISPO, f"{ACTOR}.clip_ratio_low=10"],
        {"cispo_epsilon_low": 1.0, "cispo_epsilon_high": 0.2, "pg_clip_low": 1.0}, {}),
    "a sum of tokens, divided": ([f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"], {"loss_agg_norm": 768}, {}),
    "a sum of tokens, divided by a number": ([f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
        f"{ACTOR}.loss_scale_factor=100"], {"loss_agg_norm": 100}, {}),
    "the cut of DPPO": ([f"{ACTOR}.policy_loss.loss_mode=dppo_tv", f"{ACTOR}.clip_ratio_c=3.0"], {},
        {f"{ACTOR}.clip_ratio_c": IMPOSSIBLE}),
    "a cut of DPPO that cuts nothing": ([f"{ACTOR}.policy_loss.loss_mode=dppo_tv", f"{ACTOR}.clip_ratio_c=10000.0"],
        {}, {}),
    # sizes and schedules
    "groups of agents": ([f"{ROLLOUT}.n_agent=5", f"{ROLLOUT}.n=1", f"{ACTOR}.ppo_mini_batch_size=40"],
        {"num_return_sequences_in_group": 5, "actor_train.global_train_batch_size": 40}, {}),
    "micro-batches": ([f"{ACTOR}.use_dynamic_bsz=False", f"{ACTOR}.ppo_micro_batch_size=8",
        *(f"actor_rollout_ref.{part}.log_prob_micro_batch_size=16" for part in ("rollout", "ref"))],
        {f"{TRAINED}.per_device_train_batch_size": 2, "reference.infer_batch_size": 4,
         "actor_train.infer_batch_size": 4}, {}),
    "batches of a schedule": ([f"{OPTIM}.lr_warmup_steps=10", f"{OPTIM}.lr_scheduler_type=cosine",
        f"{OPTIM}.lr_decay_steps=50", f"{ACTOR}.ppo_epochs=3"],
        {"optimizer_steps_per_epoch": 2, f"{TRAINED}.warmup_steps": 60, f"{TRAINED}.lr_decay_steps": 300}, {}),
    "schedules of two": ([GAE, "critic.optim.lr_warmup_steps=4", f"{OPTIM}.lr_warmup_steps_ratio=0.1"],
        {"critic.training_args.warmup_steps": 8, f"{TRAINED}.warmup_ratio": 0.1}, {}),
    "a text for a number": ([f"{ROLLOUT}.n=many"], {"num_return_sequences_in_group": 1}, {f"{ROLLOUT}.n": IMPOSSIBLE}),
    **{f"a key of somebody's own, {key}": ([f"{key}=1"], {}, {key: UNKNOWN})
        for key in (f"{MODEL}.vla", f"{ROLLOUT}.use_tree_search", f"{ACTOR}.policy_loss.own_share")},
    # engines
    "the engine names the trainer": (ENGINE, {"actor_train.strategy_args.strategy_name": "megatron_train",
        **{f"actor_train.strategy_args.strategy_config.{key}": size for key, size in SIZES.items() if size > 1},
        "reference.strategy_args.strategy_name": "megatron_infer"}, {}),
    **{f"the engine {name}": ([f"model_engine={name}"], {"actor_train.strategy_args.strategy_name": "fsdp2_train"}, {})
        for name in ("dp", "veomni")},
    "an engine that is not here": (["model_engine=torchtitan"], {}, {"model_engine": IMPOSSIBLE}),
    "what moves the optimizer's state": (["model_engine=megatron", *(f"{key}={value}" for key, value in
        zip(MOVES, ("true", "1.0", "cpu", "60"), strict=True))], {}, dict.fromkeys(MOVES, DROPPED)),
    "a critic's own fields of Megatron": (OWN,
        {"actor_train.strategy_args.strategy_config.recompute_granularity": "full",
         "critic.strategy_args.strategy_config.recompute_granularity": "selective"},
        {f"critic.{EXTRA}.key_of_nobody": UNKNOWN}),
    "quantised rollouts": ([f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.quantization=fp8"],
        {"actor_infer.strategy_args.strategy_config.quantization": "fp8_per_block"}, {}),
    **{f"{method} of {name}": ([f"{ROLLOUT}.name={name}", f"{ROLLOUT}.quantization={method}"], {},
        {f"{ROLLOUT}.quantization": IMPOSSIBLE}) for name, method in (("vllm", "torchao"), ("sglang", "fp8"))},
    "replayed experts": ([f"{ROLLOUT}.enable_rollout_routing_replay=true", f"{ACTOR}.router_replay.mode=disabled"],
        {"actor_train.router_replay.mode": "disable"}, {}),
    "recorded experts": ([f"{ACTOR}.router_replay.record_file=experts.pt"], {},
        {f"{ACTOR}.router_replay.record_file": IMPOSSIBLE}),
    # held-out answers and kept rollouts
    "held-out answers are sampled": ([f"{HELD_OUT}.temperature=1.0", f"{HELD_OUT}.do_sample=False"],
        {"validation.generating_args.do_sample": True}, {}),
    "held-out answers at no temperature": ([f"{HELD_OUT}.temperature=0", f"{HELD_OUT}.do_sample=True"],
        {"validation.generating_args.do_sample": False}, {}),
    "held-out answers of older rollouts": ([f"{HELD_OUT}.temperature=1.0", f"{HELD_OUT}.do_sample=False",
        f"{ROLLOUT}.mode=sync"], {"validation.generating_args.do_sample": False}, {}),
    "kept rollouts": ([f"+{ROLLOUT}.skip_rollout=true", f"+{ROLLOUT}.skip_dump_dir=kept"],
        {"rollout_dump_dir": "kept"}, {f"{ROLLOUT}.skip_rollout": TO_DO}),
    "kept rollouts where verl keeps them": ([f"+{ROLLOUT}.skip_rollout=true"],
        {"rollout_dump_dir": "/tmp/rollout_dump"}, {f"{ROLLOUT}.skip_rollout": TO_DO}),
    "kept rollouts by a newer name": ([f"+{ROLLOUT}.skip.enable=true", f"+{ROLLOUT}.skip.dump_dir=kept"],
        {"rollout_dump_dir": "kept"}, {f"{ROLLOUT}.skip.enable": TO_DO}),
    "no kept rollouts": ([f"+{ROLLOUT}.skip_rollout=false", f"+{ROLLOUT}.skip_dump_dir=kept"],
        {"rollout_dump_dir": None}, {}),
    # rewards
    "a critic and a reward function": ([GAE, f"{ACTOR}.use_kl_loss=false", "critic.model.path=Qwen/other",
        "critic.optim.lr=3e-5", f"custom_reward_function.path={__file__}"],
        {"critic.training_args.learning_rate": 3e-5, "reward_pretrain": "Qwen/other", "whiten_advantages": True,
         "reference": None, "critic.global_train_batch_size": 128, "actor_train.data_args.default_tag": "custom",
         "rewards.custom.verifiers.0.args.path": f"{__file__}:compute_score"}, {}),
    "a reward function of lists and a package": (FUNCTION, {"plugins": ["json"], "rewards.custom.verifiers.0.args":
        {"path": "mine.py:score_all", "batch": True, "kwargs": {"bonus": 2}}}, {}),
    "a manager of one reward": ([f"{REWARD}.reward_manager=prime", f"{REWARD}.reward_kwargs={{bonus: 2}}"],
        {"rewards.gsm8k.timeout_score": 0.0, "rewards.math.timeout_score": 0.0},
        {f"{REWARD}.reward_kwargs.bonus": IMPOSSIBLE}),
    "a sandbox service": (ISOLATED, {"rewards.code.verifiers.0.args":
        {"remote": {"url": SERVICE, "max_concurrency": 64}, "limits": {"memory_mb": 1024}}}, {}),
    "a reward model, in an older spelling": ([*OLDER, "algorithm.filter_groups.enable=true"],
        {"rewards.reward_model.verifiers.0.args": {"model_path": "/"}, "loss_agg_mode": "seq-mean-token-sum",
         "rewards.reward_model.query_filter_config.type": "std_filter", "overlong_buffer.len": 128}, {}),
    "a reward model on the devices of training": (NEWER,
        {"rewards.reward_model.verifiers.0.args": {"model_path": "/", "tensor_parallel_size": 2},
         "rewards.reward_model.num_gpus_per_worker": 2, "rewards.reward_model.device_mapping": [0, 1, 2, 3]}, {}),
    "a reward model on others": ([*NEWER, "reward.reward_model.enable_resource_pool=true"], {},
        {"reward.reward_model.rollout.tensor_model_parallel_size": TO_DO}),
    "a reward model that a function asks": ([*NEWER, f"reward.custom_reward_function.path={__file__}"], {},
        {"reward.reward_model.model_path": IMPOSSIBLE}),
    "a reward model whose code is trusted": ([f"{REWARD}.enable=true", f"{REWARD}.model.path=a/b",
        f"{REWARD}.model.trust_remote_code=true"],
        {"rewards.reward_model.verifiers.0.args": {"model_path": "a/b", "trust_remote_code": True},
         "actor_train.model_args.trust_remote_code": False}, {}),
    # weights and bounds of the ratio
    "weights of a release between": (["algorithm.rollout_is=true", "algorithm.rollout_is_threshold=2.0",
        "algorithm.rollout_is_level=sequence"],
        {"train_infer_correction.is_weight.enabled": True, "train_infer_correction.filters": [],
         "train_infer_correction.is_weight.weight_type": "sequence",
         "train_infer_correction.is_weight.upper_bound": 2.0}, {}),
    "a mean of k3 is no bound of a ratio": (corrected("rs=seq_mean_k3", "rs_threshold=0.01", "is=token",
        "is_threshold='0.5_5.0'"), {}, dict.fromkeys(corrected("rs", "is_threshold"), IMPOSSIBLE)),
}  # fmt: skip


@pytest.mark.parametrize("what", one_in(4, CASES))
def test_keys_that_are_read_together(what):
    words, expected, kinds = CASES[what]
    verl(*words, lost=kinds).check(expected, kinds)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (corrected("rs=token", "rs_threshold=1.5"), [("token", 1 / 1.5, 1.5, False)]),
        (corrected("rs=geometric", "rs_threshold=2", "rs_threshold_lower=0.9"), [("geometric", 0.9, 2, False)]),
        (corrected("rs='token_k1,seq_mean_k1'", "rs_threshold='0.5_4.0,1.25'"),
         [("token", 0.25, 2, False), ("geometric", 0.8, 1.25, False)]),
        (corrected("rs=token_k2", "rs_threshold=0.5"), [("token", math.exp(-1), math.e, False)]),
        (corrected("rs=seq_max_k3", "rs_threshold=0.5"), [("token", 0.3017096, 2.3576767, True)]),
        (corrected("token_veto_threshold=1e-4"), [("token", 1e-4, 1e9, True)]),
        (["algorithm.rollout_is_threshold=4.0", "algorithm.rollout_is_mode=mask",
          "algorithm.rollout_is_veto_threshold=1e-4"], [("token", 0.25, 4.0, False), ("token", 1e-4, 1e9, True)]),
    ],
)  # fmt: skip
def test_rejections_become_bounds_of_the_ratio(words, expected):
    found = verl(*words, lost=set())["train_infer_correction.filters"]
    assert [(f.agg_type, f.whole_rows) for f in found] == [(level, rows) for level, _, _, rows in expected]
    for f, (_, low, high, _) in zip(found, expected, strict=True):
        assert (f.ratio_low, f.ratio_high) == pytest.approx((low, high), rel=1e-5)
        if "rs=seq_max_k3" in words[0]:  # both ends are as far from 1 by k3
            assert [r - 1 - math.log(r) for r in (f.ratio_low, f.ratio_high)] == pytest.approx([0.5, 0.5])


def test_megatron_and_no_key_without_a_word():
    words = [f"{ACTOR}.megatron.{kind}_parallel_size=2" for kind in ("tensor_model", "context")]
    words += [f"{ACTOR}.ppo_max_token_len_per_gpu=4096", f"{ACTOR}.megatron.dtype=float16", f"{TURNS}.max_turns=4"]
    found = verl(*words, text=MEGATRON, lost={f"{ACTOR}.megatron.dtype"})
    assert found["actor_train.strategy_args.strategy_name"] == "megatron_train"
    assert found["actor_train.data_parallel_size", "actor_train.max_tokens_per_microbatch_in_train"] == (1, 8192)
    given = {word.partition("=")[0] for word in words} | {"data.truncation", "trainer.project_name", "trainer.nnodes"}
    assert given <= found.notes.keys() and (f"{TURNS}.max_turns", DROPPED) in found.kinds


def test_an_adapter_of_megatron():
    words = [f"{MODEL}.lora.{word}" for word in ("rank=32", "alpha=64", "lora_A_init_method=kaiming")]
    words += [f"{MODEL}.lora.target_modules=[linear_qkv,linear_fc2]"]
    model = verl(*words, text=MEGATRON, lost=set())["actor_train.model_args"]
    assert (model.lora_rank, model.lora_alpha, model.lora_target) == (32, 64, "q_proj,k_proj,v_proj,down_proj")
    model = verl(f"{MODEL}.lora.rank=8", text=MEGATRON)["actor_train.model_args"]
    assert (model.lora_alpha, model.lora_target) == (32, "all-linear")


def test_values_that_only_a_shell_or_the_environment_can_tell(monkeypatch):
    asked = SCRIPT.replace("trainer.nnodes=$NODES", "trainer.nnodes=$(nproc)")
    verl(text=asked, lost={"trainer.nnodes"})
    assert verl("trainer.nnodes=1", text=asked, lost=set())["num_nodes"] == 1
    counted = SCRIPT.replace("${NODES:-1}", "$COUNTED").replace('"a run"', '"a run-$JOB"')
    monkeypatch.setenv("JOB", "j7")
    assert verl(text=counted, lost={"trainer.nnodes"})["exp_name"] == "a_run-j7"
    monkeypatch.setenv("COUNTED", "2")
    assert verl(text=counted, lost=set())["num_nodes"] == 2


def test_a_variable_that_nothing_sets_leaves_the_model_open():
    words = [f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=8", "trainer.nnodes=2"]
    found = verl(*words, text=SCRIPT.replace("=Qwen/Qwen2-7B-Instruct", "=$MODEL_OF_NOBODY"))
    assert not found.result.problems  # with the heads of the model that is taken where none is given there would be
    assert ("pretrain", TO_DO) in found.kinds


OLD = (f"{REWARD}.use_reward_loop=true", "critic.model.fsdp_config.param_offload=true")
NEW = ("model_engine=dp",)


@pytest.mark.parametrize(
    ("words", "mixed", "mean"),
    [
        (OLD, False, True),
        (NEW, False, False),
        ((*OLD, *NEW), True, True),
        (("critic.fsdp.param_offload=true", "trainer.use_legacy_worker_impl=auto"), True, True),
        (("reward.num_workers=4",), False, False),
        (("algorithm.filter_groups.enable=true", OLD[0]), False, True),
        ((), False, True),
        ((f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",), False, False),
    ],
)
def test_releases_are_told_apart_by_their_keys(words, mixed, mean):
    remarks = verl(*words).remarks
    assert ("no release of verl reads all" in remarks) is mixed
    assert ("mean over the tokens of each micro-batch" in remarks) is mean
    if mixed:
        assert all(words[at].partition("=")[0] in remarks for at in (0, -1))


@pytest.mark.parametrize(
    "word", ["ppo_epochs=2", "ppo_mini_batch_size=8", "grad_clip=0.5", "loss_agg_mode=seq-mean-token-mean"]
)
def test_what_a_critic_has_of_its_own_is_told(word):
    verl(f"critic.{word}", f"{ACTOR}.{word}", GAE, lost=set())
    verl(f"critic.{word}", GAE, lost={f"critic.{word.partition('=')[0]}"})


def test_what_older_releases_and_files_do_otherwise_is_told():
    dapo = verl("data.train_files=dapo-math-17k.parquet", "data.val_files=aime-2024.parquet")
    assert "1 or -1" in dapo.remarks and "1 or -1" not in verl().remarks
    old = "python3 -m verl.trainer.main_ppo algorithm.kl_ctrl.kl_coef=0.002 data.train_batch_size=64"
    assert "kl_coef = 0.002 from the reward" in verl(text=old).remarks
    for word in ("algorithm.use_kl_in_reward=False", f"{ACTOR}.use_kl_loss=True", "algorithm.kl_ctrl.kl_coef=0"):
        assert "releases before 0.3" not in verl(word, text=old).remarks, word
    packed = f"{MODEL}.use_rmpad=True critic.model.use_rmpad=True critic.model.path=Qwen/Qwen3-0.6B"
    found = verl(text=f"python3 -m verl.trainer.main_ppo data.train_batch_size=64 {packed}")
    assert not [key for key in found.lost if "rmpad" in key] and found.text.count("use_sequence_packing: true") == 2


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_replayed_experts(mode):
    found = verl(f"{ROLLOUT}.enable_rollout_routing_replay=true", f"{ACTOR}.router_replay.mode={mode}")
    assert found.written["actor_train"]["router_replay"] == {"mode": mode}


# Training on given samples


def test_supervised_training():
    found = imported("verl_sft", lost=set())
    assert found.schema is SFTConfig and program_of(found.written) == "sft"
    expected = {
        "actor_train.data_args.prompt": "extra_info.question", "actor_train.data_args.response": "extra_info.answer",
        "num_train_epochs": 2, "save_steps": 50, "sample_overflow": "truncate", "num_gpus_per_node": 2,
        "actor_train.global_train_batch_size": 32, f"{TRAINED}.lr_scheduler_type": "wsd",
        f"{TRAINED}.warmup_ratio": 0.1, f"{TRAINED}.adam_beta2": 0.95, "actor_train.model_args.dtype": "fp32",
        "actor_train.model_args.ulysses_size": 2, "actor_train.model_args.lora_rank": 8,
        "actor_train.model_args.lora_target": "q_proj,v_proj",
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    words = ["data.multiturn.enable=true", "data.multiturn.messages_key=talk", "data.truncation=left"]
    found = imported("verl_sft", *words, "data.multiturn.tools_key=functions")
    assert found["actor_train.data_args.messages"] == "talk"
    assert found.lost == {"data.truncation", "data.multiturn.tools_key"}


def test_supervised_training_with_an_engine(tmp_path):
    run = "torchrun --nproc_per_node 4 -m verl.trainer.sft_trainer data.train_files=a.parquet data.val_files=null "
    run += "model.path=Qwen/Qwen3-0.6B engine=megatron optim=megatron optim.lr=1e-5 data.train_batch_size=64 "
    run += "engine.tensor_model_parallel_size=2 trainer.test_freq=after_each_epoch trainer.save_freq=after_each_epoch"
    found = verl(text=run, lost=set())
    expected = {
        "validation": None, "actor_train.data_args.messages": "messages", "actor_train.data_args.response": None,
        "actor_train.strategy_args.strategy_config.tensor_model_parallel_size": 2, "num_gpus_per_node": 4,
        "actor_train.max_tokens_per_microbatch_in_train": 8192, f"{TRAINED}.warmup_ratio": 0.0,
        f"{TRAINED}.lr_scheduler_type": "constant_with_warmup", "eval_steps": 0, "save_steps": 0,
    }  # fmt: skip
    assert found.schema is SFTConfig and {key: found[key] for key in expected} == expected
    assert all("rows / global batch" in found.notes[f"trainer.{name}_freq"] for name in ("test", "save"))
    data = "train_batch_size: 64, messages_key: messages, train_files: /d/a.parquet, max_length: 512, truncation: right"
    file = tmp_path / "engine.yaml"
    file.write_text(
        "defaults:\n- model@model: hf_model\n- engine@engine: fsdp\n- optim@optim: fsdp\n- _self_\n"
        f"data: {{{data}}}\ntrainer: {{n_gpus_per_node: 4, nnodes: 1, logger: [console]}}\n"
    )
    found = imported("verl", "model.path=Qwen/Qwen2.5-0.5B", "optim.lr=2e-5", file=file)
    assert found.schema is SFTConfig and found["sequence_length", f"{TRAINED}.learning_rate"] == (512, 2e-5)


@pytest.mark.parametrize("word", ["", "trainer.save_freq=-1"])
def test_supervised_training_saves_its_last_step_whatever_is_said(word):
    run = "torchrun --nproc_per_node 1 -m verl.trainer.fsdp_sft_trainer data.train_files=a.parquet "
    run += f"data.train_batch_size=8 model.partial_pretrain=Qwen/Qwen3-0.6B {word}"
    assert verl(text=run)["save_steps"] == 0


# Teachers

ONE = f"{TEACHERS}.teacher_model"
TAUGHT = ["distillation.enabled=True", "distillation.n_gpus_per_node=4", "distillation.nnodes=1"]
TAUGHT += [f"{ONE}.model_path=Qwen/Qwen2.5-32B-Instruct", f"{ONE}.inference.tensor_model_parallel_size=4"]
TAUGHT += [f"{ONE}.inference.gpu_memory_utilization=0.7", f"{ONE}.inference.engine_kwargs.vllm.max_logprobs=64"]
PURE, TOP = f"{LOSS}.use_task_rewards=False", f"{LOSS}.loss_mode=forward_kl_topk"
CLAMPED = ("use_task_rewards=true", "distillation_loss_coef=0.5", "loss_max_clamp=10", "log_prob_min_clamp=-9")
MEMORY = "teacher.strategy_args.strategy_config"


@pytest.mark.parametrize(
    ("words", "expected", "lost"),
    [
        ([*TAUGHT, PURE, f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=True"],
         {"is_pure_opd": True, "opd_form": "advantage", "teacher_pretrain": "Qwen/Qwen2.5-32B-Instruct",
          "num_gpus_per_node": 8, "teacher.device_mapping": [4, 5, 6, 7], "teacher.num_gpus_per_worker": 4,
          "teacher.model_args.dtype": "bf16", "teacher.strategy_args.strategy_name": "vllm",
          f"{MEMORY}.gpu_memory_utilization": 0.7}, set()),
        ([*TAUGHT, PURE, TOP, f"{LOSS}.topk=64", f"{ONE}.inference.name=sglang"],
         {"opd_form": "loss", "kd_objective": "forward_kl", "logits_topk": 64, f"{MEMORY}.mem_fraction_static": 0.7},
         set()),
        ([*TAUGHT, PURE, TOP, f"{LOSS}.kd_temperature=2.0", f"{ROLLOUT}.temperature=0.5"],
         {"kd_temperature": 1, "teacher_temperature": 1, "logits_topk": 32}, None),
        ([*TAUGHT, PURE, TOP, "trainer.n_gpus_per_node=8"],
         {"num_nodes": 2, "teacher.device_mapping": [8, 9, 10, 11]}, None),
        ([*TAUGHT, *(f"{LOSS}.{word}" for word in CLAMPED), f"{LOSS}.use_policy_gradient=true"],
         {"is_pure_opd": False, "opd_kl_coef": 0.5, "opd_token_kld_clip": 5, "opd_logprob_min": -9},
         {f"{LOSS}.loss_mode"}),  # k3 is its default
        (["distillation.enabled=False", *TAUGHT[1:], PURE], {"num_gpus_per_node": 4, "teacher": None}, set()),
    ],
    ids=["policy gradient", "loss", "temperatures", "devices", "beside rewards", "off"],
)  # fmt: skip
def test_a_teacher(words, expected, lost):
    verl(*words, lost=lost).check(expected, {})


def test_several_teachers():
    words = ["distillation.enabled=True", "distillation.n_gpus_per_node=4", "distillation.nnodes=2"]
    words += [f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=true"]
    sources = {"a": "openai/gsm8k", "b": "lighteval/MATH"}
    for name, source in sources.items():
        own = {"key": source, "model_path": f"org/{name}", "inference.tensor_model_parallel_size": 2, "num_replicas": 2}
        words += [f"+{TEACHERS}.{name}.{key}={value}" for key, value in own.items()]
    written = verl(*words, lost=set()).written
    told = {name: (each["pretrain"], each["tag_included"]) for name, each in written["teachers"].items()}
    assert told == {name: (f"org/{name}", [source]) for name, source in sources.items()}
    devices = [each["device_mapping"] for each in written["teachers"].values()]
    assert (devices, written["num_nodes"]) == (["list(range(4,8))", "list(range(8,12))"], 3)
    assert verl(*words, "distillation.teacher_key=ability").lost == {"distillation.teacher_key"}


# Tools

TOOLS = """
tools:
  - class_name: verl.tools.sandbox_fusion_tools.SandboxFusionTool
    config: {type: native, sandbox_fusion_url: "http://box", default_timeout: 20}
    tool_schema: {type: function, function: {name: run_code, parameters: {properties: {code: {type: string}}}}}
  - class_name: my_package.find.FindTool
    config: {type: native, timeout: 7, top: 3}
    tool_schema: {type: function, function: {name: find, parameters: {properties: {words: {}, most: {}}}}}
  - class_name: verl.tools.search_tool.SearchTool
    config: {type: native, retrieval_service_url: "http://box/retrieve", topk: 3, timeout: 9, num_workers: 120}
    tool_schema: {type: function, function: {name: search, parameters: {properties: {query_list: {type: array}}}}}
  - class_name: verl.tools.mcp_search_tool.MCPSearchTool
    config: {type: mcp, timeout: 120}
    mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [search]}
"""
SERVERS = """
{"mcpServers": {"The Web": {"url": "http://web/mcp", "auth_token": "x"}, "sums": {"command": "uvx", "args": ["s"]}}}
"""


def test_tools(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tools.yaml").write_text(TOOLS)
    Path("servers.json").write_text(SERVERS)
    given = ["tool_config_path=tools.yaml", "enable=true", "max_assistant_turns=5", "max_parallel_calls=3"]
    given += ["format=hermes"]
    loop = "+actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"
    found = verl(*(f"{TURNS}.{word}" for word in given), loop)
    tools = found["tools"]
    assert {name: (each.tool, each.args, each.timeout) for name, each in tools.use.items() if name != "search"} == {
        "run_code": ("python", {"wall_seconds": 20.0}, 30.0), "find": ("my_package.find:FindTool", {"top": 3}, 7.0),
    }  # fmt: skip
    asked = {"url": "http://box/retrieve", "num_results": 3, "seconds": 9.0}
    assert (tools.use["search"].tool, tools.use["search"].args) == ("retrieval", asked)
    web, sums = tools.servers["The_Web"], tools.servers["sums"]
    assert (web.url, web.only, web.timeout, sums.command) == ("http://web/mcp", ["search"], 120.0, ["uvx", "s"])
    assert (tools.max_turns, tools.max_parallel_calls, tools.dialect) == (4, 3, "hermes")
    notes = [each.note for each in found.outcomes if each.kind == TO_DO]
    assert any("FindTool a subclass" in note and "words, most" in note for note in notes)
    assert [each.got for each in found.outcomes if each.kind == IMPOSSIBLE] == ["The Web"]


def test_tools_that_cannot_be_read(tmp_path):
    key = f"{TURNS}.tool_config_path"
    (tmp_path / "empty.yaml").write_text("a: 1\n")
    for path, words in (("nowhere.yaml", "is not there"), (str(tmp_path / "empty.yaml"), "no list of tools")):
        found = verl(f"{key}={path}")
        assert found.lost == {key} and words in found.notes[key]
    assert verl(f"{TURNS}.enable=true").lost == {f"{TURNS}.enable"}


# Trainers whose rollouts run beside the training

SIDES = """
BOTH=${{BOTH:-8}}
ours=3
python3 -m {program} {config} \\
    data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size={prompts} data.gen_batch_size=1 \\
    algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.hybrid_engine=False \\
    actor_rollout_ref.actor.ppo_mini_batch_size=10 actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    trainer.nnodes=1 trainer.n_gpus_per_node=$((BOTH - ours)) rollout.nnodes=1 rollout.n_gpus_per_node=$ours {words}
"""
STREAMING, ONE_STEP = "fully_async_policy.fully_async_main", "one_step_off_policy.main_ppo"
ASYNC, WEIGHTS = "async_training", "train_infer_correction"
VERSION = (f"{ASYNC}.trigger_parameter_sync_step=4", f"{ASYNC}.require_batches=2")
STEP = (*VERSION, "rollout.total_rollout_steps=830", "rollout.test_freq=5", "trainer.save_freq=3",
        f"{ASYNC}.staleness_threshold=0.5", f"{ASYNC}.partial_rollout=False", "rollout.total_epochs=2",
        f"{OPTIM}.lr_warmup_steps=10")  # fmt: skip
TURN = (*VERSION, f"{ASYNC}.staleness_threshold=0", f"{ASYNC}.partial_rollout=False")
SCORED = (f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_rs=seq_mean_k1")
BY_THE_TRAINER = ((f"{ASYNC}.compute_prox_log_prob=True", f"{ASYNC}.use_rollout_log_probs=True"),
                  (f"{CORRECTION}.bypass_mode=False",))  # fmt: skip
LONG = ["reward.reward_manager.name=dapo", "+reward.reward_kwargs.max_resp_len=512"]
LONG += [f"+reward.reward_kwargs.overlong_buffer_cfg.{key}" for key in ("enable=True", "len=128", "penalty_factor=0.5")]


def beside(program: str, *words: str, prompts: int = 0, config: str = "") -> Any:
    """A script of such a trainer with some words."""
    return verl(text=SIDES.format(program=program, words=" ".join(words), prompts=prompts, config=config))


@pytest.mark.parametrize(
    ("program", "words", "expected", "kinds"),
    [
        *((f"{package}.{STREAMING}", STEP,
           {"rollout_batch_size": 80, "max_steps": 10, "eval_steps": 5, "save_steps": 3, "max_running_groups": 48,
            "actor_train.global_train_batch_size": 40, "optimizer_steps_per_epoch": 8, f"{TRAINED}.warmup_steps": 20,
            "async_generation_ratio": 0.5, "groups_ahead": 40, "partial_rollout": False},
           {"data.train_batch_size": DROPPED, "rollout.total_epochs": DROPPED})
          for package in ("verl.experimental", "recipe")),
        (f"verl.experimental.{STREAMING}", (),
         {"rollout_batch_size": 40, "max_steps": 2, "async_generation_ratio": 0.1, f"{WEIGHTS}.bypass": True,
          "rollout_window": 1, "partial_rollout": True}, {}),
        (f"verl.experimental.{STREAMING}",
         ("rollout.total_rollout_steps=null", "trainer.total_epochs=7", "trainer.test_freq=4"),
         {"total_epochs": 7, "eval_steps": 4}, {}),
        (f"verl.experimental.{STREAMING}", TURN, {"overlaps": False, "rollout_window": 0, "partial_rollout": True},
         {f"{ASYNC}.staleness_threshold": DERIVED, f"{ASYNC}.partial_rollout": DROPPED}),
        (f"verl.experimental.{STREAMING}", (f"{ASYNC}.require_batches=few",), {"rollout_batch_size": 40},
         {f"{ASYNC}.require_batches": IMPOSSIBLE}),
        (f"verl.experimental.{STREAMING}", LONG,
         {"overlong_buffer.enable": True, "overlong_buffer.len": 128, "overlong_buffer.penalty_factor": 0.5}, {}),
        *((f"recipe.{STREAMING}", (*words, *SCORED),
           {f"{WEIGHTS}.is_weight.upper_bound": 2, f"{WEIGHTS}.bypass": False}, {}) for words in BY_THE_TRAINER),
        (f"verl.experimental.{ONE_STEP}", ("trainer.total_epochs=3",),
         {"async_generation_ratio": 1, "max_lag": 1, "rollout_window": 0, "rollout_batch_size": 40, "total_epochs": 3,
          "partial_rollout": False, f"{WEIGHTS}.bypass": True}, {}),
        (f"recipe.{ONE_STEP}", (), {f"{WEIGHTS}.is_weight.enabled": True, f"{WEIGHTS}.bypass": False},
         {f"{CORRECTION}.rollout_is": IMPOSSIBLE}),  # old samples without weights
        # beside the sampler's log-probs
        *((f"verl.experimental.{STREAMING}", (f"{key}={value}",), {}, {key: IMPOSSIBLE}) for key, value in (
            (f"{CORRECTION}.rollout_rs", "seq_mean_k1"), (f"{CORRECTION}.loss_type", "reinforce"),
            (f"{ACTOR}.ppo_epochs", 2), ("filter.filter_function_path", "mine.py"))),
        (f"verl.experimental.{STREAMING}", (f"{ASYNC}.image_refs.enabled=True",), {},
         {f"{ASYNC}.image_refs.enabled": UNKNOWN}),
        (f"verl.experimental.{STREAMING}",
         (f"{CORRECTION}.rollout_rs=seq_mean_k1", f"{ASYNC}.use_rollout_log_probs=True"), {}, {}),
    ],
)  # fmt: skip
def test_rollouts_beside_the_training(program, words, expected, kinds):
    found = beside(program, *words, prompts=40 if ONE_STEP in program else 0)
    found.check(expected, kinds)
    assert found.lost == {key for key, kind in kinds.items() if kind in LOST}
    if words is STEP:
        told = [each.note for each in found.outcomes if each.ours == "rollout_batch_size"]
        assert told == ["4 fetches × 2 batches × 10 prompts between two updates of the generator, which is a step"]


@pytest.mark.parametrize(
    ("words", "training", "generating", "nodes", "gpus"),
    [
        ((), [0, 1, 2, 3, 4], [5, 6, 7], 1, 8),
        (("trainer.nnodes=2", "rollout.nnodes=2"), [0, 1, 2, 3, 4, 8, 9, 10, 11, 12], [5, 6, 7, 13, 14, 15], 2, 8),
        (("rollout.n_gpus_per_node=5",), [0, 1, 2, 3, 4], [5, 6, 7, 8, 9], 2, 5),
        (("trainer.n_gpus_per_node=8", "rollout.nnodes=2"), list(range(8)), [8, 9, 10, 16, 17, 18], 3, 8),
    ],
)
def test_both_sides_have_devices_of_their_own(words, training, generating, nodes, gpus):
    found = beside(f"recipe.{ONE_STEP}", *words, prompts=40)
    roles = ("actor_train.device_mapping", "reference.device_mapping", "actor_infer.device_mapping")
    assert found[roles] == (training, training, generating)
    assert found["num_nodes", "num_gpus_per_node"] == (nodes, gpus)


def test_such_a_trainer_is_known_by_its_script_or_told_to_be_missing(tmp_path):
    script = tmp_path / "run.sh"
    program = f"verl.experimental.{STREAMING}"
    script.write_text(SIDES.format(program=program, words="", prompts=0, config=""))
    assert system_of(script) == "verl"
    found = beside(program, config="--config-name=fully_async_ppo_megatron_trainer")
    assert found["actor_train.strategy_args.strategy_name"] == "megatron_train"
    apart = {"actor_rollout_ref.hybrid_engine": "False", "trainer.v1.trainer_mode": "x"}
    words = " ".join(f"{key}={value}" for key, value in apart.items())
    assert verl(text=f"python -m verl.trainer.main_ppo {words}").lost >= apart.keys()


V1 = "trainer.v1"
MODES = """
python3 -m verl.trainer.main_ppo trainer.use_v1=True trainer.v1.trainer_mode={mode} \\
    data.train_files=train.parquet data.train_batch_size=20 algorithm.adv_estimator=grpo \\
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct actor_rollout_ref.actor.ppo_mini_batch_size=10 \\
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=2.0 \\
    trainer.n_gpus_per_node=5 trainer.test_freq=6 trainer.total_training_steps=30 {words}
"""
OTHERS = f"{ROLLOUT}.n_gpus_per_node=3"
SYNC = f"{V1}.separate_async.parameter_sync_step"
WARM = f"{V1}.separate_async.num_warmup_batches"
USUAL = [f"{V1}.sampler.{word}" for word in ("custom_sampler.path=null", "sync_refill_failed_groups=false",
                                             "sampler_kwargs={}")]  # fmt: skip
SHARED = {"actor_infer.device_mapping": [0, 1, 2, 3, 4], "actor_train.device_mapping": [0, 1, 2, 3, 4]}


@pytest.mark.parametrize(
    ("mode", "words", "expected", "kinds"),
    [
        ("separate_async", [OTHERS, f"{ROLLOUT}.nnodes=1", f"{SYNC}=2", f"{OPTIM}.lr_warmup_steps=4",
                            f"{V1}.colocate_async.parameter_sync_step=7"],
         {"async_generation_ratio": 1, "partial_rollout": True, "rollout_window": 1, "max_steps": 30, "eval_steps": 6,
          "actor_infer.device_mapping": [5, 6, 7], "actor_train.device_mapping": [0, 1, 2, 3, 4],
          f"{WEIGHTS}.is_weight.enabled": True, f"{WEIGHTS}.bypass": False, "rollout_batch_size": 20,
          # mini-batches between two updates are a step; their schedule goes on with each mini-batch
          "actor_train.global_train_batch_size": 40, "optimizer_steps_per_epoch": 2, f"{TRAINED}.warmup_steps": 4},
         {f"{V1}.trainer_mode": DERIVED, f"{V1}.colocate_async.parameter_sync_step": UNKNOWN}),
        ("separate_async", [OTHERS, "data.train_batch_size=40"], {}, {}),  # 4 mini-batches by default
        ("separate_async", [OTHERS, "data.train_batch_size=40", f"{SYNC}=3"], {}, {SYNC: IMPOSSIBLE}),
        *(("separate_async", [OTHERS, f"{SYNC}=2", f"{WARM}={batches}"],
           {"async_generation_ratio": batches, "rollout_window": int(batches > 0)}, {}) for batches in (2, 0, 1.5)),
        ("separate_async", [*USUAL, f"{V1}.separate_async.hybrid_rollout.enable_switch=true", f"{SYNC}=2"], {}, {}),
        ("separate_async", ["trainer.use_v1=False"], {"async_generation_ratio": 0}, {f"{V1}.trainer_mode": DROPPED}),
        *(("colocate_async",
           [f"{V1}.sampler.max_off_policy_threshold={oldest}", f"{V1}.sampler.max_off_policy_strategy=drop"],
           {"async_generation_ratio": ratio, "rollout_window": window, **SHARED}, {})
          for oldest, ratio, window in ((8, 1, 1), (1, 1, 0), (0, 0, 0))),
        ("colocate_async", [f"{V1}.sampler.custom_sampler.path=mine.py"], {},
         {f"{V1}.sampler.custom_sampler.path": IMPOSSIBLE}),
    ],
)  # fmt: skip
def test_modes_of_the_newer_trainer(mode, words, expected, kinds):
    found = verl(text=MODES.format(mode=mode, words=" ".join(words)))
    found.check(expected, kinds)
    assert found.lost == {key for key, kind in kinds.items() if kind in LOST}
    if "threshold" in words[0]:
        assert found["max_lag"] <= int(words[0].rpartition("=")[2])
