"""Probes that play the same episodes again, in other circumstances: they must come out as before."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import roll.agentic.env as envs
from roll.extras.env_check.elsewhere import ElsewhereError, replay_elsewhere
from roll.extras.env_check.findings import Finding
from roll.extras.env_check.plays import Play, ThreadHopper, difference, replay
from roll.extras.env_check.trial import StopCheckError, Trial
from roll.rollout.env_runner import frame
from roll.rollout.errors import EnvError

_COPIES = 4
"""Of each episode that are played at once."""


async def repeats(trial: Trial) -> AsyncIterator[Finding]:
    """The same seed and texts give the same episode in a new environment."""
    seen = difference(trial.episodes, await replay(trial.subject, trial.episodes, seconds=trial.seconds))
    if seen is not None:
        yield Finding("not-deterministic", seen)
        raise StopCheckError  # what follows compares too


async def repeats_elsewhere(trial: Trial) -> AsyncIterator[Finding]:
    """… and in another process."""
    try:
        subject = replace(trial.subject, env_type=envs.path_of(trial.subject.env_type))
        pickle.dumps(subject)
    except Exception:  # ``travels`` has told it
        return
    try:
        played = await replay_elsewhere(subject, trial.episodes, trial.most_seconds)
    except ElsewhereError as error:
        yield Finding("cannot-travel", f"another process could not play it: {error}")
        return
    seen = difference(trial.episodes, played)
    if seen is not None:
        yield Finding("differs-between-processes", seen)


async def resets(trial: Trial) -> AsyncIterator[Finding]:
    """… and in an environment that was used before, whether its episode ended, failed or was broken off."""
    subject = trial.subject
    runner = subject.runner()
    played = []
    for index, episode in enumerate(trial.episodes):
        before, failed = trial.episodes[index - 1], trial.idle[index - 1]
        await Play(runner, before.seed).finish(before.texts[: (len(before.texts) + 1) // 2])
        played += await replay(subject, [episode], runner, trial.seconds)
        await Play(runner, failed.seed).finish(failed.texts)
        played += await replay(subject, [episode], runner, trial.seconds)
    runner.close()
    seen = difference([episode for episode in trial.episodes for _ in range(2)], played)
    if seen is not None:
        yield Finding("state-leaks", seen)


async def renders(trial: Trial) -> AsyncIterator[Finding]:
    """``render`` shows a state and leaves it as it is."""
    episode = trial.episodes[0]
    play = Play(trial.subject.runner(), episode.seed)

    async def look() -> str | None:
        try:
            await play.runner.call("render", frame)
        except EnvError as error:
            return str(error)
        return None

    await play.reset()
    failed = await look()
    for text in episode.texts:
        await play.step(text)
        failed = failed or await look()
    play.runner.close()
    if failed is not None:
        yield Finding("render-fails", failed)
        return
    seen = difference([episode], [play.episode()])
    if seen is not None:
        yield Finding("render-changes-state", seen)


async def differs_by_seed(trial: Trial) -> AsyncIterator[Finding]:
    """Seeds give tasks of their own."""
    texts = max(trial.episodes, key=lambda episode: len(episode.texts)).texts
    seeds = [episode.seed for episode in trial.episodes]
    runner = trial.subject.runner()
    played = [await Play(runner, seed).finish(texts) for seed in seeds]
    runner.close()
    if all(difference([replace(played[0], failure=None)], [each]) is None for each in played[1:]):
        yield Finding("seeds-alike", f"{len(seeds)} seeds gave the same {len(texts)} steps")


async def interleaves(trial: Trial) -> AsyncIterator[Finding]:
    """… and while other environments of the same process are in the middle of theirs."""
    seen = await _side_by_side(trial, at_once=False)
    if seen is not None:
        yield Finding("instances-interfere", seen)
        raise StopCheckError  # threads would show the same


async def hops_threads(trial: Trial) -> AsyncIterator[Finding]:
    """… and when each call comes in another thread."""
    if trial.subject.own_thread or trial.subject.instant:  # its calls come in one
        return
    episode = trial.episodes[0]
    hopper = ThreadHopper(trial.subject)
    played = await Play(hopper, episode.seed).finish(episode.texts)
    hopper.close()
    seen = difference([episode], [played])
    if seen is not None:
        yield Finding("thread-bound", seen)
        raise StopCheckError  # the next one would fail in the same way


async def meets_threads(trial: Trial) -> AsyncIterator[Finding]:
    """… and while others are in a call of theirs, in other threads."""
    if trial.subject.instant:  # never in a thread
        return
    with _fast_switching():
        seen = await _side_by_side(trial, at_once=True)
    if seen is not None:
        yield Finding("not-thread-safe", seen)


async def _side_by_side(trial: Trial, *, at_once: bool) -> str | None:
    """Plays all episodes turn by turn, each several times; tells what came out otherwise than alone.

    Args:
        at_once: the calls of a turn run at the same time, not one after the other.
    """
    episodes = trial.episodes * (_COPIES if at_once else 1)
    plays = [Play(trial.subject.runner(), episode.seed) for episode in episodes]

    async def turn(calls: Iterable[Awaitable[None]]) -> None:
        if at_once:
            await asyncio.gather(*calls)
        else:
            for call in calls:
                await call

    await turn(play.reset() for play in plays)
    for number in range(trial.subject.max_steps):
        running = [
            (play, episode.texts[number])
            for play, episode in zip(plays, episodes, strict=True)
            if not play.is_over and number < len(episode.texts)
        ]
        await turn(play.step(text) for play, text in running)
    for play in plays:
        play.runner.close()
    return difference(episodes, [play.episode() for play in plays])


@contextmanager
def _fast_switching() -> Iterator[None]:
    """Python changes threads as often as it can, so that they meet."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
