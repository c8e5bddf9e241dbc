"""The parity matrix: every trainer and layout against plain Hugging Face in float64, on the same steps.

A ``Layout`` names a strategy, its processes and options. ``measure`` runs several of them in one group of processes and
returns how far each is from the oracle. The oracle shares no code with the strategies: it scores one sequence at a time
from the model's own logits, writes the loss out, and lets ``torch.optim.AdamW`` step in float64.
"""

import json
import math
import os
import random
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from roll.algorithms.distillation import build_distill_loss
from roll.algorithms.preferences import build_preference_loss, build_reward_loss
from roll.algorithms.quantities import BASIC, Divergence, Quantity
from roll.algorithms.types import LossFn
from roll.configs.distill import DistillLossConfig
from roll.configs.preference import PreferenceConfig, RewardLossConfig
from roll.configs.teacher import DivergenceConfig
from roll.configs.worker import WorkerConfig
from roll.data.batch import Batch
from roll.data.kept_sets import kept_item
from roll.distributed.strategy import STRATEGIES
from roll.distributed.strategy.base import StrategyContext
from roll.distributed.strategy.training.checkpoint import MODEL
from roll.distributed.strategy.training.exchange import gather
from roll.models.lora import LoraSpec
from tests.support.batches import batch_of
from tests.support.choice import needs
from tests.support.collectives import Entry, compare, counts, read, recording
from tests.support.contract import weights_of
from tests.support.experts import chosen_experts, given_experts
from tests.support.pictured import TITLES, make_filmed, make_pictured, make_pictured_groups, plain_logprobs, unmodified
from tests.support.ranks import exported, exported_adapter, run_ranks
from tests.support.sizes import FOUR_EXPERTS, sizes
from tests.support.trainers import ENTROPY_COEF, TEMPERATURE, VOCABULARY, policy_loss
from tests.support.trainers import make_context as context_of

MAX_GRAD_NORM = 0.5  # clips some of the steps
RECORD = "ROLL_PARITY_FIGURES"
"""Environment variable: a file that gets every figure as a line of JSON (``scripts/generate_strategy_docs.py``)."""
NUM_STEPS = 3 if os.environ.get(RECORD) else 2  # the tables of the documentation are of three
TEACHER_VOCABULARY, TEACHER_WIDTH = 67, 40
KD_TEMPERATURE = 1.25
LONGEST = 24
TRAINING = {
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 1,
    # Adam turns the rounding noise of a gradient that is zero in truth into whole steps; 1e-6 keeps it noise.
    "adam_epsilon": 1e-6,
    "per_device_train_batch_size": 2,
}
TOTAL_STEPS = 10
SEED = 7
FP32_BOUND = 5e-6
BF16_BOUNDS = {"logprobs": 0.05, "loss": 0.01, "grad_norm": 0.03, "weights": 0.012, "neighbour": 0.01}
"""bfloat16 keeps 8 bits of a number; weights leave rounded to it (2**-9 of up to 2), besides Adam's steps of 1e-3."""


@dataclass(frozen=True)
class Layout:
    """One row of the matrix."""

    name: str
    """Unique within its strategy, e.g. ``tp2``."""
    strategy: str
    """Registered name of a trainer."""
    world_size: int
    strategy_config: dict[str, Any] = field(default_factory=dict)
    model_args: dict[str, Any] = field(default_factory=dict)
    worker: dict[str, Any] = field(default_factory=dict)
    """Other keys of the role, such as ``use_sequence_packing``."""
    training_args: dict[str, Any] = field(default_factory=dict)
    """Such as ``per_device_train_batch_size``; the optimizer's own stay as in ``TRAINING``."""
    model: str = "qwen2"
    """One of ``make_model``'s kinds, or a folder that is there."""
    task: str = "policy"
    """What is learnt: one of ``TASKS``."""
    lora: LoraSpec | None = None
    """Trains an adapter, whose weights are then those compared."""
    saved: bool = False
    """The folder that it saves is compared, too."""
    bounds: dict[str, float] = field(default_factory=dict)
    """Other bounds than ``FP32_BOUND``, by measure, each with its reason in the layout's file."""
    slow: bool = False
    """Left to ``-m slow``: what it combines is measured in other rows, each by itself."""

    @property
    def id(self) -> str:
        return f"{self.strategy}-{self.name}"

    def bound(self, measure: str) -> float:
        default = BF16_BOUNDS[measure] if self.model_args.get("dtype") == "bf16" else FP32_BOUND
        return self.bounds.get(measure, default)


ADAPTER = LoraSpec(rank=3, alpha=8, targets=("q_proj", "v_proj", "down_proj"))
ALL_ADAPTED = LoraSpec(rank=2, alpha=4, targets=("all-linear",))
ATTENTION_ADAPTED = LoraSpec(rank=3, alpha=8, targets=("q_proj", "v_proj", "o_proj"))

MEASURES = ("logprobs", "loss", "grad_norm", "weights", "neighbour")


