"""Tools: calls, turns and schemas in no family's notation, and what is called by name with JSON arguments.

The result of a call is text, which the policy reads.

A plain function with typed arguments is one: its docstring is the description, its signature the schema, by pydantic,
which also checks what the policy passes::

    def convert(amount: float, to: Literal["EUR", "USD"]) -> str:
        '''Converts an amount of Swiss francs.'''
"""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from roll.configs.arguments import argument_problems
from roll.configs.problems import NOTHING, ConfigProblem
from roll.data.tool_messages import Content, joined
from roll.utils.registry import Registry, UnknownNameError


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A valid call.

    Attributes:
        id: what the answer refers to; nine letters and digits where the family writes none (``call_id``).
        name: of the tool, known or not.
        arguments: a JSON object.
    """

    id: str
    name: str
    arguments: Mapping[str, Any]

    def as_openai(self) -> dict[str, Any]:
        """An entry of a message's ``tool_calls``, its arguments as an object."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}


@dataclass(frozen=True, slots=True)
class CallError:
    """A malformed call.

    Attributes:
        text: what the model wrote.
        reason: what was expected and what it got.
    """

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class AssistantTurn:
    """Text and calls of a model in one turn.

    Attributes:
        content: its words, without calls and reasoning, stripped.
        calls: in the order in which they were written.
        errors: the malformed ones; a turn may have both.
        reasoning: what it thought aloud before, stripped; ``None`` where it did not.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[CallError, ...] = ()
    reasoning: str | None = None

    def as_openai(self) -> dict[str, Any]:
        """The turn as a message that chat templates take, without keys that would be empty."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.as_openai() for call in self.calls]
        return message


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool as it is described to the model.

    Attributes:
        name: letters, digits, ``_`` and ``-``.
        description: what it does and when to call it.
        parameters: JSON schema of its arguments, an object.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    def as_openai(self) -> dict[str, Any]:
        """The function dict that chat templates and OpenAI-compatible servers take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def call_id(index: int) -> str:
    """The id of the ``index``-th call of a turn whose family writes none: nine characters, as Mistral's templates ask.

    >>> call_id(2)
    'call00002'
    """
    return f"call{index:05d}"


class ToolError(Exception):
    """A call failed for a reason that the policy should read: wrong arguments, no such page."""


class Tool(ABC):
    """Something that can be called. One instance serves all episodes of a process, many at the same time."""

    schema: ToolSchema
    """Schema that the policy gets; the name is that of the configuration."""

    instant: ClassVar[bool] = False
    """True: a call takes less than a millisecond or so and waits for nothing. It then runs in the event loop that plays
    all episodes, and ``timeout`` does not watch it."""

    reads_files: ClassVar[bool] = False
    """True: the constructor reads files, which a check of the configuration leaves to the run."""

    times_itself: ClassVar[bool] = False
    """True: ``call`` is a coroutine function that raises ``TimeoutError`` at ``timeout`` by itself."""

    @abstractmethod
    def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> Any | Awaitable[Any]:
        """Answers a call; a coroutine function is awaited, any other runs in a thread.

        Args:
            state: of this tool in this episode: empty at its start, for whatever the tool keeps between calls.

        Returns:
            Text; or a list of parts among which are pictures, as of observations (``roll.agentic.env.TextEnv``), whose
            pixels may also be the bytes of a file; or anything else, which is written as JSON.

        Raises:
            ToolError: the policy shall read why not.
        """


class FunctionTool(Tool):
    """A function with typed arguments.

    Args:
        function: called with the arguments by keyword, checked and converted by pydantic.

    Raises:
        ValueError: it has arguments that JSON cannot hold, or such as are only known by position; or it yields.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ValueError("it is a generator, expected a function that returns its result")
        self.instant = bool(getattr(function, "instant", False))  # type: ignore[misc]
        try:
            self._call: TypeAdapter[Any] = TypeAdapter(function)  # type: ignore[arg-type]
            parameters = self._call.json_schema()
        except Exception as error:  # pydantic has several
            raise ValueError(f"its arguments have no JSON schema: {error}") from error
        if parameters.get("type") != "object":
            raise ValueError("its arguments are positional-only, expected named ones")
        for described in parameters.get("properties", {}).values():
            described.pop("title", None)
        description = inspect.cleandoc(function.__doc__ or "")
        self.schema = ToolSchema(function.__name__, description, parameters)

    def call(self, arguments: dict[str, Any], state: dict[str, Any]) -> Any | Awaitable[Any]:
        try:
            return self._call.validate_python(ArgsKwargs((), arguments))
        except ValidationError as error:
            if error.title != self.schema.name and not error.title.startswith("call["):
                raise  # one of its own
            raise ToolError(_words(error)) from error


