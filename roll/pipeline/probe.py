"""The probe: after weights were loaded or updated, trainer and generators are compared on a few sampled tokens.

A generator that has got new weights is asked a fixed question at once, beside whatever it does; its answer waits until
the trainer is about to compute log-probs anyway, with the same weights as long as it has not trained. So nothing waits
and nothing moves between devices.

Only where log-probs differ does the search for the cause begin, with experiments on both. The generator reports
log-probs of what it sampled; it also computes those of given tokens in one forward pass, as the trainer does. Where its
pass agrees with the trainer, the fault lies in sampling or in its cache; otherwise in settings, tensors or layers,
which are compared.

Axes: M sampled tokens of the probe.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import ray
import torch
from torch import Tensor

from roll.configs.rl import RLConfig
from roll.data.batch import Batch
from roll.data.requests import Completion, GenerateRequest, SamplingParams, sampling_params
from roll.data.templates import ChatTemplate
from roll.distributed.cluster.errors import WorkerDiedError
from roll.distributed.strategy.base import Metrics, States
from roll.distributed.strategy.evidence import (
    EXPERTS,
    FEATURES,
    FORMAT,
    PROMPT,
    TEMPERATURE,
    Sketch,
    pictured_prompt,
    probe_picture,
    probe_prompt,
    rows_of,
)
from roll.models.own_forward import differences
from roll.models.tokenizer import policy_pictures, policy_tokenizer
from roll.pipeline.roles import Replicas, Roles
from roll.pipeline.session import RunFailedError
from roll.utils.hashing import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


SAMPLED = 6
"""Tokens that a generator samples."""
PROMPTED = 17
"""Most tokens of the prompt, its last ones: a block of a prefix cache (16 on GPUs), and one more."""
_PATIENCE_S = 5.0
"""For an answer, when the trainer is ready."""


class ProbeError(RunFailedError):
    """A generator does not compute what the trainer computes."""


@dataclass
class Asked:
    """A question under way to all generating workers of a role."""

    replicas: Replicas
    version: int
    answers: list[ray.ObjectRef]


class Probe:
    """Asks after updates of weights, and compares before the next training.

    Args:
        model_path: has the policy's tokenizer.
    """

    def __init__(self, config: RLConfig, roles: Roles, model_path: str) -> None:
        self._config = config
        self._roles = roles
        self._model_path = model_path
        self._pending: dict[str, Asked] = {}
        self._request: GenerateRequest | None = None
        self._settings: dict[str, tuple[int, Settings, list[Settings]]] = {}
        """By role of the workers, after how many loads; of the trainer and of each worker."""
        self._probed: dict[str, tuple[int, list[int]]] = {}
        """By role: after how many loads, and the first and the last version of weights that were probed since."""
        self._unreported: Metrics = {}
        self._explained = False
        roles.on_synced.append(self.ask)

    def ask(self, replicas: Replicas) -> None:
        """Asks, if it is time to: after each load, after the first update with other weights, then every n-th."""
        name, version = replicas.cluster.name, replicas.version
        loads, versions = self._probed.get(name, (-1, []))
        is_new = loads != replicas.num_loads
        if not is_new and len(versions) > 1 and version - versions[-1] < self._config.probe_every:
            return
        if not is_new and version == versions[-1]:
            return
        self._probed[name] = replicas.num_loads, [version] if is_new else [versions[0], version]
        self._request = self._request or self._make_request()
        self._pending[name] = Asked(replicas, version, replicas.cluster.submit("complete", [self._request]))
        if is_new and not replicas.shares_devices:  # an evaluation may come before anything is trained
            self._unreported = self.check(version, patience_s=self._config.rpc_timeout)

    def check(self, version: int, patience_s: float = _PATIENCE_S) -> Metrics:
        """Compares what was asked with the trainer's weights of this version; the rest is forgotten.

        Returns:
            ``probe/logprob_diff_max`` and ``probe/logprob_diff_median``, the largest of all workers; nothing, if there
            was nothing to compare.

        Raises:
            ProbeError: a generator differs, with ``probe: stop``.
        """
        pending, self._pending = self._pending, {}
        metrics, self._unreported = self._unreported, {}
        for asked in pending.values():
            if asked.version != version:
                continue
            try:
                if found := self._gather(asked, patience_s):
                    metrics |= self._compare(asked, found, metrics)
            except WorkerDiedError as error:
                if error.role != asked.replicas.cluster.name:
                    raise
                logger.info("a probe is left out: %s", error)  # who needs the worker next replaces it
        return metrics

    def _make_request(self) -> GenerateRequest:
        config = self._config
        trusts = config.trusts("actor_train")
        tokenizer = policy_tokenizer(self._model_path, config.tokenizer_path, trust_remote_code=trusts)
        self._prompt = probe_prompt(tokenizer, ChatTemplate.of(config.actor_train.data_args))
        if (pictured := self._pictured(tokenizer)) is not None:
            return pictured
        longest = max(1, min(PROMPTED, config.sequence_length - SAMPLED))
        prompt = np.array(self._prompt[-longest:], dtype=np.int64)
        return GenerateRequest("probe", prompt, probe_params(config))

    def _pictured(self, tokenizer: PreTrainedTokenizerBase) -> GenerateRequest | None:
        """The question about a picture, where the run has pictures and there is room for one."""
        config = self._config
        if not self._roles.pictures:
            return None
        pictures = policy_pictures(self._model_path, config.actor_train.data_args.picture_bounds, tokenizer)
        assert pictures is not None, "its prompts have pictures"
        try:
            prompt = pictured_prompt(tokenizer, ChatTemplate.of(config.actor_train.data_args), pictures)
        except ValueError as error:
            logger.warning("the probe asks about no picture: %s", error)
            return None
        if len(prompt) + SAMPLED > config.sequence_length:
            logger.warning("the probe asks about no picture: %d tokens leave no room for it", len(prompt))
            return None
        return GenerateRequest("probe", prompt, probe_params(config), items=(probe_picture(pictures),))

    def _gather(self, asked: Asked, patience_s: float) -> dict[int, Completion]:
        """Answers by rank; a worker that died or is busy with others has none."""
        ready, late = ray.wait(asked.answers, num_returns=len(asked.answers), timeout=patience_s)
        if late:
            logger.info("the probe of %s is left out: %d workers are busy", asked.replicas.cluster.name, len(late))
        found: dict[int, Completion] = {}
        for rank, answer in enumerate(asked.answers):
            if answer in ready:
                ((completion,),) = asked.replicas.cluster.gather([answer], call="complete", ranks=[rank])
                if len(completion.token_ids):
                    found[rank] = completion
        return found

    def _compare(self, asked: Asked, found: Mapping[int, Completion], metrics: Metrics) -> Metrics:
        assert self._request is not None
        cluster, request = asked.replicas.cluster, self._request
        rows = rows_of([request] * len(found), [*found.values()])
        trainer, workers = self._settings_of(asked.replicas, rows.select([0]))
        if self._config.actor_train.router_replay.mode == "R3":
            chosen = [torch.from_numpy(done.experts) for done in found.values() if done.experts is not None]
            rows = rows.replace(experts_TE=torch.cat(chosen)) if len(chosen) == len(found) else rows
        scores = self._roles.actor.probe_logprobs(rows)
        assert scores.logprobs_T is not None
        parts = scores.logprobs_T[rows.loss_mask_T].split([len(done.token_ids) for done in found.values()])
        largest, median = (metrics.get(f"probe/logprob_diff_{each}", 0.0) for each in ("max", "median"))
        for (rank, completion), trained_M in zip(found.items(), parts, strict=True):
            reported_M = torch.tensor(completion.logprobs)
            away_M = differences(reported_M, trained_M)
            largest, median = max(largest, float(away_M.amax())), max(median, float(away_M.median()))
            bound = Bound.of(trainer, workers[rank])
            if not bound.difference(reported_M, trained_M) <= bound.value:
                words = (
                    f"probe: log-probs of {len(trained_M)} tokens that {cluster.name} rank {rank} sampled with weights "
                    f"of version {asked.version} are up to {float(away_M.amax()):.3g} (median "
                    f"{float(away_M.median()):.3g}) away from the trainer's, expected {bound.words}"
                )
                self._report(words, lambda: self._causes(asked.replicas, rank, completion, bound))  # noqa: B023
        return {"probe/logprob_diff_max": largest, "probe/logprob_diff_median": median}

    def _settings_of(self, replicas: Replicas, rows: Batch) -> tuple[Settings, list[Settings]]:
        """Asks for them once after each load, and compares the prompt, which log-probs say nothing of, and pictures."""
        name = replicas.cluster.name
        known = self._settings.get(name)
        if known is None or known[0] != replicas.num_loads:
            trainer: Settings = self._roles.actor.cluster.call_rank(0, "shows", "settings") or {}
            workers: list[Settings] = [told or {} for told in replicas.cluster.call("shows", "settings")]
            known = self._settings[name] = replicas.num_loads, trainer, workers
            for rank, settings in enumerate(workers):
                if problem := other_prompt(self._prompt, settings):
                    self._report(f"probe: {name} rank {rank} makes other prompts than the rollouts", lambda: [problem])
                seen = of_pictures(_Workers(self._roles, replicas, rank, resend=False), rows, trainer, settings)
                if seen:
                    self._report(f"probe: {name} rank {rank} sees other pictures than the trainer", lambda: seen)  # noqa: B023
        return known[1:]

    def _causes(self, replicas: Replicas, rank: int, completion: Completion, bound: Bound) -> list[str]:
        assert self._request is not None
        return find_causes(_Workers(self._roles, replicas, rank), self._request, completion, bound)

    def _report(self, words: str, causes: Callable[[], list[str]]) -> None:
        if self._config.probe == "warn" and self._explained:
            logger.warning("%s", words)
            return
        self._explained = True
        message = "\n  - ".join([words + "; probe: warn continues. Causes:", *causes()])
        if self._config.probe == "stop":
            raise ProbeError(message)
        logger.warning("%s", message)


def probe_params(config: RLConfig) -> SamplingParams:
    """The run's own sampling, for a fixed number of tokens."""
    arguments = config.actor_infer.generating_args.model_copy(update={"max_new_tokens": SAMPLED})
    return replace(sampling_params(arguments), ignore_eos=True, stop=(), seed=derive_seed(config.seed, "probe"))


