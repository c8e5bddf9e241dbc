"""A role (``actor_train``, ``critic``, …): its devices, engine, model, optimizer and sampling."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from roll.configs.base import Config
from roll.configs.data import DataArguments
from roll.configs.engines import card_of, strategy_names
from roll.configs.engines.card import VERBS, EngineCard, EngineOptions
from roll.configs.problems import ConfigProblem
from roll.configs.schema import Described

MAX_EXPRESSION_CHARACTERS = 1000
MAX_DEVICES = 1_000_000
DEFAULT_GENERATOR = "hf_infer"
"""The engine that answers, where nobody names one."""
SYNTAX = "a list of device ids, or an expression such as list(range(0,8)) + [12, 13]"


def parse_device_mapping(value: object) -> list[int] | None:
    """Turns what a YAML file says about devices into a list of ids.

    The grammar: ``sum = term ('+' term)*``, ``term = '[' ids ']' | 'list(' range ')' | range | '(' sum ')'``,
    ``range = 'range(' integer {',' integer} ')'``.

    Raises:
        ValueError: anything else, an id that is negative, or an id that occurs twice.
    """
    if value is None:
        return None
    if isinstance(value, str):
        value = _parse_expression(value)
    if not isinstance(value, list) or any(type(device) is not int for device in value):
        raise ValueError(SYNTAX)
    if not value:
        raise ValueError("at least one device id; null for a role without devices")
    if min(value) < 0:
        raise ValueError(f"device ids of at least 0, not {min(value)}")
    if len(set(value)) != len(value):
        twice = next(device for device in value if value.count(device) > 1)
        raise ValueError(f"every device id once; {twice} occurs {value.count(twice)} times")
    return value


DeviceMapping = Annotated[
    list[int] | None,
    BeforeValidator(parse_device_mapping),
    Described("list of int, an expression such as `list(range(0,8))`, or null"),
]


def _parse_expression(text: str) -> list[int]:
    if len(text) > MAX_EXPRESSION_CHARACTERS:
        raise ValueError(f"an expression of at most {MAX_EXPRESSION_CHARACTERS} characters, not {len(text)}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _sum(tree.body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(SYNTAX) from error


def _sum(node: ast.expr) -> list[int]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _sum(node.left) + _sum(node.right)
    if isinstance(node, ast.List):
        return [_integer(element) for element in node.elts]
    if isinstance(node, ast.Call) and not node.keywords and isinstance(node.func, ast.Name):
        if node.func.id == "list" and len(node.args) == 1:
            return _sum(node.args[0])
        if node.func.id == "range" and 1 <= len(node.args) <= 3:
            return _range([_integer(argument) for argument in node.args])
    raise ValueError(SYNTAX)


def _range(arguments: list[int]) -> list[int]:
    if len(arguments) == 3 and arguments[2] == 0:
        raise ValueError("a range with a step other than 0")
    devices = range(*arguments)
    if len(devices) > MAX_DEVICES:
        raise ValueError(f"a range of at most {MAX_DEVICES} devices")
    return list(devices)


def _integer(node: ast.expr) -> int:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_integer(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError(SYNTAX)


_ESCAPES = re.compile(r"(\\[nrt])+")
"""Line breaks and tabs as they are spelled, which YAML reads between double quotes alone."""


class GeneratingArguments(Config):
    """Sampling parameters of every request."""

    max_new_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens sampled in one turn. null means response_length."
    )
    temperature: float = Field(
        default=1.0,
        ge=0,
        description="Softmax temperature; 0 is greedy. Training computes log-probs at the same temperature.",
    )
    top_p: float = Field(
        default=1.0, gt=0, le=1, description="Sample only from the most likely tokens of this total mass."
    )
    top_k: int = Field(default=0, ge=-1, description="Sample only from the k most likely tokens; 0 or -1 keeps all.")
    min_p: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Sample only from tokens with at least this share of the most likely token's probability; 0 is "
        "off.",
    )
    first_token_temperature: float | None = Field(
        default=None,
        gt=0,
        description="Temperature of only the first token of a response, so that responses differ from the start "
        "(FIRE, Chen et al. 2024); its log-prob is computed at this temperature. null: `temperature`.",
    )
    first_token_top_k: int | None = Field(
        default=None,
        ge=-1,
        description="`top_k` of only the first token of a response: FIRE samples it at a high temperature among a "
        "few. null: `top_k`.",
    )
    ignore_eos: bool = Field(
        default=False,
        description="Responses continue to max_new_tokens or a stop string, past any token that ends a turn: for "
        "benchmarks.",
    )
    num_beams: int = Field(
        default=1, ge=1, le=1, description="Accepted for compatibility; must be 1, beam search is not sampling."
    )
    num_return_sequences: int = Field(
        default=1,
        ge=1,
        description="Responses per prompt (validation.generating_args). Training uses num_return_sequences_in_group "
        "(RLVR) or group_size (agentic); there this must be 1 or the same.",
    )
    repetition_penalty: float = Field(
        default=1.0,
        gt=0,
        description="Makes tokens that already occurred less likely (CTRL, Keskar et al. 2019); 1 is off.",
    )
    presence_penalty: float = Field(
        default=0.0,
        ge=-2,
        le=2,
        description="Subtracted from the logit of a token that already occurs in the response; 0 is off.",
    )
    frequency_penalty: float = Field(
        default=0.0,
        ge=-2,
        le=2,
        description="Subtracted from the logit of a token for each time that it occurs in the response; 0 is off.",
    )
    do_sample: bool = Field(default=True, description="false is greedy decoding, the same as temperature 0.")
    stop_strings: list[str] = Field(
        default_factory=list, description="A response ends once its text contains one of these, which stays in it."
    )

    @property
    def is_greedy(self) -> bool:
        """The most likely token is taken: equal prompts get equal answers."""
        return not self.do_sample or self.temperature == 0

    @property
    def truncates(self) -> bool:
        """Some tokens cannot be sampled."""
        return self.top_p < 1 or max(self.top_k, self.first_token_top_k or 0) > 0 or self.min_p > 0

    def problems(self) -> Iterator[ConfigProblem]:
        key = "temperature" if self.do_sample else "do_sample"
        for index, text in enumerate(self.stop_strings):
            if not text or _ESCAPES.fullmatch(text):
                words = "a text that is not empty" if not text else "no escape sequence in letters"
                hint = (
                    f'in double quotes it is the character: ["{text}"]' if text else "every response would end with it"
                )
                yield self.problem(f"stop_strings.{index}", words, got=text, hint=hint)
        for name in ("first_token_temperature", "first_token_top_k"):
            if self.is_greedy and getattr(self, name) is not None:
                yield self.problem(name, f"null with {key} {getattr(self, key)}: greedy", key)


class Muon(Config):
    """Orthogonalised momentum."""

    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="Decay of Muon's running mean of the gradient.")


class Falling(Config):
    """Learning rates that fall until the end of the run, or sooner."""

    lr_decay_steps: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps, including the warm-up, after which min_lr_ratio is reached and kept. null: all "
        "of the run.",
    )


class Cosine(Falling):
    """Half a cosine, or several."""

    num_cycles: float = Field(
        default=0.5, gt=0, description="Periods of the cosine: 0.5 falls once, 1.5 falls, rises and falls again."
    )


class Wsd(Falling):
    """Warm-up, stable, decay."""

    lr_wsd_decay_steps: int | None = Field(
        default=None, ge=1, description="Optimizer steps of wsd's decay. null: a tenth of all, rounded up."
    )
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = Field(
        default="linear",
        description="wsd's decay, r from 0 to 1: 1 - r, half a cosine, 2 / 2^r - 1, or 1 - sqrt(r).",
    )


SCHEDULES: dict[str, type[Config]] = {
    "constant": Config,
    "constant_with_warmup": Config,
    "linear": Falling,
    "cosine": Cosine,
    "inverse_sqrt": Config,
    "wsd": Wsd,
}
"""By ``lr_scheduler_type``: the keys that it reads."""


class TrainingArguments(Wsd, Cosine, Muon):
    """The optimizer, its schedule, and the samples of one optimizer step."""

    choices: ClassVar = {"optimizer": {"adamw": Config, "muon": Muon}, "lr_scheduler_type": SCHEDULES}

    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="The optimizer. muon: orthogonalised momentum for the matrices of decoder layers and vision "
        "towers, with updates as large as AdamW's, and AdamW for everything else (embeddings, heads, norms, "
        "biases, experts).",
    )
    learning_rate: float = Field(default=1e-6, gt=0, description="Peak learning rate, reached after the warm-up.")
    learning_rate_of: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description="Peak learning rates of parts of the model, by module names as in the checkpoint, such as "
        "{model.visual: 2.0e-7, model.visual.merger: 2.0e-6}; the longest name that fits counts. With adamw.",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Decoupled weight decay of matrices.")
    weight_decay_end: float | None = Field(
        default=None, ge=0, description="Weight decay at the end of the run; null: constant."
    )
    weight_decay_incr_style: Literal["linear", "cosine"] = Field(
        default="linear", description="Shape from weight_decay to weight_decay_end: linear, or half a cosine."
    )
    adam_beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the gradient's running mean.")
    adam_beta2: float = Field(default=0.999, ge=0, lt=1, description="Decay of the squared gradient's running mean.")
    adam_epsilon: float = Field(default=1e-8, gt=0, description="Added to AdamW's denominator.")
    per_device_train_batch_size: int = Field(
        default=1, ge=1, description="Samples of one forward and backward pass on one data-parallel rank."
    )
    gradient_accumulation_steps: int = Field(
        default=1, ge=1, description="Passes whose gradients are summed before one optimizer step."
    )
    warmup_steps: int = Field(
        default=0, ge=0, description="Optimizer steps during which the learning rate rises linearly from 0."
    )
    warmup_ratio: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="The warm-up as a share of all optimizer steps; used when warmup_steps is 0.",
    )
    warmup_init_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Learning rate at the start of the warm-up, as a share of the peak."
    )
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine", "inverse_sqrt", "wsd"] = Field(
        default="linear",
        description="Shape after the warm-up: constant (which has no warm-up) and constant_with_warmup stay at the "
        "peak; linear and cosine (half a period) fall to min_lr_ratio; inverse_sqrt falls as 1 / sqrt(steps since "
        "the start), in units of the warm-up; wsd (warm-up, stable, decay; Hu et al. 2024) is constant and falls "
        "in the last lr_wsd_decay_steps.",
    )
    min_lr_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Lowest learning rate after the warm-up, as a share of the peak."
    )

    def problems(self) -> Iterator[ConfigProblem]:
        yield from super().problems()
        if self.warmup_steps and self.warmup_ratio:
            expected = f"0 with warmup_steps {self.warmup_steps}: one of the two"
            yield self.problem("warmup_ratio", expected, "warmup_steps")
        if self.learning_rate_of and self.optimizer != "adamw":
            yield self.problem("learning_rate_of", f"nothing with optimizer {self.optimizer}", "optimizer")
        if self.lr_scheduler_type == "constant" and (self.warmup_steps or self.warmup_ratio):
            expected = "constant_with_warmup, since there is a warm-up"
            yield self.problem("lr_scheduler_type", expected, "warmup_steps", "warmup_ratio")
        if self.warmup_init_ratio and not (self.warmup_steps or self.warmup_ratio):
            yield self.problem("warmup_init_ratio", "0 without a warm-up", "warmup_steps", "warmup_ratio")
        if self.weight_decay_incr_style != "linear" and self.weight_decay_end is None:
            yield self.problem("weight_decay_incr_style", "nothing without weight_decay_end", "weight_decay_end")


class ModelArguments(Config):
    """How the model is loaded and run."""

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The names in ``lora_target``; none without LoRA."""
        return tuple(name.strip() for name in (self.lora_target or "").split(",") if name.strip())

    @property
    def lora_excluded(self) -> tuple[str, ...]:
        """The names in ``lora_exclude``."""
        return tuple(name.strip() for name in (self.lora_exclude or "").split(",") if name.strip())

    @property
    def frozen_prefixes(self) -> tuple[str, ...]:
        """The names in ``freeze_module_prefix``."""
        return tuple(name.strip() for name in (self.freeze_module_prefix or "").split(",") if name.strip())

    @property
    def adapter_alpha(self) -> int:
        """``lora_alpha``, given or not."""
        return self.lora_alpha or 2 * self.lora_rank

    dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        default=None, description="Number format of the weights. null: that of the checkpoint."
    )
    disable_gradient_checkpointing: bool = Field(
        default=False,
        description="Keep all activations for the backward pass instead of recomputing them: faster, more memory.",
    )
    attn_implementation: Literal["sdpa", "eager", "fa2", "auto"] = Field(
        default="auto",
        description="Attention kernel. auto lets Transformers choose; fa2 is FlashAttention 2. Megatron uses "
        "TransformerEngine's if it is installed (fa2: flash, eager: unfused); vllm and sglang have their own.",
    )
    lora_rank: int = Field(default=8, ge=1, description="Rank of the LoRA matrices, with lora_target.")
    lora_alpha: int | None = Field(
        default=None, ge=1, description="The adapter's output is scaled by lora_alpha / lora_rank. null: 2 × lora_rank."
    )
    lora_dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout before the LoRA matrices in training.")
    lora_target: str | None = Field(
        default=None,
        description="Layers that get a LoRA adapter (Hu et al. 2021), the rest is frozen: names separated by commas, "
        "all-linear (all linear layers but the output layer; not the routed experts of a mixture, which are not "
        "linear layers), or null for full training. Set it on actor_train; it applies to every copy of the actor.",
    )
    lora_exclude: str | None = Field(
        default=None, description="Layers that all-linear omits: names separated by commas."
    )
    adapter_name_or_path: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of a peft adapter from which actor_train starts. null: a new one.",
    )
    freeze_module_prefix: str | None = Field(
        default=None,
        description="Parts of the model that are not trained: names of modules or parameters as in the checkpoint "
        "(model.embed_tokens, model.layers.0), separated by commas. They have no gradient and no optimizer state; "
        "checkpoints and the generator's weights stay complete. For actor_train and critic, without an adapter.",
    )
    ulysses_size: int = Field(
        default=1,
        ge=1,
        description="Workers that share every sequence in attention, each with part of the heads (Ulysses sequence "
        "parallelism; fsdp2 and deepspeed strategies). Must divide the workers and the attention heads.",
    )
    use_liger_kernel: bool = Field(
        default=False, description="Fused kernels of liger-kernel, on GPUs (fsdp2 and deepspeed strategies)."
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Run Python files that come with the model (auto_map in its config.json): they can do anything "
        "that the run can. Only for files that you have read; a warning at the start names role and folder. Set "
        "it for each role; actor_train's also applies to the policy's tokenizer. Megatron has its own model code.",
    )
    model_config_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Entries that override the checkpoint's config.json before loading."
    )

    def problems(self) -> Iterator[ConfigProblem]:
        expected = "no dropout: models are trained as they generate, without"
        yield from [
            ConfigProblem(f"model_config_kwargs.{key}", value, expected)
            for key, value in self.model_config_kwargs.items()
            if value and ("dropout" in key or key.endswith("pdrop"))
        ]
        if self.lora_target is not None and self.freeze_module_prefix is not None:
            expected = "null with lora_target, which freezes all but the adapter"
            yield self.problem("freeze_module_prefix", expected, "lora_target")
        if self.lora_targets:
            if self.lora_exclude is not None and "all-linear" not in self.lora_targets:
                expected = "null with named layers in lora_target: it excludes layers from all-linear"
                yield self.problem("lora_exclude", expected, "lora_target")
            return
        if self.lora_target is not None:
            yield self.problem("lora_target", "names of layers, all-linear, or null")
            return
        unset = ModelArguments()
        yield from [
            self.problem(key, "lora_target (all-linear …) too, or no such key", "lora_target")
            for key in ("lora_rank", "lora_alpha", "lora_dropout", "lora_exclude", "adapter_name_or_path")
            if getattr(self, key) != getattr(unset, key)
        ]