def _words(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors(include_url=False))


ToolFactory = Callable[..., Any]

TOOLS: Registry[ToolFactory] = Registry("tool")
TOOLS.register("calculator", "roll.agentic.tools.builtin:calculator")
TOOLS.register("search", "roll.agentic.tools.builtin:SearchTool")
TOOLS.register("retrieval", "roll.agentic.tools.builtin:RetrievalTool")
TOOLS.register("python", "roll.extras.sandbox.python_tool:PythonTool")


def make_tool(name: str, target: str, args: Mapping[str, Any]) -> Tool:
    """Builds a tool.

    Args:
        target: a registered name, or the path of a function or of a subclass of ``Tool``.

    Raises:
        UnknownNameError: there is none.
        TypeError: it is no tool, or does not take these arguments.
        ValueError: what it says of its arguments.
    """
    made = TOOLS.get(target)
    if isinstance(made, type):
        tool = made(**args)
        if not isinstance(tool, Tool):
            raise TypeError(f"{target} is a {made.__name__}, expected a function or a subclass of {Tool.__name__}")
    elif inspect.isroutine(made):
        if args:
            raise TypeError(f"{target} is a function, which has no constructor: expected no args")
        tool = FunctionTool(made)
    else:
        raise TypeError(f"{target} is a {type(made).__name__}, expected a function or a subclass of {Tool.__name__}")
    tool.schema = replace(tool.schema, name=name)
    return tool


def check_tool(target: str, args: Mapping[str, Any]) -> list[ConfigProblem]:
    """Problems of an entry of ``tools.use``, keys relative to it; nothing is built but functions and tools of ours."""
    try:
        made = TOOLS.get(target)
    except UnknownNameError as error:
        return [ConfigProblem("tool", target, "a tool that can be imported", str(error))]
    takes_args = isinstance(made, type) and issubclass(made, Tool)
    try:
        if takes_args:
            inspect.signature(made).bind(**args)
            if problems := argument_problems(made, args):
                return [problem.under("args") for problem in problems]
        if not (isinstance(made, type) and issubclass(made, Tool)) or (
            made.__module__.startswith("roll.") and not made.reads_files
        ):
            make_tool("tool", target, args)
    except (TypeError, ValueError) as error:
        if takes_args or args:
            reason = _words(error) if isinstance(error, ValidationError) else str(error)
            return [ConfigProblem("args", dict(args) or NOTHING, f"what {target} takes", reason)]
        return [ConfigProblem("tool", target, "a tool", str(error))]
    return []


def content_of(result: Any) -> Content:
    """Returns a result as the policy gets it: parts, pictures as they came, or ``text_of``."""
    if not isinstance(result, list) or not any(map(_is_picture, result)):
        return text_of(result)
    return joined(*([part] if _is_picture(part) else _words_of(part) for part in result))


def _is_picture(part: Any) -> bool:
    """Tells whether something is a part with pixels; one with a name of a picture is JSON."""
    shown = part.get("image") if isinstance(part, Mapping) and part.get("type") == "image" else None
    return shown is not None and not isinstance(shown, str | list | Mapping)


def _words_of(part: Any) -> str:
    return text_of(part["text"] if isinstance(part, Mapping) and part.get("type") == "text" else part)


def text_of(result: Any) -> str:
    """Returns a result as the policy reads it: text as it is, bytes as far as they are UTF-8, anything else as JSON."""
    if isinstance(result, bytes):
        return result.decode("utf-8", "replace")
    if isinstance(result, str):
        return result.encode("utf-8", "replace").decode("utf-8")
    try:
        return text_of(json.dumps(result, ensure_ascii=False))
    except (TypeError, ValueError):
        return text_of(str(result))
