"""Parallel layouts of ``megatron_train``: each is one row of the parity matrix."""

from typing import Any

from tests.support.harness import ADAPTER, ALL_ADAPTED, ATTENTION_ADAPTED, Layout

TP, PP, VPP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
CP, EP, ETP = "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"
SP = {"sequence_parallel": True}
FULL = {"recompute_granularity": "full"}
PACKED: dict[str, Any] = {"worker": {"use_sequence_packing": True}, "training_args": {"per_device_train_batch_size": 4}}
BY_TOKENS: dict[str, Any] = {
    "worker": {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 30}
}
BY_TOKENS_OF_ROWS: dict[str, Any] = {
    "worker": {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 60}
}
MOE: dict[str, Any] = {"model": "qwen3_moe"}
GROUPED: dict[str, Any] = {"task": "grouped", "training_args": {"per_device_train_batch_size": 4}}
ROUTED: dict[str, Any] = {"task": "routed", **MOE}
ROUTED_GROUPS: dict[str, Any] = GROUPED | {"task": "routed-groups"} | MOE
SCORES: dict[str, Any] = {"model": "qwen2_scores"}
BF16: dict[str, Any] = {
    "model_args": {"dtype": "bf16"},
    # Weights are exported in bfloat16, whose numbers between 1 and 2 are 2**-7 apart.
    "bounds": {"weights": 2**-7},
}


SLOW = """
    llama recompute-uniform2 recompute-block lora-all-recomputed dp2-overlap dp2-bf16 tp2 tp2-sp-moe tp2-etp1
    pp2-by-tokens pp2-vpp2 cp2 ep2-whole-optimizer pp2-ipo pp2-vpp2-kto tp2-sp-packed-js_divergence pp2-reverse_kl
    cp2-packed-js_divergence pp2-vpp2-process cp2-packed-regression dp2-lora-regression dp2-lora
    dp2-lora-bf16-whole-optimizer tp2-lora tp2-sp-moe-lora pp2-lora pp2-vpp2-lora tp2-sp-routed pp2-ep2-routed
    tp2-kept-packed tp2-pp2 dp2-pp2 tp4 tp2-lora-grouped ep2-allgather-grouped tp2-sp-pp2-vpp2-grouped moe
    recompute-full dp2 pp2 ep2 tp2-sp tp2-sp-packed-bradley_terry dp2-tp2-sp pp2-vpp2-routed-recomputed
    cp2-routed-packed tp2-sp-grouped tp2-sp-packed-lora-bradley_terry tp2-sp-lora-packed cp2-lora-packed
    tp2-sp-pp2-lora tp2-sp-pp2-vpp2-bf16 tp2-sp-cp2-packed tp2-sp-ep2
    pp2-ep2 pp2-vpp2-grouped cp2-packed dp2-lora-bf16
    single recompute-selective routed-recomputed lora lora-routed-groups dp2-sigmoid tp2-sp-packed-orpo
    pp2-tokens-grouped pp2-lora-process
"""
"""Names of the layouts that CI leaves out."""


def layout(name: str, world_size: int, config: dict[str, Any] | None = None, **options: Any) -> Layout:
    return Layout(name, "megatron_train", world_size, config or {}, slow=name in SLOW.split(), **options)


