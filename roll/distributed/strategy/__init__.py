"""Engines by name. Listing them imports none."""

from __future__ import annotations

from roll.utils.registry import Registry

STRATEGIES: Registry[type] = Registry("strategy")
STRATEGIES.register("hf_infer", "roll.distributed.strategy.hf_infer:HfInfer")
STRATEGIES.register("fsdp2_train", "roll.distributed.strategy.fsdp2:Fsdp2Train")
STRATEGIES.register("fsdp2_infer", "roll.distributed.strategy.fsdp2:Fsdp2Infer")
