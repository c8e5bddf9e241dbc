"""The part of ``strategy.py`` that runs in vLLM's own worker processes, next to the model.

vLLM mixes ``WorkerExtension`` into its worker class (``worker_extension_cls``); the strategy calls the methods by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from roll.distributed.cluster.hangs import write_stacks_on_signal
from roll.distributed.strategy.generation.prompt_scoring import PromptScoring
from roll.distributed.weights.buckets import Contents, as_tensor, views
from roll.distributed.weights.segments import Handle, SegmentReader, SharedMemory, open_on_gpu
from roll.utils.foreign import replaced

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig

    from roll.distributed.strategy.evidence import PlainSketch


SCORED_LOGITS = 2**25
"""Logits of prompts that are computed at once: half a GiB with what follows from them."""
FIRST_TEMPERATURE, FIRST_TOP_K = "roll_first_token_temperature", "roll_first_token_top_k"
"""Names in a request's ``extra_args``."""


class WorkerExtension:
    """Methods of every worker process; ``roll_`` keeps their names apart from the worker's own."""

    vllm_config: VllmConfig
    model_config: ModelConfig
    parallel_config: ParallelConfig
    model_runner: Any
    rank: int
    device: torch.device

    def roll_prepare(self, owner: int, scoring: Sequence[Any]) -> None:
        """Makes the reported log-probabilities those of the distribution that a trainer computes again.

        Args:
            owner: the strategy's process on the first node, with which this one ends; on others, it ends with the one
                that started it.
            scoring: what is reported of prompts whose log-probabilities are asked for: the fields of a
                ``PromptScoring``, as vLLM's calls carry plain data.
        """
        write_stacks_on_signal()
        if self.parallel_config.node_rank_within_dp:
            owner = os.getppid()
        threading.Thread(target=_end_with, args=(owner,), name="owner", daemon=True).start()
        runner = self.model_runner
        scale_logprobs(runner.sampler)
        score_prompts(runner, PromptScoring(*scoring))
        sample_first_tokens_apart(runner.sampler, lambda: (runner.requests[key] for key in runner.input_batch.req_ids))
        self._roll_segments = SegmentReader()

    def roll_begin_weights(self) -> None:
        """Makes every layer ready to take new weights, and to pack them as its kernels want them."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self.model_runner.get_model()
        reset_cpu_experts(model)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)

    def roll_load_weights(self, segment: str, path: str, num_bytes: int, staged: Contents) -> tuple[str, ...]:
        """Loads tensors from shared memory; a layer goes to the device once all of it has come.

        Returns:
            Segments that nothing here needs any more; a layer that is not complete holds on to its own.
        """
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            block = self._roll_bucket(
                lambda: as_tensor(self._roll_segments.read(SharedMemory(segment, path), num_bytes)), num_bytes
            )
            self.model_runner.get_model().load_weights(views(block, staged))
        del block
        return self._roll_segments.take_released()

    def roll_load_weights_from_device(
        self, handles: Sequence[Handle], device: int, num_bytes: int, staged: Contents
    ) -> None:
        """Loads tensors from the strategy's device memory.

        Args:
            handles: one for each rank that reads, see ``share_on_gpu``.
            device: where the memory is, among the devices that all these processes see.
        """
        from vllm.config import set_current_vllm_config

        # A copy, as a layer that is not complete holds on to what has come of it.
        block = self._roll_bucket(
            lambda: open_on_gpu(tuple(handles[self.rank]), device).to(self.device, copy=True), num_bytes
        )
        torch.cuda.synchronize(self.device)  # the memory may change as soon as nothing here refers to it
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(views(block, staged))

    def _roll_bucket(self, read: Callable[[], Tensor], num_bytes: int) -> Tensor:
        """uint8 [num_bytes]: what ``read`` finds, which in an engine over several nodes is called by rank 0 alone.

        The others then get it from rank 0, by the collectives of the model itself.
        """
        if self.parallel_config.nnodes_within_dp == 1:
            return read()
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        block = (
            read().to(self.device) if self.rank == 0 else torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        )
        torch.distributed.broadcast(block, group.ranks[0], group.device_group)
        return block

    def roll_finish_weights(self, segments: Sequence[str]) -> tuple[str, ...]:
        """Finishes layers that wait for it, and drops what was derived from the old weights.

        Args:
            segments: shared memory of this update, which may come again; maps of other are dropped.

        Returns:
            As ``roll_load_weights``.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_config)
            repack_output_layers(model)
        self.model_runner.reset_lora_state()
        self._roll_segments.forget_all_but(segments)
        return self._roll_segments.take_released()

    def roll_sketch(self) -> dict[str, PlainSketch]:
        """Of each parameter, under vLLM's names; of packed experts none."""
        from roll.distributed.strategy.evidence import Sketch

        model = self.model_runner.get_model()
        packed = {f"{name}.weight": each for name, each in model.named_modules() if hasattr(each, "cpu_linear")}
        held = (
            (name, each if each.numel() else unpacked(packed[name]))
            for name, each in model.named_parameters()
            if each.numel() or name in packed
        )
        return {name: Sketch.of(each).plain() for name, each in held}

    def roll_watch_layers(self) -> None:
        from roll.distributed.strategy.evidence import LayerWatch

        self._roll_watch = LayerWatch(self.model_runner.get_model())

    def roll_layers(self, num_tokens: int) -> dict[str, tuple[list[int], bytes]]:
        """Shape and values of what was seen since ``roll_watch_layers``."""
        seen = self._roll_watch.end(num_tokens)
        return {name: (list(output.shape), output.contiguous().numpy().tobytes()) for name, output in seen.items()}

    def roll_look(self) -> None:
        """Notes from now on what is put into the model of pictures, by their hashes."""
        runner = self.model_runner
        seen: dict[str, tuple[Any, Tensor]] = {}
        gather = runner._gather_mm_embeddings

        def note(*args: Any, **kwargs: Any) -> Any:
            for feature in (each for request in runner.requests.values() for each in request.mm_features):
                if feature.data is not None and feature.identifier in runner.encoder_cache:
                    name = feature.identifier.rpartition(" ")[2]  # behind that of the weights
                    seen[name] = feature.data, runner.encoder_cache[feature.identifier]
            return gather(*args, **kwargs)

        runner._gather_mm_embeddings = note
        self._roll_look = gather, seen

    def roll_pictures(self, hashes: Sequence[str]) -> dict[str, tuple[list[int], bytes]]:
        """Shape and values of ``evidence.pictures_seen`` since ``roll_look``; nothing if a picture was not there.

        Args:
            hashes: of the pictures in the places of a prompt.
        """
        from roll.distributed.strategy.evidence import FEATURES

        self.model_runner._gather_mm_embeddings, seen = self._roll_look
        if not seen.keys() >= {*hashes}:
            return {}
        given = [seen[each][0] for each in dict.fromkeys(hashes)]
        names = ("pixel_values", "image_grid_thw")
        rows = {name: [each[name].data for each in given] for name in names}
        parts = {name: torch.cat([each.view(-1, each.shape[-1]) for each in found]) for name, found in rows.items()}
        width = self.model_config.get_hidden_size()  # behind it stands what Qwen3-VL adds behind its first layers
        parts[FEATURES] = torch.cat([seen[each][1][:, :width] for each in hashes])
        values = {name: each.detach().float().cpu().contiguous() for name, each in parts.items()}
        return {name: (list(each.shape), each.numpy().tobytes()) for name, each in values.items()}


