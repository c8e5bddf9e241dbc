"""The pictures of a dataset's rows: those of a column, in the places of their marks, and those that are parts.

``ItemSpool`` keeps them on disk.
"""

from __future__ import annotations

import functools
import json
import mmap
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np

from roll.data.addresses import Address, fetch_all
from roll.data.columns import Item
from roll.data.files import Problems
from roll.data.pictures import PictureError, Pictures, Reach, Source, located
from roll.data.tool_messages import MARKS, Content, Message, in_words, joined
from roll.data.videos import shown, video_source

PARTS = ("image", "image_url", "input_image")
"""Types of parts that are pictures: of Transformers and Anthropic, and of OpenAI's two interfaces."""
REFUSED = {
    **dict.fromkeys(("video", "video_url", "input_video"), "videos are not read here: give frames as pictures"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "sound is not supported"),
    **dict.fromkeys(("file", "input_file", "document"), "files are not supported: give pages as pictures"),
}
"""Types of other parts, and what is said of them."""
_FORMS = ("image", "image_url", "url", "path", "base64", "bytes")
"""Keys of a part under which a picture is looked for."""
_VIDEO_FORMS = ("video", "video_url", "path", "frames", "bytes", "url")
"""Likewise a video."""
VIDEO_PARTS = ("video", "video_url")
SHOWING = ("user", "tool")
"""Roles that show pictures; in words of theirs, marks stand for them."""


def picture_part(part: Mapping[str, Any], place: str, reach: Reach | None) -> Mapping[str, Any]:
    """A part of a message that is a picture; without one of its own it waits for one of the column's.

    Raises:
        PictureError: it cannot be used.
    """
    forms = [key for key in _FORMS if part.get(key) is not None]
    given: Any = part[forms[0]] if forms else None
    if isinstance(source := part.get("source"), Mapping):  # Anthropic's
        forms, given = ["source"], source.get("data") if source.get("type") == "base64" else source.get("url")
    if isinstance(given, Mapping) and "url" in given:
        given = given["url"]
    if not forms:
        return {"type": "image", "image": None}
    return {"type": "image", "image": source_of(given, f"{place}.{forms[0]}", reach)}


def video_part(part: Mapping[str, Any], place: str, reach: Reach) -> Mapping[str, Any]:
    """A part of a message that is a video; without one of its own it waits for one of the column's.

    Raises:
        PictureError: it cannot be used, or it has keys of its own that say how it is read.
    """
    forms = [key for key in _VIDEO_FORMS if part.get(key) is not None]
    others = [key for key in part if part[key] is not None and key not in (*forms, "type", "text")]
    if others:
        keys = "keys data_args.video_fps, video_max_frames, video_min_pixels, video_max_pixels"
        raise PictureError(f"{place}.{others[0]}: got {part[others[0]]!r}, expected no such key in a video: {keys}")
    if not forms:
        return {"type": "video", "video": None}
    given = part[forms[0]]
    if isinstance(given, Mapping) and "url" in given:
        given = given["url"]
    return {"type": "video", "video": video_source(given, f"{place}.{forms[0]}", reach)}


def source_of(value: Any, place: str, reach: Reach | None) -> Source:
    """A picture's source.

    Args:
        reach: of its path or address; ``None``: it may have none.

    Raises:
        PictureError: there is no such file, or what was given is no picture.
    """
    try:
        return Source(located(value, reach), place)
    except PictureError as error:
        raise PictureError(f"{place}: {error}") from error


def column_sources(value: Any, column: str, reach: Reach, kind: str = "image") -> list[Source]:
    """The pictures or videos of a column: one, or a list, which may be JSON's text; none where it says nothing."""
    make = source_of if kind == "image" else video_source
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise PictureError(f"column {column!r}: text that is not a JSON list ({error})") from error
    if isinstance(value, list):
        return [make(one, f"{column}[{index}]", reach) for index, one in enumerate(value)]
    return [] if value is None or value == "" else [make(value, f"column {column!r}", reach)]


def with_column(
    messages: Sequence[Message], sources: Sequence[Any], column: str, kind: str = "image"
) -> tuple[Message, ...]:
    """Messages with the column's pictures or videos, sources or items, in their places.

    These are the marks ``<image>`` in words of users and tools, and parts without a picture of their own. Where there
    is no such place at all, the pictures stand before the first words of a user. So it is with videos.

    Args:
        kind: type of their parts.

    Raises:
        PictureError: there are more places or fewer.
    """
    if not sources and all(isinstance(message["content"], str) for message in messages):
        return tuple(messages)
    places = sum((_count if sources else _waiting)(message, kind) for message in messages)
    if places == 0 and sources:
        first = next(index for index, message in enumerate(messages) if message["role"] == "user")
        parts = [{"type": kind, kind: source} for source in sources]
        opened = {**messages[first], "content": joined(parts, messages[first]["content"])}
        return (*messages[:first], opened, *messages[first + 1 :])
    if places != len(sources):
        of, named = f"column {column!r}" if sources else f"no column {column!r}", _NAMES[kind]
        raise PictureError(
            f"{places} places for {named} ({MARKS[kind]} in words, and parts), but {len(sources)} {named} ({of})"
        )
    if not sources:
        return tuple(messages)
    given = iter(sources)
    return tuple(_filled(message, given, kind) for message in messages)


