"""Writes ``docs/models.md`` from ``roll/models/families.json``: ``make docs``, or with ``--check``.

The figures come from the tests, some twenty minutes for all of them; rows that were not run keep theirs:

    ROLL_PARITY_FIGURES=figures.jsonl python -m pytest -m "slow or not slow" tests/parity/test_{families,pictures}.py
    PYTHONPATH=. python scripts/generate_model_docs.py --figures figures.jsonl

SGLang's need its environment, in ``ROLL_SGLANG_PYTHON`` (``make test-sglang``); ``-k sglang`` runs them alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from generated import write_or_check

from roll.models.measured import FAMILIES, GENERATORS, TRAINERS, Families, load_families

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
VARIANTS = {
    "whole": "Whole",
    "cut": "Cut otherwise",
    "packed": "Packed",
    "lora": "LoRA",
    "shared": "Shared prompts",
    "routed": "Experts replayed",
    "scores": "Score head",
    "tensor parallel": "Two tensor-parallel ranks",
}
CONTRACT = "tests/generators"
COVERED = ("qwen2", "qwen3", "qwen3_moe")
"""Families that the contract of all generators is tested with, tokens and log-probabilities."""

INTRODUCTION = """\
# Models

<!-- Written by scripts/generate_model_docs.py from roll/models/families.json. Do not edit. -->

