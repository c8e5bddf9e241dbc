"""A plan as text for a terminal and as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from roll.configs.batches import describe_batches
from roll.extras.plan.advice import Advice
from roll.extras.plan.memory import GIB, MIB, PARTS
from roll.extras.plan.plan import Plan


def page(plan: Plan, advice: Sequence[Advice], name: str) -> str:
    """All that a plan says, section by section."""
    sections = [
        [f"{name}: on {_devices(plan)}", *describe_batches(plan.config)],
        plan.placement.describe(),
        [f"memory of one worker, {_unit(plan)[0]}", *_table(list(_memory_rows(plan)))],
        ["room", *_table(list(_room_rows(plan)))],
        ["time of a step whose samples are as long as they may be", *_table(list(_time_rows(plan)))],
        list(_verdict(plan, advice)),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def values(plan: Plan, advice: Sequence[Advice], name: str) -> dict[str, Any]:
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


def _verdict(plan: Plan, advice: Sequence[Advice]) -> Iterator[str]:
    inexact = sorted({role.shape.kind for role in plan.roles.values() if not role.shape.exact})
    if inexact:
        yield f"the parameters of {', '.join(inexact)} are counted as those of a Llama of the same sizes"
    if plan.fits:
        yield "it fits" if plan.is_practical else _impractical(plan)
        return
    yield "it does not fit; the fullest place with a change:"
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
