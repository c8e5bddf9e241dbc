"""Log-probs and values as a run computes them, compared with the unmodified model's on one sequence at a time.

A micro-batch of each layout is compared before the first result of that layout is used. Nothing here needs a table of
families: whatever a packed row, a shared prompt, a parallel layout or our way to logits does to a model, shows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roll.algorithms.types import TokenScores
from roll.data.batch import Batch
from roll.data.identity import vocabulary_ids
from roll.data.packing import rectangle
from roll.models.heads import decoder_layers, text_modules
from roll.models.routing import expert_sizes
from roll.models.scoring import BOUNDS, TokenScorer, layout, score_input

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHECKED_ROWS = 2
"""Sequences of a micro-batch that are compared."""
CHECKED_TOKENS = 32
"""Their first loss tokens, so many of each."""
GENERATOR_BOUND = BOUNDS[torch.bfloat16]
"""For the median difference from a generator, whose number format and kernels are its own affair."""
LEAST_GENERATED = 16
"""Tokens, or it is not compared."""
PACKING, SHARING = "use_sequence_packing: false", "share_prompts: false"


@dataclass(frozen=True, eq=False)
class Row:
    """A sequence up to its last token to compare."""

    tokens: Tensor
    """Index into the micro-batch's T axis."""
    batch: Batch
    """The sequence alone, with a loss mask that is True on what is compared."""


@dataclass(eq=False)
class OwnForward:
    """Compares what a role computes; the same for all engines, which bring the ways of computing it."""

    name: str
    """The model's class, for messages."""
    usual: Callable[[Batch], TokenScores]
    """Scores of a micro-batch as the run computes it."""
    usual_places: Callable[[Batch], Tensor]
    """[T]: where the output of a layer, its first two axes flattened, has each token; -1: on another rank."""
    own: Callable[[Batch], tuple[TokenScores, float]]
    """Scores of one sequence by the model itself, and the bound for a difference of log-probabilities."""
    own_places: Callable[[Batch], Tensor]
    layers: Callable[[], tuple[Sequence[str], Mapping[str, nn.Module], Mapping[str, nn.Module]]]
    """Names of all layers, and those that this rank computes with in the usual way and the model's own."""
    parallel: Sequence[str] = ()
    """Keys of the parallel sizes that shape a micro-batch, as they are without them."""
    gather: Callable[[list[float]], Tensor] = lambda numbers: torch.tensor([numbers], dtype=torch.float64)
    """Every rank's numbers, a row each (collective)."""
    value_heads: Callable[[], Iterable[nn.Module]] = tuple
    """Those that stand in the place of an output layer."""
    has_experts: bool = False
    """Single tokens may differ: rounding alone may tip a router's near tie."""
    temperature: float = 1.0
    generated: Callable[[Batch], Tensor | None] = lambda micro_batch: None
    """[T]: the generator's log-probabilities of a micro-batch, where they are of the same weights."""
    compared: set[str] = field(default_factory=set)
    """Layouts that need not be compared any more."""

    @torch.no_grad()
    def compare(self, micro_batch: Batch, layout: str) -> None:
        """Compares a micro-batch of a layout; every rank brings one, some of them one without loss (collective).

        Raises:
            ValueError: on every rank, where one finds a difference beyond the bound.
        """
        rows = _rows(micro_batch)
        with _values_of_states(self.value_heads()):
            own = [self.own(row.batch) for row in rows]
            usual_T = _column(self.usual(micro_batch))
        generated_T = self.generated(micro_batch)
        found, other = [0.0] * 3, [0.0] * 3
        what = "projected hidden states" if any(True for _ in self.value_heads()) else "log-probabilities"
        for row, (scores, bound) in zip(rows, own, strict=True):
            at = row.batch.loss_mask_T
            if bool(at.any()):
                ours_K, theirs_K = usual_T[row.tokens][at], _column(scores)[at]
                every = not self.has_experts and math.isclose(bound, BOUNDS[torch.float32], rel_tol=1e-3)
                widened = bound * max(1.0, 1.0 / self.temperature)
                found = max(found, _against(differences(ours_K, theirs_K), widened, every=every))
        if generated_T is not None and int(micro_batch.loss_mask_T.sum()) >= LEAST_GENERATED:
            differences_T = differences(usual_T, generated_T)[micro_batch.loss_mask_T]
            other = _against(differences_T, GENERATOR_BOUND, every=False)
        all_found = self.gather(found + other)
        for worst, theirs in ((all_found[:, :3], "own forward pass"), (all_found[:, 3:], "generator")):
            times, difference, bound = worst[int(worst[:, 0].argmax())].tolist()
            if times > 1:
                if theirs == "generator":
                    of, advice = "the generator of the same weights", "set another strategy for one of the two"
                else:
                    of, advice = "the model's own forward pass on one sequence at a time", self._advice(layout)
                    advice = f"they part {self._where(micro_batch, rows)}; {advice}"
                raise ValueError(
                    f"{self.name}: {what} of the first micro-batch ({layout}) are {difference:.2g} away from those of "
                    f"{of}, expected at most {bound:.2g}; {advice}"
                )
        self.compared.add(layout)

    def _advice(self, layout: str) -> str:
        kinds = (PACKING, layout.startswith("packed")), (SHARING, layout.startswith("shared"))
        replay = ["router_replay.mode: disable"] if layout.endswith("replayed") else []
        shaping = [*(key for key, is_on in kinds if is_on), *self.parallel, *replay]
        return f"set {' or '.join(shaping)}" if shaping else f"this strategy cannot compute {self.name}, another may"

    def _where(self, micro_batch: Batch, rows: Sequence[Row]) -> str:
        """The first layer whose output differs, in words (collective)."""
        places_T, bounds = self.usual_places(micro_batch), []
        names, usual_layers, own_layers = self.layers()
        with outputs(usual_layers, torch.cat([places_T[row.tokens] for row in rows])) as usual:
            self.usual(micro_batch)
        parts: dict[str, list[Tensor]] = {}
        for row in rows:
            with outputs(own_layers, self.own_places(row.batch)) as own:
                bounds.append(self.own(row.batch)[1])
            for layer, states_NH in own.items():
                parts.setdefault(layer, []).append(states_NH)
        found = []
        for layer in names:
            distance = -1.0
            if layer in usual and layer in parts:
                theirs_NH = torch.cat(parts[layer])
                distance_N = (usual[layer] - theirs_NH).norm(dim=1) / theirs_NH.norm(dim=1).clamp(min=1e-12)
                distance = max(distance_N[~distance_N.isnan()].tolist(), default=-1.0)
            found.append(distance)
        worst = self.gather(found).amax(0).tolist()
        for layer, distance in zip(names, worst, strict=True):
            if distance > max(bounds):
                module = own_layers.get(layer)
                kind = "" if module is None else f" ({type(module).__name__.removeprefix('FSDP')})"
                return f"in {layer}{kind}, whose output is off by {distance:.2g} of its size"
        return "behind the layers, on the way to logits" if names else "in a layer that has no name here"


