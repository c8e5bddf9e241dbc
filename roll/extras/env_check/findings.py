"""Rules for the findings of an environment check: name, severity, and fix."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]
"""``error``: training fails or learns something else. ``warning``: most likely a mistake. ``note``: good to know."""


@dataclass(frozen=True)
class Rule:
    """A promise that environments keep."""

    severity: Severity
    fix: str
    """Advice on what to do, in a sentence."""


RULES: dict[str, Rule] = {
    "cannot-be-made": Rule("error", "Make the constructor accept this env_config, in any process."),
    "ends-process": Rule(
        "error", "Raise an exception: exit, os._exit and crashes of C code end all of a worker's episodes."
    ),
    "cannot-travel": Rule(
        "error", "Put the class at the top of an importable module and only plain values into env_config."
    ),
    "reset-raises": Rule("error", "Make reset succeed for every seed from 0 to 2**63 - 1, and after any episode."),
    "step-raises": Rule("error", "Accept any text in step: one without a valid action should not change the state."),
    "reset-timeout": Rule("error", "Bound what reset waits for, or raise step_timeout."),
    "step-timeout": Rule("error", "Bound what step waits for and how much of a text it searches."),
    "protocol": Rule("error", "Return what TextEnv promises; step_result(…) builds the five-tuple with its info."),
    "not-deterministic": Rule(
        "error", "Draw every random choice from self.np_random or random.Random(seed) of the seed given to reset."
    ),
    "differs-between-processes": Rule(
        "error", "Depend on the seed alone: not on hash(), the order of a set, the process id or files of this run."
    ),
    "state-leaks": Rule("error", "Set every attribute that step changes in reset, however the episode before ended."),
    "instances-interfere": Rule(
        "error", "Keep state in the instance: no class attributes, module globals or global random generators."
    ),
    "not-thread-safe": Rule("error", "Keep state in the instance, or set use_thread_lock: true."),
    "thread-bound": Rule("error", "Set own_thread = True on the class: all calls then run in one thread."),
    "render-changes-state": Rule("error", "Do not change state in render."),
    "failure-paid": Rule("error", "Reward a failed episode less than a successful one."),
    "success-for-nothing": Rule("error", "Set info['success'] from the state of the task, not from the text."),
    "reward-tampered": Rule("error", "Compute the reward from the parsed action alone, not from how the text looks."),
    "reward-parts": Rule("error", "Return reward = task_reward + penalty: the policy is trained on the two parts."),
    "penalty-positive": Rule("error", "Keep penalties zero or negative; positive rewards belong in task_reward."),
    "paid-after-end": Rule("error", "Refuse step after the end of an episode, as StepLimit does."),
    "reward-constant": Rule("warning", "Let the reward depend on what was done: nothing is learned from a constant."),
    "reward-range": Rule("warning", "Scale rewards to about -1 … 1; the built-in environments have reward_scale."),
    "success-undefined": Rule("warning", "Set info['success'] in every step: without it success is reported as 0 %."),
    "seeds-alike": Rule("warning", "Draw the task from the seed: a single task is memorised."),
    "actions-not-understood": Rule(
        "warning", "Understand <answer>name</answer> for each of action_names; scripted play uses nothing else."
    ),
    "expert-wrong": Rule(
        "warning", "Let expert_actions() return names of action_names in every state, or an empty list."
    ),
    "observation-size": Rule("warning", "Show less: every character of an observation is in the prompt of a turn."),
    "observation-characters": Rule("warning", "Strip control characters and colour codes from observations."),
    "picture-size": Rule("warning", "Return pictures of one size: the number of a picture's tokens depends on it."),
    "picture-state": Rule(
        "warning", "Draw all of the state that info['state_key'] names, and nothing else, or name it differently."
    ),
    "slow": Rule("warning", "Make calls faster, or run more environments at once: a slow one keeps its thread."),
    "not-instant": Rule("warning", "Remove instant = True: such calls hold up every other episode."),
    "render-fails": Rule("warning", "Return uint8 [height, width, 3], a Pillow image, a text, or None from render."),
    "success-not-seen": Rule("note", "Give the check a way to succeed: expert_actions(), or answers to try."),
    "failure-not-seen": Rule("note", "Nothing to do if the task cannot be failed; look at success otherwise."),
    "step-after-end": Rule("note", "Refuse step after the end of an episode, as StepLimit does."),
    "could-be-instant": Rule("note", "Set instant = True on the class if calls never wait: no thread is used then."),
    "instance-not-picklable": Rule("note", "Nothing: instances stay in the process that made them."),
}
"""Every finding by its name. docs/environments.md lists them."""


@dataclass(frozen=True)
class Finding:
    """A violation of one rule."""

    name: str
    """Key of ``RULES``."""
    got: str

    @property
    def severity(self) -> Severity:
        return RULES[self.name].severity

    @property
    def fix(self) -> str:
        return RULES[self.name].fix

    def __str__(self) -> str:
        return f"{self.severity} {self.name}: {self.got}. {self.fix}"


@dataclass(frozen=True)
class Report:
    """Account of what a check tried and found."""

    env_type: str
    findings: tuple[Finding, ...]
    tried: tuple[str, ...]
    """Names of the probes that ran, in their order."""
    facts: tuple[tuple[str, str], ...]
    """Figures that were measured, as (name, words)."""

    def problems(self, allow: Collection[str] = ()) -> tuple[Finding, ...]:
        """Errors and warnings but those whose names are in ``allow``."""
        return tuple(each for each in self.findings if each.severity != "note" and each.name not in allow)


def check_names(names: Collection[str]) -> None:
    """Refuses names that no finding has.

    Raises:
        ValueError: with the nearest name.
    """
    from roll.configs.schema import did_you_mean

    for name in names:
        if name not in RULES:
            hint = did_you_mean(name, list(RULES)) or f"known are {', '.join(RULES)}"
            raise ValueError(f"no finding is called {name!r}; {hint}")
