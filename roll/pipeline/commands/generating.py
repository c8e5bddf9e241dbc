"""``roll generate``: prompts in, responses out, in the same order; continues where it was interrupted."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.configs.data import DataArguments
from roll.configs.worker import WorkerConfig
from roll.data.files import DataError, Problems, Row, Unreadable, find_files
from roll.data.questions import Question, read_questions
from roll.pipeline.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from roll.pipeline.commands.progress import progress
from roll.tracking.checkpointer import CheckpointError, find_saved
from roll.tracking.run import to_json, write_atomic
from roll.utils.hashing import checksum_of
from roll.utils.threads import in_order

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from roll.data.requests import Completion
    from roll.rollout.answering import Answerer

AHEAD = 4
"""Requests that are under way or wait for a slower one before them, in multiples of those that run at once."""


@dataclass(frozen=True)
class Job:
    """Prompts to answer, and the model and settings to do it with."""

    model: str
    """A folder, see ``find_saved``, or a name on the hub."""
    files: Sequence[str]
    output: Path
    worker: WorkerConfig
    num_answers: int = 1
    prompt_key: str | None = None
    answer_key: str = "answers"
    images: DataArguments = field(default_factory=DataArguments)
    """Where pictures of rows may be."""
    system: str | None = None
    chats: bool = False
    """Texts are asked as messages."""
    sequence_length: int | None = None
    max_running_requests: int = 128
    seed: int = 42
    overwrite: bool = False

    @property
    def notes(self) -> Path:
        """The file beside the answers that says how they were made."""
        return self.output.with_name(f"{self.output.name}.settings.json")

    def settings(self) -> dict[str, Any]:
        """All that the answers depend on."""
        problems = Problems()
        files = {str(path): checksum_of(path) for path in find_files(self.files, problems)}
        problems.raise_any()
        names = (
            "model",
            "num_answers",
            "prompt_key",
            "answer_key",
            "system",
            "chats",
            "sequence_length",
            "seed",
        )
        parts = {"model_args", "generating_args", "strategy_args", "data_args"}
        section = self.worker.model_dump(mode="json", include=parts, exclude_defaults=True)
        images = self.images.model_dump(exclude_defaults=True)
        return {"files": files, **{name: getattr(self, name) for name in names}, **images, "generator": section}


@dataclass
class Totals:
    """Counts of this call, but for what failed."""

    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Time of the answering, without the start."""
    failed: int = 0
    """Answers that there are not, those of earlier calls included."""


