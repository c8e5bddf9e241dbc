"""Small tokenizers with the chat templates and the control tokens of published models."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "chat_templates"
CORPUS = ["the player walks left and right", "another answer is another move", "left left right answer player walks"]


@dataclass(frozen=True)
class Family:
    """What a published tokenizer has besides its vocabulary, and where generation ends.

    Attributes:
        special: tokens that it calls special, the first of which begins a sequence if ``has_bos`` or ``adds_bos``.
        eos: its end token.
        words: added tokens that it does not call special.
        has_bos: whether it has a token that begins a sequence, and leaves it to the template.
        adds_bos: whether it has one, and writes it before a text.
        spaces: whether spaces are written as ``▁`` and its control tokens are words of the model's vocabulary too, as
            SentencePiece has it.
        dialect: in which its template describes tools; ``None`` for one that knows none.
        ends: ``eos_token_id`` of the model's ``generation_config.json``.
        pad: its padding token; ``None`` if it has none.
    """

    special: str
    eos: str
    words: str = ""
    has_bos: bool = False
    adds_bos: bool = False
    spaces: bool = False
    dialect: str | None = None
    ends: str = ""
    pad: str | None = None


_CHATML = "<|endoftext|> <|im_start|> <|im_end|>"
_QWEN_WORDS = "<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"
_QWEN: dict[str, Any] = {"ends": "<|im_end|> <|endoftext|>", "pad": "<|endoftext|>"}
_LLAMA = (
    "<|begin_of_text|> <|end_of_text|> <|finetune_right_pad_id|> <|start_header_id|> <|end_header_id|> <|eom_id|> "
    "<|eot_id|> <|python_tag|>"
)
_LLAMA_ENDS = "<|end_of_text|> <|eom_id|> <|eot_id|>"
_MISTRAL = (
    "<s> </s> <unk> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]"
)
_GEMMA = "<bos> <eos> <pad> <unk> <start_of_turn> <end_of_turn> <start_of_image>"
_DEEPSEEK = "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜>"
_DEEPSEEK_WORDS = (
    "<｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> "
    "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜> <｜tool▁sep｜> "
    "<think> </think>"
)
_DEEPSEEK_END = "<｜end▁of▁sentence｜>"


def _deepseek() -> Family:
    return Family(_DEEPSEEK, _DEEPSEEK_END, _DEEPSEEK_WORDS, adds_bos=True, ends=_DEEPSEEK_END, pad=_DEEPSEEK_END)


def _qwen(words: str = _QWEN_WORDS, dialect: str = "hermes") -> Family:
    return Family(_CHATML, "<|im_end|>", words, dialect=dialect, **_QWEN)


FAMILIES = {
    "llama3": Family(_LLAMA, "<|eot_id|>", adds_bos=True, ends="<|end_of_text|> <|eot_id|>", pad=None),
    "llama3_1": Family(_LLAMA, "<|eot_id|>", adds_bos=True, dialect="llama3_json", ends=_LLAMA_ENDS),
    "llama3_2": Family(_LLAMA, "<|eot_id|>", adds_bos=True, dialect="llama3_json", ends=_LLAMA_ENDS),
    "mistral_v0_3": Family(_MISTRAL, "</s>", adds_bos=True, spaces=True, dialect="mistral", ends="</s>"),
    "mistral_nemo": Family(_MISTRAL, "</s>", adds_bos=True, dialect="mistral", ends="</s>"),
    "mistral_small_3_2": Family(
        f"{_MISTRAL} [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [IMG] [CALL_ID] [ARGS] <pad>",
        "</s>",
        adds_bos=True,
        dialect="mistral",
        ends="</s>",
        pad="<pad>",
    ),
    "mixtral": Family("<s> </s> <unk>", "</s>", adds_bos=True, spaces=True, ends="</s>"),
    "phi3": Family(
        "<s> <unk> <|endoftext|> <|assistant|> <|system|> <|end|> <|user|>",
        "<|endoftext|>",
        has_bos=True,
        spaces=True,
        ends="<|endoftext|> <|assistant|> <|end|>",
        pad="<|endoftext|>",
    ),
    "phi4": Family(
        f"{_CHATML} <|im_sep|> <|dummy_85|>",
        "<|im_end|>",
        has_bos=True,
        ends="<|endoftext|> <|im_end|>",
        pad="<|dummy_85|>",
    ),
    "phi4_mini": Family(
        "<|endoftext|> <|assistant|> <|end|> <|user|> <|system|> <|tool|> <|/tool|> <|tool_call|> <|/tool_call|>",
        "<|endoftext|>",
        has_bos=True,
        ends="<|end|> <|endoftext|>",
        pad="<|endoftext|>",
    ),
    "gemma2": Family(_GEMMA, "<eos>", adds_bos=True, spaces=True, ends="<eos> <end_of_turn>", pad="<pad>"),
    "gemma3": Family(_GEMMA, "<eos>", adds_bos=True, spaces=True, ends="<eos> <end_of_turn>", pad="<pad>"),
    "qwen2_5": _qwen("<tool_call> </tool_call>"),
    "qwen3": _qwen(),
    "qwen3_2507": _qwen(),
    "qwen3_thinking_2507": _qwen(),
    "qwen3_coder": _qwen(dialect="qwen3_coder"),
    "qwen3_5": _qwen(dialect="qwen3_coder"),
    "deepseek_v3": _deepseek(),
    "deepseek_v3_1": _deepseek(),
    "deepseek_r1": _deepseek(),
    "deepseek_r1_distill": _deepseek(),
    "glm4_5": Family(
        "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
        "<|endoftext|>",
        f"{_QWEN_WORDS} <arg_key> </arg_key> <arg_value> </arg_value>",
        dialect="glm",
        ends="<|endoftext|> <|user|> <|observation|>",
        pad="<|endoftext|>",
    ),
    "gpt_oss": Family(
        "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> <|call|>",
        "<|return|>",
        dialect="harmony",
        ends="<|return|> <|endoftext|> <|call|>",
        pad="<|endoftext|>",
    ),
    "smollm2": Family(
        "<|im_start|> <|im_end|> <|endoftext|>", "<|im_end|>", has_bos=True, ends="<|im_end|>", pad="<|im_end|>"
    ),
    "smollm3": Family(_CHATML, "<|im_end|>", _QWEN_WORDS, dialect="hermes", ends="<|im_end|>", pad="<|im_end|>"),
    "granite4": Family(
        "<|end_of_text|> <|pad|> <|start_of_role|> <|end_of_role|>",
        "<|end_of_text|>",
        "<tool_call> </tool_call>",
        has_bos=True,
        dialect="hermes",
        ends="<|end_of_text|>",
        pad="<|pad|>",
    ),
    "falcon_h1": Family(
        "<|begin_of_text|> <|end_of_text|> <|im_start|> <|im_end|> <|pad|>",
        "<|end_of_text|>",
        has_bos=True,
        dialect="hermes",
        ends="<|end_of_text|> <|im_end|>",
        pad="<|pad|>",
    ),
    "nemotron_nano_2": Family(
        "<s> </s> <unk> <SPECIAL_10> <SPECIAL_11> <SPECIAL_12>",
        "<SPECIAL_12>",
        "<TOOLCALL> </TOOLCALL>",
        has_bos=True,
        dialect="nemotron",
        ends="</s> <SPECIAL_11> <SPECIAL_12>",
        pad="<SPECIAL_12>",
    ),
    "nemotron_3_nano": Family(
        "<s> </s> <unk> <|im_start|> <|im_end|>",
        "<|im_end|>",
        _QWEN_WORDS,
        has_bos=True,
        dialect="qwen3_coder",
        ends="</s> <|im_end|>",
        pad="<|im_end|>",
    ),
}


MARKS = {name: family.eos for name, family in FAMILIES.items()} | {
    **dict.fromkeys(("gemma2", "gemma3"), "<end_of_turn>"),
    **dict.fromkeys(("phi3", "phi4_mini"), "<|end|>"),
    "falcon_h1": "<|im_end|>",
    "glm4_5": "<|user|>",
}
"""The token at which a generator stops behind an answer."""


ADD_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
ADD_CALL: dict[str, Any] = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1}},
}
ADD_RESULT: dict[str, Any] = {"role": "tool", "content": "2", "tool_call_id": "call00000", "name": "add"}


@cache
def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family of ``FAMILIES``."""
    family = FAMILIES[name]
    special = family.special.split()
    core = _sentencepiece(special) if family.spaces else byte_pairs(CORPUS * 4, 320)
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    core.add_tokens([AddedToken(text, normalized=False) for text in family.words.split()])
    bos = special[0] if family.has_bos or family.adds_bos else None
    if family.adds_bos and bos is not None:
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token=family.eos, pad_token=family.pad
    )
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def byte_pairs(texts: Sequence[str], size: int, special: Sequence[str] = ()) -> Tokenizer:
    """Bytes, and as many merges as there is room for, by how often they are in some texts."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=size, special_tokens=[*special], **options))
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
