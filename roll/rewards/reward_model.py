"""A reward model: a sequence classifier that reads the whole conversation in its own chat template.

The policy's token ids never reach it. The messages and the answer are rendered as text by the reward model's chat
template and tokenised by its tokenizer, so the two may come from different families.

It runs on a device of its reward worker and takes turns there with the run's other models, or is divided over several
devices by tensor parallelism. Then each device has a process of its own (``python -m roll.rewards.reward_model`` is a
rank, a child of the worker); the worker watches them, so that one that dies or hangs ends the batch and not the run.
Ranks find each other on loopback.

Shape suffix: ``_L`` labels.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.configs.base import Config
from roll.configs.problems import ConfigErrors
from roll.data.columns import Item
from roll.data.control_text import ControlText
from roll.data.pictures import PictureError
from roll.data.renderer import ChatRenderer
from roll.data.row_pictures import with_column
from roll.data.templates import read_template
from roll.data.tool_messages import Message
from roll.rewards.classifiers import (
    Classifier,
    Conversation,
    Padding,
    RemoteClassifier,
    RewardModelConfig,
    folder_of,
    load_classifier,
    load_sizes,
    load_tokenizer_of,
    logits_of,
    seeing,
)
from roll.rewards.types import RewardError, RewardResult, Sample, Verifier
from roll.utils.children import START_TIMEOUT, Child, ChildError, Reply, encode, serve
from roll.utils.threads import MicroBatcher

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


class HeldClassifier(Classifier):
    """A model that processes one batch, or moves, at a time, in the order of the calls."""

    def __init__(self, sizes: PreTrainedConfig) -> None:
        self._padding = Padding(sizes)
        self._turn = asyncio.Lock()
        self._there = asyncio.Event()
        self._there.set()

    async def forward(self, rows: list[Conversation]) -> list[list[float]]:
        pad_id = self._padding.of([row.ids for row in rows])
        await self._there.wait()  # nothing awaits between here and the lock, which keeps the order
        async with self._turn:
            return await self._pass(rows, pad_id)

    async def offload(self) -> None:
        self._there.clear()
        async with self._turn:
            await self._move(there=False)

    async def onload(self) -> None:
        async with self._turn:
            await self._move(there=True)
        self._there.set()

    @abstractmethod
    async def _pass(self, rows: list[Conversation], pad_id: int) -> list[list[float]]:
        """See ``forward``."""

    @abstractmethod
    async def _move(self, *, there: bool) -> None:
        """Takes the model to its devices, or off them."""


class LocalClassifier(HeldClassifier):
    """A model in a thread of this process, whole on one device.

    Args:
        folder: whose picture processor shows it pictures; ``None``: it sees none.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, folder: str | None = None) -> None:
        from roll.models.pictures import tower_of

        super().__init__(model.config)
        self._tower = tower_of(model, folder) if folder is not None else None
        self.model: PreTrainedModel = model.to(device)  # type: ignore[arg-type]
        self._device = device
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reward-model")

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)

    async def _pass(self, rows: list[Conversation], pad_id: int) -> list[list[float]]:
        loop, ids, items = asyncio.get_running_loop(), [row.ids for row in rows], [row.items for row in rows]
        given = self.model, ids, pad_id, self._device, self._tower, items
        return await loop.run_in_executor(self._thread, logits_of, *given)

    async def _move(self, *, there: bool) -> None:
        place = self._device if there else "cpu"
        await asyncio.get_running_loop().run_in_executor(self._thread, move, self.model, place)


def move(model: PreTrainedModel, place: torch.device | str) -> None:
    """Moves a model; a GPU that it leaves gets its memory back."""
    import torch

    model.to(place)  # type: ignore[arg-type]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


LOAD_TIMEOUT = 3600.0
"""Seconds for reading the weights."""
PASS_TIMEOUT = 600.0
"""Seconds for one batch, or for a move."""
_GRACE = 1.0
"""Seconds in which the others may say what is wrong too: the rank that died need not be the first to be heard."""
_MAX_REPLY_BYTES = 1 << 24
_HOST = "127.0.0.1"


class RankError(Exception):
    """What a rank sends instead of a result."""


