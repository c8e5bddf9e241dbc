"""Wrong choices of engines, layouts and devices: each is refused by its key, with the nearest right one."""

import copy
import sys
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, GemmaConfig, Qwen2Config, Qwen2MoeConfig, Qwen3MoeConfig

from roll.configs.agentic import AgenticConfig
from roll.configs.loader import validate
from roll.configs.problems import ConfigErrors
from roll.preflight import machine as machine_checks
from roll.preflight.choices import CHECKS
from roll.preflight.machine import check_machine
from tests.support.absence import ENGINES, hide
from tests.support.configs import put

VALUES = {
    "pretrain": "tiny",
    "adv_estimator": "reinforce",
    "rollout_batch_size": 48,
    "prompt_length": 96,
    "response_length": 32,
    "sequence_length": 128,
    "num_gpus_per_node": 16,
    "ray_init": {"num_cpus": 8},
    "custom_envs": {"Lake": {"env_type": "frozen_lake", "env_manager_cls": "traj"}},
    "train_env_manager": {"env_groups": 4, "group_size": 4, "tags": ["Lake"]},
    "val_env_manager": {"env_groups": 8, "tags": ["Lake"]},
    "actor_train": {"device_mapping": [0, 1]},
    "actor_infer": {"strategy_args": {"strategy_name": "hf_infer"}, "device_mapping": [0]},
}
SHAPE = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 256}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 4}
MODELS = {
    "dense": Qwen2Config(**SHAPE | {"hidden_size": 96, "intermediate_size": 192}, num_hidden_layers=6,
                         num_attention_heads=6, num_key_value_heads=3),
    "moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    "moe2": Qwen2MoeConfig(**SHAPE, **EXPERTS, num_attention_heads=4, num_key_value_heads=4,
                           shared_expert_intermediate_size=64),
    "gemma": GemmaConfig(**SHAPE, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, head_dim=32),
    "short": Qwen2Config(**SHAPE | {"max_position_embeddings": 64}, num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=2),
    "chunks": Qwen2Config(**SHAPE, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                          layer_types=["chunked_attention"] * 2),
    "windows": Qwen2Config(**SHAPE, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
                           use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "half": Qwen2Config(**SHAPE, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, dtype="float16"),
}  # fmt: skip
TRAIN, INFER = "actor_train.strategy_args.strategy_config", "actor_infer.strategy_args.strategy_config"
TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
REPLAY = "actor_train.router_replay.mode"
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders with a small model, by name, and some that hold none."""
    root = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    for name, text in {"broken": "{", "nameless": "{}", "unheard": '{"model_type": "frobnicator"}'}.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(text)
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").write_text("{}")
    return root


@pytest.fixture(params=[(), ENGINES], ids=["engines as installed", "no engine installed"])
def problems(models, monkeypatch, request):
    """The problems of VALUES with changes by dotted key, as ``path -> expected and hint``.

    A package that is not installed is none: what else is wrong is found without it.
    """
    hide(monkeypatch, request.param)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(machine_checks, "_connected", lambda: False)  # to the Ray of other tests

    def find(changes):
        values = copy.deepcopy(VALUES)
        for path, value in changes.items():
            put(values, path, str(models / value) if path == "pretrain" and (models / str(value)).exists() else value)
        try:
            config = validate(AgenticConfig, values, CHECKS[AgenticConfig])
            told = [each for each in check_machine(config) if not each.expected.startswith("the package ")]
        except ConfigErrors as errors:
            told = errors.problems
        return {problem.path: f"{problem.expected} {problem.hint}" for problem in told}

    return find


def engine(name, /, role="actor_train", **options):
    return {f"{role}.strategy_args.strategy_name": name, f"{role}.strategy_args.strategy_config": options}


def trainer(name, model="dense", devices=2, /, **options):
    return {**engine(name, **options), "pretrain": model, "actor_train.device_mapping": [*range(devices)]}


megatron, fsdp2 = partial(trainer, "megatron_train"), partial(trainer, "fsdp2_train")
deepspeed = partial(engine, "deepspeed_train")


def zero(**options):
    return deepspeed(zero_optimization=options)


def vllm(**options):
    return {**engine("vllm", "actor_infer", **options), "tiny_num_heads": 2}


PAIR = {"actor_infer.device_mapping": [1, 2], "actor_infer.num_gpus_per_worker": 2}
SPANS = {"num_nodes": 2, "num_gpus_per_node": 2, **PAIR}
"""A generating worker with devices on two nodes."""


def sglang(**options):
    return engine("sglang", "actor_infer", **{"python_executable": sys.executable, **options})


def train(**options):
    return {f"actor_train.{key}": value for key, value in options.items()}


def args(**options):
    return {f"actor_train.model_args.{key}": value for key, value in options.items()}


ARGS, DATA, ZERO = "actor_train.model_args", "actor_train.data_args.chat_template_kwargs", f"{TRAIN}.zero_optimization"
FROZEN, FILTER = f"{ARGS}.freeze_module_prefix", "env_manager.query_filter_config"
TRAINER, STRATEGY = "actor_train.strategy_args.strategy_name", "actor_infer.strategy_args.strategy_name"
REFERENCE = {"use_kl_loss": True, "kl_loss_coef": 0.1}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        # models and tokenizers of their own
        ({"tokenizer_path": "."}, "tokenizer_path", "null with pretrain tiny"),
        ({"tokenizer_path": "/nowhere", "pretrain": "dense"}, "tokenizer_path", "no such folder"),
        ({"reference_pretrain": "tiny"}, "reference_pretrain", "no KL term"),
        ({**REFERENCE, **engine("fsdp2_infer", "reference"), "reference_pretrain": "tiny", "kl_penalty": "full"},
         "kl_penalty", "do not fit the policy's output layer"),
        ({"actor_train.data_args.chat_template_kwargs": {"tools": []}}, f"{DATA}.tools", "variables of the template"),
        (args(lora_target="all-linear", adapter_name_or_path="/nowhere"), f"{ARGS}.adapter_name_or_path",
         "that peft has saved"),
        (args(freeze_module_prefix="model.layers.1,model.layer.0"), FROZEN, "the nearest: model.layers.0"),
        ({**megatron(), **args(freeze_module_prefix="model.layers.1.self_attn.k_proj,model.layers.0")}, FROZEN,
         "self_attn.v_proj.weight with the rest"),
        ({**megatron("moe", 1), **args(freeze_module_prefix="model.layers.2.mlp.experts.gate_up_proj")}, FROZEN,
         "experts.down_proj with the rest"),
        (args(freeze_module_prefix="model"), FROZEN, "left to train"),
        (args(freeze_module_prefix="model.norm", lora_target="q_proj"), FROZEN, "all but the adapter"),
        ({**vllm(), "actor_infer.model_args.freeze_module_prefix": "model.norm"},
         "actor_infer.model_args.freeze_module_prefix", "trains nothing"),
        (args(lora_target="q_proj", lora_exclude="k_proj"), f"{ARGS}.lora_exclude", "from all-linear"),
        ({"checkpoint_config.save_contents": ["optimizer"]}, "checkpoint_config.save_contents", "model among them"),
        ({"checkpoint_config.save_contents": ["model"], **engine("fsdp2_train", checkpoint="sharded")},
         "checkpoint_config.save_contents", "the optimizer too"),
        ({f"val_{FILTER}.type": "std_filter"}, f"val_{FILTER}.type", "counts all of its episodes"),
        ({f"val_{FILTER}.path": "statistics:mean"}, f"val_{FILTER}.path", "counts all of its episodes"),
        ({f"train_{FILTER}.path": "mine.py:keep"}, f"train_{FILTER}.path", "there is no mine.py"),
        ({f"train_{FILTER}.path": "keep"}, f"train_{FILTER}.path", "folder/file.py:attribute"),
        ({f"train_{FILTER}.path": "statistics:maen"}, f"train_{FILTER}.path", "did you mean 'mean'"),
        ({"adv_estimator": "statistics:maen"}, "adv_estimator", "did you mean 'mean'"),
        ({f"train_{FILTER}.type": "std_filter", "train_env_manager.group_size": 1}, f"train_{FILTER}.type",
         "one episode has no spread"),
        ({"rollout_replay_dir": "kept", "is_use_additional_prompts": True}, "rollout_replay_dir",
         "null with is_use_additional_prompts"),
        # Megatron: sizes
        (megatron("dense", 4, **{TP: 4}), f"{TRAIN}.{TP}", "num_key_value_heads 3"),
        (megatron("dense", 4, **{PP: 4}), f"{TRAIN}.{PP}", "num_hidden_layers 6 (nearest: 3)"),
        (megatron("dense", 2, **{PP: 2, VPP: 2}), f"{TRAIN}.{PP}", "divisor of num_hidden_layers 6"),
        (megatron("dense", 2, **{VPP: 2}), f"{TRAIN}.{VPP}", "at least 2"),
        (megatron("dense", 2, **{PP: 2, FIRST: 7}), f"{TRAIN}.{FIRST}", "6 layers (nearest: 5)"),
        (megatron("dense", 3, **{PP: 3, LAST: 1}), f"{TRAIN}.{LAST}", "2 other stages of 6 layers (nearest: 2)"),
        (megatron("dense", 2, **{FIRST: 3}), f"{TRAIN}.{FIRST}", "one stage has all layers"),
        (megatron("moe", 3, **{EP: 3}), f"{TRAIN}.{EP}", "num_experts 4 (nearest: 2)"),
        (megatron("moe", 2, **{EP: 4}), f"{TRAIN}.{EP}", "the nearest is 2"),
        (megatron("moe", 2, **{EP: 2, TP: 2, "sequence_parallel": True}), f"{TRAIN}.{EP}", f"{ETP} 1"),
        (megatron("dense", 2, **{EP: 2}), f"{TRAIN}.{EP}", "has no experts"),
        (megatron("dense", 2, context_parallel_size=3), f"{TRAIN}.context_parallel_size", "divide the 2 devices"),
        (megatron(sequence_parallel=True), f"{TRAIN}.sequence_parallel", "at least 2"),
        (megatron("moe", **{TP: 2}), f"{TRAIN}.sequence_parallel", "true"),
        # Megatron: options that nothing would read, or that exclude each other
        (megatron("dense", 2, **{ETP: 2}), f"{TRAIN}.{ETP}", "null (Qwen2ForCausalLM has no experts)"),
        (megatron(freeze_moe_router=True), f"{TRAIN}.freeze_moe_router", "has no experts"),
        (megatron(moe_aux_loss_coeff=0.1), f"{TRAIN}.moe_aux_loss_coeff", "0.0"),
        (megatron("moe", moe_shared_expert_overlap=True), f"{TRAIN}.moe_shared_expert_overlap", "no shared expert"),
        (megatron("moe2", moe_shared_expert_overlap=True, moe_token_dispatcher_type="allgather"),
         f"{TRAIN}.moe_shared_expert_overlap", "alltoall"),
        (megatron("moe", moe_grouped_gemm=True), f"{TRAIN}.moe_grouped_gemm", "without a GPU"),
        (megatron(fp8="hybrid"), f"{TRAIN}.fp8", "null on a machine without a GPU"),
        (megatron(fp8="e4m3", fp8_param=True), f"{TRAIN}.fp8_param", "weights are kept in bf16"),
        (megatron(fp8_recipe="mxfp8"), f"{TRAIN}.fp8_recipe", "no such key without fp8"),
        (megatron(recompute_num_layers=4), f"{TRAIN}.recompute_num_layers", "the 6 layers of a stage (nearest: 3)"),
        (megatron(recompute_method="block", recompute_num_layers=7), f"{TRAIN}.recompute_num_layers", "at most 6"),
        (megatron(recompute_modules=["core_atn"]), f"{TRAIN}.recompute_modules.0", "core_attn"),
        (megatron(recompute_modules=["mlp"]), f"{TRAIN}.recompute_modules", "recompute_granularity selective"),
        (megatron("moe", recompute_granularity="selective", recompute_modules=["moe_act"]),
         f"{TRAIN}.recompute_modules", "moe"),
        (megatron(recompute_method="block") | args(disable_gradient_checkpointing=True),
         f"{TRAIN}.recompute_method", "recompute_granularity full"),
        (megatron("moe", recompute_method="block", moe_layer_recompute=True), f"{TRAIN}.recompute_method", "full"),
        (megatron(batch_p2p_comm="maybe"), f"{TRAIN}.batch_p2p_comm", "bool"),
        (megatron(attention_backend="flesh"), f"{TRAIN}.attention_backend", "flash"),
        (megatron() | args(dtype="fp16"), f"{ARGS}.dtype", "bf16 or fp32"),
        (megatron("gemma"), TRAINER, "fsdp2_train"),
        (megatron(moe_z_los_coeff=1), f"{TRAIN}.moe_z_los_coeff", "moe_z_loss_coeff"),
        (megatron(num_layers=4), f"{TRAIN}.num_layers", "model_config_kwargs"),
        ({**megatron(), "pretrain": "tiny", "actor_train.device_mapping": [*range(8)], f"{TRAIN}.{TP}": 8},
         f"{TRAIN}.{TP}", "num_attention_heads 4"),
        (megatron() | args(ulysses_size=2), f"{ARGS}.ulysses_size", "context_parallel_size"),
        # DeepSpeed
        (zero(stage=4), f"{ZERO}.stage", "0, 1, 2 or 3"),
        (zero(stag=2), f"{ZERO}.stag", "stage"),
        (zero(stage=2, overlap_comm="maybe"), f"{ZERO}.overlap_comm", "bool"),
        (zero(stage=3, offload_param="cpu"), f"{ZERO}.offload_param", "{device: cpu}"),
        (zero(stage=2, offload_param={"device": "cpu"}), f"{ZERO}.stage", "at least 3"),
        (zero(stage=3, offload_param={"device": "nvme"}), f"{ZERO}.offload_param.device", "cpu"),
        (deepspeed(zero_optimization=[1]), f"{ZERO}", "mapping"),
        (zero(stage=2, cpu_offload=True), f"{ZERO}.cpu_offload", "offload_optimizer: {device: cpu}"),
        (deepspeed(wall_clock_breakdown="false"), f"{TRAIN}.wall_clock_breakdown", "bool"),
        (deepspeed(bf16=True), f"{TRAIN}.bf16", "mapping"),
        (deepspeed(fp16={"enabled": True}), f"{TRAIN}.fp16.enabled", "bf16 or fp32"),
        (deepspeed(communication_data_type="bf17"), f"{TRAIN}.communication_data_type", "bf16"),
        (deepspeed(data_types={"grad_acum_dtype": "fp32"}), f"{TRAIN}.data_types.grad_acum_dtype", "grad_accum_dtype"),
        (deepspeed(tensorboard={"enabld": True}), f"{TRAIN}.tensorboard.enabld", "did you mean enabled?"),
        (deepspeed(checkpoint={"tag_validation": "Warn"}), f"{TRAIN}.checkpoint", "save_steps"),
        (deepspeed(optimizer={"type": "AdamW", "params": 1}), f"{TRAIN}.optimizer.params", "mapping"),
        (deepspeed() | args(ulysses_size=2) | {"pretrain": "dense"}, f"{ARGS}.ulysses_size", "3 key-value heads"),
        (train(device_mapping=[*range(8)]) | args(ulysses_size=8), f"{ARGS}.ulysses_size", "4 attention heads"),
        (train(device_mapping=[*range(6)]) | args(ulysses_size=4), f"{ARGS}.ulysses_size", "to divide the 6 devices"),
        # FSDP2
        (fsdp2("dense", 4, fsdp_size=3), f"{TRAIN}.fsdp_size", "divisor of the 4 workers"),
        (fsdp2("dense", 2, tensor_parallel_size=2), f"{TRAIN}.tensor_parallel_size", "the nearest is 1"),
        (fsdp2("dense", 2, fsdp_size=1, reduce_dtype="bf16"), f"{TRAIN}.reduce_dtype", "null or fp32"),
        (fsdp2("dense", 2, param_dtype="fp16"), f"{TRAIN}.param_dtype", "bf16 or fp32"),
        (fsdp2("half"), f"{ARGS}.dtype", "the model is in fp16"),
        (fsdp2() | args(attn_implementation="fa2", dtype="fp32"), f"{ARGS}.attn_implementation", "sdpa"),
        (fsdp2() | args(attn_implementation="fa2", dtype="bf16"), f"{ARGS}.attn_implementation", "auto"),
        (fsdp2("moe") | args(attn_implementation="eager", ulysses_size=2), f"{ARGS}.attn_implementation",
         "sdpa or fa2"),
        (fsdp2() | args(use_liger_kernel=True), f"{ARGS}.use_liger_kernel", "without a GPU"),
        # Replayed experts
        ({REPLAY: "R2"}, REPLAY, "disable: Qwen2Config has no experts"),
        (fsdp2("moe") | sglang() | {REPLAY: "R3"}, REPLAY, "R2 or disable with sglang"),
        (fsdp2("moe") | {REPLAY: "R2", "train_infer_correction.bypass": True}, REPLAY, "R3 or disable if"),
        ({"actor_infer.router_replay.mode": "R2"}, "actor_infer.router_replay", "actor_infer does not read"),
        (megatron("moe", moe_router_fusion=True) | {REPLAY: "R2"}, f"{TRAIN}.moe_router_fusion", "false with"),
        # LoRA
        (args(lora_target="q_prj"), f"{ARGS}.lora_target", "q_proj"),
        (args(lora_target=" , "), f"{ARGS}.lora_target", "all-linear"),
        ({"actor_infer.model_args.lora_target": "q_proj"}, "actor_infer.model_args.lora_target", "actor_train"),
        ({**REFERENCE, "reference": {}, **args(lora_target="q_proj")}, "reference", "without its adapter"),
        (args(lora_rank=4), f"{ARGS}.lora_rank", "lora_target"),
        (fsdp2("moe", tensor_parallel_size=2) | args(lora_target="q_proj"), f"{TRAIN}.tensor_parallel_size", "1 with"),
        (megatron("moe2") | args(lora_target="all-linear"), f"{ARGS}.lora_target", "gate_proj, k_proj"),
        (megatron() | args(lora_target="q_proj", lora_dropout=0.1), f"{ARGS}.lora_dropout", "0 with"),
        (megatron("moe2", moe_shared_expert_overlap=True) | args(lora_target="up_proj"),
         f"{TRAIN}.moe_shared_expert_overlap", "false with an adapter"),
        (vllm() | args(lora_target="all-linear", lora_rank=1000), f"{ARGS}.lora_rank", "at most 512"),
        # vLLM and SGLang
        ({"actor_infer.model_args.use_liger_kernel": True}, "actor_infer.model_args.use_liger_kernel",
         "false with hf_infer"),
        (vllm(enforce_eagr=True), f"{INFER}.enforce_eagr", "enforce_eager"),
        (engine("vllm", "actor_infer"), "tiny_num_heads", "heads of 32"),
        (vllm(quantization="awq"), f"{INFER}.quantization", "null or one of fp8, fp8_per_tensor, fp8_per_block, fp8_p"),
        (vllm(data_parallel_size=2), f"{INFER}.data_parallel_size", "more workers in device_mapping"),
        (vllm(nnodes=2), f"{INFER}.nnodes", "device_mapping and num_gpus_per_worker"),
        (vllm() | SPANS | {f"{ARGS}.lora_target": "q_proj"}, "actor_infer.num_gpus_per_worker",
         "devices of one node for each worker, with an adapter"),
        (sglang() | SPANS, "actor_infer.device_mapping", "each worker's on one node"),
        (vllm(speculative_config={"method": "ngram"}), f"{INFER}.speculative_config", "other greedy completions"),
        (vllm(enable_expert_parallel=True), f"{INFER}.enable_expert_parallel", "false with one device"),
        (vllm(kv_transfer_config={"kv_connector": "NixlConnector", "kv_role": "kv_producer"}),
         f"{INFER}.kv_transfer_config", "OffloadingConnector with kv_role kv_both"),
        (vllm(kv_transfer_config={"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}),
         f"{INFER}.kv_transfer_config", "null on a machine without a GPU"),
        (sglang(quantization="fp8"), f"{INFER}.quantization", "null"),
        (vllm(max_num_batched_tokens="many"), f"{INFER}.max_num_batched_tokens", "int"),
        (vllm(mem_fraction_static=0.5), f"{INFER}.mem_fraction_static", "gpu_memory_utilization"),
        (vllm(max_model_len=64), f"{INFER}.max_model_len", "sequence_length = 128"),
        (vllm() | {"actor_infer.device_mapping": [0, 1, 2, 3], "actor_infer.num_gpus_per_worker": 4},
         "actor_infer.num_gpus_per_worker", "the nearest is 2"),
        (vllm() | {"actor_infer.model_args.ulysses_size": 2}, "actor_infer.model_args.ulysses_size", "1 with vllm"),
        (vllm() | {"actor_infer.model_args.attn_implementation": "eager"}, "actor_infer.model_args.attn_implementation",
         "attention_backend"),
        (sglang(gpu_memory_utilization=0.5), f"{INFER}.gpu_memory_utilization", "mem_fraction_static"),
        (sglang(tensor_parallel_size=1), f"{INFER}.tensor_parallel_size", "num_gpus_per_worker"),
        (sglang(python_executable="/no/such/python"), f"{INFER}.python_executable", "make_sglang_env.sh"),
        (sglang(python_executable="/tmp"), f"{INFER}.python_executable", "no such program"),
        # roles
        ({**REFERENCE, **engine("vllm", "reference"), "tiny_num_heads": 2, "kl_penalty": "full"}, "kl_penalty",
         "an estimator such as k3 with reference.strategy_args.strategy_name vllm, which returns no hidden states"),
        (engine("fsdp2_infer"), TRAINER, "did you mean fsdp2_train?"),
        (engine("deepspeed_zero2"), TRAINER, "did you mean deepspeed_train?"),
        (engine("hf", "actor_infer"), STRATEGY, "did you mean hf_infer?"),
        (engine("roll.nothing:Here"), TRAINER, "there is no roll.nothing"),
        (train(device_mapping=[7, 8]), "actor_train.device_mapping", "ids from 0 to 7"),
        (train(device_mapping=[15, 16]), "actor_train.device_mapping", "ids from 0 to 15"),
        (train(worker_cls="roll.pipeline.workers:TrianWorker"), "actor_train.worker_cls", "TrainWorker"),
        (vllm() | {"actor_infer.device_mapping": None, "actor_infer.num_gpus_per_worker": 2},
         "actor_infer.num_gpus_per_worker", "a device_mapping"),
        # models
        ({"pretrain": "broken"}, "pretrain", "double quotes"),
        ({"pretrain": "nameless"}, "pretrain", "no model_type"),
        ({"pretrain": "unheard"}, "pretrain", "frobnicator"),
        ({"pretrain": "adapter"}, "pretrain", "--merge-adapter"),
        ({"pretrain": "chunks"}, STRATEGY, "vllm or sglang"),
        (sglang() | {"pretrain": "windows"}, STRATEGY, "qwen2 has no windows, and is right up to a sequence_length of"),
        (sglang() | args(lora_target="v_proj,o_proj"), f"{ARGS}.lora_target", "with q_proj and v_proj beside any of"),
        ({"pretrain": "short"}, "sequence_length", "at most 64"),
        ({"sequence_length": 4096}, "sequence_length", "at most 2048"),
        (args(model_config_kwargs={"rms_norm_eps": 1e-5}), "actor_infer.model_args.model_config_kwargs",
         "the same as actor_train's, whose model it is: {'rms_norm_eps': 1e-05}"),
        # what other libraries call it
        (args(use_liger=True), f"{ARGS}.use_liger", "use_liger_kernel"),
        (train(packing=True), "actor_train.packing", "use_sequence_packing"),
        (fsdp2(param_offload=True), f"{TRAIN}.param_offload", "cpu_offload"),
        (deepspeed(ulysses_sequence_parallel_size=2), f"{TRAIN}.ulysses_sequence_parallel_size", "ulysses_size"),
        (megatron(decoder_first_pipeline_num_layers=2), f"{TRAIN}.decoder_first_pipeline_num_layers", FIRST),
        (vllm(free_cache_engine=True), f"{INFER}.free_cache_engine", "share devices"),
        ({"update_weights_bucket_megabytes": 512}, "update_weights_bucket_megabytes", "model_update_buffer_size_mb"),
        # batches and keys that a role does not read
        (train(device_mapping=[0, 1, 2, 3, 4]), "actor_train.training_args.gradient_accumulation_steps",
         "5 data-parallel ranks cannot share 48 samples"),
        (train(sequence_length_round_in_train=256), "actor_train.sequence_length_round_in_train", "at most"),
        (train(sequence_length_round_in_infer=96, use_dynamic_batching_in_infer=True,
               max_tokens_per_microbatch_in_infer=130), "actor_train.max_tokens_per_microbatch_in_infer", "192"),
        (train(max_pixels_per_microbatch_in_train=10**6), "actor_train.max_pixels_per_microbatch_in_train", "no pic"),
        ({"actor_infer.use_sequence_packing": True}, "actor_infer.use_sequence_packing", "actor_infer does not read"),
        ({"actor_infer.model_update_frequency": 2}, "actor_infer.model_update_frequency", "actor_train"),
        ({**REFERENCE, **engine("fsdp2_infer", "reference"), "reference.sequence_length_round_in_train": 8},
         "reference.sequence_length_round_in_train", "reference does not read"),
    ],
)  # fmt: skip
def test_a_wrong_choice_is_refused_with_its_key_and_a_right_one(problems, changes, path, words):
    found = problems(changes)
    assert found.keys() == {path} and words in found[path], found


def test_an_unknown_entry_of_the_models_configuration_is_named_in_every_role(problems):
    roles = ("actor_train", "actor_infer")
    keys = [f"{role}.model_args.model_config_kwargs" for role in roles]
    found = problems({key: {"num_layerz": 3} for key in keys})
    assert found.keys() == {f"{key}.num_layerz" for key in keys}
    assert all("num_hidden_layers" in words for words in found.values())


@pytest.mark.parametrize(
    "changes",
    [
        megatron("dense", 4, **{PP: 4, FIRST: 1, LAST: 1}),
        megatron("dense", 3, **{TP: 3}),
        megatron("moe", 2, **{EP: 2, TP: 2, ETP: 1, "sequence_parallel": True}),
        megatron("moe2", moe_shared_expert_overlap=True, freeze_moe_router=True, moe_aux_loss_coeff=0.1),
        megatron(recompute_method="uniform", recompute_num_layers=3),
        megatron() | args(attn_implementation="fa2"),
        zero(stage=3, reduce_bucket_size=5e8, stage3_param_persistence_threshold=10, overlap_comm="auto"),
        fsdp2("moe", tensor_parallel_size=2),
        megatron("moe", 2, **{PP: 2}) | {REPLAY: "R3"},
        fsdp2("dense", 3, tensor_parallel_size=3),
        fsdp2("moe", tensor_parallel_size=2) | {REPLAY: "R2"},
        zero(stage=3) | {REPLAY: "R2", "pretrain": "moe2"},
        fsdp2("dense", 6) | args(ulysses_size=6),
        args(lora_target="q_proj,v_proj", lora_rank=4),
        megatron("moe", 2, **{TP: 2, "sequence_parallel": True}) | args(lora_target="all-linear"),
        vllm(max_num_batched_tokens=4096, enforce_eager=True),
        {"actor_infer.use_sequence_packing": True, **train(use_sequence_packing=True)},
        {**REFERENCE, **engine("hf_infer", "reference")},
    ],
)
def test_a_right_choice_passes(problems, changes):
    assert problems(changes) == {}
