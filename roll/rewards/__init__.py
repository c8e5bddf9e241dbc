"""Rewards of responses: verifiers by name, or by ``package.module:Class`` for a user's own.

>>> from roll.rewards import VERIFIERS
>>> VERIFIERS.register("mine", "my_package.rewards:MyVerifier")
"""

from __future__ import annotations

from roll.rewards.types import RewardError, RewardResult, RuleVerifier, Sample, Verifier
from roll.utils.registry import Registry

__all__ = ["VERIFIERS", "RewardError", "RewardResult", "RuleVerifier", "Sample", "Verifier"]

VERIFIERS: Registry[type[Verifier]] = Registry("verifier")
VERIFIERS.register("math", "roll.extras.maths.verifier:MathVerifier")
VERIFIERS.register("gsm8k", "roll.extras.maths.final_numbers:FinalAnswerVerifier")
VERIFIERS.register("multiple_choice", "roll.extras.maths.choices:MultipleChoiceVerifier")
VERIFIERS.register("boxes", "roll.extras.boxes:BoxesVerifier")
VERIFIERS.register("format", "roll.rewards.rules:FormatVerifier")
VERIFIERS.register("length", "roll.rewards.rules:LengthVerifier")
VERIFIERS.register("instruction", "roll.rewards.rules:InstructionVerifier")
VERIFIERS.register("code", "roll.extras.sandbox.verifier:CodeVerifier")
VERIFIERS.register("judge", "roll.rewards.judge:JudgeVerifier")
VERIFIERS.register("reward_model", "roll.rewards.reward_model:RewardModelVerifier")
VERIFIERS.register("custom", "roll.rewards.custom:CustomVerifier")
