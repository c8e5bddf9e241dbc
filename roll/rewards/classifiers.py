"""Sequence classifiers: their configuration, and those in local folders, whole models or LoRA adapters with a head.

An adapter is not merged, which would round its sum with the weights to their number format.

Shape suffixes: ``_B`` rows of a batch, ``_S`` padded positions, ``_L`` labels.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import httpx
import numpy as np
from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigProblem
from roll.data.columns import Item
from roll.data.identity import vocabulary_ids
from roll.data.templates import read_template
from roll.models.adapter_files import ADAPTER_CONFIG, ADAPTER_FILE, CLASSIFIES, matrix_shapes_in
from roll.models.tensor_parallel import uneven_heads
from roll.rewards.endpoint import Endpoint, RemoteConfig, TransientError, read_key
from roll.rewards.types import RewardError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.distributed import DistributedConfig

    from roll.models.pictures import Tower


class RemoteClassifierConfig(RemoteConfig):
    """``args.remote`` of the verifier ``reward_model``: a server of classifiers."""

    url: str = Field(description="Base of the server, such as http://10.0.0.5:8000; /classify is added if absent.")
    server: Literal["vllm", "sglang"] = Field(
        default="vllm",
        description="Which one it is: `vllm serve … --runner pooling`, or SGLang's `launch_server … --is-embedding`.",
    )
    model_name: str | None = Field(
        default=None, description="The model's name on the server. null: none is sent, it has one model."
    )


_PLAN = "base_model_tp_plan"


class RewardModelConfig(Config):
    """Keys of ``args`` for the verifier ``reward_model``."""

    model_path: str = Field(
        min_length=1,
        description="Folder in Hugging Face format with weights, classification head and tokenizer, or a peft LoRA "
        "adapter with a head, whose base is the one it names; with remote, only config.json and the tokenizer are "
        "read.",
    )
    remote: RemoteClassifierConfig | None = Field(
        default=None,
        description="A vLLM or SGLang server that holds the model. null: each reward worker holds it, on the domain's "
        "device_mapping.",
    )
    template: str = Field(
        default="native",
        description="Chat template of the reward model: `native` for its tokenizer's own, a path to a Jinja file, or "
        "Jinja text.",
    )
    dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="Number format of the weights. null: what the model's config.json says."
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python files that come with the model, as in model_args; only if you have read them.",
    )
    device: str = Field(default="auto", description="cpu, cuda, cuda:1 …; `auto`: cuda if one is visible, else cpu.")
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        description="Devices of a reward worker over which the model is split; num_gpus_per_worker follows from it. "
        "Without device_mapping: processes on the CPU.",
    )
    attn_implementation: str | None = Field(
        default=None, description="sdpa, eager, flash_attention_2 …; null: the library's default."
    )
    label: int | str | None = Field(
        default=None, description="Which output is the score: its index, or its name in label2id. null: the only one."
    )
    probability: bool = Field(default=False, description="Take the label's probability (softmax), not its logit.")
    scale: float = Field(default=1.0, gt=0, description="score = scale · output + shift.")
    shift: float = Field(default=0.0, description="score = scale · output + shift.")
    sigmoid: bool = Field(default=False, description="Then apply the logistic function.")
    correct_threshold: float | None = Field(
        default=None,
        description="Lowest score that counts as solved. null: 0.5 with sigmoid or probability, else 0.",
    )
    max_length: int | None = Field(
        default=None, ge=1, description="Tokens that the reward model reads. null: the model's maximum."
    )
    overlong: Literal["left", "error"] = Field(
        default="left",
        description="A longer conversation loses its beginning (counted as `truncated`), or has no reward.",
    )
    batch_size: int = Field(default=16, ge=1, description="Samples of one forward pass.")
    batch_wait: float = Field(
        default=0.005, ge=0, le=10, description="Seconds that an incomplete batch waits for more samples."
    )

    def problems(self) -> Iterator[ConfigProblem]:
        folder = Path(self.model_path).expanduser()
        if (adapter := Adapter.of(folder)) is not None:
            if (wrong := adapter.wrong()) is not None:
                expected, hint = wrong
                yield self.problem("model_path", expected, hint=hint)
            if self.remote is not None:
                hint = f"roll export {self.model_path} -o FOLDER --merge-adapter makes one"
                yield self.problem("model_path", "a whole model with remote", "remote", hint=hint)
        elif not (folder / "config.json").is_file():
            why = "no config.json in it" if folder.is_dir() else "there is no such folder"
            yield self.problem("model_path", "a folder with a model in Hugging Face format", hint=why)
        try:
            read_template(self.template)
        except ValueError as error:
            yield self.problem("template", "a chat template", hint=str(error))
        if not re.fullmatch(r"auto|cpu|(cuda|xpu|npu|mps)(:\d+)?", self.device):
            yield self.problem("device", "auto, cpu, cuda or cuda:<index>")
        if self.sigmoid and self.probability:
            yield self.problem("sigmoid", "false with probability: true: one of the two", "probability")
        if isinstance(self.label, int) and self.label < 0:
            yield self.problem("label", "0 or more")
        for key in (
            ("dtype", "device", "tensor_parallel_size", "attn_implementation") if self.remote is not None else ()
        ):
            if getattr(self, key) != type(self).model_fields[key].default:
                yield self.problem(key, "no such key with remote: the server decides", "remote")
        if self.tensor_parallel_size > 1 and self.remote is None:
            yield from self._undivided()

    def _undivided(self) -> Iterator[ConfigProblem]:
        """What is in the way of a model on several devices."""
        key = "tensor_parallel_size"
        if self.device not in ("auto", "cpu", "cuda"):
            yield self.problem("device", f"auto, cpu or cuda with {key}: the first ones that are visible", key)
        if Adapter.of(Path(self.model_path).expanduser()) is not None:
            hint = f"roll export {self.model_path} -o FOLDER --merge-adapter makes one"
            yield self.problem("model_path", f"a whole model with {key}", key, hint=hint)
            return
        try:
            sizes = load_sizes(self)
        except ValueError:
            return  # told of elsewhere
        if not (getattr(sizes, _PLAN, None) or getattr(sizes.get_text_config(), _PLAN, None)):
            yield self.problem(key, f"1: Transformers has no plan for dividing {sizes.model_type}", "model_path")
        elif (expected := uneven_heads(sizes, self.tensor_parallel_size)) is not None:
            yield self.problem(key, expected, "model_path")

    def threshold(self) -> float:
        """Lowest score that counts as solved."""
        if self.correct_threshold is not None:
            return self.correct_threshold
        return 0.5 if self.sigmoid or self.probability else 0.0


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Conversation:
    """What a classifier reads."""

    ids: list[int]
    """Those of pictures are below zero."""
    items: tuple[Item, ...] = ()
    """The pictures."""


class Classifier(ABC):
    """Computes logits for conversations, locally or on a server. Serves one event loop."""

    async def start(self) -> None:
        """Loads the model, if it is not there yet; ``forward`` would do so too.

        Raises:
            ValueError: it cannot be loaded.
            RewardError: a process of it died.
        """
        return None

    @abstractmethod
    async def forward(self, rows: list[Conversation]) -> list[list[float]]:
        """Logits of every label for every row.

        Raises:
            RewardError: there are none.
        """

    async def offload(self) -> None:
        """Takes the model to host memory, after the batch that runs; further ones wait for ``onload``."""
        return None

    async def onload(self) -> None:
        """Takes it back to its devices."""
        return None

    @abstractmethod
    async def close(self) -> None:
        """Ends what holds it."""


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
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its tensors, by their names in the file.

        Raises:
            ValueError: the file is damaged.
        """
        return matrix_shapes_in(self.folder)

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
            return "an adapter with its weights", f"no {ADAPTER_FILE} in it"
        try:
            locate_model(self.base)
        except ValueError as error:
            return "an adapter whose base exists", f"base_model_name_or_path: {error}"
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