def of_module(scorer: TokenScorer, unmodified: Callable[[], TokenScorer] | None = None, **ways: Any) -> OwnForward:
    """For a Hugging Face model.

    Args:
        unmodified: the one that is not ``scorer`` and runs the model's own forward.
        ways: the engine's, as ``OwnForward`` takes them.
    """

    def both() -> list[TokenScorer]:
        return [scorer, scorer if unmodified is None else unmodified()]

    def layers() -> tuple[Sequence[str], Mapping[str, nn.Module], Mapping[str, nn.Module]]:
        usual, own = (named_layers(each.model) for each in both())
        return list(usual), usual, own

    return OwnForward(
        name=type(scorer.model).__name__,
        layers=layers,
        own_places=lambda row: torch.arange(row.num_tokens),
        value_heads=lambda: {head for each in both() if (head := each.value_head) is not None},
        has_experts=any(expert_sizes(scorer.model.config.get_text_config())),
        temperature=scorer.temperature,
        **ways,
    )


def in_one_process(scorer: TokenScorer, *, round_to: int = 1, packing: bool = False) -> OwnForward:
    """For a Hugging Face model that ``score_batch`` runs."""

    def usual(micro_batch: Batch) -> TokenScores:
        inputs = layout(micro_batch, round_to=round_to, packing=packing)
        return score_input(scorer, inputs, micro_batch.num_tokens)

    return of_module(
        scorer,
        usual=usual,
        own=partial(own_scores, scorer, scorer),
        usual_places=lambda micro_batch: layout(micro_batch, round_to=round_to, packing=packing).cell_T,
    )


def own_scores(module: nn.Module, scorer: TokenScorer, row: Batch) -> tuple[TokenScores, float]:
    """``OwnForward.own`` of a Hugging Face model.

    Args:
        module: ``scorer``, or an engine around it.
    """
    inputs = rectangle(row).to(scorer.device)
    pictures = {} if scorer.tower is None else scorer.tower.of_unmodified(row)
    outputs = module(
        *(inputs.input_ids_RC, None, inputs.source_K, inputs.target_K),
        experts_NE=inputs.experts_NE,
        own_arguments={name: values.to(scorer.device) for name, values in pictures.items()},
    )
    bound = float(outputs.pop("bound"))
    ((name, values_K),) = outputs.items()
    flat = values_K.new_zeros(row.num_tokens).index_put((inputs.token_K,), values_K)
    return TokenScores.of(**{name: flat}), bound


