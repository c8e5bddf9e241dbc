"""Random episodes as nested Python lists, for oracles that share nothing with the flat layout, and their batches."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from roll.algorithms.types import LossContext, LossFn, LossOutput, TokenScores, add_metrics
from roll.data.batch import Batch


@dataclass
class Token:
    id: int  # unique in the batch: how an oracle's result finds its place
    sampled: bool
    value: float
    old_logprob: float
    ref_logprob: float
    rollout_logprob: float


@dataclass
class Turn:
    tokens: list[Token]
    reward: float
    state: int

    @property
    def sampled(self) -> list[Token]:
        return [t for t in self.tokens if t.sampled]


@dataclass
class Episode:
    group: int
    tag: int
    turns: list[Turn] = field(default_factory=list)

    @property
    def score(self) -> float:
        return sum(turn.reward for turn in self.turns if turn.sampled)

    @property
    def baseline(self) -> float:
        """The score of the group's greedy episode: any number that members share."""
        return float(np.float32(np.sin(self.group + 1)))


def lone(group: int, number: int, reward: float, tokens: int = 1, tag: int = 0, sampled: bool = True) -> Episode:
    """An episode of one turn, whose tokens have only their numbers."""
    turn = Turn([Token(100 * number + i, sampled, 0, 0, 0, 0) for i in range(tokens)], reward, 0)
    return Episode(group, tag, [turn])


def played(episodes: list[Episode]) -> list[Episode]:
    """Episodes with at least one sampled token: the others take no part."""
    return [e for e in episodes if any(turn.sampled for turn in e.turns)]


def by_group(episodes: list[Episode]) -> dict[int, list[Episode]]:
    groups: dict[int, list[Episode]] = {}
    for e in episodes:
        groups.setdefault(e.group, []).append(e)
    return groups


def to_tokens(episodes: list[Episode], numbers: Iterable[float]) -> dict[int, float]:
    """Each episode's number for all its sampled tokens."""
    each = zip(episodes, numbers, strict=True)
    return {token.id: number for e, number in each for turn in e.turns for token in turn.sampled}


def random_episodes(seed: int, max_episodes: int = 7, empty_masks: bool = True) -> list[Episode]:
    """Ragged episodes: some groups of one, some with equal rewards, unsampled tokens anywhere, some turns unsampled."""
    rng = np.random.default_rng(seed)
    episodes, next_id = [], 0
    equal_rewards = rng.random() < 0.2
    for _ in range(int(rng.integers(1, max_episodes + 1))):
        episode = Episode(group=int(rng.integers(0, 3)) * 10, tag=int(rng.integers(0, 2)))
        for _ in range(1 if equal_rewards else int(rng.integers(1, 5))):
            tokens = []
            silent = empty_masks and rng.random() < 0.1
            for _ in range(int(rng.integers(1, 7))):
                sampled = bool(rng.random() < 0.6) and not silent
                numbers = [float(np.float32(x)) for x in rng.normal(size=4)] if sampled else [0.0] * 4
                tokens.append(Token(next_id, sampled, *numbers))
                next_id += 1
            reward = 0.1 if equal_rewards else float(np.float32(rng.normal()))
            has_sampled = any(t.sampled for t in tokens)
            episode.turns.append(
                Turn(tokens, float(np.float32(reward)) if has_sampled else 0.0, int(rng.integers(0, 3)))
            )
        episodes.append(episode)
    return episodes


