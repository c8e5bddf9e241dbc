"""Metrics that a run printed, counted again from the rows that it wrote.

Means over episodes and turns are counted from the episodes' JSON lines, without the code that printed them. Rewards and
advantages after shaping, and losses, are computed from the saved rollouts and what models said of their tokens, by the
algorithm itself.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from roll.algorithms.advantages import value_mask
from roll.algorithms.correction import mismatch_by_lag
from roll.algorithms.losses import build_policy_loss, build_value_loss
from roll.algorithms.selection import select_for_policy
from roll.algorithms.shaping import Shaping, shape_rewards, with_old_policy
from roll.algorithms.types import LossContext, TokenScores
from roll.configs.rl import RLConfig
from roll.configs.worker import WorkerConfig
from roll.data.batch import Batch
from roll.distributed.strategy.training.optim import learning_rate
from roll.rewards.scorer import best_reward
from roll.rollout.metrics import REPETITIONS, kept_metrics, overlap_metrics
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import OVER_BUDGET, VALID_UNKNOWN, Collected, Turn, kept_steps, step_folder
from roll.tracking.run import TRAINED, read_json_lines
from roll.utils.hashing import derive_seed

Records = Sequence[Mapping[str, Any]]

_CLOSE = 1e-6
"""Relative error that sums in another order may have."""
_TRAINED = {"fp32": 1e-3}
"""The same of losses, of which the training pass computes the log-probs anew, by number format."""
_ROUNDED = 0.05
"""In other number formats."""
SCORES: tuple[str, ...] = ("old_logprobs_T", "on_policy_B", "ref_logprobs_T", "teacher_logprobs_T", "teacher_chunk_T")
SCORES += ("kl_T", "prob_square_sum_T", "values_T")
"""Columns that models compute of a step's tokens before the update."""
SCORES_FILE = "scores.safetensors"
"""File of those, beside the groups of a step."""
_WHY = {
    "rollout_dump_dir": "need every step's rollouts: set rollout_dump_dir",
    "num_written_episodes": "need all episodes of an evaluation: set num_written_episodes: null",
    "trainer": "follow from what a model computes while it trains: entropies, gradients, later optimizer steps, ranks",
    "measured": "are measured: time, memory, and attempts that failed and left no rows",
    "other": "are not counted again",
}
_MEASURED = ("time/", "tokens_per_s", "tflops", "mfu", "memory/", "async/idle", "async/buffer", "async/running")
_FAILED = ("dropped", "env_errors", "errors", "retries")
_TRAINER = ("actor/", "critic/", "mismatch/", "async/log_ratio", "async/truncated", "async/rejected", "global_seqlen/")


@dataclass(frozen=True)
class Wrong:
    """A figure that does not follow from the rows."""

    step: int
    metric: str
    printed: float | None
    counted: float

    def __str__(self) -> str:
        return f"step {self.step}: {self.metric} is {self.printed!r}, the rows give {self.counted!r}"


@dataclass
class Verification:
    """What was counted again.

    Attributes:
        checked: figures by metric.
        wrong: those that differ.
        unchecked: metrics by why they could not be counted, see ``_WHY``.
        gone: steps whose rollouts are no longer kept.
    """

    checked: dict[str, int] = field(default_factory=dict)
    wrong: list[Wrong] = field(default_factory=list)
    unchecked: dict[str, list[str]] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)

    def compare(
        self, step: int, printed: Mapping[str, Any], counted: Mapping[str, float], close: float | None = None
    ) -> None:
        """Compares the figures of a step that it has printed; ``close``: error that they may have."""
        relative, absolute = (_CLOSE, _CLOSE * 1e-2) if close is None else (close, close / 10)
        for name in counted.keys() & printed.keys():
            self.checked[name] = self.checked.get(name, 0) + 1
            value, near_0 = printed[name], 0.0 if name.endswith("/lr") else absolute
            if value is None or not math.isclose(value, counted[name], rel_tol=relative, abs_tol=near_0):
                self.wrong.append(Wrong(step, name, value, counted[name]))

    def text(self) -> str:
        """For the terminal."""
        lines = [f"{sum(self.checked.values()):,} figures of {len(self.checked)} metrics were counted again"]
        lines[0] += f"; {len(self.wrong)} differ:" if self.wrong else ": all follow from the rows on disk"
        if self.gone:
            lines.append(
                f"the rollouts of step {self.gone[0]} to {self.gone[-1]} are not kept: rollout_dump_gb bounds "
                "rollout_dump_dir, and the oldest are deleted first"
            )
        lines += [f"  {each}" for each in sorted(self.wrong, key=lambda each: (each.step, each.metric))]
        for why, names in self.unchecked.items():
            lines += ["", f"{len(names)} metrics {_WHY[why]}:", f"  {', '.join(names)}"]
        return "\n".join(lines) + "\n"


