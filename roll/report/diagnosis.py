"""Says whether a run learns, and if not, why: the causes that its record shows, and what to change, in plain words.

Causes are in the order in which a step depends on them: sampling, judging, comparing within groups, the loss, the
update, and what follows from many updates. A cause looks at the end of the record (its last third) unless it says
otherwise.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from roll.report.record import RunRecord, held_out
from roll.tracking.display import difference_interval

MANY_SIGMA = 3.0
"""From so many standard errors on, a slope of the training reward is not noise."""
_FEW_STEPS = 5
"""With fewer, nothing is said about a slope that is not clear."""
SOLVED = 0.95
"""Success from which on a task counts as solved."""
_MOST_SHOWN = 5
"""Causes in the terminal."""


@dataclass(frozen=True)
class Diagnosis:
    """The outcome for one run.

    Attributes:
        learns: nothing is wrong: held-out success or the training reward rises, or the task is solved.
        verdict: a sentence about that, with figures.
        findings: causes, the most decisive first; empty if it learns.
    """

    learns: bool
    verdict: str
    findings: Sequence[Finding]

    def text(self) -> str:
        """For the terminal."""
        lines = [self.verdict]
        if not self.learns and not self.findings:
            lines.append(
                "No known cause shows in its metrics. Look at responses in trajectories/ and renders/index.html, "
                "and let it run longer."
            )
        for number, finding in enumerate(self.findings[:_MOST_SHOWN], start=1):
            lines += [
                "",
                f"{number}. {finding.text[0].upper()}{finding.text[1:]}. [{finding.cause}]",
                *(f"     {line}" for line in finding.evidence),
                *textwrap.wrap(
                    f"what to change: {finding.advice}", 110, initial_indent="   ", subsequent_indent="     "
                ),
            ]
        return "\n".join(lines) + "\n"

    @property
    def remark(self) -> str | None:
        """The first cause in a line, if it is decisive."""
        if not (self.findings and self.findings[0].weight >= DECISIVE):
            return None
        return f"the reward does not rise: {self.findings[0].text}; {self.findings[0].advice}"

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        return {"learns": self.learns, "verdict": self.verdict, "findings": [asdict(each) for each in self.findings]}


def diagnose(record: RunRecord) -> Diagnosis:
    """Compares held-out success before and after, else looks at the slope of the training reward."""
    learns, verdict = _verdict(record)
    return Diagnosis(learns, verdict, () if learns else findings(record))


def _verdict(record: RunRecord) -> tuple[bool, str]:
    rewards, count = record.series("rollout/reward"), len(record.steps)
    early, late = record.early("rollout/reward") or 0.0, record.late("rollout/reward")
    trend = f"training reward {early:.3g} → {late:.3g} over {count} steps"
    if record.after:
        was, now = held_out(record.before), held_out(record.after)
        (before, _), (after, _) = was, now
        low, high = difference_interval(*was, *now)
        held = (
            f"held-out success {before:.1%} → {after:.1%} ({100 * (after - before):+.1f} points, 95% interval "
            f"{100 * low:+.1f} to {100 * high:+.1f})"
        )
        figures = f"{held}; {trend}"
        rises = slope_in_sigma(rewards) >= MANY_SIGMA and high >= (late - early) / 2  # few were held out
        if low > 0 or min(after, record.late("rollout/success")) >= SOLVED > before:
            return True, f"The run learns: {figures}."
        if rises:
            return True, f"The run learns, going by the {trend}; {held} is not beyond noise."
        if high < 0:
            return False, f"The policy got worse: {figures}."
        return False, f"No gain beyond noise: {figures}."
    sigma = slope_in_sigma(rewards)
    figures = f"{trend}, a slope of {sigma:+.1f} standard errors"
    if sigma >= MANY_SIGMA:
        return True, f"The run learns: {figures}."
    if sigma <= -MANY_SIGMA:
        return False, f"The policy gets worse: {figures}."
    if count < _FEW_STEPS:
        return False, f"Too few steps to tell: {trend}."
    return False, f"No gain beyond noise: {figures}."


def slope_in_sigma(values: Sequence[float]) -> float:
    """The slope of the least-squares line through equally spaced values, in its own standard errors."""
    count = len(values)
    if count < 3:
        return 0.0
    xs = range(count)
    slope, intercept = statistics.linear_regression(xs, values)
    residual = sum((y - intercept - slope * x) ** 2 for x, y in zip(xs, values, strict=True)) / (count - 2)
    error = math.sqrt(residual / (statistics.pvariance(xs) * count))
    if error == 0:
        return math.copysign(math.inf, slope) if slope else 0.0
    return slope / error


DECISIVE, _PARTLY = 0.7, 0.4
"""Weights from which on a cause explains the run, or a part of it."""
_FIRST = 1
"""Steps whose rollouts are older than any update."""
COLLAPSED, _LEAST_ENTROPY = 0.15, 0.05
"""The part of the entropy that a collapse leaves, and the nats a token below which there was none to lose."""
ENTROPY_ADVICE = "lower the learning rate, raise pg_clip_high (use_pg_clip_range), or add a small entropy_loss_coef"
SPREAD_ADVICE = "more responses per prompt, a finer reward, or query_filter_config, which replaces such groups"
CUT_ADVICE = "raise response_length (and sequence_length), or ask for shorter responses"
TRAINING = {
    "length-terms-decide",
    "kl-pulls-back",
    "entropy-bonus-decides",
    "updates-are-too-large",
    "entropy-collapsed",
    "data-repeats",
}
"""Causes in the loss and the updates, from which others follow."""


@dataclass(frozen=True)
class Finding:
    """A cause that a record shows.

    Attributes:
        cause: its name.
        weight: from 0 to 1, how much of what could be learned it takes away.
        text: a sentence about what happens.
        evidence: metrics and settings that show it, a line each.
        advice: what to change.
    """

    cause: str
    weight: float
    text: str
    evidence: tuple[str, ...]
    advice: str


_OF_TAGS = (
    "responses-are-cut",
    "nothing-to-judge",
    "responses-are-all-alike",
    "tasks-are-too-hard",
    "tasks-are-too-easy",
    "groups-have-no-spread",
)
"""Causes that are looked for in each tag, too."""

Found: TypeAlias = Iterator[tuple[float, str, Sequence[str], str]]
Cause: TypeAlias = Callable[[RunRecord], Found]
CAUSES: dict[str, Cause] = {}


def findings(record: RunRecord) -> list[Finding]:
    """All causes that the record shows, the most decisive first; of equally decisive ones the earliest in a step.

    What training has done counts before its consequences: causes that the first step did not show weigh half as much
    where a cause in the loss or the updates is decisive.
    """
    found = list(_found(record))
    if any(each.cause in TRAINING and each.weight >= DECISIVE for each in found):
        first = replace(record, steps=record.steps[:_FIRST], before={}, after={}, groups=())
        early = {each.cause for each in _found(first)} | TRAINING
        found = [each if each.cause in early else replace(each, weight=each.weight / 2) for each in found]
    return sorted(found, key=lambda finding: -(finding.weight >= DECISIVE) - (finding.weight >= _PARTLY))


def _found(record: RunRecord) -> Iterator[Finding]:
    """Causes of all that was sampled; and those that hold in one tag or some alone, with their name."""
    tags = {tag: record.of_tag(tag) for tag in record.tags}
    for name, cause in CAUSES.items():
        whole = list(cause(record))
        found = {tag: list(cause(of_tag)) for tag, of_tag in tags.items()} if name in _OF_TAGS else {}
        apart = {tag: each[0] for tag, each in found.items() if each}
        if len(apart) == len(tags):
            apart = {}  # it holds everywhere
        for weight, text, evidence, advice in whole:
            where = [f"only in: {', '.join(f'{tag} ({each[1]})' for tag, each in apart.items())}"] if apart else []
            yield Finding(name, weight, text, (*evidence, *where), advice)
        for tag, (weight, text, evidence, advice) in ({} if whole else apart).items():
            share = tags[tag].late("rollout/episodes", 0.0) / max(1.0, record.late("rollout/episodes", 1.0))
            yield Finding(
                name,
                weight * share,
                f"of {tag}, {share:.0%} of the episodes: {text}",
                tuple(line.replace("rollout/", f"rollout/{tag}/") for line in evidence),
                advice,
            )


def _cause(function: Cause) -> Cause:
    CAUSES[function.__name__.strip("_").replace("_", "-")] = function
    return function


def _shown(record: RunRecord, *names: str) -> list[str]:
    """A line for each metric: its early and late mean."""
    return [
        f"{name}: {early:.3g} in the first third of the steps, {record.late(name):.3g} in the last"
        for name in names
        if (early := record.early(name)) is not None
    ]


# Sampling


@_cause
def _sampling_is_too_random(record: RunRecord) -> Found:
    temperature = record.setting("actor_infer.generating_args.temperature", 1.0)
    if temperature > 1.5 and (
        record.late("rollout/valid_rate", 1.0) < 0.7 or record.late("rollout/success", 1.0) < 0.1
    ):
        yield (
            1.0,
            f"responses are sampled at temperature {temperature:g}, which makes most tokens random",
            _shown(record, "actor/entropy", "rollout/valid_rate", "rollout/success"),
            "sample at temperature 1",
        )


def _ends(marks: Sequence[str]) -> list[str]:
    """Those that end a turn."""
    return [mark for mark in marks if "end" in mark or "eot" in mark]


@_cause
def _template_is_another(record: RunRecord) -> Found:
    """No control token of the model's own template is in what it is given."""
    if not (record.marks and record.prompts) or any(mark in text for mark in record.marks for text in record.prompts):
        return
    begins = textwrap.shorten(record.prompts[0].encode("unicode_escape").decode(), 70)
    weak = record.late("rollout/valid_rate", 1.0) < 0.7 or record.late("rollout/cut_off", 0.0) >= 0.25
    yield (
        1.0 if weak or record.late("rollout/success", 1.0) < 0.1 else 0.5,
        "prompts are not in the form of the model's own chat template, so it neither sees whose turn it is nor "
        "ends its answers as it was trained to",
        [
            f"control tokens of its template: {' '.join(record.marks[:4])}; in prompts: none of them",
            f"a prompt begins with: {begins}",
            f"actor_train.data_args.template: {record.setting('actor_train.data_args.template', 'native')}",
            *_shown(record, "rollout/cut_off", "rollout/valid_rate"),
        ],
        "set actor_train.data_args.template: native, or the name of the model's family (roll template check shows what "
        "a template makes of messages); data with ready texts need the template in them",
    )