def named_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The decoder layers, in order; none of a model that names none."""
    try:
        layers = decoder_layers(model)
    except ValueError:
        return {}
    own = text_modules(model).intersection(layers)
    return {name: module for name, module in model.named_modules() if module in own}


def _rows(batch: Batch) -> list[Row]:
    """``CHECKED_ROWS`` sequences, the shortest, one with pictures among them; not the first of a row, as nothing comes
    before it.

    So that ranks which share a model's weights keep step, there are always so many: some without a loss token.
    """
    found = []
    for row in range(batch.num_sequences):
        tokens = batch.token_index([row])
        if batch.items_I is not None:
            tokens = tokens[: _up_to_a_sampled_mark(batch.tokens_T[tokens])]
        loss_K = batch.loss_mask_T[tokens].nonzero()[:CHECKED_TOKENS, 0]
        if len(loss_K):
            found.append(_row(batch, tokens[: int(loss_K[-1]) + 1]))
    found = sorted(found[1:], key=lambda one: len(one.tokens)) or found
    with_pictures = [one for one in found if bool((one.batch.tokens_T < 0).any())][:1]
    found = [*with_pictures, *(one for one in found if one not in with_pictures)]
    blank = _row(batch, batch.token_index([0])[:2])
    nothing = {"tokens_T": vocabulary_ids(blank.batch.tokens_T), "items_I": None}
    nothing["loss_mask_T"] = torch.zeros(len(blank.tokens), dtype=torch.bool)
    blank = replace(blank, batch=blank.batch.replace(**nothing))
    return [*found, *[blank] * CHECKED_ROWS][:CHECKED_ROWS]


def _row(batch: Batch, tokens: Tensor) -> Row:
    experts_TE = None if batch.experts_TE is None else batch.experts_TE[tokens]
    items_I = None if batch.items_I is None else (batch.items_I[int(batch.rows_T[tokens[0]])],)
    ids_T, mask_T = batch.tokens_T[tokens], batch.loss_mask_T[tokens]
    return Row(tokens, Batch(torch.tensor([len(tokens)]), ids_T, mask_T, experts_TE=experts_TE, items_I=items_I))


def _up_to_a_sampled_mark(ids_T: Tensor) -> int:
    """Tokens before the first that the unmodified model would take for a picture's, and the policy has sampled."""
    marks = vocabulary_ids(ids_T[ids_T < 0]).unique()
    found = torch.isin(ids_T, marks).nonzero()
    return int(found[0]) if len(found) else len(ids_T)


def _column(scores: TokenScores) -> Tensor:
    """Log-probabilities, or a critic's values, on the CPU."""
    column = scores.logprobs_T if scores.values_T is None else scores.values_T
    assert column is not None
    return column.float().cpu()


def _against(differences_K: Tensor, bound: float, *, every: bool) -> list[float]:
    """How many times the bound a sequence's difference is, the difference, the bound."""
    difference = float(differences_K.amax() if every else differences_K.median())
    return [difference / bound, difference, bound]


def differences(ours: Tensor, theirs: Tensor) -> Tensor:
    """Infinite where only one of two is a number."""
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    scale = (theirs.abs() / 10).clamp(min=1)
    return ((ours - theirs).abs() / scale).nan_to_num(math.inf).masked_fill(same, 0)


@contextlib.contextmanager
def _values_of_states(heads: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, a head's values are projections of the hidden states: an untrained one has only zeros to compare."""

    def project(_: nn.Module, args: tuple[Tensor], values_K: Tensor) -> Tensor:
        hidden_KH = args[0].float()
        direction_H = torch.randn(hidden_KH.shape[-1], generator=torch.Generator().manual_seed(0)).to(hidden_KH.device)
        return hidden_KH @ direction_H / hidden_KH.norm(dim=-1).clamp(min=1e-12)

    hooks = [head.register_forward_hook(project) for head in heads]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def outputs(layers: Mapping[str, nn.Module], places_N: Tensor) -> Iterator[dict[str, Tensor]]:
    """Collects what layers give of some tokens inside: float32 [N, H] by layer, NaN of tokens that are elsewhere."""
    found: dict[str, Tensor] = {}
    here_N = places_N >= 0

    def collect(name: str, output: Any) -> None:
        states = output if isinstance(output, Tensor) else output[0]
        states_NH = states.flatten(0, 1)[places_N.clamp(min=0).to(states.device)].float().cpu()
        found[name] = states_NH.masked_fill(~here_N[:, None], math.nan)

    hooks = [
        layer.register_forward_hook(lambda _, __, output, name=name: collect(name, output))  # type: ignore[misc]
        for name, layer in layers.items()
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
