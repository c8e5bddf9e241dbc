"""`fsdp2_train`, `fsdp2_infer`: PyTorch's `fully_shard` around a model of Transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from roll.configs.engines.card import Dtype, EngineCard, EngineOptions, Strategy
from roll.configs.problems import ConfigProblem

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from roll.configs.pipeline import PipelineConfig
    from roll.configs.rl import RLConfig
    from roll.configs.worker import WorkerConfig


class Fsdp2Config(EngineOptions):
    """Options of `fsdp2_train` and `fsdp2_infer` (PyTorch `fully_shard`)."""

    fsdp_size: int = Field(
        default=-1,
        ge=-1,
        description="Ranks over which the weights are sharded; must divide the world size. -1: all of them. 1: no "
        "sharding, a replica on each rank (fastest for small models).",
    )
    cpu_offload: bool = Field(default=False, description="Keep weights and optimizer states in host memory.")
    reshard_after_forward: bool = Field(
        default=True, description="Free gathered weights after each forward pass: less memory, one more all-gather."
    )
    param_dtype: Dtype | None = Field(
        default=None, description="Number format of computation. null: that of the weights."
    )
    reduce_dtype: Dtype | None = Field(default=None, description="Number format of gradient sums. null: fp32.")
    tensor_parallel_size: int = Field(
        default=1, ge=1, description="Workers that share the matrices of each layer; divides the workers and the heads."
    )

    activation_offload: bool = Field(
        default=False,
        description="Move large activations that wait for the backward pass to host memory; works best with gradient "
        "checkpointing, which leaves only the layers' inputs.",
    )
    checkpoint: Literal["whole", "sharded"] = Field(
        default="whole",
        description="Form of checkpoints. whole: a Hugging Face model folder plus the optimizer, from which any "
        "engine can continue. sharded: each worker writes its own shards, nothing is gathered; any number of "
        "workers of the same strategy can continue from it, and `roll export` makes a model folder of it.",
    )

    @property
    def parallel_sizes(self) -> dict[str, int]:
        return {"tensor_parallel_size": self.tensor_parallel_size}

    @property
    def own_dtype(self) -> tuple[str, Dtype] | None:
        return ("param_dtype", self.param_dtype) if self.param_dtype else None

    @property
    def replicated(self) -> bool:
        """Every worker holds a whole replica, and the weights are never sharded."""
        return self.fsdp_size == 1 and not self.cpu_offload and self.tensor_parallel_size == 1

    def problems(self) -> Iterator[ConfigProblem]:
        if self.fsdp_size == 0:
            yield self.problem("fsdp_size", "-1 or at least 1")
        elif self.replicated and self.reduce_dtype not in (None, "fp32"):
            expected = "null or fp32 with fsdp_size 1: replicas add up gradients in fp32"
            yield self.problem("reduce_dtype", expected, "fsdp_size", "cpu_offload", "tensor_parallel_size")


_STRATEGIES = "roll.distributed.strategy.fsdp2.strategy"
SHARED_ROWS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "glm4v", "mistral3")
"""Families of which ranks share rows with pictures; in the others a token sees more than those before it, or states."""


class Fsdp2Card(EngineCard):
    """Trains models of Transformers, and computes log-probs; shards weights and optimizer states, can split layers."""

    name = "fsdp2"
    strategies: ClassVar[Mapping[str, Strategy]] = {
        "fsdp2_train": Strategy(f"{_STRATEGIES}:Fsdp2Train", trains=True, scores=True),
        "fsdp2_infer": Strategy(f"{_STRATEGIES}:Fsdp2Infer", scores=True),
    }
    options = Fsdp2Config
    optimizers = ("adamw", "muon")
    trains_modules = True
    rates_parts = True
    packs_modules = True
    replays_experts = True
    scores_kept_sets = True
    fit = "roll.configs.engines.fsdp2:check_model"

    def no_pictures(self, worker: WorkerConfig) -> str:
        return ""

    def no_videos(self, worker: WorkerConfig) -> str:
        return ""

    def blind_to(self, family: str, worker: WorkerConfig) -> str:
        size = worker.model_args.ulysses_size
        if size == 1 or family in SHARED_ROWS:
            return ""
        return f"was not compared on {family} with ulysses_size {size}, but on {', '.join(SHARED_ROWS)}"

    def rules(self, role: str, worker: WorkerConfig, config: PipelineConfig) -> Iterator[ConfigProblem]:
        options, base = worker.strategy_args.typed(), f"{role}.strategy_args.strategy_config"
        assert isinstance(options, Fsdp2Config)
        groups = worker.num_workers // options.tensor_parallel_size
        if options.fsdp_size > 0 and groups % options.fsdp_size:
            expected = f"-1 or a divisor of the {groups} workers of {role}"
            if groups < worker.num_workers:
                expected += ", those of one tensor-parallel group counted once"
            devices = (f"{role}.device_mapping", f"{role}.world_size", f"{base}.tensor_parallel_size")
            yield ConfigProblem(f"{base}.fsdp_size", options.fsdp_size, expected, involves=devices)
        for key in ("save_contents", "load_contents") if options.checkpoint == "sharded" else ():
            if "optimizer" not in (seen := getattr(config.checkpoint_config, key)):
                expected = f"the optimizer too with {base}.checkpoint sharded: one file"
                yield ConfigProblem(f"checkpoint_config.{key}", seen, expected, involves=(f"{base}.checkpoint",))
        if role == "actor_train" and config.uses_lora and options.tensor_parallel_size > 1:
            expected = f"1 with {role}.model_args.lora_target, whose layers are not split"
            key, involved = f"{base}.tensor_parallel_size", (f"{role}.model_args.lora_target",)
            yield ConfigProblem(key, options.tensor_parallel_size, expected, involves=involved)


CARD = Fsdp2Card()


LAYERS_OF = {"qwen3_vl_text": "qwen3", "qwen3_vl_moe_text": "qwen3_moe"}
"""Values of ``model_type`` whose layers are split by the plan of another: their own leaves out norms, or all."""
SPLIT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
"""Sizes of a model that its tensor-parallel size must divide."""


def check_model(role: str, worker: WorkerConfig, sizes: PreTrainedConfig, config: RLConfig) -> Iterator[ConfigProblem]:
    """A tensor-parallel size that does not divide the model, keys relative to the role."""
    options = worker.strategy_args.typed()
    assert isinstance(options, Fsdp2Config)
    tensor, key = options.tensor_parallel_size, "strategy_args.strategy_config.tensor_parallel_size"
    common = math.gcd(*(size for name in SPLIT if isinstance(size := getattr(sizes, name, None), int)))
    if tensor == 1:
        return
    if not getattr(sizes, "base_model_tp_plan", None) and sizes.model_type not in LAYERS_OF:
        yield ConfigProblem(key, tensor, f"1: {type(sizes).__name__} has no tensor-parallel plan")
    elif common % tensor and sizes.num_attention_heads % worker.devices_per_copy == 0:
        near = min((n for n in range(1, common + 1) if common % n == 0), key=lambda n: abs(n - tensor))
        expected = f"a divisor of {common}: of the attention and key-value heads and the units of an MLP"
        yield ConfigProblem(key, tensor, expected, f"the nearest is {near}")
