"""A scripted policy for the warm start of the tiny model: an optimal or a random valid action. It needs no torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roll.agentic.env.base import TextEnv
from roll.data.renderer import ChatRenderer
from roll.data.requests import Completion, FinishReason, GenerateFn, GenerateRequest
from roll.rollout.env_runner import EnvRunner


@dataclass(frozen=True)
class ScriptedPlay:
    """Sees the environment itself instead of its text (``roll.rollout.plans.Player``)."""

    expert_share: float
    """Probability of an optimal action; otherwise any action, uniformly."""

    def __call__(self, runner: EnvRunner, renderer: ChatRenderer) -> GenerateFn:
        async def generate(request: GenerateRequest) -> Completion:
            rng = random.Random(request.params.seed)
            optimal, actions = await runner.call("expert_actions", _choices)
            action = rng.choice(optimal if optimal and rng.random() < self.expert_share else actions)
            token_ids = np.append(renderer.words(f"<answer>{action}</answer>"), renderer.tokenizer.eos_token_id)
            logprobs = np.zeros(len(token_ids), dtype=np.float32)
            return Completion(request.request_id, token_ids, logprobs, FinishReason.STOP, np.full(len(token_ids), -1))

        return generate


def _choices(env: TextEnv) -> tuple[Sequence[str], Sequence[str]]:
    if not env.action_names:
        raise ValueError(f"{type(env).__name__} has no action_names, which `pretrain: tiny` needs for demonstrations")
    expert = getattr(env, "expert_actions", None)
    return (expert() if expert else []), env.action_names