class _Workers:
    """``Sides`` of a run: the trainer's workers and one that generates."""

    def __init__(self, roles: Roles, replicas: Replicas, rank: int, *, resend: bool = True) -> None:
        self._actor = roles.actor
        self._replicas = replicas
        self._rank = rank
        self.resent = resend and replicas.shares_devices
        if self.resent:  # what it had may have been dropped
            replicas.resend()

    def complete(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        done: list[Completion] = self._generator("complete", requests)
        return done

    def trained(self, batch: Batch) -> Tensor:
        scores = self._actor.probe_logprobs(batch)
        assert scores.logprobs_T is not None
        return scores.logprobs_T

    def forward(self, batch: Batch) -> Tensor | None:
        logprobs_T: Tensor | None = self._generator("shows", "forward_logprobs", batch)
        return logprobs_T

    def settings(self) -> tuple[Settings, Settings]:
        return self._trainer("settings")[0] or {}, self._generator("shows", "settings") or {}

    def sketches(self) -> tuple[Mapping[str, Sketch], Mapping[str, Sketch]]:
        return self._trainer("sketches")[0] or {}, self._generator("shows", "sketches") or {}

    def own_sketches(self) -> Mapping[str, Sketch]:
        return self._generator("shows", "own_sketches") or {}

    def layers(self, row: Batch) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        merged: dict[str, Tensor] = {}
        for of_rank in self._trainer("layer_outputs", row):
            for name, output_TH in (of_rank or {}).items():
                known = merged.get(name, output_TH)
                merged[name] = torch.where(known.isnan(), output_TH, known)
        return merged, self._generator("shows", "layer_outputs", row) or {}

    def pictures(self, row: Batch) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        return self._trainer("pictures_seen", row)[0] or {}, self._generator("shows", "pictures_seen", row) or {}

    def resend(self) -> None:
        self._replicas.resend()

    def _generator(self, call: str, *args: Any) -> Any:
        self._replicas.prepare()
        return self._replicas.cluster.call_rank(self._rank, call, *args)

    def _trainer(self, what: str, *args: Any) -> list[Any]:
        self._actor.load_states(States.WEIGHTS)
        return self._actor.cluster.call("shows", what, *args)


Settings = Mapping[str, str]

FLOAT32 = "float32"
BOUNDS = {FLOAT32: 1e-3, "tf32": 0.05, "float16": 0.05, "bfloat16": 0.4}
"""By the coarser number format: in float32 for the largest difference (all engines are within 1e-4), otherwise for the
median. Of a right model in that format, medians of six tokens are up to 0.012 (tf32, float16) and 0.17
(bfloat16; SmolLM2-135M, 48 random prompts)."""
BUT_ONE = 0.8
"""Quantile of the second largest of six differences: rounding may tip a router's choice of experts for a token."""
OF_OTHERS = 1.5
"""In formats of 8 bits and fewer: there up to 0.13 with weights in int8, 0.64 in FP8."""
_NEUTRAL: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "first_token_temperature": None,
    "first_token_top_k": None,
}
_HOTTEST = 2.0  # that every engine takes
_SAME = 1e-5
"""Share of a tensor's size by which sketches of equal tensors may differ."""
_LAYERS = {FLOAT32: 1e-3, "tf32": 0.02, "float16": 0.02, "bfloat16": 0.1}
"""Share of its size by which a layer's output may differ."""
_SHOWN = 4
_OTHER = 0.2
"""Share of a picture's numbers from which on it is another one; a pixel changes a few of them."""
_REPAIRED = (
    "tensors: both agree since the same weights were sent again, so the last update did not reach the generator whole, "
    "or its weights were changed after it. check_weight_update: true checks what arrives"
)


