"""Agent programs for runs of the real pipeline, and workers that log what is sampled and trained; without torch."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import openai
from PIL import Image

from roll.pipeline.workers import InferWorker, TrainWorker
from roll.rollout.agents.task import AgentTask
from roll.rollout.router import Outcomes
from tests.support.faults import folder, log

if TYPE_CHECKING:
    from roll.data.batch import Batch
    from roll.data.requests import GenerateRequest
    from roll.distributed.strategy.base import Metrics


class LoggedInferWorker(InferWorker):
    """Logs in ``sampled.jsonl`` what each request was given and what was sampled for it."""

    async def submit(self, client_id: str, requests: Sequence[GenerateRequest]) -> None:
        self.prompts: dict[str, list[int]] = getattr(self, "prompts", {})
        self.prompts |= {request.request_id: request.prompt_ids.tolist() for request in requests}
        await super().submit(client_id, requests)

    async def poll(self, client_id: str) -> Outcomes:
        outcomes = await super().poll(client_id)
        for completion in outcomes.completions:
            log(
                "sampled.jsonl",
                prompt=self.prompts.pop(completion.request_id),
                ids=completion.token_ids.tolist(),
                logprobs=completion.logprobs.tolist(),
                versions=completion.versions.tolist(),
            )
        return outcomes


class LoggedTrainWorker(TrainWorker):
    """Logs in ``trained.jsonl`` the rows that it is given."""

    def train(self, batch: Batch, optimizer_steps: Sequence[Sequence[int]]) -> list[Metrics]:
        assert batch.rollout_logprobs_T is not None
        start = 0
        for length in batch.lengths_B.tolist():
            row = slice(start, start + length)
            log(
                "trained.jsonl",
                ids=batch.tokens_T[row].tolist(),
                mask=batch.loss_mask_T[row].tolist(),
                logprobs=batch.rollout_logprobs_T[row].tolist(),
            )
            start += length
        return super().train(batch, optimizer_steps)


def policy_of(task: AgentTask) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)


async def ask(policy: openai.AsyncOpenAI, messages: list[Any], **keys: Any) -> Any:
    """The message that answers a conversation."""
    answer = await policy.chat.completions.create(model="any", messages=messages, **keys)
    return answer.choices[0].message


async def two_turns(task: AgentTask) -> str:
    """Asks, asks on, and has a helper of its own asked at the same time."""
    messages: list[Any] = list(task.messages)
    async with policy_of(task) as policy:
        first, _ = await asyncio.gather(
            ask(policy, messages, max_tokens=3), ask(policy, [{"role": "system", "content": "help"}, *messages])
        )
        last = await ask(policy, [*messages, first, {"role": "user", "content": "more"}])
        return last.content or first.content or ""


async def looking(task: AgentTask) -> str:
    """Asks about the pictures of the task, shows them again, and then one of them with other pixels."""
    messages: list[Any] = list(task.messages)
    async with policy_of(task) as policy:
        for shown in (messages[-1]["content"], "more"):
            messages += [await ask(policy, messages, max_tokens=3), {"role": "user", "content": shown}]
        data = base64.b64decode(messages[0]["content"][0]["image_url"]["url"].partition(",")[2])
        buffer = io.BytesIO()
        Image.open(io.BytesIO(data)).convert("L").save(buffer, "PNG")
        grey = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        changed = [{"type": "image_url", "image_url": {"url": grey}}, *messages[0]["content"][1:]]
        messages[0] = {"role": "user", "content": changed}
        last = await ask(policy, messages, max_tokens=3)
    return last.content or ""


async def counting(task: AgentTask) -> None:
    """Plays the environment ``CountingEnv`` to its end, an answer a step."""
    messages: list[Any] = list(task.messages)
    async with policy_of(task) as policy:
        ended = False
        while not ended:
            answer = await ask(policy, messages)
            step: Any = await policy.post("/step", cast_to=object, body={"action": answer.content})
            ended = step["terminated"] or step["truncated"]
            messages += [answer, {"role": "user", "content": step["observation"]}]


async def unreliable(task: AgentTask) -> str:
    """Fails once for one of the tasks, and always for another."""
    number = int(task.prompt.split()[-1])
    mark = folder() / f"tried-{number}"
    if number == 1 or (number == 2 and not mark.exists()):
        mark.touch()
        raise ConnectionError("the browser went away")
    return await two_turns(task)
