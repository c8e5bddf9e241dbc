"""``user``: who answers the policy in a conversation about a prompt."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from roll.configs.base import Config
from roll.configs.tools import placed_path


class UserConfig(Config):
    """A class of yours that takes the user's turns."""

    path: str = Field(
        min_length=1,
        description="package.module:Class or folder/file.py:Class with `async respond(messages, prompt)`, which "
        "returns the user's message, the reward of the policy's last turn, and whether the conversation is over.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of its constructor.")
    max_turns: int = Field(
        default=4,
        ge=1,
        description="Most messages of the user after the prompt; the next assistant message is the answer.",
    )
    timeout: float = Field(default=30.0, gt=0, description="Seconds for one message of the user.")
    retries: int = Field(default=1, ge=0, description="Retries of an episode whose user failed.")

    def placed(self) -> UserConfig:
        """The section with a path that is the same in every folder."""
        return self.model_copy(update={"path": placed_path(self.path)})