@_cause
def _responses_never_end(record: RunRecord) -> Found:
    if record.late("rollout/cut_off") < 0.9:
        return
    marks = (
        *_ends(record.marks),
        "<|im_end|>",
        "<|eot_id|>",
        "<|end|>",
        "<end_of_turn>",
        "</s>",
        "<|endoftext|>",
        "<|return|>",
    )
    texts = [each["text"] for group in record.groups for each in group] + [*record.answers]
    mark = next((mark for mark in marks if any(mark in text.removesuffix(mark) for text in texts)), None)
    evidence = _shown(record, "rollout/cut_off")
    if record.setting("actor_infer.generating_args.ignore_eos", False):
        evidence.append("actor_infer.generating_args.ignore_eos: true")
        yield 1.0, "no response ends by itself, because ignore_eos is on", evidence, "set ignore_eos: false"
    elif mark is not None:
        evidence.append(f"responses go on after {mark}")
        yield (
            1.0,
            f"no response ends by itself: {mark} is written, but it does not end the response",
            evidence,
            "the end token is not the model's: check eos_token_id in generation_config.json and the chat template "
            "(roll template check), or name it in stop_strings",
        )


@_cause
def _responses_are_cut(record: RunRecord) -> Found:
    cut = record.late("rollout/cut_off")
    rows = [each for group in record.groups for each in group if each["cut"]]
    right = statistics.fmean(each["success"] for each in rows) if rows else 0.0
    if cut < 0.25 or right > 0.5:
        return
    length = record.setting("response_length")
    yield (
        min(1.0, 1.25 * cut * (1 - right)),
        f"{cut:.0%} of the responses are cut by a length limit before they end",
        [*_shown(record, "rollout/cut_off", "rollout/response_tokens"), f"response_length: {length}"],
        CUT_ADVICE,
    )


