"""Every key of the algorithm is read from YAML under its documented name, and changes what it should, and that first.

A case is a stage of the step, keys that hold in both runs, and the key that is changed in the second. Both go through
``roll.configs.loader`` and one whole step on the same random batch: the stages before the named one must come out the
same, the named one must not.
"""

import functools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from roll.algorithms.advantages import compute_advantages, value_mask
from roll.algorithms.kl import KlController
from roll.algorithms.losses import build_policy_loss, build_value_loss, policy_needs
from roll.algorithms.quantities import KlToReference, hidden_states, prob_square_sum
from roll.algorithms.reductions import RunningStats
from roll.algorithms.selection import drop_masked_episodes, select_for_policy
from roll.algorithms.shaping import Shaping, apply_kl_penalty, shape_rewards, whiten_token_rewards
from roll.algorithms.types import LossContext, TokenScores
from roll.configs.agentic import AgenticConfig
from roll.configs.algorithm import (
    ADV_ESTIMATORS,
    AggregationLevel,
    AlgorithmConfig,
    KlPenalty,
    NormType,
    PfPpoConfig,
    RewardNormalizationConfig,
    TrainInferFilterConfig,
)
from roll.configs.base import Config
from roll.configs.loader import load_config
from roll.configs.policy_loss import PG_VARIANTS, LossAggMode
from roll.data.batch import Batch
from roll.data.requests import sampling_params
from roll.pipeline.rl import RLPipeline
from roll.pipeline.roles import Roles
from tests.support.algorithms_batches import columns_of, gradient, make_batch
from tests.support.choice import one_in

BASE = """
custom_envs:
  SimpleSokoban: {env_type: sokoban}
train_env_manager: {tags: [SimpleSokoban]}
val_env_manager: {tags: [SimpleSokoban]}
critic: {}
reference: {}
prompt_length: 64
response_length: 3
sequence_length: 128
max_steps: 4
# Both are on in every case, so that only what is changed differs.
adv_estimator: reinforce
norm_mean_type: batch
"""

STAGES = ("run", "episodes", "rewards", "kl_coef", "advantages", "selection", "policy", "value")

PLAIN = "norm_mean_type=null"
NAMED = f"{PLAIN} reward_normalization.method=mean_std"
KL = "add_token_level_kl=true"
KL_LOSS = "use_kl_loss=true kl_loss_coef=0.3"
BUFFER = "overlong_buffer.enable=true overlong_buffer.len=2"
COV = "pg_variant=clip_cov clip_cov_ratio=0.5 clip_cov_lb=0.1 clip_cov_ub=1.5"
PF_PPO = "use_pf_ppo=true pf_ppo.reweight_method=pow"
IS_WEIGHT = "train_infer_correction.is_weight"
WEIGHT = f"{IS_WEIGHT}.enabled=true"
LIVE = f"{WEIGHT} {IS_WEIGHT}.detach=false"
RANGE = "use_pg_clip_range=true"
TRUNCATED = "actor_infer.generating_args.top_k=5 actor_infer.strategy_args.strategy_name=hf_infer"
FILTERS = "train_infer_correction.filters"
BY_DIFF = {"ratio_enabled": False, "diff_enabled": True}
GDPO = "adv_estimator=gdpo gdpo_reward_keys=[a,b]"
TOKEN_BASELINES = [name for name, each in ADV_ESTIMATORS.items() if each.sums_squares]
ASKING = ("gdpo", "grpo", "maxrl", "remax", *TOKEN_BASELINES)
"""Where the comparison starts, and the estimators that ask for more than a batch has."""


def filters(**keys: Any) -> str:
    inside = ", ".join(f"{key}: {str(value).lower()}" for key, value in {"enabled": True, **keys}.items())
    return f"{FILTERS}=[{{{inside}}}]"


def cases(stage: str, given: str, *changes: str) -> list[tuple[str, str, str]]:
    return [(stage, given, change) for change in changes]


def each(key: str, names: Iterable[str]) -> list[str]:
    return [f"{key}={name}" for name in names]


