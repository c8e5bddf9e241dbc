"""The probe: after weights were loaded or updated, trainer and generators are compared on a few sampled tokens.

A generator that has got new weights is asked a fixed question at once, beside whatever it does; its answer waits until
the trainer is about to compute log-probs anyway, with the same weights as long as it has not trained. So nothing waits
and nothing moves between devices. Only where log-probs differ does the search for the cause begin (``probe_causes``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from roll.distributed.strategy.evidence import Sketch, probe_prompt, rows_of
from roll.models.own_forward import differences
from roll.models.tokenizer import policy_tokenizer
from roll.pipeline.probe_causes import Bound, Settings, find_causes, other_prompt
from roll.pipeline.roles import Replicas, Roles
from roll.pipeline.session import RunFailedError
from roll.utils.hashing import derive_seed

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
        longest = max(1, min(PROMPTED, config.sequence_length - SAMPLED))
        prompt = np.array(self._prompt[-longest:], dtype=np.int64)
        return GenerateRequest("probe", prompt, probe_params(config))

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
        trainer, workers = self._settings_of(asked.replicas)
        rows = rows_of([request] * len(found), [*found.values()])
        if self._config.actor_train.router_replay.mode == "R3":
            chosen = [torch.from_numpy(done.experts) for done in found.values() if done.experts is not None]
            rows = rows.replace(experts_TE=torch.cat(chosen)) if len(chosen) == len(found) else rows
        scores = self._roles.actor.probe_logprobs(rows)
        assert scores.logprobs_T is not None
        parts = scores.logprobs_T[rows.loss_mask_T].split([len(done.token_ids) for done in found.values()])
        largest, median = (metrics.get(f"probe/logprob_diff_{each}", 0.0) for each in ("max", "median"))
        for (rank, completion), trained_M in zip(found.items(), parts, strict=True):
            reported_M = torch.from_numpy(completion.logprobs)
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

    def _settings_of(self, replicas: Replicas) -> tuple[Settings, list[Settings]]:
        """Asks for them once after each load, and compares the prompt, which log-probs say nothing of."""
        name = replicas.cluster.name
        known = self._settings.get(name)
        if known is None or known[0] != replicas.num_loads:
            trainer: Settings = self._roles.actor.cluster.call_rank(0, "shows", "settings") or {}
            workers: list[Settings] = [told or {} for told in replicas.cluster.call("shows", "settings")]
            known = self._settings[name] = replicas.num_loads, trainer, workers
            for rank, settings in enumerate(workers):
                if problem := other_prompt(self._prompt, settings):
                    self._report(f"probe: {name} rank {rank} makes other prompts than the rollouts", lambda: [problem])
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

    def __init__(self, roles: Roles, replicas: Replicas, rank: int) -> None:
        self._actor = roles.actor
        self._replicas = replicas
        self._rank = rank
        self.resent = replicas.shares_devices
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

    def resend(self) -> None:
        self._replicas.resend()

    def _generator(self, call: str, *args: Any) -> Any:
        self._replicas.prepare()
        return self._replicas.cluster.call_rank(self._rank, call, *args)

    def _trainer(self, what: str, *args: Any) -> list[Any]:
        self._actor.load_states(States.WEIGHTS)
        return self._actor.cluster.call("shows", what, *args)
