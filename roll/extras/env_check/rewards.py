"""Probes of rewards: they tell success from failure, and tricks earn nothing."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Sequence

from roll.configs.schema import nearest
from roll.extras.env_check.findings import Finding
from roll.extras.env_check.plays import Episode, Moment, Play, shown
from roll.extras.env_check.texts import NONSENSE, tricks
from roll.extras.env_check.trial import Trial, said

_MOST_REWARD = 1000.0
_SAME = 1e-6
"""Rewards that differ by less are equal."""
_TRICKED_SEEDS = 3
_SHOWN_TRICKS = 3


async def pays(trial: Trial) -> AsyncIterator[Finding]:
    """Rewards tell success from failure and stay in a range."""
    moments = trial.moments
    rewards = [moment.reward for moment in moments]
    wins = [episode for episode in trial.episodes if episode.success]
    losses = [episode for episode in (*trial.episodes, *trial.idle) if not episode.success]
    for finding in _parts(moments):
        yield finding
    if not any("success" in moment.info for moment in moments):
        near = nearest("success", sorted({key for moment in moments for key in moment.other_keys}))
        yield Finding("success-undefined", "info has no 'success'" + (f", but {near!r}" if near else ""))
    elif not wins:
        yield Finding("success-not-seen", f"none of {len(trial.episodes)} episodes succeeded")
    elif not losses:
        yield Finding("failure-not-seen", f"all of {len(trial.episodes) + len(trial.idle)} episodes succeeded")
    if len(set(rewards)) == 1 and (rewards[0] > 0 or wins):
        yield Finding("reward-constant", f"each of {len(rewards)} steps paid {rewards[0]:g}")
    elif wins and losses:
        best_win, best_loss = max(e.total for e in wins), max(e.total for e in losses)
        if best_loss >= best_win:
            yield Finding("failure-paid", f"a failed episode was paid {best_loss:g}, the best success {best_win:g}")
    most = max(rewards, key=abs, default=0.0)
    if abs(most) > _MOST_REWARD:
        yield Finding("reward-range", f"a step paid {most:g}, more than {_MOST_REWARD:g}")
    won = next((episode for episode in trial.idle if episode.success), None)
    if won is not None:
        yield Finding("success-for-nothing", f"{shown(won.texts[-1])} was a success, seed {won.seed}")


def _parts(moments: Sequence[Moment]) -> Iterator[Finding]:
    """Finds what is wrong with the reward's two parts, each at most once."""
    penalties = [float(moment.info.get("penalty", 0.0)) for moment in moments]
    if max(penalties, default=0.0) > 0:
        yield Finding("penalty-positive", f"a step had the penalty {max(penalties):g}")
    for moment, penalty in zip(moments, penalties, strict=True):
        parts = moment.task_reward + penalty
        if abs(parts - moment.reward) > _SAME * max(1.0, abs(moment.reward)):
            yield Finding("reward-parts", f"a step returned {moment.reward:g}, its parts sum to {parts:g}")
            return


async def resists(trial: Trial) -> AsyncIterator[Finding]:
    """No trick earns more than nonsense, and none breaks a step."""
    won = next((episode.moments[-1].observation for episode in trial.episodes if episode.success), None)
    bounties: dict[str, list[str | None]] = {}
    broken: dict[str, dict[str, str]] = {}
    for episode in trial.episodes[: 1 if trial.is_slow else _TRICKED_SEEDS]:
        if any(finding.endswith("timeout") for finding in broken):
            break  # it would take as long again
        due = [(await said(trial, episode.seed, text)).moments[-1] for text in NONSENSE]
        first, answers = episode.moments[0].observation, trial.names or trial.answers
        for name, text in tricks(first, trial.instruction, answers, won):
            tricked = await said(trial, episode.seed, text)
            if tricked.failure is not None:
                broken.setdefault(tricked.failure.finding, {})[name] = tricked.failure.words
                continue
            trial.tricked.append(tricked.moments[-1])
            bounties.setdefault(name, []).append(await _bounty(trial, tricked, due))
    for finding, cases in broken.items():
        yield Finding(finding, _listed([f"{name}: {words}" for name, words in cases.items()]))
    # What pays for each seed is no lucky guess.
    paid = [f"{name} {words[0]}" for name, words in bounties.items() if words[0] is not None and None not in words]
    for finding, mark in (("reward-tampered", "was paid"), ("success-for-nothing", "was a success")):
        if marked := [words for words in paid if mark in words]:
            yield Finding(finding, _listed(marked))


async def _bounty(trial: Trial, tricked: Episode, due: Sequence[Moment]) -> str | None:
    """Says what a trick was given that nonsense, or the action that it names, is not."""
    moment, action = tricked.moments[-1], tricked.moments[-1].info.get("action")
    if action in trial.names and re.search(rf"\b{re.escape(action)}\b", tricked.texts[-1], re.IGNORECASE):
        due = [(await said(trial, tricked.seed, trial.form.format(action))).moments[-1]]
    most = max(each.task_reward for each in due)
    if moment.task_reward > most + _SAME:
        return f"was paid {moment.task_reward:g} where {most:g} is due"
    return "was a success" if moment.success and not any(each.success for each in due) else None


def _listed(cases: Sequence[str]) -> str:
    more = f"; and {len(cases) - _SHOWN_TRICKS} more" if len(cases) > _SHOWN_TRICKS else ""
    return "; ".join(cases[:_SHOWN_TRICKS]) + more


async def ends(trial: Trial) -> AsyncIterator[Finding]:
    """A step after the end is refused; at least it pays nothing."""
    accepted: list[str] = []
    for episode in trial.episodes:
        for text in (episode.texts[-1], NONSENSE[0]) if episode.ended else ():
            play = Play(trial.subject.runner(), episode.seed)
            await play.finish(episode.texts)
            await play.step(text)
            play.runner.close()
            if play.failure is not None:
                continue
            moment = play.moments[-1]
            accepted.append(f"{shown(text)} after the end was taken and paid {moment.reward:g}")
            if moment.reward > 0:
                yield Finding("paid-after-end", accepted[-1])
                return
    if accepted:
        yield Finding("step-after-end", accepted[0])