def to_batch(
    episodes: list[Episode], history: bool, shuffle_seed: int | None = None, branch_seed: int | None = None
) -> Batch:
    """One row per episode (``history``) or per turn; rows in a random order if a seed is given.

    With ``branch_seed``, the turns of an episode are dealt to as many as three rows that together are one sample.
    """
    rows, shares = [], []
    for index, episode in enumerate(episodes):
        numbered = list(enumerate(episode.turns))
        spans = [numbered] if history else [[turn] for turn in numbered]
        if branch_seed is not None:
            of = np.random.default_rng([branch_seed, index]).integers(3, size=len(numbered))
            spans = [[numbered[i] for i in np.flatnonzero(of == row)] for row in dict.fromkeys(of.tolist())]
        num_sampled = sum(len(turn.sampled) for turn in episode.turns)
        for row, turns in enumerate(spans):
            rows.append((index, row, episode, turns))
            shares.append(sum(len(turn.sampled) for _, turn in turns) / max(1, num_sampled))
    if shuffle_seed is not None:
        order = np.random.default_rng(shuffle_seed).permutation(len(rows))
        rows, shares = [rows[i] for i in order], [shares[i] for i in order]
    flat = [(turn, number, token) for _, _, _, turns in rows for number, turn in turns for token in turn.tokens]

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for _, _, token in flat], dtype=torch.float32)

    return Batch(
        lengths_B=torch.tensor([sum(len(turn.tokens) for _, turn in turns) for *_, turns in rows]),
        tokens_T=torch.tensor([token.id for _, _, token in flat]),
        loss_mask_T=torch.tensor([token.sampled for _, _, token in flat]),
        turn_T=torch.tensor([number for _, number, _ in flat]),
        rewards_T=torch.tensor(
            [turn.reward if turn.sampled and token is turn.sampled[-1] else 0.0 for turn, _, token in flat],
            dtype=torch.float32,
        ),
        group_B=torch.tensor([episode.group for _, _, episode, _ in rows]),
        traj_B=torch.tensor([index for index, *_ in rows]),
        turn_B=torch.tensor([row for _, row, *_ in rows]),
        state_B=torch.tensor([turns[0][1].state for *_, turns in rows]),
        tag_B=torch.tensor([episode.tag for _, _, episode, _ in rows]),
        scores_B=torch.tensor([episode.score for _, _, episode, _ in rows], dtype=torch.float32),
        parts_BK=torch.tensor([[np.sin(index), np.cos(3 * index)] for index, *_ in rows], dtype=torch.float32),
        baseline_B=torch.tensor([episode.baseline for _, _, episode, _ in rows], dtype=torch.float32),
        sample_weight_B=None if branch_seed is None else torch.tensor(shares, dtype=torch.float64),
        values_T=column("value"),
        old_logprobs_T=column("old_logprob"),
        prob_square_sum_T=torch.tensor(
            [t.sampled * np.exp(2 * t.old_logprob) for _, _, t in flat], dtype=torch.float32
        ),
        ref_logprobs_T=column("ref_logprob"),
        rollout_logprobs_T=column("rollout_logprob"),
    )


def by_token(batch: Batch, column_T: torch.Tensor) -> dict[int, float]:
    """A token column as a dictionary from token id to number."""
    return dict(zip(batch.tokens_T.tolist(), column_T.double().tolist(), strict=True))


def assert_close(batch: Batch, column_T: torch.Tensor, expected: dict[int, float], tolerance: float = 1e-5) -> None:
    """Every token has the expected number; tokens that the oracle does not name have 0."""
    for token, got in by_token(batch, column_T).items():
        want = expected.get(token, 0.0)
        assert abs(got - want) <= tolerance * max(1.0, abs(want)), (token, got, want)


def make_batch(seed: int, history: bool = True, max_episodes: int = 7) -> tuple[Batch, TokenScores]:
    """A batch with float64 columns and a policy's scores; ratios on both sides of every clip."""
    batch = to_batch(random_episodes(seed, max_episodes), history, seed)
    generator = torch.Generator().manual_seed(seed % 2**31)
    mask = batch.loss_mask_T

    def column(scale: float) -> Tensor:
        return torch.randn(batch.num_tokens, generator=generator, dtype=torch.float64) * scale * mask

    batch = batch.replace(
        advantages_T=column(1.0),
        returns_T=column(1.0),
        old_logprobs_T=column(0.7),
        ref_logprobs_T=column(0.7),
        values_T=column(1.0),
    )
    scores = TokenScores(column(0.7), column(1.0).abs(), column(1.0), column(1.0).abs())
    return batch.replace(marked_T=(torch.rand(batch.num_tokens, generator=generator) < 0.4) & mask), scores


