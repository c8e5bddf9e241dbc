"""Tools of an episode: the calls of a turn run at the same time, each with a time limit; other turns act as usual.

Results are cut to a number of tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from roll.agentic.env.base import Observation, StepResult
from roll.agentic.tools.dialects import dialect_for
from roll.agentic.tools.mcp import McpServer
from roll.agentic.tools.tool import AssistantTurn, Tool, ToolCall, ToolError, ToolSchema, content_of, make_tool, text_of
from roll.configs.schema import nearest
from roll.configs.tools import McpServerConfig, ToolConfig, ToolsConfig
from roll.data.pictures import PictureError
from roll.data.renderer import CHARS_PER_TOKEN, ChatRenderer, Message
from roll.data.requests import Completion, FinishReason, GenerateFn, GenerateRequest
from roll.data.tool_messages import Content, joined
from roll.rollout.call_threads import CallThreads, CallTimeoutError
from roll.rollout.env_manager import SAID, TOOL_TURNS, AsyncEnv
from roll.rollout.errors import EnvError, contained
from roll.rollout.tool_process import ProcessTool, ToolProcessError
from roll.rollout.types import Frame
from roll.utils.foreign import Fault, describe_error
from roll.utils.threads import time_limit

logger = logging.getLogger(__name__)

_Entry: TypeAlias = tuple[Tool, ToolConfig | McpServerConfig]


@dataclass(frozen=True)
class Answers:
    """Results of the calls of a turn."""

    messages: list[dict[str, Any]]
    """OpenAI's, in the order of the calls; those to malformed calls last, not more than there may be calls and one."""
    counts: Counter[str]
    """``tool_calls``, of them ``failed_calls`` and ``call_timeouts``; ``malformed_calls``."""


