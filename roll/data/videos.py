"""Videos: the frames of a list, a folder, an animation or a film, and their times, as a model is given them.

Files of films, such as MP4, are read by PyAV, the others by Pillow.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.data.addresses import PictureError
from roll.data.columns import Item
from roll.data.picture_forms import VideoForm
from roll.data.pictures import Pictures, Reach, Source, Video, bounded, located, placed, resolved, rgb
from roll.utils.foreign import describe_error

if TYPE_CHECKING:
    from PIL import Image

_NUMBER = re.compile(r"\d+(?!.*\d)", re.ASCII)
"""The last number of a name."""
_ANIMATIONS = ("GIF", "WEBP", "PNG")
"""Pillow's names of formats whose files tell the times of their frames."""


def video_source(value: Any, place: str, reach: Reach) -> Source:
    """A video's source: a list of its frames, a folder of them, or a file or its bytes.

    Raises:
        PictureError: there is none, or it is out of reach.
    """
    if reach.video_folder is None:
        raise PictureError(f"{place}: videos are not read here, expected pictures and text")
    reach = Reach(reach.video_folder, reach.outside)
    with placed(value, place):
        if isinstance(value, Mapping) and isinstance(frames := value.get("frames"), list):
            value = frames
        if isinstance(value, list | tuple):
            found: Any = tuple(_frame(each, number, reach) for number, each in enumerate(value))
        elif isinstance(value, str) and (folder := _folder(value, reach)) is not None:
            found = _in_folder(folder)
        else:
            found = located(value, reach, "a video")
        return Source(found, place, is_video=True)


def _frame(value: Any, number: int, reach: Reach) -> Any:
    with placed(value, f"frame {number}"):
        return located(value, reach)


def _folder(value: str, reach: Reach) -> Path | None:
    """The folder that a text leads to, if it is one."""
    with suppress(OSError, ValueError):
        if (reach.folder / value.removeprefix("file://")).is_dir():
            return resolved(value.removeprefix("file://"), reach)
    return None


def _in_folder(folder: Path) -> tuple[Path, ...]:
    """The files of a folder of frames by their numbers."""
    files = [file for file in folder.iterdir() if file.is_file() and not file.name.startswith(".")]
    if not files:
        raise PictureError(f"{str(folder)!r}: no files, expected numbered frames")
    numbers: dict[int, Path] = {}
    for file in sorted(files):
        if (found := _NUMBER.search(file.stem)) is None:
            raise PictureError(f"{str(folder)!r}: {file.name!r} has no number, expected numbered frames alone")
        if (other := numbers.setdefault(int(found[0]), file)) != file:
            raise PictureError(f"{str(folder)!r}: {other.name!r} and {file.name!r} have the same number")
    order = sorted(numbers)
    gaps = {later - earlier: (earlier, later) for earlier, later in itertools.pairwise(order)}
    if len(gaps) > 1:
        earlier, later = gaps[max(gaps)]
        raise PictureError(
            f"{str(folder)!r}: frame {earlier} is followed by {later}, expected numbers at equal distances"
        )
    return tuple(numbers[number] for number in order)


def shown(pictures: Pictures, source: Source, *, blank: bool = False) -> Item | Video:
    """A picture or a video as a model is given it.

    Args:
        blank: it is only checked and measured (``Pictures.blank``).

    Raises:
        PictureError: it cannot be used.
    """
    if not source.is_video:
        return pictures.blank(source) if blank else pictures.item(source)
    with placed(source, ""):
        form = pictures.videos
        try:
            return _video(pictures, form, source.found, blank)
        except ValueError as error:
            if isinstance(error, PictureError):
                raise
            raise PictureError(f"the model's processor refuses it ({error})") from error


