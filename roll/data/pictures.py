"""Pictures: from a file, bytes or pixels to what a model is given for them, by the model's own processor, once.

A picture becomes an ``Item``: RGB pixels of the size that the processor gives it. Everything behind that is derived
from those bytes and never resized again. A picture that cannot be used as it is, is an error; none is replaced.

A video becomes a ``Video``: an item for each of its pieces, which are pictures with a few frames, and their times,
which the model is told in words before each.

Transformers' processors on Pillow are used, also where torchvision is installed, whose resizing gives other pixels.
"""

from __future__ import annotations

import base64
import binascii
import functools
import inspect
import io
import json
import os
import re
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.data.addresses import Address, PictureError, shown
from roll.data.columns import IntArray, Item
from roll.data.identity import content_ids
from roll.data.picture_forms import (
    PatchForm,
    PixtralWriter,
    VideoForm,
    WholeForm,
    form_of,
    form_problem,
    table_of,
)
from roll.utils.foreign import describe_error

if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedTokenizerBase

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Pillow's names of those that are read."""
_EXPECTED = "expected PNG, JPEG, WebP, GIF, BMP or TIFF"
_MAGIC = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
"""Those of eight bits or fewer: Pillow cuts the others off at 255, which is white."""
_DATA = re.compile(r"data:(?P<kind>[^,;]*)(?P<more>[^,]*),", re.ASCII)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://", re.ASCII)
_BASE64 = re.compile(r"[A-Za-z0-9+/\s]{40,}={0,2}\s*", re.ASCII)
DECODE_LIMIT = 2**26
"""Pixels that a picture may have before it is resized, unless something else is said."""
_CACHED = 1024
"""Sizes whose number of tokens, and whose blank, is remembered."""


@dataclass(frozen=True)
class Reach:
    """Where the pictures of rows may lie."""

    folder: Path
    """In which paths begin."""
    outside: bool = False
    """Paths may lead out of it."""
    hosts: tuple[str, ...] | None = None
    """Hosts that are asked for those at addresses, none: all public ones. ``None``: there may be no addresses."""
    video_folder: Path | None = None
    """In which paths of videos begin. ``None``: there may be no videos."""


@dataclass(frozen=True)
class Source:
    """A picture of a dataset's row, not decoded yet."""

    found: Any
    """Its file, address, encoded bytes, or a Pillow image; a tuple of them for the frames of a video."""
    place: str
    """In the row."""
    is_video: bool = False

    def read(self) -> Source:
        """The same with the bytes of its file, so that it can go where that is not.

        Raises:
            PictureError: it cannot be read.
        """
        with placed(self, ""):
            found = self.found
            return replace(self, found=tuple(map(_data, found)) if isinstance(found, tuple) else _data(found))


@dataclass(frozen=True)
class Video:
    """A video as a model is given it."""

    items: tuple[Item, ...]
    """Pieces of as many frames as the vision tower takes at a time, shape [frames, height, width, 3]."""
    times: tuple[float, ...]
    """Seconds from its beginning to each of its frames."""


