"""The one ragged batch that crosses process boundaries.

Axes: B sequences, T tokens of all sequences laid end to end (``T = lengths_B.sum()``), H hidden units, E experts of a
token in all layers. A ``_T`` field (``_TH``: a vector per token) is aligned with the token it describes:
``logprobs_T[i]`` is log p(token i | the tokens before it in its sequence), ``values_T[i]`` the value of the state in
which token i was chosen. Such scores are 0 where the loss mask is 0. Nobody outside a strategy shifts by one.

Example: two sequences ``[5, 6, 7]`` and ``[8, 9]`` of which the last two and the last token were sampled::

    Batch(lengths_B=[3, 2], tokens_T=[5, 6, 7, 8, 9], loss_mask_T=[0, 1, 1, 0, 1], ...)
"""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from roll.data.columns import UNKNOWN, Column, Compact, Item, columns_of, compact, expand, is_per_token, suffix
from roll.data.stored import Places, Stored, hold, may_be_stored, read

Columns = TypeVar("Columns")


def repeated(values: Tensor, counts: Tensor) -> Tensor:
    """Each value so many times, of tensors [N] in host memory; the result is [sum of counts].

    NumPy does it in one thread. ``torch.repeat_interleave`` wakes all threads of the process for any size, which takes
    milliseconds where others use the cores.
    """
    return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))


