"""A reward model: a sequence classifier that reads the whole conversation in its own words.

The policy's token ids never reach it. The messages and the answer are rendered as text by the reward model's chat
template and tokenised by its tokenizer, so the two may come from different families.

Shape suffix: ``_L`` labels.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from roll.configs.base import Config
from roll.configs.problems import ConfigErrors, ConfigProblem
from roll.data.control_text import ControlText
from roll.data.templates import read_template
from roll.models.tensor_parallel import uneven_heads
from roll.rewards.batching import MicroBatcher
from roll.rewards.classifiers import Adapter, Classifier, Padding, load_classifier, load_sizes, load_tokenizer_of
from roll.rewards.held_classifier import LocalClassifier
from roll.rewards.remote_classifier import RemoteClassifier, RemoteClassifierConfig
from roll.rewards.sharded_classifier import ShardedClassifier
from roll.rewards.types import RewardError, Sample, Verdict, Verifier

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

_PROBE = "\u241fanswer\u241f"
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
            why = "there is no config.json in it" if folder.is_dir() else "there is no such folder"
            yield self.problem("model_path", "a folder with a model in Hugging Face format", hint=why)
        try:
            read_template(self.template)
        except ValueError as error:
            yield self.problem("template", "a chat template", hint=str(error))
        if not re.fullmatch(r"auto|cpu|(cuda|xpu|npu|mps)(:\d+)?", self.device):
            yield self.problem("device", "auto, cpu, cuda or cuda:<index>")
        if self.sigmoid and self.probability:
            yield self.problem("sigmoid", "false beside probability: true: one of the two", "probability")
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


class RewardModelVerifier(Verifier):
    """Scores the conversation with the answer in it. Serves one event loop.

    ``Verdict.parts`` has ``output`` (the logit or probability before scale and shift), ``truncated`` (1 where the
    conversation was cut) and ``control_tokens`` (how many control tokens the answer spells out).

    Raises:
        ValueError: a wrong configuration, no such folder, nothing in it that can be loaded, no such label or device.
    """

    config_class = RewardModelConfig

    def __init__(self, config: RewardModelConfig) -> None:
        super().__init__(config)
        if problems := list(config.problems()):
            raise ConfigErrors(problems)
        self._args = config
        self.tokenizer = load_tokenizer_of(config)
        self._template = read_template(config.template)
        self._control = ControlText(self.tokenizer)
        self._check_template()
        sizes = load_sizes(config)
        self.classifier = _classifier(config, sizes)  # first: a model without a head has no labels to speak of
        self._label = _label_index(config, sizes)
        self._text_config = sizes.get_text_config()
        self._own_pad = Padding(sizes).own
        self._max_length = _max_length(config, self._text_config)
        self._warned: set[str] = set()
        most = 1 if config.remote is None else config.remote.max_concurrency
        self._batches = MicroBatcher(self.classifier.forward, config.batch_size, config.batch_wait, most)

    @classmethod
    def num_devices(cls, config: Config) -> int:
        assert isinstance(config, RewardModelConfig)
        return config.tensor_parallel_size

    async def start(self) -> None:
        """Loads a model that is divided; one that is not is there."""
        await self.classifier.start()

    async def score(self, sample: Sample) -> Verdict:
        """Scores together with the samples that others bring at the same time; the score does not depend on them.

        Raises:
            RewardError: the conversation cannot be rendered, is too long, or the output is no finite number.
        """
        text, control_tokens = self.render(sample)
        ids, truncated = self._encode(text)
        output, score = self._to_score(await self._batches.submit(ids))
        if not math.isfinite(score):
            raise RewardError(f"reward model {self._args.model_path!r}: seen the score {score}, expected a number")
        parts = {"output": output, "truncated": float(truncated), "control_tokens": float(control_tokens)}
        return Verdict(score=score, correct=score >= self._args.threshold(), parts=parts, seeks_answer=False)

    async def close(self) -> None:
        """Ends threads and processes, closes connections."""
        await self._batches.close()
        await self.classifier.close()

    async def offload(self) -> None:
        """Takes the model to host memory, after the batch that runs."""
        await self.classifier.offload()

    async def onload(self) -> None:
        """Takes it back to its device."""
        await self.classifier.onload()

    def render(self, sample: Sample) -> tuple[str, int]:
        """The conversation as the reward model reads it, and how many of its control tokens the answer spells out.

        What messages contain is text (``ControlText``), of which stand-ins tell: an answer could else close its own
        turn and add a friendlier one, and so could what a tool has said.
        """
        asked = sample.messages or ({"role": "user", "content": sample.prompt},)
        messages = [*map(dict, asked), _assistant(sample.response)]
        return self._apply_template(self._control.hide(messages)), self._control.count(sample.response)

    def _check_template(self) -> None:
        """Finds out at start whether the template works and shows the answer."""
        if self._template is None and not self.tokenizer.chat_template:
            raise ValueError("template: seen 'native', but the reward model's tokenizer has none; give one or its path")
        try:
            text = self._apply_template([{"role": "user", "content": "-"}, _assistant(_PROBE)])
        except RewardError as error:
            raise ValueError(str(error)) from error
        if _PROBE not in text:
            raise ValueError("template: it drops the assistant's words, expected the answer in the rendered text")

    def _apply_template(self, messages: list[dict[str, str]]) -> str:
        import jinja2

        try:
            return str(self.tokenizer.apply_chat_template(messages, chat_template=self._template, tokenize=False))
        except jinja2.TemplateError as error:
            roles = [message.get("role") for message in messages]
            raise RewardError(f"template: cannot render a conversation of {roles} ({error})") from error

    def _encode(self, text: str) -> tuple[list[int], bool]:
        """Token ids, and whether the beginning was cut off. A leading begin-of-text token stays."""
        ids = self._control.encode(text)
        if not ids:
            raise RewardError("template: rendered to no tokens at all")
        if max(ids) >= self._text_config.vocab_size:
            raise RewardError(
                f"model_path: the tokenizer gave id {max(ids)}, expected less than the model's vocabulary of "
                f"{self._text_config.vocab_size}"
            )
        if ids[-1] == self._own_pad:
            self._warn_once(
                "padding",
                "the conversation ends with the reward model's padding token; as everywhere in transformers, the score "
                "is read at the last token before it",
            )
        limit = self._max_length
        if limit is None or len(ids) <= limit:
            return ids, False
        if self._args.overlong == "error":
            raise RewardError(f"max_length: seen a conversation of {len(ids)} tokens, expected at most {limit}")
        self._warn_once("length", f"a conversation of {len(ids)} tokens lost its beginning: max_length is {limit}")
        head = ids[:1] if limit > 1 and ids[0] in (self.tokenizer.bos_token_id, self.tokenizer.cls_token_id) else []
        return head + ids[len(ids) - limit + len(head) :], True

    def _to_score(self, logits: list[float]) -> tuple[float, float]:
        import torch

        logits_L = torch.tensor(logits, dtype=torch.float64)
        outputs_L = logits_L.softmax(dim=-1) if self._args.probability else logits_L
        score = self._args.scale * outputs_L[self._label] + self._args.shift
        return float(outputs_L[self._label]), float(score.sigmoid() if self._args.sigmoid else score)

    def _warn_once(self, topic: str, words: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning("reward model %s: %s", self._args.model_path, words)


def _assistant(answer: str) -> dict[str, str]:
    return {"role": "assistant", "content": answer}


def _classifier(config: RewardModelConfig, sizes: PreTrainedConfig) -> Classifier:
    """The model, where the configuration says.

    Raises:
        ValueError: it cannot be there.
    """
    if config.remote is not None:
        return RemoteClassifier(config.remote, int(sizes.num_labels or 0))
    device = _resolve_device(config.device, config.tensor_parallel_size)
    if config.tensor_parallel_size > 1:
        return ShardedClassifier(config, sizes)
    return LocalClassifier(load_classifier(config), device)


def _label_index(config: RewardModelConfig, sizes: PreTrainedConfig) -> int:
    names = {int(index): str(name) for index, name in (sizes.id2label or {}).items()}
    count = int(sizes.num_labels or 0)
    label = config.label
    if count == 1:
        if config.probability:
            raise ValueError("probability: the model has one output, expected several; sigmoid is meant for one")
        if label not in (None, 0, names.get(0)):
            raise ValueError(f"label: seen {label!r}, but the model has one output; expected null")
        return 0
    if isinstance(label, int) and label < count:
        return label
    for index, name in names.items():
        if name == label and index < count:
            return index
    known = ", ".join(f"{index} ({names.get(index)})" for index in range(count))
    raise ValueError(f"label: seen {label!r}, expected one of the model's {count} outputs: {known}")


def _max_length(config: RewardModelConfig, text_config: Any) -> int | None:
    positions = getattr(text_config, "max_position_embeddings", None)
    if config.max_length is None:
        return positions
    if positions is not None and config.max_length > positions:
        raise ValueError(f"max_length: seen {config.max_length}, expected at most the model's {positions} positions")
    return config.max_length


def _resolve_device(name: str, count: int) -> torch.device:
    """The device, or the first of several."""
    import torch

    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    visible = torch.cuda.device_count() if device.type == "cuda" else count
    if (device.index or 0) >= visible:
        raise ValueError(f"device: seen {name!r}, but this process sees {visible} CUDA devices")
    if count > visible:
        raise ValueError(f"tensor_parallel_size: seen {count}, but this process sees {visible} CUDA devices")
    return device