@dataclass(frozen=True)
class Bound:
    """How far two engines may be apart."""

    value: float
    quantile: float
    """Of the differences, the one that it is for: 1 is the largest; below, single tokens may differ more."""
    words: str

    @classmethod
    def of(cls, trainer: Settings, generator: Settings) -> Bound:
        """By the number formats of both sides, and whether rounding may tip a router's choice of experts."""
        formats = [side.get(FORMAT, "unknown") for side in (trainer, generator)]
        experts = any(side.get(EXPERTS) == "True" for side in (trainer, generator))
        if set(formats) == {FLOAT32}:
            quantile, tokens = (BUT_ONE, "all tokens but one") if experts else (1.0, "all tokens")
        else:
            quantile, tokens = 0.5, "the median"
        value = max(BOUNDS.get(each, OF_OTHERS) for each in formats)
        colder = max(1.0, 1.0 / float(trainer.get(TEMPERATURE, 1.0)))
        what = f"trainer {formats[0]}, generator {formats[1]}{', experts' if experts else ''}"
        return cls(value * colder, quantile, f"at most {value * colder:.2g} in {tokens} ({what})")

    def difference(self, ours_M: Tensor, theirs_M: Tensor) -> float:
        """The figure that the bound is for."""
        found_M = differences(ours_M, theirs_M)
        return float(found_M.float().quantile(self.quantile, interpolation="lower"))


