"""Code that runs inside SGLang's own processes, next to the model: entry points, loading weights, and showing them.

Importing this module prepares the process for SGLang. It is what a new process imports first, before the arguments of
its entry point, which are SGLang's, are unpickled.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._pytree import tree_map

from roll.distributed.strategy.evidence import FEATURES, LayerWatch, Sketch, layer_stream
from roll.distributed.strategy.generation.prompt_scoring import SCORING, PromptScoring
from roll.distributed.strategy.sglang import cpu, sampler
from roll.distributed.weights.buckets import views

cpu.prepare()

LOADER = "roll.distributed.strategy.sglang.scheduler.load_staged"
"""By this name SGLang is told to load weights with ``load_staged``."""

LAST_WORDS = "ROLL_SGLANG_LAST_WORDS"
"""Environment variable: the file for the error by which a scheduler ends, of which SGLang tells its log alone."""

PAUSED_ROUND_S = 0.002


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """The process that holds the model, one per device."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    sampler.register()
    score_prompts(PromptScoring(*json.loads(os.environ[SCORING])))
    _show_models()
    _keep_last_words()
    _rest_while_paused()
    run_scheduler_process(*args, **kwargs)


def run_detokenizer(*args: Any, **kwargs: Any) -> None:
    """The process that turns tokens into text."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    run_detokenizer_process(*args, **kwargs)


def load_staged(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Loads weights from one block of bytes, which is described in its name.

    It is either on a device, shared by the process that has it, or in a file in memory, and the tensor is empty then.
    Every process of a tensor-parallel engine maps the same block; it crosses to the process's device as a whole.
    """
    from sglang.srt.managers import mm_schedule

    ((description, block),) = named_tensors
    staged = json.loads(description)
    if staged["path"] is not None:
        block = map_file(staged["path"], staged["num_bytes"])
    device = next(iter(model.parameters())).device
    model.load_weights(views(block.to(device), staged["tensors"]))
    # Features of pictures, which requests in flight would find again: no update of the cache of tokens empties it.
    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()


def map_file(path: str, num_bytes: int) -> Tensor:
    return torch.from_file(path, shared=False, size=num_bytes, dtype=torch.uint8)


def score_prompts(scoring: PromptScoring) -> None:
    """Reports of prompts what ``scoring`` says, in place of the log-probabilities of so many top tokens.

    SGLang has no temperature for prompts, and of tokens beyond the top ones it says nothing.
    """
    from sglang.srt.layers.logprob_processor import InputLogprobProcessor

    forward = InputLogprobProcessor.forward

    def scored(
        self: Any,
        pruned_states: Tensor,
        sample_indices: Tensor | None,
        input_logprob_indices: Tensor,
        token_to_seq_idx: list[int],
        lm_head: Any,
        get_logits_fn: Any,
        logits_metadata: Any,
        **options: Any,
    ) -> Any:
        told: list[tuple[Tensor, Tensor]] = []

        def logits_of(*args: Any, **kwargs: Any) -> Tensor:
            logits_LV = get_logits_fn(*args, **kwargs).float() / scoring.temperature
            if scoring.top_k:
                told.append(scoring.told(logits_LV.log_softmax(-1)))
            return logits_LV

        result, sampled = forward(
            self,
            pruned_states,
            sample_indices,
            input_logprob_indices,
            token_to_seq_idx,
            lm_head,
            logits_of,
            logits_metadata,
            **options,
        )
        if told and logits_metadata.extend_return_top_logprob:
            ids, values = (torch.cat(parts)[input_logprob_indices].cpu() for parts in zip(*told, strict=True))
            lengths = logits_metadata.extend_logprob_pruned_lens_cpu
            # In borrowed memory SGLang keeps tensors, which it turns into lists when their copies are done.
            whole = result.input_copy_done is not None
            result.top_logprobs_idx = [[part] if whole else part.tolist() for part in ids.split(lengths)]
            result.top_logprobs_val = [[part] if whole else part.tolist() for part in values.split(lengths)]
        return result, sampled

    InputLogprobProcessor.forward = scored


def _rest_while_paused() -> None:
    """SGLang's scheduler asks for messages without a break while it is paused, which takes a whole core."""
    from sglang.srt.managers.scheduler import Scheduler

    each_round = Scheduler._record_scheduler_state_for_paused_engine

    def and_rest(scheduler: Scheduler) -> None:
        each_round(scheduler)
        time.sleep(PAUSED_ROUND_S)

    Scheduler._record_scheduler_state_for_paused_engine = and_rest