def verify(run_dir: Path, config: RLConfig, rollouts: Path | None = None) -> Verification:
    """Counts again what a run's rows allow.

    Args:
        config: of the run.
        rollouts: its ``rollout_dump_dir``, where that has moved.
    """
    found = Verification()
    dumped = rollouts or (Path(config.rollout_dump_dir).expanduser() if config.rollout_dump_dir else None)
    oldest = next(iter(kept_steps(dumped)), 0) if dumped is not None else 0
    shaping: Shaping | None = Shaping(config.parts)
    steps = _OptimizerSteps(config)
    num_prompts = _num_prompts(run_dir, config)
    metrics = read_json_lines(run_dir / "metrics.jsonl")
    for printed in metrics:
        step = printed["step"]
        folder = step_folder(dumped, step) if dumped is not None else None
        if folder is not None and (folder / "episodes.jsonl").is_file():
            rows: Records = read_json_lines(folder / "episodes.jsonl")
            collected = Collected.load(folder)
            finished = [*collected.groups, *collected.rejected]
            if num_prompts and finished:
                draws = 1 + max(group.group_id for group in finished)
                found.compare(step, printed, {"rollout/epoch": draws // num_prompts})
            if collected.groups:
                kept = _Kept(folder, collected)
                exact, trained = _of_rollouts(config, kept, shaping, steps, printed)
                found.compare(step, printed, exact)
                dtype = config.actor_train.model_args.dtype or ""
                found.compare(step, printed, trained, _TRAINED.get(dtype, _ROUNDED))
        else:
            if 0 < step < oldest:
                found.gone.append(step)
            rows = _rows(run_dir, f"{TRAINED}{step:05d}")
            if len(_grouped(rows)) >= config.num_written_groups and len(rows) != printed.get("rollout/episodes"):
                rows = []  # some of them
            if step > 0:
                shaping, steps.missed = None, True  # running statistics have missed a step
        if rows:
            of_tags = _of_tags(rows, "rollout") | _attained(rows, config, "rollout")
            found.compare(step, printed, counted(rows, "rollout") | of_tags | _kept(rows) | _of_domains(rows, config))
        held_out, most = _rows(run_dir, f"eval-{step:05d}"), config.num_written_episodes
        if held_out and (most is None or len(held_out) < most or len(held_out) == printed.get("eval/episodes")):
            of_tags = _of_tags(held_out, "eval") | _attained(held_out, config, "eval")
            found.compare(step, printed, counted(held_out, "eval") | of_tags)
    names = dict.fromkeys(name for printed in metrics for name in printed if name != "step")
    for name in names:
        if name not in found.checked:
            whole_area = any(each.startswith(name.partition("/")[0]) for each in found.checked)
            found.unchecked.setdefault(_why(name, whole_area), []).append(name)
    return found


def _why(name: str, counts_others: bool) -> str:
    """Why a metric cannot be counted; ``counts_others``: of the same area."""
    if name.startswith(_MEASURED) or name.rpartition("/")[2] in _FAILED:
        return "measured"
    if name.startswith("eval/") and not counts_others:
        return "num_written_episodes"
    if name.startswith(("rollout/", "kept/", "reward/", "async/l", "actor/advantage")) and not counts_others:
        return "rollout_dump_dir"
    return "trainer" if name.startswith(_TRAINER) else "other"


def _num_prompts(run_dir: Path, config: RLConfig) -> int:
    """Prompts that the run passes over; 0 where that is not known, or where each domain has passes of its own."""
    path, data = run_dir / "summary.json", config.actor_train.data_args
    if data.domain_interleave_probs is not None or not path.is_file():
        return 0
    recorded = json.loads(path.read_text(encoding="utf-8")).get("data", {})
    return int(recorded.get("actor_train.data_args", {}).get("samples", 0))


def _rows(run_dir: Path, name: str) -> Records:
    return read_json_lines(run_dir / "trajectories" / f"{name}.jsonl")


def counted(rows: Records, prefix: str) -> dict[str, float]:
    """Means over episodes and turns, and shares of groups, named as the run names them."""
    turns = [turn for row in rows for turn in row["turns"]]
    judged = [turn for row in rows if not row["info"].get(VALID_UNKNOWN) for turn in row["turns"]]
    parts = {name: [sum(turn[name] for turn in row["turns"]) for row in rows] for name in ("task_reward", "penalty")}
    scores = [task + penalty for task, penalty in zip(*parts.values(), strict=True)]
    values: dict[str, Sequence[float]] = {
        "success": [row["success"] for row in rows],
        "reward": scores,
        "turns": [len(row["turns"]) for row in rows],
        "context_full": [row["end"] == "context_full" for row in rows],
        **parts,
        "valid_rate": [turn["action"] is not None for turn in judged],
        "response_tokens": [turn["completion_tokens"] for turn in turns],
        "prompt_tokens": [turn["prompt_tokens"] for turn in turns],
        "cut_off": [turn["finish_reason"] == "length" for turn in turns],
    }
    groups = [group for group in _grouped(rows).values() if len(group) > 1]
    equal = [group for group in groups if len({row["score"] for row in group}) == 1]
    if groups:
        values["no_spread"] = [len(equal) / len(groups)]
        values["all_right"] = [sum(all(row["success"] for row in group) for group in equal) / len(groups)]
        values["all_wrong"] = [sum(not any(row["success"] for row in group) for group in equal) / len(groups)]
    return {f"{prefix}/{name}": statistics.fmean(each) for name, each in values.items() if each} | {
        f"{prefix}/episodes": float(len(rows)),
        f"{prefix}/tokens": float(sum(turn["completion_tokens"] for turn in turns)),
    }


def _of_tags(rows: Records, prefix: str) -> dict[str, float]:
    """The same of each tag; which of these a run prints depends on the number of its tags."""
    tags = dict.fromkeys(row["tag"] for row in rows)
    each = [counted([row for row in rows if row["tag"] == tag], f"{prefix}/{tag}") for tag in tags]
    return {name: value for of_tag in each for name, value in of_tag.items()}


def _grouped(rows: Records) -> dict[tuple[str, int], list[Mapping[str, Any]]]:
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["tag"], row["group_id"]), []).append(row)
    return groups


