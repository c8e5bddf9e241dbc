"""``roll serve``: a saved model behind an HTTP endpoint, for public evaluation harnesses and other clients."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from roll.configs.agent import AgentConfig
from roll.configs.worker import WorkerConfig
from roll.pipeline.cli import EXIT_FAILED, EXIT_OK, EXIT_USAGE
from roll.tracking.checkpointer import CheckpointError, find_saved

if TYPE_CHECKING:
    from roll.data.requests import Completion, GenerateFn, GenerateRequest
    from roll.rollout.endpoint.session import Policy

MOST_CHOICES = 128
"""``n`` of a request."""


@dataclass(frozen=True)
class Job:
    """What is served, and how."""

    model: str
    worker: WorkerConfig
    port: int
    dialect: str
    """Tool calls: a name, or ``auto``."""
    sequence_length: int | None
    """Longest prompt plus answer; ``None``: the model's, to 8192."""
    answer_length: int | None
    """Most tokens of an answer, whatever a request says; ``None``: those that its prompt leaves."""
    max_running_requests: int
    seed: int


def run(job: Job) -> int:
    """Serves until SIGINT or SIGTERM; returns 2 for a model or a port that cannot be had."""
    from roll.agentic.tools.dialects import dialect_for
    from roll.data.renderer import ChatRenderer
    from roll.data.templates import ChatTemplate
    from roll.distributed.strategy.generation.alone import base_of, local_generator, local_pictures
    from roll.models.tokenizer import load_tokenizer
    from roll.rollout.endpoint.errors import PortTakenError
    from roll.rollout.endpoint.session import Policy
    from roll.rollout.env_manager import LengthLimits

    worker = job.worker
    try:
        model = find_saved(job.model).model
        tokenizer = load_tokenizer(base_of(model)[0], trust_remote_code=worker.model_args.trust_remote_code)
        pictures, why = local_pictures(model, worker, tokenizer)
        renderer = ChatRenderer(tokenizer, ChatTemplate.of(worker.data_args), pictures)
        dialect = dialect_for(job.dialect, renderer, default="hermes")
        engine = local_generator(
            model,
            worker,
            sequence_length=job.sequence_length,
            max_running_requests=job.max_running_requests,
            seed=job.seed,
            pictures=pictures is not None,
        )
        with engine as generator:
            length = generator.context.sequence_length
            policy = Policy(renderer, dialect, LengthLimits(length, length))
            return asyncio.run(_serve(job, policy, generator.generate, why))
    except PortTakenError:
        sys.stderr.write(f"roll serve: --port: got {job.port}, expected a free port of 127.0.0.1, or 0 for any\n")
        return EXIT_USAGE
    except (CheckpointError, ValueError, OSError) as error:
        sys.stderr.write(f"roll serve: {error}\n")
        return EXIT_USAGE


async def _serve(job: Job, policy: Policy, generate: GenerateFn, no_pictures: str) -> int:
    """Answers until a signal comes, or the engine fails.

    Args:
        no_pictures: why requests may have none; empty: they may.
    """
    from roll.data.requests import sampling_params
    from roll.rollout.endpoint.server import Endpoint
    from roll.rollout.endpoint.session import Session, Wanted
    from roll.rollout.env_manager import EpisodeSpec
    from roll.utils.foreign import describe_error
    from roll.utils.hashing import derive_seed

    class OneRequest(Session):
        """A session that ends with its request; ``seed`` of a request means the same in each."""

        def _seed(self, prompt: bytes, wanted: Wanted, index: int) -> int:
            if wanted.seed is None:
                return super()._seed(prompt, wanted, index)
            return derive_seed(job.seed, prompt.hex(), "seed", wanted.seed, index)

    answers = tokens = 0

    async def counted(request: GenerateRequest) -> Completion:
        nonlocal answers, tokens
        completion = await generate(request)
        answers, tokens = answers + 1, tokens + len(completion.token_ids)
        return completion

    config = AgentConfig(sampling="request", max_calls=MOST_CHOICES, max_parallel_requests=MOST_CHOICES)
    params = sampling_params(job.worker.generating_args)
    if job.answer_length is None:
        params = replace(params, max_new_tokens=policy.limits.sequence_length)
    numbers, ended = count(), asyncio.get_running_loop().create_future()

    def end(error: BaseException | None = None) -> None:
        if not ended.done():
            ended.set_result(error)

    def failed(failure: asyncio.Future[None]) -> None:
        if not failure.cancelled():
            end(failure.exception())

    def fresh() -> Session:
        number = next(numbers)
        episode = EpisodeSpec("serve", number, 0, env_seed=job.seed, sampling_seed=derive_seed(job.seed, number))
        session = OneRequest(config, policy, counted, params, episode)
        session.failure.add_done_callback(failed)
        return session

    endpoint = Endpoint(job.port, fresh)
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # on Windows Ctrl-C is a KeyboardInterrupt
            asyncio.get_running_loop().add_signal_handler(number, end)
    await endpoint.start()
    sys.stderr.write(
        f"{job.model} answers at {endpoint.url}, {policy.limits.sequence_length} tokens of prompt and answer at most, "
        f"{f'no pictures ({no_pictures})' if no_pictures else 'pictures too'}; Ctrl-C ends it\n"
    )
    error = await ended
    await endpoint.stop()
    sys.stderr.write(f"{answers:,} answers of {tokens:,} tokens\n")
    if error is not None:
        sys.stderr.write(f"roll serve: the engine failed: {describe_error(error)}\n")
        return EXIT_FAILED
    return EXIT_OK