def _names(task: str) -> str:
    return f"{VERBS[task].capitalize()}: {', '.join(strategy_names(task))}. "


class StrategyArguments(Config):
    """The engine and its options."""

    strategy_name: str = Field(
        default="fsdp2_train",
        min_length=1,
        description=f"{_names('trains')}{_names('generates')}{_names('scores')}Or package.module:Name of a strategy's "
        "class or of an engine's card.",
    )
    strategy_config: dict[str, Any] = Field(
        default_factory=dict, description="Options of that engine, see the engine options."
    )

    @property
    def card(self) -> EngineCard | None:
        """The engine's; ``None`` for a strategy of another package that has none."""
        return card_of(self.strategy_name)

    def typed(self) -> EngineOptions:
        """The options as the engine's own class; those of an engine without a card are its own to check.

        Raises:
            pydantic.ValidationError: a key or value that the engine does not know.
        """
        if self.card is None:
            return EngineOptions()
        return self.card.options.model_validate(self.strategy_config, strict=True)


ReplayMode = Literal["disable", "R2", "R3"]


class RouterReplayConfig(Config):
    """Replay of the experts chosen by routers."""

    mode: ReplayMode = Field(
        default="disable",
        description="Experts of each token when the policy is trained. disable: the routers choose in every pass; R2: "
        "those chosen when the trainer computed the old log-probs; R3: those that the generator chose, for old "
        "log-probs and training. The weights of the experts are always the trainer's.",
    )