class ToolBox:
    """The tools of one process, for all of its episodes.

    Args:
        threads: where tools run that are no coroutine functions.
    """

    def __init__(self, config: ToolsConfig, renderer: ChatRenderer, threads: CallThreads) -> None:
        self.config = config
        self.dialect = dialect_for(config.dialect, renderer)
        self._renderer = renderer
        if config.pictures and not renderer.shows_results:
            raise ValueError("tools.pictures: got true, but the policy or its chat template shows none in results")
        self._threads = threads
        self._tools: dict[str, _Entry] | None = None
        self._opened = contextlib.AsyncExitStack()
        self._lock = asyncio.Lock()

    async def schemas(self, tag: str) -> list[ToolSchema]:
        """Tools that the policy is told of in an episode of that tag; the first call makes them.

        Raises:
            ValueError: a tool cannot be made.
        """
        async with self._lock:
            if self._tools is None:
                async with contextlib.AsyncExitStack() as opened:
                    self._tools = await make_tools(self.config, opened)
                    self._opened = opened.pop_all()
        return _told(self._tools, tag)

    async def equip(self, env: AsyncEnv, tag: str, generate: GenerateFn) -> tuple[AsyncEnv, GenerateFn]:
        """An episode's environment and its way to the engine, with the tools that its tag has.

        Raises:
            EnvError: a tool cannot be made, or a server of tools not be reached.
        """
        if not self.config.reaches(tag):
            return env, generate
        try:
            schemas = await self.schemas(tag)
        except ValueError as error:
            raise EnvError(str(error)) from error
        tools = ToolEnv(env, self, schemas)
        return tools, tools.watch(generate)

    async def close(self) -> None:
        """Ends what the tools hold."""
        await self._opened.aclose()

    def parse(self, completion: Completion, schemas: Sequence[ToolSchema]) -> AssistantTurn:
        """Reads what was sampled in the model's dialect."""
        stopped = completion.finish_reason is FinishReason.STOP
        return self.dialect.parse(self._renderer.decode_raw(completion.token_ids, stopped=stopped), schemas)

    def message(self, turn: AssistantTurn, text: str) -> Message:
        """A turn as a history has it: words and calls where the template can write them as the model does."""
        written = self._renderer.writes_calls or self.dialect.name == "hermes"
        return turn.as_openai() if written and not turn.errors else {"role": "assistant", "content": text}

    async def answer(self, turn: AssistantTurn, names: Sequence[str], states: dict[str, dict[str, Any]]) -> Answers:
        """Runs the calls of a turn side by side."""
        limit = self.config.max_parallel_calls
        counts = Counter(tool_calls=len(turn.calls), malformed_calls=len(turn.errors))
        tasks = [self._answer(call, names, states, counts) for call in turn.calls[:limit]]
        results = list(await asyncio.gather(*tasks))
        results += [f"error: not run, a turn may have at most {limit} calls"] * (len(turn.calls) - len(results))
        counts["failed_calls"] += max(0, len(turn.calls) - limit)
        messages = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": self._cut(content)}
            for call, content in zip(turn.calls, results, strict=True)
        ]
        errors = [self.dialect.error_text(error) for error in turn.errors[:limit]]
        if (left := len(turn.errors) - limit) > 0:
            errors.append(f"error: {left} more malformed calls, a turn may have at most {limit}")
        messages += [{"role": "tool", "content": self.cut(text)} for text in errors]
        return Answers(messages, counts)

    async def _answer(
        self, call: ToolCall, names: Sequence[str], states: dict[str, dict[str, Any]], counts: Counter[str]
    ) -> Content:
        if call.name not in names:
            counts["failed_calls"] += 1
            near = nearest(call.name, names)
            hint = f"; did you mean {near}?" if near else ""
            return f"error: there is no tool {call.name!r}, expected one of: {', '.join(names)}{hint}"
        assert self._tools is not None, "schemas"
        tool, entry = self._tools[call.name]
        state = states.setdefault(call.name, {})
        for attempt in range(1 + entry.retries):
            with Fault() as fault:
                content = content_of(await self._run(tool, entry, dict(call.arguments), state))
                return content if isinstance(content, str) else await self._shown(content, entry)
            error = fault.error
            assert error is not None, "else it has returned"
            if isinstance(error, ToolError):
                counts["failed_calls"] += 1
                return f"error: {text_of(str(error))}"
            if isinstance(error, CallTimeoutError):
                counts["failed_calls"] += 1
                counts["call_timeouts"] += 1
                logger.warning("tool %s took longer than %g s", call.name, entry.timeout)
                return f"error: {call.name} took longer than {entry.timeout:g} s"
            own = isinstance(error, ToolProcessError | PictureError)
            words = text_of(str(error)) if own else describe_error(error)
            logger.warning("tool %s raised %s", call.name, words)
            if attempt == entry.retries:
                counts["failed_calls"] += 1
                return f"error: {words}"
        raise AssertionError("unreachable")

    async def _shown(self, content: Content, entry: ToolConfig | McpServerConfig) -> Content:
        """A result with its pictures as the policy gets them.

        Raises:
            PictureError: one cannot be used, or the policy gets none.
        """
        assert not isinstance(content, str)
        if not self.config.pictures and isinstance(entry, McpServerConfig):
            return "".join(part.get("text", "[image]") for part in content)
        pictures = self._renderer.pictures
        if not self.config.pictures or pictures is None:
            raise PictureError("it returned a picture, which the policy cannot see (tools.pictures: false)")
        make = pictures.item
        return await asyncio.to_thread(
            lambda: [{**part, "image": make(part["image"])} if part["type"] == "image" else part for part in content]
        )

    async def _run(
        self, tool: Tool, entry: ToolConfig | McpServerConfig, arguments: dict[str, Any], state: dict[str, Any]
    ) -> Any:
        if tool.times_itself:
            try:
                return await tool.call(arguments, state)
            except TimeoutError as error:
                raise CallTimeoutError from error
        if tool.instant or inspect.iscoroutinefunction(tool.call):
            with contained():
                result = tool.call(arguments, state)
        else:
            mailbox = self._threads.mailbox()
            try:
                result = await mailbox.run("call", lambda: tool.call(arguments, state), entry.timeout)
            finally:
                mailbox.close(lambda: None)
        if inspect.isawaitable(result):
            try:
                async with time_limit(entry.timeout) as limit:
                    with contained():
                        return await result
            except TimeoutError as error:
                if limit.expired():
                    raise CallTimeoutError from error
                raise  # the tool's own
        return result

    def _cut(self, content: Content) -> Content:
        """A result whose texts are cut."""
        if isinstance(content, str):
            return self.cut(content)
        return [{**part, "text": self.cut(part["text"])} if part["type"] == "text" else part for part in content]

    def cut(self, text: str) -> str:
        """The text in at most ``max_tool_response_tokens``, with a note where more was left out."""
        limit, side = self.config.max_tool_response_tokens, self.config.tool_response_truncate_side
        kept = limit * CHARS_PER_TOKEN
        long = len(text) > 2 * kept
        parts = [text[:kept], text[-kept:]] if long else [text]
        ids = [self._renderer.words(part) for part in parts]
        if not long and len(ids[0]) <= limit:
            return text
        first, last = ids[0], ids[-1]
        tail = {"left": limit, "middle": limit // 2, "right": 0}[side]
        head = limit - tail
        left_out = "much" if long else f"{len(first) - limit} tokens"
        decode = self._renderer.decode
        return f"{decode(first[:head])}\n[{left_out} left out]\n{decode(last[len(last) - tail :])}".strip()


def told_tools(config: ToolsConfig | None, tags: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """Tools that prompts of each tag tell of, as chat templates take them.

    Raises:
        ValueError: a tool cannot be made.
    """
    if config is None:
        return {}

    async def look() -> dict[str, _Entry]:
        async with contextlib.AsyncExitStack() as opened:
            return await make_tools(config, opened)

    tools = asyncio.run(look())
    return {tag: [schema.as_openai() for schema in _told(tools, tag)] for tag in tags}


async def make_tools(config: ToolsConfig, opened: contextlib.AsyncExitStack) -> dict[str, _Entry]:
    """The tools by name.

    Args:
        opened: ends what the tools hold when it is closed.

    Raises:
        ValueError: a tool cannot be made, or two have the same name.
    """
    made: dict[str, _Entry] = {}
    for name, entry in config.use.items():
        try:
            tool = make_tool(name, entry.tool, entry.args)
        except Exception as error:  # a user's class may raise anything
            raise ValueError(f"tools.use.{name}: {describe_error(error)}") from error
        if entry.isolation == "process":
            most = 2 * CHARS_PER_TOKEN * config.max_tool_response_tokens
            tool = ProcessTool(name, entry, tool, most, pictures=config.pictures)
            opened.push_async_callback(tool.close)
        made[name] = tool, entry
    for name, settings in config.servers.items():
        server = McpServer(name, settings)
        opened.push_async_callback(server.close)
        for offered, tool in (await server.tools()).items():
            if offered in made:
                raise ValueError(f"tools.servers.{name}: {offered} is the name of another tool; see only")
            made[offered] = tool, settings
    return made


def _told(tools: Mapping[str, _Entry], tag: str) -> list[ToolSchema]:
    return [tool.schema for tool, entry in tools.values() if entry.tags is None or tag in entry.tags]


COUNTS = ("tool_calls", "failed_calls", "call_timeouts", "malformed_calls")
"""Keys of a step's ``info``: what the episode has called so far."""


class ToolEnv:
    """An environment or a prompt with tools (an ``AsyncEnv``), for one episode."""

    def __init__(self, env: AsyncEnv, box: ToolBox, schemas: Sequence[ToolSchema]) -> None:
        self._env = env
        self._box = box
        self._schemas = schemas
        self._names = [schema.name for schema in schemas]
        self._states: dict[str, dict[str, Any]] = {}
        self._counts: Counter[str] = Counter()
        self._turns = 0
        self._completion: Completion | None = None
        self._info: dict[str, Any] = {}

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Tools as the chat template is told of them."""
        return [schema.as_openai() for schema in self._schemas]

    def watch(self, generate: GenerateFn) -> GenerateFn:
        """The same ``generate``, noting what was sampled: calls are read with the special tokens, which texts lack."""

        async def watched(request: GenerateRequest) -> Completion:
            self._completion = await generate(request)
            return self._completion

        return watched

    async def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        observation, self._info = await self._env.reset(seed)
        return observation, self._info | {"tools": self.tools}

    async def step(self, text: str) -> StepResult:
        """Answers a turn; ``info["messages"]`` is what the tools say, where they were called."""
        assert self._completion is not None, "watch"
        turn = self._box.parse(self._completion, self._schemas)
        penalty = self._box.config.malformed_call_penalty * len(turn.errors)
        if (turn.calls or turn.errors) and self._turns < self._box.config.max_turns:
            self._turns += 1
            return await self._answer(turn, text, penalty)
        said = {SAID: self._box.message(turn, text), "tools": self.tools}
        self._counts["malformed_calls"] += len(turn.errors)
        observation, reward, terminated, truncated, info = await self._env.step(text)
        self._info = info
        info = info | self._counts_so_far() | {"penalty": float(info.get("penalty", 0.0)) + penalty}
        info.setdefault("task_reward", float(reward) - float(self._info.get("penalty", 0.0)))
        return observation, float(reward) + penalty, terminated, truncated, info | said

    async def render(self) -> Frame | None:
        return await self._env.render()

    async def _answer(self, turn: AssistantTurn, text: str, penalty: float) -> StepResult:
        answers = await self._box.answer(turn, self._names, self._states)
        self._counts.update(answers.counts)
        info = {
            **self._info,
            **self._counts_so_far(),
            "messages": answers.messages,
            SAID: self._box.message(turn, text),
            "tools": self.tools,
            "action": ", ".join(call.name for call in turn.calls) or None,
            "task_reward": 0.0,
            "penalty": penalty,
            "success": False,
        }
        said = [part for message in answers.messages for part in ("\n", message["content"])]
        return joined(*said[1:]), penalty, False, False, info

    def _counts_so_far(self) -> dict[str, int]:
        return {name: self._counts[name] for name in COUNTS} | {TOOL_TURNS: self._turns}
