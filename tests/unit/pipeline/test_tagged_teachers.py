"""Teachers, to float64: each row is judged by the one of its tag, and the loss of a distillation on what they say."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config

from roll.algorithms.distillation import NO_CHUNK, build_distill_loss, teacher_metrics, teacher_term
from roll.algorithms.quantities import Divergence, TopTokens, hidden_states, logprobs
from roll.algorithms.types import LossContext, TokenScores
from roll.configs.distill import DistillConfig
from roll.configs.rl import RLConfig
from roll.data.batch import Batch
from roll.data.prompts import Prompt
from roll.data.renderer import ChatRenderer
from roll.models.heads import load_output_layer
from roll.models.scoring import TokenScorer, score_batch
from roll.models.tiny import make_tiny_model
from roll.pipeline.offline.pipeline import load_sft_data
from roll.pipeline.teachers import PrivilegedTeacher, TaggedTeachers, TeacherPrompts, with_teacher
from tests.support.batches import batch_of
from tests.support.families import tiny_model
from tests.support.imitation import Imitator
from tests.support.lines import write_lines
from tests.support.pictured import plain_logprobs
from tests.support.sizes import sizes

SIZES = Qwen2Config(**sizes(37, 16, 24, 2, 2, 1), initializer_range=0.3)
TAGS = torch.tensor([0, 2, 1, 0, 1])


class ThreeTags(RLConfig):
    """A configuration whose samples have the tags of ``TAGS``."""

    @property
    def tags(self) -> list[str]:
        return ["x", "y", "z"]


class Here:
    """A role in this process; ``chunks`` makes those of one that reads other tokens."""

    def __init__(self, scorer: TokenScorer, chunks: Callable[[Batch], Tensor] | None = None) -> None:
        self.scorer, self.chunks, self.seen = scorer, chunks, 0

    def submit_logprobs(self, batch: Batch, rows: Tensor | None = None) -> Callable[[], TokenScores]:
        self.seen += batch.num_sequences
        found = score_batch(self.scorer, batch)
        if self.chunks is not None:
            found = TokenScores(found.logprobs_T, chunk_T=torch.where(batch.loss_mask_T, self.chunks(batch), NO_CHUNK))
        return lambda: found


def make_batch() -> Batch:
    torch.manual_seed(0)
    batch = batch_of(torch.randint(0, 37, (25,)).split([4, 6, 3, 5, 7]), prompts=2, tag_B=TAGS)
    return batch.replace(rollout_logprobs_T=-torch.rand(25) * batch.loss_mask_T)


@torch.no_grad()
def oracle(model: PreTrainedModel, batch: Batch, row: int) -> Tensor:
    one = batch.select([row])
    logprobs_T = plain_logprobs(model.double(), one)
    model.float()
    return logprobs_T[one.loss_mask_T]


def test_each_row_is_scored_by_the_teacher_of_its_tag():
    batch, models = make_batch(), {"a": tiny_model(SIZES, 1), "b": tiny_model(SIZES, 2)}
    here = {name: Here(TokenScorer(model)) for name, model in models.items()}
    teachers = TaggedTeachers(here, {"a": [0, 2], "b": [1]}, {"a": 0.3, "b": 1.0})
    scores = teachers.submit_logprobs(batch)()
    assert (here["a"].seen, here["b"].seen) == (3, 2) and scores.chunk_T is None
    want = [oracle(models["b" if tag == 1 else "a"], batch, row) for row, tag in enumerate(TAGS.tolist())]
    found = scores.logprobs_T[batch.loss_mask_T].split([len(each) for each in want])
    for row, each in enumerate(want):
        torch.testing.assert_close(found[row].double(), each, rtol=1e-5, atol=1e-5)
    assert not scores.logprobs_T[~batch.loss_mask_T].any()
    judged = batch.replace(teacher_logprobs_T=scores.logprobs_T)
    metrics = teachers.metrics(judged)
    sampled = [each[each != 0].double() for each in batch.rollout_logprobs_T.split(batch.lengths_B.tolist())]
    for name, rows in (("a", [0, 1, 3]), ("b", [2, 4])):
        own = torch.cat([want[row] for row in rows])
        gap = torch.cat([sampled[row] for row in rows]) - own
        assert metrics[f"teacher/{name}/logprob"] == pytest.approx(float(own.mean()), rel=1e-5)
        assert metrics[f"teacher/{name}/reverse_kl"] == pytest.approx(float(gap.mean()), rel=1e-5)
    assert len(metrics) == 4
    none = judged.select([2])
    alone = teachers.submit_logprobs(none)()
    assert set(teachers.metrics(none)) == {"teacher/b/logprob", "teacher/b/reverse_kl"}
    torch.testing.assert_close(alone.logprobs_T[none.loss_mask_T].double(), want[2], rtol=1e-5, atol=1e-5)
    assert here["a"].seen == 3, "it has nothing to score"


def test_the_terms_of_several_teachers_of_a_row_add_up():
    batch, models = make_batch(), {"all": tiny_model(SIZES, 1), "some": tiny_model(SIZES, 2)}
    weights = {"all": 0.3, "some": 0.7}
    here = {name: Here(TokenScorer(model)) for name, model in models.items()}
    teachers = TaggedTeachers(here, {"all": [0, 1, 2], "some": [1]}, weights)
    scores = teachers.submit_logprobs(batch)()
    judged = batch.replace(teacher_logprobs_T=scores.logprobs_T)
    tags = {"all": [], "some": ["y"]}
    own = {name: {"pretrain": name, "opd_kl_coef": weights[name], "tag_included": tags[name]} for name in tags}
    found = teacher_term(judged, ThreeTags(teachers=own).teacher_term)
    for row, tag in enumerate(TAGS.tolist()):
        one = judged.select([row])
        policy = one.rollout_logprobs_T[one.loss_mask_T].double()
        judging = ("all", "some") if tag == 1 else ("all",)
        want = sum(weights[name] * (oracle(models[name], batch, row) - policy) for name in judging)
        place = batch.token_index(torch.tensor([row]))
        torch.testing.assert_close(found[place][one.loss_mask_T], want, rtol=1e-5, atol=1e-5)
    metrics = teachers.metrics(judged)
    alone = torch.cat([oracle(models["all"], batch, row) for row in range(5)])
    assert metrics["teacher/all/logprob"] == pytest.approx(float(alone.mean()), rel=1e-5)


def test_rows_of_a_teacher_with_other_tokens_have_chunks_and_others_have_their_tokens():
    batch = make_batch()
    tokens = Here(TokenScorer(tiny_model(SIZES, 1)))
    chunks = Here(TokenScorer(tiny_model(SIZES, 2)), lambda batch: torch.tensor(0))
    teachers = TaggedTeachers({"a": tokens, "b": chunks}, {"a": [0, 2], "b": [1]}, {"a": 1.0, "b": 1.0})
    scores = teachers.submit_logprobs(batch)()
    judged = batch.replace(teacher_logprobs_T=scores.logprobs_T, teacher_chunk_T=scores.chunk_T)
    assert teacher_metrics(judged)["teacher/aligned"] == 1
    for row, tag in enumerate(TAGS.tolist()):
        one = judged.select([row])
        count = len(one.teacher_chunk_T[one.loss_mask_T].unique())
        assert count == (1 if tag == 1 else int(one.loss_mask_T.sum())), "a chunk, or a chunk for each token"


QUESTIONS = {4: ("3+4=", "7"), 9: ("Up?", "it is Down, not Left")}
ANSWERS = [(4, "7"), (4, "12 Up"), (9, "Down"), (4, "")]
"""Of a group; all end by themselves."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a student and a teacher."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("student", 1), ("teacher", 2)):
        make_tiny_model(folder / name, seed=seed)
    return folder / "student", folder / "teacher"


