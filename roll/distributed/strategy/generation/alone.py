"""A generator in this process, for commands without a run and for judges: no Ray, no weights that change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from roll.configs.rewards import JudgeEngine
from roll.configs.worker import WorkerConfig
from roll.data.pictures import Pictures
from roll.data.requests import Completion, GenerateRequest
from roll.data.templates import ChatTemplate
from roll.distributed.strategy import make_strategy
from roll.distributed.strategy.base import States, StrategyContext
from roll.distributed.strategy.generation.generator import Generator
from roll.distributed.weights.buckets import WeightBucket, pack_buckets
from roll.models.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    CLASSIFIES,
    matrix_shapes_in,
    read_adapter_config,
    unusual_entry,
)
from roll.models.loading import load_config
from roll.models.lora import LoraSpec, adapted_names
from roll.models.pictures import pictures_problem
from roll.models.tokenizer import TOKENIZER_FILES, local_folder

logger = logging.getLogger(__name__)

MOST_POSITIONS = 8192
"""Longest sample where nobody says, of a model that has more."""
_BUCKET_BYTES = 256 << 20
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Where a folder says how pictures are prepared."""


def base_of(model: str) -> tuple[str, LoraSpec | None]:
    """The model that a folder of peft adapts, and its adapter; another model is its own.

    Raises:
        ValueError: the adapter is a classifier's, or adds something else than LoRA's two matrices.
    """
    file = Path(model).expanduser() / ADAPTER_CONFIG
    if not file.is_file():
        return model, None
    config = read_adapter_config(file.parent)
    if config.get("task_type") == CLASSIFIES:
        raise ValueError(f"{file}: task_type is {CLASSIFIES}: a reward model, expected a model that generates")
    if unusual := unusual_entry(config):
        raise ValueError(f"{file}: {unusual}, expected an adapter without it")
    if (base := config.get("base_model_name_or_path")) is None:
        raise ValueError(f"{file}: no base_model_name_or_path in it, expected the model that it adapts")
    targets = adapted_names(matrix_shapes_in(file.parent))  # its configuration may say all-linear, or a pattern
    return base, LoraSpec(config["r"], config["lora_alpha"], tuple(sorted(targets)))


def local_pictures(
    model: str, worker: WorkerConfig, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[Pictures | None, str]:
    """The picture processor of a model for ``local_generator``; without one, why it gets no pictures.

    Raises:
        ValueError: there is no such model.
    """
    path, _ = base_of(model)
    args, strategy = worker.model_args, worker.strategy_args
    config = load_config(path, args.model_config_kwargs, trust_remote_code=args.trust_remote_code)
    folder = local_folder(path, "*.json", *TOKENIZER_FILES)
    if getattr(config, "vision_config", None) is None:
        return None, "the model takes no pictures"
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        return None, f"the model's folder has no picture processor ({' or '.join(PROCESSOR_FILES)})"
    card = strategy.card
    why = "says nothing of pictures" if card is None else card.no_pictures(worker)
    if why:
        return None, f"{strategy.strategy_name} {why}"
    if problem := pictures_problem(config):
        return None, f"a model of the family {config.model_type} {problem}"
    return Pictures(folder, **worker.data_args.picture_bounds, tokenizer=tokenizer), ""


@contextmanager
def local_generator(
    model: str,
    worker: WorkerConfig,
    *,
    sequence_length: int | None,
    max_running_requests: int,
    seed: int,
    pictures: bool = False,
) -> Iterator[Generator[Any]]:
    """Starts a generator, and stops it when the block is left.

    Args:
        model: a folder in Hugging Face format, that of a LoRA adapter, or a name on the hub.
        sequence_length: longest prompt plus completion; ``None``: as many as the model has, to ``MOST_POSITIONS``.
        pictures: prompts may have some (``local_pictures``).

    Raises:
        ValueError: the model cannot be loaded, or an option does not fit it.
        MissingEngineError: the engine's package is not installed.
    """
    base, lora = base_of(model)
    if worker.model_args.trust_remote_code:
        logger.warning("model_args.trust_remote_code: Python files that come with %s run", base)
    if sequence_length is None:
        text = load_config(
            base, worker.model_args.model_config_kwargs, trust_remote_code=worker.model_args.trust_remote_code
        ).get_text_config()
        sequence_length = min(MOST_POSITIONS, getattr(text, "max_position_embeddings", None) or MOST_POSITIONS)
    context = StrategyContext(
        worker,
        role="actor_infer",
        model_path=base,
        lora=lora,
        seed=seed,
        sequence_length=sequence_length,
        max_running_requests=max_running_requests,
        template=ChatTemplate.of(worker.data_args),
        pictures=pictures,
    )
    engine: Generator[Any] = make_strategy(context)
    try:
        engine.setup()
        if lora is not None:
            asyncio.run(engine.update_adapter(_buckets(Path(model).expanduser()), version=0))
        yield engine
    finally:
        engine.shutdown()


class HostedGenerator:
    """``roll.rewards.judge.HostedModel`` on one of the run's engines.

    Args:
        model: a folder in Hugging Face format, or a name on the hub.
        engine: see ``JudgeEngine``.
        pictures: requests may have some.

    Raises:
        ValueError: the model cannot be loaded, an option does not fit it, or it takes no pictures.
        MissingEngineError: the engine's package is not installed.
    """

    def __init__(self, model: str, engine: JudgeEngine, most: int, pictures: bool = False, *, devices: int = 1) -> None:
        self._open = ExitStack()
        worker = engine.worker(devices)
        self.pictures: Pictures | None = None
        if pictures:
            self.pictures, why = local_pictures(model, worker)
            if self.pictures is None:
                raise ValueError(f"pictures: true, but {why} (the judge {model})")
        started = local_generator(
            model,
            worker,
            sequence_length=engine.max_length,
            max_running_requests=most,
            seed=0,  # every request brings its own
            pictures=pictures,
        )
        with ThreadPoolExecutor(max_workers=1) as beside:  # the caller may be in an event loop; engines run their own
            self._engine: Any = beside.submit(self._open.enter_context, started).result()

    async def generate(self, request: GenerateRequest) -> Completion:
        """See ``Generator.generate``."""
        completion: Completion = await self._engine.generate(request)
        return completion

    async def offload(self) -> None:
        """Takes weights and cache off the device; requests wait."""
        await asyncio.to_thread(self._engine.offload, States.WEIGHTS | States.CACHE)

    async def onload(self) -> None:
        """Takes them back."""
        await asyncio.to_thread(self._engine.onload, States.WEIGHTS | States.CACHE)

    async def close(self) -> None:
        """Ends the engine."""
        await asyncio.to_thread(self._open.close)


async def _buckets(adapter: Path) -> AsyncIterator[WeightBucket]:
    from safetensors.torch import load_file

    tensors: Mapping[str, Tensor] = load_file(adapter / ADAPTER_FILE)
    for bucket in pack_buckets(tensors.items(), _BUCKET_BYTES):
        yield bucket
