"""What is tried on an environment: each probe plays episodes and says what it found."""

from __future__ import annotations

import asyncio
import pickle
import random
import re
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import roll.agentic.env as envs
from roll.agentic.env.base import TextEnv
from roll.configs.schema import nearest
from roll.preflight.env_check.elsewhere import ElsewhereError, replay_elsewhere
from roll.preflight.env_check.findings import Finding
from roll.preflight.env_check.plays import Episode, Moment, Play, Subject, ThreadHopper, difference, replay, shown
from roll.preflight.env_check.texts import FORMATS, NONSENSE, guesses, tricks
from roll.rollout.env_protocol import frame
from roll.rollout.env_runner import EnvRunner
from roll.rollout.errors import EnvError, describe_error
from roll.utils.seeding import derive_seed

_MOST_REWARD = 1000.0
_MANY_S = 2.0
"""An episode that takes longer makes the check play fewer of them."""
_INSTANT_S = 0.005
"""Several times what ``instant`` promises; a busy machine must not be taken for a slow environment."""
_QUICK_S = 0.0002
_COPIES = 4
_TRICKED_SEEDS = 3
_SHOWN_TRICKS = 3
_SAME = 1e-6
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class StopCheckError(Exception):
    """There is no use in going on."""


class Trial:
    """An environment under trial: the episodes that all probes play again, and what was measured.

    Args:
        subject: the environment.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.episodes: list[Episode] = []
        """Played by script, each in a new environment."""
        self.idle: list[Episode] = []
        """In which only nonsense was said."""
        self.tricked: list[Moment] = []
        """What tricks were answered with."""
        self.seconds: dict[str, list[float]] = {}
        self.answers: list[str] = []
        """What scripted play says."""
        self.names: list[str] = []
        """Bare answers: of ``answers``, without their tags."""
        self.form = ""
        """How an action is named, a member of ``FORMATS``; empty without ``action_names``."""
        self.instruction = ""

    @property
    def moments(self) -> list[Moment]:
        """All answers to texts, those to tricks left out."""
        return [moment for episode in (*self.episodes, *self.idle) for moment in episode.moments[1:]]

    @property
    def observations(self) -> list[str]:
        played = [moment for episode in (*self.episodes, *self.idle) for moment in episode.moments]
        return [moment.observation for moment in (*played, *self.tricked)]

    @property
    def is_slow(self) -> bool:
        return any(statistics.median(seconds) > self.subject.slow for seconds in self.seconds.values())

    @property
    def most_seconds(self) -> float:
        """Generous time for playing all episodes once more."""
        return 10 * sum(sum(seconds) for seconds in self.seconds.values()) + self.subject.timeout


async def travels(trial: Trial) -> AsyncIterator[Finding]:
    """The class path and the configuration reach another process."""
    subject = trial.subject
    try:
        envs.path_of(subject.env_type)
    except ValueError as error:
        yield Finding("cannot-travel", str(error))
    try:
        pickle.dumps(dict(subject.env_config))
    except Exception as error:  # whatever an object's own methods raise
        yield Finding("cannot-travel", f"env_config cannot be pickled: {describe_error(error)}")


async def can_be_made(trial: Trial) -> AsyncIterator[Finding]:
    """The constructor takes the configuration."""
    subject = trial.subject
    runner = subject.runner()
    try:
        names, trial.instruction = await runner.call("constructor", lambda env: (env.action_names, env.env_instruction))
        blob = await runner.call("constructor", _pickle_error)
    except EnvError as error:
        yield Finding("cannot-be-made", str(error))
        raise StopCheckError from error
    finally:
        runner.close()
    trial.names = list(names)
    if blob is not None:
        yield Finding("instance-not-picklable", blob)


def _pickle_error(env: TextEnv) -> str | None:
    try:
        pickle.dumps(env)
    except Exception as error:  # whatever an object's own methods raise
        return describe_error(error)
    return None


async def plays(trial: Trial) -> AsyncIterator[Finding]:
    """Episodes by script come to an end and keep the protocol."""
    subject = trial.subject
    if trial.names:
        trial.form = FORMATS[0]
        understood: list[str | None] = []
        for form in FORMATS:
            episode = await _once(trial, subject.seeds[0], form.format(trial.names[0]))
            if episode.failure is not None:
                yield Finding(episode.failure.finding, episode.failure.words)
                raise StopCheckError
            understood.append(episode.moments[-1].info.get("action"))
        if trial.names[0] in understood:
            trial.form = FORMATS[understood.index(trial.names[0])]
        else:
            said = trial.form.format(trial.names[0])
            yield Finding("actions-not-understood", f"info['action'] was {understood[0]!r} after {said}")
    trial.answers = list(subject.answers) or [trial.form.format(name) for name in trial.names]
    started = time.perf_counter()
    for index, seed in enumerate(subject.seeds):
        share = (0.95, 0.5, 0.0)[index % 3]
        trial.episodes.append(await _scripted(trial, seed, share))
        if trial.episodes[-1].failure is None:
            trial.idle.append(await _nonsense(trial, seed))
        failure = trial.episodes[-1].failure or trial.idle[-1].failure
        if failure is not None:
            yield Finding(failure.finding, failure.words)
            raise StopCheckError
        if index and time.perf_counter() - started > _MANY_S * (index + 1):
            break


async def _scripted(trial: Trial, seed: int, share: float) -> Episode:
    subject = trial.subject
    rng = random.Random(derive_seed(seed, "play"))  # an environment may draw from Random(seed) itself
    play = Play(subject.runner(), seed, trial.seconds)
    await play.reset()
    deck: list[str] = []
    while not play.is_over and len(play.texts) < subject.max_steps:
        if not trial.answers:
            trial.answers = guesses(play.moments[0].observation, trial.instruction)
        expert = await _expert(play.runner) if trial.form and rng.random() < share else []
        if not trial.form and not deck:  # answers are tried once each, moves are made again
            deck = rng.sample(trial.answers, len(trial.answers))
        await play.step(
            trial.form.format(rng.choice(expert)) if expert else deck.pop() if deck else rng.choice(trial.answers)
        )
    play.runner.close()
    return play.episode()


async def _expert(runner: EnvRunner) -> Sequence[str]:
    try:
        return await runner.call("expert_actions", lambda env: getattr(env, "expert_actions", list)())
    except EnvError:
        return []


async def _nonsense(trial: Trial, seed: int) -> Episode:
    subject = trial.subject
    play = Play(subject.runner(), seed)
    texts = [NONSENSE[turn % len(NONSENSE)] for turn in range(subject.max_steps)]
    episode = await play.finish(texts)
    play.runner.close()
    return episode


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


async def interleaves(trial: Trial) -> AsyncIterator[Finding]:
    """… and while other environments of the same process are in the middle of theirs."""
    seen = await _side_by_side(trial, at_once=False)
    if seen is not None:
        yield Finding("instances-interfere", seen)
        raise StopCheckError  # threads would show the same


async def hops_threads(trial: Trial) -> AsyncIterator[Finding]:
    """… and when each call comes in another thread."""
    if trial.subject.own_thread:
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
        trial: the environment.
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


async def differs_by_seed(trial: Trial) -> AsyncIterator[Finding]:
    """Seeds give tasks of their own."""
    texts = max(trial.episodes, key=lambda episode: len(episode.texts)).texts
    seeds = [episode.seed for episode in trial.episodes]
    runner = trial.subject.runner()
    played = [await Play(runner, seed).finish(texts) for seed in seeds]
    runner.close()
    if all(difference([replace(played[0], failure=None)], [each]) is None for each in played[1:]):
        yield Finding("seeds-alike", f"{len(seeds)} seeds gave the same {len(texts)} steps")


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
    """What is wrong with the reward's two parts, each at most once."""
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
        due = [(await _once(trial, episode.seed, text)).moments[-1] for text in NONSENSE]
        said = tricks(episode.moments[0].observation, trial.instruction, trial.names or trial.answers, won)
        for name, text in said:
            tricked = await _once(trial, episode.seed, text)
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
    """What a trick was given that nonsense, or the action that it names, is not."""
    moment, action = tricked.moments[-1], tricked.moments[-1].info.get("action")
    if action in trial.names and re.search(rf"\b{re.escape(action)}\b", tricked.texts[-1], re.IGNORECASE):
        due = [(await _once(trial, tricked.seed, trial.form.format(action))).moments[-1]]
    most = max(each.task_reward for each in due)
    if moment.task_reward > most + _SAME:
        return f"was paid {moment.task_reward:g} where {most:g} is due"
    return "was a success" if moment.success and not any(each.success for each in due) else None


