"""Checks of a configuration against its models: those on this machine, whose configuration can be read."""

from __future__ import annotations

import functools
import json
import math
import re
from pathlib import Path
from typing import Any

from roll.configs.engine_rules import compute_dtype
from roll.configs.problems import ConfigProblem
from roll.configs.rl import TINY, RLConfig
from roll.configs.rules import TRAINED, Rule, sections, valid_options
from roll.configs.schema import nearest
from roll.configs.strategy import GENERATORS, Fsdp2Config, MegatronConfig
from roll.configs.worker import WorkerConfig
from roll.models.tiny import MAX_POSITIONS

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_models(config: RLConfig) -> list[ConfigProblem]:
    """Models are ``tiny``, a folder in Hugging Face format, or look like a name on the hub (which is not asked)."""
    problems = []
    models = {"pretrain": config.pretrain}
    if config.reward_pretrain is not None and config.uses_critic:
        models["reward_pretrain"] = config.reward_pretrain
    for key, model in models.items():
        folder = Path(model)
        if model == TINY:
            continue
        if (folder.expanduser() / "config.json").is_file():
            _, problem = _read_config(model)
            problems += [ConfigProblem(key, model, "a model that Transformers knows", problem)] if problem else []
            continue
        if folder.exists():
            problems.append(ConfigProblem(key, model, "a folder that holds a config.json in Hugging Face format"))
        elif not _HUB_ID.fullmatch(model):
            near = nearest(folder.name, [path.name for path in folder.parent.glob("*")])
            hint = f"did you mean {folder.parent / near}?" if near else "there is nothing at this path"
            problems.append(
                ConfigProblem(key, model, "tiny, an existing model folder, or an org/name on the hub", hint)
            )
    generator = config.actor_infer.strategy_args.strategy_name
    if config.pretrain == TINY and generator == "vllm" and config.tiny_num_heads > 2:
        expected = "2 with vllm, whose attention kernels take heads of 32 units at least"
        involved = ("pretrain", "actor_infer.strategy_args.strategy_name")
        problems.append(ConfigProblem("tiny_num_heads", config.tiny_num_heads, expected, involves=involved))
    if isinstance(config.resume_from_checkpoint, str) and not Path(config.resume_from_checkpoint).is_dir():
        seen = config.resume_from_checkpoint
        problems.append(ConfigProblem("resume_from_checkpoint", seen, "true, false or an existing checkpoint folder"))
    return problems


def check_fit(config: RLConfig) -> list[ConfigProblem]:
    """The model's sizes divide into each role's parallel layout, and its class is one that the engine takes."""
    problems: list[ConfigProblem] = []
    for role, worker in sections(config):
        options = valid_options(worker)
        if options is None:
            continue
        generates = worker.strategy_args.strategy_name in GENERATORS
        split = worker.num_gpus_per_worker if generates else worker.devices_per_copy
        sizes = _model_config(config, role) if split > 1 or isinstance(options, MegatronConfig) else None
        if sizes is None:
            continue
        if isinstance(options, MegatronConfig):
            problems += _megatron_problems(role, worker, options, sizes)
        else:
            problems += _head_problems(role, worker, split, sizes)
    return problems


def _megatron_problems(role: str, worker: WorkerConfig, options: MegatronConfig, sizes: Any) -> list[ConfigProblem]:
    from roll.distributed.strategy.megatron.fit import check_model_fit

    try:
        problems = check_model_fit(sizes, options)
    except ValueError as error:
        expected = "a strategy that can run the model, such as fsdp2_train"
        key = f"{role}.strategy_args.strategy_name"
        return [ConfigProblem(key, worker.strategy_args.strategy_name, expected, str(error))]
    return [problem.under(f"{role}.strategy_args.strategy_config") for problem in problems]


