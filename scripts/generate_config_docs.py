"""Writes docs/configuration.md and docs/configuration/ from the classes: ``make docs``, or with ``--check``."""

from __future__ import annotations

import sys
from pathlib import Path

from generated import write_or_check
from pydantic.fields import FieldInfo

from roll.configs.agent import AgentConfig, AgentSandboxConfig
from roll.configs.agentic import AgenticConfig
from roll.configs.algorithm import (
    AlgorithmConfig,
    IsWeightConfig,
    OverlongBufferConfig,
    PfPpoConfig,
    RewardNormalizationConfig,
    TrainInferCorrectionConfig,
    TrainInferFilterConfig,
)
from roll.configs.base import Config
from roll.configs.data import DataArguments, DatasetFilterConfig
from roll.configs.distill import DistillConfig, DistillLossConfig
from roll.configs.engines import cards
from roll.configs.env import ALIASES, CustomEnvConfig, EnvManagerConfig
from roll.configs.offline import HeldOutConfig, OfflineConfig, SFTConfig
from roll.configs.pipeline import (
    CheckpointConfig,
    PipelineConfig,
    ProfilerConfig,
    PromptWarmStartConfig,
    RayInitConfig,
    RunConfig,
    WarmStartConfig,
    WatchesConfig,
)
from roll.configs.preference import (
    AnswerColumns,
    DPOConfig,
    PairColumns,
    PreferenceConfig,
    RewardColumns,
    RewardLossConfig,
    RewardTrainingConfig,
)
from roll.configs.prompts import DataGeneratorConfig, PromptsConfig, RolloutWorkersConfig, ValidationConfig
from roll.configs.rewards import AskedModelConfig, JudgeEngine, RewardConfig, RewardFilterConfig, VerifierConfig
from roll.configs.rl import RLConfig, ValInferConfig
from roll.configs.rlvr import RLVRConfig, UserConfig
from roll.configs.schema import default_text, range_text, type_text
from roll.configs.teacher import DivergenceConfig, OnPolicyDistillationConfig, TaggedTeacherConfig, TeacherConfig
from roll.configs.tools import McpServerConfig, ToolConfig, ToolsConfig
from roll.configs.worker import (
    GeneratingArguments,
    ModelArguments,
    RouterReplayConfig,
    StrategyArguments,
    TrainingArguments,
    WorkerConfig,
)
from roll.extras.sandbox.remote import RemoteSandboxConfig
from roll.rewards import VERIFIERS
from roll.rewards.classifiers import RemoteClassifierConfig

DOCS = Path(__file__).resolve().parents[1] / "docs"

Group = tuple[str, str, type[Config]]
"""Heading, where the section stands in the file, its class."""

