"""``roll chat``: a conversation with a saved model, on a terminal or through pipes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from roll.configs.worker import WorkerConfig
from roll.pipeline.cli import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from roll.tracking.checkpointer import CheckpointError, find_saved

if TYPE_CHECKING:
    from roll.data.columns import Item
    from roll.data.pictures import Pictures
    from roll.rollout.answering import Conversation, StreamingEngine

HELP = (
    "/image FILE puts a picture into the next message, /reset starts over, /quit ends (so does the end of the input), "
    "Ctrl-C stops a response\n"
)


def run(path: str, worker: WorkerConfig, system: str | None, sequence_length: int | None, seed: int) -> int:
    """Answers line by line until ``/quit`` or the end of the input; 2 for a model that cannot be talked with."""
    from roll.data.renderer import ChatRenderer
    from roll.data.requests import sampling_params
    from roll.data.templates import ChatTemplate
    from roll.distributed.strategy.generation.alone import base_of, local_generator, local_pictures
    from roll.models.tokenizer import load_tokenizer
    from roll.rollout.answering import Conversation

    try:
        model = find_saved(path).model
        tokenizer = load_tokenizer(base_of(model)[0], trust_remote_code=worker.model_args.trust_remote_code)
        pictures, why = local_pictures(model, worker, tokenizer)
        renderer = ChatRenderer(tokenizer, ChatTemplate.of(worker.data_args), pictures)
        engine = local_generator(
            model,
            worker,
            sequence_length=sequence_length,
            max_running_requests=1,
            seed=seed,
            pictures=pictures is not None,
        )
        with engine as generator:
            params = sampling_params(worker.generating_args)
            streaming = cast("StreamingEngine", generator)
            _talk(Conversation(streaming, renderer, params, system, seed), pictures, why)
    except (CheckpointError, ValueError, OSError) as error:
        sys.stderr.write(f"roll chat: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_OK


def _talk(conversation: Conversation, pictures: Pictures | None, why: str) -> None:
    """Answers line by line.

    Args:
        why: there is no picture processor.
    """
    shown: list[Item] = []
    if sys.stdin.isatty():
        sys.stderr.write(HELP)
    for line in _lines():
        words = line.strip()
        if words == "/quit":
            return
        if words == "/reset":
            conversation.reset()
            shown.clear()
        elif words.split(maxsplit=1)[:1] == ["/image"]:
            try:
                shown.append(_picture(words, pictures, why))
            except ValueError as error:
                sys.stderr.write(f"{error}\n")
        elif words.startswith("/"):
            sys.stderr.write(f"{words}: no such command; {HELP}")
        elif words:
            try:
                asyncio.run(_answer(conversation, words, shown))
            except KeyboardInterrupt:  # it stops the answer, not the conversation
                sys.stdout.write("\n")
            except ValueError as error:
                sys.stderr.write(f"{error}; /reset starts over\n")
            shown.clear()


def _picture(words: str, pictures: Pictures | None, why: str) -> Item:
    """The picture of a line.

    Raises:
        ValueError: there is none, or it cannot be used.
    """
    _, _, file = words.partition(" ")
    if pictures is None:
        raise ValueError(f"/image: no pictures, {why}")
    if not file.strip():
        raise ValueError("/image: no file, expected /image FILE")
    item = pictures.item(Path(file.strip()).expanduser(), file.strip())
    high, wide, _ = item.data.shape
    sys.stderr.write(f"{file.strip()}: {wide} x {high} pixels, {len(pictures.ids(item))} tokens\n")
    return item


def _lines() -> Iterator[str]:
    """Lines that are typed, with a prompt and the line editing of a terminal; or those of a pipe."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # else a byte that is no UTF-8 ends the conversation
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # input() edits lines where it is there
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("> ")
    sys.stdout.write("\n")


async def _answer(conversation: Conversation, words: str, shown: Sequence[Item]) -> None:
    async with contextlib.aclosing(conversation.answer(words, shown)) as pieces:
        async for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
