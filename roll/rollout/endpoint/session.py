"""One episode at the endpoint: turns its requests into prompts, and records the responses.

A request repeats the conversation so far. Its longest beginning that ends with an answer of the policy (compared by
meaning: words and calls, arguments as JSON values) is not rendered again: the ids that were sampled are extended
verbatim by what has been said since. What the program has changed is rendered anew and is a row of its own
(``roll.rollout.env_manager``), counted by its reason. So the rows are what the engine saw, whatever the program does.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from roll.agentic.env.base import StepResult
from roll.agentic.tools.dialects import BaseDialect
from roll.agentic.tools.dialects.base import split_reasoning
from roll.agentic.tools.tool import AssistantTurn, ToolCall, ToolSchema, call_id
from roll.configs.agent import AgentConfig
from roll.data.columns import IntArray, Item
from roll.data.identity import digest, identity
from roll.data.pictures import PictureError
from roll.data.renderer import CHARS_PER_TOKEN, ChatRenderer, Message, Tool, TooManyTokensError, items_of
from roll.data.requests import Completion, FinishReason, GenerateFn, GenerateRequest, SamplingParams
from roll.data.row_pictures import replaced, sources_in
from roll.data.tool_messages import in_words
from roll.rollout.endpoint.errors import ApiError, too_long, unsupported
from roll.rollout.endpoint.messages import named_results, picture_refused
from roll.rollout.env_manager import EpisodeAbortedError, EpisodeSpec, LengthLimits, Recorder
from roll.rollout.observations import in_words as shown_in_words
from roll.rollout.tokenization_audit import Conversation
from roll.rollout.types import EpisodeEnd, Turn
from roll.utils.foreign import describe_error
from roll.utils.hashing import derive_seed

_encode = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode


@dataclass(frozen=True)
class Said:
    """A response in its conversation."""

    ids: IntArray
    """Prompt and answer."""
    answer_ids: IntArray


@dataclass(frozen=True)
class Past:
    """The known part of a conversation that a request continues."""

    known: int
    """Messages of it up to the last answer that was sampled so."""
    said: Said | None
    """That answer."""
    rewritten: str | None
    """Part that the program has changed: ``answer``, ``tools``, ``pictures``, or the ``history`` before an answer."""
    key: bytes
    bare_key: bytes
    """Without tools."""
    word_key: bytes
    """With a mark for each picture."""


class History:
    """The conversations of one episode and their responses."""

    def __init__(self) -> None:
        self._said: dict[bytes, Said] = {}
        """By the conversation that an answer ends, tools included."""
        self._seen: set[bytes] = set()
        """Those conversations without their tools, the answers alone, and the conversations that were answered."""
        self._told: set[bytes] = set()
        """Those of ``_said`` with a mark for each picture."""
        self._texts: dict[str, Said] = {}
        """By prompt and answer of plain completions."""

    def recall(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Past:
        """Finds the longest beginning that ends with an answer of the policy, and what has been changed after it."""
        keys = _chain(messages, tools)
        known = next((end for end in range(len(messages), 0, -1) if keys[end] in self._said), 0)
        bare = _chain(messages, ())[-1] if tools else keys[-1]
        words = _chain(in_words(messages), tools)
        rewritten = self._rewritten(messages, keys, words, known)
        return Past(known, self._said.get(keys[known]), rewritten, keys[-1], bare, words[-1])

    def keep(self, past: Past, answer: Message, said: Said) -> None:
        """Remembers an answer of a conversation."""
        meaning = _meaning(answer)
        self._said[_next(past.key, meaning)] = said
        self._told.add(_next(past.word_key, meaning))
        self._seen |= {past.key, _next(past.bare_key, meaning), meaning}

    def recall_text(self, text: str) -> tuple[Said | None, str]:
        """The longest prompt and answer with which a text begins, and the rest of the text."""
        longest = max((known for known in self._texts if text.startswith(known)), key=len, default=None)
        return (None, text) if longest is None else (self._texts[longest], text[len(longest) :])

    def keep_text(self, text: str, said: Said) -> None:
        """Remembers a prompt and its answer, both in the text."""
        self._texts[text] = said

    def _rewritten(
        self, messages: Sequence[Message], keys: Sequence[bytes], words: Sequence[bytes], known: int
    ) -> str | None:
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers or known == answers[-1] + 1:
            return None
        if keys[answers[-1]] in self._seen:
            return "answer"
        if _chain(messages[: answers[-1] + 1], ())[-1] in self._seen:
            return "tools"
        if words[answers[-1] + 1] in self._told:
            return "pictures"
        ours = any(_meaning(messages[index]) in self._seen for index in answers[known:]) or known > 0
        return "history" if ours else None  # else they are examples of the program's own


def _chain(messages: Sequence[Message], tools: Sequence[Tool]) -> list[bytes]:
    """A key of each beginning of a conversation, from none to all of the messages."""
    keys = [hashlib.blake2b(_json(tools), digest_size=16).digest()]
    for message in messages:
        keys.append(_next(keys[-1], _meaning(message)))
    return keys


def _next(key: bytes, meaning: bytes) -> bytes:
    return hashlib.blake2b(key + meaning, digest_size=16).digest()


def _meaning(message: Message) -> bytes:
    """Meaning of a message, without ids, reasoning, and white space around the assistant's words.

    That of a picture are its pixels as the policy gets them.
    """
    role, content = message["role"], message.get("content") or ""
    if not isinstance(content, str):
        content = [part["text"] if part["type"] == "text" else ["picture", part["image"].hash] for part in content]
    calls = [
        [call["function"]["name"], _arguments(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    return _json([role, content.strip() if role == "assistant" and isinstance(content, str) else content, calls])


_MAX_PARSED = 100_000
"""Characters of a call's arguments."""