def run(job: Job) -> int:
    """Answers the prompts and writes a line for each row.

    Returns:
        0; 1 when some prompt could not be answered, or the engine failed; 2 for a wrong command line, model or file;
        130 when it was interrupted: the same command goes on.
    """
    from roll.distributed.strategy import MissingEngineError
    from roll.distributed.strategy.generation.engine_process import EngineStoppedError

    totals = Totals()
    started = time.monotonic()
    try:
        job = replace(job, model=find_saved(job.model).model)
        total, done = _check(job), _continue(job, totals)
        if done:
            sys.stderr.write(f"{job.output}: {done:,} of {total:,} rows exist\n")
        if done < total:
            _generate(job, total, done, totals)
    except (ValueError, OSError, CheckpointError, MissingEngineError) as error:  # a DataError is a ValueError
        sys.stderr.write(f"roll generate: {error}\n")
        return EXIT_USAGE
    except EngineStoppedError as error:
        sys.stderr.write(f"roll generate: {error}; the same command continues from there\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write(f"stopped after {totals.rows:,} rows; the same command continues\n")
        return EXIT_INTERRUPTED
    seconds = time.monotonic() - started
    failed = f", {totals.failed:,} answers failed" if totals.failed else ""
    speed = f", {totals.tokens / totals.seconds:,.0f} tokens/s without it" if totals.seconds else ""
    words = f"{totals.rows:,} rows, {totals.tokens:,} tokens in {seconds:.1f} s with the start{speed}{failed}"
    sys.stderr.write(f"{job.output}: {words}\n")
    return EXIT_FAILED if totals.failed else EXIT_OK


def _check(job: Job) -> int:
    """Reads all rows once, before a model is loaded.

    Returns:
        How many there are.

    Raises:
        DataError: everything that is wrong in them.
        ValueError: the answers would take the place of a file of prompts.
    """
    problems, total, pictured = Problems(), 0, False
    if job.output.resolve() in [path.resolve() for path in find_files(job.files, Problems())]:
        raise ValueError(f"--output: got {job.output}, a file of prompts, expected another")
    for row, question in _rows(job, problems):
        total += 1
        if question.is_text and job.system is not None and not job.chats:
            problems.add(row.place, "a text, which has no system message; --chat sends it as a message")
        if question.is_text and question.has_pictures and not job.chats:
            problems.add(row.place, "pictures with a text that is continued; --chat sends them as a message")
        pictured |= question.has_pictures
    problems.raise_any()
    if pictured:
        _check_pictures(job)
    if not total:
        raise DataError([f"{', '.join(job.files)}: no rows"])
    return total


def _check_pictures(job: Job) -> None:
    """Fetches those at addresses, and decodes every picture once.

    Raises:
        DataError: those that cannot be used.
        ValueError: the model or the engine takes none.
    """
    from roll.data.row_pictures import fetch, sources_in, with_items
    from roll.distributed.strategy.generation.alone import local_pictures

    pictures, why = local_pictures(job.model, job.worker, _tokenizer(job))
    if pictures is None:
        raise ValueError(f"{', '.join(job.files)}: there are pictures, but {why}")
    problems, rows = Problems(), _rows(job, Problems())
    fetch(((row.place, source) for row, question in rows for source in sources_in(question.messages)), problems)
    problems.raise_any()
    for row, question in _rows(job, Problems()):
        try:
            with_items(question.messages, pictures, blank=True)
        except ValueError as error:  # a PictureError
            problems.add(row.place, str(error))
    problems.raise_any()


def _tokenizer(job: Job) -> PreTrainedTokenizerBase:
    from roll.distributed.strategy.generation.alone import base_of
    from roll.models.tokenizer import load_tokenizer

    return load_tokenizer(base_of(job.model)[0], trust_remote_code=job.worker.model_args.trust_remote_code)


def _rows(job: Job, problems: Problems) -> Iterator[tuple[Row, Question]]:
    keys: dict[str, Any] = {"system": job.system, "without": job.answer_key, "images": job.images}
    return read_questions(job.files, job.prompt_key, problems, **keys)


def _continue(job: Job, totals: Totals) -> int:
    """Rows that an earlier call has answered; a line that it could not finish is removed.

    Raises:
        ValueError: it was called with other settings.
    """
    settings = json.loads(to_json(job.settings()))
    if job.output.exists() and job.output.stat().st_size and not job.overwrite:
        if not job.notes.is_file():
            raise ValueError(f"{job.output} exists already; expected another --output, or --overwrite")
        before = json.loads(job.notes.read_text(encoding="utf-8"))
        other = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
        if other:
            raise ValueError(
                f"{job.output} was begun with another {', '.join(other)} (see {job.notes}); expected the same, another "
                "--output, or --overwrite"
            )
        return _whole_lines(job, totals)
    job.output.parent.mkdir(parents=True, exist_ok=True)
    job.output.write_bytes(b"")
    write_atomic(job.notes, to_json(settings, indent=2) + "\n")
    return 0


def _whole_lines(job: Job, totals: Totals) -> int:
    count, end = 0, 0
    with job.output.open("rb+") as file:
        for line in file:
            if line.endswith(b"\n"):
                count, end = count + 1, end + len(line)
                totals.failed += sum("error" in answer for answer in json.loads(line)[job.answer_key])
        file.truncate(end)
    return count


def _generate(job: Job, total: int, done: int, totals: Totals) -> None:
    from roll.data.renderer import ChatRenderer
    from roll.data.requests import sampling_params
    from roll.data.templates import ChatTemplate
    from roll.distributed.strategy.generation.alone import local_generator, local_pictures
    from roll.rollout.answering import Answerer

    worker, tokenizer = job.worker, _tokenizer(job)
    pictures = None
    if any(question.has_pictures for _, question in _rows(job, Problems())):
        pictures, _ = local_pictures(job.model, worker, tokenizer)
    try:
        renderer = ChatRenderer(tokenizer, ChatTemplate.of(worker.data_args), pictures)
    except ValueError as error:
        if job.chats or any(not question.is_text for _, question in _rows(job, Problems())):
            raise ValueError(f"{error}; there are messages to render") from error
        renderer = None
    else:
        if not job.chats and any(question.is_text for _, question in itertools.islice(_rows(job, Problems()), 1)):
            sys.stderr.write(
                "the prompts are texts, which the model continues as they are; --chat sends them as messages\n"
            )
    if not sys.stderr.isatty():
        sys.stderr.write(f"loading {job.model}, to answer {total - done:,} of {total:,} rows\n")
    engine = local_generator(
        job.model,
        worker,
        sequence_length=job.sequence_length,
        max_running_requests=job.max_running_requests,
        seed=job.seed,
        pictures=pictures is not None,
    )
    with engine as generator:
        params = sampling_params(worker.generating_args)
        answerer = Answerer(generator.generate, tokenizer, renderer, params, job.num_answers, job.seed, job.chats)
        asyncio.run(_write(job, answerer, total, done, totals))


async def _write(job: Job, answerer: Answerer, total: int, done: int, totals: Totals) -> None:
    rows = itertools.islice(enumerate(_rows(job, Problems())), done, None)

    async def work(item: tuple[int, tuple[Row, Question]]) -> Sequence[Completion | ValueError]:
        index, (_, question) = item
        return await answerer.answer(index, question)

    window = max(1, AHEAD * job.max_running_requests // job.num_answers)
    started = time.monotonic()
    with (
        job.output.open("a", encoding="utf-8", errors="backslashreplace") as file,
        progress("rows answered", total, done) as advance,
    ):
        async with contextlib.aclosing(in_order(rows, work, window)) as results:
            async for (_, (row, _)), completions in results:
                said = [_record(answerer, completion) for completion in completions]
                file.write(to_json({**_saved(row.values), job.answer_key: said}) + "\n")
                file.flush()
                totals.rows += 1
                totals.seconds = time.monotonic() - started
                totals.tokens += sum(answer.get("num_tokens", 0) for answer in said)
                totals.failed += sum("error" in answer for answer in said)
                failed = f", {totals.failed:,} failed" if totals.failed else ""
                advance(f"{totals.tokens / totals.seconds:,.0f} tokens/s{failed}")


def _saved(value: Any) -> Any:
    """A row's value in JSON: bytes of pictures are base64."""
    if isinstance(value, Unreadable):
        return _saved(value.value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return {str(key): _saved(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_saved(entry) for entry in value]
    return value if isinstance(value, str | int | float | None) else str(value)


def _record(answerer: Answerer, completion: Completion | ValueError) -> dict[str, Any]:
    """An answer; one that is missing has its reason and no text."""
    if isinstance(completion, ValueError):
        return {"error": str(completion)}
    return {
        "text": answerer.text(completion),
        "finish_reason": completion.finish_reason,
        "num_tokens": len(completion.token_ids),
    }
