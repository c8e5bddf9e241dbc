"""`deepspeed_train`, `deepspeed_infer`: DeepSpeed's ZeRO around a model of Transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from roll.configs.engines.arguments import EngineSource, foreign_key_hint, type_problems
from roll.configs.engines.card import Dtype, EngineCard, EnginePackage, PassedOnOptions, Strategy
from roll.configs.problems import ConfigProblem

if TYPE_CHECKING:
    from roll.configs.worker import WorkerConfig

AUTO = "auto"
"""Word of other projects' DeepSpeed files for a value that is decided elsewhere, or by DeepSpeed."""


class DeepSpeedConfig(PassedOnOptions):
    """Options of `deepspeed_train` and `deepspeed_infer`: the keys of a DeepSpeed configuration file.

    Batch sizes, gradient clipping, the optimizer and its schedule come from `training_args`. `auto` anywhere means the
    same as leaving the key out.
    """

    zero_optimization: dict[str, Any] = Field(
        default_factory=dict, description="ZeRO options: stage, offload_param, offload_optimizer …"
    )
    bf16: dict[str, Any] | None = Field(
        default=None,
        description="Passed on. null: model_args.dtype decides. Weights are also stored, and gradients accumulated, "
        "in fp32; with stage 0 the model runs under torch_autocast for that.",
    )
    fp16: dict[str, Any] | None = Field(
        default=None, description="null: model_args.dtype decides. fp16 is for deepspeed_infer only."
    )
    optimizer: dict[str, Any] | None = Field(
        default=None,
        description="{type: AdamW, params: {torch_adam: false}} uses DeepSpeed's own Adam, compiled at first use, "
        "instead of PyTorch's. Its rates come from training_args.",
    )

    @property
    def stage(self) -> int:
        stage = self.zero_optimization.get("stage", AUTO)
        return stage if type(stage) is int else 0

    @property
    def precision(self) -> Dtype | None:
        """The number format that the file asks for, if it does."""
        asked = {name: (getattr(self, name) or {}).get("enabled", AUTO) for name in ("bf16", "fp16")}
        for name, enabled in asked.items():
            if enabled is True:
                return "bf16" if name == "bf16" else "fp16"
        return "fp32" if asked["bf16"] is False else None

    @property
    def own_dtype(self) -> tuple[str, Dtype] | None:
        if self.precision is None:
            return None
        return ("fp16.enabled" if self.precision == "fp16" else "bf16.enabled", self.precision)

    @property
    def torch_adam(self) -> bool:
        chosen = ((self.optimizer or {}).get("params") or {}).get("torch_adam", AUTO)
        return True if chosen == AUTO else bool(chosen)

    def problems(self) -> Iterator[ConfigProblem]:
        stage, extra = self.zero_optimization.get("stage", AUTO), self.model_extra or {}
        if stage != AUTO and not (type(stage) is int and 0 <= stage <= 3):
            yield ConfigProblem("zero_optimization.stage", stage, "0, 1, 2 or 3")
        for key, instead in ELSEWHERE.items():
            if extra.get(key, AUTO) != AUTO:
                yield ConfigProblem(key, extra[key], instead)
        yield from self._optimizer_problems()
        yield from self._section_problems()

    def _optimizer_problems(self) -> Iterator[ConfigProblem]:
        options = self.optimizer or {}
        kind, params = options.get("type", AUTO), options.get("params") or {}
        if not isinstance(params, dict):
            yield ConfigProblem("optimizer.params", params, "a mapping such as {torch_adam: true}")
            return
        if str(kind).lower() not in (AUTO, "adam", "adamw"):
            yield ConfigProblem("optimizer.type", kind, "AdamW")
        if params.get("torch_adam", AUTO) not in (True, False, AUTO):
            yield ConfigProblem("optimizer.params.torch_adam", params["torch_adam"], "true or false")
        for key, value in params.items():
            if key != "torch_adam" and value != AUTO:
                yield ConfigProblem(f"optimizer.params.{key}", value, "training_args instead")

    def _section_problems(self) -> Iterator[ConfigProblem]:
        zero = self.zero_optimization
        for section, least in (("offload_param", 3), ("offload_optimizer", 1)):
            key, options = f"zero_optimization.{section}", zero.get(section) or {}
            if not isinstance(options, dict):
                yield ConfigProblem(key, options, "a mapping such as {device: cpu}")
                continue
            device = options.get("device", AUTO)
            if device not in ("cpu", "none", None, AUTO):
                yield ConfigProblem(f"{key}.device", device, "cpu or none")
            if device == "cpu" and self.stage < least:
                yield ConfigProblem("zero_optimization.stage", self.stage, f"at least {least} with {section}")
        for old, section in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if zero.get(old) not in (None, AUTO):
                yield ConfigProblem(f"zero_optimization.{old}", zero[old], f"{section}: {{device: cpu}} instead")
        if zenflow := zero.get("zenflow"):
            expected = "no such key: it updates before a step's gradients are complete"
            yield ConfigProblem("zero_optimization.zenflow", zenflow, expected)
        for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            if (self.bf16 or {}).get(key, AUTO) is True:
                yield ConfigProblem(f"bf16.{key}", True, "false: these are kept in fp32")
        if all((section or {}).get("enabled", AUTO) is True for section in (self.bf16, self.fp16)):
            yield ConfigProblem("fp16.enabled", True, "false with bf16.enabled true: one of the two")