def _keep_last_words() -> None:
    from sglang.srt.managers import scheduler

    describe = scheduler.get_exception_traceback

    def and_keep() -> str:
        words: str = describe()
        Path(os.environ[LAST_WORDS]).write_text(words.strip().splitlines()[-1], encoding="utf-8")
        return words

    scheduler.get_exception_traceback = and_keep


def _show_models() -> None:
    """Adds a method that ``Engine.collective_rpc`` calls by its name in every scheduler."""
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.roll_show = _show


def _show(scheduler: Any, what: str, given: str, path: str) -> None:
    """Writes what a model is like to a safetensors file: ``sketches``, ``own_sketches``, ``layers`` or ``pictures``.

    A sketch is its projections, with its shape and size in the file's metadata. Layers are watched from ``watch`` on,
    and pictures from ``look`` on.

    Args:
        given: JSON. Shapes of the weights by name in a checkpoint, for ``sketches``; the number of tokens, for
            ``layers``; hashes of a prompt's pictures in their places, for ``pictures``.
    """
    model, wanted = scheduler.tp_worker.model_runner.model, json.loads(given)
    if what == "watch":
        scheduler.roll_watch = LayerWatch(model, _stream)
        return
    if what == "look":
        scheduler.roll_look = PictureWatch()
        return
    metadata = {}
    if what == "layers":
        told = scheduler.roll_watch.end(wanted)
    elif what == "pictures":
        told = scheduler.roll_look.end(wanted, scheduler.model_config.hidden_size)
    else:
        own = ((name, weight) for name, weight in model.named_parameters() if weight.numel())
        held = own if what == "own_sketches" else read_back(model, wanted, scheduler.tp_cpu_group)
        sketches = {name: Sketch.of(weight).plain() for name, weight in held}
        told = {name: torch.tensor(own, dtype=torch.float64) for name, (_, _, own) in sketches.items()}
        metadata = {name: json.dumps([shape, norm]) for name, (shape, norm, _) in sketches.items()}
    if torch.distributed.get_rank(scheduler.tp_cpu_group) == 0:
        save_file({name: each.contiguous() for name, each in told.items()}, path, metadata)


class PictureWatch:
    """Notes what SGLang's tower would be given of the pictures that go into the model from now on."""

    def __init__(self) -> None:
        from sglang.srt.managers import mm_utils

        self._given: dict[int, dict[str, Tensor]] = {}
        self._find = find = mm_utils.get_embedding_and_mask

        def note(*args: Any, embedding_items: Sequence[Any], **options: Any) -> Any:
            for item in embedding_items:
                self._given[item.hash] = {"pixel_values": item.feature, "image_grid_thw": item.image_grid_thw}
            return find(*args, embedding_items=embedding_items, **options)

        mm_utils.get_embedding_and_mask = note

    def end(self, hashes: Sequence[str], width: int) -> dict[str, Tensor]:
        """float32, as ``evidence.pictures_seen``; nothing where a picture was not there, or its features went away.

        Args:
            hashes: of the pictures in the places of a prompt.
            width: of a feature; what Qwen3-VL adds behind its first layers stands behind it.
        """
        from sglang.srt.managers import mm_schedule, mm_utils

        mm_utils.get_embedding_and_mask = self._find
        numbers = [int.from_bytes(bytes.fromhex(each)[:8], "big") for each in hashes]
        made = [mm_schedule.embedding_cache.get_single(number) for number in numbers]
        if None in made or not self._given.keys() >= {*numbers}:
            return {}
        given = [self._given[number] for number in dict.fromkeys(numbers)]
        parts = {name: torch.cat([each[name] for each in given]) for name in given[0]}
        parts[FEATURES] = torch.cat([each.embedding.reshape(-1, each.embedding.shape[-1])[:, :width] for each in made])
        return {name: values.float().cpu() for name, values in parts.items()}


