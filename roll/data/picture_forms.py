"""Forms of picture processors: how large a picture becomes, and the numbers that the vision tower gets of it.

A form is common to families: rows of patches with grids (Qwen, GLM), or pictures as they are (CLIP, SigLIP, Gemma,
Pixtral). What a processor states, such as its sizes and patches, it says itself.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np

_FIXED = ("CLIPImageProcessor", "SiglipImageProcessor", "LlavaImageProcessor", "Gemma3ImageProcessor")
_PATCHES = ("Qwen2VLImageProcessor", "Glm4vImageProcessor")
_SIZED = "PixtralImageProcessor"


def form_problem(chosen: Any) -> str:
    """Why pictures of an image processor are not taken, in words that follow its name; empty if they are."""
    name, known = _name(chosen), (*_PATCHES, *_FIXED, _SIZED)
    if name not in known or not chosen.do_resize:
        return f"is {name}; expected one that makes one piece of a picture and resizes it once: {', '.join(known)}"
    if getattr(chosen, "do_pan_and_scan", None):
        return f"is {name} with do_pan_and_scan, which cuts a picture into several; expected false"
    if name in _FIXED and None in _sides(chosen):
        return f"is {name} with the size {dict(chosen.size)}; expected height and width, or do_center_crop"
    return ""


def form_of(processor: Any) -> PatchForm | WholeForm:
    """That of a family's processor."""
    chosen = processor.image_processor
    if _name(chosen) == _SIZED:
        return SizedForm(chosen, processor.patch_size * processor.spatial_merge_size)
    return PatchForm(chosen) if _name(chosen) in _PATCHES else WholeForm(chosen)


def _sides(chosen: Any) -> tuple[int, int]:
    """Height and width of pictures of one size."""
    bounds = chosen.crop_size if chosen.do_center_crop else chosen.size
    return bounds.height, bounds.width


def _name(chosen: Any) -> str:
    return type(chosen).__name__.removesuffix("Pil")


