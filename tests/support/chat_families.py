"""Small tokenizers with the chat templates and the control tokens of published models."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "chat_templates"
CORPUS = ["the player walks left and right", "another answer is another move", "left left right answer player walks"]


@dataclass(frozen=True)
class Family:
    """What a tokenizer has beside its vocabulary.

    Attributes:
        special: tokens that it calls special, the first of which begins a sequence if ``has_bos``.
        eos: ends a sequence.
        words: added tokens that it does not call special.
        has_bos: whether it has a token that begins a sequence.
        spaces: whether spaces are written as ``▁`` and its control tokens are words of the model's vocabulary too, as
            SentencePiece has it.
        dialect: in which its template writes calls; ``None`` for one that knows no tools.
    """

    special: str
    eos: str
    words: str = ""
    has_bos: bool = False
    spaces: bool = False
    dialect: str | None = None


_QWEN = "<|endoftext|> <|im_start|> <|im_end|>"
_QWEN_WORDS = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
_GEMMA = "<bos> <eos> <pad> <unk> <start_of_turn> <end_of_turn> <start_of_image>"
_DEEPSEEK = "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜>"
_DEEPSEEK_WORDS = (
    "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> "
    "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜> "
    "<think> </think>"
)
FAMILIES = {
    "qwen2_5": Family(_QWEN, "<|im_end|>", "<tool_call> </tool_call>", dialect="hermes"),
    "qwen3": Family(_QWEN, "<|im_end|>", _QWEN_WORDS, dialect="hermes"),
    "qwen3_coder": Family(_QWEN, "<|im_end|>", _QWEN_WORDS, dialect="qwen3_coder"),
    "llama3_1": Family(
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|>",
        "<|eot_id|>",
        has_bos=True,
        dialect="llama3_json",
    ),
    "mistral_nemo": Family(
        "<s> </s> <unk> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] "
        "[TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]",
        "</s>",
        has_bos=True,
        dialect="mistral",
    ),
    "gemma2": Family(_GEMMA, "<eos>", has_bos=True, spaces=True),
    "gemma3": Family(_GEMMA, "<eos>", has_bos=True, spaces=True),
    "deepseek_v3": Family(_DEEPSEEK, "<｜end▁of▁sentence｜>", _DEEPSEEK_WORDS, has_bos=True),
    "deepseek_v3_1": Family(_DEEPSEEK, "<｜end▁of▁sentence｜>", _DEEPSEEK_WORDS, has_bos=True),
    "glm4_5": Family(
        "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
        "<|endoftext|>",
        f"{_QWEN_WORDS} <arg_key> </arg_key> <arg_value> </arg_value>",
        dialect="glm",
    ),
    "gpt_oss": Family(
        "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> <|call|>",
        "<|return|>",
        dialect="harmony",
    ),
}


@cache
def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family of ``FAMILIES``."""
    family = FAMILIES[name]
    special = family.special.split()
    core = _sentencepiece(special) if family.spaces else _bytes()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    core.add_tokens([AddedToken(text, normalized=False) for text in family.words.split()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=special[0] if family.has_bos else None, eos_token=family.eos
    )
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def _bytes() -> Tokenizer:
    """Byte pairs with a few merges."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(CORPUS * 4, trainer)
    return core


def _sentencepiece(special: list[str]) -> Tokenizer:
    """Letters with a few merges, bytes for what is none, and the control tokens as words."""
    letters = [chr(code) for code in range(33, 127)] + ["▁", "\n"]
    merges = [("l", "e"), ("f", "t"), ("le", "ft"), ("a", "n"), ("an", "s"), ("▁", "an")]
    words = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *(a + b for a, b in merges)]
    vocabulary = {word: index for index, word in enumerate(words)}
    core = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core
