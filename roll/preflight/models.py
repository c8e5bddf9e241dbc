"""Checks of a configuration against its models: those on this machine, whose configuration can be read."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from roll.configs.engine_rules import compute_dtype, no_pictures, no_videos
from roll.configs.engines.card import EngineCard, kind_of, task_of
from roll.configs.pipeline import SMOLLM2, TINIES, TINY, TINY_VL, PipelineConfig
from roll.configs.problems import ConfigProblem, show
from roll.configs.rl import RLConfig
from roll.configs.rules import TRAINED, Rule, sections
from roll.configs.schema import did_you_mean, nearest
from roll.configs.worker import WorkerConfig
from roll.models.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    CLASSIFIES,
    GENERATES,
    matrix_shapes_in,
    read_adapter_config,
    unusual_entry,
)
from roll.models.measured import is_proved
from roll.models.stored import scheme_in
from roll.models.tiny import MAX_POSITIONS
from roll.models.tokenizer import (
    TOKENIZER_FILES,
    check_same_ids,
    check_vocabulary,
    model_folder,
    policy_tokenizer,
    special_ids_beyond,
)
from roll.models.weight_files import INDEX, SINGLE, no_weights, other_weights, shown
from roll.tracking.checkpointer import CheckpointError, find_saved
from roll.utils.registry import extra, import_path

GENERATION_FILE = "generation_config.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def check_models(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Models are ``tiny``, ``smollm2``, a Hugging Face folder, or look like a name on the hub (which is not asked)."""
    for key, model in config.models.items():
        if model == TINY_VL and not (key == "pretrain" and isinstance(config, RLConfig)):
            yield ConfigProblem(key, model, "another model: this one is made for the policy of an RL run")
        if model in TINIES:
            continue
        if model == SMOLLM2:
            try:
                extra("smollm2").make()
            except ValueError as error:
                yield ConfigProblem(
                    key, model, "the package that has its weights, and a cache to make it in", str(error)
                )
            continue
        folder = Path(model).expanduser()
        if (folder / "config.json").is_file():
            readers = [worker for role, worker in sections(config) if config.model_of(role) == model]
            trusts = any(worker.model_args.trust_remote_code for worker in readers)
            _, problem = _read_config(model, trust_remote_code=trusts)
            if problem and "trust_remote_code" not in problem:  # see check_trust
                yield ConfigProblem(key, model, "a model that Transformers knows", problem)
            continue
        if folder.exists():
            yield ConfigProblem(key, model, "a folder that holds a config.json in Hugging Face format", _meant(model))
        elif not _HUB_ID.fullmatch(model):
            near = nearest(folder.name, [path.name for path in folder.parent.glob("*")])
            hint = f"did you mean {folder.parent / near}?" if near else "there is nothing at this path"
            yield ConfigProblem(
                key, model, "tiny, tiny_vl, smollm2, an existing model folder, or an org/name on the hub", hint
            )
    seen = config.resume_from_checkpoint
    if isinstance(seen, str) and not Path(seen).expanduser().is_dir():
        yield ConfigProblem("resume_from_checkpoint", seen, "true, false or an existing checkpoint folder")


def _meant(model: str) -> str:
    """What to do about a folder that is no model's."""
    folder = Path(model).expanduser()
    if (folder / ADAPTER_CONFIG).is_file():
        return f"an adapter: roll export {model} -o FOLDER --merge-adapter makes a model of it"
    try:
        saved = find_saved(model)
    except CheckpointError as error:
        return str(error)
    return f"the model that was saved last in it is {saved.model}" if saved.checkpoint is not None else ""