Every model that Transformers has as a causal language model can be named in `pretrain`. These families are compared
with plain Transformers in float64 by `tests/parity/test_families.py`: a tiny random model of each, with its own
windows, rotary positions, caps, routers and states, takes three optimizer steps, and log-probabilities, loss, gradient
norm, exported and saved weights must agree. A generator must choose the same greedy tokens and report their
log-probabilities. Families *with pictures* are compared by `tests/parity/test_pictures.py`, on rows with several
pictures of several sizes and turns among rows of text ([below](#pictures)).

A number is the largest difference of a log-probability in nats, in float32, over all that was compared. *refused*
means that a run ends before its first step, with this reason. *untried* means that nobody has compared it: such a run
starts with one warning. Measured with Transformers {version}; `sglang` runs in an environment of its own, last on
{sglang}.

{engines}

`hf_infer` generates with full attention, windows, and recurrent and convolution states, which it keeps per running
request; layers of another kind are refused. A model with states, or of a family that is not listed, generates a few
tokens at the start, and is refused if their log-probabilities are not those of its own forward pass: Falcon-H1 with
`mamba_rms_norm: true` is, whose norm in Transformers mixes the sequences of a decode step.
`sglang` has no windows in its classes of Llama, Mistral, Phi, Qwen and Mixtral: such a model is refused, in
validation too, where `sequence_length` is larger than its window. It does not start from a `config.json` without
entries that publishers write and Transformers does not: `full_attention_interval` (Qwen3-Next, Qwen3.5),
`moe_layer_freq` and `topk_method` (DeepSeek-V3), `partial_rotary_factor` outside `rope_parameters` (Phi-4-mini).
`vllm` and `sglang` also run `tests/generators` with Qwen2, Qwen3 and Qwen3-MoE; SGLang's in its own environment
(`make test-sglang`), see [SGLang](sglang.md).

## What was compared in the trainers

The worse of `fsdp2_train` and `deepspeed_train`. *Cut otherwise*: micro-batches by number of tokens, activations
recomputed. *Packed*: several sequences in a row. *Shared prompts*: groups whose prompt is computed once where the
model allows it. *Experts replayed*: `router_replay`. *Score head*: a reward model's. *Two tensor-parallel ranks*:
`fsdp2_train`.

{variants}

## Pictures

Where prompts have pictures, a model is loaded with its vision tower, and tower, projector and language model are
trained ([names of the parts](pictures.md#models-and-engines)); an adapter (`lora_target`) is in the language model
alone. In a run on text, the tower is neither computed with nor trained, and saved as it was: Qwen3.5 is then loaded as
the language model in it. What stands behind the layer of a tower whose output is taken, as in LLaVA, stays as it is.

- **Trainers** (`fsdp2_train`, `deepspeed_train` with ZeRO 0 to 3, `megatron_train`): padded and packed rows and shared
  prompts. A picture that is in a micro-batch several times, as in all answers of a group, goes through the tower once.
  Every micro-batch goes through the tower, one without pictures with the smallest blank, which changes nothing, so that
  ranks do not wait for each other (compared with two ranks of `fsdp2_train` and of ZeRO 3 for every family). The
  experts of Qwen3-VL-MoE may be replayed.
- **`tensor_parallel_size`** and **`ulysses_size`** of `fsdp2_train`: ranks share the layers or the rows of the language
  model, and each goes through the whole tower, whose gradients are equal on all, or add up. Tensor parallelism is
  compared for every family, Ulysses for those without states and whose tokens see none behind them: Qwen3.5 and Gemma 3
  are refused. `deepspeed_train` refuses `ulysses_size` above 1.
- **`megatron_train`**, with Qwen's families, LLaVA and Mistral: the tower is of Transformers' own modules, whole on
  each rank of the first pipeline stage; the language model is in Megatron's. Compared with two tensor-parallel ranks
  (also sequence-parallel; Qwen3.5 has one) and two pipeline stages, with Qwen2.5-VL virtual ones too; Qwen3-VL-MoE,
  LLaVA and Mistral with two tensor-parallel and two expert-parallel ranks. Qwen3-VL, with experts too, adds features
  behind its first layers, which must be in the first part of the pipeline. On a GPU the layers are Megatron-Core's own
  modules, too, not TransformerEngine's. Not with `context_parallel_size` above 1.
- **`hf_infer`**: pictures in continuous batching; equal prompts with equal pictures are computed once; requests in
  flight are computed again with their pictures where `kv_after_update` says so.
- **What is compared in a run**: two rows of the first micro-batch of each layout, one of them with pictures, with the
  model's own class and picture processor on one row at a time (`megatron_train`: its own model, with what Transformers
  makes of pictures and positions). Pixels that are not those which the row's ids were made of, pictures in each
  other's place, another grid and shifted positions end the run before its first result.
- A token that stands for pictures in the vocabulary, but was sampled by the policy, is a word like any other.
- **`vllm`**, generating and as a reference, with all families but Gemma 3, also with an adapter (`lora_target`): it
  gets the same numbers as a trainer's tower, and not the picture, so that its own resizing is passed by. Features of
  pictures, like keys and values, are never used after an update. It needs torchvision, of which there is no build
  beside the CPU build of PyTorch that this project is tested with: the comparison runs with its Python part alone
  (`tests/support/torchvision_alone`). The tokens of one of Gemma's pictures see each other both ways, which vLLM 0.32
  leaves out on a CPU without saying so; its kernels for GPUs have it, and have not been compared. Its projector of
  Mistral Small 3.1 has a norm with 1e-5, and a model with another `rms_norm_eps` is refused.
- **Folders of Qwen3-VL-MoE** are saved with the inputs of experts before their outputs, as they were published, which
  vLLM expects. Transformers reads both, and would write the other.
- **`sglang`**, generating and as a reference, with the first two families: it gets the numbers, places and positions
  that a trainer computes; its own processing is passed by. What it has computed of a beginning is known by the hash of
  each picture; requests in flight are computed again with an update, their features too. It was compared on a CPU
  alone, where the tower of Qwen3-VL needs an `intermediate_size` that is a multiple of 32.

## What a model may demand

- **Caps of attention scores** (Gemma 2): Transformers' `sdpa` leaves them out. `attn_implementation: auto` takes
  `eager` for such a model, also as a reward model; `sdpa` is refused.
- **`longrope`** (Phi-3 with 128k, Phi-4-mini): beyond `original_max_position_embeddings` the rotary frequencies of all
  rows of a micro-batch depend on its longest row, so that a larger `sequence_length` is refused.
- **`megatron_train`**: windows, sinks, latent attention, sigmoid routing and YaRN are computed by Megatron-Core's own
  modules, also on a GPU with TransformerEngine, and without `context_parallel_size`; experts with biases (gpt-oss) need
  `expert_tensor_parallel_size: 1`. The gated delta nets of Qwen3-Next and Qwen3.5, and the attention between them, are
  Transformers' own modules: without `tensor_model_parallel_size`. Rotary frequencies are those of the model's class in
  Transformers. Phi's fused layers take no adapter. The bias that DeepSeek-V3 and GLM-4.5 choose experts by stays as it
  is, as in the other trainers.
- **Recurrent states** (Qwen3-Next, Qwen3.5, Granite 4, Falcon-H1, Nemotron-H): see *Packed* above;
  [strategies](strategies.md#models-whose-sequences-can-share-a-row) has all families that can be packed.
"""


def main() -> int:
    if "--figures" in sys.argv:
        place = sys.argv.index("--figures")
        merge(Path(sys.argv[place + 1]))
        del sys.argv[place : place + 2]
    return write_or_check(lambda: {PAGE: page(load_families())}, __doc__)


def merge(figures: Path) -> None:
    """Takes what a run of the tests left into the file of all families."""
    import transformers

    from tests.support.known_families import KNOWN
    from tests.support.pictured import TITLES

    old: dict[str, Any] = {**load_families()["families"]} if FAMILIES.exists() else {}
    sglang = load_families()["sglang"] if FAMILIES.exists() else ""
    found: Families = {"transformers": transformers.__version__, "sglang": sglang, "families": {}}
    listed = [(name, known.title, known.model_type) for name, known in KNOWN.items()]
    listed += [(f"{kind} pictures", f"{title} with pictures", kind) for kind, title in TITLES.items()]
    for name, title, kind in listed:
        engines = old.get(name, {}).get("engines", {})
        if name in COVERED:
            for engine in ("vllm", "sglang"):
                engines.setdefault(engine, {})["contract"] = CONTRACT
        found["families"][name] = {"title": title, "model_type": kind, "engines": engines}
    for line in figures.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == "family":
            found["sglang"] = row.get("run", found["sglang"])
            value = {"refused": row["refused"]} if "refused" in row else short(row)
            found["families"][row["family"]]["engines"].setdefault(row["engine"], {})[row["variant"]] = value
    FAMILIES.write_text(text_of(found), encoding="utf-8")
    load_families.cache_clear()


def short(row: Mapping[str, Any]) -> dict[str, float]:
    names = ("logprobs", "loss", "grad_norm", "weights", "saved")
    return {name: float(f"{row[name]:.1e}") for name in names if name in row}


def text_of(content: Families) -> str:
    """One line for each family and engine."""
    families = []
    for name, family in content["families"].items():
        engines = ",\n".join(f"    {json.dumps(key)}: {json.dumps(each)}" for key, each in family["engines"].items())
        head = f'"title": {json.dumps(family["title"])}, "model_type": {json.dumps(family["model_type"])}'
        families.append(f'  {json.dumps(name)}: {{{head}, "engines": {{\n{engines}\n  }}}}')
    joined = ",\n".join(families)
    versions = "".join(f' "{key}": {json.dumps(content[key])},\n' for key in ("transformers", "sglang"))  # type: ignore[literal-required]
    return f'{{\n{versions} "families": {{\n{joined}\n }}\n}}\n'


def page(content: Families) -> str:
    families = content["families"].values()
    columns = (*TRAINERS, *GENERATORS)
    engines = table(
        ["Family", "`model_type`", *(f"`{name}`" for name in columns)],
        (
            [f["title"], f"`{f['model_type']}`", *(cell([f["engines"].get(name, {})]) for name in columns)]
            for f in families
        ),
    )
    trained = [[f["engines"].get(name, {}) for name in TRAINERS[:2]] for f in families]
    variants = table(
        ["Family", *VARIANTS.values()],
        (
            [f["title"], *(cell([{key: e[key]} for e in both if key in e], missing="–") for key in VARIANTS)]
            for f, both in zip(families, trained, strict=True)
        ),
    )
    versions = {"version": content["transformers"], "sglang": content["sglang"]}
    return INTRODUCTION.format(**versions, engines=engines, variants=variants)


def cell(entries: Iterable[Mapping[str, Any]], missing: str = "untried") -> str:
    """What is said of some rows: the largest figure, else why they are refused."""
    values = [value for entry in entries for value in entry.values()]
    figures = [value["logprobs"] for value in values if isinstance(value, dict) and "logprobs" in value]
    reasons = [value["refused"] for value in values if isinstance(value, dict) and "refused" in value]
    if figures:
        return f"{max(figures):.1e}"
    if reasons:
        return f"refused: {reasons[0]}"
    return f"`{CONTRACT}`" if CONTRACT in values else missing


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
