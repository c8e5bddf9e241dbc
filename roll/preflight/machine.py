"""What a run needs of this machine, beyond what a configuration that is checked elsewhere needs."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator

from roll.configs.problems import ConfigProblem
from roll.configs.rl import RLConfig
from roll.configs.rules import ULYSSES, valid_options
from roll.configs.strategy import STRATEGY_CONFIGS, MegatronConfig
from roll.configs.worker import WorkerConfig
from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.engines import PACKAGES
from roll.utils.registry import UnknownNameError, import_path


def check_machine(config: RLConfig) -> list[ConfigProblem]:
    """Packages that are not installed here, and kernels that this machine has no GPU for.

    A configuration may be checked without them (``--validate-only``), but not run.
    """
    problems = [problem for role, worker in config.roles.items() for problem in _role_problems(config, role, worker)]
    return [*problems, *_plug_in_problems(config), *_device_problems(config)]


def _device_problems(config: RLConfig) -> Iterator[ConfigProblem]:
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
    """Whether this process has joined a Ray cluster already."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _plug_in_problems(config: RLConfig) -> Iterator[ConfigProblem]:
    """Classes given by path: their packages are imported, which a check of the configuration alone does not do."""
    given = {
        f"{role}.strategy_args.strategy_name": worker.strategy_args.strategy_name
        for role, worker in config.roles.items()
        if worker.strategy_args.strategy_name not in STRATEGY_CONFIGS
    }
    clusters = {config.key_of(name): worker.worker_cls for name, worker in config.clusters.items()}
    given |= {f"{key}.worker_cls": path for key, path in clusters.items() if path is not None}
    for key, path in given.items():
        try:
            import_path(path) if path not in STRATEGIES else STRATEGIES.get(path)
        except UnknownNameError as error:
            yield ConfigProblem(key, path, "package.module:Class that can be imported", str(error))


def _role_problems(config: RLConfig, role: str, worker: WorkerConfig) -> list[ConfigProblem]:
    name, args = worker.strategy_args.strategy_name, worker.model_args
    problems = _engine_problems(role, worker)
    if role == "actor_train" and args.lora_targets and not _installed("peft"):
        problems.append(_missing(f"{role}.model_args.lora_target", args.lora_target, "peft", "lora"))
    kernels = _gpu_only(role, worker)
    if kernels and not _gpu_expected(config):
        return problems + [
            ConfigProblem(key, seen, f"{expected} on a machine without a GPU") for key, seen, expected in kernels
        ]
    if name.startswith(ULYSSES) and args.use_liger_kernel and not _installed("liger_kernel"):
        problems.append(_missing(f"{role}.model_args.use_liger_kernel", True, "liger_kernel", "liger"))
    if name.startswith(ULYSSES) and args.attn_implementation == "fa2" and not _installed("flash_attn"):
        expected = "sdpa or auto, or the package flash_attn to be installed"
        problems.append(ConfigProblem(f"{role}.model_args.attn_implementation", "fa2", expected))
    return problems


def _engine_problems(role: str, worker: WorkerConfig) -> list[ConfigProblem]:
    strategy = worker.strategy_args
    package = PACKAGES.get(strategy.strategy_name)
    python = strategy.strategy_config.get("python_executable")
    if package is None or (python is None and package.installed):
        return []
    if python is None:
        return [_missing(f"{role}.strategy_args.strategy_name", strategy.strategy_name, package.module, package.extra)]
    from roll.distributed.strategy.sglang.options import interpreter_problem

    problem = interpreter_problem(python)
    return [problem.under(f"{role}.strategy_args.strategy_config")] if problem else []


def _gpu_only(role: str, worker: WorkerConfig) -> list[tuple[str, object, str]]:
    """Keys, values and what to choose instead where kernels need a GPU."""
    options, args = valid_options(worker), worker.model_args
    found: list[tuple[str, object, str]] = []
    if args.use_liger_kernel:
        found.append((f"{role}.model_args.use_liger_kernel", True, "false"))
    if args.attn_implementation == "fa2" and worker.strategy_args.strategy_name.startswith(ULYSSES):
        found.append((f"{role}.model_args.attn_implementation", "fa2", "sdpa or auto"))
    base = f"{role}.strategy_args.strategy_config"
    if isinstance(options, MegatronConfig) and options.moe_grouped_gemm:
        found.append((f"{base}.moe_grouped_gemm", True, "false"))
    if isinstance(options, MegatronConfig) and options.attention_backend not in (None, "auto"):
        found.append((f"{base}.attention_backend", options.attention_backend, "null or auto"))
    return found


def _gpu_expected(config: RLConfig) -> bool:
    """Whether the workers may have GPUs: other machines may, even where this one has none."""
    if config.num_nodes > 1 or config.ray_init.address or os.environ.get("RAY_ADDRESS"):
        return True
    import torch

    return torch.cuda.is_available()


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _missing(key: str, seen: object, module: str, extra: str) -> ConfigProblem:
    hint = f"pip install 'roll-rl[{extra}]'; --validate-only checks a configuration without it"
    return ConfigProblem(key, seen, f"the package {module} to be installed", hint)