ELSEWHERE = {
    "train_batch_size": "training_args.per_device_train_batch_size and gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu": "training_args.per_device_train_batch_size",
    "gradient_accumulation_steps": "training_args.gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm instead",
    "scheduler": "training_args.lr_scheduler_type instead",
    "sequence_parallel_size": "model_args.ulysses_size instead",
    "gradient_allreduce_op": "no such key: gradients are summed",
    "managed_gradient_accumulation": "no such key: the trainer marks the last micro-batch",
    "tensor_parallel": "no such key; megatron_train has tensor parallelism",
    "expert_parallel": "no such key; megatron_train has expert parallelism",
    "pipeline": "no such key; megatron_train has pipeline parallelism",
    "hybrid_engine": "no such key; actor_infer generates",
    "data_efficiency": "no such key; the pipeline chooses the data",
    "autotuning": "no such key; it would start its own runs",
    "activation_checkpointing": "model_args.disable_gradient_checkpointing instead",
    "aio": "no such key: offload goes to host memory, never to a disk",
    "checkpoint": "no such key; save_steps, max_ckpt_to_keep and checkpoint_config write checkpoints",
    "compile": "no such key",
}
"""Keys of a DeepSpeed configuration file that this library decides, and where."""

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
    "zero_optimization": "DeepSpeedZeroConfig",
    "zero_optimization.offload_param": "DeepSpeedZeroOffloadParamConfig",
    "zero_optimization.offload_optimizer": "DeepSpeedZeroOffloadOptimizerConfig",
    "bf16": "DeepSpeedBF16Config",
    "fp16": "DeepSpeedFP16Config",
    "comet": "CometConfig",
    "comms_logger": "CommsLoggerConfig",
    "csv_monitor": "CSVConfig",
    "tensorboard": "TensorBoardConfig",
    "wandb": "WandbConfig",
}
"""The classes by which DeepSpeed says which keys a section has."""

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


_STRATEGIES = "roll.distributed.strategy.deepspeed.strategy"


class DeepSpeedCard(EngineCard):
    """Trains models of Transformers, and computes log-probs, by the keys of a DeepSpeed configuration file."""

    name = "deepspeed"
    strategies: ClassVar[Mapping[str, Strategy]] = {
        "deepspeed_train": Strategy(f"{_STRATEGIES}:DeepSpeedTrain", trains=True, scores=True),
        "deepspeed_infer": Strategy(f"{_STRATEGIES}:DeepSpeedInfer", scores=True),
    }
    options = DeepSpeedConfig
    package = EnginePackage("deepspeed", "deepspeed")
    source = EngineSource(
        "DeepSpeed",
        Path(__file__).with_suffix(".json"),
        {
            "runtime/zero/config.py": ("DeepSpeedZeroConfig",),
            "runtime/zero/offload_config.py": (
                "DeepSpeedZeroOffloadParamConfig",
                "DeepSpeedZeroOffloadOptimizerConfig",
            ),
            "runtime/precision_config.py": ("DeepSpeedBF16Config", "DeepSpeedFP16Config"),
            "monitor/config.py": ("CometConfig", "CSVConfig", "TensorBoardConfig", "WandbConfig"),
            "comm/config.py": ("CommsLoggerConfig",),
        },
    )
    trains_modules = True
    rates_parts = True
    packs_modules = True
    replays_experts = True
    scores_kept_sets = True

    def no_pictures(self, worker: WorkerConfig) -> str:
        size = worker.model_args.ulysses_size
        return f"takes no pictures with ulysses_size {size}" if size > 1 else ""

    def no_states(self, options: DeepSpeedConfig) -> str:
        return "zero_optimization.stage: 3" if options.stage == 3 else ""

    def option_problems(self, options: Mapping[str, Any]) -> Iterator[ConfigProblem]:
        """Finds problems of the options; what ``DeepSpeedConfig`` itself refuses is not repeated."""
        for key in options:
            if key not in PASSED_ON and key not in ELSEWHERE:
                hint = foreign_key_hint(key, PASSED_ON)
                yield ConfigProblem(key, options[key], "a key of DeepSpeed's configuration", hint)
        known = self.signature(options)
        for place, model in SECTIONS.items():
            section, fields = _section(options, place), known.classes.get(model, {})
            wrong = [
                ConfigProblem(key, value, f"a key of DeepSpeed's {model}", foreign_key_hint(key, fields))
                for key, value in section.items()
                if fields and key not in fields
            ]
            for problem in (*wrong, *type_problems(_given(section), fields)):
                yield known.attributed(problem).under(place)
        yield from type_problems(_given(options), SCALARS)
        yield from _format_problems(options)

    def passed_on(self, options: Mapping[str, Any]) -> list[str]:
        return [place for place in SECTIONS if _section(options, place)]


def _section(options: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    """A section inside others; empty where there is none, or something that is no mapping."""
    for part in place.split("."):
        inner = options.get(part)
        options = inner if isinstance(inner, dict) else {}
    return options


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value != AUTO and value is not None}


def _format_problems(options: Mapping[str, Any]) -> Iterator[ConfigProblem]:
    given = {key: value for key, value in options.items() if key in FORMATS}
    for place in ("data_types", "torch_autocast"):
        given |= {f"{place}.{key}": value for key, value in _section(options, place).items()}
    for key, value in given.items():
        if key not in FORMATS:
            yield ConfigProblem(key, value, "a key of DeepSpeed's configuration", foreign_key_hint(key, FORMATS))
        elif (allowed := FORMATS[key]) and value not in (*allowed, AUTO, None):
            yield ConfigProblem(key, value, " or ".join(allowed))


CARD = DeepSpeedCard()