class ShardedClassifier(HeldClassifier):
    """The worker's side. Use it in one event loop, whose thread the ranks die with.

    Ranks are started, all of them, by the first batch, and again by the next one after any of them was lost.
    """

    def __init__(self, config: RewardModelConfig, sizes: PreTrainedConfig) -> None:
        super().__init__(sizes)
        self._size = config.tensor_parallel_size
        args = config.model_dump(mode="json")
        self._ranks = [
            Child(
                "roll.rewards.reward_model",
                {"rank": rank, "size": self._size, "args": args},
                what="reward model",
                max_reply_bytes=_MAX_REPLY_BYTES,
            )
            for rank in range(self._size)
        ]
        self._loaded = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that run."""
        return [rank.pid for rank in self._ranks if rank.pid is not None]

    async def start(self) -> None:
        async with self._turn:
            await self._load()

    async def close(self) -> None:
        """Kills the ranks. A batch that runs ends with a ``RewardError``."""
        await asyncio.gather(*(rank.close() for rank in self._ranks))

    async def _pass(self, rows: list[Conversation], pad_id: int) -> list[list[float]]:
        await self._load()
        request = {"do": "forward", "rows": [row.ids for row in rows], "pad_id": pad_id}
        try:
            replies = await self._ask(self._ranks, request, PASS_TIMEOUT)
        except RankError as error:
            raise RewardError(f"{error}; the next batch restarts all of them") from error
        logits: list[list[float]] = replies[0]["logits"]
        return logits

    async def _move(self, *, there: bool) -> None:
        if not self._loaded:
            return  # nothing is on the devices
        try:
            await self._ask(self._ranks, {"do": "move", "there": there}, PASS_TIMEOUT)
        except (RankError, RewardError) as error:
            logger.warning("%s; the next batch restarts all of them", error)

    async def _load(self) -> None:
        """Starts the ranks, unless they run."""
        if self._loaded:
            return
        try:
            await asyncio.gather(*(rank.start() for rank in self._ranks))
        except ChildError as error:
            await self._stop()
            raise RewardError(str(error)) from error
        try:
            [opened] = await self._ask(self._ranks[:1], {"do": "open"}, START_TIMEOUT)
            await self._ask(self._ranks, {"do": "load", "port": opened["port"]}, LOAD_TIMEOUT)
        except RankError as error:
            raise ValueError(str(error)) from error
        self._loaded = True

    async def _ask(self, ranks: Sequence[Child], request: Mapping[str, Any], timeout: float) -> list[Reply]:
        """Has a request answered by all of some ranks. Any failure ends all, which could no longer work together.

        Raises:
            RankError: a rank failed at it.
            RewardError: a rank died, or took too long.
        """
        line = encode(request)
        asked = [asyncio.create_task(_reply(rank, line)) for rank in ranks]
        try:
            _, waiting = await asyncio.wait(asked, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
            if waiting:
                await asyncio.wait(waiting, timeout=_GRACE)
            failed = {i: task.exception() for i, task in enumerate(asked) if task.done() and task.exception()}
            late = [i for i, task in enumerate(asked) if not task.done()]
            if not failed and not late:
                return [task.result() for task in asked]
            # A rank that lost its peer fails too; the one that died is the reason.
            for i, error in sorted(failed.items(), key=lambda each: isinstance(each[1], RankError)):
                kind = RankError if isinstance(error, RankError) else RewardError
                raise kind(f"rank {i} of the {self._size} of the reward model: {error}") from error
            names = ", ".join(map(str, late))
            raise RewardError(f"rank {names} of the {self._size} of the reward model took longer than {timeout:g} s")
        except BaseException:
            await self._stop()
            await asyncio.gather(*asked, return_exceptions=True)
            raise

    async def _stop(self) -> None:
        """Kills the ranks, and waits until what they had is free."""
        self._loaded = False
        await asyncio.gather(*(rank.stop() for rank in self._ranks))


async def _reply(rank: Child, line: bytes) -> Reply:
    reply = await rank.ask(line)
    if "error" in reply:
        raise RankError(reply["error"])
    return reply


class _Rank:
    """A rank: answers what ``ShardedClassifier`` asks."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._rank, self._size = int(setup["rank"]), int(setup["size"])
        self._config = RewardModelConfig.model_validate(setup["args"])
        own = {"RANK": self._rank, "LOCAL_RANK": self._rank, "WORLD_SIZE": self._size, "LOCAL_WORLD_SIZE": self._size}
        os.environ.update({name: str(value) for name, value in own.items()})
        if self._config.device == "cpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # Transformers would take a GPU wherever there is one
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, loopback)
        self._store: Any = None
        self._model: Any = None
        self._device: Any = None

    def __call__(self, request: Mapping[str, Any]) -> Reply:
        match request["do"]:
            case "open":
                return {"port": self._open()}
            case "load":
                self._load(request["port"])
                return {}
            case "forward":
                logits = logits_of(self._model, request["rows"], request["pad_id"], self._device)
                return {"logits": logits} if self._rank == 0 else {}
            case "move":
                move(self._model, self._device if request["there"] else "cpu")
                return {}
            case other:
                raise AssertionError(other)

    def _open(self) -> int:
        """Opens the store where the ranks meet, on a port that the system chooses."""
        import torch.distributed as dist

        listener = socket.create_server((_HOST, 0))
        port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(
            _HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=LOAD_TIMEOUT),
            master_listen_fd=listener.detach(),
        )
        return port

    def _load(self, port: int) -> None:
        import torch
        import torch.distributed as dist
        from transformers.distributed import DistributedConfig
        from transformers.utils.logging import set_verbosity_error

        from roll.models.tensor_parallel import check_even

        on_gpu = self._config.device != "cpu" and torch.cuda.is_available()
        self._device = torch.device("cuda", self._rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(max(1, torch.get_num_threads() // self._size))
        limit = timedelta(seconds=LOAD_TIMEOUT)
        if self._store is None:
            self._store = dist.TCPStore(_HOST, port, is_master=False, timeout=limit)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", store=self._store, rank=self._rank, world_size=self._size, timeout=limit
        )
        set_verbosity_error()  # it warns of every part that stays whole
        self._model = load_classifier(self._config, DistributedConfig(tp_size=self._size)).to(self._device)
        check_even(self._model, self._size, f"tensor_parallel_size: {self._size}")


if __name__ == "__main__":
    serve(_Rank, plain=ValueError)


logger = logging.getLogger(__name__)

_PROBE = "\u241fanswer\u241f"


_KEPT_PICTURES = 64
"""That are resized; the answers to a prompt come one after another."""


class RewardModelVerifier(Verifier):
    """Scores the conversation, response included, and its pictures if the model sees. Serves one event loop.

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
        self._renderer: ChatRenderer | None = None
        if self.sees(config):
            from roll.models.pictures import pictures_of

            pictures = pictures_of(folder_of(config)).with_tokenizer(self.tokenizer)
            self._renderer = ChatRenderer(self.tokenizer, config.template, pictures)
        self._item = lru_cache(_KEPT_PICTURES)(self._resized)
        self._warned: set[str] = set()
        most = 1 if config.remote is None else config.remote.max_concurrency
        self._batches = MicroBatcher(self.classifier.forward, config.batch_size, config.batch_wait, most)

    @classmethod
    def sees(cls, config: Config) -> bool:
        assert isinstance(config, RewardModelConfig)
        return seeing(config)

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
        read, truncated = await asyncio.to_thread(self._read, sample) if sample.pictures else self._read(sample)
        control_tokens = self._control.count(sample.response)
        output, score = self._to_score(await self._batches.submit(read))
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

    def _read(self, sample: Sample) -> tuple[Conversation, bool]:
        """The conversation as the reward model reads it, and whether the beginning was cut off.

        What messages contain is text (``ControlText``), of which stand-ins tell: an answer could else close its own
        turn and add a friendlier one, and so could what a tool has said.
        """
        asked: Sequence[Message] = sample.messages or ({"role": "user", "content": sample.prompt},)
        items: tuple[Item, ...] = ()
        if self._renderer is not None and sample.pictures:
            try:
                items = tuple(map(self._item, sample.pictures))
                asked = with_column(asked, items, "images")
            except PictureError as error:
                raise RewardError(f"reward model {self._args.model_path!r}: {error}") from error
        messages = [*map(dict, asked), _assistant(sample.response)]
        text = self._apply_template(self._control.hide(messages))
        return self._encode(text, messages, items)

    def _resized(self, shown: Item) -> Item:
        """A picture in the size that the model's own processor gives it."""
        assert self._renderer is not None and self._renderer.pictures is not None, "it sees"
        return self._renderer.pictures.item(shown.data)

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

    def _apply_template(self, messages: list[dict[str, Any]]) -> str:
        import jinja2

        try:
            return str(self.tokenizer.apply_chat_template(messages, chat_template=self._template, tokenize=False))
        except jinja2.TemplateError as error:
            roles = [message.get("role") for message in messages]
            raise RewardError(f"template: cannot render a conversation of {roles} ({error})") from error

    def _encode(self, text: str, messages: list[dict[str, Any]], items: tuple[Item, ...]) -> tuple[Conversation, bool]:
        """A rendered conversation, and whether the beginning was cut off. A leading begin-of-text token stays."""
        if items:
            assert self._renderer is not None and self._renderer.pictures is not None, "it sees"
            text = self._renderer.pictures.spaced(text)
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
        if items:
            ids = self._with_pictures(ids, messages)
        limit = self._max_length
        if limit is None or len(ids) <= limit:
            return Conversation(ids, items), False
        if self._args.overlong == "error" or items:
            why = "; one with pictures is never cut" if items else ""
            raise RewardError(f"max_length: got a conversation of {len(ids)} tokens, expected at most {limit}{why}")
        self._warn_once("length", f"a conversation of {len(ids)} tokens lost its beginning: max_length is {limit}")
        head = ids[:1] if limit > 1 and ids[0] in (self.tokenizer.bos_token_id, self.tokenizer.cls_token_id) else []
        return Conversation(head + ids[len(ids) - limit + len(head) :]), True

    def _with_pictures(self, ids: list[int], messages: list[dict[str, Any]]) -> list[int]:
        import jinja2

        assert self._renderer is not None, "it sees"
        try:
            spread, _ = self._renderer.with_pictures(np.asarray(ids, dtype=np.int64), messages)
        except jinja2.TemplateError as error:
            raise RewardError(f"template: {error}") from error
        return spread.tolist()

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
    return LocalClassifier(load_classifier(config), device, folder_of(config) if seeing(config) else None)


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
