"""A plan as text for a terminal and as plain values, and the changes that would make it fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from roll.configs.batches import describe_batches
from roll.configs.engines.deepspeed import DeepSpeedConfig
from roll.configs.engines.fsdp2 import Fsdp2Config
from roll.configs.engines.megatron import MegatronConfig
from roll.configs.engines.sglang import SglangConfig
from roll.configs.engines.vllm import VllmConfig
from roll.configs.problems import ConfigErrors
from roll.configs.rl import RLConfig
from roll.extras.plan.memory import GIB, MIB, PARTS
from roll.extras.plan.plan import ACTIVE, Place, Plan
from roll.extras.plan.work import Role, Samples
from roll.models.shapes import TowerShape

MOST_CHANGES = 6
"""In a row, of the last advice."""
MOST_HALVINGS = 4
LEAST_GAIN = 0.9
"""Of a step's seconds, the part that a faster layout may still take."""


@dataclass(frozen=True)
class Faster:
    """Overrides, the seconds of a step with them, and what makes it faster."""

    overrides: tuple[str, ...]
    step_seconds: float
    why: str


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
    """Single changes that help, those that fit first, and of these the one that costs the run least; if none is
    enough, last the best ones together, without those that are not needed.

    Args:
        plan: that does not fit.
        replan: makes others.
    """
    if plan.fits:
        return []
    found = _tried(plan, replan, ())
    if any(each.fits for each, _ in found) or not found:
        return [each for each, _ in found]
    chosen, together = [found[0][0].overrides], found[0][1]
    for _ in range(MOST_CHANGES - 1):
        before = tuple(word for change in chosen for word in change)
        more = _tried(together, replan, before)
        if together.fits or not more:
            break
        chosen, together = [*chosen, more[0][0].overrides[len(before) :]], more[0][1]
    singles = [each for each, _ in found]
    if not together.fits:
        return [*singles, _advice(chosen, together)]
    for change in list(chosen):  # a later one may have made an earlier one needless
        others = [each for each in chosen if each is not change]
        with contextlib.suppress(ConfigErrors):
            without = replan([word for each in others for word in each])
            if without.fits:
                chosen, together = others, without
    return [*singles, _advice(chosen, together)]


def _advice(changes: Sequence[tuple[str, ...]], plan: Plan) -> Advice:
    place = _fullest(plan)
    words = last_of_each_key([word for change in changes for word in change])
    return Advice(words, place.needed, place.capacity, plan.fits)


def last_of_each_key(overrides: Sequence[str]) -> tuple[str, ...]:
    """Overrides without those that a later one of the same key replaces."""
    return tuple({word.partition("=")[0].lstrip("+~"): word for word in overrides}.values())


def faster(plan: Plan, replan: Replan) -> Faster | None:
    """The layout of a machine's CPU slots with which a step takes the least time, if that is worth a change.

    GPUs are left out: roles that share one move their weights in and out, and weights are sent while it computes.
    """
    if not plan.fits or plan.device.kind != "cpu":
        return None
    found = []
    for changes, why in _layouts(plan):
        with contextlib.suppress(ConfigErrors):
            other = replan(changes)
            if other.fits and other.step_seconds < LEAST_GAIN * plan.step_seconds:
                found.append(Faster(changes, other.step_seconds, why))
    return min(found, key=lambda each: each.step_seconds, default=None)


def _layouts(plan: Plan) -> Iterator[tuple[tuple[str, ...], str]]:
    """Trainer and generator on the same slots, all weights on each slot of the trainer, and both; with the reasons."""
    shared, whole = _same_slots(plan), ("actor_train.strategy_args.strategy_config.fsdp_size=1",)
    trainer = plan.config.actor_train
    options = trainer.strategy_args.typed()
    slots = "trainer and generator on the same slots, where neither waits for the other's"
    copies = "all weights on each slot of the trainer, so that none are sent in a pass"
    if shared:
        yield shared, slots
    if isinstance(options, Fsdp2Config) and options.tensor_parallel_size == 1 and options.fsdp_size != 1:
        if trainer.num_workers > 1:
            yield whole, copies
        if shared:
            yield (*shared, *whole), f"{slots}, and {copies}"