def _end_with(owner: int) -> None:
    """A strategy that is killed says no word to vLLM, whose processes would go on and keep the device's memory."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(owner).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def scale_logprobs(sampler: Any) -> None:
    """Divides logits by each request's temperature before their log-softmax is reported.

    vLLM reports either the model's distribution (``raw_logprobs``, no temperature) or the one that it sampled from
    (``processed_logprobs``, after penalties, top-k and top-p); ``Completion.logprobs`` is neither. Greedy requests
    (temperature 0) report temperature 1.
    """
    if not callable(getattr(sampler, "compute_logprobs", None)):
        raise TypeError(f"vllm: cannot scale log-probs in {type(sampler).__name__}; expected a V1 Sampler")
    temperature_B: Tensor | None = None

    def remember(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal temperature_B
        metadata = kwargs["sampling_metadata"] if "sampling_metadata" in kwargs else args[1]
        temperature_B = metadata.temperature  # None when all are greedy

    def compute_logprobs(logits_BV: Tensor) -> Tensor:
        if temperature_B is not None:
            scale_B = torch.where(temperature_B < 1e-5, 1.0, temperature_B)  # vLLM's bound for greedy
            logits_BV = logits_BV.float() / scale_B[:, None]
        return logits_BV.log_softmax(dim=-1, dtype=torch.float32)

    sampler.register_forward_pre_hook(remember, with_kwargs=True)
    sampler.compute_logprobs = compute_logprobs


def score_prompts(runner: Any, scoring: PromptScoring) -> None:
    """Reports of prompts what ``scoring`` says, in place of the log-probabilities of so many top tokens.

    vLLM has no temperature for prompts, and of tokens beyond the top ones it says nothing. It asks its sampler's two
    methods for prompts and for sampled tokens alike; while prompts are scored they are others.

    vLLM computes the logits of all tokens of a step that are a prompt's, for which its profile of memory has left no
    room. Here they are computed for some tokens after others: at least as many as it samples at once, which it knows.
    """
    sampler, ask = runner.sampler, runner._get_prompt_logprobs_dict
    at_once = max(runner.max_num_reqs, SCORED_LOGITS // runner.model_config.get_vocab_size())

    def scored(*args: Any, **kwargs: Any) -> Any:
        from vllm.v1.outputs import LogprobsTensors

        compute_logits = runner.model.compute_logits

        def gather(hidden_LH: Tensor, _: int, token_L: Tensor) -> Any:
            parts = zip(hidden_LH.split(at_once), token_L.split(at_once), strict=True)
            ids, values = zip(*(of_tokens(compute_logits(hidden), token) for hidden, token in parts), strict=True)
            return LogprobsTensors(torch.cat(ids), torch.cat(values), torch.zeros_like(token_L))

        with (
            replaced(runner.model, compute_logits=_unchanged),
            replaced(sampler, compute_logprobs=_unchanged, gather_logprobs=gather),
        ):
            return ask(*args, **kwargs)

    def of_tokens(logits_LV: Tensor, token_L: Tensor) -> tuple[Tensor, Tensor]:
        logprobs_LV, own_L1 = scoring.logprobs(logits_LV), token_L[:, None]
        ids_LW, values_LW = scoring.told(logprobs_LV)
        return (
            torch.cat([own_L1.int(), ids_LW], dim=1),
            torch.cat([logprobs_LV.gather(1, own_L1), values_LW], dim=1),
        )

    runner._get_prompt_logprobs_dict = scored


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def sample_first_tokens_apart(sampler: Any, requests: Callable[[], Iterable[Any]]) -> None:
    """Gives rows that have no token yet the temperature and the top-k that their ``extra_args`` name.

    Args:
        sampler: of vLLM's V1 runner; it reports log-probabilities of these temperatures (``scale_logprobs``).
        requests: vLLM's states of the rows that are sampled, in their order.
    """

    def replace(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [
            (not request.output_token_ids and request.sampling_params and request.sampling_params.extra_args) or {}
            for request in requests()
        ]
        hot, few = ([extra.get(key) for extra in given] for key in (FIRST_TEMPERATURE, FIRST_TOP_K))
        if not any(hot) and all(most is None for most in few):
            return None
        logits_BV = kwargs["logits"] if "logits" in kwargs else args[0]
        metadata = kwargs["sampling_metadata"] if "sampling_metadata" in kwargs else args[1]
        everything = torch.full((len(logits_BV),), logits_BV.shape[1], dtype=torch.int32, device=logits_BV.device)
        metadata = dataclasses.replace(
            metadata,
            temperature=_with_rows(metadata.temperature, hot),
            top_k=_with_rows(everything if metadata.top_k is None else metadata.top_k, few),
        )
        return args[:1], {**kwargs, "sampling_metadata": metadata}

    # Before the hook that remembers the temperature for the log-probabilities.
    sampler.register_forward_pre_hook(replace, prepend=True, with_kwargs=True)


def _with_rows(values_B: Tensor | None, own: Sequence[float | None]) -> Tensor | None:
    """The values with those that rows have of their own in their place."""
    rows = [row for row, value in enumerate(own) if value is not None]
    if values_B is None or not rows:  # without temperatures all rows are greedy
        return values_B
    changed = torch.tensor([own[row] for row in rows], dtype=values_B.dtype, device=values_B.device)
    return values_B.index_copy(0, torch.tensor(rows, device=values_B.device), changed)


def unpacked(layer: Any) -> Tensor:
    """[O, I]: the weight of a layer that keeps it as a CPU kernel wants it: what it makes of each unit vector."""
    size, at_once = getattr(layer, "input_size_per_partition", layer.input_size), 1024
    units = (torch.eye(size, dtype=layer.weight.dtype)[first : first + at_once] for first in range(0, size, at_once))
    return torch.cat([layer.cpu_linear(each, layer.weight, None) for each in units]).T


def reset_cpu_experts(model: torch.nn.Module) -> None:
    """Makes the next load of a mixture of experts pack its weights, as the first load did.

    While a layer has its kernel, vLLM 0.32 takes a load for an update and copies the weights as they are; the CPU
    kernels would read them as packed.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None


def repack_output_layers(model: torch.nn.Module) -> None:
    """Packs output layers for the CPU kernel again.

    With tied embeddings the reload fills the shared weight but leaves the packed copy that the output layer computes
    with as it was (vLLM 0.32).
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
