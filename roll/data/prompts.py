"""Datasets of prompts: files to ``Prompt``s, and the order in which a run meets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roll.data.arrays import IntArray


@dataclass(frozen=True)
class Prompt:
    """One question of a dataset. Plain data: it crosses processes."""

    id: str
    """The row's ``id`` column, else ``file:row``."""
    tag: str
    """Domain: chooses the rewards."""
    messages: tuple[Mapping[str, str], ...]
    """The conversation that the policy answers, ``{"role": …, "content": …}``; the last is the user's."""
    ground_truth: Any = None
    """The reference answer (the column ``data_args.response``), any JSON value."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns, JSON values."""
    prompt_ids: IntArray | None = None
    """Token ids where the prompt was truncated to ``prompt_length``; ``None``: render the messages."""
