"""Writes docs/configuration.md from the configuration classes: ``python scripts/generate_config_docs.py [--check]``."""

from __future__ import annotations

import sys
from pathlib import Path

from generated import write_or_check
from pydantic.fields import FieldInfo

from roll.configs.agent import AgentConfig, AgentSandboxConfig
from roll.configs.agentic import AgenticConfig
from roll.configs.algorithm import AlgorithmConfig, OverlongBufferConfig, PfPpoConfig, RewardNormalizationConfig
from roll.configs.base import Config
from roll.configs.correction import IsWeightConfig, TrainInferCorrectionConfig, TrainInferFilterConfig
from roll.configs.data import DataArguments, DatasetFilterConfig
from roll.configs.distill import DistillConfig, DistillLossConfig
from roll.configs.divergence import DivergenceConfig
from roll.configs.dpo import DPOConfig
from roll.configs.engines import cards
from roll.configs.env import ALIASES, CustomEnvConfig, EnvManagerConfig
from roll.configs.generating import GeneratingArguments
from roll.configs.judge import AskedModelConfig, JudgeEngine
from roll.configs.model import ModelArguments
from roll.configs.offline import HeldOutConfig, OfflineConfig
from roll.configs.pipeline import CheckpointConfig, PipelineConfig, RayInitConfig, RunConfig
from roll.configs.preference import AnswerColumns, PairColumns, PreferenceConfig
from roll.configs.profiling import ProfilerConfig
from roll.configs.prompts import DataGeneratorConfig, PromptsConfig, RolloutWorkersConfig, ValidationConfig
from roll.configs.reward_training import RewardColumns, RewardLossConfig, RewardTrainingConfig
from roll.configs.rewards import RewardConfig, RewardFilterConfig, VerifierConfig
from roll.configs.rl import RLConfig
from roll.configs.rlvr import RLVRConfig
from roll.configs.router_replay import RouterReplayConfig
from roll.configs.schema import default_text, range_text, type_text
from roll.configs.sft import SFTConfig
from roll.configs.strategy import StrategyArguments
from roll.configs.teacher import OnPolicyDistillationConfig, TaggedTeacherConfig, TeacherConfig
from roll.configs.tools import McpServerConfig, ToolConfig, ToolsConfig
from roll.configs.training import TrainingArguments
from roll.configs.user import UserConfig
from roll.configs.val_infer import ValInferConfig
from roll.configs.warm_start import PromptWarmStartConfig, WarmStartConfig
from roll.configs.worker import WorkerConfig
from roll.extras.sandbox.remote import RemoteSandboxConfig
from roll.rewards import VERIFIERS
from roll.rewards.remote_classifier import RemoteClassifierConfig

TARGET = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

Group = tuple[str, str, type[Config]]
"""Heading, where the section stands in the file, its class."""

