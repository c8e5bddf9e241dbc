"""Rules that concern several sections of a configuration with rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from roll.configs.pipeline import TINY
from roll.configs.problems import NOTHING, ConfigProblem
from roll.configs.prompts import REWARD_CLUSTER
from roll.configs.rl import RLConfig
from roll.configs.rules import TRAINED, Rule
from roll.configs.worker import WorkerConfig


def check_held_out_lengths(config: RLConfig) -> Iterator[ConfigProblem]:
    """A held-out prompt leaves room for an answer."""
    prompt, whole = config.lengths(held_out=True)
    if (prompt, whole) != config.lengths(held_out=False) and whole <= prompt:
        key = "val_prompt_length" if config.val_sequence_length is None else "val_sequence_length"
        expected = f"room for an answer: held-out prompts of {prompt}, held-out samples of {whole} tokens"
        involved = ("val_prompt_length", "val_sequence_length", "prompt_length", "sequence_length")
        yield ConfigProblem(key, getattr(config, key), expected, involves=involved)


def check_rl_roles(config: RLConfig) -> Iterator[ConfigProblem]:
    """Roles that the algorithm needs are there."""
    if config.uses_critic and config.critic is None and not config.eval_only:
        expected = f"a section like actor_train, since adv_estimator {config.adv_estimator} needs values"
        yield ConfigProblem("critic", NOTHING, expected, involves=("adv_estimator",))
    if config.refers_to_actor and config.reference is not None:
        expected = "no section: with lora_target the reference is the actor without its adapter"
        lora = ("actor_train.model_args.lora_target",)
        yield ConfigProblem("reference", "a section", expected, involves=lora)
    if config.uses_reference and config.reference is None and not config.refers_to_actor:
        expected = f"a section with a scoring strategy, since {config.why_reference} is switched on"
        involved = ("add_token_level_kl", "use_kl_loss", "kl_loss_coef")
        yield ConfigProblem("reference", NOTHING, expected, involves=involved)
    if (other := config.reference_pretrain) is not None and not config.uses_reference:
        expected = "null, since no KL term is switched on"
        yield ConfigProblem("reference_pretrain", other, expected, involves=("use_kl_loss",))
    if other is not None and config.uses_full_kl:
        expected = "an estimator such as k3: hidden states of another model fit no output layer of the policy"
        yield ConfigProblem("kl_penalty", config.kl_penalty, expected, involves=("reference_pretrain",))
    if config.teacher_roles and config.opd_form == "reward" and config.adv_estimator == "gdpo":
        expected = "advantage or loss with adv_estimator gdpo, which reads rewards by name"
        yield ConfigProblem("opd_form", config.opd_form, expected, involves=("adv_estimator", "teacher"))
    if config.uses_lora and config.uses_full_kl:
        expected = "an estimator such as k3: with lora_target no reference sends hidden states"
        yield ConfigProblem("kl_penalty", config.kl_penalty, expected, involves=("actor_train.model_args.lora_target",))


def check_batches(config: RLConfig) -> Iterator[ConfigProblem]:
    """Whole optimizer steps make up a rollout, and the critic takes as many as the actor."""
    for role in TRAINED:
        worker = config.roles.get(role)
        # An uneven split of the devices is the business of check_parallelism.
        if worker is None or worker.num_devices % worker.devices_per_copy:
            continue
        arguments, base = worker.training_args, f"{role}.training_args"
        batch, samples = worker.global_train_batch_size, config.trained_per_step
        words = (
            f"{arguments.per_device_train_batch_size} per device × {arguments.gradient_accumulation_steps} accumulated "
            f"× {worker.data_parallel_size} data-parallel = {batch}"
        )
        hint = ""
        if samples % batch:
            expected = f"the global batch ({words}) to divide {config.samples_in_words}"
            hint = _nearest_batch(worker, samples)
        elif role == "critic" and batch != config.actor_train.global_train_batch_size:
            expected = f"the global batch ({words}) to be that of actor_train"
        else:
            continue
        involves = [
            f"{name}.{key}"
            for name in {role, "actor_train"}
            for key in ("training_args.per_device_train_batch_size", "device_mapping", "world_size", "strategy_args")
        ]
        path, seen = f"{base}.gradient_accumulation_steps", arguments.gradient_accumulation_steps
        involved = ("rollout_batch_size", "actor_train.training_args.gradient_accumulation_steps", *involves)
        yield ConfigProblem(path, seen, expected, hint, involves=involved)


def check_overlap(config: RLConfig) -> Iterator[ConfigProblem]:
    """Rollouts beside training: what was sampled with older weights is weighted, and nothing is set in vain."""
    ratio = "async_generation_ratio"
    if not config.overlaps:
        return
    if not config.groups_ahead:
        least = math.ceil(1e4 / config.groups_per_step) / 1e4
        expected = f"0, or at least {least:g}: one of the {config.groups_per_step} groups of a step"
        yield ConfigProblem(ratio, config.async_generation_ratio, expected, involves=("rollout_batch_size",))
    if config.extra_groups and config.rollout_window:
        expected = "0 with is_use_additional_prompts: a step takes the first groups that finish"
        involved = ("is_use_additional_prompts",)
        yield ConfigProblem("rollout_window", config.rollout_window, expected, involves=involved)
    weights = config.train_infer_correction.is_weight
    has_ratio = config.bypasses_old_logprobs and config.variant.off_policy
    if not (weights.enabled or has_ratio or config.learns_from_any_policy):
        key = "train_infer_correction.is_weight.enabled"
        expected = f"true with {ratio} {config.async_generation_ratio:g}"
        hint = "rollouts are older than the policy that they train; their losses need importance weights"
        yield ConfigProblem(key, weights.enabled, expected, hint, involves=(ratio,))
    if (frequency := config.actor_train.model_update_frequency) > 1:
        key = "actor_train.model_update_frequency"
        yield ConfigProblem(key, frequency, f"1 with {ratio}", involves=(ratio,))
    name, card = config.actor_infer.strategy_args.strategy_name, config.actor_infer.strategy_args.card
    if config.kv_after_update == "keep" and card is not None and not card.keeps_kv:
        involved = ("actor_infer.strategy_args.strategy_name",)
        yield ConfigProblem("kv_after_update", "keep", f"recompute with {name}", involves=involved)
    if config.replay_schedule is not None:
        if card is None or not card.replays:
            key, hint = "actor_infer.strategy_args.strategy_name", f"{name} cannot hold a request until weights come"
            yield ConfigProblem(key, name, "hf_infer with replay_schedule", hint, involves=("replay_schedule",))
        if config.generate_opt_level != 1:
            key, expected = "generate_opt_level", "1 with replay_schedule"
            yield ConfigProblem(key, config.generate_opt_level, expected, involves=("replay_schedule",))


def check_found_rollouts(config: RLConfig) -> Iterator[ConfigProblem]:
    """Rollouts of another run are taken in the order of the steps."""
    beside = {
        "async_generation_ratio": config.overlaps,
        "is_use_additional_prompts": config.is_use_additional_prompts,
    }
    other = next((key for key, on in beside.items() if on), None)
    if config.rollout_replay_dir is not None and other is not None:
        expected = f"null with {other} {getattr(config, other)}: steps take groups as they finish then"
        yield ConfigProblem("rollout_replay_dir", config.rollout_replay_dir, expected, involves=(other,))


def check_teachers(config: RLConfig) -> Iterator[ConfigProblem]:
    """Each sample is judged by a teacher."""
    if not config.teachers:
        return
    if config.teacher is not None:
        yield ConfigProblem("teachers", "a section", "none beside a section teacher", involves=("teacher",))
    if config.opd_form == "loss":
        expected = "advantage or reward with several teachers: the policy is compared with one output layer"
        yield ConfigProblem("opd_form", config.opd_form, expected, involves=("teachers",))
    for name, teacher in config.teachers.items():
        key = f"teachers.{name}"
        if teacher.pretrain == TINY:
            expected = "a model folder or a name on the hub: a tiny model is made for teacher alone"
            yield ConfigProblem(f"{key}.pretrain", TINY, expected)
        if len(set(teacher.tag_included)) < len(teacher.tag_included):
            yield ConfigProblem(f"{key}.tag_included", teacher.tag_included, "every tag once")
        for tag in dict.fromkeys(teacher.tag_included):
            if tag not in config.tags:
                expected = f"tags that there are: {', '.join(config.tags)}"
                yield ConfigProblem(
                    f"{key}.tag_included", teacher.tag_included, expected, involves=("rewards", "custom_envs")
                )
    involved = ["rewards", "train_env_manager.tags", *(f"teachers.{name}.tag_included" for name in config.teachers)]
    for tag in config.trained_tags:
        judging = [name for name, teacher in config.teachers.items() if teacher.judges(tag)]
        if not judging:
            expected = f"a teacher of every tag; {tag} has none"
            yield ConfigProblem("teachers", ", ".join(config.teachers), expected, involves=(*involved,))
            return
        if len(judging) > 1 and config.align_tokenizers is not None:
            expected = f"null where samples have several teachers, as those of {tag} have: {', '.join(judging)}"
            yield ConfigProblem("align_tokenizers", config.align_tokenizers, expected, involves=("teachers", *involved))
            return


def check_val_infer(config: RLConfig) -> Iterator[ConfigProblem]:
    """Replicas that evaluate hold whole copies of the policy, beside those of the rollouts."""
    if config.val_infer is None:
        return
    key, mapping = "val_infer.device_mapping", config.val_infer.device_mapping
    per_worker, taken = config.actor_infer.num_gpus_per_worker, config.actor_infer.device_mapping or []
    per_key = "actor_infer.num_gpus_per_worker"
    if len(mapping or [0]) % per_worker:
        expected = f"a multiple of {per_key} = {per_worker} devices"
    elif shared := sorted({*taken}.intersection(mapping or [])):
        expected = f"none of actor_infer's devices, such as {shared[0]}: rollouts go on there; or no val_infer"
    else:
        return
    involves = (per_key, "actor_infer.device_mapping")
    yield ConfigProblem(key, NOTHING if mapping is None else mapping, expected, involves=involves)


def check_scorers(config: RLConfig) -> Iterator[ConfigProblem]:
    """A reward model or judge that answers wait for is on its devices while others are trained on theirs."""
    if not config.overlaps:
        return
    others = [worker for role, worker in config.roles.items() if role != "actor_infer"]
    trained = {device for worker in others for device in worker.device_mapping or ()}
    ratio = "async_generation_ratio"
    expected = f"devices apart from those that train and score with {ratio}: answers wait for it meanwhile"
    for name, worker in config.clusters.items():
        if name.startswith(REWARD_CLUSTER) and trained.intersection(worker.device_mapping or ()):
            key = f"{config.key_of(name)}.device_mapping"
            yield ConfigProblem(key, worker.device_mapping, expected, involves=(ratio,))


def _nearest_batch(worker: WorkerConfig, samples: int) -> str:
    """Values that make whole optimizer steps of so many samples."""
    arguments, ranks = worker.training_args, worker.data_parallel_size
    if samples % ranks:
        near = min((n for n in range(1, samples + 1) if samples % n == 0), key=lambda n: abs(n - ranks))
        return f"{ranks} data-parallel ranks cannot share {samples} samples; the nearest is {near}"
    share = samples // ranks
    per_device, steps = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    if share % per_device:
        near = min((n for n in range(1, share + 1) if share % n == 0), key=lambda n: abs(n - per_device))
        return f"per_device_train_batch_size {per_device} does not divide the {share} of a rank; the nearest is {near}"
    near = min((n for n in range(1, share + 1) if share // per_device % n == 0), key=lambda n: abs(n - steps))
    return f"the nearest is {near}"


RL_RULES: tuple[Rule, ...] = (
    check_held_out_lengths,
    check_rl_roles,
    check_batches,
    check_overlap,
    check_found_rollouts,
    check_teachers,
    check_val_infer,
    check_scorers,
)
