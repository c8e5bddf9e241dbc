"""A plan as text for a terminal and as plain values, and the changes that would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from roll.configs.batches import describe_batches
from roll.configs.engines.deepspeed import DeepSpeedConfig
from roll.configs.engines.fsdp2 import Fsdp2Config
from roll.configs.problems import ConfigErrors
from roll.configs.rl import RLConfig
from roll.extras.plan.memory import GIB, MIB, PARTS
from roll.extras.plan.plan import ACTIVE, Place, Plan
from roll.extras.plan.work import Role

MOST_CHANGES = 6
"""In a row, of the last advice."""
LEAST_GAIN = 0.9
"""Of a step's seconds, the part that a faster layout may still take."""
Faster = tuple[tuple[str, ...], float]
"""Overrides, and the seconds of a step with them."""


@dataclass(frozen=True)
class Advice:
    """Overrides, and the fullest device with them."""

    overrides: tuple[str, ...]
    needed: int
    capacity: int
    fits: bool

    @property
    def verdict(self) -> str:
        return "fits" if self.fits else f"{self.needed / self.capacity:.1f} × the capacity"


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


def faster(plan: Plan, replan: Replan) -> Faster | None:
    """Overrides that share the CPU slots of trainer and generator, and the seconds of a step with them, if it helps.

    Unless rollouts go on beside training, the slots of one role wait while the other works. GPUs are left out: there,
    roles that share a device move their weights in and out.
    """
    takes_turns = isinstance(plan.config, RLConfig) and not plan.config.overlaps
    generator, trainer = plan.config.actor_infer, plan.config.actor_train
    if not (plan.fits and takes_turns and plan.device.kind == "cpu") or generator is None:
        return None
    own, other = trainer.device_mapping or [], generator.device_mapping or []
    both, args = sorted({*own, *other}), trainer.training_args
    copies = args.gradient_accumulation_steps * len(own)
    if set(own) & set(other) or not own or copies % len(both):
        return None
    changes = (
        f"actor_train.device_mapping={both}".replace(" ", ""),
        f"actor_infer.device_mapping={both}".replace(" ", ""),
        f"actor_train.training_args.gradient_accumulation_steps={copies // len(both)}",
    )
    try:
        found = replan(changes)
    except ConfigErrors:
        return None
    helps = found.fits and found.step_seconds < LEAST_GAIN * plan.step_seconds
    return (changes, found.step_seconds) if helps else None


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


