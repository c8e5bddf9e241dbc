"""Opens and writes models in Hugging Face format. Weights are safetensors; a model's own code runs only if asked."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from roll.models.pictures import FAMILIES
from roll.models.products import speed_up
from roll.models.stored import LowPrecision, scheme_of
from roll.models.tokenizer import TOKENIZER_FILES, asking_for_trust, locate_model, special_ids_beyond
from roll.models.weight_files import FolderFit, adopt_names, check_folder, tensor_names
from roll.utils.foreign import describe_error, replaced

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

Head = Literal["lm", "value", "score"]
"""Module on the trunk: the output layer, a critic's value head, or a reward model's, saved as a classifier's."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

GENERATION_FILE = "generation_config.json"
COMPANIONS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "image_processor_config.json",
    "LICENSE*",
    "NOTICE*",
)
"""What a published model has beside its weights, configuration and tokenizer, and is made from as it is."""


class UnmadeModelError(ValueError):
    """Entries of a configuration that its class does not check, and cannot use."""


def exact_float32() -> None:
    """Keeps float32 convolutions in float32, in the whole process.

    By default PyTorch lets cuDNN round their inputs on a GPU to TF32 (10 bits of 23), but not those of matrix products.
    """
    torch.backends.cudnn.allow_tf32 = False


def resolve_dtype(name: str | None, config: PreTrainedConfig | None = None) -> torch.dtype:
    """``fp32``, ``bf16``, ``fp16`` or a torch name; ``None`` takes the model configuration's, else float32."""
    if name is None:
        parts = () if config is None else (config, config.get_text_config())
        stated: list[Any] = [getattr(part, "dtype", None) for part in parts]
        return next((one for one in stated if isinstance(one, torch.dtype)), torch.float32)
    dtype = DTYPES.get(name) or getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"model_args.dtype: {name!r}, expected one of {', '.join(DTYPES)}")
    return dtype


