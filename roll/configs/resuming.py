"""What a changed configuration means for a resumed run: refused, reported, or ignored."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from roll.configs.agentic import AgenticConfig
from roll.configs.algorithm import AlgorithmConfig
from roll.configs.base import Config
from roll.configs.offline import OfflineConfig
from roll.configs.pipeline import RunConfig
from roll.configs.problems import NOTHING, ConfigProblem, Words, show
from roll.configs.rl import RLConfig
from roll.configs.rlvr import RLVRConfig
from roll.configs.schema import section_at

SWITCH = "resume_with_changes"
"""The key that goes on all the same."""


class Effect(Enum):
    """What a key decides."""

    POSITION = "what the next step takes from the data"
    ROWS = "which rows there are: compared by their content, since files may move"
    RESULT = "what is learned or measured"
    FREE = "where, how fast and how long it runs, and what is kept"


_TABLE: tuple[tuple[Effect, str], ...] = (
    (
        Effect.POSITION,
        "seed rollout_batch_size num_return_sequences_in_group "
        "train_env_manager.group_size train_env_manager.env_groups train_env_manager.tags train_env_manager.n_groups "
        "train_env_manager.tag_weights "
        "<role>.training_args.per_device_train_batch_size <role>.training_args.gradient_accumulation_steps "
        "actor_train.data_args.shuffle actor_train.data_args.domain_interleave_probs",
    ),
    (
        Effect.ROWS,
        "actor_train.data_args.file_name actor_train.data_args.dataset_cls actor_train.data_args.dataset_filter* "
        "validation.data_args.file_name validation.data_args.dataset_cls data_generator*",
    ),
    (
        Effect.RESULT,  # the options of engines that are no layout
        "<role>.strategy_args.strategy_config.moe_aux_loss_coeff "
        "<role>.strategy_args.strategy_config.freeze_moe_router "
        "<role>.strategy_args.strategy_config.*dtype <role>.strategy_args.strategy_config.quantization* "
        "<role>.strategy_args.strategy_config.bf16* <role>.strategy_args.strategy_config.fp16* "
        "<role>.strategy_args.strategy_config.fp8* "
        "<role>.strategy_args.strategy_config.optimizer*",
    ),
    (
        Effect.FREE,
        "exp_name rpc_timeout stall_timeout output_dir logging_dir render_save_dir num_renders num_written_episodes "
        "ray_init* track_with tracker_kwargs* checkpoint_config* profiler* watches* max_ckpt_to_keep "
        "resume_from_checkpoint "
        "resume_with_changes max_steps num_train_epochs total_epochs save_steps async_save logging_steps eval_steps "
        "learned_share num_written_groups probe probe_every "
        "val_before_train val_after_train eval_only max_bad_steps max_worker_restarts num_nodes num_gpus_per_node "
        "model_update_buffer_size_mb check_weight_update weight_update_deltas generate_opt_level max_running_requests "
        "balance_ranks_by max_running_groups rollout_dump_dir rollout_dump_gb tokenization_sanity_check "
        "is_num_return_sequences_expand val_infer* precompute_reference reference_dir precompute_only "
        "<role>.strategy_args* <role>.world_size <role>.device_mapping <role>.num_gpus_per_worker "
        "<role>.infer_batch_size <role>.use_dynamic_batching_in_* <role>.max_tokens_per_microbatch_in_* "
        "<role>.max_pixels_per_microbatch_in_* <role>.sequence_length_round_in_* "
        "<role>.use_sequence_packing <role>.share_prompts "
        "<role>.model_args.disable_gradient_checkpointing <role>.model_args.attn_implementation "
        "<role>.model_args.ulysses_size <role>.model_args.use_liger_kernel <role>.model_args.trust_remote_code "
        "*data_args.id *data_args.preprocessing_num_workers *data_args.image_urls "
        "*data_args.image_outside_folder validation.data_args.shuffle rollout_workers.world_size "
        "rewards.*.world_size rewards.*.device_mapping rewards.*.num_gpus_per_worker rewards.*.retries "
        "rewards.*.max_concurrency rewards.*.num_processes rewards.*.max_error_rate judge.engine.strategy_args* "
        "judge.world_size judge.device_mapping judge.num_gpus_per_worker judge.max_concurrency "
        "*_env_manager.max_env_num_per_worker *_env_manager.env_retries custom_envs.*.use_thread_lock",
    ),
    (
        Effect.RESULT,
        "system_envs* plugins val_batch_size prompt_length response_length sequence_length val_prompt_length "
        "val_sequence_length pretrain tokenizer_path tiny_* max_grad_norm l2 reward_pretrain reference_pretrain "
        "is_use_additional_prompts max_additional_running_prompts max_filtered_batches rollout_replay_dir "
        "replay_schedule async_generation_ratio rollout_window partial_rollout kv_after_update "
        "train_on sample_overflow loss_agg_mode distill_loss_weight distill_on_prompt kd_temperature kd_objective "
        "jsd_beta skew_lambda logits_topk teacher_logprobs teacher_pretrain teacher_prompt teacher_column_length "
        "teachers is_pure_opd opd_* align_tokenizers preference_loss beta length_normalized target_margin "
        "label_smoothing nll_coef desirable_weight undesirable_weight reward_loss center_coef "
        "actor_train actor_infer critic reference teacher teachers.* <role>.model_args* <role>.training_args* "
        "<role>.data_args* <role>.generating_args* <role>.model_update_frequency <role>.worker_cls <role>.system_envs* "
        "<role>.router_replay* rewards* validation* rollout_workers* tools* agent* user* warm_start* "
        f"teacher_warm_start* online_dpo* preferences* answers* custom_envs* *_env_manager* judge* "
        f"{' '.join(f'{name} {name}.*' for name in AlgorithmConfig.model_fields)}",
    ),
)
"""Patterns of keys; the first that fits decides. ``*`` is any text, ``<role>`` the section of a model."""

_ROLE = r"(?:actor_train|actor_infer|critic|reference|teacher|teachers\.[^.]+)"


@functools.cache
def patterns() -> tuple[tuple[re.Pattern[str], Effect], ...]:
    """The patterns of keys in their order, and what those decide."""

    def pattern(text: str) -> re.Pattern[str]:
        return re.compile(re.escape(text).replace(r"\*", ".*").replace("<role>", _ROLE))

    return tuple((pattern(text), effect) for effect, texts in _TABLE for text in texts.split())


def effect_of(key: str) -> Effect | None:
    """What a dotted key decides; ``None`` for one that the table has forgotten."""
    return next((effect for pattern, effect in patterns() if pattern.fullmatch(key)), None)


@dataclass(frozen=True)
class Rows:
    """The identity of a dataset as a run reads it, wherever its files lie."""

    rows: int
    """Rows that the filter keeps."""
    samples: int
    """Prompts, conversations or pairs that the run has of them."""
    digest: str
    """Checksum of the kept rows' content, in their order."""

    def __str__(self) -> str:
        samples = "" if self.samples == self.rows else f", {self.samples:,} of them used"
        return f"{self.rows:,} rows{samples} (content {self.digest[:8]})"