def check_trust(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Models that come with code of their own, without which they cannot be read, are trusted."""
    for role, worker in sections(config):
        model = config.model_of(role)
        if worker.model_args.trust_remote_code or model in TINIES:
            continue
        if role != "actor_train" and model == config.pretrain:
            continue  # a copy of the policy says what actor_train does: a rule
        if "trust_remote_code" in _read_config(model)[1]:
            files = ", ".join(sorted(path.name for path in Path(model).expanduser().glob("*.py")))
            expected = f"true, for a model with its own code ({files}), once you have read it"
            key = f"{role}.model_args.trust_remote_code"
            yield ConfigProblem(key, False, expected, f"the model is {model}", involves=("pretrain",))


def trusted_code(config: PipelineConfig) -> list[str]:
    """A warning for every model whose own code may run, with the key that allows it and the folder."""
    found = []
    for role, worker in sections(config):
        if worker.model_args.trust_remote_code:
            own_tokenizer = config.tokenizer_path if role == "actor_train" else None
            folders = " and ".join(filter(None, (config.model_of(role), own_tokenizer)))
            found.append((f"{role}.model_args.trust_remote_code", folders))
    for name, domain in getattr(config, "rewards", {}).items():
        for number, verifier in enumerate(domain.verifiers):
            args, base = verifier.args, f"rewards.{name}.verifiers.{number}.args"
            if args.get("trust_remote_code"):
                found.append((f"{base}.trust_remote_code", args.get("model_path")))
            if ((args.get("engine") or {}).get("model_args") or {}).get("trust_remote_code"):
                found.append((f"{base}.engine.model_args.trust_remote_code", args.get("judge_model_name")))
    judge = getattr(config, "judge", None)
    if judge is not None and judge.engine.model_args.trust_remote_code:
        found.append(("judge.engine.model_args.trust_remote_code", judge.model))
    return [f"{key}: Python files that come with {model} run, with all permissions of this run" for key, model in found]


def untried_models(config: PipelineConfig) -> list[str]:
    """One warning with all models whose family no test has compared with plain Transformers in their engines."""
    found: dict[str, list[str]] = {}
    for role, worker in sections(config):
        name, kinds = worker.strategy_args.strategy_name, _model_types(config.model_of(role))
        if kinds and not is_proved(kinds, name) and name not in found.setdefault(kinds[0], []):
            found[kinds[0]].append(name)
    pairs = [f"{kind} in {', '.join(names)}" for kind, names in found.items() if names]
    if not pairs:
        return []
    advice = "compare log-probabilities before you trust a long run; docs/models.md lists what has been compared"
    return [f"no test has compared these with plain Transformers: {'; '.join(pairs)}; {advice}"]


def quantised_generators(config: PipelineConfig) -> list[str]:
    """A warning for every generator that computes with weights in fewer bits than the trainer's."""
    found = []
    for role, worker in sections(config):
        method = worker.strategy_args.strategy_config.get("quantization")
        if method is not None and task_of(role) == "generates":
            words = "its log-probabilities differ from the trainer's more than usual, see train_infer_correction; "
            words += "tests compare fp8_per_channel on a CPU, and nothing on GPUs"
            found.append(f"{role}.strategy_args.strategy_config.quantization: {method}: {words}")
    return found


def untested_options(config: PipelineConfig) -> list[str]:
    """A warning for every option of an engine that needs hardware which no test has had."""
    found = []
    for role, worker in sections(config):
        arguments = worker.strategy_args
        for key, words in arguments.card.untested(arguments.typed()) if arguments.card is not None else ():
            value = show(arguments.strategy_config.get(key))
            found.append(f"{role}.strategy_args.strategy_config.{key}: {value}: {words}")
    return found


def _model_types(model: str) -> list[str]:
    """What a folder says its model is, with its text part last; empty for what is not on this machine."""
    file = Path(model).expanduser() / "config.json"
    try:
        whole = json.loads(file.read_text(encoding="utf-8")) if model not in TINIES else {}
        parts = [whole, whole.get("text_config") or {}]
        return [kind for part in parts if isinstance(kind := part.get("model_type"), str)]
    except (OSError, ValueError, AttributeError):
        return []  # see check_models


def check_tokenizer(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """The policy's tokenizer is one, and the models that read its tokens have a row for each."""
    path, model = config.tokenizer_path, config.pretrain
    if model in TINIES:
        if path is not None:
            yield ConfigProblem(
                "tokenizer_path", path, "null with pretrain tiny, which has its own", involves=("pretrain",)
            )
        return
    key, seen = ("pretrain", model) if path is None else ("tokenizer_path", path)
    folder = model_folder(seen)
    if not folder.exists() and _HUB_ID.fullmatch(seen):
        return
    if path is None and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        return  # a run needs one, which may come later
    try:
        tokenizer = policy_tokenizer(model, path, trust_remote_code=config.trusts("actor_train"))
    except ValueError as error:
        if path is not None or "trust_remote_code" not in str(error):  # see check_trust
            yield ConfigProblem(key, seen, "a tokenizer's folder, or an org/name on the hub", str(error))
        return
    found = set()
    for role in dict.fromkeys(role for role, _ in sections(config)):
        owner = next(name for name, path in config.models.items() if path == config.model_of(role))
        reads = role in config.roles and not (kind_of(role) == "teacher" and config.aligns_teacher)
        if not reads or owner in found or (sizes := model_config(config, role)) is None:
            continue
        found.add(owner)
        try:
            check_vocabulary(tokenizer, sizes.vocab_size)
        except ValueError as error:
            expected = f"at most {sizes.vocab_size} tokens, the vocabulary of {owner}"
            yield ConfigProblem(key, seen, expected, str(error), involves=("pretrain", owner))


def check_special_tokens(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """The tokens that begin, end and pad sequences have a row in the model's embedding."""
    sizes = None if config.pretrain in TINIES else model_config(config, "actor_train")
    if sizes is None:
        return
    try:
        generation = json.loads((model_folder(config.pretrain) / GENERATION_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        generation = {}
    if not isinstance(generation, dict):
        expected = f"a mapping in its {GENERATION_FILE}, as Transformers writes one"
        yield ConfigProblem("pretrain", config.pretrain, expected, f"it holds {json.dumps(generation)[:100]}")
        generation = {}
    for name, entries in {"config.json": sizes.to_dict(), GENERATION_FILE: generation}.items():
        for problem in special_ids_beyond(entries, sizes.vocab_size):
            yield ConfigProblem("pretrain", config.pretrain, "special tokens that the model has", f"{name}: {problem}")


def check_folders(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Models' folders hold their models' tensors and no others, by the headers of the files."""
    seen = set()
    for role, worker in sections(config):
        path, card, args = config.model_of(role), worker.strategy_args.card, worker.model_args
        if card is None or card.size_key is not None or not _has_weights(path):
            continue  # engines with a reader of their own, or weights that are elsewhere
        head = "value" if role == "critic" else "score" if role == "actor_train" and config.trains_scores else "lm"
        about = (path, head, repr(sorted(args.model_config_kwargs.items())))
        if about in seen or model_config(config, role) is None:
            continue
        seen.add(about)
        from roll.models.loading import fit_folder, load_config

        trusts = args.trust_remote_code
        try:
            whole = load_config(path, args.model_config_kwargs, trust_remote_code=trusts)
            fit_folder(head, path, whole, trust_remote_code=trusts, sampled=True)  # type: ignore[arg-type]
        except ValueError as error:
            key = next(key for key, model in config.models.items() if model == path)
            yield ConfigProblem(key, path, "a folder whose tensors are those of its config.json", str(error))


def check_low_precision(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Generators with a reader of their own are not sent weights of 16 bits for tensors that they hold in fewer."""
    for role, worker in sections(config):
        card, path = worker.strategy_args.card, config.model_of(role)
        sent = task_of(role) == "generates" and not config.uses_lora
        if not sent or card is None or card.size_key is None or path in TINIES:
            continue
        if (scheme := scheme_in(model_folder(path))) is not None:
            expected = f"a model in bf16 with {card.name}, such as `roll export {path} -o DIR` makes of it"
            hint = f"{card.name} would load its {scheme.method} weights as they are, which cannot take trained ones"
            involved = (f"{role}.strategy_args.strategy_name",)
            yield ConfigProblem("pretrain", path, expected, hint, involves=involved)


def check_formats(config: PipelineConfig, *, needed: bool = False) -> Iterator[ConfigProblem]:
    """Models' folders have their weights in safetensors files.

    Args:
        needed: a folder that has none at all is wrong too, as for a run.
    """
    for key, model in config.models.items():
        folder = model_folder(model)
        if model not in TINIES and _is_here(model) and not _has_weights(model) and (needed or other_weights(folder)):
            yield ConfigProblem(key, model, "a folder with weights in safetensors files", no_weights(folder))


def _outline(config: PipelineConfig, role: str, *, pictures: bool = False) -> Any:
    """A role's model on the meta device, or ``None`` where none can be made of its configuration (``check_models``)."""
    from roll.models.loading import outline

    try:
        whole = whole_config(config, role)
        return outline("lm", whole, trust_remote_code=config.trusts(role), pictures=pictures)
    except ValueError:
        return None


def _has_weights(model: str) -> bool:
    folder = model_folder(model)
    return model not in TINIES and any((folder / name).is_file() for name in (SINGLE, INDEX))


def describe_adapter(config: PipelineConfig) -> list[str]:
    """A line on what ``lora_target`` leaves as it is though one might expect it in the adapter."""
    args = config.actor_train.model_args
    sizes = model_config(config, "actor_train") if args.lora_targets and config.pretrain not in TINIES else None
    if sizes is None or (model := _outline(config, "actor_train")) is None:
        return []
    from roll.models.lora import left_out

    found = left_out(model, args.lora_targets, args.lora_excluded)
    lines = [f"actor_train.model_args.lora_target: {args.lora_target} leaves without adapter: {found}"] if found else []
    if args.adapter_name_or_path is not None and (base := _other_base(config.pretrain, args.adapter_name_or_path)):
        own = f"the adapter was made for {base}, pretrain is {config.pretrain}"
        lines.append(f"actor_train.model_args.adapter_name_or_path: {own}; it fits none but its own")
    return [f"warning: {line}" for line in lines]


def _other_base(model: str, adapter: str) -> str:
    """The model that an adapter says it was made for, where that is another; empty where it is not known to be."""
    try:
        base = read_adapter_config(Path(adapter).expanduser()).get("base_model_name_or_path")
    except ValueError:
        return ""
    same = base is None or Path(base).expanduser().resolve().name == Path(model).expanduser().resolve().name
    return "" if same else str(base)


def check_fit(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """The model is one that each role's engine can run, and its sizes divide into the role's parallel layout."""
    for role, worker in sections(config):
        card = worker.strategy_args.card
        if card is None:
            continue
        # The tiny model is made to fit what does not split it; reading its sizes takes seconds of imports.
        whole = card.splits_heads and _devices_per_sequence(worker, card) == 1
        sizes = None if whole and config.model_of(role) in TINIES else model_config(config, role)
        if sizes is None:
            continue
        found = list(_import(card.fit)(role, worker, sizes, config)) if card.fit else []
        if not found and card.splits_heads:
            found += head_problems(worker, card, sizes)
        yield from [problem.under(role) for problem in found]


def head_problems(worker: WorkerConfig, card: EngineCard, sizes: Any) -> Iterator[ConfigProblem]:
    """Attention heads that cannot be dealt out to the devices which share a sequence, keys relative to the role."""
    ulysses = worker.model_args.ulysses_size if card.trains_modules else 1
    split = _devices_per_sequence(worker, card)
    tensor, heads = split // ulysses, sizes.num_attention_heads
    kv_heads = getattr(sizes, "num_key_value_heads", None) or heads
    own = kv_heads // tensor
    seen, expected = split, f"sizes that divide the {heads} attention heads"
    if heads % split:
        fits = [n for n in range(1, heads + 1) if heads % n == 0]
    elif ulysses > 1 and own % ulysses and ulysses % max(1, own):
        fits = [n for n in range(1, heads + 1) if heads // tensor % n == 0 and (own % n == 0 or n % own == 0)]
        seen, expected = ulysses, f"a divisor or a multiple of the {own} key-value heads"
    else:
        return
    hint = f"the nearest is {min(fits, key=lambda n: abs(n - seen))}"
    if ulysses > 1:
        hint += " in all" if tensor > 1 and seen == split else ""
        yield ConfigProblem("model_args.ulysses_size", ulysses, expected, hint)
        return
    sizes_given = {key: size for key, size in worker.strategy_args.typed().parallel_sizes.items() if size > 1}
    key = f"strategy_args.strategy_config.{next(iter(sizes_given))}" if sizes_given else "num_gpus_per_worker"
    yield ConfigProblem(key, split, expected, hint)


def _devices_per_sequence(worker: WorkerConfig, card: EngineCard) -> int:
    return worker.num_gpus_per_worker if card.size_key else worker.devices_per_copy


def _import(path: str) -> Any:
    return import_path(path, "check")


def check_experts(config: PipelineConfig) -> list[ConfigProblem]:
    """Experts are replayed of a model that has some."""
    key, mode = "actor_train.router_replay.mode", config.actor_train.router_replay.mode
    sizes = None if mode == "disable" else model_config(config, "actor_train")
    if sizes is None:
        return []
    from roll.models.routing import expert_sizes

    if all(expert_sizes(sizes)):
        return []
    expected = f"disable: {type(sizes).__name__} has no experts to choose from"
    return [ConfigProblem(key, mode, expected, involves=("pretrain",))]


def check_packing(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Sequences stand in one row of a model that keeps them apart."""
    for role, worker in sections(config):
        model, card = config.model_of(role), worker.strategy_args.card
        packs = worker.use_sequence_packing and card is not None and card.packs_modules and task_of(role) != "generates"
        whole = whole_config(config, role) if packs and model != TINY else None
        if whole is None:
            continue
        from roll.models.measured import has_own_code, packing_problem

        own = worker.model_args.trust_remote_code and bool(getattr(whole, "auto_map", None))
        kernel = worker.model_args.attn_implementation
        if problem := packing_problem(whole, own_code=own or has_own_code(whole), kernel=kernel):
            key, expected = f"{role}.use_sequence_packing", f"false: {whole.model_type} {problem}"
            yield ConfigProblem(key, True, expected, involves=("pretrain",))
        elif card is not None and (option := card.no_states(worker.strategy_args.typed())):
            from roll.models.planned_attention import find_state_layers

            if (model := _outline(config, role)) is not None and find_state_layers(model):
                expected = f"false with {option}: {type(model).__name__} has layers with a state"
                yield ConfigProblem(f"{role}.use_sequence_packing", True, expected, involves=("pretrain",))


def check_attention(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Attention is computed as the model has it: with its cap, and with rotary positions that are each row's own."""
    for role, worker in sections(config):
        card = worker.strategy_args.card
        applies = card is not None and card.packs_modules and config.model_of(role) != TINY
        if not applies or (sizes := model_config(config, role)) is None:
            continue
        from roll.models.loading import attention_problem, rope_problem

        key, kernel = f"{role}.model_args.attn_implementation", worker.model_args.attn_implementation
        if expected := attention_problem(sizes, kernel):
            yield ConfigProblem(key, kernel, expected, involves=("pretrain",))
        if expected := rope_problem(sizes, config.longest_sequence):
            yield ConfigProblem("sequence_length", config.longest_sequence, expected, involves=("pretrain",))
            return


def check_positions(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """The model has positions for the longest sample."""
    most = MAX_POSITIONS
    if config.pretrain not in TINIES:
        sizes = model_config(config, "actor_train")
        most = getattr(sizes, "max_position_embeddings", None) or config.longest_sequence
    for key in ("sequence_length", "val_sequence_length"):
        if (length := getattr(config, key, None) or 0) > most:
            expected = f"at most {most}, the positions that the model has"
            yield ConfigProblem(key, length, expected, involves=("pretrain",))


def check_trained_format(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """A checkpoint in fp16 is not trained in it."""
    for role in TRAINED:
        worker = getattr(config, role, None)
        if worker is None or compute_dtype(role, worker)[1] is not None:
            continue
        sizes = None if config.pretrain in TINIES else model_config(config, role)
        if str(getattr(sizes, "dtype", None)) == "torch.float16":
            expected = "bf16 or fp32: the model is in fp16, and training in that would need loss scaling"
            yield ConfigProblem(f"{role}.model_args.dtype", None, expected, involves=("pretrain",))


def check_model_kwargs(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """``model_config_kwargs`` are entries that the model's configuration has."""
    for role, worker in sections(config):
        given = worker.model_args.model_config_kwargs
        trusts = worker.model_args.trust_remote_code
        path = config.model_of(role)
        sizes, _ = _read_config(path, *config.tiny_sizes, trust_remote_code=trusts) if given else (None, "")
        known = set() if sizes is None else set(sizes.to_dict())
        for key in given if sizes is not None else ():
            if not hasattr(sizes, key):
                hint = did_you_mean(key, sorted(known))
                path = f"{role}.model_args.model_config_kwargs.{key}"
                expected = f"an entry of {type(sizes).__name__}"
                yield ConfigProblem(path, given[key], expected, hint, involves=("pretrain",))


def check_adapted_layers(config: PipelineConfig) -> list[ConfigProblem]:
    """The model has the layers that ``lora_target`` names, and the trainer can adapt them."""
    worker = config.actor_train
    args, card = worker.model_args, worker.strategy_args.card
    targets, adapter_fit = args.lora_targets, card.adapter_fit if card else None
    # The tiny model has what all-linear means; to look costs seconds of imports.
    plain = config.pretrain in TINIES and targets == ("all-linear",) and not (adapter_fit or args.lora_excluded)
    sizes = model_config(config, "actor_train") if targets and not plain else None
    if sizes is None or (model := _outline(config, "actor_train")) is None:
        return []
    from roll.models.lora import UnknownLayerError, adapted_layers

    try:
        layers = adapted_layers(model, targets, args.lora_excluded)
    except UnknownLayerError as error:
        key = f"actor_train.model_args.{error.key}"
        return [ConfigProblem(key, getattr(args, error.key), error.expected, error.reason, involves=("pretrain",))]
    found = _import(adapter_fit)(worker, sizes, layers) if adapter_fit else ()
    return [problem.under("actor_train") for problem in found]


def check_frozen_parts(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """The model has the parts that ``freeze_module_prefix`` and ``learning_rate_of`` name, and others to train."""
    for role, worker in sections(config):
        prefixes = worker.model_args.frozen_prefixes if role in TRAINED else ()
        rates = worker.training_args.learning_rate_of if role in TRAINED else {}
        sizes = model_config(config, role) if prefixes or rates else None
        if sizes is None or (model := _outline(config, role)) is None:
            continue
        from roll.models.freezing import FREEZE, RATES, UnknownPartError, frozen_parameters, parts_of

        problems: list[ConfigProblem] = []
        for seeing in (False, True):  # a run with pictures has other names
            if seeing and (model := _outline(config, role, pictures=True)) is None:
                break
            try:
                own = {name: rates[prefix] for name, prefix in parts_of(model, rates, RATES).items()}
                frozen = frozen_parameters(model, prefixes, head=role == "critic")
            except UnknownPartError as error:
                seen = worker.model_args.freeze_module_prefix if error.key == FREEZE else rates
                key, expected = f"{role}.{error.key}", error.expected
                problems = problems or [ConfigProblem(key, seen, expected, error.reason, involves=("pretrain",))]
                continue
            fit = card.frozen_fit if (card := worker.strategy_args.card) else None
            problems = [each.under(role) for each in _import(fit)(worker, sizes, frozen, own)] if fit else []
            break
        yield from problems


def check_teacher(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """An id that the policy and a teacher have stands for the same token, where both are on this machine."""
    if config.aligns_teacher or not has_tokenizer(config):
        return
    for key, teacher in config.models.items():
        role = "teacher" if key == "teacher_pretrain" else key.removesuffix(".pretrain")
        if kind_of(role) != "teacher" or not _is_here(teacher):
            continue
        try:
            trust = {"trust_policy": config.trusts("actor_train"), "trust_other": config.trusts(role)}
            check_same_ids(config.pretrain, teacher, config.tokenizer_path, **trust)
        except ValueError as error:
            expected = "a model with the policy's vocabulary, or in an RL run align_tokenizers: text"
            yield ConfigProblem(key, teacher, expected, str(error), involves=("pretrain",))


def pictures_refused(config: PipelineConfig) -> str:
    """Why a run's prompts must have no pictures, in words; empty: they may. Models that are not here are not asked."""
    if why := no_pictures(config):
        return why
    for key, model in config.models.items():
        path = model_folder(model) / "config.json"
        if model in (SMOLLM2, *TINIES) or not path.is_file():
            continue
        entries = json.loads(path.read_text(encoding="utf-8"))
        if not entries.get("vision_config"):
            if key == "pretrain":  # the renderer says so
                continue
            return f"{key} is a model without pictures"
        from roll.models.loading import ADAPTED_CLASSIFIERS  # brings torch
        from roll.models.pictures import FAMILIES

        if entries.get("model_type") not in FAMILIES:
            families = ", ".join(FAMILIES)
            return f"{key} is of the family {entries.get('model_type')}, expected one that was compared: {families}"
        if config.trains_scores and config.uses_lora and entries["model_type"] not in ADAPTED_CLASSIFIERS:
            compared = ", ".join(ADAPTED_CLASSIFIERS)
            return f"adapters of reward models that see were compared on {compared}, not on {entries['model_type']}"
        for role, worker in config.roles.items():
            card = worker.strategy_args.card
            if card is not None and (why := card.blind_to(entries["model_type"], worker)):
                return f"{role}'s {worker.strategy_args.strategy_name} {why}"
    return ""


def media_refused(config: PipelineConfig) -> dict[str, str]:
    """By the type of a part of a message, why a run's rows must have none; empty: they may."""
    pictures = pictures_refused(config)
    return {"image": pictures, "video": pictures or _videos_refused(config)}


def _videos_refused(config: PipelineConfig) -> str:
    if why := no_videos(config):
        return why
    from roll.models.pictures import VIDEO_FAMILIES  # brings torch
    from roll.rewards.scorer import sees

    for name, domain in getattr(config, "rewards", {}).items():
        with suppress(ValueError):  # arguments that others tell of
            if sees(domain):
                return f"rewards.{name} has a verifier that sees pictures, which has not been compared on videos"
    for key, model in config.models.items():
        if (family := _seeing_family(model)) not in (None, *VIDEO_FAMILIES):
            compared = ", ".join(VIDEO_FAMILIES)
            return f"{key} is of the family {family}, expected one that was compared on videos: {compared}"
    return ""


def _seeing_family(model: str) -> str | None:
    """``model_type`` of a model with a vision tower; ``None`` for others and for those that are not here."""
    if model == TINY_VL:
        return "qwen2_5_vl"
    path = model_folder(model) / "config.json"
    if model in (SMOLLM2, TINY) or not path.is_file():
        return None
    entries = json.loads(path.read_text(encoding="utf-8"))
    return str(entries.get("model_type")) if entries.get("vision_config") else None


def check_shown_pictures(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Programs and tools show pictures to a policy that takes them alone, and so do verifiers to a judge."""
    for key, model in _shown_judges(config):
        if _has_no_tower(Path(model).expanduser()):
            yield ConfigProblem(key, True, f"false: the judge {model} takes no pictures")
    for key in config.showing if isinstance(config, RLConfig) else ():
        if why := _blindness(config):
            yield ConfigProblem(key, True, f"false: {why}", involves=("pretrain",))


def check_pixels(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Pixels are bounded where there may be pictures."""
    for role, worker in sections(config):
        for phase in ("train", "infer"):
            most = getattr(worker, key := f"max_pixels_per_microbatch_in_{phase}")
            if most is not None and (why := _blindness(config)):
                yield ConfigProblem(f"{role}.{key}", most, f"null: {why}", involves=("pretrain",))


def _blindness(config: PipelineConfig) -> str:
    """Why the policy is shown no pictures, in words; empty: it is, or its model is not here."""
    is_blind = config.pretrain in (SMOLLM2, TINY) or _has_no_tower(model_folder(config.pretrain))
    return pictures_refused(config) or (f"the model {config.pretrain} takes no pictures" if is_blind else "")


def _has_no_tower(folder: Path) -> bool:
    """Tells whether the model in a folder takes no pictures; false where it is not here."""
    path = folder / "config.json"
    return path.is_file() and not json.loads(path.read_text(encoding="utf-8")).get("vision_config")


def _shown_judges(config: PipelineConfig) -> Iterator[tuple[str, str]]:
    """Keys by which the judges that a run hosts get pictures, and these models."""
    judge = getattr(config, "judge", None)
    if judge is not None and judge.pictures:
        yield "judge.pictures", judge.model
    for name, domain in getattr(config, "rewards", {}).items():
        for number, verifier in enumerate(domain.verifiers):
            args = verifier.args
            if verifier.name == "judge" and args.get("pictures") and args.get("judge_model_type") == "inference":
                yield f"rewards.{name}.verifiers.{number}.args.pictures", str(args.get("judge_model_name"))


def has_tokenizer(config: PipelineConfig) -> bool:
    """Tells whether the policy's tokenizer is on this machine."""
    own = config.tokenizer_path
    return _is_here(config.pretrain) if own is None else model_folder(own).is_dir()


def _is_here(model: str) -> bool:
    return model in TINIES or (model_folder(model) / "config.json").is_file()


def check_adapted_classifier(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """A reward model of some families is trained whole, without an adapter."""
    if not (config.trains_scores and config.uses_lora) or (whole := whole_config(config, "actor_train")) is None:
        return
    from roll.models.loading import adapted_classifier_problem

    if problem := adapted_classifier_problem(whole.model_type):
        key = "actor_train.model_args.lora_target"
        yield ConfigProblem(key, config.actor_train.model_args.lora_target, "null", problem, involves=("pretrain",))


def check_adapter_start(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """The adapter to start from is one of the shape that is trained."""
    args = config.actor_train.model_args
    if (path := args.adapter_name_or_path) is None:
        return
    key, folder = "actor_train.model_args.adapter_name_or_path", Path(path).expanduser()
    try:
        stored = read_adapter_config(folder)
    except ValueError as error:
        yield ConfigProblem(key, path, "a folder that peft has saved an adapter in", str(error))
        return
    rank, alpha, task = stored["r"], stored["lora_alpha"], stored.get("task_type")
    if (task == CLASSIFIES) != config.trains_scores:
        expected = f"an adapter of task_type {CLASSIFIES if config.trains_scores else GENERATES}"
        yield ConfigProblem(key, path, expected, f"task_type: {task} in {ADAPTER_CONFIG}")
    if unusual := unusual_entry(stored):
        yield ConfigProblem(key, path, "an adapter without it", f"{unusual} in {ADAPTER_CONFIG}")
    fits = True
    for name, own, theirs in (("lora_rank", args.lora_rank, rank), ("lora_alpha", args.adapter_alpha, alpha)):
        if own != theirs:
            fits = False
            expected = f"{theirs}, as the adapter in {path} has it"
            yield ConfigProblem(f"actor_train.model_args.{name}", own, expected, involves=(key,))
    if fits and not unusual and (reason := _adapter_misfit(config, folder)):
        yield ConfigProblem(
            key, path, "an adapter of the layers that lora_target names", reason, involves=("pretrain",)
        )


def _adapter_misfit(config: PipelineConfig, folder: Path) -> str:
    """Why the matrices in a folder are not those of the adapter that is trained; empty if they are."""
    args = config.actor_train.model_args
    sizes = None if config.pretrain in TINIES else model_config(config, "actor_train")
    if sizes is None or (model := _outline(config, "actor_train")) is None:
        return ""
    from roll.models.lora import LoraSpec, UnknownLayerError, matrix_shapes

    spec = LoraSpec(args.lora_rank, args.adapter_alpha, args.lora_targets, excluded=args.lora_excluded)
    try:
        expected = matrix_shapes(model, spec)
        stored = matrix_shapes_in(folder)
    except UnknownLayerError:
        return ""  # see check_adapted_layers
    except ValueError as error:
        return str(error)
    if config.trains_scores:
        return ""  # its names are those of the trunk
    if others := stored.keys() - expected.keys():
        return f"{ADAPTER_FILE} has {shown(others)} too"
    if missing := expected.keys() - stored.keys():
        return f"{ADAPTER_FILE} lacks {shown(missing)}"
    wrong = next((name for name, shape in stored.items() if shape != expected[name]), None)
    return "" if wrong is None else f"{wrong}: got shape {stored[wrong]}, expected {expected[wrong]}"


MODEL_CHECKS: tuple[Rule, ...] = (
    check_models,
    check_trust,
    check_folders,
    check_low_precision,
    check_formats,
    check_tokenizer,
    check_special_tokens,
    check_model_kwargs,
    check_fit,
    check_experts,
    check_packing,
    check_attention,
    check_positions,
    check_trained_format,
    check_adapted_layers,
    check_adapted_classifier,
    check_adapter_start,
    check_frozen_parts,
    check_shown_pictures,
    check_pixels,
    check_teacher,
)


def model_config(config: PipelineConfig, role: str) -> Any:
    """A role's model as its text part is configured; otherwise as ``whole_config``."""
    whole = whole_config(config, role)
    return None if whole is None else whole.get_text_config()


def whole_config(config: PipelineConfig, role: str) -> Any:
    """A role's model as it is configured, ``model_config_kwargs`` included; ``None`` if it is not on this machine or
    wrong, which is reported elsewhere."""
    worker = config.section_of(role)
    assert worker is not None, "a role that the configuration has"
    args = worker.model_args
    trusts, given = args.trust_remote_code, args.model_config_kwargs
    whole, _ = _read_config(config.model_of(role), *config.tiny_sizes, trust_remote_code=trusts)
    if whole is None or not all(hasattr(whole, key) for key in given):
        return None
    return type(whole).from_dict(whole.to_dict() | given) if given else whole


def _read_config(path: str, *tiny_sizes: int, trust_remote_code: bool = False) -> tuple[Any, str]:
    """A model's configuration, and why it cannot be read; neither where there is none on this machine."""
    if path in TINIES:
        from transformers import Qwen2_5_VLConfig, Qwen2Config

        from roll.models.tiny import picture_config, tiny_config

        if path == TINY_VL:
            return Qwen2_5_VLConfig.from_dict(picture_config(*tiny_sizes)), ""
        return Qwen2Config(**tiny_config(*tiny_sizes)), ""
    file = model_folder(path) / "config.json"
    if not file.is_file():
        return None, ""
    try:
        return _parse_config(path, file.read_text(encoding="utf-8"), trust_remote_code)
    except OSError as error:
        return None, str(error)


@functools.lru_cache(maxsize=8)
def _parse_config(path: str, text: str, trust_remote_code: bool) -> tuple[Any, str]:
    """The same for a folder whose ``config.json`` says ``text``."""
    try:
        content = json.loads(text)
    except ValueError as error:
        return None, f"config.json: {error}"
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        return None, "config.json: no model_type in it"
    from roll.models.loading import load_config

    try:
        return load_config(path, trust_remote_code=trust_remote_code), ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, str(error).splitlines()[0]
