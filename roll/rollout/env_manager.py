"""Runs one episode, and records it: render, generate, step, until the environment or the context ends it.

The calls of an episode form a tree. One whose prompt begins with everything that a row holds (prompts and responses, id
by id) continues that row; any other begins a new row: a retry, a sub-agent, one of several responses to the same
prompt, a rewritten history. So each row is exactly what the engine got and sampled last in it, and each sampled token
belongs to one row; where a later row repeats it, it is part of the prompt there.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from roll.agentic.env.base import Observation, StepResult
from roll.configs.env import CustomEnvConfig
from roll.data.columns import IntArray, Item
from roll.data.identity import identity, items_along
from roll.data.renderer import ChatRenderer, Message, items_of
from roll.data.requests import FinishReason, GenerateFn, GenerateRequest, Runs, SamplingParams
from roll.rollout.errors import EnvError, PromptTooLongError, ReplayError
from roll.rollout.observations import filled, in_words, items_in, shown, state_of
from roll.rollout.tokenization_audit import Conversation, TokenizationAudit
from roll.rollout.types import EpisodeEnd, Frame, Trajectory, Turn
from roll.utils.foreign import describe_error
from roll.utils.hashing import derive_seed
from roll.utils.registry import Registry


class Recorder:
    """Turns of one episode, in the order in which they were finished."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._rows: list[bytes] = []
        """The ids of each row so far."""

    def add(self, turn: Turn) -> Turn:
        """Adds a turn; returns it with the ``row`` that it continues, the longest one where several would do."""
        prompt = identity(turn.prompt_ids)
        row, longest = len(self._rows), -1
        for number, ids in enumerate(self._rows):
            if len(ids) > longest and prompt.startswith(ids):
                row, longest = number, len(ids)
        ids = prompt + identity(turn.completion.token_ids)
        if row == len(self._rows):
            self._rows.append(ids)
        else:
            self._rows[row] = ids
        self.turns.append(replace(turn, row=row))
        return self.turns[-1]


TOOL_TURNS = "tool_turns"
"""Key of ``info``: turns so far that called tools; they do not count as steps of the environment."""
SAID = "assistant_message"
"""Key of ``info``: the policy's last turn as a history has it, where that is more than its text."""
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class EpisodeAbortedError(RuntimeError):
    """The generation was cancelled from outside."""


@dataclass(frozen=True)
class EpisodeSpec:
    """Description of an episode. Equal specs under equal weights give equal trajectories."""

    tag: str
    group_id: int
    member: int
    env_seed: int
    """The same for all members of a group."""
    sampling_seed: int
    """Differs between members."""
    greedy: bool = False
    """Take the most likely token instead of sampling."""
    record: bool = False
    """Keep the environment's pictures, for people to look at."""
    recorded: tuple[Runs, ...] = ()
    """By turn, what sampled the episode in the run that is repeated; nothing if it was not kept there."""


@dataclass(frozen=True)
class LengthLimits:
    """Token budgets of an episode."""

    prompt_length: int
    """Longest first prompt."""
    sequence_length: int
    """Longest prompt plus completion."""


class AsyncEnv(Protocol):
    """The environment of an episode: an ``EnvRunner``, or a prompt whose response is scored elsewhere."""

    async def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]: ...
    async def step(self, text: str) -> StepResult: ...
    async def render(self) -> Frame | None: ...