class PatchForm:
    """A picture has whole tokens, and as many pixels as bounds allow; all patches of pictures are one row."""

    names: tuple[str, ...] = ("pixel_values", "image_grid_thw")

    def __init__(self, chosen: Any) -> None:
        self._chosen = chosen
        self._fit: Any = sys.modules[type(chosen).__module__].smart_resize
        self._factor = int(chosen.patch_size * chosen.merge_size)
        frames = {"num_frames", "temporal_factor"} & inspect.signature(self._fit).parameters.keys()
        self._frames = dict.fromkeys(frames, int(chosen.temporal_patch_size))
        """The bounds of some count a picture's pixels once for each of so many frames."""

    @property
    def smallest(self) -> tuple[int, int]:
        return self._factor, self._factor

    def set_bounds(self, least: int | None, most: int | None) -> None:
        """Takes other bounds for the pixels of a picture than the processor's own.

        Raises:
            ValueError: nothing lies between them.
        """
        chosen, times = self._chosen, max(self._frames.values(), default=1)
        own = (chosen.size.shortest_edge, chosen.size.longest_edge)
        low, high = (
            given if wanted is None else wanted * times for wanted, given in zip((least, most), own, strict=True)
        )
        if not low <= high:
            raise ValueError(f"pictures of {low // times:,} to {high // times:,} pixels")
        chosen.size = type(chosen.size)(shortest_edge=low, longest_edge=high)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a picture once it is resized.

        Raises:
            ValueError: the processor refuses it.
        """
        bounds = self._chosen.size
        given = {"factor": self._factor, "min_pixels": bounds.shortest_edge, "max_pixels": bounds.longest_edge}
        found: tuple[int, int] = self._fit(height=height, width=width, **given, **self._frames)
        return found

    def resize(self, chw: np.ndarray) -> np.ndarray:
        chosen = self._chosen
        if self.size(*chw.shape[1:]) == chw.shape[1:]:
            return chw
        options: Any = {"factor": self._factor, "temporal_factor": chosen.temporal_patch_size}
        found: np.ndarray = chosen.resize(chw, size=chosen.size, resample=chosen.resample, **options)
        return found

    def described(self, height: int, width: int) -> dict[str, Any]:
        """What the processor counts tokens by."""
        return {"image_grid_thw": np.array([self._grid(height, width)])}

    def inputs(self, pictures: Sequence[np.ndarray], tables_CV: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """``pixel_values`` [patches, channels · times · patch²] and ``image_grid_thw`` [pictures, 3].

        Args:
            pictures: uint8 [height, width, 3], which is there at all times, or [times, height, width, 3].
            tables_CV: for each, the number for each value of a byte, by channel.
        """
        patch, merge, times = (getattr(self._chosen, f"{name}_size") for name in ("patch", "merge", "temporal_patch"))
        grids = [self._grid(*pixels.shape[-3:-1]) for pixels in pictures]
        values = np.empty((sum(map(math.prod, grids)), 3, times, patch, patch), dtype=np.float32)
        end = 0
        for pixels, table_CV, (_, high, wide) in zip(pictures, tables_CV, grids, strict=True):
            end += high * wide
            cells = pixels.reshape(-1, high // merge, merge, patch, wide // merge, merge, patch, 3)
            cells = cells.transpose(7, 1, 4, 2, 5, 0, 3, 6).reshape(3, high * wide, -1, patch, patch)
            for channel, table_V in enumerate(table_CV):
                values[end - high * wide : end, channel] = table_V[cells[channel]]
        flat = values.reshape(len(values), math.prod(values.shape[1:]))
        return {"pixel_values": flat, "image_grid_thw": np.array(grids, dtype=np.int64).reshape(-1, 3)}

    def _grid(self, height: int, width: int) -> tuple[int, int, int]:
        return 1, height // self._chosen.patch_size, width // self._chosen.patch_size


class VideoForm:
    """Videos of Qwen3-VL's processor: pieces of a few frames, each a picture of its own behind its time in words.

    Args:
        processor: the family's, which writes pictures.
        entries: of the part for videos.
        fps: frames that are taken of a second.
        max_frames: most frames.
        min_pixels: of a frame.
        max_pixels: likewise.
        total_pixels: of all frames, of which those of a piece count once.

    Raises:
        ValueError: it is another's, or does not fit that for pictures.
    """

    def __init__(
        self,
        processor: Any,
        entries: Mapping[str, Any],
        fps: float | None = None,
        max_frames: int | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        total_pixels: int | None = None,
    ) -> None:
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

        kind = str(entries.get("video_processor_type"))
        if kind != _VIDEOS or not isinstance(form_of(processor), PatchForm):
            got = f"its video processor is {kind}" if entries else "no video_preprocessor_config.json"
            raise ValueError(f"{got}; expected {_VIDEOS}")
        own = Qwen3VLVideoProcessor(**{key: value for key, value in entries.items() if key != "video_processor_type"})
        sizes = ("patch_size", "merge_size", "temporal_patch_size")
        pairs = {key: (getattr(own, key), getattr(processor.image_processor, key)) for key in sizes}
        if wrong := {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}:
            raise ValueError(f"of pictures and videos it has different {wrong}; expected the same")
        if own.cap_pixels_per_frame:
            raise ValueError("its video processor has cap_pixels_per_frame, expected false: video_max_pixels bounds")
        self._processor, self._own, self._fit = processor, own, smart_resize
        processor.video_processor = own  # which writes them by its sizes
        self.mark = str(processor.video_token)
        self.at_a_time: int = own.temporal_patch_size
        """Frames of a piece."""
        self.fps, self.least, self.most = (fps or own.fps, own.min_frames, max_frames or own.max_frames)
        self._pixels = (min_pixels, max_pixels, total_pixels)

    def chosen(self, total: int, seconds: Fraction) -> list[int]:
        """The frames that are taken of a video with so many, by the processor's rule."""
        count = min(max(int(seconds * Fraction(self.fps)), self.least), self.most, total)
        return [int(index) for index in np.linspace(0, total - 1, count).round()]

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of a video's frames once they are resized.

        Raises:
            ValueError: the processor refuses it.
        """
        bounds: Any = self._own.size
        least, most, total = self._pixels
        low = bounds.shortest_edge if least is None else least * frames
        high = bounds.longest_edge if most is None else most * frames
        high = high if total is None else min(high, total * self.at_a_time)
        given = {"factor": self._own.patch_size * self._own.merge_size, "temporal_factor": self.at_a_time}
        found: tuple[int, int] = self._fit(frames, height, width, **given, min_pixels=low, max_pixels=max(low, high))
        return found

    def resize(self, chw: np.ndarray, height: int, width: int) -> np.ndarray:
        """A frame in the size that it has in its video."""
        from transformers.image_processing_backends import PilBackend
        from transformers.image_utils import SizeDict

        resizer: Any = self._processor.image_processor
        size = SizeDict(height=height, width=width)
        found: np.ndarray = PilBackend.resize(resizer, chw, size, self._own.resample)
        return found

    def text(self, times: Sequence[float], height: int, width: int) -> str:
        """What the processor writes for a video.

        Args:
            times: seconds to each frame.
        """
        patch = self._own.patch_size
        grid = np.array([[-(-len(times) // self.at_a_time), height // patch, width // patch]])
        told = SimpleNamespace(fps=1, frames_indices=[*times])
        written = {"video_grid_thw": grid, "video_metadata": [told]}
        return str(self._processor.replace_video_token(written, 0))

    @functools.cached_property
    def table_CV(self) -> np.ndarray:
        """``table_of`` of frames."""
        return table_of(self._processor.image_processor, self._own)

    def inputs_by_processor(self, piece: np.ndarray) -> dict[str, np.ndarray]:
        """``PatchForm.inputs`` of a piece, in patches by the processor's own code."""
        import torch

        frames = [_numbers(self._processor.image_processor, self._own, frame) for frame in piece.transpose(0, 3, 1, 2)]
        sizes = (self._own.patch_size, self._own.merge_size, self.at_a_time)
        patches, *grid = self._own.patchify(torch.from_numpy(np.stack(frames))[None], *sizes)
        return {"pixel_values": patches[0].numpy(), "image_grid_thw": np.array([grid], dtype=np.int64)}