def _same_slots(plan: Plan) -> tuple[str, ...]:
    """Overrides that put trainer and generator on all slots of both; none where they share slots, or where rollouts go
    on beside training."""
    generator, trainer = plan.config.actor_infer, plan.config.actor_train
    if not isinstance(plan.config, RLConfig) or plan.config.overlaps or generator is None:
        return ()
    own, other = trainer.device_mapping or [], generator.device_mapping or []
    both, args = sorted({*own, *other}), trainer.training_args
    copies = args.gradient_accumulation_steps * len(own)
    if set(own) & set(other) or not own or copies % len(both):
        return ()
    return (
        f"actor_train.device_mapping={both}".replace(" ", ""),
        f"actor_infer.device_mapping={both}".replace(" ", ""),
        f"actor_train.training_args.gradient_accumulation_steps={copies // len(both)}",
    )


def _tried(plan: Plan, replan: Replan, before: tuple[str, ...]) -> list[tuple[Advice, Plan]]:
    """Changes that leave the fullest place less full; those that fit first, and those first that cost least.

    Of a ladder the first rung that fits counts, else the last that the configuration allows.
    """
    now = _fullest(plan).needed
    found: list[tuple[Advice, Plan]] = []
    for ladder in candidates(plan):
        best = None
        for change in ladder:
            try:
                other = replan([*before, *change])
            except ConfigErrors:
                continue
            place = _fullest(other)
            if place.needed < now or other.fits:
                best = Advice((*before, *change), place.needed, place.capacity, other.fits), other
            if other.fits:
                break
        if best is not None and all(best[0].overrides != each.overrides for each, _ in found):
            found.append(best)
    return sorted(found, key=lambda pair: (not pair[0].fits, 0 if pair[0].fits else pair[0].needed))


def _fullest(plan: Plan) -> Place:
    return max(plan.places, key=lambda place: place.needed / place.capacity)


Ladder = Sequence[tuple[str, ...]]
"""One change in larger and larger steps, each as overrides."""


def candidates(plan: Plan) -> Iterator[Ladder]:
    """Changes that may help where a plan is too large; those that cost the least time first."""
    phase = _fullest(plan).phase
    for name in ACTIVE[phase]:
        role = plan.roles.get(name)
        if role is None or phase not in plan.memory[name].phases:
            continue
        if phase == "train":
            yield from _training(role)
        elif phase == "logprobs":
            yield _halved(role, "infer")
        elif phase == "rollout":
            yield from _rollout(plan, role)
        elif phase == "sync":
            size = plan.config.model_update_buffer_size_mb
            yield [(f"model_update_buffer_size_mb={max(64, size // 2**step)}",) for step in (1, 2, 3, 4)]
        if phase in ("train", "logprobs") and plan.tower is not None:
            yield _fewer_pixels(role, "train" if phase == "train" else "infer", plan.samples)
        elif phase != "rollout" and isinstance(role.worker.strategy_args.typed(), MegatronConfig | Fsdp2Config):
            yield from _split(role)
        if role.compute_bytes == 4:
            yield [(f"{name}.model_args.dtype=bf16",)]
    if phase == "train" and (actor := plan.roles.get("actor_train")) is not None and actor.lora is None:
        yield [("actor_train.model_args.lora_target=all-linear",)]