@_cause
def _episodes_fail(record: RunRecord) -> Found:
    episodes, dropped = record.late("rollout/episodes"), record.late("rollout/dropped", 0.0)
    share = dropped / max(1.0, episodes + dropped)
    if share >= 0.2:
        yield (
            share,
            f"{share:.0%} of the episodes fail or cannot be scored, and are left out",
            _shown(record, "rollout/dropped", "rollout/env_errors"),
            "logs/roll.log has the last errors of environments and verifiers",
        )


# Judging


@_cause
def _nothing_to_judge(record: RunRecord) -> Found:
    valid = record.late("rollout/valid_rate")
    if valid <= 0.25:
        yield (
            1 - valid,
            f"in {1 - valid:.0%} of the responses no answer or action is found",
            _shown(record, "rollout/valid_rate", "rollout/success"),
            "compare the form that the verifier or environment reads with trajectories/: ask for it in the prompt, "
            "accept another form, or train it first (roll train sft_math is an example)",
        )


@_cause
def _responses_are_all_alike(record: RunRecord) -> Found:
    several = [[each["text"] for each in group] for group in record.groups if len(group) > 1]
    if not several or record.late("rollout/no_spread") < 0.7:
        return
    alike = statistics.fmean(len(set(texts)) == 1 for texts in several)
    if alike < 0.5:
        return
    names = ("temperature", "top_p", "top_k", "do_sample")
    sampling = {name: record.setting(f"actor_infer.generating_args.{name}") for name in names}
    narrow = (
        (sampling["temperature"] is not None and sampling["temperature"] < 0.3)
        or sampling["top_k"] == 1
        or (sampling["top_p"] is not None and sampling["top_p"] < 0.2)
        or sampling["do_sample"] is False
    )
    yield (
        1.0 if narrow else alike,
        f"in {alike:.0%} of the groups all responses to a prompt are the same text"
        + (", because sampling is nearly greedy" if narrow else ""),
        [
            *_shown(record, "rollout/no_spread", "actor/entropy"),
            *(f"actor_infer.generating_args.{name}: {value}" for name, value in sampling.items() if value is not None),
        ],
        "sample at temperature 1 without top_k and top_p"
        if narrow
        else "the policy is certain of its responses: start from an earlier checkpoint, or a model less trained on "
        "this data; an entropy bonus (entropy_loss_coef) keeps it uncertain",
    )


