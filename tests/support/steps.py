"""Steps of environments that tests make up: they say only what is not as usual."""

from typing import Any

from roll.agentic.env.base import StepResult, step_result

USUAL: dict[str, Any] = {"task_reward": 0.0, "penalty": 0.0, "terminated": False, "truncated": False}
USUAL |= {"action_is_effective": True, "success": True}


def usual_step(observation: Any, action: str | None, key: object, **unusual: Any) -> StepResult:
    """The answer of ``TextEnv.step``; ``key`` tells the state after it from others."""
    return step_result(observation, action=action, state_key=str(key), **USUAL | unusual)
