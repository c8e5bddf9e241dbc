"""DeepSpeed's rows of the parity matrix."""

from typing import Any

from tests.support.harness import ADAPTER, ALL_ADAPTED, Layout


def zero(stage: int, **options: Any) -> dict[str, Any]:
    """A strategy configuration; with small thresholds, so that stage 3 partitions a tiny model's parameters at all."""
    if stage == 3:
        options = {"stage3_param_persistence_threshold": 0} | options
    return {"zero_optimization": {"stage": stage, **options}}


CPU = {"device": "cpu"}
ROUTED = {"task": "routed", "model": "qwen3_moe"}
PACKED = {
    "use_sequence_packing": True,
    "use_dynamic_batching_in_train": True,
    "max_tokens_per_microbatch_in_train": 48,
    "use_dynamic_batching_in_infer": True,
    "max_tokens_per_microbatch_in_infer": 64,
}
RECOMPUTED = {"disable_gradient_checkpointing": False}


SLOW = """
    zero0 zero2 zero1-offload zero2-offload zero3-recomputed zero3-persistent-packed zero3-ulysses2 zero1-bf16
    zero2-bf16 zero1-offload-bf16 zero3-offload-bf16 zero0-lora zero2-packed-orpo zero2-ulysses2-ipo
    zero2-kept-packed zero2-lora-top_forward_kl zero3-bradley_terry zero3-lora-bradley_terry zero3-lora-recomputed
    zero1 zero3 zero3-moe zero3-routed zero3-bf16 zero2-lora-ulysses2 zero1-ranks4 zero3-ranks4-ulysses2
    zero2-ulysses2 zero3-js_divergence zero1-packed-grouped zero1-lora-packed zero3-kto
    zero3-grouped
"""
"""Names of the layouts that CI leaves out."""


def layout(name: str, config: dict[str, Any], **options: Any) -> Layout:
    return Layout(name, "deepspeed_train", options.pop("world_size", 2), config, slow=name in SLOW.split(), **options)


# Weights are exported in bf16: the norms' are above 1, where it has steps of 2**-7.
BF16: dict[str, Any] = {"model_args": {"dtype": "bf16"}, "bounds": {"weights": 6e-3}}

# In the second step one of this adapter's gradients is 7e-7, where Adam divides by its epsilon of 1e-6: noise of 1e-7
# of a matrix's largest gradient moves the oracle's own weights by 5e-6. FSDP2, ZeRO 0 and 2 agree here to 2e-7.
NEAR_EPSILON = {"weights": 2e-5}

LAYOUTS = [
    *(layout(f"zero{stage}", zero(stage)) for stage in range(4)),
    layout("zero1-offload", zero(1, offload_optimizer=CPU), model="qwen2_untied"),
    layout("zero2-offload", zero(2, offload_optimizer=CPU), worker=PACKED),
    layout("zero3-offload", zero(3, offload_optimizer=CPU, offload_param=CPU), model_args=RECOMPUTED),
    layout("zero3-recomputed", zero(3), model_args=RECOMPUTED, model="llama"),
    layout("zero2-recomputed-packed", zero(2, overlap_comm=True), model_args=RECOMPUTED, worker=PACKED, model="qwen3"),
    layout("zero3-persistent-packed", zero(3, stage3_param_persistence_threshold=100), worker=PACKED),
    layout("zero3-moe", zero(3), model="qwen3_moe"),
    layout("zero3-routed", zero(3), model_args=RECOMPUTED, **ROUTED),
    layout("zero2-routed-packed", zero(2), worker=PACKED, **ROUTED),
    layout("zero2-kept-packed", zero(2), task="kept", worker=PACKED),
    layout("zero2-ulysses2", zero(2), model_args={"ulysses_size": 2}, worker=PACKED),
    layout("zero3-ulysses2", zero(3), model_args={"ulysses_size": 2} | RECOMPUTED),
    layout("zero1-sigmoid", zero(1), task="sigmoid"),
    layout("zero2-packed-orpo", zero(2), task="orpo", worker=PACKED),
    layout("zero3-kto", zero(3), task="kto"),
    layout("zero2-ulysses2-ipo", zero(2), task="ipo", model_args={"ulysses_size": 2}),
    layout("zero1-packed-top_forward_kl", zero(1), task="top_forward_kl", worker=PACKED),
    layout("zero3-js_divergence", zero(3), task="js_divergence"),
    layout("zero1-packed-grouped", zero(1), task="grouped", worker=PACKED),
    layout("zero3-grouped", zero(3), task="grouped", model_args=RECOMPUTED, model="llama"),
    layout("zero2-lora-top_forward_kl", zero(2), task="top_forward_kl", lora=ADAPTER),
    layout("zero1-packed-process", zero(1), task="process", worker=PACKED, model="qwen2_scores"),
    layout("zero3-bradley_terry", zero(3), task="bradley_terry", model="qwen2_scores"),
    layout("zero2-lora-reverse_kl", zero(2), task="reverse_kl", lora=ADAPTER, bounds=NEAR_EPSILON),
    layout("zero0-lora-regression", zero(0), task="regression", lora=ADAPTER, model="qwen2_scores"),
    layout("zero3-lora-bradley_terry", zero(3), task="bradley_terry", lora=ADAPTER, model="qwen2_scores"),
    *(layout(f"zero{stage}-bf16", zero(stage), **BF16) for stage in range(4)),
    layout("zero1-offload-bf16", zero(1, offload_optimizer=CPU), **BF16),
    layout("zero3-offload-bf16", zero(3, offload_optimizer=CPU), **BF16),
    layout("zero0-lora", zero(0), lora=ADAPTER),
    layout("zero1-lora-packed", zero(1), lora=ALL_ADAPTED, worker=PACKED, model="qwen3"),
    layout("zero2-lora-ulysses2", zero(2), model_args={"ulysses_size": 2}, lora=ADAPTER),
    layout("zero3-lora-recomputed", zero(3), model_args=RECOMPUTED, lora=ADAPTER, model="llama"),
    layout("zero1-ranks4", zero(1), world_size=4),
    layout("zero3-ranks4-ulysses2", zero(3), model_args={"ulysses_size": 2}, world_size=4),
]