class EnvManager(ABC):
    """Runs episodes of one tag. Subclasses define the prompt of each turn.

    Args:
        params: sampling parameters; the seed is set per turn.
    """

    history: bool
    """True when an episode is one growing conversation, and so one training sample."""
    watch: TokenizationAudit | None = None
    """Compares what is trained with its conversation; ``None``: nobody does."""

    def __init__(
        self, config: CustomEnvConfig, renderer: ChatRenderer, params: SamplingParams, limits: LengthLimits
    ) -> None:
        self.config = config
        self.renderer = renderer
        max_new_tokens = min(params.max_new_tokens, config.max_tokens_per_step or params.max_new_tokens)
        self.params = replace(params, max_new_tokens=max_new_tokens)
        self.limits = limits

    async def run_episode(self, env: AsyncEnv, generate: GenerateFn, spec: EpisodeSpec) -> Trajectory:
        """Plays one episode to its end.

        Raises:
            PromptTooLongError: the first prompt is longer than ``prompt_length`` or leaves no room to answer.
            EnvTimeoutError: the environment hung.
            Exception: whatever the environment raised.
        """
        observation, info = await env.reset(spec.env_seed)
        frames = [shown(observation) or await env.render()] if spec.record else []
        recorder = Recorder()
        turns = recorder.turns
        conversation = Conversation() if self.watch is not None and self.watch.watches(spec.member) else None
        end = EpisodeEnd.TRUNCATED
        while len(turns) - info.get(TOOL_TURNS, 0) < self.config.max_steps:
            prompt_ids = self.prompt(observation, info, turns)
            room = self.limits.sequence_length - len(prompt_ids)
            if not turns:
                self._check_first_prompt(prompt_ids, room, spec.tag)
            elif room < 1:
                end = EpisodeEnd.CONTEXT_FULL
                break
            heard = self.said(observation, info, turns) if conversation is not None else None
            turn, observation, info, ended = await self._turn(env, generate, spec, turns, prompt_ids, observation, info)
            if conversation is not None and heard is not None:
                conversation.messages += [*heard, info.get(SAID) or {"role": "assistant", "content": turn.text}]
                conversation.tools = info.get("tools")
            else:
                conversation = None
            recorder.add(turn) if self.history else turns.append(turn)
            if frames and frames[-1] is not None:  # where there was no picture, there will be none
                frames.append(shown(observation) or await env.render())
            if ended is not None:
                end = ended
                break
        return Trajectory(
            tag=spec.tag,
            group_id=spec.group_id,
            member=spec.member,
            seed=spec.env_seed,
            turns=tuple(turns),
            end=end,
            success=bool(info.get("success", False)),
            final_observation=in_words(observation),
            history=self.history,
            info=_scalars(info) | self._compared(spec, conversation, turns),
            frames=_complete(frames),
        )

    @abstractmethod
    def prompt(self, observation: Observation, info: Mapping[str, Any], turns: list[Turn]) -> IntArray:
        """Token ids that the policy gets next; those of pictures are below zero (``roll.data.identity``)."""

    def said(self, observation: Observation, info: Mapping[str, Any], turns: list[Turn]) -> Sequence[Message] | None:
        """Messages since the policy's last turn; ``None`` where prompts are no whole conversation."""
        return None

    def _compared(self, spec: EpisodeSpec, conversation: Conversation | None, turns: list[Turn]) -> dict[str, int]:
        if self.watch is None or conversation is None:
            return {}
        return self.watch.compare(f"{spec.tag} group {spec.group_id} member {spec.member}", [(conversation, turns)])

    async def _turn(
        self,
        env: AsyncEnv,
        generate: GenerateFn,
        spec: EpisodeSpec,
        turns: list[Turn],
        prompt_ids: IntArray,
        observation: Observation,
        info: Mapping[str, Any],
    ) -> tuple[Turn, Observation, dict[str, Any], EpisodeEnd | None]:
        room = self.limits.sequence_length - len(prompt_ids)
        params = replace(
            self.params,
            max_new_tokens=min(self.params.max_new_tokens, room),
            temperature=0.0 if spec.greedy else self.params.temperature,
            first_token_temperature=None if spec.greedy else self.params.first_token_temperature,
            seed=derive_seed(spec.sampling_seed, len(turns)),
        )
        request_id = f"{spec.tag}-{spec.group_id}-{spec.member}-{len(turns)}"
        recorded = spec.recorded[len(turns)] if len(turns) < len(spec.recorded) else ()
        items = _items(prompt_ids, observation, info, turns)
        completion = await generate(GenerateRequest(request_id, prompt_ids, params, recorded, items))
        if completion.finish_reason is FinishReason.ABORT:
            raise EpisodeAbortedError(f"request {request_id} was aborted")
        if spec.recorded and completion.runs != recorded:
            raise ReplayError(
                f"{request_id} was sampled with (version, tokens) {completion.runs}, in the recorded run with "
                f"{recorded}: its model, data, seed or machine differs, or something failed in one of the runs"
            )
        text = self.renderer.decode(completion.token_ids)
        next_observation, reward, terminated, truncated, next_info = await env.step(text)
        penalty = float(next_info.get("penalty", 0.0))
        turn = Turn(
            prompt_ids=prompt_ids,
            completion=completion,
            text=text,
            observation=in_words(observation),
            action=next_info.get("action"),
            task_reward=float(next_info.get("task_reward", float(reward) - penalty)),
            penalty=penalty,
            state_key=str(info["state_key"]) if "state_key" in info else state_of(observation),
            items=items,
        )
        ended = EpisodeEnd.TERMINATED if terminated else EpisodeEnd.TRUNCATED if truncated else None
        return turn, next_observation, next_info, ended

    def continued(self, last: Turn, messages: Sequence[Message], info: Mapping[str, Any]) -> IntArray:
        """The conversation so far, as it was sampled, and what has been said since.

        Raises:
            EnvError: the chat template refuses it.
        """
        with _told_refusal():
            added = self.renderer.continuation(messages, last.completion.token_ids, info.get("tools"))
        return np.concatenate([last.prompt_ids, last.completion.token_ids, added])

    def _check_first_prompt(self, prompt_ids: IntArray, room: int, tag: str) -> None:
        if len(prompt_ids) > self.limits.prompt_length or room < 1:
            raise PromptTooLongError(
                f"{tag}: the first prompt has {len(prompt_ids)} tokens, but prompt_length is "
                f"{self.limits.prompt_length} and sequence_length {self.limits.sequence_length}"
            )

    def _fill(self, template: str, observation: Observation, info: Mapping[str, Any], turns: list[Turn]) -> Observation:
        """A template with its placeholders replaced; parts where the observation has pictures and is in it."""
        return filled(template, observation, lambda text: self._fill_text(text, in_words(observation), info, turns))

    def _fill_text(self, template: str, observation: str, info: Mapping[str, Any], turns: list[Turn]) -> str:
        played = len(turns) - info.get(TOOL_TURNS, 0)
        turn, left = str(played + 1), str(self.config.max_steps - played)
        values = {
            "observation": observation,
            "current_observation": observation,
            "turn": turn,
            "turn_idx": turn,
            "current_step": turn,
            "step_count": str(played),
            "max_turns": str(self.config.max_steps),
            "turns_left": left,
            "actions_left": left,
            "history": self._history_text(turns),
            "history_length": str(min(len(turns), self.config.history_length)),
            "max_response_length": str(self.params.max_new_tokens),
            "env_instruction": str(info.get("env_instruction", "")),
        }
        return _PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), template)

    def _history_text(self, turns: list[Turn]) -> str:
        shown = turns[max(0, len(turns) - self.config.history_length) :]
        return "\n".join(f"{turn.observation}\n{turn.text}" for turn in shown)

    def opening(self, observation: Observation, info: Mapping[str, Any], turns: list[Turn]) -> list[dict[str, Any]]:
        """The system and the user message that a conversation begins with."""
        system = self._fill(_or(self.config.agent_system_template, "{env_instruction}"), observation, info, turns)
        user = self._fill(_or(self.config.agent_template, "{observation}"), observation, info, turns)
        return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": user}]


