"""Pictures: from a file, bytes or pixels to what a model is given for them, by the model's own processor, once.

A picture becomes an ``Item``: RGB pixels of the size that the processor gives it. Everything behind that is derived
from those bytes and never resized again. A picture that cannot be used as it is, is an error; none is replaced.

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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.data.addresses import Address, PictureError, shown
from roll.data.columns import IntArray, Item
from roll.data.identity import content_ids
from roll.data.picture_forms import PatchForm, PixtralWriter, WholeForm, form_of, form_problem
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


@dataclass(frozen=True)
class Source:
    """A picture of a dataset's row, not decoded yet."""

    found: Any
    """Its file, address, encoded bytes, or a Pillow image."""
    place: str
    """In the row."""

    def read(self) -> Source:
        """The same with the bytes of its file, so that it can go where that is not.

        Raises:
            PictureError: it cannot be read.
        """
        with _placed(self, ""):
            data = _bytes(self.found) if isinstance(self.found, Path) else self.found
            return Source(data.read() if isinstance(data, Address) else data, self.place)


class Pictures:
    """The picture processor of a model; it is loaded when it is needed first.

    Args:
        folder: of the model.
        min_pixels: a picture is made as large as that at least, in place of the processor's own bound.
        max_pixels: likewise, as large as that at most.
        decode_limit: pixels that it may have before; a small file may hold many more.
        tokenizer: the folder's, where it is loaded already.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        decode_limit: int = DECODE_LIMIT,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.decode_limit = decode_limit
        self._bounds = (min_pixels, max_pixels)
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
        least, most = self._bounds
        return Pictures(
            self.folder, min_pixels=least, max_pixels=most, decode_limit=self.decode_limit, tokenizer=tokenizer
        )

    @property
    def token(self) -> int:
        """The vocabulary's id of ``mark``."""
        return int(self._processor.tokenizer.convert_tokens_to_ids(self.mark))

    @property
    def mark(self) -> str:
        """Text that stands for one picture in what a chat template writes."""
        return str(self._processor.image_token)

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
        with _placed(source, place):
            with _bounded(source, self.decode_limit, reach) as image:
                pixels = np.asarray(_rgb(image))
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
        with _placed(source, place):
            return self._blanks(*self._size(*self._upright_size(source)))

    def ids(self, item: Item) -> list[int]:
        """The vocabulary's ids that the mark becomes for an item."""
        height, width, _ = item.data.shape
        return [*self._known_ids(height, width)]

    def content(self, item: Item) -> IntArray:
        """The item's own ids, which are below zero, each for one of ``ids``."""
        if (found := self._contents.get(item)) is None:
            found = content_ids(item, self.ids(item))
            found.flags.writeable = False
            self._contents[item] = found
        return found

    def inputs(self, items: Sequence[Item]) -> dict[str, np.ndarray]:
        """What the model's forward takes for pictures, by the names that it has for them.

        The numbers are equal to the processor's own, which takes several times as long.
        """
        return self._form.inputs([item.data for item in items], self._table_CV)

    def inputs_by_processor(self, items: Sequence[Item]) -> dict[str, np.ndarray]:
        """``inputs`` by the processor's own code, to compare with."""
        pixels = [item.data for item in items]
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
        with _bounded(source, self.decode_limit) as image:
            width, height = image.size
            is_short = image.format in ("JPEG", "MPO") and image not in (source, getattr(source, "found", None))
            if is_short:
                image.draft("RGB", (width // 8, height // 8))  # the whole file is still read
            seen = _rgb(image)
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
        chosen = self._resizer
        values: Any = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256))
        if chosen.do_rescale:
            values = chosen.rescale(values, chosen.rescale_factor)
        if chosen.do_normalize:
            values = chosen.normalize(values, chosen.image_mean, chosen.image_std)
        return np.asarray(values[:, 0], dtype=np.float32)

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
    with _placed(source, ""), _bounded(source, DECODE_LIMIT) as image:
        return Item(np.asarray(_rgb(image)))


@functools.lru_cache(maxsize=64)
def data_uri(item: Item) -> str:
    """A PNG, pixel by pixel; many ask for equal ones."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(item.data).save(buffer, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


@contextmanager
def _bounded(source: Any, limit: int, reach: Reach | None = None) -> Iterator[Image.Image]:
    """A picture that is not decoded yet, and not too large to be."""
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
def _placed(source: Any, place: str) -> Iterator[None]:
    """Puts the place before the reason why a picture cannot be used."""
    try:
        yield
    except PictureError as error:
        where = ": ".join(filter(None, (place, source.place if isinstance(source, Source) else "")))
        raise PictureError(f"{where}: {error}" if where else str(error)) from error


def _blank(height: int, width: int) -> Item:
    return Item(np.broadcast_to(np.zeros((), np.uint8), (height, width, 3)))


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


def located(source: Any, reach: Reach | None) -> Any:
    """The file, address or bytes that a picture's source means; a Pillow image means itself.

    Args:
        source: see ``Pictures.item``; what a dataset's row holds.
        reach: of a text that is a path or an address.

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
        raise PictureError(f"{got}, expected a picture: bytes, base64, a data URI{' or a path' * (reach is not None)}")
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
    return _reached(source.removeprefix("file://"), reach)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(re.sub(r"\s", "", text), validate=True)
    except binascii.Error as error:
        raise PictureError(f"broken base64 ({error})") from error


def _reached(path: str, reach: Reach) -> Path:
    try:
        root, found = reach.folder.resolve(), (reach.folder / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise PictureError(f"{path[:200]!r}: no path ({describe_error(error)})") from error
    if not (reach.outside or found.is_relative_to(root)):
        keys = "image_folder, image_outside_folder"
        raise PictureError(f"{path!r}: outside of {str(root)!r} ({keys})")
    return _file(found)


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


def _rgb(image: Image.Image) -> Image.Image:
    """Decoded, upright, in RGB; what is transparent shows white behind it."""
    from PIL import Image, ImageOps

    if image.mode not in _MODES:
        raise PictureError(f"pixels of Pillow's mode {image.mode}, expected eight bits for each of 1, 3 or 4 channels")
    try:
        # MPO is the JPEG of a telephone, with smaller ones behind it.
        if image.format != "MPO" and (frames := getattr(image, "n_frames", 1)) > 1:
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
