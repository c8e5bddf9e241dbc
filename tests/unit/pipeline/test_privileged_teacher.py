"""A teacher with a prompt of its own: what it says of an answer is what Hugging Face says behind that prompt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.algorithms.distillation import NO_CHUNK, teacher_metrics
from roll.algorithms.quantities import TopTokens, hidden_states, logprobs
from roll.algorithms.types import TokenScores
from roll.data.batch import Batch
from roll.data.prompts import Prompt
from roll.data.renderer import ChatRenderer
from roll.data.teacher_prompts import TeacherPrompts
from roll.models.scoring import TokenScorer, score_batch
from roll.models.tiny import make_tiny_model
from roll.pipeline.teachers import PrivilegedTeacher
from tests.support.imitation import Imitator

QUESTIONS = {4: ("3+4=", "7"), 9: ("Up?", "it is Down, not Left")}
ANSWERS = [(4, "7"), (4, "12 Up"), (9, "Down"), (4, "")]
"""Of a group; all end by themselves."""


class Here:
    """A role in this process."""

    def __init__(self, scorer: TokenScorer, *, chunks: bool = False) -> None:
        self.scorer, self.chunks = scorer, chunks

    def submit_logprobs(self, batch: Batch, rows: Tensor | None = None) -> Callable[[], TokenScores]:
        found = score_batch(self.scorer, batch)
        if self.chunks:
            found = TokenScores(found.logprobs_T, chunk_T=torch.where(batch.loss_mask_T, batch.positions_T, NO_CHUNK))
        return lambda: found


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Imitator:
    path = tmp_path_factory.mktemp("teacher") / "tiny"
    make_tiny_model(path, seed=2)
    return Imitator(path)


def rollouts(renderer: ChatRenderer) -> Batch:
    """Rows as the policy saw them."""
    rows = []
    for group, answer in ANSWERS:
        prompt = renderer.prompt([{"role": "user", "content": QUESTIONS[group][0]}]).tolist()
        rows.append((prompt, [*renderer.words(answer).tolist(), renderer.tokenizer.eos_token_id]))
    return Batch(
        torch.tensor([len(prompt) + len(said) for prompt, said in rows]),
        torch.tensor([token for prompt, said in rows for token in prompt + said]),
        torch.tensor([mark for prompt, said in rows for mark in [False] * len(prompt) + [True] * len(said)]),
        group_B=torch.tensor([group for group, _ in ANSWERS]),
        rollout_logprobs_T=torch.zeros(sum(len(prompt) + len(said) for prompt, said in rows)),
    )


@torch.no_grad()
def test_the_answer_is_scored_behind_the_teachers_prompt(teacher: Imitator) -> None:
    renderer = ChatRenderer(teacher.tokenizer)
    writer = TeacherPrompts("{prompt} It is {solution}.", renderer, "solution")
    prompts = {
        group: Prompt(str(group), "t", ({"role": "user", "content": question},), ground_truth=solution)
        for group, (question, solution) in QUESTIONS.items()
    }
    asked: list[int] = []

    def prompt(group: int) -> np.ndarray:
        asked.append(group)
        return writer.ids(prompts[group])

    want = [
        teacher.logprobs([("user", f"{question} It is {solution}."), ("assistant", answer)])[0]
        for group, answer in ANSWERS
        for question, solution in [QUESTIONS[group]]
    ]
    batch = rollouts(renderer)
    scorer = TokenScorer(teacher.model.float(), needs=(logprobs, hidden_states, TopTokens(3)))
    wrapped = PrivilegedTeacher(Here(scorer), prompt)
    scores = wrapped.submit_logprobs(batch)()
    assert sorted(asked) == [4, 9], "once for a group"
    mask = batch.loss_mask_T
    torch.testing.assert_close(scores.logprobs_T[mask].double(), torch.cat(want), rtol=1e-5, atol=1e-5)
    assert not scores.logprobs_T[~mask].any()
    plain = score_batch(scorer, batch)
    assert (plain.logprobs_T - scores.logprobs_T)[mask].abs().max() > 1e-3, "it has read something else"
    for column in ("hidden_TH", "top_ids_TK", "tail_T"):  # of the same tokens
        assert getattr(scores, column).shape == getattr(plain, column).shape
    first = scores.top_logprobs_TK[:, 0].exp() + scores.top_logprobs_TK[:, 1:].exp().sum(1) + scores.tail_T.exp()
    torch.testing.assert_close(first[mask], torch.ones(int(mask.sum())))

    aligned = PrivilegedTeacher(Here(scorer, chunks=True), prompt)
    scores = aligned.submit_logprobs(batch)()
    assert (scores.chunk_T[~mask] == NO_CHUNK).all() and (scores.chunk_T[mask] != NO_CHUNK).all()
    judged = batch.replace(teacher_logprobs_T=scores.logprobs_T, teacher_chunk_T=scores.chunk_T)
    assert teacher_metrics(judged)["teacher/logprob"] == pytest.approx(float(torch.cat(want).mean()), rel=1e-5)
