"""SGLang's own process: builds its engine and serves the calls of ``strategy.py``.

Run as ``python -m roll.distributed.strategy.sglang.server FD``, by any interpreter that has SGLang and this package.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import torch

from roll.distributed.strategy.generation.engine_process import EngineServer
from roll.distributed.strategy.sglang import cpu, sampler
from roll.distributed.strategy.sglang.scheduler import (
    LAST_WORDS,
    LOADER,
    map_file,
    run_detokenizer,
    run_scheduler,
)
from roll.distributed.weights.buckets import Contents, views
from roll.utils.progress import advance


class SglangServer:
    """Methods that ``strategy.py`` calls. All run on one event loop, in order of arrival where they do not wait."""

    def __init__(self, connection: EngineServer) -> None:
        self._connection = connection
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._holds: set[str] = set()
        self._update_lock = asyncio.Lock()
        self._adapter: str | None = None
        self._users: Counter[str] = Counter()
        self._folder = tempfile.TemporaryDirectory(prefix="roll-sglang-")

    async def start(self, arguments: dict[str, Any], pictures: bool) -> None:
        """Builds the engine, which loads the model, from arguments of ``ServerArgs``.

        Args:
            pictures: prompts may have some.
        """
        # A file for its processes to meet at: the port that they would use is open to all of the network.
        os.environ.setdefault("SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", f"file://{self._folder.name}/rendezvous")
        os.environ[LAST_WORDS] = f"{self._folder.name}/last_words"
        try:
            self._engine = _engine_class()(
                **arguments,
                sampling_backend=sampler.BACKEND,
                enable_custom_logit_processor=True,
                custom_weight_loader=[LOADER],
                weight_version="0",
            )
        except RuntimeError as error:
            raise RuntimeError(_last_words() or str(error)) from error
        self._manager = manager = self._engine.tokenizer_manager
        # SGLang's own watchdog looks once a second and kills without a word.
        manager._subprocess_watchdog.stop()
        manager.signal_handler_class = _SignalHandler
        manager.sampling_params_class = _sampling_params_class()
        if pictures:
            if manager.mm_processor is None:  # it would leave them out without a word
                raise ValueError(f"sglang takes no pictures for {manager.model_config.hf_config.architectures}")
            manager.mm_processor.process_mm_data_async = functools.partial(_as_given, manager.model_config)
        self._marker = sampler.request_marker()
        for process in multiprocessing.active_children():
            title = psutil.Process(process.pid).cmdline()[0]
            asyncio.get_running_loop().add_reader(process.sentinel, self._died, process, title)

    async def generate(
        self, rid: str, prompt: list[int], shown: dict[str, Any] | None, sampling: dict[str, Any]
    ) -> dict[str, Any]:
        """Samples one completion; see ``_result`` for what it gives.

        Args:
            shown: the prompt's pictures, see ``strategy.Prompts``.
        """
        from sglang.srt.managers.io_struct import GenerateReqInput

        adapter = self._adapter
        request = GenerateReqInput(
            rid=rid,
            input_ids=prompt,
            image_data=shown and [shown],
            sampling_params=sampling,
            lora_path=adapter,
            custom_logit_processor=self._marker,
            return_logprob=True,
            stream=True,  # so that an aborted request's tokens are here
        )
        task = asyncio.current_task()
        assert task is not None
        self._tasks[rid] = task
        last: dict[str, Any] | None = None
        with self._using(adapter):
            try:
                async for output in self._manager.generate_request(request, None):
                    last = output
                    advance()
            except asyncio.CancelledError:
                task.uncancel()  # only ``abort`` cancels
            finally:
                del self._tasks[rid]
        return _result(last)

    async def score(
        self, rid: str, tokens: list[int], shown: dict[str, Any] | None, width: int
    ) -> tuple[list[float], list[int], list[float]]:
        """Scores a prompt, see ``PromptScores``; ``shown`` as ``generate`` has it, ``width`` as ``PromptScoring``."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        if len(tokens) == 1:
            return [], [], []
        adapter = self._adapter
        request = GenerateReqInput(
            rid=rid,
            input_ids=tokens,
            image_data=shown and [shown],
            sampling_params={"max_new_tokens": 0, "temperature": 0},
            lora_path=adapter,
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=int(width > 0),  # ``scheduler.score_prompts`` puts its own in their place
            return_flat_raw_top_logprobs=width > 0,
        )
        info: dict[str, Any] = {}
        with self._using(adapter):
            async for output in self._manager.generate_request(request, None):
                info = output["meta_info"]
        logprobs = [logprob for logprob, *_ in info["input_token_logprobs"][1:]]  # nothing is said of the first token
        if not width:
            return logprobs, [], []
        return logprobs, list(info["input_top_logprobs_idx_flat"]), list(info["input_top_logprobs_val_flat"])

    async def show(self, what: str, given: Any) -> tuple[str, bool]:
        """Path of a file that has what ``scheduler._show`` tells, and whether new requests use an adapter."""
        path = f"{self._folder.name}/{what}.safetensors"
        self._engine.collective_rpc("roll_show", what=what, given=json.dumps(given), path=path)
        return path, self._adapter is not None

    async def abort(self, rids: list[str]) -> None:
        """Ends requests with what they have."""
        for rid in rids:
            state = self._manager.rid_to_state.get(rid)
            if state is None:
                continue  # done, and on its way to the caller
            if state.dispatched:
                self._manager.abort_request(rid)
            else:  # SGLang would forget the abort
                self._tasks[rid].cancel()

    async def hold(self, reason: str) -> None:
        """No step starts until ``release(reason)``. Running requests leave the model: their keys and values go."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        if not self._holds:
            await self._manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        self._holds.add(reason)
        await self._manager.get_internal_state()  # answered when the step in progress is over

    async def release(self, reason: str) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        if self._holds == {reason}:
            await self._manager.continue_generation(ContinueGenerationReqInput())
        self._holds.discard(reason)

    async def offload(self, tags: list[str]) -> None:
        """Lets go of these parts of the device's memory; no step starts before all is back."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        async with self._update_lock:
            await self.hold("offload")  # SGLang dies when told to let go of memory in use
            if tags:
                await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))

    async def onload(self, tags: list[str], complete: bool) -> None:
        """Takes these parts back; ``complete``: nothing is away any more."""
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        async with self._update_lock:
            if tags:
                await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))
            if complete:
                await self.release("offload")

    async def begin_update(self) -> None:
        """Nothing runs until ``end_update``."""
        await self._update_lock.acquire()
        await self.hold("update")

    async def begin_weights(self) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        _check(*await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))

    async def load(self, path: str, num_bytes: int, tensors: Contents) -> None:
        """Loads tensors from a file, which may go when this returns."""
        from sglang.srt.utils import MultiprocessingSerializer

        description = json.dumps({"path": path, "num_bytes": num_bytes, "tensors": tensors})
        payload = MultiprocessingSerializer.serialize([(description, torch.empty(0))])
        await self.load_shared([payload] * self._engine.server_args.tp_size)

    async def load_shared(self, payloads: list[bytes]) -> None:
        """Loads tensors from memory that another process shares; one payload for each device, see ``load_staged``."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=LOADER, flush_cache=False
        )
        _check(*await self._manager.update_weights_from_tensor(request, None))

    async def end_weights(self) -> None:
        """The adapter was for the old weights; requests in flight keep it."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        _check(*await self._manager.end_weight_update(EndWeightUpdateReqInput(), None))
        await self._switch_adapter(None)

    async def load_adapter(self, path: str, num_bytes: int, tensors: Contents, config: dict[str, Any]) -> None:
        """Loads an adapter from a file, which may go when this returns; requests that start from now on use it."""
        from sglang.srt.managers.io_struct import LoadLoRAAdapterFromTensorsReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        adapter = {name: tensor.clone() for name, tensor in views(map_file(path, num_bytes), tensors)}
        name = f"adapter-{uuid.uuid4().hex}"
        request = LoadLoRAAdapterFromTensorsReqInput(
            lora_name=name,
            config_dict=config,
            serialized_named_tensors=[
                MultiprocessingSerializer.serialize(adapter) for _ in range(self._engine.server_args.tp_size)
            ],
        )
        loaded = await self._manager.load_lora_adapter_from_tensors(request)
        _check(loaded.success, loaded.error_message)
        await self._switch_adapter(name)

    async def end_update(self, version: int) -> None:
        """Forgets all that was computed before, and goes on."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self._manager.update_weight_version(UpdateWeightVersionReqInput(new_version=str(version)))
        flushed = await self._manager.flush_cache()
        _check(flushed.success, flushed.message or "the prefix cache was not emptied, as requests were running")
        await self.release("update")
        self._update_lock.release()

    def stop(self) -> None:
        for process in multiprocessing.active_children():
            process.kill()
        for process in multiprocessing.active_children():
            process.join()
        self._folder.cleanup()

    @contextlib.contextmanager
    def _using(self, adapter: str | None) -> Iterator[None]:
        """SGLang takes an adapter out only when no request uses it, and blocks all adapters until then."""
        if adapter is None:
            yield
            return
        self._users[adapter] += 1
        try:
            yield
        finally:
            self._users[adapter] -= 1
            if not self._users[adapter] and adapter != self._adapter:
                asyncio.get_running_loop().create_task(self._unload(adapter))

    async def _switch_adapter(self, name: str | None) -> None:
        old, self._adapter = self._adapter, name
        if old is not None and not self._users[old]:
            await self._unload(old)

    async def _unload(self, adapter: str) -> None:
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        del self._users[adapter]
        unloaded = await self._manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=adapter))
        _check(unloaded.success, unloaded.error_message)

    def _died(self, process: BaseProcess, title: str) -> None:
        process.join()
        words = f"its process {title} (pid {process.pid}) ended with exit code {process.exitcode}"
        self._connection.say(": ".join(filter(None, (words, _last_words()))))
        self.stop()
        os._exit(1)


async def _as_given(model_config: Any, image_data: Any, input_text: Any, **_: Any) -> Any:
    """In place of SGLang's own processing: the pictures of ``strategy.Prompts``, in SGLang's words."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

    (shown,) = image_data
    items = []
    for first, last, content, values in shown["pictures"]:
        pixels, grid = (torch.from_numpy(values[name]) for name in ("pixel_values", "image_grid_thw"))
        item = MultimodalDataItem(
            modality=Modality.IMAGE,
            offsets=[(first, last)],
            feature=pixels.to(model_config.dtype),
            model_specific_data={"image_grid_thw": grid},
        )
        item.set_identity(bytes.fromhex(content))  # what both caches know it by
        items.append(item)
    positions_3L = torch.from_numpy(shown["positions"])
    return MultimodalProcessorOutput(
        mm_items=items,
        input_ids=input_text,
        padded_input_ids=MultimodalProcessorOutput.build_padded_input_ids(input_text, items),
        im_token_id=model_config.hf_config.image_token_id,
        mrope_positions=positions_3L,
        mrope_position_delta=(positions_3L.max() + 1 - len(input_text)).view(1, 1),
    )


