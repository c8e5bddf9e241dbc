"""The modes of verl's newer trainer (``trainer.v1``): taking turns, or answers that go on beside training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from roll.extras.importers.common import leaves
from roll.extras.importers.draft import Draft, Kind
from roll.extras.importers.table import DROP
from roll.extras.importers.verl_roles import ACTOR

_SECTION = "trainer.v1"
_MODE = f"{_SECTION}.trainer_mode"
_OLDEST, _SYNC, _AHEAD = "max_off_policy_threshold", "parameter_sync_step", "num_warmup_batches"
SHARED, APART = "colocate_async", "separate_async"
_READ = (_OLDEST, _SYNC, _AHEAD, "max_off_policy_strategy")
_THEIR_SYNC = 4
"""Shares of a batch that devices apart train on before the generator is updated, by default."""
_THEIR_OLDEST = 8
"""Versions that an answer may span by default; null bounds nothing."""


def mode_of(draft: Draft) -> str:
    """The mode that runs, ``sync`` where the newer trainer is switched off."""
    return "sync" if draft.theirs("trainer.use_v1") is False else str(draft.theirs(_MODE) or "sync")


def shares_of_a_batch(draft: Draft) -> int:
    """Shares of a batch that are trained on one after another, after all of which the generator is updated."""
    if mode_of(draft) != APART:
        return 1
    return max(1, int(_found(draft, _SYNC)[1] or _THEIR_SYNC))


def set_mode(draft: Draft) -> None:
    """How far rollouts go on beside training; devices are set elsewhere."""
    mode, given = mode_of(draft), draft.theirs(_MODE)
    if mode == "sync":
        if given not in (None, "sync"):
            draft.tell(Kind.DROPPED, _MODE, given, note="trainer.use_v1 is false")
        return
    if mode not in (SHARED, APART):
        note = f"there are sync, {SHARED} and {APART}"
        draft.tell(Kind.IMPOSSIBLE, _MODE, mode, "async_generation_ratio", note=note)
        return
    if (count := shares_of_a_batch(draft)) > 1:
        _tell_shares(draft, count)
    (oldest_key, oldest), (ahead_key, ahead) = _found(draft, _OLDEST), _found(draft, _AHEAD)
    keys = [_MODE, *(key for key in (ahead_key, oldest_key) if key)]
    steps = 1.0 if ahead is None else float(ahead)
    unbounded = draft.has(f"{_SECTION}.sampler.{_OLDEST}") and oldest is None
    bound = math.inf if unbounded else int(_THEIR_OLDEST if oldest is None else oldest)
    if min(steps, bound) <= 0:
        draft.derive(keys, "async_generation_ratio", 0.0, "no answer is older: generation and training take turns")
    else:
        note = f"so many batches ahead as {_AHEAD}; nothing is dropped for its age"
        draft.derive(keys, "async_generation_ratio", float(min(steps, bound)), note)
        if bound >= 2 * math.ceil(steps) + 1:  # the lag of groups that a step may choose from
            draft.derive(keys, "rollout_window", 1.0, "a step takes the groups that finish first, here within a window")
        draft.derive(_MODE, "partial_rollout", True, "answers in flight go on under new weights")
    _tell_others(draft, mode)


def _tell_shares(draft: Draft, count: int) -> None:
    """A batch is ``parameter_sync_step`` mini-batches there, each an optimizer step, as a step's are here."""
    key = _found(draft, _SYNC)[0] or _MODE
    prompts, size = int(draft.get("rollout_batch_size", 1024)), int(draft.theirs(f"{ACTOR}.ppo_mini_batch_size"))
    if prompts != count * size:
        note = f"there train_batch_size, {prompts}, has to be parameter_sync_step × ppo_mini_batch_size, {count * size}"
        draft.tell(Kind.IMPOSSIBLE, key, count, "rollout_batch_size", note=note)
    if (passes := int(draft.theirs(f"{ACTOR}.ppo_epochs"))) > 1:
        note = (
            f"each share of a batch is gone over {passes} times there, and a step's {prompts} prompts as a whole here"
        )
        draft.tell(Kind.IMPOSSIBLE, f"{ACTOR}.ppo_epochs", passes, "ppo_epochs", note=note)


def _tell_others(draft: Draft, mode: str) -> None:
    """Notes the keys of the mode that are not read here: what they do is not known."""
    for key, value in _given(draft):
        own = key.removeprefix(f"{_SECTION}.").split(".")
        other = {SHARED, APART, "sync"} - {mode}
        if own[-1] not in (*_READ, "trainer_mode") and own[0] not in other and _is_asked(draft, key, value):
            draft.tell(Kind.IMPOSSIBLE, key, value, note=f"nothing is known of it here: see what it does in {mode}")


def _is_asked(draft: Draft, key: str, value: Any) -> bool:
    """Tells whether a key asks for something that no rule drops, other than its default."""
    return draft.rule(key) not in ("", DROP) and not draft.is_usual(key, value)


def _found(draft: Draft, name: str) -> tuple[str, Any]:
    """A key of the newer trainer by its last part, wherever a release has it, and its value."""
    other = {SHARED: APART, APART: SHARED}.get(mode_of(draft), "")
    for key, value in _given(draft):
        if key.endswith(f".{name}") and not key.startswith(f"{_SECTION}.{other}."):
            return key, value
    return "", None


def _given(draft: Draft) -> Iterator[tuple[str, Any]]:
    """Keys of the newer trainer that say something, with their values."""
    found = leaves(draft.theirs(_SECTION) or {}, f"{_SECTION}.")
    return ((key, value) for key, value in found if value not in (None, {}))