@dataclass(frozen=True)
class Change:
    """A key whose value differs from that of the run that saved the checkpoint."""

    key: str
    was: Any
    now: Any
    about: str = ""
    """What the values count."""
    hint: str = ""

    def __str__(self) -> str:
        about = f" ({self.about})" if self.about else ""
        return f"{self.key}{about}: was {show(self.was)}, is {show(self.now)}"

    def refused(self) -> ConfigProblem:
        """The change as a mistake."""
        expected = f"{show(self.was)}{f', {self.about}' * bool(self.about)}, as in the run that saved the checkpoint"
        hint = f"{self.hint + '; ' if self.hint else ''}{SWITCH}=true continues with the new values"
        return ConfigProblem(self.key, self.now, expected, hint)


def position_of(config: RunConfig) -> dict[str, Any]:
    """What the next step's place in the data follows from, by key; JSON values.

    Layouts are not in it: of batches that are counted per device, the whole batch is.
    """
    found: dict[str, Any] = {"seed": config.seed}
    if isinstance(config, OfflineConfig):
        found["actor_train.training_args.per_device_train_batch_size"] = config.actor_train.global_train_batch_size
    if isinstance(config, RLConfig):
        found["rollout_batch_size"] = config.rollout_batch_size
    if isinstance(config, RLVRConfig):
        data = config.actor_train.data_args
        found["num_return_sequences_in_group"] = config.num_return_sequences_in_group
        found["actor_train.data_args.shuffle"] = data.shuffle
        found["actor_train.data_args.domain_interleave_probs"] = shares = data.domain_interleave_probs
        if shares is not None:  # each domain then has an order of its own
            found["actor_train.data_args.tag"] = data.tag
            found["actor_train.data_args.default_tag"] = data.default_tag
            found |= {f"rewards.{name}.tag_included": each.tag_included for name, each in config.rewards.items()}
    if isinstance(config, AgenticConfig):
        manager = config.train_env_manager
        found["train_env_manager.group_size"] = manager.group_size
        found["train_env_manager.tags"] = manager.tags
        if manager.tag_weights is not None:
            found["train_env_manager.tag_weights"] = manager.tag_weights
        elif len(manager.tags) > 1:  # a group's number says its tag
            found["train_env_manager.n_groups"] = list(manager.groups_per_tag.values())
    return found


