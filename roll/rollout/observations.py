"""What an environment has shown, a text or parts with pictures: as the policy reads it, as text, and for people."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import numpy as np

from roll.agentic.env.base import Observation, picture
from roll.data.columns import Item
from roll.data.identity import digest
from roll.data.pictures import PictureError, Pictures, data_uri
from roll.data.tool_messages import joined
from roll.rollout.errors import EnvProtocolError

MAX_PICTURE = 480
"""Pixels of the longer side of what people see."""
_GAP = 8
"""Pixels between two pictures of an observation."""
_OBSERVATION = re.compile(r"\{(?:current_)?observation\}")


def with_items(call: str, observation: Observation, pictures: Pictures | None) -> Observation:
    """An observation with its pictures as the policy's model takes them.

    Args:
        call: who returned it, for messages.

    Raises:
        EnvProtocolError: the model takes no pictures, or not this one.
    """
    if isinstance(observation, str):
        return observation
    if pictures is None:
        raise EnvProtocolError(
            f"{call} returned a picture, expected text: the policy's model has no processor for pictures, or an agent "
            "program without agent.pictures acts in this environment"
        )
    try:
        return [
            picture(pictures.item(part["image"], call)) if part["type"] == "image" else part for part in observation
        ]
    except PictureError as error:
        raise EnvProtocolError(str(error)) from error


def items_in(observation: Observation) -> list[Item]:
    """The pictures of an observation, in order."""
    return [] if isinstance(observation, str) else [part["image"] for part in observation if part["type"] == "image"]


def in_words(observation: Observation) -> str:
    """Text of an observation; ``[picture 84x84]`` (width, height) stands for a picture."""
    if isinstance(observation, str):
        return observation
    return "".join(part["text"] if part["type"] == "text" else _mark(part["image"].data) for part in observation)


def state_of(observation: Observation) -> str:
    """Text that is the same for equal observations and for no others."""
    words = in_words(observation)
    items = items_in(observation)
    return digest(words, *(item.hash for item in items)).hex() if items else words


def filled(template: str, observation: Observation, fill: Callable[[str], str]) -> Observation:
    """A template with its placeholders replaced, and the observation's parts in the place of ``{observation}``.

    Args:
        fill: replaces the placeholders of a text, that of the observation by its words.
    """
    texts = _OBSERVATION.split(template)
    if isinstance(observation, str) or len(texts) == 1:
        return fill(template)
    parts: list[Observation] = [fill(texts[0])]
    for text in texts[1:]:
        parts += [observation, fill(text)]
    return joined(*parts)


def shown(observation: Observation) -> bytes | None:
    """The pictures of an observation as a PNG, side by side; ``None`` without any.

    Pixel by pixel what the policy got, unless it is larger than ``MAX_PICTURE``.
    """
    items = items_in(observation)
    if not items:
        return None
    from PIL import Image

    images = [Image.fromarray(item.data) for item in items]
    width = sum(image.width for image in images) + _GAP * (len(images) - 1)
    whole = Image.new("RGB", (width, max(image.height for image in images)), "white")
    left = 0
    for image in images:
        whole.paste(image, (left, 0))
        left += image.width + _GAP
    whole.thumbnail((MAX_PICTURE, MAX_PICTURE))
    buffer = io.BytesIO()
    whole.save(buffer, "PNG")
    return buffer.getvalue()


def for_programs(observation: Observation) -> Observation:
    """An observation in the form of OpenAI's API: its pictures are data URIs, pixel by pixel what the policy gets."""
    if isinstance(observation, str):
        return observation
    return [
        part if part["type"] == "text" else {"type": "image_url", "image_url": {"url": data_uri(part["image"])}}
        for part in observation
    ]


def _mark(pixels: np.ndarray) -> str:
    height, width = pixels.shape[:2]
    return f"[picture {width}x{height}]"