def _number_to_text(value: object) -> object:
    return str(value) if type(value) is int else value


EnvironmentVariables = Annotated[
    dict[str, Annotated[str, BeforeValidator(_number_to_text)]], Described("mapping of str to str")
]


class WorkerConfig(Config):
    """The worker processes of one role, each with one strategy."""

    model_args: ModelArguments = Field(default_factory=ModelArguments, description="How the model is loaded.")
    training_args: TrainingArguments = Field(
        default_factory=TrainingArguments, description="Optimizer and schedule; read by trained roles."
    )
    data_args: DataArguments = Field(default_factory=DataArguments, description="How messages become prompts.")
    generating_args: GeneratingArguments = Field(
        default_factory=GeneratingArguments, description="How responses are sampled; read from actor_infer."
    )
    strategy_args: StrategyArguments = Field(
        default_factory=StrategyArguments, description="The engine and its options."
    )
    world_size: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="Number of workers. null: devices / num_gpus_per_worker, or 1 without device_mapping.",
    )
    device_mapping: DeviceMapping = Field(
        default=None,
        description="Devices of the role, counted over all nodes: GPUs, or CPU slots if there is none. Roles whose "
        "mappings overlap share devices. null: one CPU process per worker, outside the device plan.",
    )
    num_gpus_per_worker: int = Field(
        default=1,
        ge=1,
        description="Devices of one worker; more than 1 only for engines that split one model themselves. null or "
        "missing: the tensor-parallel size of vllm or sglang.",
    )
    model_update_frequency: int = Field(
        default=1, ge=1, description="Steps between two weight updates (read from actor_train)."
    )
    infer_batch_size: int = Field(
        default=16, ge=1, description="Sequences per forward pass when only log-probs are computed."
    )
    worker_cls: str | None = Field(
        default=None, description="package.module:Class of the worker process. null: the role's own class."
    )
    system_envs: EnvironmentVariables = Field(
        default_factory=dict, description="Environment variables of the role's processes, over the global ones."
    )
    use_dynamic_batching_in_train: bool = Field(
        default=False, description="Form micro-batches by token count instead of per_device_train_batch_size."
    )
    max_tokens_per_microbatch_in_train: int = Field(
        default=0, ge=0, description="Token budget of a training micro-batch; needed with dynamic batching."
    )
    max_pixels_per_microbatch_in_train: int | None = Field(
        default=None,
        ge=1,
        description="Pixels of the different pictures of a training micro-batch, once they are resized; a row that has "
        "more gets a micro-batch of its own. null: no bound.",
    )
    sequence_length_round_in_train: int = Field(
        default=1, ge=1, description="Padded lengths of training micro-batches are rounded up to a multiple of this."
    )
    use_dynamic_batching_in_infer: bool = Field(
        default=False, description="Form micro-batches by token count instead of infer_batch_size."
    )
    max_tokens_per_microbatch_in_infer: int = Field(
        default=0, ge=0, description="Token budget of a micro-batch for log-probs; needed with dynamic batching."
    )
    max_pixels_per_microbatch_in_infer: int | None = Field(
        default=None, ge=1, description="The same of a micro-batch for log-probs."
    )
    sequence_length_round_in_infer: int = Field(
        default=1,
        ge=1,
        description="Padded lengths of micro-batches for log-probs are rounded up to a multiple of this.",
    )
    use_sequence_packing: bool = Field(
        default=False,
        description="Concatenate the sequences of a micro-batch in one row instead of padding them; for models that "
        "are known to keep them separate.",
    )
    router_replay: RouterReplayConfig = Field(
        default_factory=RouterReplayConfig,
        description="Replays the experts of a mixture of experts (read from actor_train).",
    )
    share_prompts: bool = Field(
        default=True,
        description="Sequences that begin with the same prompt compute it once, if that leaves at most 90% of the "
        "tokens: with full attention, in fsdp2 and deepspeed strategies with sdpa, and in megatron strategies "
        "without TransformerEngine, context parallelism and moe_aux_loss_coeff. Off, with a warning, for models "
        "that are not known to keep sequences separate. The gradient is the same.",
    )

    @property
    def num_devices(self) -> int:
        """Devices of the role: those of the mapping, else one CPU slot per worker."""
        return len(self.device_mapping) if self.device_mapping else self.world_size or 1

    @property
    def num_workers(self) -> int:
        """Processes of the role."""
        if self.device_mapping:
            return len(self.device_mapping) // self.num_gpus_per_worker
        return self.world_size or 1

    @property
    def devices_per_copy(self) -> int:
        """Devices that work on the same sequences: tensor × pipeline × context parallel size, times ulysses_size."""
        return self.strategy_args.typed().model_parallel_size * self.model_args.ulysses_size

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model that share a batch."""
        return self.num_devices // self.devices_per_copy

    @property
    def global_train_batch_size(self) -> int:
        """Episodes of one optimizer step."""
        arguments = self.training_args
        return arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * self.data_parallel_size

    def problems(self) -> Iterator[ConfigProblem]:
        yield from self._placement_problems()
        for phase in ("train", "infer"):
            key, switch = f"max_tokens_per_microbatch_in_{phase}", f"use_dynamic_batching_in_{phase}"
            budget, dynamic = getattr(self, key), getattr(self, switch)
            if dynamic and not budget:
                yield self.problem(key, f"at least 1 with {switch}", switch)
            if budget and not dynamic:
                yield self.problem(key, f"{switch}=true, or no budget", switch)

    def _placement_problems(self) -> Iterator[ConfigProblem]:
        per_worker, devices = self.num_gpus_per_worker, len(self.device_mapping or ())
        if not devices and per_worker > 1:
            yield self.problem("num_gpus_per_worker", "1, or a device_mapping", "device_mapping")
        elif devices % per_worker:
            expected = f"a divisor of {devices}, the devices of device_mapping"
            yield self.problem("num_gpus_per_worker", expected, "device_mapping")
        elif devices and self.world_size is not None and self.world_size * per_worker != devices:
            expected = f"{devices // per_worker} or null: {devices} devices, num_gpus_per_worker {per_worker}"
            yield self.problem("world_size", expected, "num_gpus_per_worker", "device_mapping")
