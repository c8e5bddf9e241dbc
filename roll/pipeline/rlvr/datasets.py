"""The data of an RLVR run, made and read before any worker starts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from roll.configs.data import DataArguments
from roll.configs.prompts import DataGeneratorConfig, PromptsConfig
from roll.configs.resuming import Rows
from roll.configs.rlvr import RLVRConfig
from roll.data.conversations import Conversations
from roll.data.prompts import PromptDataset, load_prompts
from roll.data.renderer import ChatRenderer, Tool
from roll.data.teacher_prompts import TeacherPrompts
from roll.data.templates import ChatTemplate
from roll.models.tokenizer import policy_tokenizer
from roll.pipeline.prompt_roles import train_sampler
from roll.rewards.scoring import References
from roll.rollout.tool_box import told_tools
from roll.utils.foreign import describe_error
from roll.utils.registry import import_path

_RECIPE = "made_from.json"
TRIAL_SECONDS = 30.0
"""For the reference answers of a dataset."""


DataT = TypeVar("DataT", PromptDataset, Conversations)


@dataclass(frozen=True)
class Datasets(Generic[DataT]):
    """Data that is trained on and data that is held out."""

    train: DataT | None
    """``None`` with ``eval_only``."""
    val: DataT | None

    def describe(self) -> list[str]:
        """Account of what was read: a line for each dataset, and for what of it is left out or not read."""
        return [*_lines("training data", self.train), *_lines("held-out data", self.val)]

    def identities(self) -> dict[str, Rows]:
        """What tells the datasets from others, by the section that names them."""
        read = {"actor_train.data_args": self.train, "validation.data_args": self.val}
        reports = {section: data.report.identity for section, data in read.items() if data is not None}
        return {section: identity for section, identity in reports.items() if identity is not None}


def _lines(name: str, data: PromptDataset | Conversations | None) -> list[str]:
    if data is None:
        return []
    return [f"{name}: {data.report}", *data.report.notes]


def make_data(generator: DataGeneratorConfig) -> None:
    """Calls the generator, unless its folder holds what the same call has made before.

    Raises:
        OSError: of the generator.
        ValueError: of the generator, or of what else it raises.
    """
    folder = Path(generator.folder).expanduser()
    recipe = {"path": generator.path, "args": generator.args}
    note = folder / _RECIPE
    if note.is_file() and json.loads(note.read_text(encoding="utf-8")) == recipe:
        return
    make = cast("Callable[..., Any]", import_path(generator.path, "data_generator.path"))
    folder.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)  # nothing half made must look finished
    try:
        make(folder, **generator.args)
    except (OSError, ValueError):
        raise
    except Exception as error:  # whatever a user's function raises
        raise ValueError(f"data_generator: {generator.path}: {describe_error(error)}") from error
    note.write_text(json.dumps(recipe) + "\n", encoding="utf-8")


def load_renderer(config: PromptsConfig) -> ChatRenderer:
    """The policy's tokenizer and chat template."""
    trusts = config.trusts("actor_train")
    tokenizer = policy_tokenizer(config.pretrain, config.tokenizer_path, trust_remote_code=trusts)
    return ChatRenderer(tokenizer, ChatTemplate.of(config.actor_train.data_args))


def tag_renderers(config: RLVRConfig, renderer: ChatRenderer) -> dict[str, ChatRenderer]:
    """Of the tags whose prompts have a chat template of their own, held-out ones too."""
    templates = ChatTemplate.of(config.actor_train.data_args).of_tags()
    return {tag: ChatRenderer(renderer.tokenizer, template) for tag, template in templates.items()}


def load_datasets(config: RLVRConfig, renderer: ChatRenderer) -> Datasets[PromptDataset]:
    """The prompts that the run needs.

    Raises:
        DataError: everything that is wrong in the files, by file and line.
        ValueError: ``domain_interleave_probs`` does not fit the training data, or a tool cannot be made.
    """
    tools = told_tools(config.tools, list(config.domains))
    train = None if config.eval_only else _load(config, config.actor_train.data_args, renderer, tools)
    if train is not None:
        if (writer := teacher_prompts(config, renderer)) is not None:
            writer.check(train, config.sequence_length - (config.train_sampling.max_new_tokens or 0))
        train_sampler(config, train)  # what is wrong with the shares is told before Ray starts
    val = _load(config, config.validation.data_args, renderer, tools, held_out=True) if config.validation else None
    return Datasets(train, val)


def teacher_prompts(config: RLVRConfig, renderer: ChatRenderer) -> TeacherPrompts | None:
    """Writer of the teacher's own prompts, where it has them."""
    if config.teacher_prompt is None:
        return None
    response, most = config.actor_train.data_args.response, config.teacher_column_length
    return TeacherPrompts(config.teacher_prompt, renderer, response, most)


def tell(line: str) -> None:
    """Writes a line for the person who waits for a run to begin."""
    sys.stderr.write(f"{line}\n")


def _load(
    config: RLVRConfig,
    data: DataArguments,
    renderer: ChatRenderer,
    tools: Mapping[str, Sequence[Tool]],
    *,
    held_out: bool = False,
) -> PromptDataset:
    return load_prompts(
        data,
        renderer=renderer,
        prompt_length=config.lengths(held_out=held_out)[0],
        allowed_tags=config.domains,
        seed=config.seed,
        tools=tools,
        tag_renderers=tag_renderers(config, renderer),
        check=References(config.rewards, TRIAL_SECONDS, tell, tell),
    )
