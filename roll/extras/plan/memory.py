"""Memory of one worker by phase and part, in bytes: what a role keeps, and what a pass needs in addition."""

from __future__ import annotations

from dataclasses import dataclass

from roll.extras.plan.work import Layout, Lengths, MicroBatch, Role, layout_of
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


MIB, GIB = 2**20, 2**30
PROCESS_BYTES = 480 * 2**20
"""Resident memory of a process that has imported Ray, PyTorch and Transformers and computed something, on a CPU; this
and the shares below are what ``benchmarks/plan_memory.py`` measures."""
HEAP_SHARES, HEAP_BYTES = {"train": 0.6, "logprobs": 0.3}, 256 * 2**20
"""Freed memory that the C library keeps and what libraries take beside PyTorch, in parts of what a phase uses, and at
most (``roll.utils.memory.KEPT_BYTES``). The shares are fitted to measurements."""
TOKEN_BYTES = 1200
"""Of a tokenizer in memory, for each token of its vocabulary: measured with one of 49,152 (SmolLM2)."""
WORKER_BYTES = PROCESS_BYTES + 130 * 2**20
"""The same of a worker of a run, with Ray's threads, a process group and what it has received: measured in runs."""
LIGHT_BYTES = 350 * 2**20
"""Of a worker without a model: environments, rewards; and of Ray's own processes, each. An estimate."""
CONTEXT_BYTES = 700 * 2**20
"""Device memory of a CUDA context with the libraries of PyTorch. An estimate."""
PARTS = ("weights", "gradients", "moments", "activations", "logits", "kv cache", "buckets", "heap", "process")
PHASES = ("load", "sync", "rollout", "logprobs", "train")
BUCKETS_HELD = {"cpu": 2, "gpu": 1}
"""Buckets that a sender has at a time, see ``training/trainer.py``."""
SLOT_BLOCK, POSITION_BLOCK, LEAST_ROWS = 16, 64, 16
"""Of ``hf_infer``'s cache and decoding, see ``slot_cache.py`` and ``continuous_batching.py`` there."""
CPU_CACHE_SHARE = 4
"""On a CPU, vllm and sglang take at most this part of the memory for their caches."""

Parts = dict[str, int]


@dataclass(frozen=True)
class RoleMemory:
    """One worker of a role."""

    resident: Parts
    """Parts that stay between its calls."""
    phases: dict[str, Parts]
    """All that is there while it works, ``resident`` included."""

    def total(self, phase: str) -> int:
        """Bytes in a phase; those that stay, where it does nothing in it."""
        return sum(self.phases.get(phase, self.resident).values())

    def of_ranks(self, count: int) -> RoleMemory:
        """Memory of so many processes like this one, and of the one that they belong to."""

        def summed(parts: Parts) -> Parts:
            return {part: size * (count + (part == "process")) for part, size in parts.items()}

        return RoleMemory(summed(self.resident), {phase: summed(parts) for phase, parts in self.phases.items()})

    def that_works_in(self, phase: str, as_in: str) -> RoleMemory:
        """The memory of a model that is loaded and works in one phase alone, as this one does in another."""
        return RoleMemory(self.resident, {"load": self.resident, phase: self.phases[as_in]})


@dataclass(frozen=True)
class Surroundings:
    """Facts about a run that affect a role's memory."""

    process: int
    """Bytes of a process that has imported its engine: in host memory, or of its CUDA context."""
    lengths: Lengths
    on_cpu: bool = True
    bucket_bytes: int = 2**30
    max_running: int = 128
    requests: int = 128
    """Requests that a generating worker may have at the same time, before ``max_running``."""
    group: int = 1
    """Requests that share a prompt."""
    entropy: bool = False
    """The loss has a gradient of the entropy."""
    exports: bool = False
    """The role's weights go to a generator."""
    scores: bool = True
    """The role also scores samples in steps of its own."""
    truncates: bool = False
    """Sampling has ``top_k`` or ``top_p``."""
    device_bytes: int = 0
    """Memory of a device, of which external engines take a share."""

    @property
    def gpu_bytes(self) -> int:
        """The same, of a GPU alone."""
        return 0 if self.on_cpu else self.device_bytes


