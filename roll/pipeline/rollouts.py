"""Rollout groups of steps and evaluations: collected, checked, and some written for people to read."""

from __future__ import annotations

import itertools
import logging
import shutil
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from roll.algorithms.correction import Compared, mismatch_of_rows
from roll.configs.pipeline import TINIES
from roll.configs.rewards import RewardFilterConfig
from roll.configs.rl import RLConfig
from roll.data.batch import Batch
from roll.data.identity import vocabulary_ids
from roll.data.requests import FinishReason
from roll.distributed.strategy.base import Metrics
from roll.models.tokenizer import policy_tokenizer
from roll.pipeline.session import RunFailedError, RunSession
from roll.report.diagnosis import diagnose
from roll.report.record import RunRecord
from roll.report.verification import SCORES, SCORES_FILE
from roll.rollout.admission import Admission
from roll.rollout.metrics import mean, rollout_metrics, sampled_tokens, spread_metrics
from roll.rollout.scheduler import RolloutScheduler
from roll.rollout.types import Collected, RolloutGroup, Trajectory, figures_of, hold_episodes, kept_steps, step_folder
from roll.tracking.display import NOTED
from roll.tracking.run import TOKENS, TRAINED, RunFolder, to_json, write_atomic
from roll.tracking.trackers import AnswerRow
from roll.utils.registry import import_path


def write_trajectories(folder: RunFolder, name: str, trajectories: Iterable[Trajectory]) -> Path:
    """Writes episodes in full to ``trajectories/<name>.jsonl``, one line each."""
    path = folder.trajectories / f"{name}.jsonl"
    write_atomic(path, "".join(to_json(trajectory_record(item)) + "\n" for item in trajectories))
    return path


def trajectory_record(trajectory: Trajectory) -> dict[str, Any]:
    """An episode as JSON values: text, actions and rewards per turn; token ids are counted, not listed."""
    turns = [
        {
            "observation": turn.observation,
            "text": turn.text,
            "action": turn.action,
            "task_reward": turn.task_reward,
            "penalty": turn.penalty,
            "prompt_tokens": turn.num_prompt_tokens,
            "completion_tokens": turn.completion.num_tokens,
            "finish_reason": turn.completion.finish_reason,
            "weight_version": turn.completion.weight_version,
        }
        for turn in trajectory.turns
    ]
    names = ("tag", "group_id", "member", "seed", "success", "score", "end", "final_observation", "info")
    return {name: getattr(trajectory, name) for name in names} | {"turns": turns}


def answer_row(trajectory: Trajectory) -> AnswerRow:
    """An episode as a row of a tracker's table."""
    turns = trajectory.turns
    said = [text for turn in turns for text in (turn.observation, turn.text)]
    return AnswerRow(
        tag=trajectory.tag,
        prompt=said[0] if said else "",
        answer="\n".join(said[1:]),
        score=float(trajectory.score),
        success=bool(trajectory.success),
    )


logger = logging.getLogger(__name__)

MAX_SHOWN = 64
"""Answers of an evaluation that a page shows."""
_MOST_CUT, _MOST_WRONG, _MOST_EQUAL = 0.25, 0.5, 0.9
"""Shares from which on it is remarked: of answers that are cut, of groups all wrong, of groups without spread."""
_DOUBT = 10
"""Steps between two evaluations of whether all is learned, where none are asked for by ``eval_steps``."""
_ENOUGH_STEPS = 10
"""Before so many steps a run need not have learned anything."""
_MOST_TOKENS = 512
"""Of a row that is written token by token."""
MAX_TRAINED_BYTES = 64_000_000
"""Size of all files of ``write_samples`` at most."""


