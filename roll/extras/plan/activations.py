"""Bytes of activations and logits of one forward and backward pass, counted tensor by tensor.

Widths per token: h hidden, q all queries, k all keys (and all values), i feed-forward. What autograd keeps of a layer
is read off the modules of Transformers: of a norm its input, the normalised input and the result; of attention queries,
keys, values and the result (``sdpa`` and flash attention keep no scores); of the feed-forward part the gate, its
activation, the other branch and their product. A matrix that is not trained needs no input kept.
"""

from __future__ import annotations

from roll.extras.plan.work import Layout, MicroBatch, Role
from roll.models.shapes import ModelShape

FLOAT = 4
CHUNK_LOGITS = 2**25
BYTES_PER_CHUNK_LOGIT = 256
"""``MAX_CHUNK_LOGITS`` and the same of ``roll.models.scoring``, which cannot be read without PyTorch."""
LOGIT_COPIES = {"scores": 3, "loss": 3, "entropy": 5}
"""float32 tensors as large as the logits that exist at once: log-probabilities, probabilities and their product when
scores are computed; the first two and a gradient in a loss of log-probabilities; two more in one with entropy."""


def kept_per_token(role: Role, layout: Layout) -> int:
    """Bytes that autograd keeps of one layer and token."""
    shape, c = role.shape, role.compute_bytes
    h, q, k, i = shape.hidden, shape.query, shape.key, shape.token_inner
    stream = FLOAT if layout.autocast else c
    # An adapter in float32 keeps a copy of what goes in where the model has another format, see below.
    targets = set(role.lora[1]) if role.lora and c == FLOAT else set()

    def saves(*names: str) -> bool:
        return not role.frozen or "all-linear" in targets or bool(targets.intersection(names))

    # A norm keeps its input and a factor as float32; without a gradient of its weight, not what that is multiplied by.
    norm = FLOAT * (h + 1) + (0 if role.frozen else stream * h)
    into_attention, into_mlp = saves("q_proj", "k_proj", "v_proj"), saves("gate_proj", "up_proj")
    # In autocast every matrix product makes, and keeps, a copy of its input in the other format.
    copies = (3, 2) if layout.autocast else (1, 1)
    inputs = c * h * (copies[0] * into_attention + copies[1] * into_mlp)
    total = 2 * norm + inputs
    if shape.qk_norm:
        total += FLOAT * (shape.heads + shape.kv_heads) + (q + k) * (FLOAT + (0 if role.frozen else c))
    # One number per head and token belongs to the softmax.
    total += c * (2 * q + 2 * k) + FLOAT * shape.heads + c * i * (3 + saves("down_proj"))
    if role.lora is not None:
        total += _adapter_per_token(role)
    return total // (layout.tensor * layout.sequence)


def _adapter_per_token(role: Role) -> int:
    """An adapter is float32: its input once more where the model is not, and its narrow middle."""
    assert role.lora is not None
    rank, targets = role.lora
    chosen = role.shape.adapted(targets)
    copies = sum(inputs for inputs, _ in chosen) if role.compute_bytes < FLOAT else 0
    return FLOAT * (copies + rank * len(chosen))


def backward_per_token(shape: ModelShape, number_bytes: int) -> int:
    """Bytes of gradients that exist at once within a layer beside what is not yet freed."""
    return number_bytes * (shape.token_inner + shape.hidden)


def forward_per_token(shape: ModelShape, number_bytes: int) -> int:
    """Bytes that exist at once within a layer where nothing is kept for a backward pass."""
    attention = 2 * shape.hidden + 2 * shape.query + 2 * shape.key
    return number_bytes * max(2 * shape.hidden + 3 * shape.token_inner, attention)


def training_activations(role: Role, layout: Layout, micro_batch: MicroBatch) -> tuple[int, int]:
    """Bytes that wait for the backward pass when it begins, and those that come within it, when the logits are gone."""
    shape, tokens = role.shape, micro_batch.tokens
    stream = FLOAT if layout.autocast else role.compute_bytes
    layers = -(-shape.layers // layout.stages)
    parts = layout.tensor * layout.sequence
    layer = tokens * kept_per_token(role, layout)
    if role.worker.model_args.attn_implementation == "eager":
        width = tokens // micro_batch.rows
        layer += tokens * width * shape.heads * (2 * FLOAT + role.compute_bytes) // parts
    last = tokens * (FLOAT + 2 * stream) * shape.hidden // layout.sequence
    gradients = tokens * backward_per_token(shape, stream) // parts
    if role.recomputes:
        inputs = tokens * stream * shape.hidden // layout.sequence
        return layout.stages * layers * inputs + last, layer + gradients
    return layout.stages * layers * layer + last, gradients


def logits_bytes(shape: ModelShape, loss_tokens: int, copies: int, *, gpu_bytes: int = 0, shares: int = 1) -> int:
    """Memory of the output layer's results, which are computed in chunks where they are many."""
    chunk = max(CHUNK_LOGITS, gpu_bytes // BYTES_PER_CHUNK_LOGIT)
    rows = min(loss_tokens, max(1, chunk // shape.vocabulary))
    return FLOAT * copies * rows * shape.vocabulary // shares