def trainer_memory(role: Role, around: Surroundings) -> RoleMemory:
    """A worker that takes optimizer steps, or scores samples."""
    layout = layout_of(role)
    states = _states(role, layout) | {"process": around.process}
    # Pages of the files stay mapped until a rank has read its part; they give way to whatever else needs memory.
    read = FLOAT * role.parameters // layout.weights if around.on_cpu else 0
    phases = {"load": states | {"weights": states["weights"] + read, "gradients": 0, "moments": 0}}
    if around.scores:
        phases["logprobs"] = _added(states, _scoring(role, layout, around))
    if role.trained:
        phases["train"] = _added(states, _training(role, layout, around))
    if around.exports:
        payload = FLOAT * role.adapter if role.lora else role.compute_bytes * role.parameters
        held = BUCKETS_HELD["cpu" if around.on_cpu else "gpu"] * around.bucket_bytes
        # On a GPU the moments may have left for the generator's weights.
        sending = states if around.on_cpu else states | {"moments": 0}
        phases["sync"] = _added(sending, {"buckets": min(payload, held)})
    if around.on_cpu:
        phases |= {phase: _with_heap(phases[phase], share) for phase, share in HEAP_SHARES.items() if phase in phases}
    return RoleMemory(states, phases)


def _with_heap(parts: Parts, share: float) -> Parts:
    """The same with what the C library keeps of memory that was freed."""
    used = sum(parts.values()) - parts["process"]
    return parts | {"heap": min(HEAP_BYTES, int(share * used))}


def _states(role: Role, layout: Layout) -> Parts:
    own, adapter, c = role.held, role.adapter, role.compute_bytes
    stored = c if role.frozen or layout.low_weights else FLOAT
    trained = role.updated if role.trained else 0
    moments = 2 * FLOAT + (FLOAT if layout.low_weights else 0)
    return {
        "weights": (stored * own + FLOAT * adapter) // layout.weights,
        # Those of shards exist from the backward pass to the optimizer step alone.
        "gradients": 0 if layout.gathered else FLOAT * trained // layout.gradients,
        "moments": 0 if layout.host_states else moments * trained // layout.moments,
    }


def _gathered(role: Role, layout: Layout) -> int:
    """Weights that are whole while they are used: the root's until the end, and two layers, or all that were used."""
    if not layout.gathered:
        return 0
    shape = role.shape
    root = shape.embedding * (1 if shape.tied or role.head != "lm" else 2)
    layers = shape.layer * (shape.layers if layout.keeps_gathered else min(2, shape.layers))
    return role.compute_bytes * (root + layers) // layout.tensor


def _scoring(role: Role, layout: Layout, around: Surroundings) -> Parts:
    shape, batch, c = role.shape, role.micro_batch("infer", around.lengths), role.compute_bytes
    copies = c * role.shape.active if layout.autocast else 0
    forward = batch.tokens * forward_per_token(shape, c) // (layout.tensor * layout.sequence)
    logits = 0
    if role.head == "lm":
        logits = logits_bytes(
            shape, batch.loss_tokens, LOGIT_COPIES["scores"], gpu_bytes=around.gpu_bytes, shares=layout.sequence
        )
    hidden = batch.tokens * shape.hidden * c // layout.sequence
    activations = max(hidden, forward - logits)
    if shape.tower is not None:  # it is through before the text begins
        activations = max(activations, shape.tower.forward_bytes(batch.pixels, c))
    return {"weights": _gathered(role, layout) + copies, "activations": activations, "logits": logits}


def _training(role: Role, layout: Layout, around: Surroundings) -> Parts:
    shape, batch = role.shape, role.micro_batch("train", around.lengths)
    waiting, coming = training_activations(role, layout, batch)
    if shape.tower is not None:
        stream = FLOAT if layout.autocast else role.compute_bytes
        waiting += shape.tower.kept_bytes(batch.pixels, stream, recomputes=role.recomputes)
    copies = role.compute_bytes * role.parameters if layout.autocast and not role.frozen else 0
    logits = one = 0
    if role.head == "lm":
        count = LOGIT_COPIES["entropy" if around.entropy else "loss"]
        logits = logits_bytes(shape, batch.loss_tokens, count, gpu_bytes=around.gpu_bytes, shares=layout.sequence)
        one = logits // count
    # The gradient of the output layer exists once more before it is added to the others, when most logits are gone.
    largest = 0 if role.frozen else FLOAT * shape.embedding // layout.tensor
    extra = max(0, one + largest - logits)
    if layout.gathered:  # shards of gradients, and those of the largest parts before they are scattered
        extra += FLOAT * role.updated // layout.gradients
        extra += 0 if role.frozen else (role.compute_bytes + FLOAT) * (shape.embedding + shape.layer) // layout.tensor
    return {
        "weights": _gathered(role, layout) + copies,
        "gradients": extra,
        "activations": waiting + max(0, coming - logits),
        "logits": logits,
    }


