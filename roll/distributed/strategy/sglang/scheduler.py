"""Code that runs inside SGLang's own processes, next to the model: their entry points, and loading weights.

Importing this module prepares the process for SGLang. It is what a new process imports first, before the arguments of
its entry point, which are SGLang's, are unpickled.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from roll.distributed.strategy.generation.prompt_scoring import SCORING, PromptScoring
from roll.distributed.strategy.sglang import cpu, sampler
from roll.distributed.weights.contents import views

cpu.prepare()

LOADER = "roll.distributed.strategy.sglang.scheduler.load_staged"
"""By this name SGLang is told to load weights with ``load_staged``."""

PAUSED_ROUND_S = 0.002


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """The process that holds the model, one per device."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    sampler.register()
    score_prompts(PromptScoring(*json.loads(os.environ[SCORING])))
    _rest_while_paused()
    run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """The process that turns tokens into text."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)


def load_staged(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Loads weights from one block of bytes, which is described in its name.

    It is either on a device, shared by the process that has it, or in a file in memory, and the tensor is empty then.
    Every process of a tensor-parallel engine maps the same block; it crosses to the process's device as a whole.
    """
    ((description, block),) = named_tensors
    staged = json.loads(description)
    if staged["path"] is not None:
        block = map_file(staged["path"], staged["num_bytes"])
    device = next(iter(model.parameters())).device
    model.load_weights(views(block.to(device), staged["tensors"]))


def map_file(path: str, num_bytes: int) -> Tensor:
    return torch.from_file(path, shared=False, size=num_bytes, dtype=torch.uint8)


def score_prompts(scoring: PromptScoring) -> None:
    """Reports of prompts what ``scoring`` says, in place of the log-probabilities of so many top tokens.

    SGLang has no temperature for prompts, and of tokens beyond the top ones it says nothing.
    """
    from sglang.srt.layers.logprob_processor import InputLogprobProcessor

    forward = InputLogprobProcessor.forward

    def scored(
        self: Any,
        pruned_states: Tensor,
        sample_indices: Tensor | None,
        input_logprob_indices: Tensor,
        token_to_seq_idx: list[int],
        lm_head: Any,
        get_logits_fn: Any,
        logits_metadata: Any,
        **options: Any,
    ) -> Any:
        told: list[tuple[Tensor, Tensor]] = []

        def logits_of(*args: Any, **kwargs: Any) -> Tensor:
            logits_LV = get_logits_fn(*args, **kwargs).float() / scoring.temperature
            if scoring.top_k:
                told.append(scoring.told(logits_LV.log_softmax(-1)))
            return logits_LV

        result, sampled = forward(
            self,
            pruned_states,
            sample_indices,
            input_logprob_indices,
            token_to_seq_idx,
            lm_head,
            logits_of,
            logits_metadata,
            **options,
        )
        if told and logits_metadata.extend_return_top_logprob:
            ids, values = (torch.cat(parts)[input_logprob_indices].cpu() for parts in zip(*told, strict=True))
            lengths = logits_metadata.extend_logprob_pruned_lens_cpu
            # In borrowed memory SGLang keeps tensors, which it turns into lists when their copies are done.
            whole = result.input_copy_done is not None
            result.top_logprobs_idx = [[part] if whole else part.tolist() for part in ids.split(lengths)]
            result.top_logprobs_val = [[part] if whole else part.tolist() for part in values.split(lengths)]
        return result, sampled

    InputLogprobProcessor.forward = scored


def _rest_while_paused() -> None:
    """SGLang's scheduler asks for messages without a break while it is paused, which takes a whole core."""
    from sglang.srt.managers.scheduler import Scheduler

    each_round = Scheduler._record_scheduler_state_for_paused_engine

    def and_rest(scheduler: Scheduler) -> None:
        each_round(scheduler)
        time.sleep(PAUSED_ROUND_S)

    Scheduler._record_scheduler_state_for_paused_engine = and_rest