def _kept(rows: Records) -> dict[str, float]:
    """Of what was trained on, where groups are filtered."""
    kept = [row for row in rows if row["trained"]]
    if not kept:
        return {}
    return counted(kept, "kept") | {"kept/groups": float(len(_grouped(kept)))}


def _of_domains(rows: Records, config: RLConfig) -> dict[str, float]:
    """``reward/<domain>/…``: scores, accuracies, and the verifiers' own numbers."""
    domains: dict[str, str] = getattr(config, "domains", {})
    found: dict[str, list[float]] = {}
    sums = dict.fromkeys(["reward/over_budget", *(f"reward/{domain}/over_budget" for domain in domains.values())], 0.0)
    for row in rows:
        if (domain := domains.get(row["tag"])) is None:
            continue
        for name in ("reward/over_budget", f"reward/{domain}/over_budget"):
            sums[name] += OVER_BUDGET in row["info"]
        own = {name: value for name, value in row["info"].items() if "/" in name and isinstance(value, int | float)}
        for name, value in {"score": row["score"], "accuracy": row["success"], **own}.items():
            found.setdefault(f"reward/{domain}/{name}", []).append(float(value))
    return {name: statistics.fmean(values) for name, values in found.items()} | sums


def _attained(rows: Records, config: RLConfig, prefix: str) -> dict[str, float]:
    """The mean score as a share of the best possible one; where that is not known a success counts as 1."""
    domains: dict[str, str] = getattr(config, "domains", {}) if getattr(config, "user", None) is None else {}
    best = {tag: best_reward(cast(Any, config).rewards[domain]) for tag, domain in domains.items()}
    shares = [row["score"] / most if (most := best.get(row["tag"])) else float(row["success"]) for row in rows]
    return {f"{prefix}/attained": statistics.fmean(shares)}