def load_config(
    path: str,
    config_kwargs: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
    asks_hub: bool = True,
) -> PreTrainedConfig:
    """The model's configuration, with entries replaced by ``config_kwargs``.

    Args:
        path: folder in Hugging Face format, or a hub name.
        asks_hub: whether the hub is asked about a name; otherwise what is in its cache counts.

    Raises:
        ValueError: no such folder, no ``config.json`` in it, an entry that the configuration does not have, or a model
            with code of its own, which runs with ``trust_remote_code`` alone.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    path, local = locate_model(path)
    try:
        with asking_for_trust(path):
            config = AutoConfig.from_pretrained(
                path, local_files_only=local or not asks_hub, trust_remote_code=trust_remote_code
            )
    except StrictDataclassError as error:
        raise ValueError(f"model path {path!r}: config.json: {' '.join(str(error).split())}") from error
    stated = getattr(config, "quantization_config", None)
    if scheme_of({"quantization_config": stated}) is not None:
        del config.quantization_config  # its files are read as plain weights
    for key, value in (config_kwargs or {}).items():
        if not hasattr(config, key):
            raise ValueError(f"model_config_kwargs.{key}: {type(config).__name__} has no such entry")
        setattr(config, key, value)
    return config


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    attn_implementation: str | None = None,
    config_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    trunk: bool = False,
    pictures: bool = False,
) -> PreTrainedModel:
    """A causal language model in evaluation mode.

    Args:
        path: folder in Hugging Face format, or a hub name.
        dtype: of the weights; ``None`` takes the configuration's.
        attn_implementation: ``sdpa``, ``eager``, ``flash_attention_2`` …; ``None`` lets transformers choose.
        trunk: without the output layer: what a value head sits on.
        pictures: with the tower that it has for them.

    Raises:
        ValueError: no such folder, nothing in it that can be loaded, or tensors in it that are not the model's (see
            ``weight_files``).
    """
    from safetensors import SafetensorError
    from transformers import GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    exact_float32()
    if not sys.stderr.isatty():
        disable_progress_bar()  # in a log it is lines that overwrite nothing
    path, local = locate_model(path)
    config = load_config(path, config_kwargs, trust_remote_code=trust_remote_code)
    head: Head = "value" if trunk else "lm"
    kind = _kind(head, config, pictures)
    kernel = attention_kernel(config, attn_implementation)
    options: dict[str, Any] = {} if kernel is None else {"attn_implementation": kernel}
    fit = fit_folder(head, path, config, trust_remote_code=trust_remote_code, pictures=pictures)
    source: str | None = path
    if fit.files.scheme is not None:
        kind, source = type(fit.model), None
        options["state_dict"] = {name: fit.files.read(name) for name in fit.files.names}
    try:
        loaded: Any = kind.from_pretrained(
            source,
            config=config,
            dtype=dtype or resolve_dtype(None, config),
            use_safetensors=True,
            local_files_only=local,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
            **options,
        )
    except (OSError, SafetensorError) as error:
        raise ValueError(f"model path {path!r}: no safetensors weights could be loaded ({error})") from error
    model: PreTrainedModel
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        # transformers would go on with random weights in their place.
        raise ValueError(f"model path {path!r}: {len(missing)} weights are missing, the first is {missing[0]!r}")
    for name, seen, expected in report["mismatched_keys"]:
        raise ValueError(f"model path {path!r}: {name}: got shape {tuple(seen)}, expected {tuple(expected)}")
    if source is None and model.can_generate() and (fit.files.folder / GENERATION_FILE).is_file():
        model.generation_config = GenerationConfig.from_pretrained(fit.files.folder)  # weights alone were given
    model = model.to(device).eval()  # type: ignore[arg-type]
    speed_up(model)
    return model


def make_skeleton(
    head: Head,
    path: str,
    *,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    config_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    pictures: bool = False,
) -> PreTrainedModel:
    """The model with unset weights, whose memory is not touched until it is filled.

    Its tensors leave under the names in its folder, if that is on this machine. ``pictures`` as in ``load_causal_lm``.
    """
    config = load_config(path, config_kwargs, trust_remote_code=trust_remote_code)
    kernel = attention_kernel(config, attn_implementation)
    model = _without_values(head, config, dtype, kernel, trust_remote_code=trust_remote_code, pictures=pictures)
    if (names := tensor_names(path)) is not None:
        adopt_names(model, names)
    speed_up(model)
    return model.eval()


def attention_problem(config: PreTrainedConfig, wanted: str | None) -> str:
    """What is expected in place of a kernel that would leave out a part of a model's attention, or nothing.

    Transformers' ``sdpa`` leaves out a cap of the scores in silence.
    """
    cap = _attention_cap(config)
    if cap is None or wanted != "sdpa":
        return ""
    return f"auto, eager or fa2: {config.model_type} caps attention scores at {cap}, which sdpa leaves out"


def attention_kernel(config: PreTrainedConfig, wanted: str | None) -> str | None:
    """The kernel that computes a model's attention.

    Args:
        wanted: ``None`` lets Transformers choose where any kernel is right.

    Raises:
        ValueError: see ``attention_problem``.
    """
    if expected := attention_problem(config, wanted):
        raise ValueError(f"attn_implementation: got {wanted}, expected {expected}")
    return "eager" if wanted is None and _attention_cap(config) is not None else wanted


def _attention_cap(config: PreTrainedConfig) -> float | None:
    return getattr(config.get_text_config(), "attn_logit_softcapping", None)


def rope_problem(config: PreTrainedConfig, sequence_length: int) -> str:
    """What is expected in place of a sequence so long that rotary frequencies depend on a micro-batch's longest row.

    Nothing where they do not.
    """
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):
        most = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "longrope" and most is not None and sequence_length > most:
            return (
                f"at most {most}: a longer row gives all rows of its micro-batch the other rotary frequencies of "
                f"{config.model_type} (longrope)"
            )
    return ""


def check_rope(config: PreTrainedConfig, sequence_length: int) -> None:
    """Checks the longest sequence of a run.

    Raises:
        ValueError: see ``rope_problem``.
    """
    if expected := rope_problem(config, sequence_length):
        raise ValueError(f"sequence_length: got {sequence_length}, expected {expected}")


def fit_folder(
    head: Head,
    path: str,
    config: PreTrainedConfig,
    *,
    trust_remote_code: bool = False,
    sampled: bool = False,
    pictures: bool = False,
) -> FolderFit:
    """Checks that a folder holds the tensors of a model, and none that it has no place for.

    Args:
        config: the folder's, of ``load_config``.
        sampled: see ``FolderFit``.
        pictures: see ``load_causal_lm``.

    Raises:
        ValueError: see ``check_folder``; quantised weights, or a padding token that the embedding has no row for.
    """
    text = config.get_text_config()
    if beyond := special_ids_beyond({"pad_token_id": getattr(text, "pad_token_id", None)}, text.vocab_size):
        raise ValueError(f"model path {path!r}: {beyond[0]}")
    if getattr(config, "quantization_config", None):
        raise ValueError(f"model path {path!r}: {quantised(config)}")
    try:
        model = outline(head, config, trust_remote_code=trust_remote_code, pictures=pictures)
    except UnmadeModelError as error:
        raise ValueError(f"model path {path!r}: {error}") from error
    fit = check_folder(model, config, path, sampled=sampled)
    if fit.files.packed and not sampled:
        _say_what_is_read(path, len(fit.files.packed), fit.files.scheme)
    return fit


@functools.cache
def _say_what_is_read(path: str, count: int, scheme: LowPrecision) -> None:
    words = "%s: %d weights in %s are read as %s; models that are saved have them so, without quantization_config"
    logger.info(words, path, count, scheme.method, scheme.dtype.lower())


def outline(
    head: Head, config: PreTrainedConfig, *, trust_remote_code: bool = False, pictures: bool = False
) -> PreTrainedModel:
    """A model on the meta device; the configuration stays as it is, in which making a model states its format."""
    with torch.device("meta"):
        copied = copy.deepcopy(config)
        return _without_values(head, copied, torch.float32, trust_remote_code=trust_remote_code, pictures=pictures)


def quantised(config: PreTrainedConfig) -> str:
    """Says why weights that are stored quantised are not read."""
    stated = config.quantization_config
    method = stated.get("quant_method") if isinstance(stated, dict) else getattr(stated, "quant_method", None)
    expected = "a model in bf16, fp16 or fp32, in fp8 with weight_block_size, or in mxfp4"
    return f"quantization_config in its config.json ({method}), expected {expected}"


def _kind(head: Head, config: PreTrainedConfig, pictures: bool) -> Any:
    """Transformers' class that makes a model of its configuration.

    A trunk has the tower for pictures in any case, and so have the models of families without a class for text alone.
    """
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if head != "lm":
        return AutoModel
    if config.model_type in FAMILIES and config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return AutoModelForImageTextToText
    return AutoModelForImageTextToText if pictures else AutoModelForCausalLM


def _without_values(
    head: Head,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    attention: str | None = None,
    *,
    trust_remote_code: bool,
    pictures: bool,
) -> PreTrainedModel:
    from transformers.initialization import no_init_weights

    kind = _kind(head, config, pictures)
    options = {} if attention is None else {"attn_implementation": attention}
    try:
        with no_init_weights():
            made = kind.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code, **options)
    except (KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError, AssertionError, RuntimeError) as error:
        reason = describe_error(error)  # a class checks few of the entries that it is made of
        raise UnmadeModelError(f"no model can be made of config.json ({reason})") from error
    model: PreTrainedModel = made
    model.tie_weights()  # initialisation would have done it
    return model


def persistent_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """What a model's files hold beside its parameters, such as the bias by which routers balance their experts."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), buffer


