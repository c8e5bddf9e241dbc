"""Alarms about a run that goes wrong while it still trains: what each watch reads, its bound, and what it says.

A watch looks at the metrics of the last steps, most of them also at those of the first ones. The section ``watches``
of the configuration describes them for users.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from typing import Any

from roll.report.diagnosis import (
    COLLAPSED,
    CUT_ADVICE,
    ENTROPY_ADVICE,
    MANY_SIGMA,
    SOLVED,
    SPREAD_ADVICE,
    entropy_collapsed,
    slope_in_sigma,
)
from roll.report.record import RunRecord, held_out
from roll.tracking.display import difference_interval

_FLAT_SIGMA = 1.0
"""Up to so many standard errors a slope counts as none."""
_CERTAIN = 2.576
"""Standard normal quantile of a two-sided interval of 99%."""
_LARGEST_UPDATE = 0.2
"""KL, in nats a token, beyond which one update is too large."""
_MOVED = 0.5
"""Mean change of a token's log-prob that is too much."""
_GROWTH = 0.1
"""Least growth of the host's memory, as a share of what there was."""


@dataclass(frozen=True)
class Watch:
    """One alarm.

    Attributes:
        reads: names of metrics, with ``*`` for any text.
        bound: where it begins.
        window: the last steps that it looks at.
        alarm: from a record and this watch, what is wrong, in words with figures and advice; ``None``: nothing.
        least: steps that it needs; ``window`` if 0.
    """

    reads: tuple[str, ...]
    bound: float
    window: int
    alarm: Callable[[RunRecord, Watch], str | None]
    least: int = 0


@dataclass(frozen=True)
class Alarm:
    """What a watch has said in a run.

    Attributes:
        action: ``warn`` or ``stop``.
        text: in words, the last time.
        first, last: steps.
        count: number of steps.
    """

    watch: str
    action: str
    text: str
    first: int
    last: int
    count: int = 1


class Watching:
    """The watches of a run, over the metrics that they read.

    Args:
        config: resolved, nested.
        actions: ``off``, ``warn`` or ``stop`` by watch.
    """

    def __init__(self, config: Mapping[str, Any], actions: Mapping[str, str]) -> None:
        self._actions = {name: action for name, action in actions.items() if action != "off"}
        self._reads = {"step", *(read for name in self._actions for read in WATCHES[name].reads)}
        self._steps: list[dict[str, Any]] = []
        self._record = RunRecord(config, self._steps)
        self._since = 0
        self.alarms: dict[str, Alarm] = {}
        """By watch."""

    def take_up(self, records: Iterable[Mapping[str, Any]], alarms: Mapping[str, Mapping[str, Any]]) -> None:
        """Continues a resumed run: the steps before it count as its beginning only, so that it gets all its tries.

        Args:
            records: metrics of the steps so far.
            alarms: see ``state_dict``.
        """
        self.alarms = {name: Alarm(**each) for name, each in alarms.items()}
        for record in records:  # other processes had other memory
            self._add({name: value for name, value in record.items() if not name.startswith("memory/")})
        self._since = len(self._steps)

    def look(self, step: int, metrics: Mapping[str, Any]) -> list[Alarm]:
        """The alarms after a step."""
        self._add({"step": step, **metrics})
        found = []
        for name, action in self._actions.items():
            text = alarm_of(name, self._record, self._since)
            if text is not None:
                earlier = self.alarms.get(name, Alarm(name, action, text, step, step, 0))
                self.alarms[name] = replace(earlier, action=action, text=text, last=step, count=earlier.count + 1)
                found.append(self.alarms[name])
        return found

    def state_dict(self) -> dict[str, Any]:
        return {name: asdict(each) for name, each in self.alarms.items()}

    def _add(self, metrics: Mapping[str, Any]) -> None:
        read = {
            name: value
            for name, value in metrics.items()
            if name in self._reads or any(fnmatch(name, each) for each in self._reads if "*" in each)
        }
        if metrics["step"]:
            self._steps.append(read)
        elif "eval/success" in read:
            self._record = replace(self._record, before=read)