def _repetition(turns: Sequence[Turn]) -> float:
    """Mean share of the runs of 8 tokens that were in the same response before, of evenly chosen turns."""
    shares = []
    for turn in turns[:: -(-len(turns) // REPETITIONS)]:
        ids = turn.completion.token_ids.tolist()
        runs = [tuple(ids[at : at + 8]) for at in range(len(ids) - 7)]
        shares.append(1 - len({*runs}) / len(runs) if len(runs) > 1 else 0.0)
    return statistics.fmean(shares)


@dataclass(frozen=True)
class _Kept:
    """What a step has kept."""

    folder: Path
    groups: Collected

    def batch(self, config: RLConfig) -> Batch:
        """The step's batch, with the columns that models have computed."""
        from safetensors.torch import load_file

        batch = groups_to_batch(self.groups.groups, config.tags, config.gdpo_reward_keys)
        if (path := self.folder / SCORES_FILE).is_file():
            batch = batch.replace(**{name: column for name, column in load_file(path).items() if name in SCORES})
        return batch


def _of_rollouts(
    config: RLConfig, kept: _Kept, shaping: Shaping | None, steps: _OptimizerSteps, printed: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, float]]:
    """Ages of the tokens, shaped rewards, advantages and optimizer steps; and what follows of the losses."""
    step = printed["step"]
    collected, batch = kept.groups, kept.batch(config)
    finished = [*collected.groups, *collected.rejected]
    prompts = [tuple(group.trajectories[0].turns[0].prompt_ids) for group in finished if group.trajectories]
    turns = [turn for group in finished for trajectory in group.trajectories for turn in trajectory.turns]
    found = {
        **({"rollout/repetition": _repetition(turns)} if turns else {}),
        "rollout/duplicate_prompts": 1 - len(set(prompts)) / max(1, len(prompts)),
        "rollout/filtered": float(len(collected.rejected)),
        **kept_metrics(finished),
    }
    if config.overlaps:
        nothing_waits = cast(Any, SimpleNamespace(ready=[], running=[]))
        ages = overlap_metrics(batch, nothing_waits, step - 1)
        found |= {name: value for name, value in ages.items() if not name.startswith(_MEASURED)}
        correction = config.train_infer_correction
        if batch.old_logprobs_T is not None and not correction.bypass:
            found |= mismatch_by_lag(with_old_policy(batch), step - 1, correction)
    chosen = getattr(config, "online_dpo", None) is not None  # and trains on a part of it
    if not chosen:
        found |= _of_ranks(config, batch, printed)
    steps.missed = steps.missed or shaping is None or chosen
    if shaping is None or chosen:
        return found, {}
    try:
        shaped, metrics = shaping(batch)
    except ValueError:  # it needs columns of a model that were not kept
        steps.missed = True
        return found | shape_rewards(batch, config.reward, shaping.score_stats)[1], {}
    found |= metrics | steps.figures(shaped, _steps_per_epoch(config, kept), printed)
    if config.kl_loss_target is not None:
        coef, metrics = shaping.steer_kl_loss(shaped)
        config, found = config.model_copy(update={"kl_loss_coef": coef}), found | metrics
    return found, _of_losses(config, shaped, kept, step)


def _of_losses(config: RLConfig, batch: Batch, kept: _Kept, step: int) -> dict[str, float]:
    """The losses of a step that takes one optimizer step, whose models are then those that scored the batch.

    What nobody computed before the update, such as entropies, is put in by two guesses: a figure that is the same with
    both does not depend on it.
    """
    if _steps_per_epoch(config, kept) * config.ppo_epochs != 1:
        return {}
    found = _of_policy(config, batch, step) if step > config.critic_warmup else {}
    if batch.values_T is not None and batch.returns_T is not None:
        learnt = batch.with_loss_mask(value_mask(batch, config.parts.advantage))
        output = build_value_loss(config)(TokenScores(values_T=batch.values_T), learnt, LossContext.of(learnt))
        found |= {name: float(value) for name, value in output.metrics.items()} | {"critic/loss": float(output.loss)}
    return found


@dataclass
class _OptimizerSteps:
    """Counts the optimizer steps of a run, which its schedules of learning rates go by.

    Attributes:
        missed: some are not known.
    """

    config: RLConfig
    missed: bool = False
    _taken: dict[str, float] = field(default_factory=lambda: {"actor": 0, "critic": 0})

    def figures(self, batch: Batch, per_epoch: int, printed: Mapping[str, Any]) -> dict[str, float]:
        """Tokens and learning rates of the next step's optimizer steps; its advantages are in the batch."""
        config, step, found = self.config, printed["step"], dict[str, float]()
        if step > config.critic_warmup:
            chosen, _ = select_for_policy(batch, config.parts, derive_seed(config.seed, "selection", step))
            found |= self._of_role("actor", config.actor_train, chosen, per_epoch, printed)
        if config.critic is not None:
            learnt = batch.with_loss_mask(value_mask(batch, config.parts.advantage))
            found |= self._of_role("critic", config.critic, learnt, per_epoch, printed)
        return found

    def _of_role(
        self, area: str, worker: WorkerConfig, batch: Batch, per_epoch: int, printed: Mapping[str, Any]
    ) -> dict[str, float]:
        epochs = self.config.ppo_epochs
        if per_epoch > 1 and not bool((batch.loss_tokens_B > 0).all()):  # an optimizer step may have had no tokens
            self.missed = True
            return {}
        num_steps = epochs * min(per_epoch, batch.num_sequences) if bool(batch.loss_mask_T.any()) else 0
        first, skipped = int(self._taken[area]), printed.get(f"{area}/skipped_steps", 0)
        self._taken[area] += num_steps - skipped
        if not num_steps:
            return {}
        found = {f"{area}/num_tokens": batch.num_tokens * epochs / num_steps}
        args, total = worker.training_args, self.config.total_optimizer_steps
        if args.lr_scheduler_type == "constant" or not (self.missed or skipped):
            rates = [learning_rate(args, first + number, total) for number in range(num_steps)]
            found[f"{area}/lr"] = statistics.fmean(rates)
        return found


def _of_ranks(config: RLConfig, batch: Batch, printed: Mapping[str, Any]) -> dict[str, float]:
    """Tokens of the data-parallel ranks, whose number is that of the printed mean."""
    if not (mean := printed.get("global_seqlen/mean")):
        return {}
    found = batch.balance(max(1, round(batch.num_tokens / mean)))
    if config.balance_ranks_by == "tokens":
        return found
    return {name: value for name, value in found.items() if "balanced" not in name}  # those know the model's size


def _steps_per_epoch(config: RLConfig, kept: _Kept) -> int:
    return max(1, config.optimizer_steps_per_epoch * len(kept.groups.groups) // config.groups_per_step)


def _of_policy(config: RLConfig, batch: Batch, step: int) -> dict[str, float]:
    batch, found = select_for_policy(batch, config.parts, derive_seed(config.seed, "selection", step))
    dropout = config.actor_train.model_args.lora_dropout
    if not bool(batch.loss_mask_T.any()) or config.bypasses_old_logprobs or dropout:
        return found
    known_T = torch.zeros_like(batch.loss_mask_T)
    if batch.old_logprobs_T is not None:
        known_T = ~known_T if batch.on_policy_B is None else ~batch.on_policy_B[batch.rows_T]
    outcomes = []
    for guess in (0.4, 0.9):
        guess_T = torch.full((batch.num_tokens,), guess)
        logprobs_T = -guess_T if batch.old_logprobs_T is None else torch.where(known_T, batch.old_logprobs_T, -guess_T)
        kl_T = guess_T if batch.kl_T is None else torch.where(known_T, batch.kl_T, guess_T)
        scores = TokenScores(logprobs_T, guess_T, kl_T=kl_T, divergence_T=guess_T)
        output = build_policy_loss(config, config.total_optimizer_steps)(scores, batch, LossContext.of(batch))
        outcomes.append({name: float(value) for name, value in output.metrics.items()})
    first, second = outcomes
    sure = {name: value for name, value in first.items() if math.isclose(value, second[name], abs_tol=_CLOSE)}
    if config.l2:
        sure.pop("actor/loss", None)
    return found | sure
