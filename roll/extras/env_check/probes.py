"""Probes of an environment: the same episodes under other conditions, rewards, tricks; each yields findings."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import roll.agentic.env as envs
from roll.configs.schema import nearest
from roll.extras.env_check.findings import Finding
from roll.extras.env_check.trial import (
    NONSENSE,
    Episode,
    Moment,
    Play,
    StopCheckError,
    Subject,
    ThreadHopper,
    Trial,
    can_be_made,
    difference,
    plays,
    replay,
    said,
    shown,
    travels,
    tricks,
)
from roll.rollout.env_runner import frame
from roll.rollout.errors import EnvError
from roll.utils.foreign import Fault

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
        yield Finding("reward-constant", f"each of {len(rewards)} steps gave the reward {rewards[0]:g}")
    elif wins and losses:
        best_win, best_loss = max(e.total for e in wins), max(e.total for e in losses)
        if best_loss >= best_win:
            yield Finding(
                "failure-paid", f"a failed episode got the reward {best_loss:g}, the best success {best_win:g}"
            )
    most = max(rewards, key=abs, default=0.0)
    if abs(most) > _MOST_REWARD:
        yield Finding("reward-range", f"a step gave the reward {most:g}, beyond {_MOST_REWARD:g}")
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
            accepted.append(f"{shown(text)} after the end was accepted with the reward {moment.reward:g}")
            if moment.reward > 0:
                yield Finding("paid-after-end", accepted[-1])
                return
    if accepted:
        yield Finding("step-after-end", accepted[0])


_ASKED, _ANSWERED = "asked.pickle", "answered.pickle"
_START_S = 60.0
_LAST_WORDS = 300


class ElsewhereError(RuntimeError):
    """The other process could not run the episodes."""


async def replay_elsewhere(subject: Subject, episodes: Sequence[Episode], patience: float) -> list[Episode]:
    """The episodes as another process plays them, one whose ``hash`` of texts is another.

    Args:
        patience: seconds for the playing, beside the start of Python.

    Raises:
        ElsewhereError: the process failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="roll-env-check-") as name:
        folder = Path(name)
        (folder / _ASKED).write_bytes(pickle.dumps((subject, list(episodes))))
        other_hash = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)
        try:
            done = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-m", __name__, name],
                env={**os.environ, "PYTHONHASHSEED": other_hash, "PYTHONPATH": path},
                capture_output=True,
                timeout=_START_S + patience,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ElsewhereError(f"it took longer than {error.timeout:.0f} s") from error
        if done.returncode or not (folder / _ANSWERED).exists():
            said = done.stderr.decode(errors="replace").strip()[-_LAST_WORDS:]
            raise ElsewhereError(f"it ended with code {done.returncode}: {said}")
        answered: list[Episode] = pickle.loads((folder / _ANSWERED).read_bytes())  # written by this very module
        return answered


def _main(folder: Path) -> None:
    subject, episodes = pickle.loads((folder / _ASKED).read_bytes())
    (folder / _ANSWERED).write_bytes(pickle.dumps(asyncio.run(replay(subject, episodes))))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))


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
    with Fault() as fault:
        subject = replace(trial.subject, env_type=envs.path_of(trial.subject.env_type))
        pickle.dumps(subject)
    if fault.error is not None:  # ``travels`` has said it
        return
    try:
        played = await replay_elsewhere(subject, trial.episodes, trial.most_seconds)
    except ElsewhereError as error:
        yield Finding("cannot-travel", f"another process could not run it: {error}")
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


_INSTANT_S = 0.005
"""Several times what ``instant`` promises; a busy machine must not be taken for a slow environment."""
_QUICK_S = 0.0002
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


async def shows(trial: Trial) -> AsyncIterator[Finding]:
    """Observations are of a bearable size and of plain characters."""
    longest = max(trial.observations, key=len)
    if len(longest) > trial.subject.max_chars:
        yield Finding("observation-size", f"{len(longest):,} characters, more than {trial.subject.max_chars:,}")
    for text in trial.observations:
        if found := _CONTROL.search(text):
            yield Finding("observation-characters", f"{found[0]!r} in {shown(text)}")
            return


async def draws(trial: Trial) -> AsyncIterator[Finding]:
    """Pictures are of one size and follow the state: equal ones for equal states, others for others."""
    drawn = [moment for moment in trial.all_moments if moment.pictures]
    sizes = sorted({item.data.shape[1::-1] for moment in drawn for item in moment.pictures})
    if len(sizes) > 1:
        yield Finding("picture-size", ", ".join(f"{width}x{height}" for width, height in sizes[:_SHOWN_TRICKS]))
    keys: dict[tuple[str, ...], str] = {}
    pictures: dict[str, tuple[str, ...]] = {}
    for moment in drawn:
        if (key := moment.info.get("state_key")) is None:
            return
        seen = tuple(item.hash for item in moment.pictures)
        if keys.setdefault(seen, key) != key:
            yield Finding("picture-state", f"the states {shown(keys[seen])} and {shown(key)} have the same picture")
            return
        if pictures.setdefault(key, seen) != seen:
            yield Finding("picture-state", f"the state {shown(key)} has two pictures")
            return


async def is_quick(trial: Trial) -> AsyncIterator[Finding]:
    """Calls are as quick as the class says."""
    subject = trial.subject
    for call, seconds in trial.seconds.items():
        median, quartile = statistics.median(seconds), statistics.quantiles(seconds)[0]
        if subject.instant and quartile > _INSTANT_S:
            words = f"three of four calls of {call} take more than {1000 * quartile:.1f} ms ({len(seconds)} calls)"
            yield Finding("not-instant", words)
        elif median > subject.slow:
            yield Finding("slow", f"{call} takes {median:.1f} s (median of {len(seconds)})")
    medians = [statistics.median(seconds) for seconds in trial.seconds.values()]
    if not (subject.instant or subject.own_thread or subject.asks) and max(medians) < _QUICK_S:
        yield Finding("could-be-instant", f"no call takes {1000 * _QUICK_S:g} ms (medians)")


Probe = Callable[[Trial], AsyncIterator[Finding]]

PROBES: tuple[Probe, ...] = (
    travels,
    can_be_made,
    plays,
    pays,
    shows,
    draws,
    repeats,
    repeats_elsewhere,
    resets,
    is_quick,
    renders,
    differs_by_seed,
    resists,
    ends,
    interleaves,
    hops_threads,
    meets_threads,
)
"""In the order in which they run; what follows ``repeats`` compares with the episodes of ``plays``."""