def _arguments(arguments: str | Mapping[str, Any]) -> Any:
    """The value of arguments, in which 1 and 1.0 are one number; long ones are compared as they are written."""
    if isinstance(arguments, str) and len(arguments) > _MAX_PARSED:
        return arguments
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        return json.loads(text, parse_float=_number)
    except (ValueError, RecursionError):
        return arguments


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _json(value: Any) -> bytes:
    return _encode(value).encode("utf-8", "surrogatepass")


COUNTS = (
    "calls",
    "rows",
    "rewritten",
    "rewritten_answer",
    "rewritten_history",
    "rewritten_tools",
    "rewritten_pictures",
    "tool_calls",
    "malformed_calls",
    "refused",
)
"""Keys of ``Session.counts``; ``refused`` are requests that an error answered."""


_LONG_TEXT = 50_000
"""Characters whose tokens, or whose comparison with what was said, take some milliseconds."""

T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """The sampling settings of a request; ``None``: not given."""

    n: int = 1
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Answer:
    """One response of the policy."""

    turn: AssistantTurn
    """As the program is told it: cut at a stop string."""
    completion: Completion
    prompt_tokens: int
    stop: str | None = None
    """The stop string that ended it."""

    @property
    def finish_reason(self) -> str:
        """``stop``, ``length`` or ``tool_calls``."""
        if self.completion.finish_reason is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.turn.calls else "stop"


@dataclass(frozen=True)
class Policy:
    """What an endpoint's sessions need to call the policy."""

    renderer: ChatRenderer
    dialect: BaseDialect
    limits: LengthLimits