def _listed(cases: Sequence[str]) -> str:
    more = f"; and {len(cases) - _SHOWN_TRICKS} more" if len(cases) > _SHOWN_TRICKS else ""
    return "; ".join(cases[:_SHOWN_TRICKS]) + more


async def _once(trial: Trial, seed: int, text: str) -> Episode:
    """One step of a new episode in a new environment."""
    play = Play(trial.subject.runner(), seed)
    episode = await play.finish([text])
    play.runner.close()
    return episode


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


async def shows(trial: Trial) -> AsyncIterator[Finding]:
    """Observations are of a bearable size and of plain characters."""
    longest = max(trial.observations, key=len)
    if len(longest) > trial.subject.max_chars:
        yield Finding("observation-size", f"{len(longest):,} characters, more than {trial.subject.max_chars:,}")
    for text in trial.observations:
        if found := _CONTROL.search(text):
            yield Finding("observation-characters", f"{found[0]!r} in {shown(text)}")
            return


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
    if not subject.instant and not subject.own_thread and max(medians) < _QUICK_S:
        yield Finding("could-be-instant", f"no call takes {1000 * _QUICK_S:g} ms (medians)")


Probe = Callable[[Trial], AsyncIterator[Finding]]

PROBES: tuple[Probe, ...] = (
    travels,
    can_be_made,
    plays,
    pays,
    shows,
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