@_cause
def _reward_is_constant(record: RunRecord) -> Found:
    spreads = record.series("reward/score_std")
    constant = statistics.fmean(spread == 0 for spread in spreads) if spreads else 0.0
    if constant < 0.8:
        return
    value = record.late("reward/score_mean")
    success = record.late("rollout/success")
    if success == 0 and record.late("rollout/valid_rate") > 0.25:
        return  # answers are understood, and all of them wrong
    what = "all count as right" if success == 1 else "none counts as right" if success == 0 else "right and wrong alike"
    yield (
        1.0,
        f"every response has the same reward ({value:.3g}; {what})",
        _shown(record, "reward/score_std", "rollout/success"),
        "check with trajectories/ whether the verifier or environment can tell good from bad responses; if it can, "
        + ("the task is too easy" if success == 1 else "the task is too hard for this model"),
    )


@_cause
def _tasks_are_too_hard(record: RunRecord) -> Found:
    wrong = record.late("rollout/all_wrong")
    if wrong >= 0.7:
        yield (
            wrong,
            f"in {wrong:.0%} of the groups every response is wrong",
            _shown(record, "rollout/all_wrong", "rollout/no_spread", "rollout/success"),
            "take easier tasks first, more responses per prompt, a reward for partial success, or a stronger model; "
            "query_filter_config replaces such groups",
        )