def seeing(config: RewardModelConfig) -> bool:
    """Tells whether a classifier is shown pictures: in one piece, in this process, of a family that was compared."""
    if config.remote is not None or config.tensor_parallel_size > 1:
        return False
    try:
        sizes = load_sizes(config)
    except ValueError:
        return False  # told of elsewhere
    if getattr(sizes, "vision_config", None) is None:
        return False
    from roll.models.pictures import pictures_problem

    return not pictures_problem(sizes)


def folder_of(config: RewardModelConfig) -> str:
    """The folder of the classifier, or of the base that an adapter has."""
    folder = Path(config.model_path).expanduser()
    adapter = Adapter.of(folder)
    return str(folder) if adapter is None else adapter.base


class Padding:
    """Tokens to pad with, so that the classification head finds each row's last token.

    The head reads the score at the last token that differs from ``config.pad_token_id``, or, without one, at the last
    position, which would be padding. Such a model gets an id that no row contains; the mask hides it. The tokenizer's
    padding token is not asked: the head would not recognise it.
    """

    def __init__(self, sizes: PreTrainedConfig) -> None:
        text = sizes.get_text_config()
        self._vocabulary: int = text.vocab_size
        pad_id = getattr(text, "pad_token_id", None)
        self.own: int | None = pad_id if isinstance(pad_id, int) and 0 <= pad_id < text.vocab_size else None
        """The id that the head knows."""

    def of(self, rows: list[list[int]]) -> int:
        """The id for a batch of ids.

        Raises:
            RewardError: it uses all.
        """
        if self.own is not None:
            return self.own
        used = set(vocabulary_ids(np.concatenate(rows)).tolist())
        unused = next((index for index in range(self._vocabulary) if index not in used), None)
        if unused is None:
            raise RewardError("batch_size: the batch uses the whole vocabulary, which leaves no id for padding")
        return unused


