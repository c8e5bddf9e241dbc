"""``generating_args``: how completions are sampled."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem

_ESCAPES = re.compile(r"(\\[nrt])+")
"""Line breaks and tabs as they are spelled, which YAML reads between double quotes alone."""


class GeneratingArguments(Config):
    """Sampling parameters of every request."""

    max_new_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens sampled in one turn. null means response_length."
    )
    temperature: float = Field(
        default=1.0,
        ge=0,
        description="Softmax temperature; 0 is greedy. Training computes log-probs at the same temperature.",
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Sample only from the most likely tokens of this total mass."
    )
    top_k: int = Field(default=0, ge=-1, description="Sample only from the k most likely tokens; 0 or -1 keeps all.")
    min_p: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Sample only from tokens with at least this share of the most likely token's probability; 0 is "
        "off.",
    )
    first_token_temperature: float | None = Field(
        default=None,
        gt=0,
        description="Temperature of only the first token of a response, so that responses differ from the start "
        "(FIRE, Chen et al. 2024); its log-prob is computed at this temperature. null: `temperature`.",
    )
    first_token_top_k: int | None = Field(
        default=None,
        ge=-1,
        description="`top_k` of only the first token of a response: FIRE samples it at a high temperature among a "
        "few. null: `top_k`.",
    )
    ignore_eos: bool = Field(
        default=False,
        description="Responses continue to max_new_tokens or a stop string, past any token that ends a turn: for "
        "benchmarks.",
    )
    num_beams: int = Field(
        default=1, ge=1, le=1, description="Accepted for compatibility; must be 1, beam search is not sampling."
    )
    num_return_sequences: int = Field(
        default=1,
        ge=1,
        description="Responses per prompt (validation.generating_args). Training uses num_return_sequences_in_group "
        "(RLVR) or group_size (agentic); there this must be 1 or the same.",
    )
    repetition_penalty: float = Field(
        default=1.0,
        gt=0,
        description="Makes tokens that already occurred less likely (CTRL, Keskar et al. 2019); 1 is off.",
    )
    presence_penalty: float = Field(
        default=0.0,
        ge=-2,
        le=2,
        description="Subtracted from the logit of a token that already occurs in the response; 0 is off.",
    )
    frequency_penalty: float = Field(
        default=0.0,
        ge=-2,
        le=2,
        description="Subtracted from the logit of a token for each time that it occurs in the response; 0 is off.",
    )
    do_sample: bool = Field(default=True, description="false is greedy decoding, the same as temperature 0.")
    stop_strings: list[str] = Field(
        default_factory=list, description="A response ends once its text contains one of these, which stays in it."
    )

    @property
    def is_greedy(self) -> bool:
        """The most likely token is taken: equal prompts get equal answers."""
        return not self.do_sample or self.temperature == 0

    def problems(self) -> Iterator[ConfigProblem]:
        key = "temperature" if self.do_sample else "do_sample"
        for index, text in enumerate(self.stop_strings):
            if not text or _ESCAPES.fullmatch(text):
                words = "a text that is not empty" if not text else "no spelled escape"
                hint = f'in double quotes it is the character: ["{text}"]' if text else "every answer would end with it"
                yield self.problem(f"stop_strings.{index}", words, seen=text, hint=hint)
        for name in ("first_token_temperature", "first_token_top_k"):
            if self.is_greedy and getattr(self, name) is not None:
                yield self.problem(name, f"null with {key} {getattr(self, key)}: greedy", key)