class GroupRules:
    """A pipeline's rules for its rollout groups."""

    config: RLConfig
    filter_hint: ClassVar[str] = "loosen the filter of groups, or change the data"
    """Advice where dynamic sampling turns down too many groups."""

    def wants(self, group: RolloutGroup) -> bool:
        """Tells whether dynamic sampling keeps a group: each, here."""
        return True

    def check_groups(self, groups: Sequence[RolloutGroup]) -> None:
        """Raises where too much went wrong in the groups that a step or an evaluation has finished."""

    def best_reward(self, tag: str) -> float | None:
        """The best reward of an episode; ``None`` where that is not known."""
        return None

    def most_tokens(self, tag: str) -> int:
        """The most tokens of one answer in training."""
        return self.config.response_length

    def more_metrics(self, collected: Collected) -> Metrics:
        """Metrics of a step's rollouts in addition to those of every pipeline."""
        return {}

    def attained(self, groups: Sequence[RolloutGroup]) -> float:
        """Mean reward as a share of the best possible; where that is not known a success counts as 1."""
        best = {group.tag: self.best_reward(group.tag) for group in groups}
        return mean(
            episode.score / highest if (highest := best[group.tag]) else episode.success
            for group in groups
            for episode in group.trajectories
        )

    def all_wrong(self, groups: Sequence[RolloutGroup]) -> bool:
        """Tells whether there are episodes and none is a success, nor are their rewards near the best possible."""
        episodes = [episode for group in groups for episode in group.trajectories]
        enough = self.config.learned_share or 1.0
        return bool(episodes) and not any(each.success for each in episodes) and self.attained(groups) < enough


