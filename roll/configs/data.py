"""``data_args``: how messages become prompts."""

from __future__ import annotations

from pydantic import Field

from roll.configs.base import Config


class DataArguments(Config):
    """The environments are the data; only the chat template is left to choose."""

    template: str = Field(
        default="native",
        min_length=1,
        description="Chat template: native takes the tokenizer's own, else a path to a Jinja file or the template "
        "itself.",
    )