CASES: list[tuple[str, str, str]] = [
    *cases("run", "", "ppo_epochs=2", "max_grad_norm=0.5", "l2=0.1"),
    ("run", "adv_estimator=gae", "critic_warmup=3"),
    *cases("run", "", "enable_old_logprobs_recompute=true", "force_disable_old_logprobs_recompute=true"),
    # Advantages
    *cases("advantages", "adv_estimator=grpo", *each("adv_estimator", (x for x in ADV_ESTIMATORS if x not in ASKING))),
    *cases("run", "adv_estimator=grpo", *each("adv_estimator", TOKEN_BASELINES)),  # the trainer has to score
    ("advantages", f"adv_estimator={TOKEN_BASELINES[0]}", f"adv_estimator={TOKEN_BASELINES[1]}"),
    ("run", "adv_estimator=grpo", "adv_estimator=remax"),  # needs greedy episodes; the advantages are checked below
    ("advantages", f"{PLAIN} adv_estimator=grpo", GDPO),
    ("advantages", f"{PLAIN} adv_estimator=rloo", "adv_estimator=maxrl"),
    ("advantages", f"{PLAIN} {GDPO}", "gdpo_reward_weights=[1,3]"),
    ("advantages", "adv_estimator=rloo", "adv_estimator=grpo"),
    ("advantages", "adv_estimator=grpo", "norm_adv_by_std_in_grpo=false"),
    ("advantages", "adv_estimator=grpo_passk", "norm_adv_by_std_in_grpo=false"),
    ("advantages", "adv_estimator=gae", "gamma=0.5"),
    ("advantages", "adv_estimator=reinforce_plus_plus", "gamma=0.5"),
    ("advantages", "", "gamma=0.5"),
    ("advantages", "adv_estimator=gae", "lambd=0.5"),
    ("advantages", "", "step_reward_gamma=0.5"),
    ("advantages", "adv_estimator=gae turn_level_gae=true", "step_reward_gamma=0.5"),
    ("advantages", "adv_estimator=gae", "turn_level_gae=true"),
    *(("advantages", f"adv_estimator={x}", "episode_reward_weight=0.5") for x in ("gigpo", "step_reinforce")),
    *(("advantages", f"adv_estimator={x}", "step_reward_weight=0.5") for x in ("gigpo", "step_reinforce")),
    *cases("advantages", "", "whiten_advantages=true", "advantage_clip=0.5"),
    # Rewards
    *cases("rewards", PLAIN, *each("norm_mean_type", get_args(NormType))),
    *cases("rewards", "", *each("norm_std_type", get_args(NormType))),
    *cases("rewards", PLAIN, *each("reward_norm", get_args(NormType))),
    *cases("rewards", f"{PLAIN} reward_norm=batch", "reward_shift=true", "reward_scale=true"),
    ("rewards", PLAIN, "use_reward_scaling=true"),
    ("rewards", f"{PLAIN} use_reward_scaling=true", "use_reward_norm=true"),
    *cases("rewards", PLAIN, *each("reward_normalization.method", ("mean", "mean_std", "asym_clip"))),
    ("rewards", NAMED, "reward_normalization.method=identity"),
    *cases("rewards", NAMED, *each("reward_normalization.grouping", ("state", "inductive"))),
    ("rewards", f"{NAMED} reward_normalization.grouping=state", "reward_normalization.grouping=batch"),
    *cases("rewards", "", "reward_clip=0.5", "whiten_rewards=true"),
    ("rewards", "overlong_buffer.len=2", "overlong_buffer.enable=true"),
    *cases("rewards", BUFFER, "overlong_buffer.len=3", "overlong_buffer.penalty_factor=2"),
    *cases("rewards", BUFFER, "overlong_buffer.max_length=2", "response_length=4"),
    ("rewards", "", "add_len_reward=true"),
    ("rewards", "add_len_reward=true", "len_reward_coef=0.5"),
    # KL
    ("run", "", KL),  # the training engine has to score the rollouts
    ("rewards", KL, "init_kl_coef=0.4"),
    ("kl_coef", KL, "target_kl=0.01"),
    ("kl_coef", f"{KL} target_kl=0.01", "kl_horizon=50"),
    *cases("rewards", KL, *each("kl_penalty", ("abs", "mse", "k2", "low_var_kl", "k3"))),
    *cases("rewards", f"{KL} kl_penalty=k3", *each("kl_penalty", ("kl", "k1"))),
    ("run", KL, "kl_penalty=full"),  # hidden states have to travel; the rewards are checked below
    ("run", KL_LOSS, "kl_penalty=full"),
    *cases("policy", KL_LOSS, *each("kl_penalty", ("abs", "mse", "k2", "low_var_kl", "k3"))),
    ("policy", "", KL_LOSS),
    ("policy", KL_LOSS, "kl_loss_coef=0.4"),
    *cases("policy", KL_LOSS, *each("kl_penalty", ("kl+", "k1+", "abs+", "low_var_kl+", "k3+"))),
    ("policy", KL_LOSS, "kl_loss_penalty=abs"),
    ("run", KL_LOSS, "kl_loss_target=0.01"),
    # What the policy's loss counts
    ("selection", "", "max_len_mask=true"),
    ("episodes", "max_len_mask=true", "mask_type=all"),
    ("episodes", "difficulty_mask=true", "mask_type=all"),
    ("episodes", "error_max_len_clip=true error_max_len_threshold=1", "mask_type=all"),
    ("selection", "", "difficulty_mask=true"),
    ("selection", "difficulty_mask=true", "difficulty_low_threshold=-0.5"),
    ("selection", "difficulty_mask=true difficulty_low_threshold=-0.5", "difficulty_high_threshold=0.5"),
    ("selection", "", "error_max_len_clip=true error_max_len_threshold=1"),
    ("selection", "error_max_len_clip=true", "error_max_len_threshold=1"),
    *cases("selection", "", "difficulty_loss_weight=true", "length_loss_weight=true", "use_pf_ppo=true"),
    *cases("selection", PF_PPO, *each("pf_ppo.reweight_method", ("max_min", "max_random"))),
    ("selection", "use_pf_ppo=true pf_ppo.reweight_method=max_min", "pf_ppo.reweight_method=pow"),
    ("selection", "use_pf_ppo=true", "pf_ppo.weight_pow=0.5"),
    ("run", TRUNCATED, "train_infer_correction.replay_kept_sets=64"),
    ("run", "", WEIGHT),
    *cases("selection", WEIGHT, *each(f"{IS_WEIGHT}.weight_type", ("segment", "geometric", "sequence"))),
    ("selection", f"{WEIGHT} {IS_WEIGHT}.weight_type=sequence", f"{IS_WEIGHT}.weight_type=token"),
    ("selection", WEIGHT, f"{IS_WEIGHT}.upper_bound=0.8"),
    ("run", WEIGHT, f"{IS_WEIGHT}.detach=false"),
    ("policy", LIVE, f"{IS_WEIGHT}.upper_bound=0.8"),
    ("selection", WEIGHT, f"{IS_WEIGHT}.batch_normalize=true"),
    ("run", "", "train_infer_correction.bypass=true"),
    ("run", "", filters()),
    *cases("selection", filters(), *(filters(agg_type=x) for x in ("segment", "geometric", "sequence"))),
    ("selection", filters(agg_type="sequence"), filters(agg_type="token")),
    *cases("selection", filters(), filters(ratio_low=0.3), filters(whole_rows=True), filters(ratio_high=2.0)),
    ("selection", filters(), filters(diff_enabled=True)),
    ("selection", filters(diff_enabled=True), filters(diff_enabled=True, ratio_enabled=False)),
    *cases("selection", filters(**BY_DIFF), filters(**BY_DIFF, diff_low=-0.9), filters(**BY_DIFF, diff_high=0.9)),
    # The policy's loss
    ("policy", "", "rl_loss_coef=0.5"),
    *cases("policy", "", *each("pg_variant", (x for x in PG_VARIANTS if x not in ("ppo", "clip_cov", "kl_cov")))),
    ("policy", "pg_variant=vanilla", "pg_variant=ppo"),
    *cases("selection", "", *each("pg_variant", ("clip_cov", "kl_cov"))),
    *cases("selection", COV, "clip_cov_ratio=0.1", "clip_cov_lb=0.5", "clip_cov_ub=0.4"),
    ("selection", "pg_variant=kl_cov", "kl_cov_ratio=0.5"),
    ("policy", "pg_variant=kl_cov", "ppo_kl_coef=0.5"),
    *cases("policy", "", "use_topr_loss=true", "importance_sampling=seq", "importance_sampling=segment"),
    ("policy", "importance_sampling=seq", "importance_sampling=token"),
    ("policy", "", "pg_clip=0.05"),
    ("policy", "pg_clip=0.05", RANGE),
    *cases("policy", RANGE, "pg_clip_low=0.05", "pg_clip_high=0.05"),
    ("policy", "", "dual_clip_loss=true"),
    ("policy", "dual_clip_loss=true", "dual_clip_c=1.1"),
    *cases("policy", "pg_variant=topr", "topr_positive_weight=0.5", "topr_negative_weight=0.5"),
    *cases("policy", "pg_variant=tis", "tis_lower_bound=0.5", "tis_upper_bound=2.0"),
    *cases("policy", "pg_variant=cispo", "cispo_epsilon_low=0.5", "cispo_epsilon_high=0.5"),
    ("policy", "pg_variant=cispo", "cispo_use_unified_mask=true"),
    ("policy", "pg_variant=kimi15", "kimi15_tau=0.5"),
    *cases("policy", "pg_variant=sapo", "sapo_tau_pos=2.0", "sapo_tau_neg=2.0"),
    ("policy", "", "entropy_loss_coef=0.1"),
    ("policy", "entropy_loss_coef=0.1", "entropy_loss_coef_end=0.0"),
    ("policy", "", "sft_loss_coef=0.1"),
    *cases("policy", "", *each("loss_agg_mode", (x for x in get_args(LossAggMode) if x != "seq-mean-token-mean"))),
    ("policy", "loss_agg_mode=token-mean", "loss_agg_mode=seq-mean-token-mean"),
    ("policy", "loss_agg_mode=seq-mean-token-sum-norm", "loss_agg_norm=7"),
    ("policy", "", "pg_loss_cap=0.01"),
    # The critic's loss
    *cases("value", "adv_estimator=gae", "value_clip=0.5", "value_loss_coef=0.5"),
]