class StepRollouts:
    """The rollouts of training steps: collected, written, checked, and whether anything is left to learn.

    Args:
        rules: of the pipeline.
    """

    def __init__(self, config: RLConfig, session: RunSession, rules: GroupRules) -> None:
        self._config = config
        self._session = session
        self._rules = rules
        self._remarks = Remarks()
        self.admission = Admission(
            config.groups_per_step,
            config.groups_ahead,
            config.window,
            last_step=config.max_steps if config.overlaps else None,
        )
        """Choice of the groups that the next steps take."""
        self.sampled_tokens = 0
        """Those of the step's rollouts."""
        self._drops = False
        """Kept rollouts are being deleted, and the user has been told."""
        self._doubted = 0
        """The last step whose evaluation did not agree that all is learned."""
        self._seems = ""
        """Words of why the last step looked as if all was learned."""

    def take(self, step: int, scheduler: RolloutScheduler) -> Collected:
        """Takes the step's groups, see ``take``, and writes what is asked of them.

        Raises:
            RunFailedError: dynamic sampling found too few groups worth training on, or see ``check_groups``.
        """
        config, session, rules = self._config, self._session, self._rules
        session.summary.setdefault("first_rollout_s", session.elapsed())
        max_batches = config.max_filtered_batches if config.filters_groups else None
        if (source := config.rollout_replay_dir) is not None:
            collected = scheduler.take_found(self.admission, step, read_rollouts(source, step), max_batches)
        else:
            options = {"accept": rules.wants, "max_batches": max_batches, "goes_on": rules.all_wrong}
            collected = take(session, scheduler, self.admission, step, "train on", rules.check_groups, **options)
        if not collected.groups and rules.all_wrong(collected.rejected):
            raise RunFailedError(
                f"dynamic sampling: none of {len(collected.rejected)} groups is worth training on "
                f"(max_filtered_batches={config.max_filtered_batches}): "
                f"{describe_failure(collected.rejected, rules.most_tokens)}; {rules.filter_hint}"
            )
        if config.rollout_dump_dir is not None:
            write_rollouts(config.rollout_dump_dir, step, collected)
        if (count := config.num_written_groups) > 0:
            session.aside(partial(write_samples, session.folder, step, collected, count))
        return collected

    def look_at(self, step: int, collected: Collected) -> bool:
        """Reports what is wrong with the rollouts of a step, and tells whether little is left to learn."""
        config, rules, finished = self._config, self._rules, [*collected.groups, *collected.rejected]
        self.sampled_tokens = sampled_tokens(finished)
        short = len(collected.groups) < config.groups_per_step
        compares = not config.filters_groups and config.estimator.compares
        remarks = remarks_on(
            step, collected, config.groups_per_step, rules.most_tokens, compares=compares, num_ids=self._num_ids
        )
        for kind, text in remarks:
            self._remarks.make(kind, text)
        looks_learned = (
            short
            and config.learned_share is not None
            and rules.attained(finished) >= config.learned_share
            and (not self._doubted or step - self._doubted >= (config.eval_steps or _DOUBT))
        )
        if looks_learned:
            self._seems = f"{rules.attained(finished):.1%} attained in all that step {step} sampled"
        return looks_learned

    def write_scores(self, step: int, batch: Batch) -> None:
        """Writes what models said of a step's tokens, where its rollouts are kept."""
        if (folder := self._config.rollout_dump_dir) is not None:
            self._session.aside(partial(write_scores, folder, step, batch))
            self._session.aside(partial(self._bound_rollouts, Path(folder).expanduser(), step))

    def _bound_rollouts(self, folder: Path, step: int) -> None:
        gone = drop_oldest(folder, step, int(self._config.rollout_dump_gb * 1e9))
        if gone and not self._drops:
            self._drops = True
            logger.warning(
                "rollout_dump_dir: %s has reached rollout_dump_gb=%g, so from step %d on the oldest steps are deleted "
                "(now up to step %d): roll verify and roll replay cannot count or take those again",
                *(folder, self._config.rollout_dump_gb, step, gone[-1]),
            )

    def write_tokens(self, step: int, batch: Batch) -> None:
        """Writes some rows of a step's training batch token by token, beside the groups of ``write_samples``."""
        config, session = self._config, self._session
        if config.num_written_groups == 0 or batch.advantages_T is None:
            return

        def write() -> None:
            decode: Any = self._tokenizer.decode
            lines = "".join(to_json(row) + "\n" for row in token_rows(batch, config.tags, decode))
            write_atomic(session.folder.trajectories / f"{TOKENS}{step:05d}.jsonl", lines)

        session.aside(write)

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        config = self._config
        trusts = config.trusts("actor_train")
        return policy_tokenizer(config.pretrain, config.tokenizer_path, trust_remote_code=trusts)

    @cached_property
    def _num_ids(self) -> int | None:
        """See ``remarks_on``; ``None`` for the tiny model, whose embedding has no other rows."""
        return None if self._config.pretrain in TINIES else max(self._tokenizer.get_vocab().values()) + 1

    def confirm(self, step: int, found: float | None) -> str | None:
        """Why the run is over, where held-out episodes attain the share ``learned_share`` too.

        Args:
            found: the share that they attain; ``None``: nothing was evaluated.
        """
        enough = self._config.learned_share
        if found is not None and enough is not None and found >= enough:
            return f"learned: {self._seems}, {found:.1%} held out (learned_share={enough:g})"
        self._doubted = step
        if found is not None:
            self._session.display.note(f"{self._seems}, but {found:.1%} held out: the run continues")
        return None

    def explain(self, step: int, *, last: bool) -> None:
        """Says why the reward does not rise, where it does not; at the end of the run in its summary too."""
        found = diagnose(RunRecord.read(self._session.folder.path))
        if last:
            self._session.summary["diagnosis"] = found.plain()
        if found.remark is not None and (last or step >= _ENOUGH_STEPS):
            self._remarks.make("diagnosis", f"{found.remark} (all causes: roll diagnose {self._session.folder.path})")

    def state_dict(self) -> dict[str, Any]:
        rollouts = self.admission.state_dict(keeps_groups=self._config.overlaps)
        return {"rollouts": rollouts, "doubted": self._doubted, "seems": self._seems}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.admission.load_state_dict(state["rollouts"], keeps_groups=self._config.overlaps)
        self._doubted, self._seems = state.get("doubted", 0), state.get("seems", "")


