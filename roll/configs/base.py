"""The base of every configuration section: strict, typed, documented."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A configuration section. Unknown keys are errors; every field carries its description and default.

    Conventions: ``Field(default, description="…")`` on every field; bounds (``ge``, ``gt``, ``le``) on the field;
    choices as ``Literal``; cross-field rules in ``problems()``.
    """

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=False, frozen=False)

    def problems(self) -> list[str]:
        """Cross-field rules that do not hold, as ``key: what was seen, what was expected``, keys relative to here."""
        return []
