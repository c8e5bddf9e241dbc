"""Checks that only a run on this machine needs: packages, GPUs, free paths."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from roll.configs.engines.card import EngineCard, missing_package
from roll.configs.pipeline import PipelineConfig
from roll.configs.problems import ConfigProblem
from roll.configs.rl import RLConfig
from roll.configs.worker import WorkerConfig
from roll.distributed.strategy import STRATEGIES, strategy_class
from roll.preflight.choices import check_functions
from roll.preflight.models import check_formats
from roll.tracking.trackers import SERVICES
from roll.utils.registry import UnknownNameError, import_path


def check_machine(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Packages and weights that are not here, and kernels that this machine has no GPU for.

    A configuration may be checked without them (``--validate-only``), but not run.
    """
    for role, worker in config.roles.items():
        yield from (problem.under(role) for problem in _role_problems(config, role, worker))
    for key in config.agents if isinstance(config, RLConfig) else ():
        absent = [package for package in ("starlette", "uvicorn") if not _installed(package)]
        yield from (missing_package(key, "a section", package, "agents") for package in absent)
    absent = [name for name in config.trackers if name in SERVICES and not _installed(name)]
    yield from (missing_package("track_with", name, name, name) for name in absent)
    if config.profiler.nsight is not None and shutil.which("nsys") is None and not _elsewhere(config):
        expected = "null, or nsys (Nsight Systems) on this machine's PATH"
        yield ConfigProblem("profiler.nsight", config.profiler.nsight, expected)
    yield from check_formats(config, needed=True)
    yield from _plug_in_problems(config)
    yield from _device_problems(config)
    yield from _output_problems(config)
    yield from _moved_problems(config)


def _moved_problems(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """What the run reads lies in no folder of an earlier run of its name: a run that starts anew moves that aside."""
    folder = Path(config.output_dir).expanduser().resolve() / config.exp_name
    if config.resume_from_checkpoint or not (folder / "summary.json").exists():
        return
    read: dict[str, str | None] = {**config.models, "tokenizer_path": config.tokenizer_path}
    if isinstance(config, RLConfig):
        read |= {"replay_schedule": config.replay_schedule, "rollout_replay_dir": config.rollout_replay_dir}
    for key, path in read.items():
        if path is not None and folder in Path(path).expanduser().resolve().parents:
            expected = f"a path outside of {folder}, which this run moves aside when it starts, or another exp_name"
            yield ConfigProblem(key, path, expected, involves=("exp_name", "resume_from_checkpoint"))


def _output_problems(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Folders that the run writes to are there, or can be made; the one that it reads has the steps of a run."""
    written = {"output_dir": config.output_dir, "checkpoint_config.output_dir": config.checkpoint_config.output_dir}
    if isinstance(config, RLConfig):
        written["rollout_dump_dir"] = config.rollout_dump_dir
        replayed = config.rollout_replay_dir
        if replayed is not None and not config.eval_only and not any(Path(replayed).expanduser().glob("step-*")):
            expected = "the rollout_dump_dir of a run"
            yield ConfigProblem("rollout_replay_dir", replayed, expected, "it contains no rollouts of steps")
    for key, folder in written.items():
        if folder is not None and (hint := _unwritable(Path(folder).expanduser())):
            yield ConfigProblem(key, folder, "a folder that exists or can be created", hint)


def _unwritable(folder: Path) -> str:
    """Why a folder can neither be written to nor be made; empty where it can."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".roll-", dir=nearest):
            return ""
    except OSError as error:  # root may write anywhere by its rights, but not in /proc
        return f"{nearest} is {'not writable' if nearest.is_dir() else 'not a folder'}: {error.strerror}"


def _device_problems(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Devices that this machine has not, where the run starts a Ray of its own; a running one is asked later."""
    if (config.ray_init.address or os.environ.get("RAY_ADDRESS") or "local") != "local" or _connected():
        return
    import torch

    gpus = torch.cuda.device_count()
    # Ray may count fewer cores than the machine has, and says so itself.
    count = gpus or max(2, config.ray_init.num_cpus or os.cpu_count() or 1)
    kind = "GPUs" if gpus else "CPU slots"
    for name, worker in config.clusters.items():
        if any(device >= count for device in worker.device_mapping or ()):
            expected = f"ids from 0 to {count - 1}, as this machine has {count} {kind}"
            hint = "ray_init.address joins a running Ray cluster; ray_init.num_cpus may offer more CPU slots"
            yield ConfigProblem(f"{config.key_of(name)}.device_mapping", worker.device_mapping, expected, hint)


def _connected() -> bool:
    """Tells whether this process has joined a Ray cluster already."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _plug_in_problems(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Classes and functions given by path are imported, which a check of the configuration alone does not do."""
    given = {
        f"{role}.strategy_args.strategy_name": worker.strategy_args.strategy_name
        for role, worker in config.roles.items()
        if worker.strategy_args.strategy_name not in STRATEGIES
    }
    clusters = {config.key_of(name): worker.worker_cls for name, worker in config.clusters.items()}
    given |= {f"{key}.worker_cls": path for key, path in clusters.items() if path is not None}
    for key, path in given.items():
        try:
            strategy_class(path) if key.endswith(".strategy_name") else import_path(path)
        except UnknownNameError as error:
            yield ConfigProblem(key, path, "package.module:name that can be imported", str(error))
    if isinstance(config, RLConfig):
        yield from check_functions(config)


def _role_problems(config: PipelineConfig, role: str, worker: WorkerConfig) -> Iterator[ConfigProblem]:
    args, card = worker.model_args, worker.strategy_args.card
    if card is not None and (problem := card.package_problem(worker)):
        yield problem
    if role == "actor_train" and args.lora_targets and not _installed("peft"):
        yield missing_package("model_args.lora_target", args.lora_target, "peft", "lora")
    kernels = [] if card is None else [*_kernels(worker, card), *card.gpu_only(worker)]
    if kernels and not _gpu_expected(config):
        on = "on a machine without a GPU"
        yield from (replace(problem, expected=f"{problem.expected} {on}") for problem in kernels)
    elif card is not None and card.trains_modules:
        if args.use_liger_kernel and not _installed("liger_kernel"):
            yield missing_package("model_args.use_liger_kernel", True, "liger_kernel", "liger")
        if args.attn_implementation == "fa2" and not _installed("flash_attn"):
            expected = "sdpa or auto, or the package flash_attn to be installed"
            yield args.problem("attn_implementation", expected).under("model_args")


def _kernels(worker: WorkerConfig, card: EngineCard) -> Iterator[ConfigProblem]:
    """Choices for Transformers' modules whose kernels need a GPU."""
    args = worker.model_args
    if args.use_liger_kernel:
        yield args.problem("use_liger_kernel", "false").under("model_args")
    if args.attn_implementation == "fa2" and card.trains_modules:
        yield args.problem("attn_implementation", "sdpa or auto").under("model_args")


def _gpu_expected(config: PipelineConfig) -> bool:
    """Tells whether the workers may have GPUs: other machines may, even where this one has none."""
    if _elsewhere(config):
        return True
    import torch

    return torch.cuda.is_available()


def _elsewhere(config: PipelineConfig) -> bool:
    """Tells whether workers may be on other machines."""
    return bool(config.num_nodes > 1 or config.ray_init.address or os.environ.get("RAY_ADDRESS"))


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