def set_buffer(model: PreTrainedModel, name: str, value: Tensor) -> None:
    """Sets a buffer, in float32 where the model's class computes with it so, else in its own number format."""
    buffer = model.get_buffer(name)
    exact = any(part in name.split(".") for part in model._keep_in_fp32_modules_strict or ())
    buffer.data = value.to(buffer.device, torch.float32 if exact else buffer.dtype)


def save_config(
    model: PreTrainedModel,
    path: Path,
    dtype: torch.dtype,
    head: Head = "lm",
    whole: PreTrainedConfig | None = None,
    published: Mapping[str, Any] | None = None,
) -> None:
    """Writes what belongs beside the weights: ``config.json`` (naming ``dtype``) and ``generation_config.json``.

    With the head ``score`` it says that the folder holds a classifier with one output.

    Args:
        whole: the configuration of the folder that the model is from, which may have more parts than this.
        published: what its ``config.json`` says, which a language model then says too, but for the number format.

    Raises:
        ValueError: Transformers has no such classifier.
    """
    config, architectures = model.config, [type(model).__name__]
    if head == "lm" and whole is not None and whole.model_type != config.model_type:
        config, architectures = whole, whole.architectures or architectures
    config.save_pretrained(path)
    file = path / "config.json"
    content = json.loads(file.read_text())
    content["architectures"] = architectures
    if head == "score":
        content |= classifier_entries(model.config.model_type)
    if head == "lm" and published:
        content = json.loads(json.dumps(published))
    state_format(content, dtype)
    file.write_text(json.dumps(content, indent=2) + "\n")
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(path)


