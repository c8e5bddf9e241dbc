"""The domains of a ``rewards`` section in one process, for answers that are there already: no Ray, no pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from roll.configs.parsing import parse, section_problems
from roll.configs.problems import ConfigErrors, ConfigProblem
from roll.configs.rewards import RewardConfig
from roll.data.questions import Answer, ResponseRow
from roll.rewards.scorer import DomainScorer, check_rewards
from roll.rewards.types import RewardError, Sample, Verdict


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
    """Scores answers. Use as an asynchronous context manager.

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

    async def score(self, row: ResponseRow) -> Sequence[Verdict | RewardError]:
        """A verdict for each answer of a row, or why there is none."""
        domain = domain_of(self._domains, row.tag)
        return await asyncio.gather(*(self._score(domain, row, answer) for answer in row.answers))

    async def _score(self, domain: str, row: ResponseRow, answer: Answer | None) -> Verdict | RewardError:
        if answer is None:
            return RewardError("there is no answer: generating it failed")
        sample = Sample(
            prompt=row.prompt,
            response=answer.text,
            ground_truth=row.truth,
            data_source=row.tag or domain,
            extra_info=row.extra,
            messages=row.messages,
            num_tokens=answer.num_tokens,
            truncated=answer.truncated,
        )
        try:
            return await self._scorers[domain].score(sample)
        except RewardError as error:
            return error
