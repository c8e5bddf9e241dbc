"""Continuous batching for any decoder-only Hugging Face model: admits requests, and runs one step for all of them.

A step is: admit waiting sequences (one forward over their prompts), then one token for every running sequence. A
prompt's last token is not part of the prefill: it is the input of the sequence's first decode step. So logits and
sampling exist in one place only, prompts need no mask (right padding is invisible to causal attention), and equal
prompts (the samples of one request, the members of a group) are prefilled once and copied.

With one thread on a CPU, logits do not depend, to the last bit, on what else is in the batch, so a run repeats exactly
although requests arrive in another order each time. Four habits make it so: a decode step always has a mask and at
least ``MIN_ROWS`` rows (kernels for fewer add up in another order; MKL's for AVX-512 for up to 15), attention widths
are multiples of ``WIDTH_BLOCK`` (vectorised sums then see the same lanes, followed by zeros), and a prompt is computed
at a width of its own length (MKL adds up products of more than 192 columns in two halves, wherever these end). Where
layers have states, a prompt is computed alone and without padding, which would change them, and a decode step has a
multiple of ``MIN_ROWS`` rows. A mixture's experts are computed in batches of all rows, which round differently.

A sequence with recorded versions waits where its next token is one of later weights: in the queue, or in its slot,
where what it would sample is thrown away and its keys and values, and states, stay.

Everything here is synchronous and single-threaded; ``strategy.py`` runs it in a thread.

Axes: B rows of one forward, L tokens per row, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from roll.configs.engines.hf_infer import WINDOWED, layer_kinds
from roll.data.columns import ExpertArray, IntArray, columns_of, unknown
from roll.data.identity import identity, vocabulary_ids
from roll.data.kept_sets import kept_item
from roll.data.requests import Completion, FinishReason, GenerateRequest
from roll.distributed.strategy.generation.generator import Counters
from roll.distributed.strategy.hf_infer.slot_cache import SlotCache
from roll.models.pictures import Tower
from roll.models.routing import ExpertRouting
from roll.models.sampling import SamplerRows, sample, uniforms
from roll.utils.progress import advance

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_UNDECODABLE = "�"  # how a tokenizer shows a piece of a character


class StopStrings:
    """Stop strings for one tokenizer.

    A stop string is completed by a token that holds its last character, or a part of that character's bytes. Few tokens
    do, so a table over the vocabulary says when decoding is worth it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._enders = functools.lru_cache(maxsize=64)(self._find_enders)

    def may_end(self, stop: tuple[str, ...], token: int) -> bool:
        """Tells whether ``token`` could complete one of ``stop``; if so, ask ``found``."""
        enders = self._enders(stop)
        return token < len(enders) and bool(enders[token])

    def found(self, stop: tuple[str, ...], token_ids: list[int]) -> bool:
        """Tells whether the end of the decoded text holds one of ``stop``."""
        # A character has at most four bytes and a token at least one; four more absorb a cut at the tail's start.
        tail = 4 * max(map(len, stop)) + 4
        text = self._tokenizer.decode(token_ids[-tail:], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(s in text for s in stop)

    def _find_enders(self, stop: tuple[str, ...]) -> npt.NDArray[np.bool_]:
        """bool [vocabulary]: the tokens that could complete one of ``stop``."""
        last = {s[-1] for s in stop}
        if any(c.isspace() for c in last):
            # Tokenizers may strip the space of a lone token, so its text cannot rule anything out.
            return np.ones(len(self._pieces), dtype=np.bool_)
        wanted = last | {_UNDECODABLE}
        return np.array([not wanted.isdisjoint(piece) for piece in self._pieces], dtype=np.bool_)

    @functools.cached_property
    def _pieces(self) -> list[str]:
        ids = [[i] for i in range(len(self._tokenizer))]
        return self._tokenizer.batch_decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@dataclass(eq=False)
class RunningSequence:
    """One running completion. ``eq=False``: identity is what counts, and it makes the object hashable."""

    request: GenerateRequest
    seed: int
    """Unsigned 64 bits."""
    limit: int
    """Most tokens to sample: ``max_new_tokens``, or what is left of the context."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """The weights that sampled each token."""
    kept: list[IntArray] = field(default_factory=list)
    """The kept set of each token, empty where it is the whole vocabulary, if the request ``tells_kept``."""
    experts: list[ExpertArray] = field(default_factory=list)
    """Those of each token that the model has seen, where they are asked for."""
    num_routed: int = 0
    """Tokens in ``experts``."""
    ahead: int = 0
    """By how much positions are ahead of places in the sequence behind its pictures."""

    @property
    def history(self) -> IntArray:
        """Prompt and sampled tokens: what must be in the cache, up to the last token, before the next step."""
        prompt = self.request.prompt_ids
        return np.concatenate([prompt, np.array(self.tokens, dtype=np.int64)]) if self.tokens else prompt

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.tokens)

    @property
    def final_length(self) -> int:
        return len(self.request.prompt_ids) + self.limit

    def waits(self, version: int) -> bool:
        """Its next token was recorded with later weights than ``version``."""
        end = 0
        for recorded, tokens in self.request.recorded:
            end += tokens
            if len(self.tokens) < end:
                return recorded > version
        return False

    def completion(self, reason: FinishReason) -> Completion:
        """The tokens sampled so far, as an answer."""
        return Completion(
            request_id=self.request.request_id,
            token_ids=np.array(self.tokens, dtype=np.int64),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            finish_reason=reason,
            versions=np.array(self.versions, dtype=np.int64),
            experts=self._all_experts(),
            kept=(kept_item(len(self.request.prompt_ids), self.kept),) if self.kept else (),
        )

    def add_experts(self, experts: ExpertArray) -> None:
        """Takes those of the history's beginning; what was known of it before stays."""
        if len(experts) > self.num_routed:
            self.experts.append(experts[self.num_routed :])
            self.num_routed = len(experts)

    def set_last_experts(self, experts_E: ExpertArray) -> None:
        """Takes those of the last token, known or not: what it is now sampled from."""
        if self.num_routed == self.length:
            self.experts.pop()  # the token that followed was thrown away
        self.experts.append(experts_E[None].copy())
        self.num_routed = self.length

    def _all_experts(self) -> ExpertArray | None:
        if not self.experts:
            return None
        rest = unknown(self.length - self.num_routed, self.experts[0].shape[1:], columns_of(Completion)["experts"])
        return np.concatenate([*self.experts, rest])


MIN_ROWS = 16
WIDTH_BLOCK = 16
PREFILL_BLOCK = 32  # a forward of its own costs a tiny model more than some tokens of padding per prompt …
LARGE_PREFILL_BLOCK = 8  # … and a large one less
LARGE = 2**25  # parameters


_EVERYTHING: IntArray = np.zeros(0, dtype=np.int64)
Finished = tuple[RunningSequence, FinishReason]


@dataclass
class StepCounters(Counters):
    """Running totals since the start. Shared tokens are those copied from an equal prompt; padding is not counted."""

    steps: int = 0


class ContinuousBatching:
    """The scheduler and the step.

    Args:
        model: takes a ``Cache``, a 4D attention mask (a ``dict`` of them if only some layers have windows) and
            ``position_ids``; its layers are of the kinds in ``slot_cache.LAYERS``.
        max_running: most sequences in one step.
        max_prefill_tokens: most prompt tokens admitted in one step (a longer prompt is admitted alone).
        max_cache_tokens: most positions of the key-value cache, slots × longest sequence; ``None``: no bound.
        routing: the model's routers, whose choices completions tell; ``None``: they do not.
        tower: of a model that is given pictures.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        stop_ids: Sequence[int],
        stop_strings: StopStrings,
        max_running: int,
        max_prefill_tokens: int,
        max_cache_tokens: int | None = None,
        routing: ExpertRouting | None = None,
        tower: Tower | None = None,
    ) -> None:
        self._routing = routing
        self._tower = tower
        self.weight_version = 0
        self.counters = StepCounters()
        self.num_recorded: Counter[int] = Counter()
        """Tokens sampled so far of sequences with recorded versions, by version."""
        self.waiting: deque[RunningSequence] = deque()
        self.running: list[RunningSequence] = []
        self._model = model
        self._stop_ids = frozenset(stop_ids)
        self._stop_strings = stop_strings
        self._max_running = max_running
        self._max_prefill_tokens = max_prefill_tokens
        self._max_cache_tokens = max_cache_tokens
        config = model.config.get_text_config()
        kinds = layer_kinds(config)
        self._kinds = set(kinds)
        self._cache = SlotCache(kinds, max_cache_tokens, getattr(config, "number_of_conv_states", 1))
        self._max_width = getattr(config, "max_position_embeddings", None) or sys.maxsize
        self._rows: _RunningRows | None = None
        size = sum(parameter.numel() for parameter in model.parameters())
        self._prefill_block = PREFILL_BLOCK if size < LARGE else LARGE_PREFILL_BLOCK

    @property
    def has_work(self) -> bool:
        return any(not sequence.waits(self.weight_version) for sequence in itertools.chain(self.running, self.waiting))

    def add(self, sequence: RunningSequence) -> None:
        self.waiting.append(sequence)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Admits what fits, samples one token for every running sequence, and returns those that are done.

        Something must run or wait that needs no later weights (``has_work``).
        """
        self._admit()
        if self._rows is None:
            self._rows = _RunningRows(self.running, self._model.device)
        kept: dict[int, IntArray] = {}
        tokens, logprobs = self._rows.draw(self._decode(self._rows), kept)
        self.counters.steps += 1
        advance()
        finished, num_sampled = {}, 0
        for row, (sequence, token, logprob) in enumerate(zip(self.running, tokens, logprobs, strict=True)):
            if sequence.request.recorded:
                if sequence.waits(self.weight_version):
                    self._rows = None  # it knows a token that was thrown away
                    continue
                self.num_recorded[self.weight_version] += 1
            num_sampled += 1
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.versions.append(self.weight_version)
            if sequence.request.params.tells_kept:
                sequence.kept.append(kept.get(row, _EVERYTHING))
            reason = self._end(sequence, token)
            if reason is not None:
                finished[row] = (sequence, reason)
        self.counters.generated_tokens += num_sampled
        self._remove(list(finished))
        self.counters.finished += len(finished)
        return list(finished.values())

    def remove(self, sequence: RunningSequence) -> None:
        """Takes a sequence out wherever it is (abort)."""
        if sequence in self.running:
            self._remove([self.running.index(sequence)])
        else:
            self.waiting.remove(sequence)

    def preempt(self) -> None:
        """Puts the running sequences back at the head of the queue and frees the cache.

        They keep what they sampled; when they are admitted again, keys and values are computed from their tokens.
        """
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        self._rows = None
        self._cache.free()

    def _end(self, sequence: RunningSequence, token: int) -> FinishReason | None:
        stop = sequence.request.params.stop
        if token in self._stop_ids and not sequence.request.params.ignore_eos:
            return FinishReason.STOP
        if stop and self._stop_strings.may_end(stop, token) and self._stop_strings.found(stop, sequence.tokens):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.tokens) >= sequence.limit else None

    def _admit(self) -> None:
        """Moves sequences from the queue to the slots, in order of arrival, and prefills them."""
        if not self.waiting:
            return
        groups: dict[bytes, list[RunningSequence]] = {}  # equal histories share one prefill
        num_admitted, num_tokens = 0, 0
        num_waiting = sum(sequence.waits(self.weight_version) for sequence in self.running)
        longest = max((s.final_length for s in self.running), default=0)
        held: list[RunningSequence] = []
        while self.waiting and len(self.running) - num_waiting + num_admitted < self._max_running:
            sequence = self.waiting[0]
            if sequence.waits(self.weight_version):
                held.append(self.waiting.popleft())
                continue
            key = identity(sequence.history)
            cost = 0 if key in groups else sequence.length - 1
            longest = max(longest, sequence.final_length)
            occupied = len(self.running) + num_admitted
            if occupied and (
                (groups and num_tokens + cost > self._max_prefill_tokens)
                or (self._max_cache_tokens is not None and (occupied + 1) * longest > self._max_cache_tokens)
            ):
                break
            groups.setdefault(key, []).append(self.waiting.popleft())
            num_admitted, num_tokens = num_admitted + 1, num_tokens + cost
        self.waiting.extendleft(reversed(held))
        if groups:
            self._rows = None
            lengths = [s.length for s in self.running] + [group[0].length for group in groups.values()]
            self._cache.reserve(len(self.running) + num_admitted, max(lengths))
            each = [[group] for group in groups.values()]
            for batch in each if self._cache.has_states else _equal_widths(groups.values(), self._prefill_block):
                self._prefill(batch)

    def _prefill(self, groups: Sequence[Sequence[RunningSequence]]) -> None:
        """One forward over one history per group, last tokens left out; fills the slots of all members."""
        first_slot = len(self.running)
        lengths = [group[0].length - 1 for group in groups]
        for group in groups:
            self.running.extend(group)
        sizes = [len(group) for group in groups]
        self.counters.prefill_tokens += sum(lengths)
        self.counters.shared_tokens += sum(n * (size - 1) for n, size in zip(lengths, sizes, strict=True))
        width = max(lengths)
        if self._cache.has_states:
            width = max(width, 1)  # a forward makes the slots' states, which are zeros where there is no token yet
        elif width == 0:
            return
        else:
            width = max(width, min(_prefill_width(width, self._prefill_block), self._max_width))
        tokens_GL = np.zeros((len(groups), width), dtype=np.int64)
        for row, group in enumerate(groups):
            tokens_GL[row, : lengths[row]] = vocabulary_ids(group[0].history[:-1])
        source_B = None
        if len(groups) < sum(sizes):
            source_B = torch.from_numpy(np.repeat(np.arange(len(groups)), sizes)).to(self._model.device)
        # Only keys and values are wanted: the trunk without the output layer, and no mask (see the module's docstring).
        input_ids = torch.from_numpy(tokens_GL).to(self._model.device)
        seen = {} if self._tower is None else self._see(self._tower, groups, width)
        with self._cache.prefill(first_slot, source_B):
            self._model.base_model(input_ids=input_ids, past_key_values=self._cache, use_cache=True, **seen)
        if max(lengths) == 0:
            self._cache.forget(first_slot, sum(sizes))
        if self._routing is not None:
            experts = self._routing.chosen_NE.cpu().numpy().reshape(len(groups), width, -1)
            for row, group in enumerate(groups):
                for sequence in group:
                    sequence.add_experts(experts[row, : lengths[row]].copy())

    def _see(self, tower: Tower, groups: Sequence[Sequence[RunningSequence]], width: int) -> dict[str, Any]:
        """Arguments of a prefill with pictures; none without any."""
        rows = [(group[0].history[:-1], group[0].request.items) for group in groups]
        cells = [torch.arange(len(history)) + row * width for row, (history, _) in enumerate(rows)]
        pictures = tower.of_rows(rows, torch.cat(cells), (len(groups), width))
        for group, row in zip(groups, cells, strict=True):
            for sequence in group:
                sequence.ahead = tower.ahead(pictures, int(row[-1])) if len(row) else 0
        return tower.see(pictures) if pictures.order else {}

    def _decode(self, rows: _RunningRows) -> Tensor:
        """Feeds every running sequence its last token; returns the logits [B, V] of the next one."""
        num_rows = computed = len(self.running)
        if self._model.device.type == "cpu":
            computed = _round_up(num_rows, MIN_ROWS) if self._cache.has_states else max(num_rows, MIN_ROWS)
        inputs_2B = np.zeros((2, computed), dtype=np.int64)
        inputs_2B[:, :num_rows] = rows.last_B, rows.positions_B
        width = _round_up(int(rows.positions_B.max()) + 1, WIDTH_BLOCK)
        self._cache.reserve(inputs_2B.shape[1], width)
        tokens_B, positions_B = torch.from_numpy(inputs_2B).to(self._model.device)
        held = [row for row, sequence in enumerate(self.running) if sequence.waits(self.weight_version)]
        with self._cache.decode(positions_B, width, held):
            output = self._model(
                input_ids=tokens_B[:, None],
                position_ids=self._positions(positions_B),
                attention_mask=self._mask(positions_B, width),
                past_key_values=self._cache,
                use_cache=True,
            )
        if self._routing is not None:
            experts = self._routing.chosen_NE.cpu().numpy()
            for sequence, experts_E in zip(self.running, experts, strict=False):
                sequence.set_last_experts(experts_E)
        logits: Tensor = output.logits
        return logits[: len(self.running), -1]

    def _positions(self, places_B: Tensor) -> Tensor:
        """Positions of the new tokens: [B, 1], or [4, B, 1] where those of pictures have height and width."""
        if self._tower is None or not self._tower.has_positions:
            return places_B[:, None]
        ahead = [sequence.ahead for sequence in self.running]
        ahead_B = places_B.new_zeros(len(places_B)).index_put((torch.arange(len(ahead)),), places_B.new_tensor(ahead))
        return torch.stack([places_B, *[places_B + ahead_B] * 3])[:, :, None]

    def _mask(self, positions_B: Tensor, width: int) -> Tensor | dict[str, Tensor]:
        """[B, 1, 1, width] of what the new tokens see; one for each kind of layers where they differ."""
        keys, last = torch.arange(width, device=positions_B.device), positions_B[:, None]

        def additive(visible: Tensor) -> Tensor:
            # sdpa on the CPU would convert a boolean mask again in every layer.
            return torch.where(visible, 0.0, -torch.inf).to(self._model.dtype)[:, None, None]

        full = additive(keys <= last)
        if WINDOWED not in self._kinds:
            return full
        near = additive((keys <= last) & (keys > last - self._model.config.get_text_config().sliding_window))
        return near if self._kinds == {WINDOWED} else {kind: near if kind == WINDOWED else full for kind in self._kinds}

    def _remove(self, rows: list[int]) -> None:
        """Drops rows and moves the last ones into the gaps, so that the running slots stay contiguous."""
        if not rows:
            return
        self._rows = None
        leaving, remaining = set(rows), len(self.running) - len(rows)
        gaps = [row for row in rows if row < remaining]
        movers = [row for row in range(remaining, len(self.running)) if row not in leaving]
        if gaps:
            self._move(movers, gaps)
        del self.running[remaining:]

    @torch.inference_mode()
    def _move(self, movers: list[int], gaps: list[int]) -> None:
        self._cache.move(movers, gaps, max(self.running[row].length for row in movers))
        for mover, gap in zip(movers, gaps, strict=True):
            self.running[gap] = self.running[mover]