def context(batch: Batch, mask_T: Tensor | None = None) -> LossContext:
    mask_T = batch.loss_mask_T if mask_T is None else mask_T
    counts = torch.zeros(batch.num_sequences).index_add(0, batch.rows_T, mask_T.float())
    shares = torch.ones(batch.num_sequences) if batch.sample_weight_B is None else batch.sample_weight_B
    longest = (counts / shares.clamp(min=1e-9)).max()
    return LossContext(float(mask_T.sum()), float(shares[counts > 0].sum()), float(longest))


def rows_of(batch: Batch, mask_T: Tensor) -> list[list[int]]:
    """Token indices of each row that count."""
    ends = np.cumsum(batch.lengths_B.tolist()).tolist()
    starts = [0, *ends[:-1]]
    return [[i for i in range(a, b) if mask_T[i]] for a, b in zip(starts, ends, strict=True)]


def aggregate(per_token: dict[int, float], rows: list[list[int]], mode: str) -> float:
    sums = [(sum(per_token[i] for i in row), len(row)) for row in rows if row]
    num_tokens, num_rows, longest = sum(n for _, n in sums), len(sums), max(n for _, n in sums)
    if mode == "token-mean":
        return sum(s for s, _ in sums) / num_tokens
    if mode == "token-sum":
        return sum(s for s, _ in sums)
    if mode == "seq-mean-token-sum":
        return sum(s for s, _ in sums) / num_rows
    if mode == "seq-mean-token-mean":
        return sum(s / n for s, n in sums) / num_rows
    return sum(s for s, _ in sums) / longest / num_rows


def columns_of(scores: TokenScores) -> tuple[Tensor, ...]:
    return scores.logprobs_T, scores.entropy_T, scores.values_T, scores.kl_T


def gradient(loss_fn: LossFn, scores: TokenScores, batch: Batch, ctx: LossContext) -> tuple[LossOutput, Tensor]:
    """The loss and its gradient with respect to all scores, [4, T]."""
    leaves = [t.clone().requires_grad_() for t in columns_of(scores)]
    out = loss_fn(TokenScores(*leaves), batch, ctx)
    out.loss.backward()
    return out, torch.stack([torch.zeros_like(x) if x.grad is None else x.grad for x in leaves])


def assert_any_split_adds_up(loss_fn: LossFn, scores: TokenScores, batch: Batch, parts: int, seed: int) -> None:
    """Rows dealt at random into parts have shares whose sum is the whole's loss, gradient and metrics."""
    ctx = context(batch)
    whole, whole_gradient = gradient(loss_fn, scores, batch, ctx)
    owner = np.random.default_rng(seed).integers(0, parts, batch.num_sequences)
    total, sums = 0.0, dict[str, Tensor | float]()
    pieces = torch.zeros_like(whole_gradient)
    for part in range(parts):
        rows = torch.from_numpy(np.flatnonzero(owner == part))
        if len(rows) == 0:
            continue
        index = batch.token_index(rows)
        share = TokenScores(*(t[index] for t in columns_of(scores)))
        out, piece = gradient(loss_fn, share, batch.select(rows), ctx)
        total += out.loss.item()
        pieces[:, index] += piece
        assert out.metrics.keys() == whole.metrics.keys()
        add_metrics(sums, out.metrics)
    assert total == pytest.approx(whole.loss.item(), rel=1e-10, abs=1e-12)
    torch.testing.assert_close(pieces, whole_gradient, rtol=1e-12, atol=1e-14)
    found = {name: float(value) for name, value in sums.items()}
    assert found == pytest.approx({k: float(v) for k, v in whole.metrics.items()}, rel=1e-9, abs=1e-12)