_VIDEOS = "Qwen3VLVideoProcessor"


def table_of(code: Any, entries: Any) -> np.ndarray:
    """The number that the model gets for each value of a byte, in each channel, by the processor's arithmetic.

    Args:
        code: a picture processor.
        entries: what it is asked to do: of that, or of a processor of videos.
    """
    values = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256))
    return np.asarray(_numbers(code, entries, values)[:, 0], dtype=np.float32)


def _numbers(code: Any, entries: Any, values: Any) -> np.ndarray:
    if entries.do_rescale:
        values = code.rescale(values, entries.rescale_factor)
    if entries.do_normalize:
        values = code.normalize(values, entries.image_mean, entries.image_std)
    return np.asarray(values)


class WholeForm:
    """All pictures have one size."""

    names: tuple[str, ...] = ("pixel_values",)

    def __init__(self, chosen: Any) -> None:
        self._chosen = chosen

    @property
    def smallest(self) -> tuple[int, int]:
        return _sides(self._chosen)

    def set_bounds(self, least: int | None, most: int | None) -> None:
        """Every picture has the same pixels.

        Raises:
            ValueError: others are wanted.
        """
        if least is not None or most is not None:
            high, wide = self.smallest
            raise ValueError(f"its pictures have {wide} x {high} pixels each; expected no other bounds")

    def size(self, height: int, width: int) -> tuple[int, int]:
        return self.smallest

    def resize(self, chw: np.ndarray) -> np.ndarray:
        options: Any = {"return_tensors": "np", "input_data_format": "channels_first"}
        found: np.ndarray = self._chosen([chw], do_rescale=False, do_normalize=False, **options)["pixel_values"][0]
        return found

    def described(self, height: int, width: int) -> dict[str, Any]:
        """What the processor counts tokens by."""
        return {"pixel_values": [np.broadcast_to(np.zeros((), np.uint8), (3, height, width))], "num_crops": [0]}

    def inputs(self, pictures: Sequence[np.ndarray], tables_CV: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """``pixel_values`` [pictures, channels, height, width]; arguments as for patches."""
        values = np.empty((len(pictures), 3, *self.smallest), dtype=np.float32)
        for number, pixels in enumerate(pictures):
            for channel, table_V in enumerate(tables_CV[number]):
                values[number, channel] = table_V[pixels[:, :, channel]]
        return {"pixel_values": values}


class SizedForm(WholeForm):
    """Pictures of whole tokens and sizes of their own, which go beside them; smaller ones end in zeros.

    They have two tokens or more: Transformers' class fails for one that is alone.
    """

    names = ("pixel_values", "image_sizes")

    def __init__(self, chosen: Any, side: int) -> None:
        super().__init__(chosen)
        self._side = side
        chosen.patch_size = {"height": side, "width": side}
        self._fit: Any = sys.modules[type(chosen).__module__].get_resize_output_image_size

    @property
    def smallest(self) -> tuple[int, int]:
        return self._side, 2 * self._side

    def set_bounds(self, least: int | None, most: int | None) -> None:
        """The bound is that of the longer side.

        Raises:
            ValueError: bounds for pixels are wanted.
        """
        if least is not None or most is not None:
            raise ValueError(
                f"its pictures have at most {self._chosen.size.longest_edge} pixels a side; expected no bounds"
            )

    def size(self, height: int, width: int) -> tuple[int, int]:
        blank = np.broadcast_to(np.zeros((), np.uint8), (3, height, width))
        options: Any = {"patch_size": self._side, "input_data_format": "channels_first"}
        found: tuple[int, int] = self._fit(blank, size=self._chosen.size.longest_edge, **options)
        if found == (self._side, self._side):
            raise ValueError("it would be one token, expected two or more")
        return found

    def described(self, height: int, width: int) -> dict[str, Any]:
        return {"image_sizes": [(height, width)]}

    def inputs(self, pictures: Sequence[np.ndarray], tables_CV: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """``pixel_values`` [pictures, channels, most height, most width] and ``image_sizes`` [pictures, 2]."""
        sizes = np.array([pixels.shape[:2] for pixels in pictures], dtype=np.int64).reshape(-1, 2)
        values = np.zeros((len(pictures), 3, *sizes.max(0, initial=0)), dtype=np.float32)
        for pixels, table_CV, place in zip(pictures, tables_CV, values, strict=True):
            for channel, table_V in enumerate(table_CV):
                place[channel, : pixels.shape[0], : pixels.shape[1]] = table_V[pixels[:, :, channel]]
        return {"pixel_values": values, "image_sizes": sizes}


class PixtralWriter:
    """Transformers' ``PixtralProcessor`` as far as it writes pictures; that class needs torchvision to be imported."""

    def __init__(
        self,
        image_processor: Any,
        tokenizer: Any,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
    ) -> None:
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.patch_size, self.spatial_merge_size = patch_size, spatial_merge_size
        self.image_token, self._break, self._end = image_token, image_break_token, image_end_token

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int) -> str:
        """A mark for each token of a picture, with others between its rows and at its end."""
        side = self.patch_size * self.spatial_merge_size
        high, wide = (int(pixels) // side for pixels in image_inputs["image_sizes"][image_idx])
        return self._break.join([self.image_token * wide] * high) + self._end