def state_format(content: dict[str, Any], dtype: torch.dtype) -> None:
    """Makes the content of a ``config.json`` that of plain weights in a number format, unless it is."""
    name, text = str(dtype).removeprefix("torch."), content.get("text_config", {})
    content.pop("quantization_config", None)
    if any(part.get(key) not in (None, name) for part in (content, text) for key in ("dtype", "torch_dtype")):
        for part in (content, text):
            part.pop("torch_dtype", None)  # its name of old
            part.pop("dtype", None)
    if not any(part.get(key) for part in (content, text) for key in ("dtype", "torch_dtype")):
        content["dtype"] = name


def classifier_entries(model_type: str) -> dict[str, Any]:
    """Entries of ``config.json`` that make a sequence classifier with one output on this kind of model.

    Raises:
        ValueError: Transformers has none, and there is none of its own form (``classifier_class``).
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        MODEL_MAPPING_NAMES,
    )

    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(model_type)
    if name is None and model_type in FAMILIES:
        name = str(MODEL_MAPPING_NAMES[model_type]).removesuffix("Model") + "ForSequenceClassification"
    if name is None:
        raise ValueError(f"{model_type}: Transformers has no sequence classifier of it; expected one that has")
    return {"architectures": [str(name)], "id2label": {"0": "reward"}, "label2id": {"reward": 0}}


def classifier_class(config: PreTrainedConfig) -> Any:
    """Transformers' class of sequence classifiers.

    Of families with pictures that it has none for, its classifier in general on the family's trunk: the score head is
    ``score.weight``, as everywhere.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    kind = config.model_type
    if kind in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES or kind not in FAMILIES:
        return AutoModelForSequenceClassification
    trunk: Any = AutoModel._model_mapping[type(config)]
    base = next(cls for cls in trunk.__mro__[1:] if issubclass(cls, PreTrainedModel))
    (name,) = classifier_entries(kind)["architectures"]
    return type(name, (_OfConfig, GenericForSequenceClassification, base), {})


ADAPTED_CLASSIFIERS = ("qwen3_vl",)
"""Families with pictures whose classifiers were compared with an adapter."""


def adapted_classifier_problem(model_type: str) -> str:
    """Why a classifier is not an adapter beside its base, in words; empty if it may be."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    known = (*MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES, *ADAPTED_CLASSIFIERS)
    if model_type not in FAMILIES or model_type in known:
        return ""
    return f"an adapter of a reward model of the family {model_type} was not compared with plain Transformers"


class _OfConfig:
    """A model class that is asked as Transformers' choosers of classes are."""

    @classmethod
    def from_config(cls, config: PreTrainedConfig, *, trust_remote_code: bool = False, **options: Any) -> Any:
        """A model with values of its own; the family's code is Transformers'."""
        return cast(Any, cls)._from_config(config, **options)