class StepEnvManager(EnvManager):
    """Each turn is its own sample: system text and current observation, with ``history_length`` turns as text."""

    history = False

    def prompt(self, observation: Observation, info: Mapping[str, Any], turns: list[Turn]) -> IntArray:
        return self.renderer.prompt(self.opening(observation, info, turns))


class TrajEnvManager(EnvManager):
    """The episode is one conversation; sampled ids are kept, and only new text is tokenised."""

    history = True

    def prompt(self, observation: Observation, info: Mapping[str, Any], turns: list[Turn]) -> IntArray:
        said = self.said(observation, info, turns)
        if turns:
            return self.continued(turns[-1], said, info)
        with _told_refusal():
            return self.renderer.prompt(said, info.get("tools"))

    def said(self, observation: Observation, info: Mapping[str, Any], turns: list[Turn]) -> Sequence[Message]:
        if not turns:
            return self.opening(observation, info, turns)
        if "messages" in info:
            messages: Sequence[Message] = info["messages"]
            return messages
        user = self._fill(_or(self.config.agent_template, "{observation}"), observation, info, turns)
        return [{"role": "user", "content": user}]


@contextmanager
def _told_refusal() -> Iterator[None]:
    """Makes a failure of the episode of whatever the chat template raises: what is said, or which tools there are, must
    not end the run."""
    try:
        yield
    except Exception as error:
        raise EnvError(f"the chat template cannot render the conversation: {describe_error(error)}") from error


def _items(
    prompt_ids: IntArray, observation: Observation, info: Mapping[str, Any], turns: Sequence[Turn]
) -> tuple[Item, ...]:
    """The pictures of a prompt, each once: of the observation, of messages, or of earlier turns."""
    if prompt_ids.min(initial=0) >= 0:
        return ()
    known = [*items_in(observation), *items_of(info.get("messages", ()))]
    known += turns[-1].items if turns else ()
    if "prompt" in info:
        known += items_of(info["prompt"].messages)
    return tuple(dict.fromkeys(item for _, item in items_along(prompt_ids, known)))


def _scalars(info: Mapping[str, Any]) -> dict[str, Any]:
    """Small values of an info, without the instruction, which is the same in every one."""
    return {
        key: value
        for key, value in info.items()
        if isinstance(value, bool | int | float | str) and key != "env_instruction"
    }


def _complete(frames: Sequence[Frame | None]) -> tuple[Frame, ...]:
    """All of the pictures, or none when one is missing."""
    shown = tuple(frame for frame in frames if frame is not None)
    return shown if len(shown) == len(frames) else ()


def _or(template: str | None, default: str) -> str:
    return default if template is None else template


ENV_MANAGERS: Registry[type[EnvManager]] = Registry("environment manager")
ENV_MANAGERS.register("step", StepEnvManager)
ENV_MANAGERS.register("traj", TrajEnvManager)
