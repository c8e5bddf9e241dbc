"""Engines by name. Listing them imports none."""

from __future__ import annotations

from roll.utils.registry import Registry

STRATEGIES: Registry[type] = Registry("strategy")
STRATEGIES.register("hf_infer", "roll.distributed.strategy.hf_infer.strategy:HfInfer")
STRATEGIES.register("fsdp2_train", "roll.distributed.strategy.fsdp2.strategy:Fsdp2Train")
STRATEGIES.register("fsdp2_infer", "roll.distributed.strategy.fsdp2.strategy:Fsdp2Infer")
STRATEGIES.register("vllm", "roll.distributed.strategy.vllm.strategy:VllmStrategy")
STRATEGIES.register("sglang", "roll.distributed.strategy.sglang.strategy:SglangStrategy")
STRATEGIES.register("deepspeed_train", "roll.distributed.strategy.deepspeed.strategy:DeepSpeedTrain")
STRATEGIES.register("deepspeed_infer", "roll.distributed.strategy.deepspeed.strategy:DeepSpeedInfer")
STRATEGIES.register("megatron_train", "roll.distributed.strategy.megatron.strategy:MegatronTrain")
STRATEGIES.register("megatron_infer", "roll.distributed.strategy.megatron.strategy:MegatronInfer")
