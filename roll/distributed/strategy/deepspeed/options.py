"""Which keys of a ``strategy_config`` DeepSpeed takes. Imports neither DeepSpeed nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roll.configs.problems import ConfigProblem
from roll.configs.strategy import AUTO, DEEPSPEED_ELSEWHERE
from roll.distributed.strategy.arguments import constructor_fields, type_problems
from roll.distributed.strategy.engines import advice

PASSED_ON = (
    "bf16",
    "comet",
    "comms_logger",
    "communication_data_type",
    "csv_monitor",
    "data_types",
    "disable_allgather",
    "disable_python_gc",
    "dump_state",
    "flops_profiler",
    "fp16",
    "gradient_predivide_factor",
    "log_level",
    "memory_breakdown",
    "optimizer",
    "prescale_gradients",
    "seq_parallel_communication_data_type",
    "steps_per_print",
    "tensorboard",
    "timers",
    "torch_autocast",
    "wall_clock_breakdown",
    "wandb",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
)
"""Keys of a DeepSpeed configuration file that may be given; DeepSpeed itself takes any, and ignores those it does not
know."""


SECTIONS = {
    "zero_optimization": ("runtime/zero/config.py", "DeepSpeedZeroConfig"),
    "zero_optimization.offload_param": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadParamConfig"),
    "zero_optimization.offload_optimizer": ("runtime/zero/offload_config.py", "DeepSpeedZeroOffloadOptimizerConfig"),
    "bf16": ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    "fp16": ("runtime/precision_config.py", "DeepSpeedFP16Config"),
    "comet": ("monitor/config.py", "CometConfig"),
    "comms_logger": ("comm/config.py", "CommsLoggerConfig"),
    "csv_monitor": ("monitor/config.py", "CSVConfig"),
    "tensorboard": ("monitor/config.py", "TensorBoardConfig"),
    "wandb": ("monitor/config.py", "WandbConfig"),
}
"""Where DeepSpeed says which keys a section has."""

SCALARS = {
    "disable_allgather": "bool",
    "dump_state": "bool",
    "gradient_predivide_factor": "float",
    "memory_breakdown": "bool",
    "prescale_gradients": "bool",
    "steps_per_print": "int",
    "wall_clock_breakdown": "bool",
    "zero_allow_untested_optimizer": "bool",
    "zero_force_ds_cpu_optimizer": "bool",
}
"""Types of the keys outside of sections, which DeepSpeed does not check: to it the text ``"false"`` is true."""

DTYPES = ("fp32", "bf16", "fp16")
FORMATS = {
    "communication_data_type": DTYPES,
    "seq_parallel_communication_data_type": DTYPES,
    "data_types.grad_accum_dtype": DTYPES,
    "data_types.param_dtype": DTYPES,
    "data_types.buffer_dtype": DTYPES,
    "data_types.keep_in_fp32_modules": None,
    "torch_autocast.enabled": None,
    "torch_autocast.dtype": ("bfloat16", "float16"),
    "torch_autocast.lower_precision_safe_modules": None,
}
"""Number formats, and the other keys of their sections, which DeepSpeed reads one by one; ``None``: any value."""


def check_engine_options(options: Mapping[str, Any]) -> list[ConfigProblem]:
    """Keys of a ``strategy_config`` that DeepSpeed does not have, and values of another type, without importing it.

    Sections with names of their own are looked at only when it is installed. What ``DeepSpeedConfig`` itself refuses is
    not repeated.
    """
    problems = [
        ConfigProblem(key, options[key], "a key of DeepSpeed's configuration", advice(key, PASSED_ON))
        for key in options
        if key not in PASSED_ON and key not in DEEPSPEED_ELSEWHERE
    ]
    for place, (file, model) in SECTIONS.items():
        section = _section(options, place)
        fields = constructor_fields("deepspeed", file, (model,))
        problems += [
            ConfigProblem(f"{place}.{key}", value, f"a key of DeepSpeed's {model}", advice(key, fields))
            for key, value in section.items()
            if fields and key not in fields
        ]
        given = {key: value for key, value in section.items() if value != AUTO and value is not None}
        problems += [problem.under(place) for problem in type_problems(given, fields)]
    given = {key: value for key, value in options.items() if value != AUTO and value is not None}
    return problems + type_problems(given, SCALARS) + _format_problems(options)


def _section(options: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """A section inside others; empty where there is none, or something that is no mapping."""
    for part in place.split("."):
        inner = options.get(part)
        options = inner if isinstance(inner, dict) else {}
    return options


def _format_problems(options: Mapping[str, Any]) -> list[ConfigProblem]:
    given = {key: value for key, value in options.items() if key in FORMATS}
    for place in ("data_types", "torch_autocast"):
        given |= {f"{place}.{key}": value for key, value in _section(options, place).items()}
    problems = []
    for key, value in given.items():
        if key not in FORMATS:
            problems.append(ConfigProblem(key, value, "a key of DeepSpeed's configuration", advice(key, FORMATS)))
        elif (allowed := FORMATS[key]) and value not in (*allowed, AUTO, None):
            problems.append(ConfigProblem(key, value, " or ".join(allowed)))
    return problems
