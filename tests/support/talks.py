"""Messages of conversations, as OpenAI writes them."""

from typing import Any

SYSTEM = {"role": "system", "content": "Be brief."}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def says(content: Any, **more: Any) -> dict[str, Any]:
    """What the assistant says."""
    return {"role": "assistant", "content": content, **more}
