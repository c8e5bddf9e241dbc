"""``roll chat``: a conversation with a saved model, on a terminal or through pipes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from roll.configs.worker import WorkerConfig
from roll.pipeline.cli import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from roll.tracking.checkpointer import find_saved
from roll.tracking.files import CheckpointError

if TYPE_CHECKING:
    from roll.rollout.answering import Conversation, StreamingEngine

HELP = "/reset starts over, /quit ends (so does the end of the input), Ctrl-C stops a response\n"


def run(path: str, worker: WorkerConfig, system: str | None, sequence_length: int | None, seed: int) -> int:
    """Answers line by line until ``/quit`` or the end of the input; 2 for a model that cannot be talked with."""
    from roll.data.renderer import ChatRenderer
    from roll.data.requests import sampling_params
    from roll.data.templates import ChatTemplate
    from roll.distributed.strategy.generation.alone import base_of, local_generator
    from roll.models.tokenizer import load_tokenizer
    from roll.rollout.answering import Conversation

    try:
        model = find_saved(path).model
        tokenizer = load_tokenizer(base_of(model)[0], trust_remote_code=worker.model_args.trust_remote_code)
        renderer = ChatRenderer(tokenizer, ChatTemplate.of(worker.data_args))
        engine = local_generator(model, worker, sequence_length=sequence_length, max_running_requests=1, seed=seed)
        with engine as generator:
            params = sampling_params(worker.generating_args)
            streaming = cast("StreamingEngine", generator)
            _talk(Conversation(streaming, renderer, params, system, seed))
    except (CheckpointError, ValueError, OSError) as error:
        sys.stderr.write(f"roll chat: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_OK


def _talk(conversation: Conversation) -> None:
    if sys.stdin.isatty():
        sys.stderr.write(HELP)
    for line in _lines():
        words = line.strip()
        if words == "/quit":
            return
        if words == "/reset":
            conversation.reset()
        elif words.startswith("/"):
            sys.stderr.write(f"{words}: no such command; {HELP}")
        elif words:
            try:
                asyncio.run(_answer(conversation, words))
            except KeyboardInterrupt:  # it stops the answer, not the conversation
                sys.stdout.write("\n")
            except ValueError as error:
                sys.stderr.write(f"{error}; /reset starts over\n")


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


async def _answer(conversation: Conversation, words: str) -> None:
    async with contextlib.aclosing(conversation.answer(words)) as pieces:
        async for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