def _stream(args: Sequence[Any], output: Any) -> list[Tensor]:
    """Most models of SGLang keep the residual in the batch, and add a layer's output to it in the next layer."""
    stream = next((found for each in args if (found := getattr(each, "residual_stream", None)) is not None), None)
    if stream is None:
        return layer_stream(args, output)
    if stream.pending is None:
        return [output]
    return [] if stream.pending.owed is not None else [stream.residual, stream.pending.value]


def read_back(
    model: Any, shapes: Mapping[str, Sequence[int]], group: torch.distributed.ProcessGroup | None
) -> Iterator[tuple[str, Tensor]]:
    """The weights that a model holds, under the names of a checkpoint, one after another.

    SGLang's models join and split tensors while they load them, each in its own way. Here a model loads tensors that
    only note where their parts would go; what is there is then put together the other way round. What a model changes
    while it loads is left out. Where a tied weight is held more than once, the others have the model's own names.

    Args:
        group: of the processes that hold parts of each weight.
    """
    some = next(iter(model.parameters()))
    blanks = {
        name: Blank(torch.empty(*shape, dtype=some.dtype, device="meta"), some.device, [])
        for name, shape in shapes.items()
        if math.prod(shape) > 1  # SGLang reads the value of a single number
    }
    owners = {_memory(weight): name for name, weight in model.named_parameters()}
    alone = group is None or torch.distributed.get_world_size(group) == 1
    with torch.no_grad():
        model.load_weights([*blanks.items()])
        for name, blank in blanks.items():
            places = blank.places or []
            copies = _copies(name, places, owners, math.prod(shapes[name])) if alone else {name: places}
            for owner, parts in copies.items():
                whole = torch.full(tuple(shapes[name]), math.nan, dtype=some.dtype, device=some.device)
                for held, stride, offset in parts:
                    whole.as_strided(held.shape, stride, offset).copy_(held)
                if not alone:
                    whole = torch.where(whole.isnan(), -math.inf, whole.float()).cpu()
                    torch.distributed.all_reduce(whole, torch.distributed.ReduceOp.MAX, group)
                if whole.isfinite().all():
                    yield owner, whole


def _copies(name: str, places: Places, owners: Mapping[int, str], size: int) -> dict[str, Places]:
    """Places of a tensor under its name, and those of a further copy under the name of the parameter that it is."""
    found: dict[str, Places] = {}
    for place in places:
        found.setdefault(owners.get(_memory(place[0]), name), []).append(place)
    whole = {owner: parts for owner, parts in found.items() if sum(held.numel() for held, _, _ in parts) == size}
    if len(whole) < 2:
        return {name: places}
    own = name if name in whole else next(iter(whole))
    return {name if owner == own else owner: parts for owner, parts in whole.items()}


Places: TypeAlias = list[tuple[Tensor, Sequence[int], int]]
"""Of each part of a tensor: the memory that it is in, and its strides and offset in the whole."""


class Blank(Tensor):
    """Stands for a tensor of a checkpoint, in any thread: notes where its values are copied to, and copies nothing.

    Args:
        form: of the same form, on the meta device.
        places: where its parts would be copied to; ``None`` of a tensor whose values are no longer those of a part.
    """

    form: Tensor
    places: Places | None

    @staticmethod
    def __new__(cls, form: Tensor, device: torch.device, places: Any) -> Blank:
        made: Blank = Tensor._make_wrapper_subclass(
            cls,
            form.shape,
            strides=form.stride(),
            storage_offset=form.storage_offset(),
            dtype=form.dtype,
            device=device,
        )
        made.form, made.places = form, places
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default:
            held, blank = args[:2]
            if not isinstance(held, Blank) and blank.places is not None and held.shape == blank.shape:
                blank.places.append((held.detach(), blank.form.stride(), blank.form.storage_offset()))
            return held
        given = [each for each in args if isinstance(each, Blank)]
        device = given[0].device if given else torch.device("cpu")
        options = {name: "meta" if name == "device" else value for name, value in (kwargs or {}).items()}
        found = function(*tree_map(_form, args), **tree_map(_form, options))

        def wrapped(result: Any) -> Any:
            if not isinstance(result, Tensor):
                return result
            whole = (each for each in given if _memory(each.form) == _memory(result))
            return cls(result, device, next((each.places for each in whole), None))

        return tree_map(wrapped, found)


def _form(value: Any) -> Any:
    if isinstance(value, Blank):
        return value.form
    return value.to("meta") if isinstance(value, Tensor) else value


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
