"""``roll score``: responses in, scores out. Rules need neither Ray nor torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from roll.configs.compose import compose_config, mapping_of
from roll.configs.data import DataArguments
from roll.configs.loader import plugin_problems
from roll.configs.problems import NOTHING, ConfigErrors, ConfigProblem
from roll.configs.rewards import RewardConfig
from roll.data.addresses import Address
from roll.data.files import DataError, Problems, find_files
from roll.data.prompts import Prompt
from roll.data.questions import AnswerColumns, ResponseRow, read_responses
from roll.data.row_pictures import fetch
from roll.pipeline.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, report
from roll.pipeline.commands.progress import page, progress
from roll.rewards.accuracy import Tally
from roll.rewards.scorer import sees
from roll.rewards.scoring import References, Scoring, domain_of, parse_rewards, unseen
from roll.rewards.types import RewardError, RewardResult
from roll.tracking.run import to_json, write_atomic
from roll.utils.registry import plugin_variables
from roll.utils.threads import in_order

if TYPE_CHECKING:
    from roll.configs.rewards import JudgeEngine
    from roll.data.pictures import Source
    from roll.rewards.judge import HostedModel

SHOWN_ERRORS = 3
_TRIAL_SECONDS = 10.0
"""For the reference answers, which are tried before answers are scored."""


@dataclass(frozen=True)
class Job:
    """Answers to score, and the rewards that score them."""

    files: Sequence[str]
    columns: AnswerColumns
    rewards: Mapping[str, Any]
    """A ``rewards`` section, unchecked."""
    output: Path | None
    score_key: str
    summary: Path | None
    num_processes: int | None
    images: DataArguments = field(default_factory=DataArguments)
    """Where pictures of rows may be."""


def rewards_of(config: tuple[str, Path] | None, verifier: str | None, words: Sequence[str]) -> dict[str, Any]:
    """The ``rewards`` section of a configuration, or one of a single verifier.

    Args:
        verifier: its name, if there is no configuration.
        words: ``key=value``: of the configuration, or arguments of the verifier.

    Raises:
        ConfigErrors: the configuration cannot be read, or has no such section.
    """
    if config is not None:
        composed = compose_config(*config, words)
        rewards = composed.values.get("rewards")
        plugins = composed.values.get("plugins")
        problems = [*composed.problems, *plugin_problems(plugins)]
        if not isinstance(rewards, Mapping) or not rewards:
            problems.append(ConfigProblem("rewards", rewards or NOTHING, "domains with verifiers"))
        if problems:
            raise ConfigErrors(problems)
        assert isinstance(rewards, Mapping)
        os.environ.update(plugin_variables(plugins or ()))  # for the processes that rules run in
        return dict(rewards)
    args, problems = mapping_of(words)
    if problems:
        raise ConfigErrors(problems)
    return {str(verifier): {"tag_included": ["any"], "verifiers": [{"name": verifier, "args": args}]}}


def run(job: Job) -> int:
    """Scores answers and prints the figures.

    Returns:
        0; 1 when some answer could not be scored; 2 for a wrong command line, configuration or file.
    """
    try:
        domains = parse_rewards(job.rewards)
        shows = any(map(sees, domains.values()))
        total = _check(job, domains, partial(_rows, job, shows))
        for path in filter(None, (job.output, job.summary)):
            path.parent.mkdir(parents=True, exist_ok=True)
        tally, errors = asyncio.run(_score(job, domains, total, _rows(job, shows, Problems())))
        figures = tally.summary()
        sys.stdout.write(page(figures))
        if job.summary is not None:
            write_atomic(job.summary, to_json(figures, indent=2) + "\n")
    except ConfigErrors as problems:
        sys.stderr.write(report(problems, "roll score"))
        return EXIT_USAGE
    except (DataError, OSError, RewardError) as error:
        sys.stderr.write(f"roll score: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    for reason in errors:
        sys.stderr.write(f"not scored: {reason}\n")
    if tally.failed > len(errors):
        sys.stderr.write(f"… and {tally.failed - len(errors):,} more that could not be scored\n")
    return EXIT_FAILED if tally.failed else 0


def _rows(job: Job, shows: bool, problems: Problems) -> Iterator[ResponseRow]:
    more: Any = {"without": job.score_key, "shows": shows, "images": job.images}
    return read_responses(job.files, job.columns, problems, **more)


def _check(job: Job, domains: Mapping[str, RewardConfig], rows: Callable[[Problems], Iterator[ResponseRow]]) -> int:
    """Reads all rows once, before anything is scored.

    Returns:
        How many there are.

    Raises:
        DataError: everything that is wrong in them.
    """
    problems, count, shown = Problems(), 0, Counter[str]()
    asked: list[tuple[str, Prompt]] = []
    pictures: list[tuple[str, Source]] = []
    taken = {path.resolve(): "a file of answers" for path in find_files(job.files, Problems())}
    for option, path in (("--output", job.output), ("--summary", job.summary)):
        if path is not None and (seen := "a folder" if path.is_dir() else taken.get(path.resolve())):
            problems.add(option, f"got {path}, {seen}, expected another file")
        elif path is not None:
            taken[path.resolve()] = f"that of {option}"
    for row in rows(problems):
        count += 1
        pictures += [(row.row.place, each) for each in row.pictures if isinstance(each.found, Address)]
        try:
            name = domain_of(domains, row.tag)
            shown[name] += row.has_pictures
            messages = row.messages or ({"role": "user", "content": row.prompt},)
            tag = row.tag if row.tag in domains[name].tag_included else domains[name].tag_included[0]
            asked.append((row.row.place, Prompt(row.group, str(tag), messages, row.truth, row.extra)))
        except ValueError as error:
            problems.add(row.row.place, str(error))
    problems.raise_any()
    fetch(pictures, problems)
    problems.raise_any()
    if not count:
        raise DataError([f"{', '.join(job.files)}: no rows"])
    sys.stderr.writelines(f"{line}\n" for line in unseen(domains, shown))
    _tell_unscorable(domains, asked)
    return count


def _tell_unscorable(domains: Mapping[str, RewardConfig], asked: Sequence[tuple[str, Prompt]]) -> None:
    """Names rows whose reference no answer can meet: their zeros say nothing of the answers."""
    notes: list[str] = []
    found = list(References(domains, _TRIAL_SECONDS, notes.append)(asked))
    sys.stderr.writelines(f"{line}\n" for line in notes)
    for place, reason in found[:SHOWN_ERRORS]:
        sys.stderr.write(f"no answer can be right: {place}: {reason}\n")
    if len(found) > SHOWN_ERRORS:
        sys.stderr.write(f"… and {len(found) - SHOWN_ERRORS:,} more rows to which no answer can be right\n")


async def _score(
    job: Job, domains: Mapping[str, RewardConfig], total: int, rows: Iterator[ResponseRow]
) -> tuple[Tally, list[str]]:
    tally, errors = Tally(), list[str]()
    async with contextlib.AsyncExitStack() as stack:
        try:
            scoring = await stack.enter_async_context(Scoring(domains, job.num_processes, host=_host))
        except ValueError as error:  # a model that a verifier loads
            raise RewardError(str(error)) from error
        with _written(job.output) as file, progress("rows scored", total) as advance:
            async with contextlib.aclosing(in_order(rows, scoring.score, 2 * scoring.concurrency)) as done:
                async for row, verdicts in done:
                    for verdict in verdicts:
                        if isinstance(verdict, RewardError) and len(errors) < SHOWN_ERRORS:
                            errors.append(f"{row.row.place}: {verdict}")
                        elif (
                            isinstance(verdict, RewardResult)
                            and verdict.over_budget
                            and tally.over_budget < SHOWN_ERRORS
                        ):
                            sys.stderr.write(f"counts as wrong: {row.row.place}: {verdict.over_budget}\n")
                        tally.add(row.group, verdict if isinstance(verdict, RewardResult) else None)
                    if file is not None:
                        scored = {**row.row.values, job.score_key: [_record(verdict) for verdict in verdicts]}
                        file.write(to_json(scored) + "\n")
                    advance(f"{tally.failed:,} failed" if tally.failed else "")
    return tally, errors


@contextlib.contextmanager
def _written(path: Path | None) -> Iterator[IO[str] | None]:
    """The file, in place when it is whole."""
    if path is None:
        yield None
        return
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
            yield file
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _record(verdict: RewardResult | RewardError) -> dict[str, Any]:
    """A score; one that is missing has its reason and no number."""
    if isinstance(verdict, RewardError):
        return {"error": str(verdict)}
    record: dict[str, Any] = {"score": verdict.score, "correct": verdict.correct, "answer": verdict.answer}
    if verdict.over_budget:
        record["over_budget"] = verdict.over_budget
    return record | {name: dict(part) for name, part in (("parts", verdict.parts), ("notes", verdict.notes)) if part}


def _host(model: str, engine: JudgeEngine, most: int, pictures: bool) -> HostedModel:
    """Hosts a judge in this process."""
    from roll.distributed.strategy.generation.alone import HostedGenerator

    return HostedGenerator(model, engine, most, pictures)