def rollouts(renderer: ChatRenderer) -> Batch:
    """Rows as the policy saw them."""
    rows = []
    for group, answer in ANSWERS:
        prompt = renderer.prompt([{"role": "user", "content": QUESTIONS[group][0]}]).tolist()
        rows.append((prompt, [*renderer.words(answer).tolist(), renderer.tokenizer.eos_token_id]))
    groups_B = torch.tensor([group for group, _ in ANSWERS])
    batch = batch_of([prompt + said for prompt, said in rows], [len(prompt) for prompt, _ in rows], group_B=groups_B)
    return batch.replace(rollout_logprobs_T=torch.zeros(batch.num_tokens))


@torch.no_grad()
def test_the_answer_is_scored_behind_the_teachers_prompt(models):
    teacher = Imitator(models[1])
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

    aligned = PrivilegedTeacher(Here(scorer, lambda batch: batch.positions_T), prompt)
    scores = aligned.submit_logprobs(batch)()
    assert (scores.chunk_T[~mask] == NO_CHUNK).all() and (scores.chunk_T[mask] != NO_CHUNK).all()
    judged = batch.replace(teacher_logprobs_T=scores.logprobs_T, teacher_chunk_T=scores.chunk_T)
    assert teacher_metrics(judged)["teacher/logprob"] == pytest.approx(float(torch.cat(want).mean()), rel=1e-5)


