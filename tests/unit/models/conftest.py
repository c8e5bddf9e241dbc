"""What the tests of models share: configurations of a run whose roles have other models than its policy."""

from roll.configs.agentic import AgenticConfig
from roll.configs.loader import validate
from roll.preflight.choices import CHECKS
from tests.support.configs import problems_of

VALUES = {
    "adv_estimator": "reinforce",
    "rollout_batch_size": 8,
    "prompt_length": 24,
    "response_length": 8,
    "sequence_length": 32,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "custom_envs": {"Lake": {"env_type": "frozen_lake", "env_manager_cls": "traj"}},
    "train_env_manager": {"env_groups": 2, "group_size": 4, "tags": ["Lake"]},
    "val_env_manager": {"env_groups": 1, "tags": ["Lake"]},
}


def checked(**sections) -> AgenticConfig:
    return validate(AgenticConfig, {**VALUES, **sections}, CHECKS[AgenticConfig])


def refusals(**sections) -> dict[str, str]:
    """What was expected instead, by key."""
    return {path: problem.expected for path, problem in problems_of(checked, **sections).items()}