RUN: list[Group] = [
    ("Run", "top level", RunConfig),
    ("Ray", "`ray_init`", RayInitConfig),
    ("Checkpoint folder", "`checkpoint_config`", CheckpointConfig),
    ("Profiler", "`profiler`", ProfilerConfig),
    ("Watches", "`watches`", WatchesConfig),
]
POLICY: list[Group] = [
    ("Policy", "top level", PipelineConfig),
    ("Rollouts, critic and reference", "top level of an RL run", RLConfig),
    ("Evaluation workers", "`val_infer`", ValInferConfig),
    ("Teacher", "top level of an RL run or a distillation", TeacherConfig),
    ("On-policy distillation", "top level of an RL run", OnPolicyDistillationConfig),
    (
        "Divergence from the teacher",
        "top level of a distillation; of an RL run with `opd_form: loss`",
        DivergenceConfig,
    ),
]
ALGORITHM: list[Group] = [
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
    ("Environment manager", "`train_env_manager`, `val_env_manager`", EnvManagerConfig),
    ("Environment tag", "`custom_envs.<Tag>`", CustomEnvConfig),
    ("Judge of environments", "`judge`; `engine` is [judge.engine](verifiers.md#judgeengine)", AskedModelConfig),
    ("Warm start by scripted play", "`warm_start`", WarmStartConfig),
]
TOOLS: list[Group] = [
    ("Tools", "`tools`", ToolsConfig),
    ("One tool", "`tools.use.<name>`", ToolConfig),
    ("Tool server", "`tools.servers.<name>`", McpServerConfig),
    ("Agent program", "`agent`, `custom_envs.<Tag>.agent`", AgentConfig),
    ("Sandbox of an agent program", "`agent.sandbox`", AgentSandboxConfig),
]
PROMPTS: list[Group] = [
    ("Prompts and rewards", "top level", PromptsConfig),
    ("Reward domain", "`rewards.<name>`", RewardConfig),
    ("Verifier", "each of `rewards.<name>.verifiers`; its `args`: [verifiers](verifiers.md)", VerifierConfig),
    ("Dynamic sampling", "`rewards.<name>.query_filter_config`", RewardFilterConfig),
    ("Validation", "`validation`", ValidationConfig),
    ("Rollout workers", "`rollout_workers`", RolloutWorkersConfig),
    ("Data generator", "`data_generator`", DataGeneratorConfig),
    ("RLVR", "top level of an RLVR run", RLVRConfig),
    ("Simulated user", "`user`", UserConfig),
    ("Warm start from a file", "`warm_start`, `teacher_warm_start`", PromptWarmStartConfig),
]
OFFLINE: list[Group] = [
    ("Samples and epochs", "top level", OfflineConfig),
    ("Held-out samples", "`validation`, with the keys of RLVR's", HeldOutConfig),
    ("SFT", "top level of an SFT run", SFTConfig),
    ("Preference losses", "top level of a DPO run", PreferenceConfig),
    ("DPO", "top level of a DPO run", DPOConfig),
    ("Columns of pairs", "`preferences`, `answers`", PairColumns),
    ("Columns of preferences", "`preferences`", AnswerColumns),
    ("Reward model losses", "top level of a reward model run", RewardLossConfig),
    ("Reward model", "top level of a reward model run", RewardTrainingConfig),
    ("Columns of scored answers", "`answers`", RewardColumns),
    ("Distillation loss", "top level of a distillation", DistillLossConfig),
    ("Distillation", "top level of a distillation", DistillConfig),
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

A configuration is a YAML file, composed by Hydra. Use one from the package (`examples/config`) or your own:

```bash
roll train agentic_sokoban max_steps=5 actor_train.training_args.learning_rate=1e-4
roll train ./mine.yaml
```

- **Overrides** are `key=value`, without `+`. `~key` resets a key to its default. A value that Hydra's grammar cannot
  parse is read as text, so `'actor_train.device_mapping=list(range(0,4))'` works.
- **Strictness.** Everything is checked before Ray or a model starts, and all problems are reported together (exit
  code 2): unknown keys, wrong types, values out of range, numbers that do not divide, missing plug-ins, models and
  devices. A quoted number is not a number; `true` is not 1.
- **Composition.** `defaults: [traj_envs@_here_, _self_]` includes `traj_envs.yaml`; `${response_length}` refers to
  another key. An unknown top-level key is allowed only if some `${...}` refers to it. Your own file can include one
  from the package: `defaults: [rlvr_math, _self_]`.
- **Groups.** `train=megatron` on the command line merges `train/megatron.yaml` into the configuration before the other
  overrides. Every folder of YAML files next to a configuration is such a group; the package has `train` and `infer`,
  the engines ([strategies.md](strategies.md)).
- **`custom_env`** (singular) is the library of tags that `traj_envs.yaml` defines. Only `custom_envs` (plural) is read;
  it picks tags with `SimpleSokoban: ${custom_env.SimpleSokoban}`. An override inside such a link, as in
  `custom_envs.SimpleSokoban.max_steps=5`, keeps the link's other keys. Top-level `deepspeed_zero*` presets are also
  read only through a link.
- **`device_mapping`** is a list of device ids, or a sum of lists and ranges: `list(range(0,8)) + [12, 13]`. It is
  parsed, never evaluated. Ids count the devices of all nodes: GPUs, or CPU slots on machines without a GPU.
- **Batch arithmetic.** `rollout_batch_size` counts episodes, in whole groups of `group_size` (agentic), or prompts,
  each with `num_return_sequences_in_group` responses (RLVR). The global batch of one optimizer step is
  `per_device_train_batch_size × gradient_accumulation_steps × data-parallel size` episodes; it must divide the episodes
  of a step. The data-parallel size is the number of devices of the role, for Megatron divided by tensor × pipeline ×
  context parallel size. With one sample per turn (`env_manager_cls: step`), the turns of a rollout are cut into that
  many optimizer steps. `roll validate` prints this arithmetic.

`roll explain KEY` describes one key on the command line.

| Page | Contents |
|---|---|
"""
Page = tuple[str, str, list[Group]]
"""File name, title, the sections of the page."""


def pages() -> list[Page]:
    """The pages below the overview, in the order of the menu."""
    return [
        ("run", "Run, checkpoints, profiler", RUN),
        ("policy", "Policy, rollouts, teachers", POLICY),
        ("algorithm", "Algorithm", ALGORITHM),
        ("environments", "Environments", AGENTIC),
        ("prompts", "Prompts, rewards, validation", PROMPTS),
        ("tools", "Tools and agent programs", TOOLS),
        ("datasets", "Training on a fixed dataset", OFFLINE),
        ("roles", "Roles", ROLES),
        ("engines", "Engine options", _engines()),
        ("verifiers", "Verifiers", _verifiers()),
    ]


def render() -> dict[Path, str]:
    """Every page by its path."""
    overview = INTRODUCTION
    found = {}
    for name, title, groups in pages():
        overview += f"| [{title}](configuration/{name}.md) | {', '.join(heading for heading, _, _ in groups)} |\n"
        head = f"# {title}\n\n<!-- Written by scripts/generate_config_docs.py. Do not edit. -->\n"
        found[DOCS / "configuration" / f"{name}.md"] = "\n".join([head, *(_section(*group) for group in groups)])
    return {DOCS / "configuration.md": overview + _names(), **found}


def _section(heading: str, place: str, section: type[Config]) -> str:
    shown = {each for groups in (RUN, POLICY, ALGORITHM, PROMPTS, OFFLINE, ROLES) for _, _, each in groups}
    inherited = {name for each in shown & set(section.__mro__[1:]) for name in each.model_fields}
    lines = [f"## {heading}", "", f"{_first_line(section)} ({place})", ""]
    lines += ["| key | type | default | range | meaning |", "|---|---|---|---|---|"]
    lines += [_row(name, field) for name, field in section.model_fields.items() if name not in inherited]
    if section.model_config.get("extra") == "allow":
        lines += ["", "Other keys are passed to the engine unchanged."]
    return "\n".join(lines) + "\n"


def _row(name: str, field: FieldInfo) -> str:
    cells = [f"`{name}`", type_text(field.annotation, field.metadata), _default(field), range_text(field.metadata)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in [*cells, _words(str(field.description))]) + " |"


def _words(description: str) -> str:
    """Placeholders such as ``<name>`` are escaped outside code: a browser would read a tag."""
    parts = description.split("`")
    return "`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts))


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


def _engines() -> list[Group]:
    return [
        (card.name, f"`strategy_config` of {' and '.join(f'`{name}`' for name in card.strategies)}", card.options)
        for card in cards()
    ]


def _names() -> str:
    lines = ["", "## Other spellings", "", "| key | here |", "|---|---|"]
    lines += [f"| `{alias}` | the same as `{name}`; giving both is an error |" for alias, name in ALIASES.items()]
    lines += ["", "Keys of other systems: [migrating.md](migrating.md)."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(render, __doc__))
