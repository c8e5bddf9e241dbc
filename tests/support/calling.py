"""A tool dialect that an untrained model speaks: what it says decides by its letters whether and what it calls."""

from roll.agentic.tools.dialects.base import BaseDialect, Call, ReadTurn, Schemas
from roll.agentic.tools.tool import AssistantTurn, CallError


class Letters(BaseDialect):
    """Of two samples about one is a call of one of the tools, and of eight calls one cannot be read."""

    name = "letters"
    example = "anything"

    def read_turn(self, text: str, schemas: Schemas) -> ReadTurn:
        total = sum(map(ord, text))
        if total % 2 == 0:
            return ReadTurn(text, (), None)
        if total % 8 == 7:
            return ReadTurn("", (CallError(text, "its letters add up to 7"),), None)
        name = sorted(schemas)[total // 8 % len(schemas)]
        return ReadTurn("", (Call(text, name, {"a": total % 10, "b": total % 7}),), None)

    def write_turn(self, turn: AssistantTurn) -> str:
        raise ValueError("what is said by chance cannot be written")
