"""Values of other systems that are said differently here, by the name that the tables use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Transform = Callable[[Any], Any]


class Untranslatable(ValueError):
    """A value that means nothing here. The message says why."""


class Omitted(Exception):
    """A value that is said here by saying nothing. The message says why."""


class Partial(Exception):
    """A value of which a part has a counterpart."""

    def __init__(self, value: Any, why: str) -> None:
        super().__init__(why)
        self.value = value


def _choice(names: Mapping[Any, Any], why: str = "") -> Transform:
    def choose(value: Any) -> Any:
        if value in names:
            return names[value]
        known = ", ".join(map(str, names))
        raise Untranslatable(f"{value} has no counterpart here{f': {why}' if why else ''} (there are those of {known})")

    return choose


def _commas(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _parts(value: Any) -> Any:
    """Parts of a checkpoint."""
    names = {"model": "model", "hf_model": "model", "optimizer": "optimizer", "extra": "rng"}
    given = [names[name] for name in value or () if name in names]
    if "model" not in given:
        raise Untranslatable("a checkpoint holds the model at least")
    return list(dict.fromkeys(given))


def _unless_true(value: Any) -> Any:
    """A switch of the chat template, which is on where it is not given."""
    if value is None or value is True:
        raise Omitted("templates do so by themselves")
    return value


def _switch(value: Any) -> Any:
    """A coefficient that is only read when it is above 0."""
    if not value:
        raise Omitted("0 switches it off")
    return value


def _positive(value: Any) -> Any:
    """A bound that null, -1 and 0 switch off."""
    if value is None or value <= 0:
        raise Omitted(f"{value} sets no bound")
    return value


def _steps(value: Any) -> Any:
    if isinstance(value, str):
        raise Untranslatable(f"{value}: a period is counted in steps")
    return value


def _never(value: Any) -> Any:
    """A period in steps, -1 or 0 for never."""
    value = _steps(value)
    return value if value and value > 0 else None


def _period(value: Any) -> Any:
    """A period of evaluations or checkpoints, where 0 is after the last step alone."""
    if value == "after_each_epoch":
        raise Partial(0, "an epoch has rows / global batch steps: write that number; until then after the last step")
    return max(0, _steps(value) or 0)


def _first_of(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _listed(value: Any) -> Any:
    """Names in a list, or behind one another with commas."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


_TRACKERS = ("stdout", "tensorboard", "wandb", "mlflow", "swanlab", "trackio")


def _trackers(value: Any) -> Any:
    given = ["stdout" if name == "console" else name for name in ([value] if isinstance(value, str) else value or [])]
    kept = [name for name in given if name in _TRACKERS]
    if unknown := [name for name in given if name not in _TRACKERS]:
        if kept:
            raise Partial(_first_of(kept), f"no tracker {', '.join(unknown)} here")
        raise Omitted(f"no tracker {', '.join(unknown)} here; package.module:Class may name your own")
    return _first_of(kept)


def _optimizer(value: Any) -> Any:
    """A class or name of an optimizer; null is AdamW."""
    names = {"adam": "adamw", "adamw": "adamw", "muon": "muon"}
    return _choice(names)("adamw" if value is None else str(value).lower())


def _env_manager(value: Any) -> Any:
    name = str(value).rpartition(".")[2]
    known = {
        "TrajEnvManager": "traj",
        "StepEnvManager": "step",
        "StepConcatEnvManager": "step",
        "AgentNativeStepEnvManager": "step",
        "ProxyEnvManager": "traj",
        "traj": "traj",
        "step": "step",
    }
    if name in known:
        return known[name]
    if str(value).startswith("roll."):
        raise Untranslatable(f"{name} has no counterpart here: there are traj and step")
    return value


TRANSFORMS: dict[str, Transform] = {
    "opposite": lambda value: not value,
    "commas": _commas,
    "bf16-or-fp32": lambda value: "bf16" if value else "fp32",
    "above-zero": _switch,
    "positive": _positive,
    "parts": _parts,
    "unless-true": _unless_true,
    "never": _never,
    "period": _period,
    "all": lambda value: None if value is None or value < 0 else value,
    "text-none": lambda value: None if value in ("None", "none", "null") else value,
    "trackers": _trackers,
    "attention": _choice(
        {
            "fa2": "fa2",
            "flash_attention_2": "fa2",
            "sdpa": "sdpa",
            "auto": "auto",
            "eager": "eager",
            "disabled": "eager",
            None: "auto",
            False: "auto",
        }
    ),
    "schedule": _choice(
        {
            "constant": "constant_with_warmup",
            "constant_with_warmup": "constant_with_warmup",
            "linear": "linear",
            "cosine": "cosine",
            "cosine_with_min_lr": "cosine",
            "inverse_sqrt": "inverse_sqrt",
            "inverse_square_root": "inverse_sqrt",
            "inverse-square-root": "inverse_sqrt",
            "warmup_stable_decay": "wsd",
            "wsd": "wsd",
            "WSD": "wsd",
            None: "constant_with_warmup",
        },
        "no such schedule",
    ),
    "optimizer": _optimizer,
    "resume": lambda value: {"auto": True, "disable": False}.get(value, value),
    "first": _first_of,
    "listed": _listed,
    "replay": _choice({"disabled": "disable", "disable": "disable", "R2": "R2", "R3": "R3"}),
    "wsd-fall": _choice({"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}),
    "dtype": _choice(
        {
            "bf16": "bf16",
            "bfloat16": "bf16",
            "fp16": "fp16",
            "float16": "fp16",
            "half": "fp16",
            "fp32": "fp32",
            "float32": "fp32",
            "auto": None,
        }
    ),
    "trainer": _choice(
        {"fsdp": "fsdp2_train", "fsdp2": "fsdp2_train", "megatron": "megatron_train", "veomni": "fsdp2_train"}
    ),
    "generator": _choice(
        {"vllm": "vllm", "vllm_async": "vllm", "sglang": "sglang", "sglang_async": "sglang", "hf": "hf_infer"}
    ),
    "env-manager": _env_manager,
    "grouping": _choice(
        {
            "state": "state",
            "batch": "batch",
            "inductive": "inductive",
            "traj_group_id": "state",
            "state_hash": "state",
            "tags": "inductive",
        }
    ),
    "divergence": _choice(
        {name: name for name in ("forward_kl", "reverse_kl", "js_divergence", "skewed_forward_kl", "skewed_reverse_kl")}
    ),
    "normalisation": _choice({name: name for name in ("asym_clip", "identity", "mean", "mean_std")}),
    "estimator": lambda value: {
        "group_norm": "grpo",
        "agentic_reinforce": "reinforce",
        "grpo_vectorized": "grpo",
        "rloo_vectorized": "rloo",
    }.get(value, value),
    "policy-loss": _choice(
        {
            "vanilla": "ppo",
            "gspo": "ppo",
            "clip_cov": "clip_cov",
            "kl_cov": "kl_cov",
            "gpg": "vanilla",
            "geo_mean": "gmpo",
            "cispo": "cispo",
            "sapo": "sapo",
            "dppo_tv": "dppo_tv",
            "dppo_kl": "dppo_kl",
        }
    ),
    "cut": _choice({"error": "error", "right": "truncate"}, "a conversation loses its end"),
    "unbounded": lambda value: value or 0,
    "truncation": _choice({"error": "error", "left": "left", "right": "right"}, "prompts are cut at one end"),
}
"""By name: from a value there to the one here. They raise ``Untranslatable``, ``Omitted`` or ``Partial``."""
