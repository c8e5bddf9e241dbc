"""``data_args``: the dataset of prompts, and how messages become prompts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem

ATTRIBUTE_PATH = re.compile(r"([^\W\d]\w*(\.[^\W\d]\w*)*|.*\.py):[^\W\d]\w*")

RENDERED = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenizer_kwargs",
    }
)
"""Arguments of ``apply_chat_template`` that are no variables of a template's own."""


_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.:-]*[a-z0-9_])?", re.ASCII)
VIDEO_RULES = ("video_fps", "video_max_frames", "video_min_pixels", "video_max_pixels", "video_total_pixels")
"""Keys of ``DataArguments`` that say what is taken of every video of a run."""
PICTURE_BOUNDS = ("image_min_pixels", "image_max_pixels", "image_decode_limit")
"""Keys of ``DataArguments`` that hold of every picture of a run."""


class DatasetFilterConfig(Config):
    """Conditions under which a row of the dataset is used."""

    source: str | list[str] | None = Field(
        default=None, description="Keep rows whose `source_column` is this, or one of these. null: all."
    )
    source_column: str = Field(default="source", min_length=1, description="Column for `source`.")
    min_difficulty: float | None = Field(default=None, description="Lowest accepted difficulty.")
    max_difficulty: float | None = Field(default=None, description="Highest accepted difficulty.")
    difficulty_column: str = Field(
        default="difficulty", min_length=1, description="Column of numbers for the two bounds."
    )
    num_samples: int = Field(
        default=0,
        ge=0,
        description="Most rows to use of those that pass: random by the seed with `shuffle`, else the first. 0: all.",
    )

    def problems(self) -> Iterator[ConfigProblem]:
        if self.source == [] or "" in (self.source if isinstance(self.source, list) else [self.source]):
            yield self.problem("source", "null, a name or a list of names")
        low, high = self.min_difficulty, self.max_difficulty
        if low is not None and high is not None and low > high:
            yield self.problem("min_difficulty", f"at most max_difficulty = {high}", "max_difficulty")