def logits_of(
    model: PreTrainedModel,
    rows: list[list[int]],
    pad_id: int,
    device: torch.device | str,
    tower: Tower | None = None,
    items: Sequence[tuple[Item, ...]] = (),
) -> list[list[float]]:
    """Logits of every label for every row of token ids, in one pass over a rectangle padded on the right.

    Args:
        tower: of a model that sees.
        items: with it, the pictures of each row.
    """
    import torch

    model.config.get_text_config().pad_token_id = pad_id
    longest = max(map(len, rows))
    ids_BS = torch.tensor([row + [pad_id] * (longest - len(row)) for row in rows])
    lengths_B = torch.tensor([len(row) for row in rows])
    mask_BS = (torch.arange(longest) < lengths_B[:, None]).long()
    seen: dict[str, Any] = {}
    with torch.inference_mode():
        if tower is not None and any(items):
            cell_T = mask_BS.flatten().nonzero()[:, 0]
            pairs = [(np.asarray(row, dtype=np.int64), shown) for row, shown in zip(rows, items, strict=True)]
            seen = tower.see(tower.of_rows(pairs, cell_T, ids_BS.shape))
        output = model(input_ids=vocabulary_ids(ids_BS).to(device), attention_mask=mask_BS.to(device), **seen)
    logits_BL = output.logits.float().cpu()
    return [[float(value) for value in row] for row in logits_BL]


