"""Opens the tokenizer of a model folder: all that an environment worker needs of a model, without torch."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll.configs.pipeline import SMOLLM2, TINIES, TINY, TINY_VL
from roll.data.pictures import Pictures
from roll.utils.foreign import describe_error
from roll.utils.registry import extra

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "additional_chat_templates/*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
)


@contextlib.contextmanager
def asking_for_trust(path: str) -> Iterator[None]:
    """Says which key runs the code that a model comes with, where Transformers refuses it.

    Raises:
        ValueError: it does.
    """
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"model path {path!r}: it has Python files that would have to run; read them, then "
            "allow it with trust_remote_code: true (in model_args of its role, or next to a reward model's model_path; "
            "commands that only read a tokenizer have --trust-remote-code)"
        ) from error


def load_tokenizer(path: str, *, alone: bool = False, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer.

    Args:
        path: a model's folder, or its name on the hub.
        alone: whether a folder may hold a tokenizer and no model.

    Raises:
        ValueError: no such folder, no tokenizer in it, or one with code of its own that may not run.
    """
    path, local = locate_model(path, tokenizer_alone=alone)
    if local and not any(any(Path(path).glob(pattern)) for pattern in TOKENIZER_FILES):
        # transformers would make an empty one from the model's configuration.
        raise ValueError(f"model path {path!r}: no tokenizer files in it, such as tokenizer.json")
    try:
        with asking_for_trust(path):
            tokenizer: PreTrainedTokenizerBase = _tokenizer_class(path, local).from_pretrained(
                path, local_files_only=local, trust_remote_code=trust_remote_code
            )
    except OSError as error:
        raise ValueError(f"model path {path!r}: no tokenizer in Hugging Face format ({error})") from error
    except ValueError:
        raise
    except Exception as error:  # the libraries raise whatever a broken file leads them to
        raise ValueError(
            f"model path {path!r}: its tokenizer cannot be read ({describe_error(error)}); expected whole files"
        ) from error
    return tokenizer


def policy_tokenizer(
    pretrain: str, tokenizer_path: str | None = None, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a run's policy before there is a model: ``pretrain`` may be ``tiny``.

    Args:
        tokenizer_path: where the tokenizer is, if it is not the model's.

    Raises:
        ValueError: see ``load_tokenizer``.
    """
    if tokenizer_path is not None:
        return load_tokenizer(tokenizer_path, alone=True, trust_remote_code=trust_remote_code)
    if pretrain in TINIES:
        from roll.models.tiny import make_tokenizer

        return make_tokenizer(pictures=pretrain == TINY_VL)
    return load_tokenizer(pretrain, trust_remote_code=trust_remote_code)


def policy_pictures(
    pretrain: str, bounds: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None = None
) -> Pictures | None:
    """The picture processor of a run's policy, which is loaded when there is a picture; ``None``: it takes none.

    Args:
        bounds: ``DataArguments.picture_bounds``.

    Raises:
        ValueError: no such folder.
    """
    if pretrain in (TINY, SMOLLM2):
        return None
    if pretrain == TINY_VL:
        from roll.models.tiny import processor_folder

        return Pictures(processor_folder(), **bounds, tokenizer=tokenizer)
    return Pictures.of(local_folder(pretrain, "*.json"), **bounds, tokenizer=tokenizer)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """Compares a tokenizer with the rows of the embedding that its ids are looked up in.

    Raises:
        ValueError: tokens without a row.
    """
    beyond = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index >= vocab_size)
    if beyond:
        listed = ", ".join(f"{token!r} ({index})" for index, token in beyond[:5])
        more = f" and {len(beyond) - 5} more" if len(beyond) > 5 else ""
        raise ValueError(
            f"{len(beyond)} of the tokenizer's {len(tokenizer)} tokens have ids beyond the model's vocabulary "
            f"(vocab_size {vocab_size}): {listed}{more}; expected a model with a row for each "
            "(resize_token_embeddings of Transformers), or a tokenizer without them"
        )


def special_ids_beyond(entries: Mapping[str, Any], vocab_size: int) -> list[str]:
    """Special tokens of a model's or a generation configuration that are no rows of its embedding, as text."""
    found = []
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        given = entries.get(key)
        ids = given if isinstance(given, list) else [given]
        if any(isinstance(index, int) and index >= vocab_size for index in ids):
            found.append(f"{key}: got {given}, expected below vocab_size {vocab_size}")
    return found


def check_same_ids(
    pretrain: str,
    other: str,
    tokenizer_path: str | None = None,
    *,
    trust_policy: bool = False,
    trust_other: bool = False,
) -> None:
    """Compares the vocabularies of a policy and another model: an id that both have stands for the same token.

    Args:
        pretrain: the policy, which may be ``tiny``.
        other: the other model, likewise.
        tokenizer_path: where the policy's tokenizer is, if it is not the model's.

    Raises:
        ValueError: they differ, or a tokenizer cannot be read.
    """
    tokens = policy_tokenizer(pretrain, tokenizer_path, trust_remote_code=trust_policy).get_vocab()
    others = policy_tokenizer(other, trust_remote_code=trust_other).get_vocab()
    names = {index: token for token, index in others.items()}
    shared = [(index, token) for token, index in tokens.items() if index in names]
    wrong = sorted((index, token, names[index]) for index, token in shared if names[index] != token)
    if wrong or not shared:
        index, token, theirs = wrong[0] if wrong else (0, None, None)
        raise ValueError(
            f"{other!r} has another tokenizer than {pretrain!r}: {len(wrong)} of {len(shared)} ids differ, the first "
            f"is {index}: {theirs!r} in place of {token!r}; a teacher must have the policy's vocabulary, or "
            "in an RL run align_tokenizers: text"
        )


def _tokenizer_class(path: str, local: bool) -> Any:
    """Transformers' choice, or the plain class where the folder itself names that one.

    To choose, transformers imports half of torch, which takes seconds in workers that need a tokenizer alone.
    """
    import transformers

    if local and (Path(path) / "tokenizer.json").is_file():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            named = json.loads((Path(path) / "tokenizer_config.json").read_text()).get("tokenizer_class")
            if named in ("TokenizersBackend", "PreTrainedTokenizerFast"):
                return transformers.PreTrainedTokenizerFast
    return transformers.AutoTokenizer


def model_folder(path: str) -> Path:
    """The folder that a model's path means, whether or not it is there; for ``smollm2`` one in the user's cache."""
    return Path(extra("smollm2").cached()) if path == SMOLLM2 else Path(path).expanduser()


def locate_model(path: str, *, tokenizer_alone: bool = False) -> tuple[str, bool]:
    """The path with ``~`` resolved, and whether it is a local folder (of a model), as opposed to a hub name.

    Args:
        path: may be ``smollm2``, which is made where it is not in the cache.
        tokenizer_alone: whether a folder may hold no model.

    Raises:
        ValueError: it looks like a folder and is none, or holds no ``config.json``; or ``smollm2`` cannot be made.
    """
    if path == SMOLLM2:
        return str(extra("smollm2").made()), True
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (tokenizer_alone or (folder / "config.json").is_file()):
            raise ValueError(f"model path {path!r}: no config.json in it; expected a model in Hugging Face format")
        return str(folder), True
    if folder.is_absolute() or path.startswith((".", "~")) or path.count("/") != 1:
        raise ValueError(f"model path {path!r}: no such folder")
    return path, False


def local_folder(path: str, *patterns: str) -> Path:
    """The folder of a model; for a name on the hub that of its cache, with the files that match fetched."""
    path, local = locate_model(path)
    if local:
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=list(patterns)))