def collect(
    session: RunSession,
    scheduler: RolloutScheduler,
    num_groups: int,
    version: int,
    check: Callable[[Sequence[RolloutGroup]], None] = lambda groups: None,
) -> list[RolloutGroup]:
    """The first groups of an evaluation's scheduler, see ``take``.

    Raises:
        RuntimeError: some token was sampled with another version.
    """
    groups = take(session, scheduler, Admission(num_groups), 1, "evaluate", check).groups
    turns = (turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns)
    versions = {int(version) for turn in turns for version in turn.completion.versions}
    if versions - {version}:
        raise RuntimeError(
            f"an evaluation was sampled with weights of the versions {sorted(versions)}, expected {version} alone"
        )
    return groups


def play_held_out(
    session: RunSession,
    name: str,
    step: int,
    num_groups: int,
    sampled: RolloutScheduler,
    greedy: RolloutScheduler | None,
    check: Callable[[Sequence[RolloutGroup]], None],
) -> tuple[list[RolloutGroup], Metrics]:
    """Plays held-out episodes: the same ones each time, sampled; and greedily before and after.

    Args:
        greedy: ``None``: those that are sampled are greedy.

    Returns:
        The sampled groups and their metrics, ``eval/…``; of the greedy ones ``eval_greedy/success`` and the rewards.
    """
    with session.phase("eval"):
        groups = played = collect(session, sampled, num_groups, step, check)
    metrics = rollout_metrics(groups, "eval")
    if name != "step":
        if greedy is not None:
            with session.phase("eval greedy"):
                played = collect(session, greedy, num_groups, step, check)
        found = rollout_metrics(played, "eval_greedy")
        metrics |= {key: value for key, value in found.items() if key.endswith(("success", "reward"))}
    return groups, metrics


def take(
    session: RunSession,
    scheduler: RolloutScheduler,
    admission: Admission,
    step: int,
    what: str,
    check: Callable[[Sequence[RolloutGroup]], None] = lambda groups: None,
    **options: Any,
) -> Collected:
    """Takes a step's groups, shows how many have come in, and tells of failed episodes and late tools.

    Args:
        what: what they are for, to complete "no episode to …".
        check: called with all finished groups, the rejected ones included; may raise.
        **options: further arguments of ``RolloutScheduler.take``, as ``admission`` and ``step`` are.

    Raises:
        ValueError: nothing is left of the whole batch.
    """
    num_groups, progress = admission.batch_size, session.display.progress
    arrived = itertools.count(len(admission.ready) + 1)
    collected = scheduler.take(
        admission, step, lambda _: progress(min(next(arrived), num_groups), num_groups, "groups"), **options
    )
    groups = collected.groups
    finished = [*groups, *collected.rejected]
    check(finished)
    last_errors = {group.tag: group.errors[-1] for group in finished if group.errors}
    summary = "\n".join(last_errors.values())
    if not any(group.trajectories for group in groups or finished):  # none of them, where filters leave none
        raise ValueError(
            f"no episode to {what}: all {len(groups or finished)} groups were dropped; last errors:\n{summary}"
        )
    if last_errors:
        logger.warning("episodes failed (rollout/env_errors counts them); last errors:\n%s", summary)
    infos = [trajectory.info for group in finished for trajectory in group.trajectories]
    if late := sum(info.get("call_timeouts", 0) for info in infos):
        calls = sum(info.get("tool_calls", 0) for info in infos)
        logger.warning("%d of %d tool calls took longer than their timeout; the policy got an error", late, calls)
    return collected


