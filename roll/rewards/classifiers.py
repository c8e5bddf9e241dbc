"""Sequence classifiers in local folders: whole models, or LoRA adapters with a head as peft keeps them.

An adapter is not merged, which would round its sum with the weights to their number format.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from roll.models.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE, CLASSIFIES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from roll.rewards.reward_model import RewardModelConfig

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Adapter:
    """A folder of peft."""

    folder: Path

    @classmethod
    def of(cls, folder: Path) -> Adapter | None:
        """The adapter in a folder that holds no whole model."""
        whole = (folder / "config.json").is_file()
        return cls(folder) if (folder / ADAPTER_CONFIG).is_file() and not whole else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """Contents of its configuration; none of one that cannot be read."""
        try:
            found = json.loads((self.folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def base(self) -> str:
        """The model that it adapts."""
        return str(self.config.get("base_model_name_or_path"))

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """Shapes of its tensors, by their names in the file.

        Raises:
            ValueError: the file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        file = self.folder / ADAPTER_FILE
        try:
            with safe_open(str(file), framework="pt") as tensors:
                return {key: tensors.get_slice(key).get_shape() for key in tensors.keys()}  # noqa: SIM118 (not a dict)
        except SafetensorError as error:
            raise ValueError(f"model_path: {file}: {error}; expected a whole safetensors file") from error

    @property
    def brings(self) -> set[str]:
        """Names of the base model's weights that are its own."""
        from roll.models.lora import PREFIX

        return {name.removeprefix(PREFIX) for name in self.shapes}

    def wrong(self) -> tuple[str, str] | None:
        """The expected folder, and the reason, if it cannot be loaded."""
        from roll.models.tokenizer import locate_model

        if (task := self.config.get("task_type")) != CLASSIFIES:
            return "a classifier's adapter", f"task_type is {task!r} in {ADAPTER_CONFIG}, expected {CLASSIFIES}"
        if not (self.folder / ADAPTER_FILE).is_file():
            return "an adapter with its weights", f"there is no {ADAPTER_FILE} in it"
        try:
            locate_model(self.base)
        except ValueError as error:
            return "an adapter whose base is where it says", f"base_model_name_or_path: {error}"
        if importlib.util.find_spec("peft") is None:
            return "a whole model, or peft installed: pip install 'roll-rl[lora]'", "it is an adapter"
        return None


def load_tokenizer_of(config: RewardModelConfig) -> PreTrainedTokenizerBase:
    """Its own tokenizer; that of the base where there is none beside an adapter.

    Raises:
        ValueError: there is none.
    """
    from roll.models.tokenizer import TOKENIZER_FILES, load_tokenizer

    folder = Path(config.model_path).expanduser()
    adapter = Adapter.of(folder)
    own = adapter is None or any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES)
    path = config.model_path if own or adapter is None else adapter.base
    try:
        return load_tokenizer(path, alone=adapter is not None, trust_remote_code=config.trust_remote_code)
    except ValueError as error:
        raise ValueError(f"model_path: {error}") from error


def load_sizes(config: RewardModelConfig) -> PreTrainedConfig:
    """Configuration of the classifier; the head beside an adapter says how many outputs there are.

    Raises:
        ValueError: it cannot be read.
    """
    from roll.models.loading import load_config

    adapter = Adapter.of(Path(config.model_path).expanduser())
    path = config.model_path if adapter is None else adapter.base
    try:
        sizes = load_config(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"model_path: {error}") from error
    if adapter is not None:
        from roll.models.lora import SCORE_NAME

        head = adapter.shapes.get(SCORE_NAME)
        if head is not None and sizes.num_labels != head[0]:
            sizes.num_labels = head[0]
    return sizes


def load_classifier(config: RewardModelConfig) -> PreTrainedModel:
    """The classifier in evaluation mode.

    Raises:
        ValueError: it cannot be loaded, or weights are missing.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    folder = Path(config.model_path).expanduser()
    adapter = Adapter.of(folder)
    options: dict[str, Any] = {"dtype": getattr(torch, _DTYPES[config.dtype]) if config.dtype else "auto"}
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    sizes = load_sizes(config)
    try:
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            str(folder) if adapter is None else str(Path(adapter.base).expanduser()),
            config=sizes,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=adapter is not None,  # a head of other outputs, which the adapter's replaces
            **options,
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"model_path: no classifier could be loaded from {config.model_path!r} ({error})") from error
    model: PreTrainedModel
    model, report = loaded
    unset = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    if missing := sorted(unset - (set() if adapter is None else adapter.brings)):
        # transformers would go on with random weights in their place.
        raise ValueError(
            f"model_path: {len(missing)} weights are missing in {config.model_path!r}, the first is {missing[0]!r}; "
            "expected a model with a trained classification head"
        )
    if adapter is not None:
        model = _adapted(model, adapter)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model.eval()


def _adapted(model: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """The model with the adapter's layers in it.

    Raises:
        ValueError: it is another model's.
    """
    from peft import PeftModel, get_peft_model_state_dict

    try:
        found = PeftModel.from_pretrained(model, adapter.folder)
    except (ValueError, RuntimeError, KeyError) as error:  # a KeyError where the head is missing
        raise ValueError(f"model_path: {adapter.folder} does not fit its base {adapter.base} ({error})") from error
    if different := get_peft_model_state_dict(found).keys() ^ adapter.shapes.keys():
        raise ValueError(f"model_path: {adapter.folder} does not fit its base {adapter.base} ({min(different)})")
    return cast("PreTrainedModel", found.get_base_model())
