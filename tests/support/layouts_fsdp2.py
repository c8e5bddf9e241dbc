"""The layouts of ``fsdp2_train``."""

from typing import Any

from tests.support.harness import ADAPTER, ALL_ADAPTED, ATTENTION_ADAPTED, BF16_BOUNDS, Layout

PACKED = {"use_sequence_packing": True}
BY_TOKENS = {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 50}
ULYSSES = {"model_args": {"ulysses_size": 2}}
RECOMPUTED = {"model_args": {"disable_gradient_checkpointing": False}}
BF16 = {"model_args": {"dtype": "bf16"}}
COMPUTES_IN_BF16 = {"param_dtype": "bf16"}
SCORES = {"model": "qwen2_scores"}
ROUTED = {"task": "routed", "model": "qwen3_moe"}
ROUTED_GROUPS: dict[str, Any] = {
    "task": "routed-groups",
    "model": "qwen3_moe",
    "training_args": {"per_device_train_batch_size": 4},
}
TP = {"tensor_parallel_size": 2}


SLOW = """
    replica2 alone-bf16 replica2-tokens shard2-recomputed replica2-lora shard2-lora-bf16
    shard2-lora-simpo tp2-reverse_kl shard2-lora-js_divergence ulysses2-regression tp2-recomputed ulysses2-tokens
    replica2-tp2 ulysses4 ulysses2-tp2 tp2 tp2-moe ulysses2-packed shard2-packed-bradley_terry ulysses2-lora-packed
    ulysses2-top_forward_kl tp2-bradley_terry tp2-routed ulysses2-routed shard2-tp2 ulysses2-shard2
    alone alone-computes-bf16 alone-lora alone-shared-sigmoid alone-top_forward_kl alone-tokens-process
    alone-lora-process alone-lora-routed-groups alone-routed-recomputed tp2-ipo shard2-packed
    shard2-moe ulysses2 hsdp2x2
"""
"""Names of the layouts that CI leaves out."""


def layout(name: str, world_size: int, config: dict[str, Any] | None = None, **kwargs: Any) -> Layout:
    return Layout(name, "fsdp2_train", world_size, config or {}, slow=name in SLOW.split(), **kwargs)


LAYOUTS = [
    layout("alone", 1),
    layout("alone-packed", 1, worker=PACKED, training_args={"per_device_train_batch_size": 4}),
    layout("alone-bf16", 1, **BF16),
    layout("alone-computes-bf16", 1, COMPUTES_IN_BF16, bounds=BF16_BOUNDS),
    layout("replica2", 2, {"fsdp_size": 1}),
    layout("replica2-tokens", 2, {"fsdp_size": 1}, worker=BY_TOKENS, model="qwen3"),
    layout("shard2", 2, model="qwen2_untied"),
    layout("shard2-packed", 2, worker=PACKED, training_args={"per_device_train_batch_size": 4}),
    layout("shard2-bf16", 2, **BF16),
    layout("replica2-computes-bf16", 2, COMPUTES_IN_BF16 | {"fsdp_size": 1}, worker=PACKED, bounds=BF16_BOUNDS),
    layout("shard2-moe", 2, model="qwen3_moe"),
    layout("shard2-recomputed", 2, {"activation_offload": True}, model="llama", **RECOMPUTED),
    layout("offload2", 2, {"cpu_offload": True}),
    layout("alone-lora", 1, lora=ALL_ADAPTED),
    layout("replica2-lora", 2, {"fsdp_size": 1}, lora=ADAPTER),
    layout("shard2-lora-recomputed", 2, lora=ADAPTER, **RECOMPUTED),
    layout("shard2-lora-bf16", 2, lora=ADAPTER, **BF16),
    layout("ulysses2-lora-packed", 2, worker=PACKED, lora=ALL_ADAPTED, model="qwen3", **ULYSSES),
    layout("alone-shared-sigmoid", 1, task="sigmoid"),
    layout("shard2-packed-orpo", 2, task="orpo", worker=PACKED),
    layout("replica2-tokens-kto", 2, {"fsdp_size": 1}, task="kto", worker=BY_TOKENS),
    layout("tp2-ipo", 2, TP, task="ipo", worker=BY_TOKENS | {"share_prompts": False}),
    layout("shard2-lora-simpo", 2, task="simpo", lora=ADAPTER),
    layout("alone-top_forward_kl", 1, task="top_forward_kl"),
    layout("shard2-packed-js_divergence", 2, task="js_divergence", worker=PACKED),
    layout("tp2-reverse_kl", 2, TP, task="reverse_kl", worker=BY_TOKENS | {"share_prompts": False}),
    layout("shard2-lora-js_divergence", 2, task="js_divergence", lora=ADAPTER),
    layout("ulysses2-top_forward_kl", 2, task="top_forward_kl", **ULYSSES),
    layout("alone-tokens-process", 1, task="process", worker=BY_TOKENS, **SCORES),
    layout("shard2-packed-bradley_terry", 2, task="bradley_terry", worker=PACKED, **SCORES),
    layout("tp2-bradley_terry", 2, TP, task="bradley_terry", **SCORES),
    layout("alone-lora-process", 1, task="process", lora=ADAPTER, **SCORES),
    layout("shard2-lora-packed-bradley_terry", 2, task="bradley_terry", lora=ADAPTER, worker=PACKED, **SCORES),
    layout("ulysses2-regression", 2, task="regression", **ULYSSES, **SCORES),
    layout("alone-routed-recomputed", 1, **ROUTED | RECOMPUTED),
    layout("alone-routed-groups", 1, **ROUTED_GROUPS),
    layout("alone-lora-routed-groups", 1, lora=ATTENTION_ADAPTED, **ROUTED_GROUPS),
    layout("shard2-routed-packed", 2, worker=PACKED, **ROUTED),
    layout("tp2-routed", 2, TP, worker=BY_TOKENS, **ROUTED),
    layout("ulysses2-routed", 2, {"fsdp_size": 1}, **ROUTED | ULYSSES),
    layout("ulysses2-kept", 2, task="kept", **ULYSSES),
    layout("tp2", 2, TP),
    layout("tp2-packed", 2, TP, model="qwen3", worker=PACKED),
    layout("tp2-moe", 2, TP, model="qwen3_moe"),
    layout("tp2-recomputed", 2, TP, model="llama", **RECOMPUTED),
    layout("ulysses2", 2, {"fsdp_size": 1}, model="qwen3", **ULYSSES),
    layout("ulysses2-packed", 2, worker=PACKED, **ULYSSES),
    layout("ulysses2-tokens", 2, worker=BY_TOKENS | {"share_prompts": False}, model="llama", **ULYSSES),
    layout("hsdp2x2", 4, {"fsdp_size": 2}),
    layout("shard2-tp2", 4, TP, model="qwen3"),
    layout("replica2-tp2", 4, TP | {"fsdp_size": 1}, model="qwen2_untied"),
    layout("ulysses4", 4, {"fsdp_size": 1}, model_args={"ulysses_size": 4}),
    layout("ulysses2-shard2", 4, {"fsdp_size": 2}, model="llama", **ULYSSES),
    layout("ulysses2-tp2", 4, TP, **ULYSSES),
]