class Remarks:
    """Reports problems of a step's rollouts: the 1st, 2nd, 4th, 8th … time in the terminal, else in the log."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def make(self, kind: str, text: str) -> None:
        self._counts[kind] += 1
        if (count := self._counts[kind]) & (count - 1) == 0:
            logger.warning("%s", text)
        else:
            logger.info("%s", text, extra=NOTED)


def remarks_on(
    step: int,
    collected: Collected,
    num_groups: int,
    most_tokens: Callable[[str], int],
    *,
    compares: bool,
    num_ids: int | None = None,
) -> Iterator[tuple[str, str]]:
    """What the user should know of a step's rollouts, a line each, by its kind.

    Args:
        num_groups: groups of a full batch.
        most_tokens: of an answer, by tag.
        compares: only differences of scores within a group count, and groups without any are not replaced.
        num_ids: ids of the tokenizer; a model may have more rows, to fill up its embedding.
    """
    finished = [*collected.groups, *collected.rejected]
    found = spread_metrics(finished, "of")
    without = ""
    if found:
        right, wrong = found["of/all_right"], found["of/all_wrong"]
        without = f"{found['of/no_spread']:.0%} have no spread ({right:.0%} all right, {wrong:.0%} all wrong)"
    if (kept := len(collected.groups)) < num_groups:
        does = f"trains on {kept} of {num_groups} groups" if kept else "takes no optimizer step"
        why = f"{kept or 'none'} of {len(finished)} groups that were sampled passed the filter"
        yield "short" if kept else "empty", f"step {step} {does}: {why}" + (f"; {without}" if without else "")
    elif compares and found and (found["of/all_wrong"] >= _MOST_WRONG or found["of/no_spread"] >= _MOST_EQUAL):
        yield "spread", f"step {step}: of {len(finished)} groups {without}: group baselines learn nothing from them"
    share, place = cut_answers(finished, most_tokens)
    if share >= _MOST_CUT:
        yield (
            "cut",
            f"step {step}: {share:.0%} of the responses are cut at {place} (rollout/cut_off): "
            "raise it, or ask for less",
        )

    beyond = [] if num_ids is None else _ids_beyond(finished, num_ids)
    if beyond and num_ids is not None:
        yield (
            "beyond",
            f"step {step}: {len(beyond)} sampled tokens, such as {beyond[0]}, have ids that the tokenizer lacks (its "
            f"last is {num_ids - 1}): they are rows that pad the model's embedding, and texts do not show them",
        )


def _ids_beyond(groups: Sequence[RolloutGroup], num_ids: int) -> list[int]:
    """Sampled ids from ``num_ids`` on."""
    turns = (turn for group in groups for each in group.trajectories for turn in each.turns)
    found = (turn.completion.token_ids for turn in turns if figures_of(turn).largest_id >= num_ids)
    return [int(index) for ids in found for index in ids[ids >= num_ids]]


def describe_failure(groups: Sequence[RolloutGroup], most_tokens: Callable[[str], int]) -> str:
    """What all that was sampled in vain has in common."""
    episodes = [episode for group in groups for episode in group.trajectories]
    scores = [episode.score for episode in episodes]
    low, high = min(scores), max(scores)
    scored = f"scored {low:g}" if low == high else f"were wrong, with scores from {low:g} to {high:g}"
    parts = [f"all {len(episodes)} sampled responses {scored}"]
    share, place = cut_answers(groups, most_tokens)
    if share > 0:
        parts.append(f"{share:.0%} were cut at {place}")
    metrics = rollout_metrics(groups, "of")
    if (valid := metrics.get("of/valid_rate", 1.0)) < 1:
        parts.append(f"in {1 - valid:.0%} there was no answer or action")
    if dropped := int(metrics["of/dropped"]):
        parts.append(f"{dropped} more failed or could not be scored")
    return "; ".join(parts)


def cut_answers(groups: Sequence[RolloutGroup], most_tokens: Callable[[str], int]) -> tuple[float, str]:
    """Share of the answers that a length limit cut, and the limit that cut most of them."""
    turns = [(group.tag, turn) for group in groups for episode in group.trajectories for turn in episode.turns]
    cut = [(tag, turn) for tag, turn in turns if turn.completion.finish_reason is FinishReason.LENGTH]
    if not cut:
        return 0.0, ""
    limits = {tag: most_tokens(tag) for tag, _ in cut}
    whole = [limits[tag] for tag, turn in cut if turn.completion.num_tokens >= limits[tag]]
    limit = (
        f"response_length {Counter(whole).most_common(1)[0][0]}" if 2 * len(whole) >= len(cut) else "sequence_length"
    )
    return len(cut) / len(turns), limit


def passes_filter(group: RolloutGroup, limits: RewardFilterConfig) -> bool:
    """Tells whether dynamic sampling keeps a group; one without any answer it never does.

    Raises:
        RunFailedError: the function of ``path`` raised, or returned something else than True or False.
    """
    if limits.keeps_all:
        return True
    scores = [trajectory.score for trajectory in group.trajectories]
    if not scores:
        return False
    if limits.type != "no_filter":
        # Exact: rounding would give equal scores a spread above 0.
        value = statistics.pstdev(scores) if limits.type == "std_filter" else statistics.mean(scores)
        if value <= limits.low or (limits.high is not None and value >= limits.high):
            return False
    return limits.path is None or _is_wanted(group, limits.path)


def _is_wanted(group: RolloutGroup, path: str) -> bool:
    keep: Any = import_path(path, "filter of groups")
    who = f"query_filter_config.path {path}, asked of group {group.group_id} of {group.tag},"
    try:
        wanted = keep(group)
    except Exception as error:  # a user's function may raise anything
        raise RunFailedError(f"{who} raised {type(error).__name__}: {error}") from error
    if not isinstance(wanted, bool | np.bool_):
        raise RunFailedError(f"{who} returned {wanted!r}, expected True or False")
    return bool(wanted)


def keep_episodes(session: RunSession, step: int, groups: Sequence[RolloutGroup]) -> list[Trajectory]:
    """Writes episodes of an evaluation in full (``num_written_episodes``), for whoever wants to look; returns all."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    written = trajectories[: session.config.num_written_episodes]
    hold_episodes([*written, *trajectories[len(written) : MAX_SHOWN]])
    write_trajectories(session.folder, f"eval-{step:05d}", written)
    session.log_answers(step, [answer_row(trajectory) for trajectory in written])
    return trajectories


