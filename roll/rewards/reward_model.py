"""A reward model: a sequence classifier that reads the whole conversation in its own chat template.

The policy's token ids never reach it. The messages and the answer are rendered as text by the reward model's chat
template and tokenised by its tokenizer, so the two may come from different families.

Shape suffix: ``_L`` labels.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from roll.configs.base import Config
from roll.configs.problems import ConfigErrors
from roll.data.control_text import ControlText
from roll.data.templates import read_template
from roll.rewards.batching import MicroBatcher
from roll.rewards.classifiers import (
    Classifier,
    Padding,
    RemoteClassifier,
    RewardModelConfig,
    load_classifier,
    load_sizes,
    load_tokenizer_of,
)
from roll.rewards.device_classifiers import LocalClassifier, ShardedClassifier
from roll.rewards.types import RewardError, RewardResult, Sample, Verifier

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

_PROBE = "\u241fanswer\u241f"


class RewardModelVerifier(Verifier):
    """Scores the conversation, response included. Serves one event loop.

    ``RewardResult.parts`` has ``output`` (the logit or probability before scale and shift), ``truncated`` (1 where the
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

    async def score(self, sample: Sample) -> RewardResult:
        """Scores together with the samples that others bring at the same time; the score does not depend on them.

        Raises:
            RewardError: the conversation cannot be rendered, is too long, or the output is no finite number.
        """
        text, control_tokens = self.render(sample)
        ids, truncated = self._encode(text)
        output, score = self._to_score(await self._batches.submit(ids))
        if not math.isfinite(score):
            raise RewardError(f"reward model {self._args.model_path!r}: got the score {score}, expected a number")
        parts = {"output": output, "truncated": float(truncated), "control_tokens": float(control_tokens)}
        return RewardResult(score=score, correct=score >= self._args.threshold(), parts=parts, seeks_answer=False)

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
            raise ValueError("template: got 'native', but the reward model's tokenizer has none; give one or its path")
        try:
            text = self._apply_template([{"role": "user", "content": "-"}, _assistant(_PROBE)])
        except RewardError as error:
            raise ValueError(str(error)) from error
        if _PROBE not in text:
            raise ValueError("template: it drops the assistant's text, expected the answer in the rendered text")

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
            raise RewardError(f"max_length: got a conversation of {len(ids)} tokens, expected at most {limit}")
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
            raise ValueError(f"label: got {label!r}, but the model has one output; expected null")
        return 0
    if isinstance(label, int) and label < count:
        return label
    for index, name in names.items():
        if name == label and index < count:
            return index
    known = ", ".join(f"{index} ({names.get(index)})" for index in range(count))
    raise ValueError(f"label: got {label!r}, expected one of the model's {count} outputs: {known}")


def _max_length(config: RewardModelConfig, text_config: Any) -> int | None:
    positions = getattr(text_config, "max_position_embeddings", None)
    if config.max_length is None:
        return positions
    if positions is not None and config.max_length > positions:
        raise ValueError(f"max_length: got {config.max_length}, expected at most the model's {positions} positions")
    return config.max_length


def _resolve_device(name: str, count: int) -> torch.device:
    """The device, or the first of several."""
    import torch

    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    visible = torch.cuda.device_count() if device.type == "cuda" else count
    if (device.index or 0) >= visible:
        raise ValueError(f"device: got {name!r}, but this process sees {visible} CUDA devices")
    if count > visible:
        raise ValueError(f"tensor_parallel_size: got {count}, but this process sees {visible} CUDA devices")
    return device
