"""verl's trainers that generate during training: fully asynchronous, one step off, and the modes of `trainer.v1`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from roll.extras.importers.common import GPUS_OF_A_NODE, devices, leaves
from roll.extras.importers.draft import Draft, Kind
from roll.extras.importers.table import DROP
from roll.extras.importers.verl_algorithm import CORRECTION, set_bypass
from roll.extras.importers.verl_roles import ACTOR, ROLLOUT

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


_ASYNC = "async_training"
_POOL = "rollout"
"""Section of the devices that generate; releases from 2026 on have them in ``actor_rollout_ref.rollout`` too."""
_TRAINING = ("trainer.nnodes", "trainer.n_gpus_per_node")
_APART = "actor_rollout_ref.hybrid_engine"
_WEIGHT = "train_infer_correction.is_weight"
_AT_ONCE = (f"{_ASYNC}.concurrent_samples_per_replica", f"{_POOL}.max_concurrent_samples_per_replica")
_THEIR_BOUND = 2.0
"""Bound at which verl truncates importance weights by default."""


def is_streaming(draft: Draft) -> bool:
    """Tells whether the fully asynchronous trainer runs: it counts versions of the weights, and prompts one by one."""
    return draft.has(_ASYNC) or _starts(draft, "fully_async")


def is_apart(draft: Draft) -> bool:
    """Tells whether the generator has devices of its own."""
    pool = draft.has(f"{_POOL}.n_gpus_per_node")
    return is_streaming(draft) or pool or _starts(draft, "one_step_off") or mode_of(draft) == APART


def _starts(draft: Draft, name: str) -> bool:
    return any(name in each for each in (draft.given.program, *draft.given.missing))


def updates_of_a_batch(draft: Draft) -> int:
    """Optimizer steps of a batch, after which their schedules of the learning rate go on by one."""
    prompts = int(draft.get("rollout_batch_size", 1024)) * int(draft.theirs(f"{ROLLOUT}.n_agent", 1) or 1)
    if is_streaming(draft):
        prompts //= int(draft.theirs(f"{_ASYNC}.trigger_parameter_sync_step"))
    prompts //= shares_of_a_batch(draft)
    passes = int(draft.theirs(f"{ACTOR}.ppo_epochs"))
    return max(1, prompts // int(draft.theirs(f"{ACTOR}.ppo_mini_batch_size"))) * passes


def key_of_evaluations(draft: Draft) -> str:
    """Their key of the steps between two evaluations."""
    own = f"{_POOL}.test_freq"  # of releases until 2026, which read it before the other
    return own if is_streaming(draft) and draft.has(own) else "trainer.test_freq"


def set_versions(draft: Draft) -> None:
    """Steps of the fully asynchronous trainer: what is trained between two updates of the generator is one."""
    keys = [f"{_ASYNC}.trigger_parameter_sync_step", f"{_ASYNC}.require_batches", f"{ACTOR}.ppo_mini_batch_size"]
    fetches, batches, size = (int(draft.theirs(key)) for key in keys)
    prompts = fetches * batches * size
    draft.retell("rollout_batch_size", Kind.DROPPED, f"not read there: {', '.join(keys)} are")
    each = f"{fetches} fetches × {batches} batches × {size} prompts"
    draft.derive(keys, "rollout_batch_size", prompts, f"{each} between two updates of the generator, which is a step")
    _set_end(draft, prompts)
    if (key := key_of_evaluations(draft)).startswith(_POOL):
        draft.retell("eval_steps", Kind.DROPPED, f"{key} is read")
        draft.derive(key, "eval_steps", max(0, int(draft.theirs(key))), "in updates of the generator, which are steps")
    if fetches > 1 and (warm := int(draft.theirs("trainer.critic_warmup") or 0)):
        draft.forget("critic_warmup")
        draft.derive("trainer.critic_warmup", "critic_warmup", -(-warm // fetches), f"{warm} fetches, {fetches} a step")
    if fetches > 1 and (passes := int(draft.theirs(f"{ACTOR}.ppo_epochs"))) > 1:
        note = f"each fetch is gone over {passes} times there, and a step's {prompts} prompts as a whole here"
        draft.tell(Kind.IMPOSSIBLE, f"{ACTOR}.ppo_epochs", passes, "ppo_epochs", note=note)


def _set_end(draft: Draft, prompts: int) -> None:
    """Sets the end of a run whose steps have so many prompts."""
    key, epochs = f"{_POOL}.total_rollout_steps", [f"{_POOL}.total_epochs", "trainer.total_epochs"]
    unread = ["trainer.total_training_steps"]
    if total := draft.theirs(key):
        note = f"{total} prompts in steps of {prompts}; the end of the epochs, if it comes first, ends a run there"
        draft.derive(key, "max_steps", max(1, int(total) // prompts), note)
        unread += epochs
    else:
        draft.derive(epochs, "total_epochs", int(draft.theirs(epochs[0]) or draft.theirs(epochs[1])))
    for other in unread:
        if draft.has(other):
            why = f"{key} is read" if total else "the epochs are read"
            draft.tell(Kind.DROPPED, other, draft.theirs(other), note=why)


def set_asynchronous(draft: Draft) -> None:
    """Devices of the two sides, how far generation runs ahead, and the loss of what older weights sampled."""
    mode = mode_of(draft)
    set_mode(draft)
    if mode == SHARED:
        _set_correction(draft)
        return
    if not is_apart(draft):
        if draft.theirs(_APART) is False:
            note = "of trainers that generate while they train: async_generation_ratio, with devices for actor_infer"
            draft.tell(Kind.IMPOSSIBLE, _APART, False, "actor_infer.device_mapping", note=note)
        return
    _set_devices(draft)
    if is_streaming(draft):
        _set_staleness(draft)
        _set_concurrency(draft)
    elif mode != APART:
        note = "a batch is generated while the one before it is trained on"
        draft.derive(_APART, "async_generation_ratio", 1.0, note)
        draft.derive(_APART, "partial_rollout", False, "weights come between two batches")
    _set_correction(draft)


def _set_devices(draft: Draft) -> None:
    """Beside each other on every node where both fit, else on nodes of their own."""
    own = (f"{_POOL}.nnodes", f"{_POOL}.n_gpus_per_node")
    other = (f"{ROLLOUT}.nnodes", f"{ROLLOUT}.n_gpus_per_node")
    generating = other if draft.has(other[1]) and not any(draft.has(key) for key in own) else own
    nodes, gpus = (int(draft.theirs(key, 1)) for key in _TRAINING)
    own_nodes, own_gpus = (int(draft.theirs(key, 1)) for key in generating)
    if together := nodes == own_nodes and gpus + own_gpus <= GPUS_OF_A_NODE:
        size, total = gpus + own_gpus, nodes
        train, infer = _places(0, nodes, size, 0, gpus), _places(0, nodes, size, gpus, own_gpus)
    else:
        size, total = max(gpus, own_gpus), nodes + own_nodes
        train, infer = _places(0, nodes, size, 0, gpus), _places(nodes, own_nodes, size, 0, own_gpus)
    for role in [role for role, section in draft.roles() if "device_mapping" in section]:
        keys, mapping = ((*generating, _APART), infer) if role == "actor_infer" else (_TRAINING, train)
        draft.forget(f"{role}.device_mapping")
        draft.derive(keys, f"{role}.device_mapping", mapping)
    note = "those that train and those that generate" + (" on each node" if together else ", on nodes of their own")
    for ours, at, value in (("num_nodes", 0, total), ("num_gpus_per_node", 1, size)):
        draft.forget(ours)
        draft.derive([_TRAINING[at], generating[at]], ours, value, note)


def _places(first: int, nodes: int, size: int, offset: int, count: int) -> str:
    """A ``device_mapping`` of so many devices on each of some nodes of a size."""
    if count == size:
        return devices(first * size, nodes * size)
    return " + ".join(devices(node * size + offset, count) for node in range(first, first + nodes))


def _set_staleness(draft: Draft) -> None:
    """Sets how far rollouts run ahead: their threshold bounds what was begun before the weights came, as ours does."""
    key, partial = f"{_ASYNC}.staleness_threshold", f"{_ASYNC}.partial_rollout"
    threshold, groups = float(draft.theirs(key)), int(draft.get("rollout_batch_size"))
    if int(threshold * groups) < 1:
        draft.derive(key, "async_generation_ratio", 0.0, "less than a group ahead: generation and training take turns")
        if draft.has(partial):
            draft.tell(Kind.DROPPED, partial, draft.theirs(partial), note=f"read with {key}")
        return
    draft.derive(key, "async_generation_ratio", threshold, f"at most {int(threshold * groups)} groups ahead in both")
    draft.derive(key, "rollout_window", 1.0, "a step takes the groups that finish first, here within a window")
    draft.derive(partial, "partial_rollout", bool(draft.theirs(partial)))


def _set_concurrency(draft: Draft) -> None:
    """Groups at once, which their generator bounds by its engines."""
    key = next((each for each in _AT_ONCE if draft.has(each)), _AT_ONCE[0])
    groups, ratio = int(draft.get("rollout_batch_size")), float(draft.get("async_generation_ratio"))
    gpus = int(draft.theirs(f"{_POOL}.nnodes")) * int(draft.theirs(f"{_POOL}.n_gpus_per_node"))
    engines = max(1, gpus // int(draft.get("actor_infer.num_gpus_per_worker", 1)))
    most = int(draft.theirs(key)) * engines
    if most < groups + int(ratio * groups):
        draft.derive(key, "max_running_groups", most, f"at each of {engines} engines there, of all of them here")
    elif draft.has(key):
        draft.tell(Kind.DROPPED, key, draft.theirs(key), note="no more groups than that are under way")


def _bypasses(draft: Draft) -> bool:
    """Tells whether their loss compares with the policy that sampled where the files do not say."""
    of_theirs = is_streaming(draft) or draft.given.program.startswith("verl.")
    return of_theirs and mode_of(draft) not in (SHARED, APART)


def _set_correction(draft: Draft) -> None:
    """Sets the loss's old policy, where the files leave it to a release, and weights where it needs them."""
    if draft.get("train_infer_correction.bypass"):
        return
    said, scored = f"{CORRECTION}.bypass_mode", f"{_ASYNC}.compute_prox_log_prob"
    sampled = [f"{_ASYNC}.use_rollout_log_probs", f"{ACTOR}.use_rollout_log_probs"]
    asked = [scored] if draft.theirs(scored) else [key for key in sampled if draft.theirs(key) is False]
    if asked:
        note = "the trainer computes log-probs of its samples under the weights that a step begins with"
        draft.derive(asked, "train_infer_correction.bypass", False, note)
    elif draft.theirs(said) is None and _bypasses(draft):
        set_bypass(draft, [said, *sampled], "on there by default", rejects=not draft.has(sampled[0]))
        return
    if draft.get("async_generation_ratio") and not draft.get(f"{_WEIGHT}.enabled"):
        draft.set(_WEIGHT, {"enabled": True, "weight_type": "token", "upper_bound": _THEIR_BOUND})
        note = "samples of older weights count there as if they were new; here they need importance weights, set so"
        key = f"{CORRECTION}.rollout_is"
        draft.tell(Kind.IMPOSSIBLE, key, draft.theirs(key), f"{_WEIGHT}.enabled", note=note)