@dataclass
class Figures:
    """How far a layout is from the oracle: the largest absolute differences."""

    logprobs: float = math.nan
    """Over all loss tokens, before the first and after the last step; a reward model's scores there."""
    loss: float = math.nan
    """Over all steps."""
    grad_norm: float = math.nan
    """Relative, over all steps, before clipping."""
    weights: float = math.nan
    """Over all exported weights after the last step."""
    saved: float = math.nan
    """The same of the saved folder, of layouts that look at it."""
    neighbour: float = math.nan
    """Of the log-probs of other sequences, when one sequence of their micro-batches is changed."""
    seconds: float = math.nan
    """Setup and all steps, on whatever the machine was doing."""
    groups: int = 0
    """Process groups of two ranks or more on which something was entered."""
    collectives: int = 0
    """What all ranks together entered on these: every rank counts."""
    messages: int = 0
    """Sent or received, the same."""
    error: str = ""
    """Why there are no figures, or how the ranks do not fit together."""


def make_model(path: Path, kind: str) -> Path:
    """A random model of four layers with grouped-query attention; ``qwen2_scores`` is a classifier with one output."""
    import transformers

    shape = {
        **sizes(VOCABULARY, 32, 48, 4, 4, 2),
        "max_position_embeddings": 64,
        "tie_word_embeddings": kind == "qwen2",
        "initializer_range": 0.1,
        "eos_token_id": VOCABULARY - 1,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    moe = {**FOUR_EXPERTS, "norm_topk_prob": True, "head_dim": 8}
    family = {"llama": "Llama", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}.get(kind, "Qwen2")
    extra = {"qwen3": {"head_dim": 16}, "qwen3_moe": moe, "qwen2_scores": {"num_labels": 1}}.get(kind, {})
    config = getattr(transformers, f"{family}Config")(**shape, **extra)
    torch.manual_seed(0)
    head = "ForSequenceClassification" if kind == "qwen2_scores" else "ForCausalLM"
    model = getattr(transformers, f"{family}{head}")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # biases are 0 and norms 1 at first: a mistake in them would not show
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "gate.weight" in name:
                parameter.mul_(10.0)  # experts that score alike would be chosen by rounding
    model.save_pretrained(path)
    return path


def make_batch(step: int) -> Batch:
    """Nine ragged sequences; some begin with the same prompt, one has no loss token."""
    generator = torch.Generator().manual_seed(100 + step)
    lengths = torch.randint(3, LONGEST + 1, (9,), generator=generator)
    lengths[:3] = torch.tensor([12, 15, 9])
    num_tokens = int(lengths.sum())
    tokens = torch.randint(0, VOCABULARY, (num_tokens,), generator=generator)
    prompt = tokens[:6].clone()
    for start in (12, 27):
        tokens[start : start + 6] = prompt
    batch = Batch(lengths, tokens, torch.zeros(num_tokens, dtype=torch.bool))
    mask = (torch.rand(num_tokens, generator=generator) < 0.5) & (batch.positions_T > 0) & (batch.rows_T != 5)
    mask &= (batch.rows_T > 2) | (batch.positions_T >= 6)
    return batch.replace(loss_mask_T=mask, advantages_T=torch.randn(num_tokens, generator=generator))


def make_groups(step: int) -> Batch:
    """Three groups of three sequences with a prompt each, as GRPO has them: most tokens are prompts'."""
    generator = torch.Generator().manual_seed(300 + step)
    rows, prompts = [], [torch.randint(0, VOCABULARY, (size,), generator=generator) for size in (9, 12, 7)]
    for prompt in prompts:
        for size in torch.randint(1, LONGEST - 11, (3,), generator=generator).tolist():
            rows.append(torch.cat([prompt, torch.randint(0, VOCABULARY, (size,), generator=generator)]))
    advantages_T = torch.randn(sum(map(len, rows)), generator=generator)
    return batch_of(rows, [len(prompts[number // 3]) for number in range(9)], advantages_T=advantages_T)


@dataclass(frozen=True)
class Task:
    """Something to learn, and what the oracle makes of it."""

    batch: Callable[[int], Batch]
    """The sequences of a step."""
    loss: LossFn
    oracle: Callable[[Any, Batch], tuple[Tensor, float]]
    """The step's loss and the value of ``metric`` in float64, from the model's logits."""
    metric: str
    divergence: DivergenceConfig | None = None
    """What a teacher's columns in the batch are compared by."""
    scores: bool = False
    """A reward model's, of a layout's model ``qwen2_scores``."""
    pictures: bool = False
    """Of a model that takes them."""


@dataclass
class Expected:
    """What the oracle found."""

    before_T: Tensor
    after_T: Tensor
    losses: list[float]
    measured: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    told_TE: Tensor | None
    """The experts that the routers choose before the first step, of each layer in ascending order."""


@cache
def oracle(
    model_path: Path,
    lora: LoraSpec | None = None,
    task_name: str = "policy",
    frozen: tuple[str, ...] = (),
    rates: tuple[tuple[str, float], ...] = (),
    num_steps: int = NUM_STEPS,
) -> Expected:
    """Steps in float64.

    Args:
        rates: learning rates of modules, inner ones after those that they are in.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

    from roll.distributed.strategy.training.optim import learning_rate

    task = TASKS[task_name]
    kind = AutoModelForSequenceClassification if task.scores else AutoModelForCausalLM
    kind = AutoModelForImageTextToText if task.pictures else kind
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}  # fused kernels have no float64
    model: Any = kind.from_pretrained(model_path, **options)
    model = model.double() if lora is None else with_adapter(model, lora, scores=task.scores)
    for prefix in frozen:
        model.get_submodule(prefix).requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    own = {id(p): rate for name, rate in rates for p in model.get_submodule(name).parameters()}
    groups = [
        {"params": [p], "weight_decay": 0.1 if p.ndim >= 2 else 0, "own": own.get(id(p), TRAINING["learning_rate"])}
        for p in trained
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.999), eps=1e-6)
    args = WorkerConfig.model_validate({"training_args": TRAINING}).training_args
    before_T, told_TE = _oracle_scores(model, task), chosen_experts(model, task.batch(0))
    losses, measured, norms = [], [], []
    for step in range(num_steps):
        loss, value = task.oracle(model, task.batch(step))
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)))
        for group in optimizer.param_groups:
            group["lr"] = group["own"] / args.learning_rate * learning_rate(args, step, TOTAL_STEPS)
        optimizer.step()
        losses.append(loss.item())
        measured.append(value)
    after_T = _oracle_scores(model, task)
    weights = weights_of(model) if lora is None else adapter_weights(model)
    return Expected(before_T, after_T, losses, measured, norms, weights, told_TE)


def with_adapter(model: Any, lora: LoraSpec, *, scores: bool = False) -> Any:
    """The model in peft's hands, in float64, with the adapter that every trainer starts with.

    Args:
        scores: it is a classifier, whose head is trained too.
    """
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    from roll.models.lora import PREFIX, initial_value, matrix_shapes

    start = {name: initial_value(name, shape, SEED) for name, shape in matrix_shapes(model, lora).items()}
    targets = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in start}
    task: dict[str, Any] = {}
    if scores:
        task = {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
        start["base_model.model.score.weight"] = model.score.weight.detach().clone()
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, **task)
    found = get_peft_model(model, config).double()
    report = set_peft_model_state_dict(found, start)
    assert not report.unexpected_keys, report.unexpected_keys
    return found.double()


def adapter_weights(model: Any) -> dict[str, Tensor]:
    """An adapter in peft's hands under the names of a peft folder."""
    from peft import get_peft_model_state_dict

    return {name: tensor.clone() for name, tensor in get_peft_model_state_dict(model).items()}


class _Exact(TorchFunctionMode):
    """What a model's code computes in float32 whatever its weights are, norms and states above all, is in float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def exact(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = Tensor.double if func is Tensor.float else func
        return func(*map(exact, args), **{name: exact(value) for name, value in (kwargs or {}).items()})


def _oracle_rows(model: Any, batch: Batch) -> Iterator[tuple[int, Batch, Tensor]]:
    for row in range(batch.num_sequences):
        one = batch.select([row])
        with given_experts(model, one), _Exact():
            logits = model(**unmodified(one, model.config.model_type), use_cache=False).logits[0]
        yield row, one, _among_kept(logits / TEMPERATURE, one).log_softmax(-1)


def _oracle_loss(model: Any, batch: Batch) -> tuple[Tensor, float]:
    gain, entropies = torch.zeros((), dtype=torch.float64), 0.0
    for _, one, logprobs in _oracle_rows(model, batch):
        for position in one.loss_mask_T.nonzero().flatten().tolist():
            p = logprobs[position - 1]
            entropy = -(p.exp() * p).sum()
            gain = gain + one.advantages_T[position] * p[one.tokens_T[position]] + ENTROPY_COEF * entropy
            entropies += entropy.item()
    count = batch.loss_mask_T.sum()
    return -gain / count, entropies / float(count)


KEPT: dict[str, list[list[int]]] = {}
"""By an item of kept sets, what it says of the tokens from a sequence's second one on."""


def make_kept(step: int) -> Batch:
    """``make_batch`` with kept sets of up to twelve ids, and some tokens without one."""
    batch, rng, items = make_batch(step), random.Random(step), []
    for row in batch.tokens_T.split(batch.lengths_B.tolist()):
        sets = [
            list({token, *rng.choices(range(VOCABULARY), k=11)}) * (rng.random() < 0.8) for token in row[1:].tolist()
        ]
        items.append(kept_item(1, [*map(np.array, sets)]))
        KEPT[items[-1].hash] = sets
    return batch.replace(kept_I=tuple((item,) for item in items))


def _among_kept(logits: Tensor, one: Batch) -> Tensor:
    """A sequence's logits without those of the tokens that were not left."""
    gone = torch.zeros(logits.shape, dtype=torch.bool)
    for position, ids in enumerate(KEPT[one.kept_I[0][0].hash] if one.kept_I else []):
        gone[position] = bool(ids)
        gone[position, ids] = False
    return logits.masked_fill(gone, -1e30)


def make_routed(step: int) -> Batch:
    """``make_batch`` with two of four experts for each token and layer, the same for what sequences begin with; one
    sequence is left to the routers."""
    batch = make_batch(step)
    generator = torch.Generator().manual_seed(500 + step)
    experts_TE = torch.rand(batch.num_tokens, 4, 4, generator=generator).argsort(-1)[..., :2].flatten(1)
    for start in (12, 27):
        experts_TE[start : start + 6] = experts_TE[:6]
    return batch.replace(experts_TE=experts_TE.masked_fill((batch.rows_T == 4)[:, None], -1).short())


def make_routed_groups(step: int) -> Batch:
    """``make_groups`` with two of four experts for each token and layer, the same for a group's prompts."""
    batch = make_groups(step)
    generator = torch.Generator().manual_seed(600 + step)
    experts_TE = torch.rand(batch.num_tokens, 4, 4, generator=generator).argsort(-1)[..., :2].flatten(1)
    starts, cuts = batch.offsets_B.tolist(), [9, 12, 7]
    for row, start in enumerate(starts[: batch.num_sequences]):
        size, first = cuts[row // 3], starts[row // 3 * 3]
        experts_TE[start : start + size] = experts_TE[first : first + size]
    return batch.replace(experts_TE=experts_TE.short())


def make_routed_pictured(step: int, family: str) -> Batch:
    """``make_pictured`` with two of four experts for each token and layer; one sequence is left to the routers."""
    batch, generator = make_pictured(step, family), torch.Generator().manual_seed(900 + step)
    experts_TE = torch.rand(batch.num_tokens, 2, 4, generator=generator).argsort(-1)[..., :2].flatten(1)
    first, second = batch.offsets_B[1:3].tolist()
    prompt = int(batch.loss_mask_T[first:second].nonzero()[0])
    experts_TE[second : second + prompt] = experts_TE[first : first + prompt]
    return batch.replace(experts_TE=experts_TE.masked_fill((batch.rows_T == 4)[:, None], -1).short())


def make_preferences(step: int) -> Batch:
    """Five pairs, two of them about one question; the answers' lengths differ."""
    generator = torch.Generator().manual_seed(200 + step)

    def tokens(count: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (count,), generator=generator)

    questions = [tokens(count) for count in (6, 3, 9, 4)]
    questions.append(questions[0])
    answers = [tokens(count) for count in torch.randint(1, 13, (10,), generator=generator).tolist()]
    rows = [torch.cat([questions[index // 2], answer]) for index, answer in enumerate(answers)]
    ref_logprobs_T = -4 + torch.randn(sum(map(len, rows)), generator=generator)
    batch = batch_of(
        rows,
        [len(questions[index // 2]) for index in range(10)],
        pair_B=torch.arange(10) // 2,
        preferred_B=torch.rand(5, generator=generator).lt(0.5).repeat_interleave(2) ^ (torch.arange(10) % 2 == 0),
        anchor_B=torch.full((10,), 1.5),
    )
    return batch.replace(ref_logprobs_T=ref_logprobs_T * batch.loss_mask_T)


def make_labelled(step: int) -> Batch:
    """The same answers, good or bad by themselves."""
    return make_preferences(step).replace(pair_B=None)


PREFERENCES = {
    "sigmoid": PreferenceConfig(preference_loss="sigmoid", beta=0.5, label_smoothing=0.1, nll_coef=0.3),
    "ipo": PreferenceConfig(preference_loss="ipo", beta=0.4, length_normalized=True),
    "simpo": PreferenceConfig(preference_loss="simpo", beta=2.0, target_margin=0.7),
    "orpo": PreferenceConfig(preference_loss="orpo", beta=0.8, nll_coef=1.0),
    "kto": PreferenceConfig(preference_loss="kto", beta=0.3, desirable_weight=1.5),
}


def _oracle_preferences(model: Any, batch: Batch, name: str) -> tuple[Tensor, float]:
    """One sequence after the other; the formulas as their papers have them."""
    sigma = torch.nn.functional.logsigmoid
    logps, refs, counts = [], [], []
    for _, one, logprobs in _oracle_rows(model, batch):
        positions = one.loss_mask_T.nonzero().flatten()
        logps.append(logprobs[positions - 1, one.tokens_T[positions]].sum())
        refs.append(one.ref_logprobs_T.double().sum())
        counts.append(len(positions))
    ratios = [logp - ref for logp, ref in zip(logps, refs, strict=True)]
    losses, right = [], []
    if name == "kto":
        for ratio, good in zip(ratios, batch.preferred_B.tolist(), strict=True):
            value = 0.3 * (ratio - 1.5)
            losses.append(1.5 * (1 - sigma(value).exp()) if good else 1 - sigma(-value).exp())
            right.append(float(value > 0) == float(good))
        return torch.stack(losses).mean(), sum(right) / len(right)
    for first in range(0, len(logps), 2):
        w, x = (first, first + 1) if batch.preferred_B[first] else (first + 1, first)
        mean_w, mean_x = logps[w] / counts[w], logps[x] / counts[x]
        if name == "sigmoid":
            lead = 0.5 * (ratios[w] - ratios[x])
            losses.append(-0.9 * sigma(lead) - 0.1 * sigma(-lead) - 0.3 * mean_w)
        elif name == "ipo":
            lead = ratios[w] / counts[w] - ratios[x] / counts[x]
            losses.append((lead - 1 / (2 * 0.4)) ** 2)
        elif name == "simpo":
            lead = 2.0 * (mean_w - mean_x)
            losses.append(-sigma(lead - 0.7))
        else:
            odds_w, odds_x = (mean.exp() / (1 - mean.exp()) for mean in (mean_w, mean_x))
            lead = (odds_w / odds_x).log()
            losses.append(-mean_w - 0.8 * sigma(lead))
        right.append(float(lead > 0))
    return torch.stack(losses).mean(), sum(right) / len(right)


@cache
def teacher_weight() -> Tensor:
    """The output layer of a teacher that is wider than the model and has more ids."""
    return torch.randn(TEACHER_VOCABULARY, TEACHER_WIDTH, generator=torch.Generator().manual_seed(5))


def make_teacher(path: Path) -> None:
    """A teacher's folder, with its output layer alone: its hidden states are in the batches."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    shape = sizes(TEACHER_VOCABULARY, TEACHER_WIDTH, 48, 1, 4, 4)
    LlamaConfig(**shape, tie_word_embeddings=False).save_pretrained(path)
    save_file({"lm_head.weight": teacher_weight()}, path / "model.safetensors")


def make_taught(step: int) -> Batch:
    """``make_batch`` with a teacher's hidden states."""
    batch = make_batch(step)
    hidden_TH = 0.3 * torch.randn(batch.num_tokens, TEACHER_WIDTH, generator=torch.Generator().manual_seed(300 + step))
    return batch.replace(teacher_hidden_TH=hidden_TH * batch.loss_mask_T[:, None])


def make_taught_by_top(step: int) -> Batch:
    """The same with the teacher's six likeliest tokens of those that both have."""
    batch = make_taught(step)
    logprobs_TV = (batch.teacher_hidden_TH @ teacher_weight().T)[:, :VOCABULARY].div(KD_TEMPERATURE).log_softmax(-1)
    top_TK, ids_TK = logprobs_TV.topk(6, dim=-1)
    tail_T = (1 - top_TK.double().exp().sum(-1)).log().float()
    return batch.replace(
        teacher_hidden_TH=None, teacher_ids_TK=ids_TK.int(), teacher_top_TK=top_TK, teacher_tail_T=tail_T
    )


TAUGHT = {
    "js_divergence": (make_taught, DivergenceConfig(kd_objective="js_divergence", jsd_beta=0.3)),
    "reverse_kl": (make_taught, DivergenceConfig(kd_objective="reverse_kl")),
    "top_forward_kl": (make_taught_by_top, DivergenceConfig(kd_objective="forward_kl", logits_topk=6)),
}
DISTILL_LOSS = DistillLossConfig(distill_loss_weight=0.7)


def _oracle_distillation(model: Any, batch: Batch, name: str) -> tuple[Tensor, float]:
    """One position after the other; the formulas as their papers have them."""
    divergences, nlls = [], []
    for _, one, logprobs in _oracle_rows(model, batch):
        for position in one.loss_mask_T.nonzero().flatten().tolist():
            own = logprobs[position - 1]
            nlls.append(-own[one.tokens_T[position]])
            s = (own * TEMPERATURE / KD_TEMPERATURE).softmax(-1)
            if name == "top_forward_kl":
                chosen = one.teacher_ids_TK[position].long()
                s = torch.cat([s[chosen], 1 - s[chosen].sum().view(1)])
                t = torch.cat([one.teacher_top_TK[position], one.teacher_tail_T[position].view(1)]).double().exp()
            else:
                logits = teacher_weight().double()[:VOCABULARY] @ one.teacher_hidden_TH[position].double()
                t = (logits / KD_TEMPERATURE).softmax(-1)
            m = 0.3 * t + 0.7 * s
            divergences.append(
                {
                    "js_divergence": 0.3 * (t * (t / m).log()).sum() + 0.7 * (s * (s / m).log()).sum(),
                    "reverse_kl": (s * (s / t).log()).sum(),
                    "top_forward_kl": (t * (t / s).log()).sum(),
                }[name]
            )
    divergence, nll = torch.stack(divergences).mean(), torch.stack(nlls).mean()
    return 0.7 * divergence + 0.3 * nll, divergence.item()


def make_compared(step: int) -> Batch:
    """``make_preferences`` with a score at the end of each answer, and by how much the better one is better."""
    batch = make_preferences(step)
    last_T = batch.positions_T == batch.lengths_B[batch.rows_T] - 1
    return batch.replace(loss_mask_T=last_T, ref_logprobs_T=None, target_B=0.2 * (torch.arange(10) // 2))


def make_judged(step: int) -> Batch:
    """``make_batch`` with a target from 0 to 1 for the score in front of each loss token."""
    batch = make_batch(step)
    return batch.replace(returns_T=torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(400 + step)))


JUDGED = {
    "bradley_terry": (make_compared, "rm/accuracy"),
    "regression": (make_judged, "rm/absolute_error"),
    "process": (make_judged, "rm/accuracy"),
}


def _oracle_values(model: Any, batch: Batch) -> Iterator[tuple[Batch, Tensor]]:
    """The sequences of a batch with their scores, those of the positions in front of the loss tokens."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft, with its layers in it
    for row in range(batch.num_sequences):
        one = batch.select([row])
        with _Exact():
            hidden = model.model(input_ids=one.tokens_T[None], use_cache=False).last_hidden_state[0]
        yield one, model.score(hidden)[one.loss_mask_T.nonzero().flatten() - 1, 0]


def _oracle_reward_model(model: Any, batch: Batch, name: str) -> tuple[Tensor, float]:
    """One sequence after the other; the formulas as their papers have them."""
    found = list(_oracle_values(model, batch))
    losses, measured = [], []
    if name == "bradley_terry":
        values = [value for _, (value,) in found]
        for first in range(0, len(values), 2):
            w, x = (first, first + 1) if batch.preferred_B[first] else (first + 1, first)
            lead = values[w] - values[x]
            wanted = lead - 0.2 * (first // 2)
            losses.append((1 + (-wanted).exp()).log() + 0.1 * (values[w] + values[x]) ** 2)
            measured.append(float(lead > 0))
        return torch.stack(losses).mean(), sum(measured) / len(measured)
    for one, values in found:
        for value, target in zip(values, one.returns_T[one.loss_mask_T].double(), strict=True):
            if name == "regression":
                losses.append((value - target) ** 2)
                measured.append(abs((value - target).item()))
            else:
                p = 1 / (1 + (-value).exp())
                losses.append(-target * p.log() - (1 - target) * (1 - p).log())
                measured.append(float((p > 0.5) == (target > 0.5)))
    return torch.stack(losses).mean(), sum(measured) / len(measured)


TASKS = {
    name: Task(batch, policy_loss, _oracle_loss, "actor/entropy", pictures="pictured" in name or "filmed" in name)
    for name, batch in (
        ("policy", make_batch),
        ("grouped", make_groups),
        ("kept", make_kept),
        ("routed", make_routed),
        ("routed-groups", make_routed_groups),
        *((f"pictured {family}", partial(make_pictured, family=family)) for family in TITLES),
        ("routed-pictured qwen3_vl_moe", partial(make_routed_pictured, family="qwen3_vl_moe")),
        ("filmed qwen3_vl", make_filmed),
        *((f"pictured-groups {family}", partial(make_pictured_groups, family=family)) for family in TITLES),
    )
}
TASKS |= {
    name: Task(
        make_labelled if name == "kto" else make_preferences,
        build_preference_loss(config),
        partial(_oracle_preferences, name=name),
        "dpo/accuracy",
    )
    for name, config in PREFERENCES.items()
}
TASKS |= {
    name: Task(
        batch,
        build_distill_loss(DISTILL_LOSS),
        partial(_oracle_distillation, name=name),
        "distill/divergence",
        divergence,
    )
    for name, (batch, divergence) in TAUGHT.items()
}
TASKS |= {
    name: Task(
        batch,
        build_reward_loss(RewardLossConfig(reward_loss=name, center_coef=0.1 if name == "bradley_terry" else 0.0)),
        partial(_oracle_reward_model, name=name),
        metric,
        scores=True,
    )
    for name, (batch, metric) in JUDGED.items()
}


@torch.no_grad()
def _oracle_scores(model: Any, task: Task) -> Tensor:
    """Log-probabilities of the loss tokens of the first step, or a reward model's scores in front of them."""
    batch = task.batch(0)
    found = torch.zeros(batch.num_tokens, dtype=torch.float64)
    if task.scores:
        found[batch.loss_mask_T] = torch.cat([values for _, values in _oracle_values(model, batch)])
        return found
    for row, one, logprobs in _oracle_rows(model, batch):
        index_T = batch.token_index(torch.tensor([row]))
        for position in one.loss_mask_T.nonzero().flatten().tolist():
            found[index_T[position]] = logprobs[position - 1, one.tokens_T[position]]
    return found


def make_context(layout: Layout, model_path: Path, rank: int) -> StrategyContext:
    divergence = TASKS[layout.task].divergence
    needs: tuple[Quantity, ...] = BASIC
    if divergence is not None:
        teacher = None if divergence.logits_topk else str(model_path.parent / "teacher")
        needs += (Divergence(divergence, KD_TEMPERATURE, teacher, VOCABULARY if teacher else None),)
    return context_of(
        model_path,
        layout.strategy,
        layout.strategy_config,
        model_args=layout.model_args,
        training_args=TRAINING | layout.training_args,
        worker={"infer_batch_size": 4, "world_size": layout.world_size, **layout.worker},
        needs=needs,
        head="score" if TASKS[layout.task].scores else "lm",
        pictures=TASKS[layout.task].pictures,
        rank=rank,
        world_size=layout.world_size,
        lora=layout.lora,
        seed=SEED,
        max_grad_norm=MAX_GRAD_NORM,
        total_optimizer_steps=TOTAL_STEPS,
        sequence_length=LONGEST,
        router_replay="R2" if layout.task.startswith("routed") else "disable",
    )


def started(layout: Layout, model_path: Path, rank: int = 0) -> Any:
    """The trainer of a layout; where its package is not installed, its test is skipped."""
    needs(layout.strategy)
    trainer: Any = STRATEGIES.get(layout.strategy)(make_context(layout, model_path, rank))
    trainer.setup()
    return trainer


def own_rows(trainer: Any, batch: Batch) -> Tensor:
    return batch.split(trainer.info.dp_size)[trainer.info.dp_rank]


def share(trainer: Any, batch: Batch) -> Batch:
    """What a trainer's rank gets of a batch."""
    return batch.select(own_rows(trainer, batch))


def take_steps(trainer: Any, *steps: int) -> None:
    """The steps of the task ``policy`` with these numbers."""
    for step in steps:
        trainer.train_step(share(trainer, make_batch(step)), policy_loss)


def differ(found_T: Tensor, folder: Path) -> float:
    """How far log-probabilities of ``make_batch`` are from those by Transformers' own loading and forward pass."""
    from transformers import AutoModelForCausalLM

    model, batch = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), make_batch(0)
    return float((found_T - plain_logprobs(model, batch, TEMPERATURE).detach())[batch.loss_mask_T].abs().max())


def measure(
    layouts: list[Layout], folder: Path, *, models_in: Path | None = None, on_gpus: bool = False
) -> dict[str, Figures]:
    """Runs layouts of one world size in one group of processes, on CPUs or GPUs; figures by ``Layout.id``.

    Args:
        models_in: folder of the models, made where they are not there; what the oracle found of one counts for others.
    """
    models_in = models_in or folder
    models = {kind: models_in / kind for kind in {layout.model for layout in layouts}}
    for kind, path in models.items():
        if not path.exists():
            make_model(path, kind)
    if any(TASKS[layout.task].divergence for layout in layouts):
        make_teacher(models_in / "teacher")
    world_size = layouts[0].world_size
    assert all(layout.world_size == world_size for layout in layouts)
    try:
        run_ranks(_rank_main, world_size, layouts, models, folder, on_gpus, on_gpus=on_gpus)
    except BaseException as error:  # such as the end of a test's time, when ranks wait for each other
        for problem in compare(_records(folder, world_size)):
            error.add_note(problem.text)
        raise
    found = {layout.id: _compare(layout, models[layout.model], folder) for layout in layouts}
    records = _records(folder, world_size)
    for name, numbers in counts(records).items():
        vars(found[name]).update(numbers)
    for problem in compare(records):
        found[problem.part].error += f"\n{problem.text}"
    return found


def _records(folder: Path, world_size: int) -> dict[int, list[Entry]]:
    """What each rank entered; nothing on GPUs."""
    return {rank: read(_entered(folder, rank)) for rank in range(world_size)}


def _entered(folder: Path, rank: int) -> Path:
    """The record of what a rank enters."""
    return folder / f"entered-{rank}.jsonl"


def _rank_main(rank: int, layouts: list[Layout], models: dict[str, Path], folder: Path, on_gpus: bool) -> None:
    with recording(None if on_gpus else _entered(folder, rank)) as recorder:
        for layout in layouts:
            start, recorder.part = time.perf_counter(), layout.id
            try:
                result = _run(layout, models[layout.model], rank, folder / layout.id)
            except Exception:
                result = {"error": traceback.format_exc()}
            result["seconds"] = time.perf_counter() - start
            if rank == 0 or "error" in result:
                torch.save(result, folder / f"{layout.id}-{rank}.pt")
            if "error" in result and layout.world_size > 1:
                break  # the other ranks may be in a collective of their own; what was not run says so
    os._exit(0)  # other ranks may have failed


def measure_here(layout: Layout, folder: Path, out: Path) -> Figures:
    """Runs a layout of one rank in this process, with the models in ``folder``."""
    assert layout.world_size == 1
    path = folder / layout.model
    start = time.perf_counter()
    result = _run(layout, path, 0, out / layout.id)
    torch.save(result | {"seconds": time.perf_counter() - start}, out / f"{layout.id}-0.pt")
    return _compare(layout, path, out)


def _run(layout: Layout, model_path: Path, rank: int, out: Path) -> dict[str, Any]:
    strategy, task = started(layout, model_path, rank), TASKS[layout.task]
    first = task.batch(0)
    mine, index_T = share(strategy, first), first.token_index(own_rows(strategy, first))

    if layout.world_size > 1:
        _weights(strategy, layout)  # first of all, as a run that sends them to its generators
    result: dict[str, Any] = {"before": (index_T, _scored(strategy, mine)), "metrics": []}
    if layout.task.startswith("routed"):
        result["told"] = index_T, strategy.logprobs(mine.replace(experts_TE=None)).experts_TE
    for step in range(NUM_STEPS):
        result["metrics"].append(strategy.train_step(share(strategy, task.batch(step)), task.loss))
    result["after"] = index_T, _scored(strategy, mine)
    result["neighbour"] = _influence(strategy, mine, result["after"][1])
    result["weights"] = _weights(strategy, layout)
    if layout.saved:
        strategy.save_model(out)
        result["saved"] = {name: x for file in out.glob("*.safetensors") for name, x in load_file(file).items()}
    if hasattr(strategy, "shutdown"):
        strategy.shutdown()
    return result


def _weights(strategy: Any, layout: Layout) -> dict[str, Tensor]:
    """What the layout trains, on rank 0."""
    if TASKS[layout.task].scores and layout.lora is None:
        return {name: x.clone() for name, x in gather(strategy.model_tensors()[MODEL], [0]).items()}
    return exported(strategy) if layout.lora is None else exported_adapter(strategy)


def _scored(strategy: Any, batch: Batch) -> Tensor:
    """What the strategy says of the loss tokens; 0 elsewhere."""
    scores = strategy.logprobs(batch)
    found: Tensor = scores.logprobs_T if scores.values_T is None else scores.values_T
    return found * batch.loss_mask_T


def _influence(strategy: Any, share: Batch, before_T: Tensor) -> float:
    """How much the scores of a share's other sequences move when its first gets other tokens."""
    others_T = (share.rows_T > 0) & share.loss_mask_T
    words_T = (share.rows_T == 0) & (share.tokens_T >= 0)
    tokens_T = torch.where(words_T, (share.tokens_T + 7) % VOCABULARY, share.tokens_T)
    kept_I = share.kept_I and ((), *share.kept_I[1:])  # which other tokens are not in
    after_T = _scored(strategy, share.replace(tokens_T=tokens_T, kept_I=kept_I))
    return float((after_T - before_T)[others_T].abs().max()) if others_T.any() else 0.0


def _compare(layout: Layout, model_path: Path, folder: Path) -> Figures:
    errors = {}
    for rank in range(layout.world_size):
        file = folder / f"{layout.id}-{rank}.pt"
        if file.exists() and "error" in (found := torch.load(file, weights_only=True)):
            errors[rank] = found["error"]
    if errors or not (folder / f"{layout.id}-0.pt").exists():
        return Figures(error="\n".join(f"rank {r}: {e}" for r, e in errors.items()) or "not run: an earlier one failed")
    found = torch.load(folder / f"{layout.id}-0.pt", weights_only=True)
    prefixes = layout.model_args.get("freeze_module_prefix", "").split(",")
    rates = tuple(layout.training_args.get("learning_rate_of", {}).items())
    expected = oracle(model_path, layout.lora, layout.task, tuple(filter(None, prefixes)), rates)

    def scored(name: str, reference_T: Tensor) -> float:
        index, logprobs_T = found[name]
        return float((logprobs_T.double() - reference_T[index]).abs().max())

    if "told" in found:
        index, told_TE = found["told"]
        assert expected.told_TE is not None
        assert torch.equal(told_TE.unflatten(1, (-1, 2)).sort(-1).values.flatten(1), expected.told_TE[index])
    metrics = found["metrics"]
    assert found["weights"].keys() == expected.weights.keys(), found["weights"].keys() ^ expected.weights.keys()
    metric, area = TASKS[layout.task].metric, "reward_model" if TASKS[layout.task].scores else "actor"
    saved = found.get("saved", {})
    assert not saved or saved.keys() >= expected.weights.keys(), expected.weights.keys() - saved.keys()
    losses = [abs(m[f"{area}/loss"] - x) for m, x in zip(metrics, expected.losses, strict=True)]
    losses += [abs(m[metric] - x) for m, x in zip(metrics, expected.measured, strict=True)]
    return Figures(
        logprobs=max(scored("before", expected.before_T), scored("after", expected.after_T)),
        loss=max(losses),
        grad_norm=max(abs(m[f"{area}/grad_norm"] / x - 1) for m, x in zip(metrics, expected.norms, strict=True)),
        weights=_apart(found["weights"], expected.weights),
        saved=_apart(saved, expected.weights) if saved else math.nan,
        neighbour=found["neighbour"],
        seconds=found["seconds"],
    )


def check(layout: Layout, figures: Figures, least: float = 0.0) -> None:
    """The figures are within the layout's bounds, or the least one that counts here."""
    assert not figures.error, figures.error
    for name in (*MEASURES, *(["saved"] if layout.saved else [])):
        assert getattr(figures, name) <= max(least, layout.bound(name)), f"{name}: {as_row(figures)}"


def cases(layouts: list[Layout]) -> list[Any]:
    """Parameters of a test, of which the quick run leaves out the slow ones."""
    return [pytest.param(each, id=each.id, marks=[pytest.mark.slow] if each.slow else []) for each in layouts]


class Measured:
    """Figures of layouts. Those of one strategy and world size share their processes, quick and slow ones apart."""

    def __init__(self, layouts: list[Layout], folders: pytest.TempPathFactory, *, on_gpus: bool = False) -> None:
        self._layouts, self._folders, self._on_gpus = layouts, folders, on_gpus
        self._models = folders.mktemp("models")
        self._found: dict[str, Figures] = {}

    def of(self, layout: Layout) -> Figures:
        """Measures all of its group when the first of them is asked for."""
        needs(layout.strategy)
        if layout.id not in self._found:
            key = (layout.strategy, layout.world_size, layout.slow)
            group = [each for each in self._layouts if (each.strategy, each.world_size, each.slow) == key]
            folder = self._folders.mktemp("measured")
            self._found |= measure(group, folder, models_in=self._models, on_gpus=self._on_gpus)
        return self._found[layout.id]


def _apart(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name].cpu().double() - weight).abs().max()) for name, weight in expected.items())


def record(kind: str, figures: dict[str, Any]) -> None:
    """Keeps figures for the documentation, where it asks for them."""
    if path := os.environ.get(RECORD):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **figures}) + "\n")


def as_row(figures: Figures) -> dict[str, Any]:
    return {name: value for name, value in asdict(figures).items() if value != "" and value == value}