def _head_problems(role: str, worker: WorkerConfig, split: int, sizes: Any) -> list[ConfigProblem]:
    """Attention heads (and units, where matrices are split) that cannot be dealt out to so many devices."""
    options, ulysses = valid_options(worker), worker.model_args.ulysses_size
    tensor = options.tensor_parallel_size if isinstance(options, Fsdp2Config) else split // ulysses
    heads = sizes.num_attention_heads
    kv_heads = getattr(sizes, "num_key_value_heads", None) or heads
    if isinstance(options, Fsdp2Config) and tensor > 1 and not getattr(sizes, "base_model_tp_plan", None):
        expected = f"1: {type(sizes).__name__} has no tensor-parallel plan"
        return [ConfigProblem(f"{role}.strategy_args.strategy_config.tensor_parallel_size", tensor, expected)]
    if heads % split:
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
        expected = f"sizes that divide the {heads} attention heads"
    elif isinstance(options, Fsdp2Config) and (common := _split_sizes(sizes)) % tensor:
        fits = [n for n in range(1, common + 1) if common % n == 0]
        expected = f"a divisor of {common}: of the attention and key-value heads and the units of an MLP"
        split, ulysses = tensor, 1
    elif ulysses > 1 and (own := kv_heads // tensor) % ulysses and ulysses % max(1, own):
        fits = [n for n in range(1, heads + 1) if heads // tensor % n == 0 and (own % n == 0 or n % own == 0)]
        expected, split = f"a divisor or a multiple of the {own} key-value heads", ulysses
    else:
        return []
    near = min(fits, key=lambda n: abs(n - split))
    hint = f"the nearest is {near}" + (" in all" if ulysses > 1 and tensor > 1 else "")
    if ulysses > 1:
        return [ConfigProblem(f"{role}.model_args.ulysses_size", ulysses, expected, hint)]
    trained = isinstance(options, Fsdp2Config)
    key = "strategy_args.strategy_config.tensor_parallel_size" if trained else "num_gpus_per_worker"
    return [ConfigProblem(f"{role}.{key}", split, expected, hint)]


def _split_sizes(sizes: Any) -> int:
    """What a tensor-parallel size of FSDP2 must divide."""
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
    return math.gcd(*(size for name in names if isinstance(size := getattr(sizes, name, None), int)))


def check_positions(config: RLConfig) -> list[ConfigProblem]:
    """The model has positions for the longest sample."""
    path = config.pretrain
    if path == TINY:
        most = MAX_POSITIONS
    else:
        sizes = _model_config(config, "actor_infer")
        most = getattr(sizes, "max_position_embeddings", None) or config.sequence_length
    if config.sequence_length <= most:
        return []
    expected = f"at most {most}, the positions that the model has"
    return [ConfigProblem("sequence_length", config.sequence_length, expected, involves=("pretrain",))]


def check_attention_kinds(config: RLConfig) -> list[ConfigProblem]:
    """``hf_infer`` has the kinds of attention that the model's layers are of."""
    from roll.distributed.strategy.hf_infer.model_fit import foreign_attention

    problems = []
    for role, worker in sections(config):
        name = worker.strategy_args.strategy_name
        sizes = _model_config(config, role) if name == "hf_infer" and _model_path(config, role) != TINY else None
        if sizes is not None and (kinds := foreign_attention(sizes, config.sequence_length)):
            key, involved = f"{role}.strategy_args.strategy_name", ("sequence_length", "pretrain")
            expected = f"{'vllm or sglang' if role == 'actor_infer' else 'fsdp2_infer'} for layers of {kinds}"
            problems.append(ConfigProblem(key, name, expected, "hf_infer has full attention", involves=involved))
    return problems


def check_trained_format(config: RLConfig) -> list[ConfigProblem]:
    """A checkpoint in fp16 is not trained in it."""
    problems = []
    for role in TRAINED:
        worker = getattr(config, role)
        if worker is None or compute_dtype(role, worker)[1] is not None:
            continue
        sizes = None if config.pretrain == TINY else _model_config(config, role)
        if str(getattr(sizes, "dtype", None)) == "torch.float16":
            expected = "bf16 or fp32: the model is in fp16, and training in that would need loss scaling"
            problems.append(ConfigProblem(f"{role}.model_args.dtype", None, expected, involves=("pretrain",)))
    return problems


def check_model_kwargs(config: RLConfig) -> list[ConfigProblem]:
    """``model_config_kwargs`` are entries that the model's configuration has."""
    problems = []
    for role, worker in sections(config):
        given = worker.model_args.model_config_kwargs
        sizes, _ = _read_config(_model_path(config, role), config.tiny_num_heads) if given else (None, "")
        known = set() if sizes is None else set(sizes.to_dict())
        for key in given if sizes is not None else ():
            if not hasattr(sizes, key):
                near = nearest(key, sorted(known))
                hint = f"did you mean {near}?" if near else ""
                path = f"{role}.model_args.model_config_kwargs.{key}"
                expected = f"an entry of {type(sizes).__name__}"
                problems.append(ConfigProblem(path, given[key], expected, hint, involves=("pretrain",)))
    return problems


def check_adapted_layers(config: RLConfig) -> list[ConfigProblem]:
    """The model has the layers that ``lora_target`` names, and the trainer can adapt them."""
    args, options = config.actor_train.model_args, valid_options(config.actor_train)
    targets = args.lora_targets
    named = targets and (isinstance(options, MegatronConfig) or targets != ("all-linear",))
    sizes = _model_config(config, "actor_train") if named else None
    if sizes is None:
        return []
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    from roll.distributed.strategy.megatron.fit import check_adapter_fit, check_model_fit
    from roll.models.lora import UnknownLayerError, adapted_layers

    with torch.device("meta"), no_init_weights():
        model = AutoModelForCausalLM.from_config(sizes, trust_remote_code=False)
    try:
        layers = adapted_layers(model, targets)
    except UnknownLayerError as error:
        key = "actor_train.model_args.lora_target"
        return [ConfigProblem(key, args.lora_target, error.expected, error.reason, involves=("pretrain",))]
    if not isinstance(options, MegatronConfig):
        return []
    try:
        if check_model_fit(sizes, options):
            return []  # what does not fit without an adapter is said by check_fit
    except ValueError:
        return []
    problems = check_adapter_fit(sizes, options, layers, dropout=args.lora_dropout)
    return [problem.under("actor_train") for problem in problems]


MODEL_CHECKS: tuple[Rule, ...] = (
    check_models,
    check_model_kwargs,
    check_fit,
    check_positions,
    check_attention_kinds,
    check_trained_format,
    check_adapted_layers,
)


def _model_path(config: RLConfig, role: str) -> str:
    return config.reward_pretrain if role == "critic" and config.reward_pretrain else config.pretrain


def _model_config(config: RLConfig, role: str) -> Any:
    """A role's model as its text part is configured, ``model_config_kwargs`` included; ``None`` if it is not on this
    machine or wrong, which is reported elsewhere."""
    sizes, _ = _read_config(_model_path(config, role), config.tiny_num_heads)
    given = getattr(config, role).model_args.model_config_kwargs
    if sizes is None or not all(hasattr(sizes, key) for key in given):
        return None
    if given:
        sizes = type(sizes).from_dict(sizes.to_dict() | given)
    return sizes.get_text_config()


def _read_config(path: str, tiny_num_heads: int = 4) -> tuple[Any, str]:
    """A model's configuration, and why it cannot be read; neither where there is none on this machine."""
    if path == TINY:
        from roll.models.tiny import tiny_config

        return tiny_config(tiny_num_heads), ""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        return None, ""
    try:
        return _parse_config(path, file.read_text(encoding="utf-8"))
    except OSError as error:
        return None, str(error)


@functools.lru_cache(maxsize=8)
def _parse_config(path: str, text: str) -> tuple[Any, str]:
    """The same for a folder whose ``config.json`` says ``text``."""
    try:
        content = json.loads(text)
    except ValueError as error:
        return None, f"config.json: {error}"
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        return None, "config.json: no model_type in it"
    from roll.models.loading import load_config

    try:
        return load_config(path), ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, str(error).splitlines()[0]
