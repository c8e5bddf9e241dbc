"""The domains of a ``rewards`` section in one process, without Ray: scores responses, and checks references."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from roll.configs.base import Config
from roll.configs.parsing import parse, section_problems
from roll.configs.problems import ConfigErrors, ConfigProblem
from roll.configs.rewards import RewardConfig
from roll.data.columns import Item
from roll.data.pictures import PictureError, unresized
from roll.data.prompts import Prompt
from roll.data.questions import Answer, ResponseRow
from roll.data.tool_messages import PICTURE, in_words, text_of
from roll.rewards import VERIFIERS
from roll.rewards.isolation import RulePool, rule_spec
from roll.rewards.scorer import DomainScorer, check_rewards
from roll.rewards.types import RewardError, RewardResult, RuleVerifier, Sample, Verifier


def parse_rewards(rewards: Mapping[str, Any]) -> dict[str, RewardConfig]:
    """The domains of a ``rewards`` section.

    Raises:
        ConfigErrors: everything that is wrong with them, all at once.
    """
    problems: list[ConfigProblem] = []
    domains = {}
    for name, values in rewards.items():
        if not isinstance(values, Mapping):
            problems.append(ConfigProblem(f"rewards.{name}", values, "a section"))
            continue
        found = section_problems(RewardConfig, values)
        config, _ = parse(RewardConfig, values)
        if config is not None:
            domains[name] = config
            found = found or list(check_rewards(config))
        problems += [problem.under(f"rewards.{name}") for problem in found]
    if problems:
        raise ConfigErrors(problems)
    return domains


def domain_of(domains: Mapping[str, RewardConfig], tag: str | None) -> str:
    """Domain that scores rows of a tag; a domain that is alone scores all.

    Raises:
        ValueError: nobody.
    """
    if len(domains) == 1:
        return next(iter(domains))
    by_tag = {each: name for name, config in domains.items() for each in config.tag_included}
    if tag is None or tag not in by_tag:
        raise ValueError(f"tag {tag!r}, expected one of {', '.join(sorted(by_tag))}")
    return by_tag[tag]


class Scoring:
    """Scores responses. Use as an asynchronous context manager.

    Args:
        num_processes: child processes for rules, for each domain; ``None``: as the domain says.
        context: further arguments for the constructors of verifiers that name them, see ``DomainScorer``.
    """

    def __init__(self, domains: Mapping[str, RewardConfig], num_processes: int | None = None, **context: Any) -> None:
        self._scorers = {
            name: DomainScorer(name, config, num_processes or config.num_processes, **context)
            for name, config in domains.items()
        }
        self._domains = domains
        self.concurrency = sum(config.max_concurrency for config in domains.values())
        """Answers that are scored at the same time."""

    async def __aenter__(self) -> Scoring:
        """Starts child processes.

        Raises:
            RewardError: a verifier could not be built.
        """
        await asyncio.gather(*(scorer.start() for scorer in self._scorers.values()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for scorer in self._scorers.values():
            await scorer.close()

    async def score(self, row: ResponseRow) -> Sequence[RewardResult | RewardError]:
        """A verdict for each answer of a row, or why there is none."""
        domain = domain_of(self._domains, row.tag)
        return await asyncio.gather(*(self._score(domain, row, answer) for answer in row.answers))

    async def _score(self, domain: str, row: ResponseRow, answer: Answer | None) -> RewardResult | RewardError:
        if answer is None:
            return RewardError("there is no answer: generating it failed")
        try:
            pictures = await asyncio.to_thread(_unresized, row) if row.pictures else ()
        except PictureError as error:
            return RewardError(str(error))
        sample = Sample(
            prompt=row.prompt,
            response=answer.text,
            ground_truth=row.truth,
            data_source=row.tag or domain,
            extra_info=row.extra,
            messages=row.messages,
            num_tokens=answer.num_tokens,
            truncated=answer.truncated,
            pictures=pictures,
        )
        try:
            return await self._scorers[domain].score(sample)
        except RewardError as error:
            return error


def _unresized(row: ResponseRow) -> tuple[Item, ...]:
    return tuple(map(unresized, row.pictures))


def unseen(rewards: Mapping[str, RewardConfig], shown: Mapping[str, int]) -> Iterator[str]:
    """A line for each verifier that reads prompts without their pictures.

    Args:
        shown: prompts with pictures, by domain.
    """
    for name, domain in rewards.items():
        for number, verifier in enumerate(domain.verifiers):
            cls = VERIFIERS.get(verifier.name)
            if shown.get(name) and cls.sees(config := cls.config_class(**verifier.args)) is False:
                hint = "; pictures: true shows them" if hasattr(config, "pictures") else ""
                yield (
                    f"rewards.{name}.verifiers.{number} ({verifier.name}) reads {PICTURE} in place of the pictures of "
                    f"{shown[name]:,} prompts{hint}"
                )


_MOST_PROCESSES = 8
_PER_PROCESS = 100
"""References that are worth a process: it takes a second to start."""
_TELL_SECONDS = 5.0


@dataclass(frozen=True)
class _Trial:
    """A verifier that tries references in full, and the rows of each."""

    cls: type[RuleVerifier]
    args: Mapping[str, Any]
    label: str
    rows: dict[str, list[tuple[str, Sample]]]
    """By the reference as JSON."""


class References:
    """Checks every row, and as many references in full as time allows.

    Args:
        rewards: domains by name.
        seconds: for the trials in full, which run in child processes.
        tell: takes a line for people: what there was no time for.
        progress: takes lines for people who wait.
    """

    def __init__(
        self,
        rewards: Mapping[str, RewardConfig],
        seconds: float,
        tell: Callable[[str], None],
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self._rewards = rewards
        self._seconds = seconds
        self._tell = tell
        self._progress = progress
        self._verifiers: dict[str, list[tuple[type[Verifier], Config, str]]] = {}
        self._trials: dict[tuple[str, int], _Trial] = {}
        for name, domain in rewards.items():
            verifiers = []
            for number, verifier in enumerate(domain.verifiers):
                cls, label = VERIFIERS.get(verifier.name), f"rewards.{name}.verifiers.{number} ({verifier.name})"
                verifiers.append((cls, cls.config_class(**verifier.args), label))
                if issubclass(cls, RuleVerifier):
                    self._trials[name, number] = _Trial(cls, verifier.args, label, defaultdict(list))
            self._verifiers |= dict.fromkeys(domain.tag_included, verifiers)
        self._names = {tag: name for name, domain in rewards.items() for tag in domain.tag_included}

    def __call__(self, rows: Iterable[tuple[str, Prompt]]) -> Iterator[tuple[str, str]]:
        """Yields place and reason of each row that no answer can score; ``rows`` have their places."""
        shown = Counter[str]()
        for place, prompt in rows:
            shown[self._names.get(prompt.tag, "")] += prompt.has_pictures
            sample = Sample(
                prompt=text_of(prompt.messages[-1]["content"]),
                response="",
                ground_truth=prompt.ground_truth,
                data_source=prompt.tag,
                extra_info=prompt.extra_info,
                messages=in_words(prompt.messages),
            )
            for number, (cls, config, label) in enumerate(self._verifiers.get(prompt.tag, ())):
                try:
                    cls.check_row(config, sample)
                except (ValueError, RewardError) as error:
                    yield place, f"{label}: {error}"
                    continue
                if issubclass(cls, RuleVerifier) and cls.tries_row(config, sample):
                    trial = self._trials[self._names[prompt.tag], number]
                    trial.rows[json.dumps(sample.ground_truth)].append((place, sample))
        for line in unseen(self._rewards, shown):
            self._tell(line)
        yield from asyncio.run(self._try_all())

    async def _try_all(self) -> list[tuple[str, str]]:
        trials = [trial for trial in self._trials.values() if trial.rows]
        waiting = [(number, of_one) for number, trial in enumerate(trials) for of_one in trial.rows.values()]
        if not waiting:
            return []
        total, found = len(waiting), list[tuple[str, str]]()
        processes = min(os.cpu_count() or 1, _MOST_PROCESSES, -(-total // _PER_PROCESS))
        pool = RulePool([rule_spec(trial.cls, trial.args) for trial in trials], processes)
        waiting.reverse()
        end, told = time.monotonic() + self._seconds, time.monotonic()

        async def work() -> None:
            nonlocal told
            while waiting and time.monotonic() < end:
                number, of_one = waiting.pop()
                try:
                    problem = await pool.try_row(number, of_one[0][1], self._seconds)
                except RewardError as error:
                    problem = str(error)
                if problem is not None:
                    found.extend((place, f"{trials[number].label}: {problem}") for place, _ in of_one)
                if self._progress is not None and time.monotonic() > told + _TELL_SECONDS:
                    told = time.monotonic()
                    self._progress(f"trying reference answers: {total - len(waiting):,} of {total:,}")

        try:
            await asyncio.gather(*(work() for _ in range(processes)))
        finally:
            await pool.close()
        if waiting:
            self._tell(
                f"{total - len(waiting):,} of {total:,} different reference answers were tried in {self._seconds:g} s; "
                "only the form of the others was checked"
            )
        return found
