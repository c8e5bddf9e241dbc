"""Changes of a configuration that does not fit: each is planned anew, and told with what it comes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from roll.configs.engines.deepspeed import DeepSpeedConfig
from roll.configs.engines.fsdp2 import Fsdp2Config
from roll.configs.problems import ConfigErrors
from roll.extras.plan.plan import ACTIVE, Place, Plan
from roll.extras.plan.work import Role

MOST_CHANGES = 6
"""In a row, of the last advice."""


@dataclass(frozen=True)
class Advice:
    """Overrides, and the fullest place with them."""

    overrides: tuple[str, ...]
    needed: int
    capacity: int
    fits: bool

    @property
    def verdict(self) -> str:
        return "fits" if self.fits else f"{self.needed / self.capacity:.1f} × what is there"


Replan = Callable[[Sequence[str]], Plan]
"""Makes the plan of the configuration with further overrides; may raise ``ConfigErrors``."""


def advise(plan: Plan, replan: Replan) -> list[Advice]:
    """Single changes that help, best first; and if none is enough, the best ones together.

    Args:
        plan: that does not fit.
        replan: makes others.
    """
    if plan.fits:
        return []
    found = _tried(plan, replan, ())
    if any(each.fits for each, _ in found) or not found:
        return [each for each, _ in found]
    best, together = found[0]
    for _ in range(MOST_CHANGES - 1):
        more = _tried(together, replan, best.overrides)
        if not more:
            break
        best, together = more[0]
        if best.fits:
            break
    return [*(each for each, _ in found), best]


def _tried(plan: Plan, replan: Replan, before: tuple[str, ...]) -> list[tuple[Advice, Plan]]:
    """Changes that leave the fullest place less full; those that fit first, and those first that cost least."""
    now = _fullest(plan).needed
    found = []
    for change in candidates(plan):
        try:
            other = replan([*before, *change])
        except ConfigErrors:
            continue
        place = _fullest(other)
        if place.needed < now or other.fits:
            found.append((Advice((*before, *change), place.needed, place.capacity, other.fits), other))
    return sorted(found, key=lambda pair: (not pair[0].fits, 0 if pair[0].fits else pair[0].needed))


def _fullest(plan: Plan) -> Place:
    return max(plan.places, key=lambda place: place.needed / place.capacity)


def candidates(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Changes that may help where a plan is too large; those that cost the least time first."""
    phase = _fullest(plan).phase
    for name in ACTIVE[phase]:
        role = plan.roles.get(name)
        if role is None or phase not in plan.memory[name].phases:
            continue
        if phase == "train":
            yield from _training(role)
        elif phase == "logprobs":
            yield from _halved(role, "infer")
        elif phase == "rollout":
            yield from _rollout(plan, role)
        elif phase == "sync":
            yield (f"model_update_buffer_size_mb={max(64, plan.config.model_update_buffer_size_mb // 4)}",)
        if role.compute_bytes == 4:
            yield (f"{name}.model_args.dtype=bf16",)


def _training(role: Role) -> Iterator[tuple[str, ...]]:
    name, worker, options = role.name, role.worker, role.worker.strategy_args.typed()
    if not role.recomputes:
        yield (f"{name}.model_args.disable_gradient_checkpointing=false",)
    yield from _halved(role, "train")
    base = f"{name}.strategy_args.strategy_config"
    if isinstance(options, Fsdp2Config):
        if options.fsdp_size not in (-1, worker.num_workers) and worker.num_workers > 1:
            yield (f"{base}.fsdp_size=-1",)
        if not options.activation_offload:
            yield (f"{base}.activation_offload=true",)
        if not options.cpu_offload:
            yield (f"{base}.cpu_offload=true",)
    if isinstance(options, DeepSpeedConfig) and options.stage < 3:
        yield (f"{base}.zero_optimization.stage={options.stage + 1}",)
    if name == "actor_train" and role.lora is None:
        yield (f"{name}.model_args.lora_target=all-linear",)


def _halved(role: Role, phase: str) -> Iterator[tuple[str, ...]]:
    name, worker, args = role.name, role.worker, role.worker.training_args
    if getattr(worker, f"use_dynamic_batching_in_{phase}"):
        key = f"max_tokens_per_microbatch_in_{phase}"
        yield (f"{name}.{key}={max(1, getattr(worker, key) // 2)}",)
    elif phase == "infer" and worker.infer_batch_size > 1:
        yield (f"{name}.infer_batch_size={worker.infer_batch_size // 2}",)
    elif phase == "train" and args.per_device_train_batch_size > 1 and args.per_device_train_batch_size % 2 == 0:
        base = f"{name}.training_args"
        yield (
            f"{base}.per_device_train_batch_size={args.per_device_train_batch_size // 2}",
            f"{base}.gradient_accumulation_steps={args.gradient_accumulation_steps * 2}",
        )


def _rollout(plan: Plan, role: Role) -> Iterator[tuple[str, ...]]:
    options = role.worker.strategy_args.strategy_config
    for key in ("gpu_memory_utilization", "mem_fraction_static"):
        if key in role.worker.strategy_args.typed().model_fields_set | set(options):
            yield (f"{role.name}.strategy_args.strategy_config.{key}={max(0.1, options.get(key, 0.8) - 0.1):.2f}",)
    if plan.config.max_running_requests > 1:
        yield (f"max_running_requests={plan.config.max_running_requests // 2}",)