LAYOUTS = [
    layout("single", 1),
    layout("untied", 1, model="qwen2_untied"),
    layout("llama", 1, model="llama"),
    layout("moe", 1, **MOE),
    layout("recompute-full", 1, FULL),
    layout("recompute-uniform2", 1, {**FULL, "recompute_num_layers": 2}),
    layout("recompute-block", 1, {**FULL, "recompute_method": "block", "recompute_num_layers": 2}),
    layout("recompute-selective", 1, {"recompute_granularity": "selective"}),
    layout("recompute-moe", 1, {"moe_layer_recompute": True}, **MOE),
    layout("routed-recomputed", 1, FULL, **ROUTED),
    layout("packed", 1, **PACKED),
    layout("bf16", 1, **BF16),
    layout("lora", 1, lora=ADAPTER),
    layout("lora-all-recomputed", 1, FULL, lora=ALL_ADAPTED, model="llama"),
    layout("dp2", 2),
    layout("dp2-whole-optimizer", 2, {"use_distributed_optimizer": False}),
    layout("dp2-overlap", 2, {"overlap_grad_reduce": True}),
    layout("dp2-bf16", 2, **BF16),
    layout("tp2", 2, {TP: 2}),
    layout("tp2-sp", 2, {TP: 2, **SP}, model="qwen3"),
    layout("tp2-sp-packed", 2, {TP: 2, **SP, "recompute_granularity": "selective"}, **PACKED),
    layout("tp2-sp-moe", 2, {TP: 2, **SP}, **MOE),
    layout("tp2-etp1", 2, {TP: 2, **SP, ETP: 1}, **MOE),
    layout("pp2", 2, {PP: 2}),
    layout("pp2-by-tokens", 2, {PP: 2, **FULL}, **BY_TOKENS),
    layout("pp2-uneven", 2, {PP: 2, "num_layers_in_first_pipeline_stage": 1}, model="llama"),
    layout("pp2-vpp2", 2, {PP: 2, VPP: 2}),
    layout("pp2-vpp2-packed", 2, {PP: 2, VPP: 2, "overlap_grad_reduce": True}, **PACKED),
    layout("cp2", 2, {CP: 2}),
    layout("cp2-packed", 2, {CP: 2, **FULL}, **PACKED),
    layout("ep2", 2, {EP: 2}, **MOE),
    layout("ep2-whole-optimizer", 2, {EP: 2, "use_distributed_optimizer": False}, **MOE),
    layout("ep2-allgather", 2, {EP: 2, "moe_token_dispatcher_type": "allgather"}, **MOE),
    layout("routed-groups", 1, **ROUTED_GROUPS),
    layout("lora-routed-groups", 1, lora=ATTENTION_ADAPTED, **ROUTED_GROUPS),
    layout("tp2-kept-packed", 2, {TP: 2}, task="kept", **PACKED),
    layout("tp2-sp-routed", 2, {TP: 2, **SP}, **ROUTED),
    layout("pp2-vpp2-routed-recomputed", 2, {PP: 2, VPP: 2, **FULL}, **ROUTED),
    layout("cp2-routed-packed", 2, {CP: 2}, **ROUTED, **PACKED),
    layout("ep2-routed-recomputed", 2, {EP: 2, "moe_layer_recompute": True}, **ROUTED),
    layout("dp2-sigmoid", 2, task="sigmoid"),
    layout("tp2-sp-packed-orpo", 2, {TP: 2, **SP}, task="orpo", **PACKED),
    layout("pp2-ipo", 2, {PP: 2}, task="ipo"),
    layout("cp2-packed-simpo", 2, {CP: 2}, task="simpo", **PACKED),
    layout("pp2-vpp2-kto", 2, {PP: 2, VPP: 2}, task="kto"),
    layout("tp2-sp-packed-js_divergence", 2, {TP: 2, **SP}, task="js_divergence", **PACKED),
    layout("tp2-lora-top_forward_kl", 2, {TP: 2}, task="top_forward_kl", lora=ADAPTER),
    layout("pp2-reverse_kl", 2, {PP: 2}, task="reverse_kl"),
    layout("cp2-packed-js_divergence", 2, {CP: 2}, task="js_divergence", **PACKED),
    layout("tp2-sp-packed-bradley_terry", 2, {TP: 2, **SP}, task="bradley_terry", **SCORES, **PACKED),
    layout("pp2-bradley_terry", 2, {PP: 2}, task="bradley_terry", **SCORES),
    layout("pp2-vpp2-process", 2, {PP: 2, VPP: 2}, task="process", **SCORES),
    layout("cp2-packed-regression", 2, {CP: 2}, task="regression", **SCORES, **PACKED),
    layout("tp2-sp-grouped", 2, {TP: 2, **SP, **FULL}, model="qwen3", **GROUPED),
    layout("pp2-tokens-grouped", 2, {PP: 2}, **GROUPED | BY_TOKENS_OF_ROWS),
    layout("pp2-vpp2-grouped", 2, {PP: 2, VPP: 2}, **GROUPED),
    layout("ep2-allgather-grouped", 2, {EP: 2, "moe_token_dispatcher_type": "allgather"}, **MOE, **GROUPED),
    layout("tp2-sp-pp2-vpp2-grouped", 4, {TP: 2, **SP, PP: 2, VPP: 2}, **GROUPED),
    layout("tp2-lora-grouped", 2, {TP: 2, "recompute_granularity": "selective"}, lora=ADAPTER, **GROUPED),
    layout(
        "tp2-sp-packed-lora-bradley_terry", 2, {TP: 2, **SP}, task="bradley_terry", lora=ADAPTER, **SCORES, **PACKED
    ),
    layout("pp2-lora-process", 2, {PP: 2, **FULL}, task="process", lora=ADAPTER, **SCORES),
    layout("dp2-lora-regression", 2, task="regression", lora=ADAPTER, **SCORES),
    layout("dp2-lora", 2, {"overlap_grad_reduce": True}, lora=ADAPTER),
    layout("dp2-lora-bf16", 2, lora=ADAPTER, **BF16),
    layout("dp2-lora-bf16-whole-optimizer", 2, {"use_distributed_optimizer": False}, lora=ADAPTER, **BF16),
    layout("tp2-lora", 2, {TP: 2}, lora=ALL_ADAPTED),
    layout("tp2-sp-lora-packed", 2, {TP: 2, **SP}, lora=ADAPTER, model="qwen3", **PACKED),
    layout("tp2-sp-moe-lora", 2, {TP: 2, **SP}, lora=ALL_ADAPTED, **MOE),
    layout("pp2-lora", 2, {PP: 2}, lora=ADAPTER),
    layout("pp2-vpp2-lora", 2, {PP: 2, VPP: 2, **FULL}, lora=ALL_ADAPTED),
    layout("cp2-lora-packed", 2, {CP: 2}, lora=ADAPTER, **PACKED),
    layout("tp2-sp-pp2-lora", 4, {TP: 2, **SP, PP: 2, **FULL}, lora=ALL_ADAPTED),
    layout("tp2-pp2", 4, {TP: 2, PP: 2}),
    layout("tp2-sp-pp2-vpp2-bf16", 4, {TP: 2, **SP, PP: 2, VPP: 2}, **BF16),
    layout("dp2-pp2", 4, {PP: 2, "overlap_grad_reduce": True}),
    layout("dp2-tp2-sp", 4, {TP: 2, **SP}),
    layout("tp2-sp-cp2-packed", 4, {TP: 2, **SP, CP: 2}, **PACKED),
    layout("pp2-ep2", 4, {PP: 2, EP: 2}, **MOE),
    layout("tp2-sp-ep2", 4, {TP: 2, **SP, EP: 2}, **MOE),
    layout("pp2-ep2-routed", 4, {PP: 2, EP: 2, **FULL}, **ROUTED),
    layout("tp4", 4, {TP: 4}),
]