def alarm_of(name: str, record: RunRecord, since: int = 0) -> str | None:
    """What a watch says at the end of a record; ``since``: number of steps before those that it may accuse."""
    watch = WATCHES[name]
    if len(record.steps) - since < (watch.least or watch.window):
        return None
    return watch.alarm(record, watch)


def _entropy_collapse(record: RunRecord, watch: Watch) -> str | None:
    early = record.early("actor/entropy", watch.window)
    late = record.late("actor/entropy", count=watch.window)
    rising = slope_in_sigma(record.series("rollout/reward")[-2 * watch.window :]) > _FLAT_SIGMA
    if not entropy_collapsed(early, late) or rising or _solved(record, watch):
        return None
    return (
        f"the policy's entropy fell from {early:.3g} to {late:.3g} nats a token, and the reward no longer rises: it "
        f"tries nothing else any more; {ENTROPY_ADVICE}"
    )


def _solved(record: RunRecord, watch: Watch) -> bool:
    return record.late("rollout/success", count=watch.window) >= SOLVED


def _held_out_falls(record: RunRecord, watch: Watch) -> str | None:
    fallen = _fallen(record, watch)
    if fallen is None:
        return None
    best, last, words = fallen
    later = [step for step in record.steps if (step["step"] or 0) > best["step"]]
    rewards = replace(record, steps=later).series("rollout/reward")
    if len(rewards) < watch.window or slope_in_sigma(rewards) < MANY_SIGMA:
        return None
    half = len(rewards) // 2
    early, late = statistics.fmean(rewards[:half]), statistics.fmean(rewards[half:])
    return (
        f"the training reward rises ({early:.3g} → {late:.3g} from step {best['step']} to {last['step']}), but {words}"
        ": the policy exploits the reward, or learns the training prompts by heart; read the responses in "
        "trajectories/, go back to the checkpoint of the best evaluation, and use a stricter verifier, more prompts or "
        "a small KL term"
    )


def _evaluation_falls(record: RunRecord, watch: Watch) -> str | None:
    fallen = _fallen(record, watch)
    if fallen is None:
        return None
    best, _, words = fallen
    return (
        f"{words}; stop, or go back to the checkpoint after step {best['step']} and lower the learning rate or add a "
        "small KL term"
    )


def _fallen(record: RunRecord, watch: Watch) -> tuple[Mapping[str, Any], Mapping[str, Any], str] | None:
    """The best evaluation, the last one, and words, if the last two are below the best beyond noise."""
    earlier, newest = record.evaluations[:-2], record.evaluations[-2:]
    if not earlier:
        return None
    best = max(earlier, key=lambda each: float(each["eval/success"]))
    if any(difference_interval(*held_out(best), *held_out(each), watch.bound)[1] >= 0 for each in newest):
        return None
    shares = " and ".join(f"{each['eval/success']:.1%}" for each in newest)
    return best, newest[1], f"held-out success fell from {best['eval/success']:.1%} (step {best['step']}) to {shares}"