def _last_words() -> str:
    """The error by which one of SGLang's schedulers ended, if it was one."""
    with contextlib.suppress(FileNotFoundError):
        return Path(os.environ[LAST_WORDS]).read_text(encoding="utf-8")
    return ""


def _engine_class() -> type:
    from sglang.srt.entrypoints.engine import Engine

    class RolloutEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)
        run_detokenizer_process_func = staticmethod(run_detokenizer)

        @classmethod
        def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
            # A process that fails sends it, and SGLang would kill everything before anybody can say why.
            signal.signal(signal.SIGQUIT, signal.SIG_IGN)
            if not torch.accelerator.is_available():
                # Without a device a fork is safe, and saves importing SGLang twice more.
                multiprocessing.set_start_method("fork", force=True)
            return super()._launch_scheduler_processes(*args, **kwargs)

    return RolloutEngine


class _SignalHandler:
    """In place of SGLang's, which kills this process before it can say why: ``SglangServer._died`` does."""

    def __init__(self, tokenizer_manager: object) -> None:
        pass

    def sigterm_handler(self, signum: int | None = None, frame: object = None) -> None:
        raise SystemExit(0)

    def running_phase_sigquit_handler(self, signum: int | None = None, frame: object = None) -> None:
        pass


def _sampling_params_class() -> type:
    from sglang.srt.sampling.sampling_params import SamplingParams

    class RolloutSamplingParams(SamplingParams, kw_only=True, array_like=True):  # type: ignore[call-arg]
        """Looks for stop strings in as many tokens as they could be written with, one for each byte.

        SGLang looks at as many tokens as its tokenizer would use, and misses a stop string that was sampled in
        smaller pieces.
        """

        def normalize(self, tokenizer: Any) -> None:
            super().normalize(tokenizer)
            self.stop_str_max_len = max((len(s.encode()) for s in self.stop_strs), default=0)

        def __reduce__(self) -> tuple[Any, ...]:
            """Crosses to SGLang's scheduler as what that knows."""
            return functools.partial(SamplingParams, **{f: getattr(self, f) for f in self.__struct_fields__}), ()

    return RolloutSamplingParams


def _result(output: dict[str, Any] | None) -> dict[str, Any]:
    """``tokens``, ``logprobs``, ``reason`` (stop, length or abort), ``cached`` prompt tokens, ``spans`` of versions."""
    if output is None:  # aborted before it started
        return {"tokens": [], "logprobs": [], "reason": "abort", "cached": 0, "spans": []}
    info = output["meta_info"]
    scored = info.get("output_token_logprobs") or []
    spans = info.get("weight_versions") or []
    return {
        "tokens": list(output["output_ids"]),
        "logprobs": [logprob for logprob, _, _ in scored],
        "reason": info["finish_reason"]["type"],
        "cached": info.get("cached_tokens", 0),
        "spans": [(int(span["version"]), span["start"], span["end"]) for span in spans],
    }


def _check(success: bool, message: str | None) -> None:
    if not success:
        raise RuntimeError(message)


def main() -> None:
    cpu.prepare()
    connection = EngineServer(int(sys.argv[1]))
    server = SglangServer(connection)
    try:
        asyncio.run(connection.serve(server))
    finally:
        with contextlib.suppress(Exception):
            server.stop()
        os._exit(0)  # the engine's own threads would wait for ever


if __name__ == "__main__":
    main()