@dataclass(frozen=True, eq=False)
class Batch:
    """B ragged sequences as flat tensors on the CPU. Optional fields are ``None`` until the step that computes them."""

    lengths_B: Tensor
    """int64: tokens per sequence, all at least 1."""
    tokens_T: Tensor
    """int64: token ids."""
    loss_mask_T: Tensor
    """bool: True on tokens that the policy sampled. Built where tokens are born, never guessed."""
    turn_T: Tensor | None = None
    """int64: the turn within the episode that a token belongs to (its prompt part included)."""
    rewards_T: Tensor | None = None
    """float32: reward on the last sampled token of each turn; 0 elsewhere."""
    group_B: Tensor | None = None
    """int64: rollout group (same start state)."""
    traj_B: Tensor | None = None
    """int64: trajectory, unique in the batch; rows of one trajectory are its separate turns, or its branches."""
    turn_B: Tensor | None = None
    """int64: index of the row within its trajectory (0 when a trajectory is one row)."""
    state_B: Tensor | None = None
    """int64: hash of the state in which the row's first turn acted; equal within a group means the same state."""
    tag_B: Tensor | None = None
    """int64: index of the environment tag."""
    scores_B: Tensor | None = None
    """float32: undiscounted episode score of the row's trajectory."""
    parts_BK: Tensor | None = None
    """float32 [B, K]: rewards of the row's trajectory that are compared apart (``gdpo_reward_keys``)."""
    baseline_B: Tensor | None = None
    """float32: score of the greedy episode of the row's group."""
    truncated_B: Tensor | None = None
    """bool: the length limit cut the row's last completion or its episode short."""
    sample_weight_B: Tensor | None = None
    """float64: the part of its sample's sampled tokens that a row holds, where samples are episodes of more than one
    row; ``None`` is 1 everywhere: a row is a sample."""
    rollout_logprobs_T: Tensor | None = None
    """float32: log-probabilities as the generation engine reported them."""
    rollout_versions_T: Tensor | None = None
    """int64: the weight version that sampled each token; 0 where the mask is 0."""
    experts_TE: Annotated[Tensor | None, Column(unset=UNKNOWN)] = None
    """int16 [T, E]: the experts that each token itself is to go through, layer by layer (``router_replay``); -1 where
    the router chooses."""
    old_logprobs_T: Tensor | None = None
    """float32: log-probabilities under the training engine before the update (PPO's old policy)."""
    on_policy_B: Tensor | None = None
    """bool: the row is trained in the first optimizer step alone: its old policy is the one that trains, and its
    ``old_logprobs_T`` are 0, as nobody computed them."""
    importance_T: Tensor | None = None
    """float32: the importance weight of each sampled token, cut, as the ranks that computed ``old_logprobs_T`` find it;
    0 where the mask was 0."""
    rejected_T: Tensor | None = None
    """bool: the sampled tokens that a filter turns down (``train_infer_correction.filters``), as those ranks find."""
    mismatch_BVK: Tensor | None = None
    """float64 [B, V, 5], with ``importance_T`` [B, V, 8] or, to divide it by its mean, [B, V, 10]: how
    ``old_logprobs_T`` and ``rollout_logprobs_T`` differ in the sampled tokens of each row, for each version that
    sampled them (``roll.algorithms.correction``)."""
    ref_logprobs_T: Tensor | None = None
    """float32: log-probabilities under the reference model."""
    teacher_logprobs_T: Tensor | None = None
    """float32: log-probabilities under the teacher of a distillation."""
    teacher_chunk_T: Tensor | None = None
    """int64: the chunk of the row's text that a teacher's log-prob is an equal part of, -1 for none;
    ``None``: the teacher has the policy's tokens (``roll.algorithms.distillation``)."""
    teacher_hidden_TH: Tensor | None = None
    """float32: the teacher's final hidden state in front of each token to learn, as ``ref_hidden_TH``."""
    teacher_ids_TK: Tensor | None = None
    """int32 [T, K]: the tokens that the teacher finds likeliest in the place of each token to learn."""
    teacher_top_TK: Tensor | None = None
    """float32 [T, K]: their log-probabilities under the teacher."""
    teacher_tail_T: Tensor | None = None
    """float32: log of the teacher's probability of all other tokens together."""
    ref_hidden_TH: Tensor | None = None
    """float32: the reference's final hidden state in front of each sampled token, from which its output layer predicts
    that token; 0 elsewhere. Only where the KL is taken over the whole vocabulary."""
    kl_T: Tensor | None = None
    """float32: KL of the training engine's policy before the update to the reference, over the vocabulary."""
    prob_square_sum_T: Tensor | None = None
    """float32: the sum of the squared probabilities that the policy before the update has in each sampled token's
    place."""
    values_T: Tensor | None = None
    """float32: the critic's value predictions."""
    advantages_T: Tensor | None = None
    """float32: advantages; 0 where the mask is 0."""
    returns_T: Tensor | None = None
    """float32: value targets; 0 where the mask is 0."""
    weights_T: Tensor | None = None
    """float32: weight of each token's policy-gradient loss; ``None`` is 1 everywhere."""
    marked_T: Tensor | None = None
    """bool: the tokens that the policy's loss treats apart (``pg_variant: kl_cov``)."""
    pair_B: Tensor | None = None
    """int64: the pair that a row is one side of. The two sides are never on different ranks or in different
    micro-batches."""
    preferred_B: Tensor | None = None
    """bool: the row is the better side of its pair; without pairs, an answer to encourage."""
    target_B: Tensor | None = None
    """float32: the score that a row should get; in pairs, by how much the better side should lead."""
    anchor_B: Tensor | None = None
    """float32: the point that a row's reward is compared with (``preference_loss: kto``)."""
    items_I: tuple[tuple[Item, ...], ...] | None = None
    """The pictures of each row, each once; ``None``: no row has one. Where they are, ``items_along`` finds."""
    kept_I: tuple[tuple[Item, ...], ...] | None = None
    """The kept sets of each row's sampled tokens, an item for each turn, which says where (``roll.data.kept_sets``):
    the log-probs of these tokens are those among their sets. ``None``: all are of the whole vocabulary."""

    def __post_init__(self) -> None:
        num_tokens = self.num_tokens
        for name, value in vars(self).items():
            if value is None:
                continue
            expected = num_tokens if is_per_token(name) else len(self.lengths_B)
            shape = (len(value),) if isinstance(value, tuple) else tuple(value.shape)
            if shape[:1] != (expected,) or len(shape) != len(suffix(name)):
                axes = ", ".join([str(expected), *suffix(name)[1:]])
                raise ValueError(f"Batch.{name}: got shape {shape}, expected ({axes})")

    @property
    def num_sequences(self) -> int:
        return len(self.lengths_B)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths_B.sum())

    @property
    def samples(self) -> Tensor:
        """int64 [samples, 1 or 2]: the rows of each sample: a pair, or a row alone.

        Raises:
            ValueError: a pair has more or fewer than two rows.
        """
        if self.pair_B is None:
            return torch.arange(self.num_sequences)[:, None]
        order = torch.argsort(self.pair_B, stable=True)
        counts = torch.unique_consecutive(self.pair_B[order], return_counts=True)[1]
        if not bool((counts == 2).all()):
            raise ValueError(f"Batch.pair_B: a pair of {int(counts[counts != 2][0])} rows, expected two of each")
        return order.view(-1, 2)

    @property
    def offsets_B(self) -> Tensor:
        """int64: index of each sequence's first token."""
        return torch.cumsum(self.lengths_B, 0) - self.lengths_B

    @property
    def rows_T(self) -> Tensor:
        """int64: the sequence that each token belongs to."""
        return repeated(torch.arange(self.num_sequences), self.lengths_B)

    @property
    def positions_T(self) -> Tensor:
        """int64: position of each token within its sequence."""
        return torch.arange(self.num_tokens) - repeated(self.offsets_B, self.lengths_B)

    def replace(self, **columns: Any) -> Batch:
        """A copy with the given fields exchanged."""
        return Batch(**{**vars(self), **columns})

    def fetched(self) -> Batch:
        """The batch with all columns, pictures and kept sets in place."""
        hold(item for rows in (self.items_I, self.kept_I) for row in rows or () for item in row)
        stored = {name: value for name, value in vars(self).items() if isinstance(value, Stored)}
        return self.replace(**dict(zip(stored, read([*stored.values()]), strict=True)))

    def only(self, columns: Collection[str]) -> Batch:
        """A copy that has of the columns per token only these, tokens and loss mask; those per row stay."""
        kept = {*columns, "tokens_T", "loss_mask_T"}
        return self.replace(**{f.name: None for f in fields(self) if is_per_token(f.name) and f.name not in kept})

    @property
    def loss_tokens_B(self) -> Tensor:
        """int64: loss tokens per sequence."""
        counts_B = np.add.reduceat(self.loss_mask_T.numpy(), self.offsets_B.numpy(), dtype=np.int64)
        return torch.from_numpy(counts_B)

    @property
    def rows_with_loss(self) -> Tensor:
        """int64: the sequences that have a loss token, in order."""
        return self.loss_tokens_B.nonzero()[:, 0]

    def with_loss_mask(self, loss_mask_T: Tensor) -> Batch:
        """The batch with fewer loss tokens; ``sample_weight_B`` are then parts of what is left of a sample.

        Args:
            loss_mask_T: bool [T], true where the mask that is there is.
        """
        batch = self.replace(loss_mask_T=loss_mask_T)
        if self.sample_weight_B is None or self.traj_B is None:
            return batch
        left_B = batch.loss_tokens_B
        _, sample_B = torch.unique(self.traj_B, return_inverse=True)
        left_S = torch.zeros(self.num_sequences, dtype=torch.int64).index_add_(0, sample_B, left_B)
        is_part_B = (self.sample_weight_B < 1) & (left_B > 0)
        return batch.replace(
            sample_weight_B=torch.where(is_part_B, left_B / left_S[sample_B].double(), self.sample_weight_B)
        )

    def select(self, rows: Tensor | Sequence[int]) -> Batch:
        """The given sequences, in the given order."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        token_index = self.token_index(rows)
        columns: dict[str, Any] = {}
        places: dict[Places, Places] = {}  # columns share them
        for name, values in vars(self).items():
            if isinstance(values, tuple):
                columns[name] = tuple(values[row] for row in rows.tolist())
            elif isinstance(values, Stored):
                if values.places not in places:
                    places[values.places] = values.places.select(rows.numpy())
                columns[name] = values.select(rows.numpy(), places[values.places])
            elif values is not None:
                columns[name] = values.index_select(0, token_index if is_per_token(name) else rows)
        return Batch(**columns)

    def token_index(self, rows: Tensor | Sequence[int]) -> Tensor:
        """int64: where the tokens of the given sequences lie in the flat fields, in the given order."""
        return token_index(torch.as_tensor(rows, dtype=torch.int64), self.lengths_B)

    def split(self, num_parts: int, linear: int | None = None, rows: Tensor | None = None) -> list[Tensor]:
        """Row indices of ``num_parts`` parts of nearly equal load (heaviest first onto the lightest part).

        Every part gets at least one sequence when there are enough, and no two differ by more than the heaviest
        sequence. Where that can be had with whole rollout groups they stay whole, since their members share a prompt;
        use ``select`` on each. Pairs are always whole.

        Args:
            rows: those to split, in the order in which parts list them; ``None``: all.
            num_parts: at least 1.
            linear: ``None`` makes tokens the load; else it is ``linear * L + L²`` of a sequence of ``L`` tokens, the
                arithmetic of a transformer and its attention with ``linear = 6 * hidden size``.
        """
        every = torch.arange(self.num_sequences) if rows is None else rows
        lengths_R = self.lengths_B[every]
        load_R = lengths_R if linear is None else lengths_R * (linear + lengths_R)
        if self.pair_B is not None:
            return [every[part] for part in _spread(self.pair_B[every], num_parts, load_R)[0]]
        heaviest = int(load_R.max()) if len(every) else 0
        if self.group_B is not None and num_parts > 1:
            parts, loads = _spread(self.group_B[every], num_parts, load_R)
            if min(loads) > 0 and max(loads) - min(loads) <= heaviest:
                return [every[part] for part in parts]
        return [every[part] for part in _spread(torch.arange(len(every)), num_parts, load_R)[0]]

    def balance(self, num_parts: int, linear: int | None = None) -> dict[str, float]:
        """Tokens of the parts, as metrics: ``global_seqlen/<figure>``.

        ``min``, ``max`` and their difference ``minmax_diff`` where rows are dealt out in their order, the same number
        to each; ``balanced_min`` and ``balanced_max`` by ``split``; ``mean``.
        """
        dealt = [int(part.sum()) for part in self.lengths_B.tensor_split(num_parts)]
        balanced = [int(self.lengths_B[part].sum()) for part in self.split(num_parts, linear)]
        figures = {
            "min": min(dealt),
            "max": max(dealt),
            "minmax_diff": max(dealt) - min(dealt),
            "balanced_min": min(balanced),
            "balanced_max": max(balanced),
            "mean": self.num_tokens / num_parts,
        }
        return {f"global_seqlen/{name}": float(value) for name, value in figures.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as numpy arrays, which Ray moves through shared memory without a copy."""
        return from_arrays, (Batch, to_arrays(vars(self)))