def hf_generator_memory(role: Role, around: Surroundings) -> RoleMemory:
    """A worker of ``hf_infer`` that generates (and may score)."""
    shape, c = role.shape, role.compute_bytes
    weights = c * role.parameters + FLOAT * role.adapter
    if role.lora is not None:  # the base weights of adapted layers are kept beside the merged ones
        weights += c * shape.layers * sum(inputs * outputs for inputs, outputs in shape.adapted(role.lora[1]))
    tokenizer = TOKEN_BYTES * shape.vocabulary if around.on_cpu and around.process else 0
    states = {"weights": weights, "process": around.process + tokenizer}
    running = min(around.max_running, around.requests)
    rows = max(running, LEAST_ROWS) if around.on_cpu else running
    slots, width = _blocks(rows, SLOT_BLOCK), _blocks(around.lengths.sequence, POSITION_BLOCK)
    keys = slots * width * shape.kv_bytes(c)
    cache = keys + slots * shape.states.num_bytes(c)
    # One layer's keys and values are copied to a larger place.
    grown = cache + keys // max(1, shape.attention_layers)
    prompts = -(-running // around.group)
    prompt = max(1, around.lengths.sequence - around.lengths.answer)
    options = role.worker.strategy_args.strategy_config
    prefill = max(prompt, min(prompts * prompt, options.get("max_prefill_tokens", 8192)))
    # Fewer heads of keys than of queries: attention with a mask copies them for each.
    expanded = 2 * rows * width * shape.query * c if shape.kv_heads < shape.heads else 0
    decode = rows * forward_per_token(shape, c) + expanded
    # Logits, log-probabilities, probabilities and their running sum; sorted with their places where truncated.
    drawn = rows * shape.vocabulary * (c + (3 + 8 * around.truncates) * FLOAT)
    seen = 0 if shape.tower is None else shape.tower.forward_bytes(around.lengths.pixels, c)
    rollout = {
        "activations": max(prefill * forward_per_token(shape, c), decode, seen),
        "kv cache": grown,
        "logits": drawn,
    }
    payload = FLOAT * role.adapter if role.lora else c * role.parameters
    # In host memory the model lives in the buckets: the old ones go when all of the new are there.
    arriving = payload if around.on_cpu else min(payload, around.bucket_bytes)
    kept = states | {"kv cache": cache}
    phases = {
        "load": states | {"weights": weights + shape.stored_bytes * role.parameters},
        "sync": _added(kept if around.on_cpu else states, {"buckets": arriving}),
        "rollout": _added(states, rollout),
    }
    return RoleMemory(kept, phases)


def external_generator_memory(role: Role, around: Surroundings, share: float) -> RoleMemory:
    """A worker of ``vllm`` or ``sglang``: a GPU's share for weights and cache, or a cache for all that run on a CPU.

    Args:
        share: ``gpu_memory_utilization`` or ``mem_fraction_static``.
    """
    shape, c = role.shape, role.compute_bytes
    devices = role.worker.num_gpus_per_worker
    weights = c * role.parameters // devices
    drawn = around.max_running * shape.vocabulary * 3 * FLOAT // devices
    kept = 1 if shape.latent else min(devices, shape.kv_heads)  # latent attention has no heads to divide
    least = around.lengths.sequence * shape.kv_bytes(c) // kept + shape.states.num_bytes(c) // devices
    if around.on_cpu:
        cache = min(around.device_bytes // CPU_CACHE_SHARE, min(around.max_running, around.requests) * least)
    else:
        cache = max(least, int(share * around.device_bytes) - weights - drawn)
    states = {"weights": weights, "kv cache": cache, "process": around.process}
    arriving = {"buckets": min(around.bucket_bytes, c * role.parameters)}
    # On a GPU the cache is away while weights come.
    receiving = states if around.on_cpu else states | {"kv cache": 0}
    return RoleMemory(states, {"sync": _added(receiving, arriving), "rollout": _added(states, {"logits": drawn})})


def _added(parts: Parts, more: Parts) -> Parts:
    return parts | {name: parts.get(name, 0) + count for name, count in more.items()}


def _blocks(count: int, block: int) -> int:
    return -(-count // block) * block