def _training(role: Role) -> Iterator[Ladder]:
    name, worker, options = role.name, role.worker, role.worker.strategy_args.typed()
    yield _halved(role, "train")
    if not role.recomputes:
        yield [(f"{name}.model_args.disable_gradient_checkpointing=false",)]
    base = f"{name}.strategy_args.strategy_config"
    if isinstance(options, Fsdp2Config):
        if options.fsdp_size not in (-1, worker.num_workers) and worker.num_workers > 1:
            yield [(f"{base}.fsdp_size=-1",)]
        if not options.activation_offload:
            yield [(f"{base}.activation_offload=true",)]
        if not options.cpu_offload:
            yield [(f"{base}.cpu_offload=true",)]
    if isinstance(options, DeepSpeedConfig):
        yield [(f"{base}.zero_optimization.stage={stage}",) for stage in range(options.stage + 1, 4)]
    if isinstance(options, MegatronConfig) and not options.use_distributed_optimizer:
        yield [(f"{base}.use_distributed_optimizer=true",)]


def _fewer_pixels(role: Role, phase: str, samples: Samples) -> Ladder:
    key, least = f"max_pixels_per_microbatch_in_{phase}", samples.pictures * samples.pixels
    most = getattr(role.worker, key) or least << MOST_HALVINGS
    return [(f"{role.name}.{key}={most >> step}",) for step in range(1, MOST_HALVINGS + 1) if most >> step >= least]


def _split(role: Role) -> Iterator[Ladder]:
    """Layers over more ranks: fewer copies, each of which takes more micro-batches for the same batch."""
    name, options, steps = role.name, role.worker.strategy_args.typed(), (2, 4, 8)
    accumulation = role.worker.training_args.gradient_accumulation_steps
    keys = ["tensor_parallel_size"]
    if isinstance(options, MegatronConfig):
        keys = ["tensor_model_parallel_size", "pipeline_model_parallel_size"]
    for key in keys:
        base = f"{name}.strategy_args.strategy_config.{key}"
        more = f"{name}.training_args.gradient_accumulation_steps"
        yield [(f"{base}={getattr(options, key) * step}", f"{more}={accumulation * step}") for step in steps]


def _halved(role: Role, phase: str) -> Ladder:
    name, worker, args = role.name, role.worker, role.worker.training_args
    steps = range(1, MOST_HALVINGS + 1)
    if getattr(worker, f"use_dynamic_batching_in_{phase}"):
        key = f"max_tokens_per_microbatch_in_{phase}"
        return [(f"{name}.{key}={getattr(worker, key) >> step}",) for step in steps if getattr(worker, key) >> step]
    if phase == "infer":
        sizes = [worker.infer_batch_size >> step for step in steps]
        return [(f"{name}.infer_batch_size={size}",) for size in sizes if size]
    size, base = args.per_device_train_batch_size, f"{name}.training_args"
    return [
        (
            f"{base}.per_device_train_batch_size={size >> step}",
            f"{base}.gradient_accumulation_steps={args.gradient_accumulation_steps << step}",
        )
        for step in steps
        if size % (1 << step) == 0
    ]


def _rollout(plan: Plan, role: Role) -> Iterator[Ladder]:
    worker, options = role.worker, role.worker.strategy_args.strategy_config
    known = worker.strategy_args.typed().model_fields_set | set(options)
    for key in ("gpu_memory_utilization", "mem_fraction_static"):
        if key in known:
            shares = [round(options.get(key, 0.8) - 0.1 * step, 2) for step in (1, 2, 3, 4)]
            yield [
                (f"{role.name}.strategy_args.strategy_config.{key}={share:.2f}",) for share in shares if share >= 0.1
            ]
    most = plan.config.max_running_requests
    yield [(f"max_running_requests={most >> step}",) for step in range(1, MOST_HALVINGS + 1) if most >> step]
    if plan.device.kind == "gpu" and isinstance(worker.strategy_args.typed(), VllmConfig | SglangConfig):
        yield [(f"{role.name}.num_gpus_per_worker={worker.num_gpus_per_worker * step}",) for step in (2, 4, 8)]