@_cause
def _tasks_are_too_easy(record: RunRecord) -> Found:
    right = record.late("rollout/all_right")
    if right >= 0.7:
        yield (
            right,
            f"in {right:.0%} of the groups every response is right: little is left to learn",
            _shown(record, "rollout/all_right", "rollout/no_spread", "rollout/success"),
            "take harder tasks; query_filter_config replaces such groups",
        )


# Comparing within groups


@_cause
def _groups_of_one(record: RunRecord) -> Found:
    estimator = record.setting("adv_estimator")
    if record.group_size == 1 and record.compares:
        yield (
            1.0,
            f"{estimator} compares the responses to a prompt, and there is one of each",
            [f"adv_estimator: {estimator}", "responses per prompt: 1"],
            "sample several responses per prompt, or use another estimator, such as reinforce_plus_plus",
        )


@_cause
def _groups_have_no_spread(record: RunRecord) -> Found:
    share = record.late("rollout/no_spread")
    if share >= 0.7 and record.compares:
        yield (
            share,
            f"in {share:.0%} of the groups all responses score the same, so that group baselines leave nothing",
            _shown(record, "rollout/no_spread", "rollout/all_right", "rollout/all_wrong"),
            SPREAD_ADVICE,
        )


@_cause
def _length_terms_decide(record: RunRecord) -> Found:
    spread = record.late("reward/score_std")
    evidence = _shown(record, "reward/len_reward", "reward/overlong_penalty", "rollout/response_tokens")
    coef = record.setting("len_reward_coef", 1.0) if record.setting("add_len_reward", False) else 0.0
    overlong = abs(record.late("reward/overlong_penalty", 0.0))
    if coef / 2 <= 2 * spread and overlong <= 2 * spread:
        return
    yield (
        0.9,
        "terms for the length of responses outweigh the rewards of the task",
        [*evidence, f"reward/score_std: {spread:.3g}", f"len_reward_coef: {coef:g}" if coef else "overlong_buffer"],
        "lower len_reward_coef or overlong_buffer.penalty_factor until they are small beside reward/score_std",
    )


@_cause
def _advantages_cancel(record: RunRecord) -> Found:
    spread, left = record.late("reward/score_std"), record.late("actor/advantage_std")
    if spread > 1e-3 and left < 1e-3 * spread and record.late("rollout/no_spread", 0.0) < 0.95:
        keys = ("adv_estimator", "reward_clip", "advantage_clip", "reward_normalization", "reward_norm")
        set_keys = [f"{key}: {value}" for key in keys if (value := record.setting(key)) is not None]
        yield (
            1.0,
            "rewards differ, but after normalising and clipping the advantages do not",
            [*_shown(record, "reward/score_std", "reward/shaped_mean", "actor/advantage_std"), *set_keys],
            "remove the normalisation or clipping that takes the differences away",
        )


# The loss


@_cause
def _nothing_is_trained(record: RunRecord) -> Found:
    trained = statistics.fmean(bool(step.get("actor/num_tokens")) for step in record.steps)
    dropped = record.late("actor/dropped_frac", 0.0)
    share = max(1 - trained, dropped)
    if share < 0.5:
        return
    keys = ("difficulty_mask", "max_len_mask", "error_max_len_clip", "critic_warmup", "query_filter_config")
    set_keys = [f"{key}: {value}" for key in keys if (value := record.setting(key))]
    yield (
        share,
        f"{1 - trained:.0%} of the steps train no token"
        if 1 - trained >= dropped
        else f"masks drop {dropped:.0%} of what was sampled",
        [*_shown(record, "actor/num_tokens", "actor/dropped_frac"), *set_keys],
        "loosen the masks and filters, or end critic_warmup earlier",
    )