def page(plan: Plan, advice: Sequence[Advice], quicker: Faster | None, name: str) -> str:
    """All that a plan says, section by section."""
    sections = [
        [f"{name}: on {_devices(plan)}", *describe_batches(plan.config)],
        plan.placement.describe(),
        [f"memory of one worker, {_unit(plan)[0]}", *_table(list(_memory_rows(plan)))],
        ["room", *_table(list(_room_rows(plan)))],
        ["time of a step whose samples have the maximum length", *_table(list(_time_rows(plan)))],
        list(_verdict(plan, advice, quicker)),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def values(plan: Plan, advice: Sequence[Advice], quicker: Faster | None, name: str) -> dict[str, Any]:
    """The same for programs: bytes and seconds."""
    return {
        "config": name,
        "device": plan.device.name,
        "device_rates": {"flops": plan.device.flops, "bandwidth": plan.device.bandwidth, "tried": plan.device.tried},
        "fits": plan.fits,
        "placement": {
            role: [{"rank": slot.rank, "node": slot.node, "devices": list(slot.devices)} for slot in slots]
            for role, slots in plan.placement.slots.items()
        },
        "memory_bytes": {role: memory.phases for role, memory in plan.memory.items()},
        "places": [
            {"name": place.name, "capacity": place.capacity, "needed": place.needed, "phase": place.phase}
            for place in plan.places
        ],
        "seconds": {phase: duration.seconds for phase, duration in plan.times.items()},
        "step_seconds": plan.step_seconds,
        "run_seconds": plan.run_seconds,
        "practical": plan.is_practical,
        "advice": [{"overrides": list(each.overrides), "needed": each.needed, "fits": each.fits} for each in advice],
        "faster": None if quicker is None else {"overrides": list(quicker[0]), "step_seconds": quicker[1]},
    }


def _devices(plan: Plan) -> str:
    device, config = plan.device, plan.config
    size = f"{device.memory / GIB:.1f} GiB"
    if device.kind == "gpu":
        return f"{config.num_nodes} × {config.num_gpus_per_node} {device.name} of {size}"
    rates = f"{device.flops / 1e9:.0f} GFLOP/s and {device.bandwidth / 1e9:.0f} GB/s of one core"
    tried = f" ({device.tried})" if device.tried else ""
    return f"{config.num_nodes} × this machine: {device.cores} cores, {size}, {rates}{tried}"


def _unit(plan: Plan) -> tuple[str, int]:
    """MiB for small models, of which GiB would show zeros."""
    largest = max(memory.total(phase) for memory in plan.memory.values() for phase in memory.phases)
    return ("MiB", MIB) if largest < 4 * GIB else ("GiB", GIB)


def _memory_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    used = [part for part in PARTS if any(m.phases[p].get(part) for m in plan.memory.values() for p in m.phases)]
    unit = _unit(plan)[1]
    yield ("role", "phase", *used, "sum")
    for role, memory in plan.memory.items():
        for phase in plan.phases:
            if phase in memory.phases:
                sizes = [memory.phases[phase].get(part, 0) for part in used]
                shown = [f"{size / unit:.2f}" if size else "-" for size in sizes]
                yield (role, phase, *shown, f"{sum(sizes) / unit:.2f}")


def _room_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    yield ("place", "fullest in", "needs GiB", "has GiB", "fits")
    alike: dict[tuple[str, int, int], list[str]] = {}
    for place in plan.places:
        alike.setdefault((place.phase, place.needed, place.capacity), []).append(place.name)
    for (phase, needed, capacity), names in alike.items():
        shown = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} like it"
        yield (shown, phase, _gib(needed), _gib(capacity), "yes" if needed <= capacity else "NO")
    if plan.device.kind == "gpu":
        for node, _ in enumerate(plan.placement.nodes):
            yield (f"node {node}, its own memory", "-", _gib(plan.host_memory(node)), "-", "-")


def _time_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    yield ("phase", "seconds", "why")
    for phase, duration in plan.times.items():
        yield (phase, f"{duration.seconds:.3g}", duration.why)
    tokens = plan.samples.tokens
    rate = tokens / plan.step_seconds if plan.step_seconds else 0.0
    yield ("step", f"{plan.step_seconds:.3g}", f"{tokens:,} tokens, {rate:,.0f} per second")
    if plan.run_seconds is not None:
        yield ("run", f"{plan.run_seconds:.3g}", f"{plan.config.max_steps:,} steps, {_duration(plan.run_seconds)}")


def _verdict(plan: Plan, advice: Sequence[Advice], quicker: Faster | None) -> Iterator[str]:
    inexact = sorted({role.shape.kind for role in plan.roles.values() if not role.shape.exact})
    if inexact:
        yield f"the parameters of {', '.join(inexact)} are counted as those of a Llama of the same sizes"
    if plan.fits:
        yield "it fits" if plan.is_practical else _impractical(plan)
        if quicker is not None:
            yield (
                f"faster, {_duration(quicker[1])} a step, with trainer and generator on the same slots, where neither "
                f"waits for the other's: {' '.join(quicker[0])}"
            )
        return
    yield "it does not fit; the fullest device with each change:"
    yield from _table([(" ".join(each.overrides), f"{_gib(each.needed)} GiB", each.verdict) for each in advice])


def _impractical(plan: Plan) -> str:
    """That a run fits and would take too long, and what takes most of it."""
    phase, most = max(plan.times.items(), key=lambda item: item[1].seconds)
    share = most.seconds / sum(duration.seconds for duration in plan.times.values())
    whole = "" if plan.run_seconds is None else f" and the run {_duration(plan.run_seconds)}"
    fewer = {"rollout": "shorter or fewer answers (response_length, rollout_batch_size)"}
    way = fewer.get(phase, "fewer or shorter samples")
    return (
        f"it fits, but its time is not reasonable: a step takes {_duration(plan.step_seconds)}{whole}, {share:.0%} of "
        f"it for {phase} ({most.why}); {way}, a smaller model or faster devices (--devices) make it practical"
    )


def _duration(seconds: float) -> str:
    """A time in the unit that people count it in."""
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.3g} seconds"


def _gib(count: int) -> str:
    return f"{count / GIB:.2f}" if count else "-"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns, a line per row."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
