"""Requests to a generator, and its completions."""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import numpy as np

from roll.data.columns import UNKNOWN, Axis, Column, ExpertArray, FloatArray, IntArray, Item
from roll.data.stored import may_be_stored

if TYPE_CHECKING:
    from roll.configs.worker import GeneratingArguments

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Weight versions of a completion's tokens, in order: (version, how many tokens it sampled)."""
JudgeQuestion: TypeAlias = "str | Sequence[Mapping[str, Any]]"
"""Question to a judge: a user's message, or a conversation that it answers, with pictures in parts if it sees."""


class FinishReason(enum.StrEnum):
    """Reason why the engine stopped one completion."""

    STOP = "stop"  # an end-of-sequence token or a stop string
    LENGTH = "length"  # max_new_tokens or the context is used up
    ABORT = "abort"  # the caller cancelled the request


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request."""

    max_new_tokens: int = 64
    """Upper bound on sampled tokens."""
    temperature: float = 1.0
    """Softmax temperature; 0 means greedy."""
    top_p: float = 1.0
    """Nucleus mass; 1 keeps everything."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or less keeps everything."""
    min_p: float = 0.0
    """Keep tokens of at least this share of the largest probability; 0 keeps everything."""
    first_token_temperature: float | None = None
    """Softmax temperature of the first token; ``None``: as of the others."""
    first_token_top_k: int | None = None
    """``top_k`` of the first token; ``None``: that of the others."""
    ignore_eos: bool = False
    """No token ends the completion."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that occurred (CTRL, Keskar et al. 2019); 1 is off."""
    presence_penalty: float = 0.0
    """Taken off the logit of a token that was sampled; 0 is off."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for each time it was sampled; 0 is off."""
    max_kept: int = 0
    """With each token comes the set of tokens that top-k, top-p and min-p have left for it, up to so many, and its
    log-prob is that among them (``roll.data.kept_sets``); 0: neither."""
    stop: tuple[str, ...] = ()
    """Generation ends once the decoded text contains one of these; the tokens that completed it are kept."""
    seed: Annotated[int | None, Column()] = None
    """Same seed, prompt and weights give the same tokens, whatever else is in the batch."""

    @property
    def tells_kept(self) -> bool:
        """Tokens come with kept sets."""
        return self.max_kept > 0 and self.temperature > 0 and self.truncates

    @property
    def truncates(self) -> bool:
        """Some tokens of the vocabulary cannot be sampled."""
        return self.top_p < 1 or max(self.top_k, self.first_token_top_k or 0) > 0 or self.min_p > 0


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt for the generation engine."""

    request_id: str
    """Unique among the requests in flight."""
    prompt_ids: Annotated[IntArray, Column(Axis.PROMPT, np.int64)]
    """Token ids, shape [prompt_len]; never re-tokenised."""
    params: Annotated[SamplingParams, Column(Axis.SHARED)] = field(default_factory=SamplingParams)
    recorded: Runs = ()
    """The versions that sampled the tokens in the run that is repeated (``replay_schedule``): the engine samples a
    token when it has its version. Tokens beyond them are sampled with any."""
    items: Annotated[tuple[Item, ...], Column(Axis.ITEM)] = ()
    """The pictures of the prompt, each once; ids below zero say where they are (``roll.data.identity``)."""


@may_be_stored("token_ids", "logprobs", "experts")
@dataclass(frozen=True)
class Completion:
    """What the engine sampled for one request."""

    request_id: str
    token_ids: Annotated[IntArray, Column(Axis.SAMPLED, np.int64)]
    """Sampled ids, shape [n], the end-of-sequence token included."""
    logprobs: Annotated[FloatArray, Column(Axis.SAMPLED, np.float32, batch="rollout_logprobs_T")]
    """log p of each sampled id, shape [n], under the temperature-scaled full distribution (before top-p and top-k), or
    that of its kept set if it has one; under temperature 0, that of temperature 1."""
    finish_reason: FinishReason
    versions: Annotated[IntArray, Column(Axis.SAMPLED, np.int64, batch="rollout_versions_T")]
    """The weight version that sampled each id, shape [n], ascending: an update may come in the middle."""
    experts: Annotated[ExpertArray | None, Column(Axis.TOKEN, np.int16, batch="experts_TE", unset=UNKNOWN)] = None
    """The experts that the prompt's and the sampled tokens went through, shape [prompt_len + n, E], layer by layer; -1
    where that is not known, as of the last token, which nothing was predicted from. ``None`` unless they are asked for
    (``router_replay: R3``)."""
    kept: Annotated[tuple[Item, ...], Column(Axis.ITEM, batch="kept_I")] = ()
    """The kept sets of the sampled tokens, one item (``roll.data.kept_sets``), if the request ``tells_kept``."""
    engine: int = -1
    """The generating worker that answered, by its rank in its role; -1 where that is not known."""

    @property
    def num_tokens(self) -> int:
        """Of the sampled ones."""
        return len(vars(self)["token_ids"])

    @property
    def runs(self) -> Runs:
        """``versions`` as runs of equal ones."""
        starts = np.flatnonzero(np.diff(self.versions, prepend=-1))
        lengths = np.diff(starts, append=len(self.versions))
        return tuple(zip(self.versions[starts].tolist(), lengths.tolist(), strict=True))

    @property
    def weight_version(self) -> int:
        """The version of the first token; -1 where there is none."""
        return int(self.versions[0]) if len(self.versions) else -1


GenerateFn = Callable[[GenerateRequest], Awaitable[Completion]]


def sampling_params(arguments: GeneratingArguments, max_kept: int = 0) -> SamplingParams:
    """``generating_args`` in the words of the engines."""
    assert arguments.max_new_tokens is not None, "the configuration fills it in"
    return SamplingParams(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature if arguments.do_sample else 0.0,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        first_token_temperature=arguments.first_token_temperature,
        first_token_top_k=arguments.first_token_top_k,
        ignore_eos=arguments.ignore_eos,
        repetition_penalty=arguments.repetition_penalty,
        presence_penalty=arguments.presence_penalty,
        frequency_penalty=arguments.frequency_penalty,
        max_kept=max_kept,
        stop=tuple(arguments.stop_strings or ()),
    )