TOP_LEVEL: list[Group] = [
    ("Run", "top level", RunConfig),
    ("Ray", "`ray_init`", RayInitConfig),
    ("Checkpoint folder", "`checkpoint_config`", CheckpointConfig),
    ("Recordings", "`profiler`", ProfilerConfig),
    ("Policy", "top level", PipelineConfig),
    ("Rollouts, critic and reference", "top level of an RL run", RLConfig),
    ("Teacher", "top level of an RL run or a distillation", TeacherConfig),
    ("On-policy distillation", "top level of an RL run", OnPolicyDistillationConfig),
    ("Distance from the teacher", "top level of a distillation; of an RL run with `opd_form: loss`", DivergenceConfig),
    ("Replicas that evaluate", "`val_infer`", ValInferConfig),
    ("Tools", "`tools`", ToolsConfig),
    ("One tool", "`tools.use.<name>`", ToolConfig),
    ("A server of tools", "`tools.servers.<name>`", McpServerConfig),
    ("Algorithm", "top level", AlgorithmConfig),
    ("Reward normalisation", "`reward_normalization`", RewardNormalizationConfig),
    ("Overlong penalty", "`overlong_buffer`", OverlongBufferConfig),
    ("PF-PPO", "`pf_ppo`", PfPpoConfig),
    ("Train/infer correction", "`train_infer_correction`", TrainInferCorrectionConfig),
    ("Importance weights", "`train_infer_correction.is_weight`", IsWeightConfig),
    ("Rejection", "each of `train_infer_correction.filters`", TrainInferFilterConfig),
]
AGENTIC: list[Group] = [
    ("Environments", "top level", AgenticConfig),
    ("Warm start by scripted play", "`warm_start`", WarmStartConfig),
    ("Environment manager", "`train_env_manager`, `val_env_manager`", EnvManagerConfig),
    ("Environment tag", "`custom_envs.<Tag>`", CustomEnvConfig),
    ("Judge of environments", "`judge`; `engine` is *judge.engine* under *Verifiers*", AskedModelConfig),
]
RLVR: list[Group] = [
    ("Answers to prompts", "top level", RLVRConfig),
    ("A user who answers", "`user`", UserConfig),
    ("Agent program", "`agent`, `custom_envs.<Tag>.agent`", AgentConfig),
    ("Sandbox of an agent program", "`agent.sandbox`", AgentSandboxConfig),
    ("Warm start from a file", "`warm_start`, `teacher_warm_start`", PromptWarmStartConfig),
]
OFFLINE: list[Group] = [
    ("Samples and epochs", "top level", OfflineConfig),
    ("Held-out samples", "`validation`, beside the keys of RLVR's", HeldOutConfig),
]
SFT: list[Group] = [("Conversations to imitate", "top level", SFTConfig)]
REWARD_MODEL: list[Group] = [
    ("Losses of reward models", "top level", RewardLossConfig),
    ("Reward model", "top level", RewardTrainingConfig),
    ("Columns of scored answers", "`answers`", RewardColumns),
]
DPO: list[Group] = [
    ("Losses of preferences", "top level", PreferenceConfig),
    ("Preferences and reference", "top level", DPOConfig),
    ("Columns of pairs", "`preferences`, `answers`", PairColumns),
    ("Columns of preferences", "`preferences`", AnswerColumns),
]
DISTILL: list[Group] = [
    ("Loss of a distillation", "top level", DistillLossConfig),
    ("Distillation", "top level", DistillConfig),
]
PROMPTS: list[Group] = [
    ("Prompts and rewards", "top level", PromptsConfig),
    ("Reward domain", "`rewards.<name>`", RewardConfig),
    ("Verifier", "each of `rewards.<name>.verifiers`; `args` under *Verifiers*", VerifierConfig),
    ("Dynamic sampling", "`rewards.<name>.query_filter_config`", RewardFilterConfig),
    ("Validation", "`validation`", ValidationConfig),
    ("Rollout workers", "`rollout_workers`", RolloutWorkersConfig),
    ("Data generator", "`data_generator`", DataGeneratorConfig),
]
ROLES: list[Group] = [
    ("Worker", "`actor_train`, `actor_infer`, `critic`, `reference`, `teacher`", WorkerConfig),
    ("One of several teachers", "`teachers.<name>`, with the keys of a worker", TaggedTeacherConfig),
    ("Model", "`<role>.model_args`", ModelArguments),
    ("Training", "`actor_train.training_args`, `critic.training_args`", TrainingArguments),
    ("Data", "`actor_train.data_args`, `validation.data_args`", DataArguments),
    ("Dataset filter", "`<…>.data_args.dataset_filter`", DatasetFilterConfig),
    (
        "Generating",
        "`actor_infer.generating_args`, `<env manager>.generating_args`, `validation.generating_args`",
        GeneratingArguments,
    ),
    ("Router replay", "`actor_train.router_replay`", RouterReplayConfig),
    ("Strategy", "`<role>.strategy_args`", StrategyArguments),
]
INTRODUCTION = """\
# Configuration

<!-- Written by scripts/generate_config_docs.py from the classes in roll/configs. Do not edit. -->

A configuration is a YAML file composed by Hydra: one that comes with the package (`examples/config`), or your own:

```bash
roll train agentic_sokoban max_steps=5 actor_train.training_args.learning_rate=1e-4
roll train ./mine.yaml
```

- **Overrides** are `key=value`; no `+` is needed. `~key` takes a key back to its default. A value that Hydra's grammar
  does not know is taken as text, so `'actor_train.device_mapping=list(range(0,4))'` works.
- **Strictness.** Everything is checked before Ray or a model starts, and all problems are reported together (exit
  code 2): unknown keys, wrong types, values out of range, numbers that do not divide, names of plug-ins, model paths
  and devices that do not exist. A number in quotes is not a number; `true` is not 1.
- **Composition.** `defaults: [traj_envs@_here_, _self_]` includes `traj_envs.yaml`; `${response_length}` refers to
  another key. A top-level key that the tables below do not know is allowed only when some `${...}` refers to it.
  A file of your own may include the package's: `defaults: [rlvr_math, _self_]`.
- **Groups.** `train=megatron` on the command line lays `train/megatron.yaml` over the configuration, before the other
  overrides; every folder of YAML files beside a configuration is such a group. The package's are `train` and `infer`,
  the engines ([strategies.md](strategies.md)).
- **`custom_env`** (singular) is the library of tags that `traj_envs.yaml` defines. Only `custom_envs` (plural) is read;
  it picks tags by `SimpleSokoban: ${custom_env.SimpleSokoban}`. Overriding a key inside such a link, as in
  `custom_envs.SimpleSokoban.max_steps=5`, keeps the link's other keys. Likewise top-level `deepspeed_zero*` presets are
  only read through a link.
- **`device_mapping`** is a list of device ids or a sum of lists and ranges, `list(range(0,8)) + [12, 13]`. It is
  parsed, never evaluated. Ids count the devices of all nodes: GPUs, or CPU slots where there is no GPU.
- **Batch arithmetic.** `rollout_batch_size` counts episodes, in whole groups of `group_size` (agentic), or prompts,
  each with `num_return_sequences_in_group` answers (RLVR). The global batch of one optimizer step is
  `per_device_train_batch_size × gradient_accumulation_steps × data-parallel size` episodes, and divides the episodes of
  a step. The data-parallel size is the number of devices of the role, for Megatron divided by tensor × pipeline ×
  context parallel size. Where each turn is a sample of its own (`env_manager_cls: step`), the turns of a rollout are
  cut into that many optimizer steps. `roll validate` prints the arithmetic in words.
"""


