"""ROLL's models that judge: those of reward domains, and the cluster ``reward`` that its environments ask."""

from __future__ import annotations

from typing import Any

from roll.configs.problems import NOTHING
from roll.extras.importers.common import to_do
from roll.extras.importers.draft import Draft, Kind

JUDGE_URL = "http://127.0.0.1:8000/v1"


def set_asked_model(draft: Draft) -> None:
    """The model that environments ask."""
    reward = draft.theirs("reward")
    if not isinstance(reward, dict):
        return
    model = (reward.get("model_args") or {}).get("model_name_or_path") or draft.get("reward_pretrain")
    engine = _judge_engine(draft, "reward", reward, "judge")
    draft.carry_set("reward.num_gpus_per_worker", "judge.num_gpus_per_worker")
    draft.derive("reward", "judge.model", model or draft.get("pretrain"), "the model that environments ask")
    draft.set("judge.engine", engine)
    for key, value in _sampling(reward).items():
        draft.set(f"judge.{key}", value)
    for key in ("model_args", "strategy_args", "generating_args", "device_mapping"):
        if reward.get(key):
            draft.tell(Kind.DERIVED, f"reward.{key}", NOTHING, "judge", note="of the judge")
    to_do(draft, "reward", "the class of an environment that asks says asks = True, and calls self.ask", ours="judge")


def judge_arguments(draft: Draft, base: str, domain: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the verifier ``judge``: an endpoint, or a model on the domain's devices."""
    own = (domain.get("model_args") or {}).get("model_name_or_path")
    hosted = domain.get("judge_model_type") != "api" and own
    model = own if hosted else domain.get("judge_model_name") or own
    arguments: dict[str, Any] = {"judge_model_name": model or "judge"}
    if hosted:
        arguments |= {"judge_model_type": "inference", "engine": _judge_engine(draft, base, domain)}
    else:
        arguments["judge_api_url"] = domain.get("judge_api_url") or JUDGE_URL
    arguments |= _sampling(domain)
    if domain.get("judge_api_key") and not hosted:
        arguments["judge_api_key_env"] = "JUDGE_API_KEY"
        to_do(draft, f"{base}.judge_api_key", "put it into the environment as JUDGE_API_KEY")
    if not hosted and not domain.get("judge_api_url"):
        note = f"serve {model} at {JUDGE_URL}, for example with vllm serve, on devices that the run does not use"
        to_do(draft, f"{base}.judge_model_type", note, domain.get("judge_model_type"))
    if domain.get("judge_prompt"):
        to_do(draft, f"{base}.judge_prompt", "its text is not copied: the judge's own is used unless you write one")
    return arguments


def _judge_engine(draft: Draft, base: str, domain: dict[str, Any], ours: str = "") -> dict[str, Any]:
    """Engine that samples a judge on the run's own devices: theirs, else plain Transformers."""
    strategy = dict(domain.get("strategy_args") or {})
    if strategy.get("strategy_name") not in ("vllm", "sglang"):
        strategy = {"strategy_name": "hf_infer"}
    elif (size := (strategy.get("strategy_config") or {}).get("tensor_parallel_size", 1)) > 1:
        draft.derive(f"{base}.strategy_args", f"{ours or base}.num_gpus_per_worker", size)
    engine: dict[str, Any] = {"strategy_args": {key: value for key, value in strategy.items() if value is not None}}
    model = domain.get("model_args") or {}
    if model.get("dtype"):
        engine["model_args"] = {"dtype": model["dtype"]}
    if mapping := domain.get("device_mapping"):
        draft.derive(f"{base}.device_mapping", f"{ours or base}.device_mapping", mapping)
    return engine


def _sampling(given: dict[str, Any]) -> dict[str, Any]:
    """Length and temperature of a judge's answers."""
    sampling = given.get("generating_args") or {}
    known = {"temperature": "temperature", "max_tokens": "max_new_tokens"}
    return {ours: sampling[theirs] for ours, theirs in known.items() if sampling.get(theirs) is not None}