def page(plan: Plan, advice: Sequence[Advice], quicker: Faster | None, name: str) -> str:
    """All that a plan says, section by section."""
    sections = [
        [f"{name}: on {_devices(plan)}", *describe_batches(plan.config)],
        plan.placement.describe(),
        [f"memory of one worker, {_unit(plan)[0]}", *_table(list(_memory_rows(plan)))],
        *([list(_picture_lines(plan, plan.tower))] if plan.tower is not None else []),
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
        "pictures": _picture_values(plan),
        "seconds": {phase: duration.seconds for phase, duration in plan.times.items()},
        "step_seconds": plan.step_seconds,
        "beside_seconds": {name: duration.seconds for name, duration in plan.beside.items()},
        "run_seconds": plan.run_seconds,
        "practical": plan.is_practical,
        "advice": [{"overrides": list(each.overrides), "needed": each.needed, "fits": each.fits} for each in advice],
        "faster": None if quicker is None else asdict(quicker),
    }


def _picture_values(plan: Plan) -> dict[str, Any] | None:
    """What the tower and a picture of the largest size take; ``None``: the plan is for text alone."""
    if (tower := plan.tower) is None:
        return None
    pixels = plan.samples.pixels
    work = tower.operations(pixels)
    return {
        "per_sample": plan.samples.pictures,
        "tower_parameters": tower.parameters,
        "max_pixels": pixels,
        "tokens": tower.tokens(pixels),
        "input_bytes": tower.input_bytes(pixels),
        "operations": work,
        "forward_seconds": work / plan.device.flops,
        "stored_bytes": 3 * pixels,
    }


def _picture_lines(plan: Plan, tower: TowerShape) -> Iterator[str]:
    pixels, number = plan.samples.pixels, plan.samples.pictures
    yield f"pictures: {number} in each sample (--pictures N), counted in all figures"
    unit, size = _unit(plan)
    weights, trained = (each * tower.parameters / size for each in (4, 16))
    yield (
        f"  the vision tower: {tower.parameters:,} parameters, {weights:,.1f} {unit} of float32 in each model, "
        f"{trained:,.1f} {unit} with gradients and Adam's moments where it is trained, before it is dealt out"
    )
    work = tower.operations(pixels)
    yield (
        f"  one of {pixels:,} pixels, the most that prompts and bounds allow: {tower.tokens(pixels):,} tokens, "
        f"{3 * pixels / 1e6:,.1f} MB stored, {tower.input_bytes(pixels) / 1e6:,.1f} MB for the tower, "
        f"{work / 1e12:,.3f} TFLOP forward ({_duration(work / plan.device.flops)}), three times as many in training"
    )


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
    for name, duration in plan.beside.items():
        yield (name, f"{duration.seconds:.3g}", f"of the whole run: {duration.why}")
    if plan.run_seconds is not None:
        parts = " and ".join([f"{plan.config.max_steps:,} steps", *plan.beside])
        yield ("run", f"{plan.run_seconds:.3g}", f"{parts}, {_duration(plan.run_seconds)}")


def _verdict(plan: Plan, advice: Sequence[Advice], quicker: Faster | None) -> Iterator[str]:
    inexact = sorted({role.shape.kind for role in plan.roles.values() if not role.shape.exact})
    if inexact:
        yield f"the parameters of {', '.join(inexact)} are counted as those of a Llama of the same sizes"
    if plan.fits:
        yield "it fits" if plan.is_practical else _impractical(plan)
        if quicker is not None:
            yield f"faster, {_duration(quicker.step_seconds)} a step, with {quicker.why}: {' '.join(quicker.overrides)}"
        return
    smallest = next((each for each in advice if each.fits), None)
    if smallest is not None:
        yield f"it does not fit; the smallest change that makes it fit: {' '.join(smallest.overrides)}"
    elif advice:
        yield "it does not fit, and no change that was tried makes it fit: it needs more devices, or larger ones"
    else:
        yield "it does not fit"
    if advice:
        yield "the fullest device with each change:"
    yield from _table([(f"{_gib(each.needed)} GiB", each.verdict, " ".join(each.overrides)) for each in advice])


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
