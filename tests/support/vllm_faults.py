"""vLLM's worker with faults, one at a time: ``worker_extension_cls`` of an engine; a test calls ``roll_plant``.

What vLLM reports beyond the model's own distribution (``processed_logprobs``) is vLLM's own setting.
"""

import copy
import dataclasses
from typing import Any

import torch

from roll.distributed.strategy.vllm.worker import WorkerExtension


class FaultyWorker(WorkerExtension):
    """Plants what changes how tokens are sampled, and what the model computes."""

    def roll_prepare(self, owner: int, scoring: Any) -> None:
        super().roll_prepare(owner, scoring)
        self.roll_fault = ""
        sampler = self.model_runner.sampler

        def spoil(_: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            logits_BV = named["logits"] if "logits" in named else args[0]
            metadata = named["sampling_metadata"] if "sampling_metadata" in named else args[1]
            if self.roll_fault == "hotter":
                logits_BV = logits_BV / 1.4
            if self.roll_fault == "cut":
                metadata = dataclasses.replace(metadata, top_p=torch.full((len(logits_BV),), 0.7))
            return (), {**named, "logits": logits_BV, "sampling_metadata": metadata}

        sampler.register_forward_pre_hook(spoil, with_kwargs=True)

    def roll_plant(self, fault: str) -> None:
        """Takes out what was planted before; an empty name plants nothing."""
        self.roll_fault = fault
        model, sampler = self.model_runner.get_model(), self.model_runner.sampler
        told = "processed_logprobs" if fault in ("processed", "cut") else "raw_logprobs"
        sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = told
        model.logits_processor.soft_cap = 3.0 if fault == "final soft cap" else None
        for rope in (each for each in model.modules() if hasattr(each, "cos_sin_cache")):
            rope.kept = getattr(rope, "kept", rope.cos_sin_cache.clone())
            positions_P = torch.arange(len(rope.kept))
            rope.cos_sin_cache.copy_(rope.kept[positions_P // 2 if fault == "rope" else positions_P])
        model.lm_head = model.model.embed_tokens
        if fault == "tied weight apart":
            self._part(model)

    def _part(self, model: Any) -> None:
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        head = copy.copy(model.model.embed_tokens)
        head._parameters = {"weight": torch.nn.Parameter(head.weight * 1.1, requires_grad=False)}
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
        model.lm_head = head