class DataArguments(Config):
    """The dataset and the chat template. Columns can be dotted paths, `reward_model.ground_truth`."""

    template: str = Field(
        default="native",
        min_length=1,
        description="Chat template: native takes the tokenizer's own, else a name (chatml, qwen2, qwen2_5, llama3, "
        "gemma, plain), a path to a Jinja file or the template itself.",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict,
        description="Variables for the chat template, such as enable_thinking: false, wherever it is used.",
    )
    tag_templates: dict[str, str] = Field(
        default_factory=dict,
        description="Chat templates by tag, each like `template`; held-out prompts use those of actor_train. Prompts "
        "of other tags use `template`.",
    )
    file_name: str | list[str] | None = Field(
        default=None,
        description="Files of the dataset: json, jsonl, csv, parquet, arrow, txt (a line is the column `prompt`); a "
        "folder of them or one saved by Hugging Face datasets; globs. Relative to the working directory.",
    )
    dataset_cls: str | None = Field(
        default=None,
        description="package.module:attribute or folder/file.py:attribute, called with (data_args, seed), returns "
        "rows as mappings; replaces reading files.",
    )
    prompt: str | None = Field(
        default=None, min_length=1, description="Column with the question as text, or as a list of messages."
    )
    query: str | None = Field(
        default=None,
        min_length=1,
        description="Column with the subject of the instruction in `prompt`; if not empty, it is added as a separate "
        "line, like `input` after `instruction`.",
    )
    messages: str | None = Field(
        default=None,
        min_length=1,
        description="Column with the conversation as a list of role and content; instead of `prompt`.",
    )
    tools: str | None = Field(
        default="tools",
        min_length=1,
        description="Column with the functions offered to the assistant. null, or no column `tools`: none.",
    )
    image: str | None = Field(
        default="images",
        min_length=1,
        description="Column with the row's pictures, one or a list: paths, bytes, base64 or data URIs. Each stands in "
        "the place of a mark <image> in the words of a user or tool, or, without any mark, before the first. null, or "
        "no column `images`: none.",
    )
    image_folder: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of the pictures' paths, which may not lead out of it. null: that of the dataset's file.",
    )
    image_outside_folder: bool = Field(
        default=False, description="The pictures' paths may lead out of image_folder, as absolute ones do."
    )
    image_urls: bool | list[str] = Field(
        default=False,
        description="Pictures may be at addresses (https://), which are fetched once. true: at any public host; names: "
        "at these hosts alone, which need not be public, and may have http://.",
    )
    image_min_pixels: int | None = Field(
        default=None,
        ge=1,
        description="A picture is enlarged to this many pixels at least. null: what the model's processor says.",
    )
    image_max_pixels: int | None = Field(
        default=None,
        ge=1,
        description="A picture is reduced to this many pixels at most. null: what the model's processor says.",
    )
    image_decode_limit: int = Field(
        default=2**26,
        ge=1,
        description="A picture of more pixels than this, before it is resized, is not decoded and stops the run.",
    )
    video: str | None = Field(
        default="videos",
        min_length=1,
        description="Column with the row's videos, one or a list, each a list of frames in the forms of pictures, a "
        "folder of numbered frames, or a file (GIF, WebP, APNG, MP4 and others) or its bytes. Places are as for "
        "`image`, with marks <video>. null, or no column `videos`: none.",
    )
    video_folder: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of the videos' paths, which may not lead out of it, unless image_outside_folder. null: "
        "that of the pictures.",
    )
    video_fps: float | None = Field(
        default=None,
        gt=0,
        description="Frames that are taken of a second of a file; of a list or folder, all frames are, so many of "
        "which show a second. null: what the model's processor says, as with the following.",
    )
    video_max_frames: int | None = Field(
        default=None,
        ge=2,
        description="Most frames of a video: a file has its frames taken further apart, a longer list stops the run.",
    )
    video_min_pixels: int | None = Field(
        default=None, ge=1, description="A frame is enlarged to this many pixels at least."
    )
    video_max_pixels: int | None = Field(
        default=None, ge=1, description="A frame is reduced to this many pixels at most."
    )
    video_total_pixels: int | None = Field(
        default=None,
        ge=1,
        description="A video's frames are reduced until they have this many pixels together, those that the model "
        "takes as one (two) counted once, though not below video_min_pixels each.",
    )
    system_prompt: str | None = Field(
        default=None, min_length=1, description="System message of conversations that do not begin with one."
    )
    system: str | None = Field(
        default=None,
        min_length=1,
        description="Column with the row's system message, which takes precedence over system_prompt. Rows where it "
        "is empty or null have none.",
    )
    response: str | None = Field(
        default="solution", min_length=1, description="Column with the reference answer. null: there is none."
    )
    id: str | None = Field(
        default="id",
        min_length=1,
        description="Column that names the rows. null, or no column `id`: rows are named file:row.",
    )
    tag: str = Field(default="tag", min_length=1, description="Column with the row's domain.")
    default_tag: str | None = Field(default=None, min_length=1, description="Domain of rows whose tag is missing.")
    domain_interleave_probs: dict[str, float] | None = Field(
        default=None,
        description="Share of each domain among the prompts drawn; all positive, sum 1. null: each prompt once per "
        "epoch.",
    )
    shuffle: bool = Field(
        default=True, description="Reshuffle every epoch, by the seed. false: the order of the files."
    )
    prompt_overflow: Literal["error", "left", "right", "drop"] = Field(
        default="error",
        description="A prompt of more than prompt_length tokens stops the run (error), is cut on its left or right, "
        "or is dropped.",
    )
    dataset_filter: DatasetFilterConfig = Field(default_factory=DatasetFilterConfig, description="Which rows are used.")
    preprocessing_num_workers: int | None = Field(
        default=None,
        ge=1,
        description="Most processes that render and tokenise the prompts, each for 20,000 prompts or more. null: only "
        "this one, whose tokenizer has threads.",
    )

    @property
    def file_names(self) -> list[str]:
        """``file_name`` as a list."""
        return [self.file_name] if isinstance(self.file_name, str) else list(self.file_name or [])

    @property
    def picture_bounds(self) -> dict[str, Any]:
        """Arguments of ``Pictures``."""
        bounds = {"min_pixels": self.image_min_pixels, "max_pixels": self.image_max_pixels}
        videos = {key.removeprefix("video_"): getattr(self, key) for key in VIDEO_RULES}
        return {**bounds, "decode_limit": self.image_decode_limit, "videos": videos}

    @property
    def has_dataset(self) -> bool:
        """Tells whether prompts come from files or a dataset class."""
        return bool(self.file_names or self.dataset_cls)

    def problems(self) -> Iterator[ConfigProblem]:
        if taken := sorted(RENDERED.intersection(self.chat_template_kwargs)):
            key = f"chat_template_kwargs.{taken[0]}"
            expected = "variables of the template alone: this one is set wherever a conversation is rendered"
            yield ConfigProblem(key, self.chat_template_kwargs[taken[0]], expected)
        if self.file_name == [] or "" in self.file_names:
            yield self.problem("file_name", "null, a path or a list of paths")
        if self.prompt is not None and self.messages is not None:
            yield self.problem("messages", f"null with prompt = {self.prompt}: one of the two", "prompt")
        if self.query is not None and self.prompt is None:
            yield self.problem("query", "null without prompt, the column of the instruction", "prompt")
        if self.has_dataset and self.prompt is None and self.messages is None:
            given = "file_name" if self.file_names else "dataset_cls"
            expected = f"the column of the question, or messages that of the conversation, since {given} is set"
            yield self.problem("prompt", expected, "messages", given)
        for kind in ("image", "video"):
            least, most = (getattr(self, f"{kind}_{bound}_pixels") for bound in ("min", "max"))
            if least is not None and most is not None and least > most:
                yield self.problem(f"{kind}_min_pixels", f"at most {kind}_max_pixels = {most}", f"{kind}_max_pixels")
        if isinstance(self.image_urls, list) and not (
            self.image_urls and all(_HOST.fullmatch(name) for name in self.image_urls)
        ):
            expected = "true, false, or names of hosts in small letters, without https:// and without a port"
            yield self.problem("image_urls", expected)
        if self.dataset_cls is not None and not ATTRIBUTE_PATH.fullmatch(self.dataset_cls):
            yield self.problem("dataset_cls", "package.module:attribute or folder/file.py:attribute")
        if self.domain_interleave_probs is not None:
            yield from probability_problems(self.domain_interleave_probs)


def probability_problems(probs: dict[str, float]) -> Iterator[ConfigProblem]:
    """Shares in ``domain_interleave_probs`` that are not positive, or do not add up to 1."""
    key = "domain_interleave_probs"
    if wrong := {domain: share for domain, share in probs.items() if not (math.isfinite(share) and share > 0)}:
        yield ConfigProblem(key, wrong, "positive shares; omit unwanted domains")
    elif abs((total := math.fsum(probs.values())) - 1) > 1e-6:
        yield ConfigProblem(key, probs, f"a sum of 1, not {total:g}")
