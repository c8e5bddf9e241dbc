"""SGLang's server with faults, one at a time: a test writes its name to the file that ``ROLL_PLANTED`` names.

Runs in SGLang's environment, in place of ``python -m roll.distributed.strategy.sglang.server``.
"""

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from roll.distributed.strategy.sglang import cpu, sampler, scheduler, server
from roll.models import sampling


def planted(fault: str) -> bool:
    return Path(os.environ["ROLL_PLANTED"]).read_text(encoding="utf-8") == fault


def sample(logits_BV: torch.Tensor, rows: Any, *args: Any) -> Any:
    if planted("hotter"):
        return sampling.sample(logits_BV / 1.4, rows, *args)
    if planted("penalised") and (rows.penalty_B is not None or rows.presence_B is not None):
        _, seen_BV, _, count_BV, *_ = (*args, None)
        penalised_BV = sampling._penalised(logits_BV, rows, seen_BV, count_BV)
        return sampling.sample(penalised_BV, replace(rows, penalty_B=None, presence_B=None), *args)
    tokens_B, logprobs_B = sampling.sample(logits_BV, rows, *args)
    if planted("cut") or (planted("truncated") and rows.truncated_R is not None):
        all_BV = (logits_BV / rows.temperature_B[:, None]).log_softmax(-1)
        out_BV = all_BV < logprobs_B[:, None] - 0.5
        logprobs_B = all_BV.masked_fill(out_BV, -torch.inf).log_softmax(-1).gather(1, tokens_B[:, None])[:, 0]
    return tokens_B, logprobs_B


def load_staged(model: Any, named_tensors: Any) -> None:
    """Puts right what was planted in the model, and plants what is to be found in it."""
    from sglang.srt.layers import logits_processor
    from sglang.srt.managers import mm_schedule

    if planted("old features"):
        mm_schedule.embedding_cache.clear, clear = lambda: None, mm_schedule.embedding_cache.clear
    model.lm_head = embedding = model.model.embed_tokens
    load(model, named_tensors)
    if planted("old features"):
        mm_schedule.embedding_cache.clear = clear
    if planted("tied weight apart"):
        model.lm_head = copy.copy(embedding)
        weight = torch.nn.Parameter(embedding.weight * 1.1, requires_grad=False)
        weight.__dict__.update(embedding.weight.__dict__)
        model.lm_head._parameters = {"weight": weight}
    (processor,) = (each for each in model.modules() if isinstance(each, logits_processor.LogitsProcessor))
    logits_processor.fused_softcap = lambda logits, cap: logits.div_(cap).tanh_().mul_(cap)  # theirs is for GPUs
    processor.final_logit_softcapping = 3.0 if planted("final soft cap") else None
    for rope in (each for each in model.modules() if hasattr(each, "cos_sin_cache")):
        rope.kept = getattr(rope, "kept", rope.cos_sin_cache)
        positions_P = torch.arange(len(rope.kept))
        rope.cos_sin_cache = rope.kept[positions_P // 2 if planted("rope") else positions_P]


async def end_update(self: server.SglangServer, version: int) -> None:
    """Keeps what was computed before the update."""
    if not planted("old keys and values"):
        return await ended(self, version)
    await self.release("update")
    self._update_lock.release()


def result(output: Any) -> dict[str, Any]:
    found = told(output)
    if planted("offset"):
        found["logprobs"] = [*found["logprobs"][1:], *found["logprobs"][:1]]
    return found


async def as_given(model_config: Any, image_data: Any, **named: Any) -> Any:
    (shown,) = image_data
    for *_, values in shown["pictures"]:
        if planted("other picture"):
            values["pixel_values"] = values["pixel_values"][::-1].copy()
        if planted("other pixel"):
            values["pixel_values"][2, 5] += 0.5
    return await given(model_config, image_data, **named)


load, ended = scheduler.load_staged, server.SglangServer.end_update
told, given = server._result, server._as_given

if __name__ == "__main__":
    cpu.prepare()
    sampler.sample = sample  # type: ignore[assignment]
    scheduler.load_staged = load_staged
    server._result, server._as_given = result, as_given
    server.SglangServer.end_update = end_update  # type: ignore[method-assign]
    server.main()