class _RunningRows:
    """State of the running rows that a step needs, as arrays; made anew when one joins or leaves."""

    def __init__(self, sequences: Sequence[RunningSequence], device: torch.device) -> None:
        self._sequences = sequences
        self._device = device
        self._seeds_B = np.array([s.seed for s in sequences], dtype=np.uint64)
        self._num_sampled_B = np.array([len(s.tokens) for s in sequences], dtype=np.uint64)
        self.positions_B = np.array([s.length - 1 for s in sequences], dtype=np.int64)
        """Of the last tokens."""
        last = [s.tokens[-1] if s.tokens else s.request.prompt_ids[-1] for s in sequences]
        self.last_B = vocabulary_ids(np.array(last, dtype=np.int64))
        self._sampler = SamplerRows.of([vars(s.request.params) for s in sequences], device)
        self._seen_BV: Tensor | None = None
        self._count_BV: Tensor | None = None

    def draw(self, logits_BV: Tensor, kept: dict[int, IntArray]) -> tuple[list[int], list[float]]:
        """One more token and its log-probability per row.

        Args:
            kept: as ``sample`` takes it.

        Raises:
            FloatingPointError: the model's logits are not finite.
        """
        if self._sampler.penalty_B is not None and self._seen_BV is None:
            self._seen_BV = self._seen(logits_BV.shape[-1])
        if self._sampler.presence_B is not None and self._count_BV is None:
            self._count_BV = self._counted(logits_BV.shape[-1])
        uniform_B = torch.from_numpy(uniforms(self._seeds_B, self._num_sampled_B)).to(self._device)
        index_B = None
        if self._sampler.counts_tokens:
            index_B = torch.from_numpy(self._num_sampled_B.astype(np.int64)).to(self._device)
        tokens_B, logprobs_B = sample(logits_BV, self._sampler, uniform_B, self._seen_BV, index_B, self._count_BV, kept)
        if self._seen_BV is not None:
            self._seen_BV[torch.arange(len(tokens_B), device=self._device), tokens_B] = True
        if self._count_BV is not None:
            self._count_BV[torch.arange(len(tokens_B), device=self._device), tokens_B] += 1
        logprobs = logprobs_B.cpu().numpy()
        if (num_nan := int(np.isnan(logprobs).sum())) > 0:
            raise FloatingPointError(f"{num_nan} of {len(logprobs)} rows have NaN logits")
        self.last_B = tokens_B.cpu().numpy()
        self.positions_B += 1
        self._num_sampled_B += np.uint64(1)
        return self.last_B.tolist(), logprobs.tolist()

    def _seen(self, vocab_size: int) -> Tensor:
        """Tokens of the prompts and of what was sampled."""
        seen_BV = torch.zeros(len(self._sequences), vocab_size, dtype=torch.bool, device=self._device)
        for row, sequence in enumerate(self._sequences):
            seen_BV[row, torch.from_numpy(vocabulary_ids(sequence.history)).to(self._device)] = True
        return seen_BV

    def _counted(self, vocab_size: int) -> Tensor:
        """Counts how often each token was sampled."""
        sampled = [torch.tensor(sequence.tokens, dtype=torch.int64) for sequence in self._sequences]
        return torch.stack([tokens.bincount(minlength=vocab_size) for tokens in sampled]).int().to(self._device)


def _round_up(count: int, block: int) -> int:
    return -(-count // block) * block


def _prefill_width(length: int, least: int) -> int:
    """Tokens that a prompt of so many is filled up to: at most a quarter more, or fewer than ``least`` more."""
    block = max(least, 1 << max(length.bit_length() - 3, 0))
    return -(-length // block) * block


def _equal_widths(groups: Iterable[list[RunningSequence]], least: int) -> Iterator[list[list[RunningSequence]]]:
    """Splits prompts, of which the last token is no part, into prefills of one width each; the longest come first."""

    def width(group: list[RunningSequence]) -> int:
        return _prefill_width(group[0].length - 1, least)

    for _, batch in groupby(sorted(groups, key=lambda group: -group[0].length), key=width):
        yield list(batch)