may_be_stored(*filter(is_per_token, columns_of(Batch)))(Batch)


def token_index(rows: Tensor, lengths_B: Tensor) -> Tensor:
    """int64: where the tokens of the given sequences lie among those of sequences of these lengths."""
    lengths = lengths_B[rows]
    shifts = (torch.cumsum(lengths_B, 0) - lengths_B)[rows] - (torch.cumsum(lengths, 0) - lengths)
    return torch.arange(int(lengths.sum())) + repeated(shifts, lengths)


def _spread(unit_R: Tensor, num_parts: int, load_R: Tensor) -> tuple[list[Tensor], list[int]]:
    """Places of the rows R of each part, and its load; rows of one unit stay together."""
    _, index_R = torch.unique(unit_R, return_inverse=True)
    weights = torch.zeros(int(index_R.max()) + 1 if len(index_R) else 0, dtype=torch.int64)
    weights.index_add_(0, index_R, load_R)
    heaviest = torch.argsort(weights, descending=True, stable=True)
    owners = []
    lightest = [(0, 0, part) for part in range(num_parts)]  # a heap: load, units, part
    for weight in weights[heaviest].tolist():
        load, units, part = lightest[0]
        heapq.heapreplace(lightest, (load + weight, units + 1, part))
        owners.append(part)
    part_of_unit = torch.zeros_like(weights)
    part_of_unit[heaviest] = torch.tensor(owners, dtype=torch.int64)
    part_R = part_of_unit[index_R]
    loads = [load for load, _, _ in sorted(lightest, key=lambda entry: entry[2])]
    return [(part_R == part).nonzero()[:, 0] for part in range(num_parts)], loads


def placeholder(batch: Batch) -> Batch:
    """One sequence of two tokens without loss, with the columns that the batch has."""
    blank: dict[str, Any] = {"lengths_B": torch.tensor([2])}
    for name, declared in columns_of(Batch).items():
        values = getattr(batch, name)
        if isinstance(values, tuple):
            blank[name] = ((),)
        elif values is not None and name not in blank:
            shape = (2 if is_per_token(name) else 1, *values.shape[1:])
            blank[name] = torch.full(shape, declared.unset, dtype=values.dtype)
    return Batch(**blank)


def to_arrays(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns to be sent: of tensors NumPy arrays (``compact``) that share their memory, others as they are."""
    found = {name: v for name, v in columns.items() if v is not None}
    return {name: compact(v.numpy()) if isinstance(v, Tensor) else v for name, v in found.items()}


def from_arrays(make: Callable[..., Columns], arrays: Mapping[str, Any]) -> Columns:
    """Its inverse. Columns are never written in place, so views of read-only memory will do."""
    with warnings.catch_warnings():
        # Arrays out of Ray's object store are read-only.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        found = {
            name: torch.from_numpy(expand(v)) if isinstance(v, np.ndarray | Compact) else v
            for name, v in arrays.items()
        }
        return make(**found)