@_cause
def _kl_pulls_back(record: RunRecord) -> Found:
    """By its coefficient alone: rewards are about 1, so one from 1 on outweighs them at any noticeable distance."""
    terms = []
    if record.setting("use_kl_loss", False):
        terms.append(("kl_loss_coef", record.setting("kl_loss_coef", 0.0), "actor/kl_loss"))
    if record.setting("add_token_level_kl", False):
        terms.append(("init_kl_coef", record.setting("init_kl_coef", 0.2), "reward/kl"))
    for key, coef, name in terms:
        if coef >= 1.0 and not math.isnan(record.late(name)):
            yield (
                min(1.0, 0.7 + coef / 100),
                "the KL penalty holds the policy at the reference",
                [*_shown(record, name, "reward/kl_coef", "actor/pg_loss", "actor/entropy"), f"{key}: {coef:g}"],
                f"lower {key}: 0.001 to 0.05 is common",
            )


@_cause
def _entropy_bonus_decides(record: RunRecord) -> Found:
    coef = record.setting("entropy_loss_coef", 0.0)
    early, late = record.early("actor/entropy"), record.late("actor/entropy")
    if coef > 0 and early is not None and late > 1.5 * max(early, 1e-9) and late > 0.5:
        yield (
            1.0,
            "the entropy bonus outweighs the rewards: responses become random",
            [*_shown(record, "actor/entropy", "rollout/reward"), f"entropy_loss_coef: {coef:g}"],
            "lower entropy_loss_coef, by a factor of 10 at least",
        )


@_cause
def _clipping_binds(record: RunRecord) -> Found:
    share = record.late("actor/clip_frac", 0.0)
    if share >= 0.3:
        yield (
            share,
            f"clipping drops {share:.0%} of the tokens from the loss",
            _shown(record, "actor/clip_frac", "actor/ratio_mean", "actor/approx_kl", "async/token_lag"),
            "raise pg_clip, lower the learning rate or ppo_epochs, or train fresher rollouts (async_generation_ratio)",
        )


# The update


@_cause
def _steps_are_skipped(record: RunRecord) -> Found:
    skipped = record.series("actor/skipped_steps")
    share = statistics.fmean(value > 0 for value in skipped) if skipped else 0.0
    if share >= 0.2:
        yield (
            share,
            f"{share:.0%} of the steps are skipped, because the loss or gradient is not finite",
            _shown(record, "actor/skipped_steps", "actor/grad_norm"),
            "lower the learning rate, train in bf16 or fp32 rather than fp16, and look for NaN in rewards",
        )


@_cause
def _gradients_are_clipped_away(record: RunRecord) -> Found:
    norm, limit = record.late("actor/grad_norm"), record.setting("max_grad_norm", 1.0)
    factor = norm / limit
    if factor >= 100:
        yield (
            1.0 if factor >= 1000 else 0.5,
            f"gradients are scaled down {factor:.3g} times",
            [*_shown(record, "actor/grad_norm"), f"max_grad_norm: {limit:g}"],
            "raise max_grad_norm (1 is common), or lower what makes gradients so large",
        )


@_cause
def _learning_rate_is_too_low(record: RunRecord) -> Found:
    """Adam moves a weight by at most about the learning rate a step; weights are some 0.02 large."""
    rates = record.series("actor/lr")
    moved = sum(rates)
    if rates and moved < 1e-6:
        training = "actor_train.training_args"
        yield (
            1.0,
            f"the learning rates of all steps add up to {moved:.2g}, which moves no weight noticeably",
            [
                *_shown(record, "actor/lr"),
                *(
                    f"{training}.{key}: {record.setting(f'{training}.{key}')}"
                    for key in ("learning_rate", "warmup_steps")
                ),
            ],
            "raise the learning rate (about 1e-6 for full training of large models, 1e-5 for LoRA, more for small "
            "ones), or shorten the warm-up",
        )


@_cause
def _generator_has_old_weights(record: RunRecord) -> Found:
    every, steps = record.setting("actor_train.model_update_frequency", 1), len(record.steps)
    difference = record.late("mismatch/logprob_diff_mean", 0.0)
    if every > 1 and every > steps / 4:
        yield (
            1.0 if every >= steps else 0.6,
            f"the generator gets new weights only every {every} steps, in a run of {steps}",
            [*_shown(record, "mismatch/logprob_diff_mean"), f"actor_train.model_update_frequency: {every}"],
            "set model_update_frequency: 1",
        )
    elif difference > 0.1 and not record.setting("async_generation_ratio", 0):
        yield (
            min(1.0, 0.5 + difference),
            "trainer and generator disagree about the log-probs of the same tokens",
            _shown(record, "mismatch/logprob_diff_mean", "mismatch/k3"),
            "look for a difference in number format, sampling settings or attention between the two; the same dtype on "
            "both sides, and train_infer_correction, reduce its effect",
        )


