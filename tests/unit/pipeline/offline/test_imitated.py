"""What a distillation learns of conversations, and the loss on it."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from roll.algorithms.distillation import build_distill_loss
from roll.algorithms.quantities import Divergence, hidden_states, logprobs
from roll.algorithms.types import LossContext
from roll.configs.distill import DistillConfig
from roll.data.renderer import ChatRenderer
from roll.models.heads import load_output_layer
from roll.models.scoring import TokenScorer, score_batch
from roll.models.tiny import make_tiny_model
from roll.pipeline.offline.pipeline import load_sft_data
from roll.pipeline.teachers import with_teacher
from tests.support.imitation import Imitator

TALKS = [
    [("system", "S"), ("user", "3+4="), ("assistant", "7")],
    [("user", "Up?"), ("assistant", "Down"), ("user", "and"), ("assistant", "Left")],
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("student", 1), ("teacher", 2)):
        make_tiny_model(folder / name, seed=seed)
    return folder / "student", folder / "teacher"


@torch.no_grad()
def oracle(student: Imitator, teacher: Imitator, *, on_prompt: bool) -> float:
    """``0.75 KL(teacher || student) + 0.25 NLL`` in float64, from the text."""
    found: list[Tensor] = []
    for talk in TALKS:
        ids, said = student.said(talk)
        targets = torch.tensor(
            range(1, said[-1] + 1) if on_prompt else said
        )  # what follows the last answer is no sample's
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
    want = oracle(student, teacher, on_prompt=on_prompt)
    rows = [{"talk": [{"role": role, "content": text} for role, text in talk]} for talk in TALKS]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DistillConfig.model_validate(
        {
            "distill_on_prompt": on_prompt,
            "distill_loss_weight": 0.75,
            "actor_train": {"data_args": {"file_name": str(tmp_path / "talks.jsonl"), "messages": "talk"}},
        }
    )
    batch = load_sft_data(config, config.actor_train.data_args, ChatRenderer(student.tokenizer)).batch
    said = score_batch(TokenScorer(teacher.model.float(), needs=(logprobs, hidden_states)), batch)
    width = len(student.model.get_output_embeddings().weight)
    layer = load_output_layer(str(models[1]), torch.float32).rows(0, width)
    divergence = Divergence(config.divergence, 1.0, str(models[1]), layer=layer)
    scorer = TokenScorer(student.model.float(), needs=(logprobs, divergence))
    batch = with_teacher(batch, said, config.divergence)
    found = build_distill_loss(config)(score_batch(scorer, batch), batch, LossContext.of(batch))
    assert float(found.loss) == pytest.approx(want, rel=1e-5)