def write_rollouts(folder: str, step: int, collected: Collected) -> None:
    """Keeps a step's groups, those that were turned down too: ``episodes.jsonl`` to read, the rest to take again."""
    path = step_folder(folder, step)
    collected.save(path)
    write_atomic(path / "episodes.jsonl", training_lines(collected.groups, collected.rejected))


def write_scores(folder: str, step: int, batch: Batch) -> None:
    """Keeps what models said of a step's tokens before the update, beside its groups: for ``roll verify``."""
    found = {name: each.contiguous() for name in SCORES if (each := getattr(batch, name)) is not None}
    save_file(found, step_folder(folder, step) / SCORES_FILE)


def drop_oldest(folder: Path, step: int, max_bytes: int) -> list[int]:
    """Deletes the oldest kept steps up to ``step`` while all of them are too large, but not the two newest.

    Returns:
        The steps that are gone.
    """
    kept = {number: path for number, path in kept_steps(folder).items() if number <= step}
    sizes = {number: sum(file.stat().st_size for file in path.iterdir()) for number, path in kept.items()}
    total, gone = sum(sizes.values()), []
    for number in list(kept)[:-2]:
        if total <= max_bytes:
            break
        shutil.rmtree(kept[number])
        total -= sizes[number]
        gone.append(number)
    return gone


def write_samples(folder: RunFolder, step: int, collected: Collected, num_groups: int) -> None:
    """Keeps some groups of a step in the run's folder, those that it trains on first, for people to read."""
    kept = collected.groups[:num_groups]
    rejected = collected.rejected[: num_groups - len(kept)]
    hold_episodes(episode for group in (*kept, *rejected) for episode in group.trajectories)
    write_atomic(folder.trajectories / f"{TRAINED}{step:05d}.jsonl", training_lines(kept, rejected))
    thin_out(folder.trajectories, f"{TRAINED}*.jsonl", MAX_TRAINED_BYTES)