class Recorder:
    """Stands for a trained role: tells whether it was given a batch."""

    trained = False
    reads: frozenset[str] = frozenset()

    def submit_train(self, batch: Batch, steps: list[Tensor]) -> list[None]:
        self.trained = True
        return [None]

    def call(self, method: str, *args: Any) -> None:
        assert method == "set_loss"

    def gather_train(self, refs: list[None]) -> list[dict[str, float]]:
        return [{}]


class Pipeline(RLPipeline):
    rollouts = rollout = evaluate = None  # which no step of these tests calls

    def __init__(self, config: AgenticConfig, roles: Any) -> None:
        self.config, self.roles, self.bad_steps = config, roles, 0
        self.parts = config.parts
        self.shaping = Shaping(config.parts)


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, list[Tensor]]]:
    """What one step gives under some overrides, by stages."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "keys.yaml").write_text(BASE)

    @functools.cache
    def run(overrides: str) -> dict[str, list[Tensor]]:
        # A list of filters has spaces inside.
        texts = [overrides] if overrides.startswith(FILTERS) else overrides.split()
        return outcome(load_config(AgenticConfig, "keys", folder, texts))

    return run


def sample_batch() -> tuple[Batch, TokenScores]:
    batch, scores = make_batch(4, history=False, max_episodes=40)
    generator = torch.Generator().manual_seed(1)
    truncated_B = torch.rand(batch.num_sequences, generator=generator) < 0.3
    kl_T = torch.rand(batch.num_tokens, generator=generator) * batch.loss_mask_T
    parts_BK = torch.randn(int(batch.traj_B.max()) + 1, 2, generator=generator)[batch.traj_B]
    columns = {"truncated_B": truncated_B, "parts_BK": parts_BK, "kl_T": kl_T}
    return batch.replace(**columns, marked_T=None, advantages_T=None), scores


def run_properties(config: AgenticConfig, batch: Batch) -> list[float]:
    """What the loop and the engines are told."""
    nowhere = SimpleNamespace(name="", placement=SimpleNamespace(plan=SimpleNamespace(nodes=[], workers=lambda _: [])))
    clusters: Any = {"actor_train": nowhere, "actor_infer": nowhere}
    roles = Roles(config, clusters, policy_needs(config))
    contexts = [roles._context(role, "") for role in ("actor_train", "reference")]
    recorders = SimpleNamespace(actor=Recorder(), critic=Recorder())
    shaped = batch.replace(advantages_T=torch.zeros(batch.num_tokens))
    pipeline = Pipeline(config, recorders)
    pipeline.train(shaped, [torch.arange(batch.num_sequences)], step=2)
    return [
        config.total_optimizer_steps,
        config.wants_old_logprobs,
        config.bypasses_old_logprobs,
        config.leaves_rollouts_unscored,
        pipeline.shaping.kl_loss.coef != config.kl_loss_coef,
        config.estimator.greedy_baseline,
        recorders.actor.trained,
        sampling_params(
            config.sampling(config.train_env_manager), config.train_infer_correction.replay_kept_sets
        ).max_kept,
        *(x for c in contexts for x in (c.max_grad_norm, c.l2)),
        *(quantity in c.needs for c in contexts for quantity in (hidden_states, KlToReference(), prob_square_sum)),
    ]


def outcome(config: AgenticConfig) -> dict[str, list[Tensor]]:
    """One step, by stages."""
    batch, scores = sample_batch()
    stages = {"run": [torch.tensor(run_properties(config, batch))]}
    batch, _ = drop_masked_episodes(batch, config)
    stages["episodes"] = [batch.loss_mask_T]
    batch, _ = shape_rewards(batch, config.reward, RunningStats())
    controller = KlController.of(config.kl.reward)
    if config.add_token_level_kl:
        batch, metrics = apply_kl_penalty(batch, config.kl_penalty, controller.coef)
        controller.update(metrics["reward/kl"], batch.num_sequences)
    if config.whiten_rewards:
        batch = whiten_token_rewards(batch)
    stages["rewards"], stages["kl_coef"] = [batch.rewards_T], [torch.tensor(controller.coef)]
    if config.adv_estimator == "maxrl":  # takes no rewards below 0
        batch = batch.replace(rewards_T=batch.rewards_T.abs())
    batch = compute_advantages(batch, config)
    stages["advantages"] = [batch.advantages_T, batch.returns_T]
    policy, _ = select_for_policy(batch, config.parts, seed=0)
    stages["selection"] = [policy.tokens_T, policy.loss_mask_T, *optional(policy.weights_T), *optional(policy.marked_T)]
    at_T = torch.argsort(batch.tokens_T)[policy.tokens_T]
    policy_scores = TokenScores(*(column_T[at_T] for column_T in columns_of(scores)))
    stages["policy"] = loss_of(build_policy_loss(config, config.total_optimizer_steps), policy_scores, policy)
    value_batch = batch.replace(loss_mask_T=value_mask(batch, config))
    stages["value"] = loss_of(build_value_loss(config), scores, value_batch)
    return stages


def optional(column: Tensor | None) -> list[Tensor]:
    return [] if column is None else [column]


def loss_of(loss_fn: Any, scores: TokenScores, batch: Batch) -> list[Tensor]:
    counts = torch.zeros(batch.num_sequences).index_add(0, batch.rows_T, batch.loss_mask_T.float())
    assert counts.max() > 0
    context = LossContext(float(counts.sum()), float((counts > 0).sum()), float(counts.max()), optimizer_step=1)
    out, slopes = gradient(loss_fn, scores, batch, context)
    return [out.loss.detach(), slopes]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-12)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(("stage", "given", "change"), one_in(2, CASES))
def test_each_key_changes_what_it_should(step, stage, given, change):
    before, after = step(given), step(merged(given, change))
    changed = [name for name in STAGES if not equal(before[name], after[name])]
    assert changed[:1] == [stage]


def merged(given: str, change: str) -> str:
    """Both, where a list of filters replaces the one before."""
    return change if change.startswith(FILTERS) else f"{given} {change}".strip()


@pytest.mark.parametrize(
    ("stage", "given", "change"),
    [
        ("rewards", KL, "kl_penalty=full"),
        ("rewards", "", KL),
        ("policy", KL_LOSS, "kl_penalty=full"),
        ("advantages", "adv_estimator=grpo", "adv_estimator=remax"),
        ("selection", "", WEIGHT),
        ("policy", WEIGHT, "train_infer_correction.is_weight.detach=false"),
        ("selection", "", filters()),
    ],
)
def test_keys_that_the_run_reads_change_the_numbers_too(step, stage, given, change):
    before, after = step(given), step(merged(given, change))
    assert not equal(before[stage], after[stage])


def leaves(section: type[Config], prefix: str = "") -> set[str]:
    found = set()
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Config):
            found |= leaves(inner, f"{prefix}{name}.")
        else:
            found.add(prefix + name)
    return found


def test_the_cases_name_every_key_and_every_name():
    texts = [text for _, given, change in CASES for text in (*given.split(), change)]
    keys = {text.partition("=")[0] for _, _, change in CASES for text in change.split()}
    assert leaves(AlgorithmConfig) - keys == set()
    inside = " ".join(text for text in texts if text.startswith(FILTERS))
    assert all(f"{key}: " in inside for key in TrainInferFilterConfig.model_fields)
    choices = {
        "adv_estimator": ADV_ESTIMATORS,
        "pg_variant": PG_VARIANTS,
        "kl_penalty": get_args(KlPenalty),
        "loss_agg_mode": get_args(LossAggMode),
        "pf_ppo.reweight_method": get_args(PfPpoConfig.model_fields["reweight_method"].annotation),
        "reward_normalization.method": get_args(RewardNormalizationConfig.model_fields["method"].annotation),
        "reward_normalization.grouping": get_args(RewardNormalizationConfig.model_fields["grouping"].annotation),
        "train_infer_correction.is_weight.weight_type": get_args(AggregationLevel),
    }
    changes = {text for _, _, change in CASES for text in change.split()}
    assert {f"{key}={name}" for key, names in choices.items() for name in names} - changes == set()
