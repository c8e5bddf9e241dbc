"""Messages of conversations, as OpenAI writes them."""

from typing import Any


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def says(content: Any, **more: Any) -> dict[str, Any]:
    """What the assistant says."""
    return {"role": "assistant", "content": content, **more}


SYSTEM = system("Be brief.")