def trained_per_update(config: RunConfig) -> dict[str, Any]:
    """Whole batches of the optimizer steps of reinforcement learning, whose place in the data they do not move."""
    if not isinstance(config, RLConfig):
        return {}
    trained = [role for role in ("actor_train", "critic") if role in config.roles]
    key = "training_args.per_device_train_batch_size"
    return {f"{role}.{key}": config.roles[role].global_train_batch_size for role in trained}


_ABOUT = {
    "per_device_train_batch_size": "samples of an optimizer step, on all devices together",
    "n_groups": "environment groups of each tag",
}
"""Words for what ``position_of`` has under a key, where it is not the key's own value."""


@dataclass(frozen=True)
class Record:
    """What a checkpoint records about the run that saved it. JSON values."""

    values: Mapping[str, Any]
    """The configuration, without secrets."""
    position: Mapping[str, Any]
    """See ``position_of``."""
    batches: Mapping[str, Any]
    """See ``trained_per_update``."""
    data: Mapping[str, Mapping[str, Any]]
    """``Rows`` by the section that names the dataset."""

    @classmethod
    def of(cls, config: RunConfig, values: Mapping[str, Any], data: Mapping[str, Rows]) -> Record:
        """The record of this run; ``values``: its configuration without secrets."""
        rows = {section: dict(vars(each)) for section, each in data.items()}
        return cls(values, position_of(config), trained_per_update(config), rows)


def compare(was: Record, now: Record, schema: type[RunConfig]) -> tuple[list[Change], list[Change]]:
    """Changes of the place in the data, and of what is learned or measured from there on."""
    changed = list(_differences(was.values, now.values, schema))
    moved, told = list(_counts(was.position, now.position)), list(_counts(was.batches, now.batches))
    told += [each for each in changed if effect_of(each.key) is Effect.RESULT and each.key not in now.position]
    for section in was.data.keys() & now.data.keys():  # one that is new or gone is a changed section
        if was.data[section] != now.data[section]:
            before, after = Rows(**was.data[section]), Rows(**now.data[section])
            key = _naming_key(section, now.values)
            reasons = [each for each in changed if _chooses_rows(each.key, section, before.digest == after.digest)]
            change = Change(key, Words(before), Words(after), hint="; ".join(map(str, reasons)))
            (told if section.startswith("validation") else moved).append(change)
    return moved, told


def _counts(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    for key in dict.fromkeys([*was, *now]):
        before, after = was.get(key, NOTHING), now.get(key, NOTHING)
        if before != after:
            yield Change(key, _shown(before), _shown(after), _ABOUT.get(key.rpartition(".")[2], ""))


def _chooses_rows(key: str, section: str, same_content: bool) -> bool:
    """Tells whether a changed key may be why a dataset has other rows, or other samples of the same."""
    if same_content:
        return key.endswith(("_length", "_overflow")) or key == "train_on"
    return effect_of(key) is Effect.ROWS and key.startswith((section, "data_generator"))


def _naming_key(section: str, values: Mapping[str, Any]) -> str:
    """The key that says where a dataset comes from."""
    node: Any = values
    for part in section.split("."):
        node = node[part]
    return f"{section}.{'dataset_cls' if node['dataset_cls'] else 'file_name'}"


def _differences(
    was: Mapping[str, Any], now: Mapping[str, Any], schema: type[Config], path: str = ""
) -> Iterator[Change]:
    """Values that differ, a section as a whole where one side has none.

    A key of a class that only one side has is of another version, and says nothing.
    """
    fixed = not path or section_at(schema, path.split(".")) is not None
    for name in dict.fromkeys([*was, *now]):
        key = f"{path}.{name}" if path else str(name)
        before, after = was.get(name, NOTHING), now.get(name, NOTHING)
        if before == after or (fixed and NOTHING in (before, after)):
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, schema, key)
        else:
            yield Change(key, _shown(before), _shown(after))


def _shown(value: Any) -> Any:
    """A value, or words for it, which JSON can hold."""
    return Words("a section") if isinstance(value, Mapping) else Words(value) if value is NOTHING else value