_NAMES = {"image": "pictures", "video": "videos"}


def _count(message: Message, kind: str) -> int:
    if message["role"] not in SHOWING:
        return 0
    marks = sum(part["text"].count(MARKS[kind]) for part in _parts(message) if part["type"] == "text")
    return _waiting(message, kind) + marks


def _waiting(message: Message, kind: str) -> int:
    return sum(part["type"] == kind and part[kind] is None for part in _parts(message))


def _parts(message: Message) -> Sequence[Mapping[str, Any]]:
    content: Content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _filled(message: Message, given: Iterator[Any], kind: str) -> Message:
    if not _count(message, kind):
        return message
    parts: list[Mapping[str, Any]] = []
    for part in _parts(message):
        if part["type"] != "text":
            waits = part["type"] == kind and part[kind] is None
            parts.append({"type": kind, kind: next(given)} if waits else part)
            continue
        for piece in re.split(f"({MARKS[kind]})", part["text"]):
            found = {"type": kind, kind: next(given)} if piece == MARKS[kind] else {"type": "text", "text": piece}
            parts.append(found)
    return {**message, "content": joined(parts)}


def sources_in(messages: Sequence[Message]) -> list[Source]:
    """The pictures and videos of a row's messages, in order."""
    return [part[part["type"]] for message in messages for part in _parts(message) if part["type"] != "text"]


def with_items(messages: Sequence[Message], pictures: Pictures | None, *, blank: bool = False) -> tuple[Message, ...]:
    """The messages of a row with items in place of the sources.

    Args:
        blank: they are only checked and measured (``Pictures.blank``); words stand for those that are not fetched yet.

    Raises:
        PictureError: the model takes none, or one cannot be used.
    """
    if not (sources := sources_in(messages)):
        return tuple(messages)
    if pictures is None:
        unread = "data_args.image: null: the column is not read"
        raise PictureError(f"{counted(sources)}, but the model has no processor for them ({unread})")
    if blank and any(isinstance(source.found, Address) and not source.found.is_here for source in sources):
        return in_words(messages)
    return replaced(messages, functools.partial(shown, pictures, blank=blank))


def fetch(sources: Iterable[tuple[str, Source]], problems: Problems) -> list[str]:
    """Fetches the pictures that are at addresses.

    Args:
        sources: with the places of their rows.
        problems: take those that cannot be had.

    Returns:
        The hashes of the others' bytes, in order.
    """
    wanted = [(place, source) for place, source in sources if isinstance(source.found, Address)]
    found, digests = fetch_all(source.found for _, source in wanted), list[str]()
    for place, source in wanted:
        if isinstance(got := found[source.found], PictureError):
            problems.add(place, f"{source.place}: {got}")
        else:
            digests.append(got)
    return digests


def counted(sources: Sequence[Source]) -> str:
    """So many pictures, videos, or both, in words."""
    videos = sum(source.is_video for source in sources)
    numbers = {"pictures": len(sources) - videos, "videos": videos}
    return " and ".join(f"{number} {name}" for name, number in numbers.items() if number)


def read_sources(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages of a row with the bytes of files in place of their paths.

    Raises:
        PictureError: a file cannot be read.
    """
    return replaced(messages, Source.read)


def replaced(messages: Sequence[Message], make: Callable[[Source], Any]) -> tuple[Message, ...]:
    """The messages of a row with what ``make`` gives in place of the sources."""
    return tuple(
        {**message, "content": [_part(part, make) for part in content]}
        if isinstance(content := message.get("content"), list | tuple)
        else message
        for message in messages
    )


def _part(part: Mapping[str, Any], make: Callable[[Source], Any]) -> Mapping[str, Any]:
    kind = part["type"]
    return part if kind == "text" else {**part, kind: make(part[kind])}


_FILE = 1 << 30
"""Bytes of a file, unless one item has more."""


class ItemSpool:
    """Keeps each different item once, in ``TMPDIR``."""

    def __init__(self) -> None:
        self._known: dict[str, Item] = {}
        self._file: IO[bytes] | None = None
        self._map: mmap.mmap | None = None
        self._end = 0

    def keep(self, item: Item) -> Item:
        """An equal item that takes no memory.

        Raises:
            OSError: no space is left.
        """
        if (known := self._known.get(item.hash)) is None:
            known = self._known[item.hash] = self._written(item)
        return known

    def _written(self, item: Item) -> Item:
        size = item.data.nbytes
        if self._map is None or self._end + size > len(self._map):
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 (it ends with the last item in it)
            self._file.truncate(max(_FILE, size))
            self._map, self._end = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ), 0
        assert self._file is not None
        self._file.seek(self._end)
        self._file.write(item.data.tobytes())
        self._file.flush()
        data = np.frombuffer(self._map, np.uint8, size, self._end).reshape(item.data.shape)
        self._end += size
        return Item.known(data, item.hash)