class Session:
    """One episode. It is made and used in one event loop.

    Args:
        params: how answers are sampled; the seed is set for each.
        episode: says whether to be greedy, and the seed.
    """

    def __init__(
        self, config: AgentConfig, policy: Policy, generate: GenerateFn, params: SamplingParams, episode: EpisodeSpec
    ) -> None:
        self.config = config
        self.policy = policy
        self.reward: float | None = None
        """Reward that the program has posted."""
        self.success: bool | None = None
        self.act: Callable[[str], Awaitable[StepResult]] | None = None
        """Steps the episode's environment, if it has one."""
        self.end: EpisodeEnd | None = None
        """The limit that the last request met, if it did."""
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises what ends the episode and is none of the program's business, such as an engine's death."""
        self.failure.add_done_callback(lambda future: future.exception())
        self.receiving = 0
        """Bytes of requests that have begun to arrive."""
        self._cut_short = False
        self._generate = generate
        self._params = params
        self._episode = episode
        self._recorder = Recorder()
        self._history = History()
        self._counts: Counter[str] = Counter()
        self._started = 0
        self._generating_s = 0.0
        self._since = 0.0
        self._running: Counter[asyncio.Task[Any]] = Counter()
        """The answers that each request under way waits for."""
        self._ended = False
        self._asked: Counter[bytes] = Counter()
        self._call_ids: set[str] = set()
        self._items: dict[bytes, Item] = {}
        """The pictures of its requests by the digest of their bytes."""
        self._rows: dict[int, Conversation] = {}
        """Of each row that is a chat, as it was at its last answer."""
        self.conversations: dict[str, tuple[Message, ...]] = {}
        """Up to an answer, by its id, for APIs in which a request names the answer that it goes on from."""

    @property
    def turns(self) -> list[Turn]:
        """Turns that were sampled, in the order in which they were finished."""
        return self._recorder.turns

    @property
    def cut_off(self) -> bool:
        """Tells whether the last request met a limit: one of the episode, or that of an answer's length."""
        return self.end is not None or self._cut_short

    @property
    def generating_s(self) -> float:
        """Seconds in which the program could wait for an answer; engines may stand still between steps."""
        return self._generating_s + (time.monotonic() - self._since if self._running else 0.0)

    @property
    def counts(self) -> dict[str, int]:
        """``COUNTS`` so far."""
        rows = len({turn.row for turn in self.turns})
        return {name: self._counts[name] for name in COUNTS} | {"calls": len(self.turns), "rows": rows}

    def refuse(self, error: ApiError) -> ApiError:
        """Counts a request that an error answers."""
        self._counts["refused"] += 1
        return error

    def fail(self, error: Exception) -> None:
        """Ends the episode with what its program cannot help."""
        if not self.failure.done():
            self.failure.set_exception(error)

    def close(self) -> None:
        """Ends the episode: requests under way are given up, later ones refused."""
        self._ended = True
        for task in self._running:
            task.cancel()

    async def chat(self, messages: Sequence[Message], tools: Sequence[Tool], wanted: Wanted) -> list[Answer]:
        """Answers a conversation.

        Raises:
            ApiError: the request is refused.
        """
        self._admit(wanted.n)
        self._check_text(len(messages))
        messages = await self._shown(named_results(messages))
        length = len(_written(messages, tools))
        past = await self._beside(length, partial(self._history.recall, messages, tools))
        prompt_ids = await self._prompt(messages, tools, past)
        schemas = [_schema(tool) for tool in tools]
        items = items_of(messages)
        completions = await self._sample(prompt_ids, wanted, items)
        if past.rewritten is not None:
            self._counts.update(["rewritten", f"rewritten_{past.rewritten}"])
        answers = []
        for completion in completions:
            turn, stop = self._read(completion, schemas, wanted.stop)
            said = Said(np.concatenate([prompt_ids, completion.token_ids]), completion.token_ids)
            self._history.keep(past, turn.as_openai(), said)
            row = self._record(prompt_ids, completion, shown_in_words(messages[-1].get("content") or ""), turn, items)
            self._rows[row] = Conversation([*messages, turn.as_openai()], tools or None)
            answers.append(Answer(turn, completion, len(prompt_ids), stop))
        return answers

    def conversation_rows(self) -> list[tuple[Conversation, list[Turn]]]:
        """Rows that are chats, with their turns."""
        turns: dict[int, list[Turn]] = {}
        for turn in self.turns:
            turns.setdefault(turn.row, []).append(turn)
        return [(conversation, turns[row]) for row, conversation in self._rows.items()]

    async def complete(self, prompt: str | IntArray, wanted: Wanted) -> list[Answer]:
        """Goes on with a text or token ids.

        A text that begins with an earlier prompt and its answer keeps the ids of both.

        Raises:
            ApiError: the request is refused.
        """
        self._admit(wanted.n)
        prompt_ids = await self._text_prompt(prompt) if isinstance(prompt, str) else prompt
        if not len(prompt_ids):
            raise ApiError(400, "prompt: got no token, expected at least one", code="invalid_value", param="prompt")
        answers = []
        for completion in await self._sample(prompt_ids, wanted):
            whole = self.policy.renderer.decode(completion.token_ids)
            text, stop = _cut(whole, self._stops(wanted.stop))
            turn = AssistantTurn(text)
            if isinstance(prompt, str) and turn.content == whole:
                ids = completion.token_ids
                ended = len(ids) > 0 and not self.policy.renderer.decode(ids[-1:])
                kept = np.concatenate([prompt_ids, ids[: len(ids) - ended]])
                self._history.keep_text(prompt + whole, Said(kept, ids))
            self._rows.pop(self._record(prompt_ids, completion, prompt if isinstance(prompt, str) else "", turn), None)
            answers.append(Answer(turn, completion, len(prompt_ids), stop))
        return answers

    async def _shown(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with items in place of sources; what an earlier request has shown is not decoded again.

        Raises:
            ApiError: the policy's model takes no pictures, or one cannot be used.
        """
        if not (sources := sources_in(messages)):
            return messages
        if (pictures := self.policy.renderer.pictures) is None:
            raise unsupported(sources[0].place, "a picture", "text: the policy takes no pictures")
        keys = [digest(source.found) for source in sources]
        for key, source in zip(keys, sources, strict=True):
            if key not in self._items:
                try:
                    # In a thread whatever its size: a small file may hold many pixels.
                    self._items[key] = await self._beside(_LONG_TEXT, partial(pictures.item, source))
                except PictureError as error:
                    raise picture_refused(error) from error
        found = iter(keys)
        return replaced(messages, lambda _: self._items[next(found)])

    async def _prompt(self, messages: Sequence[Message], tools: Sequence[Tool], past: Past) -> IntArray:
        """The conversation's ids: of what was sampled before, as they were sampled."""
        renderer, most = self.policy.renderer, self.policy.limits.sequence_length
        new = messages[past.known :]
        length = len(_written(new, tools if past.said is None else ()))
        self._check_text(length // CHARS_PER_TOKEN)
        try:
            for arguments in _long_arguments(new):  # which a template takes as values
                await self._beside(len(arguments), partial(renderer.check_length, arguments, most))
            if past.said is None:
                return await self._beside(length, partial(renderer.prompt, messages, tools or None, most=most))
            continued = partial(renderer.continuation, new, past.said.answer_ids, tools or None, most=most)
            return np.concatenate([past.said.ids, await self._beside(length, continued)])
        except ApiError:
            raise
        except TooManyTokensError as error:
            raise self._too_long(f"more than {error.count}") from error
        except Exception as error:  # a template may raise anything
            message = f"messages: the model's chat template cannot render them: {describe_error(error)}"
            raise ApiError(400, message, code="invalid_value", param="messages") from error

    async def _beside(self, length: int, work: Callable[[], T]) -> T:
        """What ``work`` gives; for many characters it is done in a thread, and the others of the worker go on."""
        if length < _LONG_TEXT:
            return work()
        done = await asyncio.to_thread(work)
        self._admit(1)  # others may have begun meanwhile
        return done

    async def _text_prompt(self, text: str) -> IntArray:
        renderer = self.policy.renderer
        said, rest = self._history.recall_text(text)
        self._check_text(len(rest) // CHARS_PER_TOKEN)
        try:
            words = partial(renderer.words, rest, most=self.policy.limits.sequence_length)
            added = await self._beside(len(rest), words)
        except TooManyTokensError as error:
            raise self._too_long(f"more than {error.count}") from error
        return added if said is None else np.concatenate([said.ids, added])

    async def _sample(self, prompt_ids: IntArray, wanted: Wanted, items: tuple[Item, ...] = ()) -> list[Completion]:
        self._check_room(len(prompt_ids))
        asked = digest(identity(prompt_ids))
        task = asyncio.current_task()
        assert task is not None
        first, self._started = self._started, self._started + wanted.n
        if not self._running:
            self._since = time.monotonic()
        self._running[task] += wanted.n
        requests = []
        for index in range(wanted.n):
            seed = self._seed(asked, wanted, index)
            name = f"{self._episode.tag}-{self._episode.group_id}-{self._episode.member}-{first + index}"
            params = self._sampling(wanted, seed, self.policy.limits.sequence_length - len(prompt_ids))
            asking = self._generate(GenerateRequest(name, prompt_ids, params, items=items))
            requests.append(asyncio.ensure_future(asking))
        self._asked[asked] += 1
        try:
            completions = list(await asyncio.gather(*requests))
            if any(completion.finish_reason is FinishReason.ABORT for completion in completions):
                raise EpisodeAbortedError(f"a request of episode {self._episode.tag} was aborted")
        except asyncio.CancelledError:
            if self._ended:
                raise self._over() from None
            raise
        except Exception as error:  # whatever it was, the episode is told of it
            self.fail(error)
            raise ApiError(500, "the engine failed; the episode is over", code="engine_failed") from error
        finally:
            for request in requests:
                request.cancel()
            self._generating_s = self.generating_s
            self._since = time.monotonic()
            del self._running[task]
        if self._ended:
            raise self._over()
        self.end = None
        self._cut_short = any(completion.finish_reason is FinishReason.LENGTH for completion in completions)
        return completions

    def _seed(self, prompt: bytes, wanted: Wanted, index: int) -> int:
        """Seed of one answer to a prompt, by its digest; asked again, the prompt gets another."""
        kind, number = ("call", self._asked[prompt]) if wanted.seed is None else ("seed", wanted.seed)
        return derive_seed(self._episode.sampling_seed, prompt.hex(), kind, number, index)

    def _admit(self, n: int) -> None:
        """Raises ``ApiError`` for more answers than there may be."""
        most = self.config.max_parallel_requests
        if self._ended:
            raise self._over()
        if n > most:
            message = f"n: got {n}, expected at most {most}"
            raise ApiError(400, message, code="invalid_value", param="n")
        if self._running.total() + n > most:
            message = f"got {self._running.total()} answers under way and {n} more, expected at most {most}"
            raise ApiError(429, message, code="rate_limit_exceeded")
        if self._started + n > self.config.max_calls:
            self.end = EpisodeEnd.TRUNCATED
            message = f"the episode has had its {self.config.max_calls} answers"
            raise ApiError(403, message, code="max_calls_exceeded")

    def _check_text(self, least: int) -> None:
        """Refuses what is far too long before it is tokenised, for which all other episodes would have to wait."""
        if least >= self.policy.limits.sequence_length:
            raise self._too_long(f"more than {least}")

    def _check_room(self, num_tokens: int) -> None:
        """Raises ``ApiError`` for a prompt that leaves no room to answer."""
        if num_tokens >= self.policy.limits.sequence_length:
            raise self._too_long(str(num_tokens))

    def _too_long(self, tokens: str) -> ApiError:
        self.end = EpisodeEnd.CONTEXT_FULL
        return too_long(self.policy.limits.sequence_length, tokens)

    def _over(self) -> ApiError:
        return ApiError(410, "the episode of this key has ended", code="episode_ended")

    def _stops(self, own: tuple[str, ...]) -> tuple[str, ...]:
        return (*self._params.stop, *own)

    def _sampling(self, wanted: Wanted, seed: int, room: int) -> SamplingParams:
        run, free = self._params, self.config.sampling == "request"
        temperature = wanted.temperature if free and wanted.temperature is not None else run.temperature
        return replace(
            run,
            max_new_tokens=min(run.max_new_tokens, room, wanted.max_new_tokens or room),
            temperature=0.0 if self._episode.greedy else temperature,
            first_token_temperature=None if self._episode.greedy else run.first_token_temperature,
            top_p=wanted.top_p if free and wanted.top_p is not None else run.top_p,
            stop=self._stops(wanted.stop),
            seed=seed,
        )

    def _read(
        self, completion: Completion, schemas: Sequence[ToolSchema], stops: tuple[str, ...]
    ) -> tuple[AssistantTurn, str | None]:
        """Turn that the program is told of an answer, calls that cannot be read as words, and what stopped it."""
        renderer = self.policy.renderer
        if schemas:
            whole = renderer.decode_raw(completion.token_ids, stopped=completion.finish_reason is FinishReason.STOP)
        else:
            whole = renderer.decode(completion.token_ids)
        text, stop = _cut(whole, self._stops(stops))
        if not schemas:
            reasoning, said = split_reasoning(text)
            return AssistantTurn(said, reasoning=reasoning), stop
        turn = self.policy.dialect.parse(text, schemas)
        self._counts.update(tool_calls=len(turn.calls), malformed_calls=len(turn.errors))
        words = "\n".join(filter(None, [turn.content, *(error.text for error in turn.errors)]))
        return replace(turn, content=words, calls=tuple(self._with_own_id(call) for call in turn.calls)), stop

    def _with_own_id(self, call: ToolCall) -> ToolCall:
        """The call with an id that no other of the episode has, of nine letters and digits where none was written."""
        identity, number = call.id, len(self._call_ids)
        while identity in self._call_ids:
            identity, number = call_id(number), number + 1
        self._call_ids.add(identity)
        return replace(call, id=identity)

    def _record(
        self,
        prompt_ids: IntArray,
        completion: Completion,
        observation: str,
        turn: AssistantTurn,
        items: tuple[Item, ...] = (),
    ) -> int:
        """Adds an answer to the record; returns its row."""
        recorded = self._recorder.add(
            Turn(
                prompt_ids=prompt_ids,
                completion=completion,
                text=self.policy.renderer.decode(completion.token_ids),
                observation=observation,
                action=", ".join(call.name for call in turn.calls) or None,
                task_reward=0.0,
                penalty=0.0,
                state_key=digest(identity(prompt_ids), size=8).hex(),
                items=items,
            )
        )
        return recorded.row


def _cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the first of the stop strings, and which that is."""
    at, stop = min(((at, stop) for stop in stops if (at := text.find(stop)) >= 0), default=(len(text), None))
    return text[:at], stop


def _written(messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    """Messages and tools as far as a prompt tells them; templates may leave out the reasoning of earlier turns."""
    told = [{key: x for key, x in message.items() if key != "reasoning_content"} for message in in_words(messages)]
    return json.dumps([told, tools], ensure_ascii=False)


def _long_arguments(messages: Sequence[Message]) -> list[str]:
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    texts = [call["function"]["arguments"] for call in calls]
    return [text for text in texts if isinstance(text, str) and len(text) > _LONG_TEXT]


def _schema(tool: Tool) -> ToolSchema:
    function = tool["function"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return ToolSchema(function["name"], function.get("description") or "", parameters)