def load_classifier(config: RewardModelConfig, share: DistributedConfig | None = None) -> PreTrainedModel:
    """The classifier in evaluation mode.

    Args:
        share: how the model is divided over the processes of the default group, of which this is one.

    Raises:
        ValueError: it cannot be loaded, or weights are missing.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from roll.models.loading import adapted_classifier_problem, attention_kernel

    if not sys.stderr.isatty():
        disable_progress_bar()  # in a log it is lines that overwrite nothing
    folder = Path(config.model_path).expanduser()
    adapter = Adapter.of(folder)
    options: dict[str, Any] = {"dtype": getattr(torch, _DTYPES[config.dtype]) if config.dtype else "auto"}
    if share is not None:
        options["distributed_config"] = share
    sizes = load_sizes(config)
    if adapter is not None and (problem := adapted_classifier_problem(sizes.model_type)):
        raise ValueError(f"model_path: {problem}, expected a whole model")
    if (kernel := attention_kernel(sizes, config.attn_implementation)) is not None:
        options["attn_implementation"] = kernel
    source = folder if adapter is None else Path(adapter.base).expanduser()
    kind, read = _reader(config, sizes, source, share)
    try:
        loaded: Any = kind.from_pretrained(
            **read,
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
    _check_tensors(config, sizes, adapter)
    if adapter is not None:
        model = _adapted(model, adapter)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model.eval()


def _reader(
    config: RewardModelConfig, sizes: PreTrainedConfig, folder: Path, share: DistributedConfig | None
) -> tuple[Any, dict[str, Any]]:
    """The class that loads a folder, and whence: weights in few bits are given to it as what they stand for.

    Raises:
        ValueError: such weights, for a model that is divided.
    """
    from roll.models.loading import classifier_class
    from roll.models.stored import scheme_in
    from roll.models.weight_files import WeightFiles

    if (scheme := scheme_in(folder)) is None:
        return classifier_class(sizes), {"pretrained_model_name_or_path": str(folder)}
    if share is not None:
        raise ValueError(f"tensor_parallel_size: expected 1 with weights in {scheme.method}, as in {folder}")
    files = WeightFiles(str(folder))
    weights = {name: files.read(name) for name in files.names}
    return type(_outline(config, sizes)), {"pretrained_model_name_or_path": None, "state_dict": weights}


def _check_tensors(config: RewardModelConfig, sizes: PreTrainedConfig, adapter: Adapter | None) -> None:
    """Compares a folder's tensors with the classifier's, or with the trunk's where an adapter brings the head.

    Raises:
        ValueError: some have no place in it.
    """
    from roll.models.loading import fit_folder
    from roll.models.weight_files import check_folder

    try:
        if adapter is not None:
            fit_folder("value", adapter.base, sizes, trust_remote_code=config.trust_remote_code)
            return
        check_folder(_outline(config, sizes), sizes, config.model_path)
    except ValueError as error:
        raise ValueError(f"model_path: {error}") from error


def _outline(config: RewardModelConfig, sizes: PreTrainedConfig) -> PreTrainedModel:
    """The classifier on the meta device."""
    import torch
    from transformers.initialization import no_init_weights

    from roll.models.loading import classifier_class

    with torch.device("meta"), no_init_weights():
        made: PreTrainedModel = classifier_class(sizes).from_config(sizes, trust_remote_code=config.trust_remote_code)
    return made


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


_PATH = "/classify"


class RemoteClassifier(Classifier):
    """Calls the server. Serves one event loop.

    Raises:
        ValueError: the key's environment variable is unset or no possible key.
    """

    def __init__(self, config: RemoteClassifierConfig, num_labels: int) -> None:
        url = httpx.URL(config.url)
        path = url.path.rstrip("/")
        url = url.copy_with(path=path if path.endswith(_PATH) else path + _PATH)
        key = read_key(config.api_key_env, "remote.api_key_env")
        self._config, self._num_labels = config, num_labels
        self._endpoint = Endpoint(url, "reward model", config, key)

    async def forward(self, rows: list[Conversation]) -> list[list[float]]:
        """Logits of every label for every row; nobody sends pictures.

        Raises:
            RewardError: refused by the server, or no usable answer after ``max_attempts``.
        """
        ids = [row.ids for row in rows]
        name = {} if self._config.model_name is None else {"model": self._config.model_name}
        # Without activation vLLM gives logits, which it would else put through softmax or the logistic function.
        asked = {"input": ids, "use_activation": False} if self._config.server == "vllm" else {"input_ids": ids}
        logits, _ = await self._endpoint.ask(name | asked, lambda response: self._read(response, len(rows)))
        return logits

    async def close(self) -> None:
        """Closes the connections."""
        await self._endpoint.close()

    def _read(self, response: httpx.Response, count: int) -> list[list[float]]:
        try:
            answer: Any = response.json()
            if self._config.server == "vllm":
                found = [each["probs"] for each in sorted(answer["data"], key=lambda each: int(each["index"]))]
            else:
                found = [each["embedding"] for each in answer]
            logits = [[float(value) for value in row] for row in found]
        except (ValueError, LookupError, TypeError) as error:
            shown = self._endpoint.shorten(response.text)
            raise TransientError(f"expected outputs of {self._config.server} as JSON, got {shown}") from error
        if [len(row) for row in logits] != [self._num_labels] * count:
            seen = f"{len(logits)} × {sorted({len(row) for row in logits})}"
            raise TransientError(f"expected {count} × {self._num_labels} outputs, got {seen}")
        return logits