def render() -> str:
    parts = [INTRODUCTION]
    for title, groups in (
        ("Top level", TOP_LEVEL),
        ("Agentic pipeline", AGENTIC),
        ("Prompts, rewards and held-out data (all but the agentic pipeline)", PROMPTS),
        ("RLVR pipeline", RLVR),
        ("Data that is there before the run (SFT, distillation, preferences, reward models)", OFFLINE),
        ("SFT pipeline", SFT),
        ("Distillation pipeline", DISTILL),
        ("DPO pipeline", DPO),
        ("Reward model pipeline", REWARD_MODEL),
        ("Roles", ROLES),
        ("Strategies", _strategies()),
        ("Verifiers", _verifiers()),
    ):
        parts.append(f"## {title}\n")
        parts += [_section(*group) for group in groups]
    parts.append(_names())
    return "\n".join(parts)


def _section(heading: str, place: str, section: type[Config]) -> str:
    shown = {each for _, _, each in [*TOP_LEVEL, *PROMPTS, *OFFLINE, *DISTILL, *DPO, *REWARD_MODEL, *ROLES]} & set(
        section.__mro__[1:]
    )
    inherited = {name for each in shown for name in each.model_fields}
    lines = [f"### {heading}", "", f"{_first_line(section)} ({place})", ""]
    lines += ["| key | type | default | range | meaning |", "|---|---|---|---|---|"]
    lines += [_row(name, field) for name, field in section.model_fields.items() if name not in inherited]
    if section.model_config.get("extra") == "allow":
        lines += ["", "Further keys go to the engine as they are."]
    return "\n".join(lines) + "\n"


def _row(name: str, field: FieldInfo) -> str:
    cells = [f"`{name}`", type_text(field.annotation, field.metadata), _default(field), range_text(field.metadata)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in [*cells, str(field.description)]) + " |"


def _default(field: FieldInfo) -> str:
    text = default_text(field)
    return text if text in ("required", "its own") else f"`{text}`"


def _first_line(section: type[Config]) -> str:
    return (section.__doc__ or "").strip().splitlines()[0]


def _verifiers() -> list[Group]:
    found = [(name, f"`args` of the verifier `{name}`", VERIFIERS.get(name).config_class) for name in VERIFIERS.names()]
    return [
        *found,
        ("judge.engine", "`engine` in the `args` of the verifier `judge`, `judge.engine` of environments", JudgeEngine),
        ("reward_model.remote", "`remote` in the `args` of the verifier `reward_model`", RemoteClassifierConfig),
        ("code.remote", "`remote` in the `args` of the verifier `code`", RemoteSandboxConfig),
    ]


def _strategies() -> list[Group]:
    return [
        (card.name, f"`strategy_config` of {' and '.join(f'`{name}`' for name in card.strategies)}", card.options)
        for card in cards()
    ]


def _names() -> str:
    lines = ["## Other spellings", "", "| key | here |", "|---|---|"]
    lines += [f"| `{alias}` | the same as `{name}`; giving both is an error |" for alias, name in ALIASES.items()]
    lines += ["", "Keys of other systems: [migrating.md](migrating.md)."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(TARGET, render, __doc__))