def copy_companions(source: str, target: Path, tokenizer: str | None = None) -> None:
    """Copies what stands beside the weights of a model folder into one that is made from it.

    Tokenizer and processor files, licences, the Python files of a model that has code of its own, and
    ``generation_config.json`` in place of the one that ``save_config`` wrote: a model with unset weights knows its
    configuration alone, not which other tokens end a completion.

    Args:
        source: the model folder, or a hub name, whose files are those of the hub's cache.
        tokenizer: the same of the tokenizer, if it is not the model's.
    """
    beside = [file for file in (GENERATION_FILE,) if (target / file).is_file()]
    beside += COMPANIONS if (target / "config.json").is_file() else ()
    for name, patterns in ((tokenizer or source, TOKENIZER_FILES), (source, beside)):
        copy_files(_folder_of(name), patterns, target)
    copy_own_code(_folder_of(source), target)


def copy_files(folder: Path, patterns: Iterable[str], target: Path) -> int:
    """Copies what matches patterns from a folder, if it is there and another; returns how many files."""
    if not folder.is_dir() or folder.resolve() == target.resolve():
        return 0
    files = [file for pattern in patterns for file in folder.glob(pattern) if file.is_file()]
    for file in files:
        place = target / file.relative_to(folder)
        place.parent.mkdir(exist_ok=True)
        shutil.copy2(file, place)
    return len(files)


def _folder_of(name: str) -> Path:
    """The folder of a model or a tokenizer; that of the hub's cache for a name, fetched where it has no tokenizer."""
    try:
        path, local = locate_model(name, tokenizer_alone=True)
    except ValueError:  # it is gone
        return Path(name)
    if local:
        return Path(path)
    from huggingface_hub import snapshot_download

    for cached in (True, False):
        with contextlib.suppress(OSError, ValueError):  # not there, or out of reach
            wanted = [*TOKENIZER_FILES, *COMPANIONS, GENERATION_FILE, "*.py"]
            folder = Path(snapshot_download(path, allow_patterns=wanted, local_files_only=cached))
            if any(folder.glob(TOKENIZER_FILES[0])):
                return folder
    logger.warning("%s: its tokenizer is not in the hub's cache, nor can it be fetched; it is not saved", name)
    return Path(name)


def copy_own_code(source: Path, target: Path) -> None:
    """Copies the Python files of a model that has code of its own into a folder whose ``config.json`` names them."""
    config = target / "config.json"
    if source.resolve() != target.resolve() and config.is_file() and "auto_map" in json.loads(config.read_text()):
        for file in source.glob("*.py"):
            shutil.copy2(file, target)


def converts_weights(model: PreTrainedModel) -> bool:
    """Tells whether checkpoints of the model's class have other names or shapes than the model."""
    from transformers.core_model_loading import revert_weight_conversion

    if (used := getattr(model, "_weight_conversions", None)) is not None:
        return bool(used)
    nothing: dict[str, Tensor] = {}
    return revert_weight_conversion(model, nothing) is not nothing


def checkpoint_shapes(model: PreTrainedModel, parameters: Mapping[str, Tensor]) -> dict[str, dict[str, torch.Size]]:
    """Names and shapes of the tensors of a checkpoint that each parameter becomes.

    Takes some milliseconds per parameter where the model's class converts any, next to nothing where it does not.
    """
    if not converts_weights(model):
        return {name: {name: parameter.shape} for name, parameter in parameters.items()}
    return {
        name: {part: tensor.shape for part, tensor in to_hf_weights(model, name, parameter.to("meta")).items()}
        for name, parameter in parameters.items()
    }


def to_hf_weights(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """One parameter as the checkpoint format names and shapes it (fused experts become one tensor per expert)."""
    from transformers.core_model_loading import Transpose, revert_weight_conversion

    # Qwen3-VL-MoE's experts are read either way round, where that can be seen, and written as the model has them: other
    # programs than Transformers read them as they were published alone.
    square = tensor.shape[-2:-1] == tensor.shape[-1:]
    turned = property(lambda one: Transpose(one.dim1, one.dim0, one.check_dims and square))
    with replaced(Transpose, reverse_op=turned):
        return dict(revert_weight_conversion(model, {name: tensor}))