def _video(pictures: Pictures, form: VideoForm, found: Any, blank: bool) -> Video:
    times, frames = _times_and_frames(form, found, pictures.decode_limit)
    made: list[np.ndarray] = []
    first, size = (0, 0), (0, 0)
    for number, image in enumerate(frames):
        if number == 0:
            first, size = image.size, form.size(len(times), image.height, image.width)
        elif image.size != first:
            got = "{} x {} pixels, the first one {} x {}".format(*image.size, *first)
            raise PictureError(f"frame {number} has {got}; expected one size")
        if not blank:
            chw = form.resize(np.asarray(image).transpose(2, 0, 1), *size)
            made.append(chw.transpose(1, 2, 0))
    pieces = -(-len(times) // form.at_a_time)
    if blank:
        return Video((pictures.blank_piece(form.at_a_time, *size),) * pieces, times)
    made += made[-1:] * (pieces * form.at_a_time - len(made))
    data = np.stack(made).reshape(pieces, form.at_a_time, *size, 3)
    data.flags.writeable = False
    return Video(tuple(map(Item, data)), times)


_Frames = tuple[tuple[float, ...], Iterator["Image.Image"]]


def _times_and_frames(form: VideoForm, found: Any, limit: int) -> _Frames:
    """Seconds to each frame of a video, and the frames, decoded one after another."""
    if isinstance(found, tuple):
        if len(found) > form.most:
            raise PictureError(f"{len(found)} frames, expected at most {form.most} (data_args.video_max_frames)")
        return _evenly(len(found), form), _listed(found, limit)
    head = found.open("rb").read(16) if isinstance(found, Path) else found[:16]
    return _filmed(form, found, limit) if _is_film(head) else _animated(form, found, limit)


def _evenly(count: int, form: VideoForm) -> tuple[float, ...]:
    """The times of frames that do not tell them."""
    if count < form.at_a_time:
        raise PictureError(f"{count} frames, expected at least {form.at_a_time}")
    return tuple(number / form.fps for number in range(count))


def _listed(frames: Sequence[Any], limit: int) -> Iterator[Image.Image]:
    for number, each in enumerate(frames):
        with placed(each, f"frame {number}"), bounded(each, limit) as image:
            yield rgb(image)


def _animated(form: VideoForm, found: Any, limit: int) -> _Frames:
    """Of an animation, which is decoded twice: only its last frame tells how long it is."""
    starts, seconds = list[Fraction](), Fraction(0)
    with bounded(found, limit) as image:
        total = _count(image)
        if total == 1 or image.format not in _ANIMATIONS:
            raise PictureError(
                f"{total} frames in a {image.format}, expected a video: an animation (GIF, WebP, APNG), "
                "a film such as MP4, a list of frames or a folder of them"
            )
        if image.info.get("default_image"):
            raise PictureError("its first picture is not part of the animation; expected frames alone")
        for number in range(total):
            _go_to(image, number)
            starts.append(seconds)
            seconds += Fraction(str(image.info.get("duration") or 0)) / 1000
    if not seconds:
        times = _evenly(total, form)
        if total > form.most:
            raise PictureError(f"{total} frames, expected at most {form.most} (data_args.video_max_frames)")
        return times, _of_animation(found, range(total), limit)
    numbers = form.chosen(total, seconds)
    return tuple(float(starts[number]) for number in numbers), _of_animation(found, numbers, limit)


def _of_animation(found: Any, numbers: Sequence[int], limit: int) -> Iterator[Image.Image]:
    with bounded(found, limit) as image:
        for number in numbers:
            _go_to(image, number)
            yield rgb(image, is_frame=True)


def _count(image: Image.Image) -> int:
    try:
        return int(getattr(image, "n_frames", 1))
    except Exception as error:  # Pillow raises whatever broken bytes lead it to
        raise PictureError(f"unreadable ({describe_error(error)})") from error


def _go_to(image: Image.Image, number: int) -> None:
    try:
        image.seek(number)
        image.load()
    except Exception as error:  # Pillow raises whatever broken bytes lead it to
        raise PictureError(f"frame {number}: unreadable ({describe_error(error)})") from error


def _is_film(head: bytes) -> bool:
    """Tells MP4 and MOV, Matroska and WebM, AVI, Ogg, FLV, MPEG and its transport streams by their first bytes."""
    return (
        head[4:8] in (b"ftyp", b"moov", b"mdat")
        or head.startswith((b"\x1a\x45\xdf\xa3", b"OggS", b"FLV", b"\0\0\1\xba", b"\0\0\1\xb3", b"\x47\x40"))
        or (head.startswith(b"RIFF") and head[8:12] == b"AVI ")
    )


def _filmed(form: VideoForm, found: Any, limit: int) -> _Frames:
    """Of a film: its packets tell the times of its frames."""
    if find_spec("av") is None:
        raise PictureError("a film, which the package av reads: pip install 'roll-rl[video]' (or a list of frames)")
    with _film(found) as film:
        stream = film.streams.video[0]
        size = (stream.codec_context.height, stream.codec_context.width)
        if not 0 < size[0] * size[1] <= limit:
            expected = f"expected at least one and at most {limit:,} (data_args.image_decode_limit)"
            raise PictureError(f"{size[1]} x {size[0]} pixels, {expected}")
        try:
            packets = {each.pts: each.pts + (each.duration or 0) for each in film.demux(stream) if each.pts is not None}
        except Exception as error:
            raise PictureError(f"unreadable ({describe_error(error)})") from error
        marks, unit, stated = sorted(packets), stream.time_base, _stated_end(stream)
    total = len(marks)
    if total < form.at_a_time:
        raise PictureError(f"{total} frames with a time, expected at least {form.at_a_time}")
    seconds = (marks[-1] - marks[0]) * unit * Fraction(total, total - 1)
    end = max(packets.values()) * unit
    if stated - end > _SLACK + 2 * seconds / total:
        raise PictureError(f"cut off: frames of {float(end):.1f} of {float(stated):.1f} seconds")
    wanted = [marks[number] for number in form.chosen(total, seconds)]
    return tuple(float((mark - marks[0]) * unit) for mark in wanted), _of_film(found, wanted)


_SLACK = Fraction(1, 10)
"""Seconds that a film may end before it says that it does, beside two of its frames."""


def _stated_end(stream: Any) -> Fraction:
    """Seconds that a film's pictures have by its own word; 0 without one."""
    if stream.duration:
        return Fraction(stream.duration * stream.time_base)
    with suppress(ValueError):
        hours, minutes, seconds = map(Fraction, stream.metadata.get("DURATION", "").split(":"))
        return (hours * 60 + minutes) * 60 + seconds
    return Fraction(0)


def _film(found: Any) -> Any:
    import av

    try:
        film: Any = av.open(str(found) if isinstance(found, Path) else io.BytesIO(found))
    except Exception as error:
        raise PictureError(f"unreadable ({describe_error(error)})") from error
    if not film.streams.video:
        film.close()
        raise PictureError("a film without pictures: sound is not supported")
    return film


def _of_film(found: Any, marks: Sequence[int]) -> Iterator[Image.Image]:
    left = list(marks)
    with _film(found) as film:
        frames = film.decode(film.streams.video[0])
        while left:
            try:
                frame = next(frames, None)
            except Exception as error:
                raise PictureError(f"unreadable ({describe_error(error)})") from error
            if frame is None or (frame.pts is not None and frame.pts > left[0]):
                raise PictureError(f"{len(left)} of {len(marks)} frames cannot be decoded")
            if frame.pts == left[0]:
                if frame.rotation:
                    raise PictureError(f"its frames are turned by {frame.rotation} degrees; expected upright ones")
                left.pop(0)
                yield frame.to_image()