def token_rows(batch: Batch, tags: Sequence[str], decode: Callable[[list[int]], str]) -> Iterator[dict[str, Any]]:
    """Up to four rows of a step, token by token: the highest and lowest advantages, and where the engines differ most.

    Args:
        batch: as it is trained on, with ``advantages_T``.

    Yields:
        ``tag``, ``group``, ``score``, and ``tokens``: the text of what was given, or of a sampled token a list: its
        text, its log-probs when it was sampled and by the trainer before the update (``None``: not computed), its
        advantage, its reward, and the version that sampled it.
    """
    assert batch.advantages_T is not None and batch.group_B is not None and batch.tag_B is not None
    for row in _telling_rows(batch):
        one = batch.select([row])
        old_T = one.old_logprobs_T if one.on_policy_B is None or not bool(one.on_policy_B[0]) else None
        optional = (one.rollout_logprobs_T, old_T, one.advantages_T, one.rewards_T, one.rollout_versions_T)
        figures = [
            [None] * one.num_tokens if each is None else each.double().round(decimals=4).tolist() for each in optional
        ]
        texts = _pieces(vocabulary_ids(one.tokens_T[:_MOST_TOKENS]).tolist(), decode)
        tokens: list[Any] = []
        for text, sampled, *numbers in zip(texts, one.loss_mask_T.tolist(), *figures, strict=False):
            if sampled:
                tokens.append([text, *numbers])
            elif tokens and isinstance(tokens[-1], str):
                tokens[-1] += text
            else:
                tokens.append(text)
        if (left_out := one.num_tokens - _MOST_TOKENS) > 0:
            tokens.append(f"… ({left_out:,} more tokens)")
        score = None if one.scores_B is None else float(one.scores_B[0])
        yield {"tag": tags[int(batch.tag_B[row])], "group": int(batch.group_B[row]), "score": score, "tokens": tokens}


def _pieces(ids: list[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Text of each token where it stands: alone, some tokenizers give it without the blank before it."""
    for before, index in zip([None, *ids], ids, strict=False):
        alone = "" if before is None else decode([before])
        both = decode([index] if before is None else [before, index])
        yield both[len(alone) :] if both.startswith(alone) else decode([index])


def _telling_rows(batch: Batch) -> list[int]:
    mask_T, rows_T = batch.loss_mask_T, batch.rows_T
    counts_B = batch.loss_tokens_B.clamp(min=1)
    assert batch.advantages_T is not None
    zeros_B = torch.zeros(batch.num_sequences, dtype=torch.float64)
    advantage_B = zeros_B.index_add(0, rows_T[mask_T], batch.advantages_T[mask_T].double()) / counts_B
    found = [int(advantage_B.argmax()), int(advantage_B.argmin())]
    if (mismatch_BVK := mismatch_of_rows(batch)) is not None:
        moved_B = mismatch_BVK[:, :, Compared.GAPS].sum(1).nan_to_num(0.0) / counts_B
        on_policy_B = torch.zeros_like(zeros_B).bool() if batch.on_policy_B is None else batch.on_policy_B
        found.append(int(moved_B.masked_fill(on_policy_B, -1.0).argmax()))
    found.append(int(advantage_B.abs().argmin()))
    return list(dict.fromkeys(found))


def training_lines(kept: Sequence[RolloutGroup], rejected: Sequence[RolloutGroup]) -> str:
    """Episodes as JSON lines; ``trained`` says whether dynamic sampling kept the episode's group."""
    return "".join(
        to_json({**trajectory_record(trajectory), "trained": trained}) + "\n"
        for groups, trained in ((kept, True), (rejected, False))
        for group in groups
        for trajectory in group.trajectories
    )


def thin_out(folder: Path, pattern: str, max_bytes: int) -> None:
    """Deletes every other file, the newest excepted, for as long as all of them (numbered in order) are too large."""
    files = sorted(folder.glob(pattern))
    while len(files) > 1 and sum(file.stat().st_size for file in files) > max_bytes:
        gone = files[-2::-2]
        for file in gone:
            file.unlink()
        files = [file for file in files if file not in gone]


def read_rollouts(folder: str, step: int) -> Collected:
    """Rollouts of a step that ``write_rollouts`` has kept.

    Raises:
        RunFailedError: there is nothing.
    """
    collected = Collected.load(step_folder(folder, step))
    if not (collected.groups or collected.rejected):
        raise RunFailedError(
            f"rollout_replay_dir: no rollouts of step {step} in {folder}; write it with rollout_dump_dir"
        )
    return collected