@_cause
def _rollouts_are_old(record: RunRecord) -> Found:
    lag = record.late("async/token_lag", 0.0)
    if lag >= 2:
        yield (
            min(1.0, lag / 6),
            f"the tokens that are trained were sampled {lag:.1f} steps ago on average",
            [
                *_shown(record, "async/token_lag", "mismatch/k3"),
                f"async_generation_ratio: {record.setting('async_generation_ratio')}",
            ],
            "lower async_generation_ratio, or set train_infer_correction",
        )


# What follows from many updates


@_cause
def _updates_are_too_large(record: RunRecord) -> Found:
    rewards = record.series("rollout/reward")
    if len(rewards) < 3 or not record.series("actor/grad_norm"):
        return
    start, late = rewards[0], record.late("rollout/reward")
    rate = max(record.series("actor/lr"), default=0.0)
    if late < 0.5 * start and start > 0:
        yield (
            0.9,
            f"the reward falls from {start:.3g} to {late:.3g} in {len(rewards)} steps: the updates destroy the policy",
            [
                *_shown(record, "rollout/reward", "actor/entropy", "actor/grad_norm", "actor/approx_kl"),
                f"highest learning rate: {rate:g}",
            ],
            "lower the learning rate, by a factor of 10 to begin with; lower max_grad_norm; add a small KL loss",
        )


def entropy_collapsed(early: float | None, late: float) -> bool:
    """Whether of an entropy, in nats a token, almost nothing is left."""
    return early is not None and early > _LEAST_ENTROPY and late < COLLAPSED * early


@_cause
def _entropy_collapsed(record: RunRecord) -> Found:
    early, late = record.early("actor/entropy"), record.late("actor/entropy")
    if entropy_collapsed(early, late) and record.late("rollout/success", 1.0) < 0.9:
        yield (
            0.75,
            f"the policy's entropy fell from {early:.3g} to {late:.3g} nats a token: it no longer tries anything else",
            _shown(record, "actor/entropy", "rollout/no_spread"),
            ENTROPY_ADVICE,
        )


@_cause
def _data_repeats(record: RunRecord) -> Found:
    epochs = max(record.series("rollout/epoch"), default=0.0)
    gain = record.late("rollout/reward") - (record.early("rollout/reward") or 0.0)
    if epochs >= 3 and record.after and (gain > 0.1 or record.late("rollout/all_right", 0.0) > 0.5):
        yield (
            0.95,
            f"the training prompts were repeated {epochs:.0f} times: only their own reward rises",
            [*_shown(record, "rollout/reward", "rollout/epoch", "rollout/all_right"), *_evaluated(record)],
            "more prompts, or fewer steps",
        )


@_cause
def _noise_hides_gains(record: RunRecord) -> Found:
    episodes, spread = record.late("rollout/episodes"), record.late("rollout/no_spread", 0.0)
    groups = episodes / record.group_size * (1 - spread)
    if groups < 4 and spread < 0.95:
        yield (
            0.65 if groups < 2 else 0.45,
            f"a step learns from {groups:.1f} groups whose responses differ in score: noise outweighs any gain",
            [
                *_shown(record, "rollout/episodes", "rollout/no_spread", "actor/grad_norm"),
                f"responses per prompt: {record.group_size}",
                *_evaluated(record),
            ],
            "more prompts per step (rollout_batch_size), or more steps at a lower learning rate",
        )


def _evaluated(record: RunRecord) -> list[str]:
    if not record.after:
        return []
    return [f"held-out success: {record.before['eval/success']:.1%} before, {record.after['eval/success']:.1%} after"]
