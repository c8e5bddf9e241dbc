"""The shop's commands as calls of tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from roll.agentic.tools.dialects import BaseDialect
from roll.agentic.tools.types import AssistantTurn, ToolSchema


def _schema(name: str, description: str, argument: str, kind: str) -> ToolSchema:
    parameters = {"type": "object", "properties": {argument: {"type": kind}}, "required": [argument]}
    return ToolSchema(name, description, parameters)


SCHEMAS = (
    _schema("search", "Lists the products that fit some words best.", "query", "string"),
    _schema("view", "Tells the details of a product in the list.", "number", "integer"),
    _schema("buy", "Buys a product of the list, which ends the visit.", "number", "integer"),
)
TOLD = [schema.as_openai() for schema in SCHEMAS]
"""The tools as the chat template is told of them."""
ARGUMENTS = {schema.name: next(iter(schema.parameters["properties"])) for schema in SCHEMAS}


@dataclass(frozen=True)
class ShopTurn:
    """Turn of the policy, read as a command."""

    turn: AssistantTurn
    speaks: BaseDialect

    @classmethod
    def read(cls, text: str, speaks: BaseDialect) -> ShopTurn | None:
        """The turn; ``None`` if nothing in it is a call."""
        turn = speaks.parse(text, SCHEMAS)
        return cls(turn, speaks) if turn.calls or turn.errors else None

    @property
    def command(self) -> str:
        """The first call as one of the shop's text commands; empty if it is none."""
        if not self.turn.calls:
            return ""
        call = self.turn.calls[0]
        return f"{call.name} {call.arguments.get(ARGUMENTS.get(call.name, ''), '')}"

    def answers(self, observation: str) -> list[dict[str, Any]]:
        """Tool messages, one for each call."""
        contents = [observation] + ["error: not run, one call at a time"] * (len(self.turn.calls) - 1)
        messages = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": content}
            for call, content in zip(self.turn.calls, contents, strict=False)
        ]
        return messages + [{"role": "tool", "content": self.speaks.error_text(error)} for error in self.turn.errors]