def _rise(record: RunRecord, name: str, watch: Watch) -> tuple[float, float] | None:
    """Means of the first and last quarter of a metric that rises within the window beyond noise."""
    values = record.series(name)[-watch.window :]
    if slope_in_sigma(values) < MANY_SIGMA:
        return None
    part = max(1, len(values) // 4)
    return statistics.fmean(values[:part]), statistics.fmean(values[-part:])


def _gains(record: RunRecord, watch: Watch, name: str) -> tuple[str, tuple[float, float]] | None:
    """Words about a reward that rises without success, and how another metric rose meanwhile."""
    reward, other = _rise(record, "rollout/reward", watch), _rise(record, name, watch)
    success = record.series("rollout/success")[-watch.window :]
    if reward is None or other is None or not success or slope_in_sigma(success) > _FLAT_SIGMA:
        return None
    share = statistics.fmean(success[-len(success) // 4 :])
    steps = min(watch.window, len(record.steps))
    return (
        f"in {steps} steps the reward rose from {reward[0]:.3g} to {reward[1]:.3g}, but success did not ({share:.1%})",
        other,
    )


def _length_gains(record: RunRecord, watch: Watch) -> str | None:
    found = _gains(record, watch, "rollout/response_tokens")
    if found is None or found[1][1] < watch.bound * found[1][0]:
        return None
    words, (early, late) = found
    return (
        f"{words}, while responses grew from {early:.0f} to {late:.0f} tokens: the reward pays for length; weaken the "
        "terms that do, or penalise long responses (overlong_buffer)"
    )


def _format_gains(record: RunRecord, watch: Watch) -> str | None:
    found = _gains(record, watch, "rollout/valid_rate")
    if found is None or found[1][1] - found[1][0] < watch.bound:
        return None
    words, (early, late) = found
    return (
        f"{words}, while the share of responses in the right form rose from {early:.0%} to {late:.0%}: only the form "
        "is learned; lower its weight in the reward, or take easier tasks until some are solved"
    )


def _repetition(record: RunRecord, watch: Watch) -> str | None:
    early = record.early("rollout/repetition", watch.window)
    late = record.late("rollout/repetition", count=watch.window)
    if early is None or not late >= max(watch.bound, 2 * early):
        return None
    return (
        f"{late:.0%} of the responses' text repeats itself ({early:.0%} at the start); lower the learning rate, add a "
        "small KL term, and check that the reward does not pay for length"
    )


def _kl_blow_up(record: RunRecord, watch: Watch) -> str | None:
    summed = "token-sum" in str(record.setting("loss_agg_mode", ""))  # of a sequence, not per token
    far, large = "the policy is away from the reference by", "an update moves the policy by"
    places = [("reward/kl", far, watch.bound), ("actor/approx_kl", large, _LARGEST_UPDATE)]
    for name, what, bound in places if summed else [*places, ("actor/kl_loss", far, watch.bound)]:
        late = record.late(name, count=watch.window)
        if late > bound:
            return (
                f"{what} {late:.3g} nats a token ({name}; the bound is {bound:g}): lower the learning rate or "
                "ppo_epochs, raise the coefficient of the KL, or go back to an earlier checkpoint"
            )
    return None


def _ratio_tails(record: RunRecord, watch: Watch) -> str | None:
    steps = record.steps[-watch.window :]
    for name in sorted({name for step in steps for name in step if name.startswith("async/")}):
        values = [step.get(name) for step in steps]
        if any(value is None for value in values):
            continue
        mean = statistics.fmean(float(value) for value in values if value is not None)
        kind, _, lag = name.removeprefix("async/").rpartition("_")
        if kind == "log_ratio_mean" and mean >= _MOVED:
            words = f"the log-probs of tokens that are {lag} steps old have moved by {mean:.2f} on average"
        elif kind in ("truncated", "rejected") and mean >= watch.bound:
            words = f"{mean:.0%} of the tokens that are {lag} steps old are {kind}"
        else:
            continue
        return f"{words} ({name}): lower async_generation_ratio, or the learning rate"
    return None


def _dead_groups(record: RunRecord, watch: Watch) -> str | None:
    share = record.late("rollout/no_spread", count=watch.window)
    if not (record.compares and share >= watch.bound) or _solved(record, watch):
        return None
    right, wrong = (record.late(f"rollout/all_{word}", 0.0, watch.window) for word in ("right", "wrong"))
    return (
        f"in {share:.0%} of the groups of the last {watch.window} steps all responses score the same ({right:.0%} all "
        f"right, {wrong:.0%} all wrong), and train nothing; {SPREAD_ADVICE}"
    )


def _duplicate_prompts(record: RunRecord, watch: Watch) -> str | None:
    share = record.late("rollout/duplicate_prompts", count=watch.window)
    if not share >= watch.bound:
        return None
    return (
        f"{share:.0%} of a step's prompts are there twice: remove duplicates from the data, or take more data or a "
        "smaller rollout_batch_size"
    )


def _exploding_lengths(record: RunRecord, watch: Watch) -> str | None:
    early = record.early("rollout/response_tokens", watch.window)
    late = record.late("rollout/response_tokens", count=watch.window)
    cut = record.late("rollout/cut_off", count=watch.window)
    if early is None or not (late >= watch.bound * early and cut >= _GROWTH):
        return None
    return (
        f"responses grew from {early:.0f} to {late:.0f} tokens, and {cut:.0%} of them are cut off; {CUT_ADVICE}, or "
        "penalise length (overlong_buffer)"
    )


def _host_memory_grows(record: RunRecord, watch: Watch) -> str | None:
    used, free = record.series("memory/host_gb")[-watch.window :], record.series("memory/host_free_gb")
    if len(used) < watch.least or not free:
        return None
    half = len(used) // 2
    growth, later = used[-1] - used[0], used[-1] - used[half]
    steady = growth > watch.bound * used[0] and later > growth / 3 and slope_in_sigma(used) >= MANY_SIGMA
    rate = statistics.linear_regression(range(len(used)), used).slope
    step, last = int(record.steps[-1]["step"] or 0), int(record.setting("max_steps", 0))
    if not steady or rate * (last - step) < free[-1]:
        return None
    return (
        f"host memory grows by {1000 * rate:.0f} MB a step ({used[0]:.1f} → {used[-1]:.1f} GB in {len(used)} steps); "
        f"{free[-1]:.1f} GB are free, which ends at about step {step + int(free[-1] / rate)} of {last}: look for what "
        "environments, rewards or tools keep, or save often and resume (save_steps, resume_from_checkpoint)"
    )


_SUCCESS = ("rollout/reward", "rollout/success")
_HELD_OUT = ("rollout/reward", "eval/success", "eval/prompts", "eval/episodes")
_AGED = ("async/log_ratio_mean_*", "async/truncated_*", "async/rejected_*")
_SPREAD = ("rollout/no_spread", "rollout/all_right", "rollout/all_wrong", "rollout/success")
WATCHES: dict[str, Watch] = {
    "entropy_collapse": Watch(("actor/entropy", *_SUCCESS), COLLAPSED, 5, _entropy_collapse),
    "held_out_falls": Watch(_HELD_OUT, _CERTAIN, 6, _held_out_falls),
    "evaluation_falls": Watch(_HELD_OUT, MANY_SIGMA, 1, _evaluation_falls),
    "length_gains": Watch((*_SUCCESS, "rollout/response_tokens"), 1.5, 40, _length_gains, 20),
    "format_gains": Watch((*_SUCCESS, "rollout/valid_rate"), 0.1, 40, _format_gains, 20),
    "repetition": Watch(("rollout/repetition",), 0.4, 5, _repetition),
    "kl_blow_up": Watch(("reward/kl", "actor/kl_loss", "actor/approx_kl"), 1.0, 3, _kl_blow_up),
    "ratio_tails": Watch(_AGED, 0.2, 5, _ratio_tails),
    "dead_groups": Watch(_SPREAD, 0.8, 10, _dead_groups),
    "duplicate_prompts": Watch(("rollout/duplicate_prompts",), 0.25, 3, _duplicate_prompts),
    "exploding_lengths": Watch(("rollout/response_tokens", "rollout/cut_off"), 2.0, 5, _exploding_lengths),
    "host_memory_grows": Watch(("memory/host_gb", "memory/host_free_gb"), _GROWTH, 200, _host_memory_grows, 20),
}
"""By name, as in the section ``watches``."""