TALKS = [
    [("system", "S"), ("user", "3+4="), ("assistant", "7")],
    [("user", "Up?"), ("assistant", "Down"), ("user", "and"), ("assistant", "Left")],
]


@torch.no_grad()
def distilled(student: Imitator, teacher: Imitator, *, on_prompt: bool) -> float:
    """``0.75 KL(teacher || student) + 0.25 NLL`` in float64, from the text."""
    found: list[Tensor] = []
    for talk in TALKS:
        ids, said = student.said(talk)
        # What follows the last answer is no sample's.
        targets = torch.tensor(range(1, said[-1] + 1) if on_prompt else said)
        s, t = (
            each.model(torch.tensor([ids]), use_cache=False).logits[0][targets - 1].log_softmax(-1)
            for each in (student, teacher)
        )
        nll = -s.gather(1, torch.tensor(ids)[targets][:, None])[:, 0]
        found.append(0.75 * (t.exp() * (t - s)).sum(-1) + 0.25 * nll)
    return float(torch.cat(found).mean())


@pytest.mark.parametrize("on_prompt", [False, True])
def test_the_loss_is_taken_on_answers_or_on_all(models, tmp_path, on_prompt):
    student, teacher = (Imitator(path) for path in models)
    want = distilled(student, teacher, on_prompt=on_prompt)
    rows = [{"talk": [{"role": role, "content": text} for role, text in talk]} for talk in TALKS]
    write_lines(tmp_path / "talks.jsonl", rows)
    data = {"file_name": str(tmp_path / "talks.jsonl"), "messages": "talk"}
    keys = {"distill_on_prompt": on_prompt, "distill_loss_weight": 0.75, "actor_train": {"data_args": data}}
    config = DistillConfig.model_validate(keys)
    batch = load_sft_data(config, config.actor_train.data_args, ChatRenderer(student.tokenizer)).batch
    said = score_batch(TokenScorer(teacher.model.float(), needs=(logprobs, hidden_states)), batch)
    width = len(student.model.get_output_embeddings().weight)
    layer = load_output_layer(str(models[1]), torch.float32).rows(0, width)
    divergence = Divergence(config.divergence, 1.0, str(models[1]), layer=layer)
    scorer = TokenScorer(student.model.float(), needs=(logprobs, divergence))
    batch = with_teacher(batch, said, config.divergence)
    found = build_distill_loss(config)(score_batch(scorer, batch), batch, LossContext.of(batch))
    assert float(found.loss) == pytest.approx(want, rel=1e-5)