class Sides(Protocol):
    """The trainer, and one generating worker."""

    resent: bool
    """The generator has got the weights again since it answered."""

    def complete(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        """Samples, as in a rollout."""
        ...

    def trained(self, batch: Batch) -> Tensor:
        """[T]: log-probs by the trainer."""
        ...

    def forward(self, batch: Batch) -> Tensor | None:
        """[T]: log-probs by the generator, without sampling and cache; ``None``: it has no way."""
        ...

    def settings(self) -> tuple[Settings, Settings]:
        """Of trainer and generator, as ``evidence`` names them."""
        ...

    def sketches(self) -> tuple[Mapping[str, Sketch], Mapping[str, Sketch]]:
        """Of trainer and generator, by name in a checkpoint; none of a side that cannot say."""
        ...

    def own_sketches(self) -> Mapping[str, Sketch]:
        """Of the generator, by its own names."""
        ...

    def layers(self, row: Batch) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """[T, H] by trainer and generator: outputs of layers; none of a side that cannot say."""
        ...

    def pictures(self, row: Batch) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """What trainer and generator see of a row's pictures; none of a side that cannot say."""
        ...

    def resend(self) -> None:
        """Sends the generator the trainer's weights again."""
        ...


def find_causes(sides: Sides, request: GenerateRequest, completion: Completion, bound: Bound) -> list[str]:
    """Sentences that name the causes, the most certain first."""
    row = rows_of([request], [completion])
    reported_M, trained_M = torch.tensor(completion.logprobs), sides.trained(row)[row.loss_mask_T]
    for shift, neighbour in ((1, "after"), (-1, "before")):
        ours_M, theirs_M = reported_M[max(0, -shift) :], trained_M[max(0, shift) :]
        length = len(reported_M) - 1
        if length > 1 and bound.difference(ours_M[:length], theirs_M[:length]) <= bound.value:
            return [
                f"token offset: what the generator reports for a token is what the trainer computes for the token "
                f"{neighbour} it; one of the two counts from another place"
            ]
    trainer, generator = sides.settings() if request.items else ({}, {})
    if seen := of_pictures(sides, row, trainer, generator):
        return [*seen, *_of_settings(trainer, generator), *_of_tensors(sides, row, bound, generator)]
    forward_T = sides.forward(row)
    if forward_T is not None and bound.difference(forward_T[row.loss_mask_T], trained_M) <= bound.value:
        return _of_sampling(sides, request, reported_M - trained_M, bound)
    trainer, generator = sides.settings()
    layers, behind = _of_layers(sides, row, bound, trainer, generator)
    found = [*_of_settings(trainer, generator), *_of_tensors(sides, row, bound, generator)]
    if behind or not (found or layers):
        found += _of_temperature(sides, request, bound)
    found += [layers] if layers else []
    return found or ["no setting, tensor or layer was found that differs; set another strategy for one of the two"]


def of_pictures(sides: Sides, row: Batch, trainer: Settings, generator: Settings) -> list[str]:
    """Words for pictures that the generator sees otherwise, which a few log-probs may not show."""
    if row.items_I is None:
        return []
    given, seen = sides.pictures(row)
    for name in sorted(given.keys() & seen.keys() - {FEATURES}):
        ours, theirs = given[name], seen[name]
        if ours.shape != theirs.shape:
            return [
                f"pictures: {name} has the sizes {[*theirs.shape]} in the generator, {[*ours.shape]} in the trainer"
            ]
        share = float((ours != theirs).double().mean())
        if share > _OTHER:
            return [
                f"pictures: the generator sees another one: {share:.0%} of {name} differ. Look at the cache of "
                "features and at what passes pictures on"
            ]
        if share:
            rows = (ours != theirs).flatten(1).any(1).nonzero().flatten().tolist() if ours.dim() > 1 else []
            where = f", in patch {', '.join(map(str, rows[:_SHOWN]))} of {len(ours)}" if rows else ""
            count = int((ours != theirs).sum())
            return [
                f"pictures: pixels have changed on the way to the generator's tower: {count:,} of {ours.numel():,} "
                f"numbers of {name} differ{where}"
            ]
    if FEATURES in given and FEATURES in seen:
        ours, theirs = given[FEATURES], seen[FEATURES]
        away = float((ours - theirs).norm() / ours.norm().clamp(min=1e-12))
        if away > _layer_bound(trainer, generator):
            return [
                f"pictures: of equal pixels the generator's vision tower makes features that are {away:.2g} of their "
                "size away: its weights, or features that were kept from before an update"
            ]
    return []


def other_prompt(own: Sequence[int], generator: Settings) -> str | None:
    """Words for a generator that does not render the probe's message as the rollouts do, which no log-prob shows."""
    theirs = generator.get(PROMPT, " ".join(map(str, own))).split()
    at = next((i for i, (a, b) in enumerate(zip_longest(theirs, map(str, own))) if a != b), None)
    if at is None:
        return None
    return (
        f"template or tokenizer: one message has {len(theirs)} tokens there and {len(own)} in the rollouts, other ones "
        f"from token {at} on, so answers end at other tokens too. Look at actor_train.data_args.template, "
        "chat_template_kwargs and tokenizer_path"
    )


def _of_sampling(sides: Sides, request: GenerateRequest, excess_M: Tensor, bound: Bound) -> list[str]:
    """The generator's own forward pass is right."""
    prompt, params = request.prompt_ids, request.params
    # Nothing of it is in a cache; where pictures are, the ids of one stay together.
    moved = replace(request, prompt_ids=prompt[1:] if request.items else np.roll(prompt, 1))
    again, elsewhere = _differences(sides, [request, moved], bound)
    if sides.resent and max(again, elsewhere) <= bound.value:
        return [_REPAIRED]
    if elsewhere <= bound.value:
        agrees = "agrees" if again <= bound.value else "does not"
        return [
            "keys and values of old weights: another prompt agrees, and the generator's forward pass on these tokens, "
            f"which uses no cache; the same prompt asked again {agrees}. Look at kv_after_update and, of vllm, "
            "enable_prefix_caching"
        ]
    active = [(key, off) for key, off in _NEUTRAL.items() if getattr(params, key) != off]
    tries = [replace(moved, params=replace(params, **{key: off})) for key, off in active]
    if tries:
        for (key, off), difference in zip(active, _differences(sides, tries, bound), strict=True):
            if difference <= bound.value:
                return [
                    f"{key}: with {off} in place of {getattr(params, key)} both agree, so the generator reports "
                    f"log-probs after {key}, not before. Look at generating_args.{key}"
                ]
    if found := _of_temperature(sides, moved, bound):
        return found
    least, most = float(excess_M.min()), float(excess_M.max())
    if least > -bound.value:
        return [
            f"a cut distribution: every log-prob that the generator reports is higher, by {least:.2g} to {most:.2g}, "
            "as after top-p, top-k or min-p, although its forward pass agrees. Look at generating_args.top_p, top_k "
            "and min_p, and at sampling defaults of the engine"
        ]
    return [
        "the generator's sampler: its forward pass on the same tokens agrees, what it reports while sampling does not"
    ]


def _of_temperature(sides: Sides, request: GenerateRequest, bound: Bound) -> list[str]:
    """Asks for other temperatures until both agree."""
    asked = request.params.temperature
    if not asked:
        return []
    centre, step = 1.0, 2**0.25
    before = best = _differences(sides, [request], bound)[0]
    for _ in range(3):
        factors = [centre * step**power for power in range(-8, 9)]
        factors = [factor for factor in factors if 0.05 <= asked * factor <= _HOTTEST] or [1.0]
        tries = [_at(request, asked * factor) for factor in factors]
        found = _differences(sides, tries, bound)
        best = min(found)
        centre, step = factors[found.index(best)], step ** (1 / 8)
    if best > max(bound.value, before / 20) or abs(math.log(centre)) < 0.01:
        return []
    return [
        f"temperature: both agree where the generator is asked for {asked * centre:.3g} in place of {asked:g}, so one "
        f"of them divides logits by {max(centre, 1 / centre):.3g} times too much or too little. Look at "
        "actor_infer.generating_args.temperature, by which both divide"
    ]


def _of_settings(trainer: Settings, generator: Settings) -> list[str]:
    found = []
    for name in trainer:
        if name in generator and trainer[name] != generator[name] and name not in (PROMPT, EXPERTS):
            where = {
                FORMAT: "model_args.dtype and strategy_config of both roles",
                TEMPERATURE: "actor_infer.generating_args.temperature",
            }.get(name, "model_args.model_config_kwargs of actor_train and actor_infer")
            found.append(f"{name}: {trainer[name]} in the trainer, {generator[name]} in the generator. Look at {where}")
    return found


def _of_tensors(sides: Sides, row: Batch, bound: Bound, generator: Settings) -> list[str]:
    trainer, held = sides.sketches()
    if trainer and held:
        if found := list(different_tensors(trainer, held, generator.get(FORMAT, FLOAT32))):
            more = [f"and {len(found) - _SHOWN} more tensors"] if len(found) > _SHOWN else []
            return ["tensors: " + "; ".join([*found[:_SHOWN], *more])]
        return []
    before = sides.own_sketches()
    sides.resend()
    after = sides.own_sketches()
    changed = [name for name in before if before[name].distance(after[name]) > _SAME]
    more = [f"and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
    named = [f"tensors that changed when the weights were sent again: {', '.join([*changed[:_SHOWN], *more])}"]
    forward_T, mask_T = sides.forward(row), row.loss_mask_T
    agrees = forward_T is not None and bound.difference(forward_T[mask_T], sides.trained(row)[mask_T]) <= bound.value
    return [*([_REPAIRED] if agrees else []), *(named if changed else [])]


def different_tensors(trainer: Mapping[str, Sketch], held: Mapping[str, Sketch], number_format: str) -> Iterator[str]:
    """Tensors that a generator holds otherwise than the trainer, and what they are, in words.

    Args:
        number_format: of the generator, to which it may round.
    """
    expected = f"rounded to {number_format}"

    def other_with(sketch: Sketch) -> str | None:
        alike = (name for name, each in trainer.items() if each.shape == sketch.shape)
        return next((name for name in alike if trainer[name].distance(sketch) < _SAME), None)

    for name, sketch in held.items():
        own = trainer.get(name)
        if own is None:
            if other_with(sketch) is None:
                yield f"{name} is tied to another tensor in the trainer, and has values of its own here"
            continue
        if own.shape == sketch.shape and own.distance(sketch) < _SAME:
            continue
        fitting = [form for form in own.forms if form and own.distance(sketch, form) < _SAME]
        if expected in fitting:
            continue
        if fitting:
            yield f"{name} is {fitting[0]}"
        elif (other := other_with(sketch)) is not None:
            yield f"{name} has the values of {other}"
        else:
            away = own.distance(sketch)
            why = ", as if an update had not reached it" if away < 0.5 else ""
            yield f"{name} is {away:.2g} of its size away{why}"


def _of_layers(sides: Sides, row: Batch, bound: Bound, trainer: Settings, generator: Settings) -> tuple[str, bool]:
    """The first layer that differs, in words; and whether they part behind the layers."""
    ours, theirs = (dict(_numbered(side)) for side in sides.layers(row))
    numbers = sorted(ours.keys() & theirs.keys())
    if not numbers:
        return "", False
    most, quantile = _layer_bound(trainer, generator), min(bound.quantile, BUT_ONE)
    for number in numbers:
        (name, ours_TH), (_, theirs_TH) = ours[number], theirs[number]
        away_T = (ours_TH - theirs_TH).norm(dim=1) / ours_TH.norm(dim=1).clamp(min=1e-12)
        known_T = away_T[~away_T.isnan()].float()
        if len(known_T) and (away := float(known_T.quantile(quantile, interpolation="lower"))) > most:
            return (
                f"layers: they part in {name}, whose output is {away:.2g} of its size away"
                f"{'' if number == numbers[0] else '; those in front of it agree'}. If its tensors are equal, they are "
                "sent under wrong names, or one side computes attention, rotary embeddings, soft cap, sinks or routing "
                "otherwise",
                False,
            )
    return (
        f"layers: all {len(numbers)} agree; they part behind them: final norm, output layer, soft cap, temperature",
        True,
    )


def _layer_bound(trainer: Settings, generator: Settings) -> float:
    """Share of its size by which a layer's output may differ."""
    return max(_LAYERS.get(side.get(FORMAT, ""), 0.3) for side in (trainer, generator))


def _numbered(layers: Mapping[str, Tensor]) -> Iterator[tuple[int, tuple[str, Tensor]]]:
    """Layers by their number, as engines name them otherwise."""
    for name, output_TH in layers.items():
        if numbers := re.findall(r"\d+", name):
            yield int(numbers[-1]), (name, output_TH)


def _at(request: GenerateRequest, temperature: float) -> GenerateRequest:
    params: SamplingParams = replace(request.params, temperature=temperature, first_token_temperature=None)
    return replace(request, params=params)


def _differences(sides: Sides, requests: Sequence[GenerateRequest], bound: Bound) -> list[float]:
    """Between report and trainer, of each of several requests."""
    named = [replace(request, request_id=f"{request.request_id}, try {i}") for i, request in enumerate(requests)]
    completions = sides.complete(named)
    rows = rows_of(named, completions)
    parts = sides.trained(rows)[rows.loss_mask_T].split([len(done.token_ids) for done in completions])
    return [
        bound.difference(torch.tensor(done.logprobs), trained_M)
        for done, trained_M in zip(completions, parts, strict=True)
    ]
