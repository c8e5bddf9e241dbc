"""What a weight update would send if it sent only the bf16 elements that an optimizer step changed.

A pretrained model takes AdamW steps (fp32 weights, gradients of a policy-gradient loss on real text, clipped at 1) at
learning rates of RL; after each step its bf16 weights are compared with those before. For each rate and step:

- the share of elements that changed, and of blocks of 16, 64 and 256 elements in which any did: what a delta by whole
  blocks sends;
- the bytes of a delta by elements (of each block of 256 the number of changed ones, their places, their new values)
  beside all weights in bf16;
- CPU seconds to make and to apply it, beside a plain copy of the weights.

The delta carries a digest of the weights that it starts from and of those that it leads to. Applied to others it is
refused; applied to the right ones, the result is compared bit by bit.

    python benchmarks/weight_deltas.py --model FOLDER [--rates 1e-6,1e-5] [--steps 3]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

BLOCK = 256
BLOCKS = (16, 64, 256)
"""Elements of a block; the last is that of the delta by elements, whose places take a byte."""
ROWS, TOKENS = 4, 128


@dataclass(frozen=True)
class Delta:
    """Changed elements of a flat array of 16-bit words."""

    before: bytes
    after: bytes
    """Digests of all words."""
    counts: np.ndarray
    """uint16 [blocks]: changed words of each."""
    places: np.ndarray
    """uint8 [changed]: within their blocks, in order."""
    values: np.ndarray
    """uint16 [changed]."""

    @property
    def num_bytes(self) -> int:
        return len(self.before) + len(self.after) + self.counts.nbytes + self.places.nbytes + self.values.nbytes


def digest(words: np.ndarray) -> bytes:
    return hashlib.blake2b(words.data, digest_size=16).digest()


def make_delta(old: np.ndarray, new: np.ndarray) -> Delta:
    changed = np.flatnonzero(old != new)
    counts = np.bincount(changed // BLOCK, minlength=-(-len(new) // BLOCK)).astype(np.uint16)
    return Delta(digest(old), digest(new), counts, (changed % BLOCK).astype(np.uint8), new[changed])


def apply_delta(words: np.ndarray, delta: Delta) -> None:
    """Changes ``words`` in place.

    Raises:
        ValueError: these are not the words that the delta starts from, or the result is not what it leads to.
    """
    if digest(words) != delta.before:
        raise ValueError("a delta of other weights than those that are here")
    starts = np.repeat(np.arange(len(delta.counts), dtype=np.int64) * BLOCK, delta.counts)
    words[starts + delta.places] = delta.values
    if digest(words) != delta.after:
        raise ValueError("the result of a delta is not the weights that were sent")


def words_of(parameters: Sequence[Tensor]) -> np.ndarray:
    """uint16 [elements]: all weights in bf16."""
    parts = [parameter.detach().bfloat16().view(torch.uint16).flatten() for parameter in parameters]
    return torch.cat(parts).numpy()


def cpu_seconds(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def shares(old: np.ndarray, new: np.ndarray) -> dict[str, float]:
    different = old != new
    found = {"elements": float(different.mean())}
    for size in BLOCKS:
        found[f"blocks_of_{size}"] = float(different[: len(different) // size * size].reshape(-1, size).any(1).mean())
    return found


def compared(old: np.ndarray, new: np.ndarray) -> dict[str, float]:
    """Shares, bytes and seconds of one update, checked."""
    deltas: list[Delta] = []
    making = cpu_seconds(lambda: deltas.append(make_delta(old, new)))
    (delta,) = deltas
    received = old.copy()
    applying = cpu_seconds(lambda: apply_delta(received, delta))
    assert np.array_equal(received, new)
    other = old.copy()
    other[7] ^= 1
    try:
        apply_delta(other, delta)
    except ValueError:
        pass
    else:
        raise AssertionError("a delta of other weights was not refused")
    hashing, copying = cpu_seconds(lambda: digest(new)), cpu_seconds(lambda: np.copyto(received, new))
    seconds = {"make_s": making, "apply_s": applying, "one_digest_s": hashing, "copy_s": copying}
    return {"bytes": delta.num_bytes / new.nbytes} | shares(old, new) | seconds


def batches(model: Path, steps: int) -> list[Tensor]:
    """Token ids of this repository's documents."""
    from transformers import AutoTokenizer

    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path("docs").glob("*.md")))
    ids = AutoTokenizer.from_pretrained(model)(text[: 40 * steps * ROWS * TOKENS])["input_ids"]
    return list(torch.tensor(ids[: steps * ROWS * TOKENS]).reshape(steps, ROWS, TOKENS))


def train(path: Path, rate: float, steps: int) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    advantages_R1 = torch.tensor([1.0, -1.0] * (ROWS // 2))[:, None]
    words = words_of(parameters)
    for number, ids in enumerate(batches(path, steps), 1):
        logprobs = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
        (-(advantages_R1 * logprobs).mean()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        old, words = words, words_of(parameters)
        found = {name: float(f"{value:.3g}") for name, value in compared(old, words).items()}
        print(json.dumps({"rate": rate, "step": number} | found), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a pretrained model")
    parser.add_argument("--rates", default="1e-6,1e-5", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    if args.model is None:
        print("no --model: nothing measured (a pretrained model is needed, random weights change otherwise)")
        return
    for rate in args.rates.split(","):
        train(args.model, float(rate), args.steps)


if __name__ == "__main__":
    main()