class Pictures:
    """The picture processor of a model; it is loaded when it is needed first.

    Args:
        folder: of the model.
        min_pixels: a picture is made as large as that at least, in place of the processor's own bound.
        max_pixels: likewise, as large as that at most.
        decode_limit: pixels that it may have before; a small file may hold many more.
        videos: ``fps``, ``max_frames``, ``min_pixels``, ``max_pixels`` and ``total_pixels`` of videos, where they are
            not the processor's own (keys ``video_…`` of ``DataArguments``).
        tokenizer: the folder's, where it is loaded already.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        decode_limit: int = DECODE_LIMIT,
        videos: Mapping[str, Any] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.decode_limit = decode_limit
        self._bounds = (min_pixels, max_pixels)
        self._video_rules = dict(videos or {})
        self._tokenizer = tokenizer
        self._loaded: Any = None
        self._lock = threading.Lock()
        self._contents = weakref.WeakKeyDictionary[Item, IntArray]()
        self._known_text = functools.lru_cache(_CACHED)(self._written)
        self._known_ids = functools.lru_cache(_CACHED)(self._ids_of_size)
        self._blanks = functools.lru_cache(_CACHED)(_blank)

    def __reduce__(self) -> tuple[Any, ...]:
        least, most = self._bounds
        options: Any = {"min_pixels": least, "max_pixels": most, "decode_limit": self.decode_limit}
        options["videos"] = self._video_rules
        return functools.partial(Pictures, **options, tokenizer=self._tokenizer), (self.folder,)

    @classmethod
    def of(cls, folder: str | Path, **options: Any) -> Pictures | None:
        """Those of a model's folder, ``None`` for a model without pictures.

        Args:
            options: as for the class.
        """
        config = _entries(Path(folder) / "config.json")
        return cls(folder, **options) if config.get("vision_config") else None

    def with_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> Pictures:
        """The same where the folder's tokenizer is loaded already."""
        make, (folder,) = self.__reduce__()
        found: Pictures = make(folder, tokenizer=tokenizer)
        return found

    @property
    def token(self) -> int:
        """The vocabulary's id of ``mark``."""
        return int(self._processor.tokenizer.convert_tokens_to_ids(self.mark))

    @property
    def mark(self) -> str:
        """Text that stands for one picture in what a chat template writes."""
        return str(self._processor.image_token)

    @property
    def video_token(self) -> int:
        """Likewise of a video, and of each feature of its pieces."""
        return int(self._processor.tokenizer.convert_tokens_to_ids(self.videos.mark))

    def mark_of(self, shown: Item | Video) -> str:
        """``mark`` of a picture, and what stands for a video."""
        return self.mark if isinstance(shown, Item) else self.videos.mark

    @property
    def smallest(self) -> tuple[int, int]:
        """Height and width of the smallest picture."""
        return self._form.smallest

    def spaced(self, text: str) -> str:
        """What a chat template writes with the white space that the processor puts around its marks."""
        before, _, after = self._known_text(*self.smallest)
        return text.replace(self.mark, f"{before}{self.mark}{after}") if before or after else text

    def item(self, source: Any, place: str = "", reach: Reach | None = None) -> Item:
        """A picture, checked and resized.

        Args:
            source: an item, a ``Source``, pixels (uint8; grey, RGB or RGBA), a Pillow image, encoded bytes, a ``Path``,
                a text with base64 or a data URI, ``{"bytes", "path"}`` as Hugging Face datasets have it; with
                ``reach``, a text or ``path`` may also be a path or an address.
            place: begins the message of an error.

        Raises:
            PictureError: it cannot be used.
        """
        if isinstance(source, Item):
            return source
        with placed(source, place):
            with bounded(source, self.decode_limit, reach) as image:
                pixels = np.asarray(rgb(image))
            size = self._size(*pixels.shape[:2])
            data = self._form.resize(pixels.transpose(2, 0, 1))
        data = np.ascontiguousarray(data.transpose(1, 2, 0))
        assert data.shape == (*size, 3) and data.dtype == np.uint8, "it has the size that was computed"
        data.flags.writeable = False
        return Item(data)

    def blank(self, source: Any, place: str = "") -> Item:
        """A black picture of the size that ``item`` would have, once all is checked: what counts are its ids.

        It costs a decoding, of which a JPEG's is a short one. Pictures of one size have one blank.

        Raises:
            PictureError: it cannot be used.
        """
        if isinstance(source, Item):
            return source
        with placed(source, place):
            return self._blanks(*self._size(*self._upright_size(source)))

    def blank_piece(self, frames: int, height: int, width: int) -> Item:
        """Likewise of a video: a piece of black frames."""
        return self._blanks(frames, height, width)

    def ids(self, item: Item) -> list[int]:
        """The vocabulary's ids that the mark becomes for an item."""
        *frames, height, width, _ = item.data.shape
        ids = self._known_ids(height, width)
        return [self.video_token] * len(ids) if frames else [*ids]

    def content(self, shown: Item | Video) -> IntArray:
        """The ids in the place of a mark: an item's own, which are below zero, each for one of ``ids``.

        Those of a video are words that tell times, and marks, around its items' own.
        """
        if isinstance(shown, Video):
            *_, height, width, _ = shown.items[0].data.shape
            words = self.videos.text(shown.times, height, width)
            ids = np.asarray(self._processor.tokenizer.encode(words, add_special_tokens=False), dtype=np.int64)
            ids[ids == self.video_token] = np.concatenate([self.content(item) for item in shown.items])
            return ids
        if (found := self._contents.get(shown)) is None:
            found = content_ids(shown, self.ids(shown))
            found.flags.writeable = False
            self._contents[shown] = found
        return found

    def inputs(self, items: Sequence[Item]) -> dict[str, np.ndarray]:
        """What the model's forward takes for pictures, by the names that it has for them.

        The numbers are equal to the processor's own, which takes several times as long.
        """
        tables = [self._table_CV if item.data.ndim == 3 else self.videos.table_CV for item in items]
        return self._form.inputs([item.data for item in items], tables)

    def inputs_by_processor(self, items: Sequence[Item]) -> dict[str, np.ndarray]:
        """``inputs`` by the processor's own code, to compare with."""
        pixels = [item.data for item in items]
        if len(pixels) > 1 and any(each.ndim == 4 for each in pixels):
            parts = [self.inputs_by_processor([item]) for item in items]
            return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if pixels[0].ndim == 4:
            return self.videos.inputs_by_processor(pixels[0])
        options: Any = {"return_tensors": "np", "input_data_format": "channels_last"}
        found = self._resizer(pixels, do_resize=False, do_center_crop=False, **options)
        return {name: np.asarray(found[name]) for name in self._form.names}

    def _ids_of_size(self, height: int, width: int) -> tuple[int, ...]:
        _, inside, _ = self._known_text(height, width)
        return tuple(self._processor.tokenizer.encode(inside, add_special_tokens=False))

    def _written(self, height: int, width: int) -> tuple[str, str, str]:
        """What the processor writes for a picture of a size, and the white space before and behind it."""
        text = str(self._processor.replace_image_token(self._form.described(height, width), 0))
        inside = text.strip()
        before, _, after = text.partition(inside)
        return before, inside, after

    def _upright_size(self, source: Any) -> tuple[int, int]:
        """Height and width of a picture that can be decoded."""
        with bounded(source, self.decode_limit) as image:
            width, height = image.size
            is_short = image.format in ("JPEG", "MPO") and image not in (source, getattr(source, "found", None))
            if is_short:
                image.draft("RGB", (width // 8, height // 8))  # the whole file is still read
            seen = rgb(image)
            if is_short:
                lies = image.getexif().get(_ORIENTATION, 1) > 4
                return (width, height) if lies else (height, width)
            return seen.height, seen.width

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a picture once it is resized."""
        try:
            size = self._form.size(height, width)
            again = self._form.size(*size)
        except ValueError as error:
            raise PictureError(f"{width} x {height} pixels: the model's processor refuses it ({error})") from error
        if again != size:
            raise PictureError(
                f"{width} x {height} pixels: the model's processor makes {size[1]} x {size[0]} of it and "
                f"{again[1]} x {again[0]} of that; expected the same again"
            )
        return size

    @property
    def _resizer(self) -> Any:
        return self._processor.image_processor

    @functools.cached_property
    def _form(self) -> PatchForm | WholeForm:
        return form_of(self._processor)

    @functools.cached_property
    def _table_CV(self) -> np.ndarray:
        """The number that the model gets for each value of a byte, in each channel, by the processor's arithmetic."""
        return table_of(self._resizer, self._resizer)

    @functools.cached_property
    def videos(self) -> VideoForm:
        """How the model is given videos.

        Raises:
            PictureError: it is not, or not as it is known here.
        """
        entries = _entries(self.folder / "video_preprocessor_config.json")
        entries = entries or _entries(self.folder / "processor_config.json").get("video_processor") or {}
        try:
            return VideoForm(self._processor, entries, **self._video_rules)
        except ValueError as error:
            raise PictureError(f"model path {str(self.folder)!r}: {error}") from error

    @property
    def _processor(self) -> Any:
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
        return self._loaded

    def _load(self) -> Any:
        """The model's processor without its part for videos, which needs torchvision."""
        from transformers import AutoImageProcessor

        where = f"model path {str(self.folder)!r}"
        config = _entries(self.folder / "config.json")
        try:
            chosen = AutoImageProcessor.from_pretrained(self.folder, backend="pil", local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise PictureError(f"{where}: no picture processor that works ({describe_error(error)})") from error
        if problem := form_problem(chosen):
            raise PictureError(f"{where}: its picture processor {problem}")
        kind = str(config.get("model_type"))
        processor = _without_videos(kind, chosen, self._tokenizer or _tokenizer_of(self.folder), self.folder)
        if processor is None:
            raise PictureError(f"{where}: Transformers has no processor for {kind!r}")
        form = form_of(processor)
        try:
            form.set_bounds(*self._bounds)
        except ValueError as error:
            raise PictureError(f"{where}: {error} (image_min_pixels, image_max_pixels)") from error
        tokenizer, wanted = processor.tokenizer, config.get("image_token_id", config.get("image_token_index"))
        try:
            written = processor.replace_image_token(form.described(*form.smallest), 0)
        except TypeError as error:  # an entry is missing
            raise PictureError(
                f"{where}: its processor cannot write a picture ({error}), expected its entries in "
                "processor_config.json"
            ) from error
        if wanted not in (ids := tokenizer.encode(written, add_special_tokens=False)):
            raise PictureError(
                f"{where}: for a picture its processor writes {written!r}, {ids}; expected {wanted} in it"
            )
        return processor


def _tokenizer_of(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return found


def _without_videos(kind: str, chosen: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Any:
    """A family's processor without its part for videos, which needs torchvision; ``None``: it has none."""
    from transformers.models.auto import processing_auto

    name = processing_auto.PROCESSOR_MAPPING_NAMES.get(kind)
    if name is None:
        return None
    is_pixtral = name == "PixtralProcessor"
    of_family: Any = PixtralWriter if is_pixtral else processing_auto.processor_class_from_name(name)
    still = type(name, (of_family,), {"get_attributes": classmethod(lambda _: ["image_processor", "tokenizer"])})
    parts: dict[str, Any] = {"image_processor": chosen, "tokenizer": tokenizer}
    stated = _entries(folder / "processor_config.json")
    taken = inspect.signature(of_family.__init__).parameters.keys() & stated.keys() - {*parts, "video_processor"}
    return still(**parts, **{key: stated[key] for key in taken})


def unresized(source: Any) -> Item:
    """A picture in its own size, checked as ``Pictures.item`` does, for whoever resizes it himself.

    Raises:
        PictureError: it cannot be used.
    """
    with placed(source, ""), bounded(source, DECODE_LIMIT) as image:
        return Item(np.asarray(rgb(image)))


@functools.lru_cache(maxsize=64)
def data_uri(item: Item) -> str:
    """A PNG, pixel by pixel; many ask for equal ones."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(item.data).save(buffer, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@contextmanager
def bounded(source: Any, limit: int, reach: Reach | None = None) -> Iterator[Image.Image]:
    """A picture that is not decoded yet, and not too large to be.

    Raises:
        PictureError: it is neither.
    """
    from PIL import Image

    source = source.found if isinstance(source, Source) else source
    image = _opened(source, reach)
    try:
        width, height = image.size
        if not 0 < width * height <= limit:
            expected = f"expected at least one and at most {limit:,} (data_args.image_decode_limit)"
            raise PictureError(f"{width} x {height} pixels, {expected}")
        yield image
    finally:
        if not isinstance(source, Image.Image):
            image.close()


def _entries(path: Path) -> dict[str, Any]:
    """The entries of a JSON file; none where there is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


_ORIENTATION = 0x0112
"""EXIF's entry; above four, the rows of the file are columns of the picture."""


@contextmanager
def placed(source: Any, place: str) -> Iterator[None]:
    """Puts the place before the reason why a picture cannot be used."""
    try:
        yield
    except PictureError as error:
        where = ": ".join(filter(None, (place, source.place if isinstance(source, Source) else "")))
        raise PictureError(f"{where}: {error}" if where else str(error)) from error


def _blank(*size: int) -> Item:
    return Item(np.broadcast_to(np.zeros((), np.uint8), (*size, 3)))


def _data(found: Any) -> Any:
    """The bytes of a file or address; else what was found."""
    return found.read() if isinstance(found, Address) else _bytes(found) if isinstance(found, Path) else found


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PictureError(describe_error(error)) from error


def _opened(source: Any, reach: Reach | None) -> Image.Image:
    """A picture of whatever form, in most cases not decoded yet."""
    from PIL import Image

    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray):
        return _from_array(source)
    found = located(source, reach)
    found = found.read() if isinstance(found, Address) else found
    data: Any = found if isinstance(found, Path) else io.BytesIO(found)
    try:
        image = Image.open(data, formats=_FORMATS)
    except Image.UnidentifiedImageError as error:
        raise PictureError(f"{_seems(found)}, {_EXPECTED}") from error
    except Exception as error:  # Pillow raises whatever broken bytes lead it to
        raise PictureError(f"unreadable ({describe_error(error)})") from error
    return image


def located(source: Any, reach: Reach | None, what: str = "a picture") -> Any:
    """The file, address or bytes that a picture's source means; a Pillow image means itself.

    Args:
        source: see ``Pictures.item``; what a dataset's row holds.
        reach: of a text that is a path or an address.
        what: is expected.

    Raises:
        PictureError: it means none of them, or one that is out of reach.
    """
    if isinstance(source, Mapping):
        source = source.get("bytes") if source.get("bytes") is not None else source.get("path")
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if isinstance(source, Path):
        return _file(source)
    if isinstance(source, Address):
        return source
    if hasattr(source, "getexif"):
        return source
    if not isinstance(source, str) or not source.strip():
        got = "null" if source is None else "an empty text" if isinstance(source, str) else type(source).__name__
        raise PictureError(f"{got}, expected {what}: bytes, base64, a data URI{' or a path' * (reach is not None)}")
    if data := _DATA.match(source):
        if not (data["kind"] or "image/").startswith("image/") or ";base64" not in data["more"]:
            raise PictureError(f"a data URI of {source[:40]!r}, expected data:image/png;base64,… or another picture's")
        return _decoded(source[data.end() :])
    if _URL.match(source) and not source.startswith("file://"):
        if reach is not None and reach.hosts is not None:
            return Address(source, reach.hosts)
        expected = "base64 or a data URI" if reach is None else "a path or the bytes (or image_urls)"
        raise PictureError(f"{shown(source)!r}: pictures are not fetched from addresses, expected {expected}")
    if _BASE64.fullmatch(source) and (found := _decoded(source)).startswith(_MAGIC):
        return found
    if reach is None:
        raise PictureError(f"{source[:80]!r}: expected base64 or a data URI, since no folder of pictures is known here")
    return _file(resolved(source.removeprefix("file://"), reach))


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(re.sub(r"\s", "", text), validate=True)
    except binascii.Error as error:
        raise PictureError(f"broken base64 ({error})") from error


def resolved(path: str, reach: Reach) -> Path:
    """The absolute path of one that begins in the folder.

    Raises:
        PictureError: it leads out of that.
    """
    try:
        root, found = reach.folder.resolve(), (reach.folder / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise PictureError(f"{path[:200]!r}: no path ({describe_error(error)})") from error
    if not (reach.outside or found.is_relative_to(root)):
        keys = "image_folder, video_folder, image_outside_folder"
        raise PictureError(f"{path!r}: outside of {str(root)!r} ({keys})")
    return found


def _file(path: Path) -> Path:
    if not path.is_file():
        raise PictureError(f"{str(path)!r}: {'not a file' if path.exists() else 'no such file'}")
    if not os.access(path, os.R_OK):
        raise PictureError(f"{str(path)!r}: not readable")
    return path


def _seems(found: Path | bytes) -> str:
    """What bytes that are no picture of a known format are."""
    head = found.open("rb").read(2048) if isinstance(found, Path) else found[:2048]
    if b"<svg" in head.lower():
        return "SVG, which has no pixels"
    if not head:
        return "no bytes"
    if head[4:8] == b"ftyp":
        return f"a file of type {head[8:12].decode('latin1')!r} (HEIC, AVIF or a video)"
    return f"no picture (it begins with {head[:12]!r})"


def _from_array(pixels: np.ndarray) -> Image.Image:
    from PIL import Image

    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (3, 4))):
        got = f"an array of {pixels.dtype} {list(pixels.shape)}"
        raise PictureError(f"{got}, expected uint8 [height, width, 3], or 1 or 4 channels")
    if not pixels.size:
        raise PictureError("no pixels")
    return Image.fromarray(np.ascontiguousarray(pixels))


def rgb(image: Image.Image, *, is_frame: bool = False) -> Image.Image:
    """Decoded, upright, in RGB; what is transparent shows white behind it.

    Args:
        is_frame: it is one of several in its file.

    Raises:
        PictureError: it cannot be used.
    """
    from PIL import Image, ImageOps

    if image.mode not in _MODES:
        raise PictureError(f"pixels of Pillow's mode {image.mode}, expected eight bits for each of 1, 3 or 4 channels")
    try:
        # MPO is the JPEG of a telephone, with smaller ones behind it.
        if not is_frame and image.format != "MPO" and (frames := getattr(image, "n_frames", 1)) > 1:
            raise PictureError(f"{frames} frames, expected one picture")
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
            seen = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen)
        return image.convert("RGB")
    except PictureError:
        raise
    except Exception as error:  # Pillow raises whatever broken bytes lead it to
        raise PictureError(f"unreadable ({describe_error(error)})") from error
