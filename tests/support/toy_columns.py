"""Three toy columns on their whole way, for ``tests/integration/test_toy_columns.py``: run in a copy of ``roll`` that
declares them.

The generator tells how surprised it was by each token, a grade of the whole answer, and a picture that it drew.
"""

import asyncio
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roll.agentic.env.base import StepResult, TextEnv
from roll.algorithms.types import LossContext, LossOutput, TokenScores
from roll.configs.env import CustomEnvConfig
from roll.data.batch import Batch
from roll.data.columns import Item, Records
from roll.data.renderer import ChatRenderer
from roll.data.requests import Completion, FinishReason, GenerateRequest, SamplingParams
from roll.distributed.strategy import STRATEGIES
from roll.models.tiny import make_tiny_model, make_tokenizer
from roll.rollout.env_manager import EpisodeSpec, LengthLimits, TrajEnvManager
from roll.rollout.env_runner import EnvRunner
from roll.rollout.rows import groups_to_batch
from roll.rollout.types import Collected, RolloutGroup, Trajectory
from roll.rollout.workers import FlatGroups
from tests.support.steps import usual_step
from tests.support.trainers import make_context

TOKENIZER = make_tokenizer()
PICTURES = [bytes([number]) * 1000 for number in range(2)]


class Twice(TextEnv):
    """Two turns."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.turn = 0
        return "Go.", {}

    def step(self, action: str) -> StepResult:
        self.turn += 1
        return usual_step("On.", action, self.turn, task_reward=1.0, terminated=self.turn == 2)


def surprise(ids: Any) -> Any:
    return (ids % 7).astype(np.float32) if isinstance(ids, np.ndarray) else (ids % 7).float()


async def generate(request: GenerateRequest) -> Completion:
    """The toy generator: what it returns travels as between processes."""
    words = "Up" if (request.params.seed or 0) % 2 else "Down"
    ids = np.array([*TOKENIZER.encode(words), TOKENIZER.eos_token_id], dtype=np.int64)
    completion = Completion(
        request.request_id,
        ids,
        np.full(len(ids), -1.0, dtype=np.float32),
        FinishReason.STOP,
        np.zeros(len(ids), dtype=np.int64),
        # place: the generator
        **{
            "surprise": surprise(ids),
            "grade": float(len(request.prompt_ids)),
            "pictures": (Item(np.frombuffer(PICTURES[words == "Up"], dtype=np.uint8)),),
        },
    )
    return next(iter(pickle.loads(pickle.dumps(Records.of(Completion, [completion])))))


micro_batches: list[int] = []
"""Rows of each."""


def loss(scores: TokenScores, batch: Any, context: LossContext) -> LossOutput:
    """The toy loss: it takes all three columns of a micro-batch."""
    assert scores.logprobs_T is not None
    # place: the loss
    weights_T = batch.surprise_T * batch.grade_B[batch.rows_T]
    bright_B = torch.tensor([float(sum(int(item.data.sum()) for item in items)) for items in batch.pictures_I])
    micro_batches.append(batch.num_sequences)
    assert torch.equal(batch.surprise_T, torch.where(batch.loss_mask_T, surprise(batch.tokens_T), 0.0))
    return LossOutput(-(scores.logprobs_T * weights_T * (1 + bright_B[batch.rows_T])).sum() / context.num_tokens)


def rollout() -> list[RolloutGroup]:
    """Two groups, sent to the driver."""
    manager = TrajEnvManager(
        CustomEnvConfig(env_type="twice"), ChatRenderer(TOKENIZER), SamplingParams(), LengthLimits(100, 400)
    )

    def episode(group: int, member: int) -> Trajectory:
        spec = EpisodeSpec("A", group, member, 5, 10 * group + member)
        return asyncio.run(manager.run_episode(EnvRunner(Twice, timeout=5, instant=True), generate, spec))

    groups = [RolloutGroup(number, "A", tuple(episode(number, member) for member in range(3))) for number in range(2)]
    return list(pickle.loads(pickle.dumps(FlatGroups.of(groups))))


def main(folder: Path) -> None:
    groups = rollout()
    Collected(groups[:1], groups[1:]).save(folder / "resume")  # as a checkpoint does
    saved = (folder / "resume" / "rollouts.safetensors").read_bytes()
    assert all(saved.count(picture) <= 1 for picture in PICTURES), "a picture is kept once"
    resumed = Collected.load(folder / "resume")
    batch: Batch = pickle.loads(pickle.dumps(groups_to_batch(resumed.groups + resumed.rejected, ["A"])))
    whole: Any = batch
    last = [t.turns[-1].completion for g in groups for t in g.trajectories]
    assert whole.grade_B.tolist() == [each.grade for each in last]  # type: ignore[attr-defined]
    shown = {item.hash: item for items in whole.pictures_I for item in items}
    assert all(shown[item.hash] is item for items in whole.pictures_I for item in items), "rows share their pictures"
    assert sorted(item.data.tobytes() for item in shown.values()) <= PICTURES
    make_tiny_model(folder / "tiny", seed=0)
    for packing in (False, True):
        train(batch, folder / "tiny", packing=packing)
    print("arrived")


def train(batch: Batch, model: Path, *, packing: bool) -> None:
    """A trainer's step in three micro-batches."""
    worker = {"use_sequence_packing": packing}
    trainer = STRATEGIES.get("fsdp2_train")(make_context(model, "fsdp2_train", worker=worker))
    trainer.setup()
    micro_batches.clear()
    metrics = trainer.train_step(batch, loss)
    assert micro_batches == [2, 2, 2] and metrics["actor/loss"] > 0 and metrics["actor/grad_norm"] > 0, metrics


if __name__ == "__main__":
    main(Path(sys.argv[1]))
