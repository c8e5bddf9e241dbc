"""Names in other libraries: a table from a foreign key to the key here, for advice and for importers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Transform = Callable[[Any], Any]

ROLE = "<role>."
"""Start of a key here that belongs to the section which the foreign key stands in, ``actor_train`` or another role."""


def by_hand(value: Any) -> Any:
    """The transform of a value that means nothing here by itself: others are needed to say the same."""
    raise ValueError(f"seen {value!r}, which has no single value here")


@dataclass(frozen=True)
class Foreign:
    """A key of another library.

    Example: ``Foreign("<role>.model_args.dtype", transform=_bf16_if)`` for ``bf16: true``.
    """

    ours: str | None = None
    """The key here, dotted, from the top level or from a role (``ROLE``); ``None``: there is none."""
    note: str = ""
    """Remark to know beside it, or why there is none."""
    transform: Transform | None = None
    """From its value to the one here; ``None``: as it is."""

    @property
    def advice(self) -> str:
        """The hint for a configuration that has the key."""
        if self.ours is None:
            return f"remove it: {self.note}" if self.note else "remove it"
        key = self.ours.removeprefix(ROLE)
        words = f"use {key} of the role" if key != self.ours else f"use {key}"
        return f"{words}; {self.note}" if self.note else words


def _opposite(value: Any) -> Any:
    return not value


def _comma_separated(value: Any) -> Any:
    return ",".join(value) if isinstance(value, list) else value


def _bf16_if(value: Any) -> Any:
    return "bf16" if value else None


def _fp16_if(value: Any) -> Any:
    return "fp16" if value else None


_PIPELINES = {
    "num_return_sequences_in_group": "it belongs to RLVR; here train_env_manager.group_size makes several episodes",
    "is_num_return_sequences_expand": "it belongs to RLVR; here each episode asks for one completion",
    "custom_envs": "it belongs to the agentic pipeline; here rewards and data_args say what is played",
    "train_env_manager": "it belongs to the agentic pipeline; use num_return_sequences_in_group",
    "val_env_manager": "it belongs to the agentic pipeline; here validation",
    "rewards": "it belongs to RLVR; here the environments pay",
    "validation": "it belongs to RLVR; here val_env_manager",
}
"""Top-level keys of one pipeline, in a configuration of another."""

FOREIGN: dict[str, Foreign] = {
    "local_rank": Foreign(note="every worker gets its rank from its cluster"),
    "pipeline_cls": Foreign(note="the start script chooses the pipeline"),
    "val_n_sample": Foreign("validation.generating_args.num_return_sequences"),
    "val_greedy": Foreign("validation.generating_args.do_sample"),
    "global_template": Foreign("actor_train.data_args.template"),
    "max_length": Foreign(
        "actor_infer.generating_args.max_new_tokens", note="sequence_length bounds the whole sample", transform=by_hand
    ),
    "length_penalty": Foreign(note="it only concerns beam search"),
    "logprobs": Foreign(note="log-probabilities are always returned"),
    "include_stop_str_in_output": Foreign(note="the stop string is always kept"),
    "model_name_or_path": Foreign("pretrain", note="reward_pretrain for the critic"),
    "model_type": Foreign(note="the role decides which head the model gets"),
    "offload_nccl": Foreign(),
    "enable_reference": Foreign(note="use_kl_loss or add_token_level_kl start the reference"),
    "num_train_epochs": Foreign("max_steps", note="and ppo_epochs for passes over one rollout", transform=by_hand),
    "dirty_data_mask": Foreign(),
    "open_feedback_turn": Foreign(),
    "use_token_reward": Foreign(),
    "use_dynamic_bsz": Foreign("<role>.use_dynamic_batching_in_train"),
    "ppo_max_token_len_per_gpu": Foreign("<role>.max_tokens_per_microbatch_in_train"),
    "max_token_in_packing": Foreign("<role>.max_tokens_per_microbatch_in_train", note="_in_infer for scoring roles"),
    "max_packing_token_size": Foreign("<role>.max_tokens_per_microbatch_in_train"),
    "log_prob_use_dynamic_bsz": Foreign("<role>.use_dynamic_batching_in_infer"),
    "log_prob_max_token_len_per_gpu": Foreign("<role>.max_tokens_per_microbatch_in_infer"),
    "forward_max_token_len_per_gpu": Foreign("<role>.max_tokens_per_microbatch_in_infer"),
    "log_prob_micro_batch_size": Foreign("<role>.infer_batch_size"),
    "log_prob_micro_batch_size_per_gpu": Foreign("<role>.infer_batch_size"),
    "forward_micro_batch_size": Foreign("<role>.infer_batch_size"),
    "forward_micro_batch_size_per_gpu": Foreign("<role>.infer_batch_size"),
    "generation_batch_size": Foreign("<role>.infer_batch_size", note="max_running_requests for a generator"),
    "actor_forward_micro_batch_size": Foreign("actor_train.infer_batch_size"),
    "ref_forward_micro_batch_size": Foreign("reference.infer_batch_size"),
    "micro_batch_size": Foreign("<role>.training_args.per_device_train_batch_size"),
    "micro_batch_size_per_gpu": Foreign("<role>.training_args.per_device_train_batch_size"),
    "ppo_micro_batch_size": Foreign("<role>.training_args.per_device_train_batch_size"),
    "ppo_micro_batch_size_per_gpu": Foreign("<role>.training_args.per_device_train_batch_size"),
    "train_micro_batch_size": Foreign("<role>.training_args.per_device_train_batch_size"),
    "ppo_mini_batch_size": Foreign(
        "<role>.training_args.gradient_accumulation_steps",
        note="--validate-only shows the global batch",
        transform=by_hand,
    ),
    "mini_batch_size": Foreign(
        "<role>.training_args.gradient_accumulation_steps",
        note="--validate-only shows the global batch",
        transform=by_hand,
    ),
    "train_global_batch_size": Foreign(
        "<role>.training_args.gradient_accumulation_steps",
        note="--validate-only shows the global batch",
        transform=by_hand,
    ),
    "global_batch_size": Foreign(
        "<role>.training_args.gradient_accumulation_steps",
        note="--validate-only shows the global batch",
        transform=by_hand,
    ),
    "use_remove_padding": Foreign("<role>.use_sequence_packing"),
    "use_remove_padding_module": Foreign("<role>.use_sequence_packing"),
    "use_packing": Foreign("<role>.use_sequence_packing"),
    "packing": Foreign("<role>.use_sequence_packing", note="beside use_dynamic_batching_in_train and its token budget"),
    "sequence_packing_args": Foreign(note="use_sequence_packing and the token budgets say it all"),
    "balance_batch": Foreign(note="ranks always get shares of nearly equal tokens"),
    "use_dp_batch_balance": Foreign(note="ranks always get shares of nearly equal tokens"),
    "gpu_per_process": Foreign("<role>.num_gpus_per_worker"),
    "num_gpu": Foreign("<role>.device_mapping", transform=by_hand),
    "num_npus": Foreign("<role>.device_mapping", transform=by_hand),
    "n_gpus_per_node": Foreign("num_gpus_per_node"),
    "nnodes": Foreign("num_nodes"),
    "hybrid_engine": Foreign(note="roles with overlapping device_mappings share their devices"),
    "use_integrated_worker": Foreign(note="roles with overlapping device_mappings share their devices"),
    "free_gpu_memory": Foreign(note="roles that share devices leave them between their turns"),
    "free_cache_engine": Foreign(note="roles that share devices leave them between their turns"),
    "offload_weights": Foreign(note="roles that share devices leave them between their turns"),
    "offload_optimizer_states": Foreign(note="roles that share devices leave them between their turns"),
    "free_grad_buffers": Foreign(note="roles that share devices leave them between their turns"),
    "offload_train_optimizer": Foreign(note="roles that share devices leave them between their turns"),
    "offload_train_grad": Foreign(note="roles that share devices leave them between their turns"),
    "offload_train_param": Foreign(note="roles that share devices leave them between their turns"),
    "is_offload_states": Foreign(note="roles that share devices leave them between their turns"),
    "sleep_level": Foreign(note="roles that share devices leave them between their turns"),
    "is_offload_optimizer_states_in_train_step": Foreign(
        "<role>.strategy_args.strategy_config.cpu_offload", note="with fsdp2_train"
    ),
    "param_offload": Foreign(
        "<role>.strategy_args.strategy_config.cpu_offload",
        note="with fsdp2 strategies; with deepspeed ${deepspeed_zero3_cpuoffload}",
    ),
    "optimizer_offload": Foreign(
        "<role>.strategy_args.strategy_config.cpu_offload",
        note="with fsdp2 strategies; with deepspeed ${deepspeed_zero3_cpuoffload}",
    ),
    "offload_policy": Foreign("<role>.strategy_args.strategy_config.cpu_offload", note="with fsdp2 strategies"),
    "offload_params": Foreign("<role>.strategy_args.strategy_config.cpu_offload", note="with fsdp2 strategies"),
    "enable_activation_offload": Foreign(
        "<role>.strategy_args.strategy_config.activation_offload", note="with fsdp2 strategies"
    ),
    "swap_optimizer": Foreign("<role>.strategy_args.strategy_config.cpu_offload", note="with fsdp2_train"),
    "enable_gradient_checkpointing": Foreign(
        "<role>.model_args.disable_gradient_checkpointing", note="which says the opposite", transform=_opposite
    ),
    "gradient_checkpointing": Foreign(
        "<role>.model_args.disable_gradient_checkpointing", note="which says the opposite", transform=_opposite
    ),
    "gradient_checkpointing_use_reentrant": Foreign(note="recomputation of Transformers models is never re-entrant"),
    "use_liger": Foreign("<role>.model_args.use_liger_kernel"),
    "ulysses_sequence_parallel_size": Foreign("<role>.model_args.ulysses_size"),
    "target_modules": Foreign("<role>.model_args.lora_target", transform=_comma_separated),
    "lora_target_modules": Foreign("<role>.model_args.lora_target", transform=_comma_separated),
    "additional_target": Foreign(note="an adapter is all that lora_target trains"),
    "adapter_name_or_path": Foreign(note="an adapter starts anew, or where resume_from_checkpoint left it"),
    "autocast_adapter_dtype": Foreign(note="adapters are always float32"),
    "override_config": Foreign("<role>.model_args.model_config_kwargs"),
    "model_dtype": Foreign("<role>.model_args.dtype"),
    "mixed_precision": Foreign(
        "<role>.model_args.dtype",
        note="strategy_config.param_dtype and reduce_dtype of fsdp2 strategies",
        transform=by_hand,
    ),
    "device_map": Foreign("<role>.device_mapping", transform=by_hand),
    "freeze_module_prefix": Foreign(
        "<role>.model_args.lora_target",
        note="or strategy_config.freeze_moe_router of megatron_train",
        transform=by_hand,
    ),
    "moe_aux_loss_coef": Foreign("<role>.strategy_args.strategy_config.moe_aux_loss_coeff", note="with megatron_train"),
    "num_labels": Foreign(note="a critic has one value per token"),
    "logits_in_fp32": Foreign(note="log-probabilities are always computed in float32"),
    "meta_init": Foreign(note="models are always made without weights, and filled one tensor at a time"),
    "use_torch_compile": Foreign(note="no trainer compiles its model"),
    "wrap_policy": Foreign(note="each decoder layer is one unit of sharding"),
    "min_num_params": Foreign(note="each decoder layer is one unit of sharding"),
    "transformer_layer_cls_to_wrap": Foreign(note="each decoder layer is one unit of sharding"),
    "forward_prefetch": Foreign(note="FSDP2 gathers the next layer by itself"),
    "use_fused_kernels": Foreign("<role>.model_args.use_liger_kernel"),
    "router_replay": Foreign(note="there is no replay of routing; train_infer_correction bounds the mismatch"),
    "mtp_training_mode": Foreign(note="models are trained without heads for further tokens"),
    "apply_loss_scale": Foreign(note="a loss is already divided by counts over the whole step"),
    "trust_remote_code": Foreign(note="code that comes with a model never runs"),
    "path": Foreign("pretrain", note="reward_pretrain for the critic"),
    "load": Foreign("pretrain", note="or resume_from_checkpoint to continue a run"),
    "trainable": Foreign(note="the role decides who is trained"),
    "tokenizer_type": Foreign(note="the tokenizer is the model's"),
    "tokenizer_model": Foreign(note="the tokenizer is the model's"),
    "tokenizer_name_or_path": Foreign(note="the tokenizer is the model's"),
    "external_lib": Foreign(note="a plug-in named as package.module:attribute has its package imported"),
    "lr": Foreign("<role>.training_args.learning_rate"),
    "min_lr": Foreign("<role>.training_args.min_lr_ratio", transform=by_hand),
    "lr_warmup_steps": Foreign("<role>.training_args.warmup_steps"),
    "lr_warmup_steps_ratio": Foreign("<role>.training_args.warmup_ratio"),
    "warmup_steps_ratio": Foreign("<role>.training_args.warmup_ratio"),
    "lr_warmup_fraction": Foreign("<role>.training_args.warmup_ratio"),
    "warmup_style": Foreign("<role>.training_args.lr_scheduler_type"),
    "lr_scheduler": Foreign("<role>.training_args.lr_scheduler_type"),
    "lr_decay_style": Foreign("<role>.training_args.lr_scheduler_type"),
    "grad_clip": Foreign("max_grad_norm"),
    "clip_grad": Foreign("max_grad_norm"),
    "bf16": Foreign("<role>.model_args.dtype", transform=_bf16_if),
    "fp16": Foreign("<role>.model_args.dtype", transform=_fp16_if),
    "tf32": Foreign(note="matrix products keep PyTorch's precision"),
    "data_seed": Foreign("seed"),
    "dataloader_num_workers": Foreign(note="rollouts are the data"),
    "save_hf_model": Foreign(note="a checkpoint is a model folder in Hugging Face format"),
    "save_hf": Foreign(note="a checkpoint is a model folder in Hugging Face format"),
    "num_cycles": Foreign(note="cosine is half a period, down to min_lr_ratio"),
    "total_training_steps": Foreign("max_steps"),
    "lr_decay_steps": Foreign(note="a schedule ends with the run, at max_steps"),
    "lr_wsd_decay_style": Foreign(
        "<role>.training_args.lr_scheduler_type", note="constant_with_warmup, linear or cosine", transform=by_hand
    ),
    "lr_wsd_decay_steps": Foreign(
        "<role>.training_args.lr_scheduler_type", note="constant_with_warmup, linear or cosine", transform=by_hand
    ),
    "use_checkpoint_opt_param_scheduler": Foreign(note="a resumed run goes on with its own schedule"),
    "optimizer": Foreign(note="it is AdamW"),
    "shuffle_mini_batch": Foreign(note="rows are drawn anew for every optimizer step, by seed"),
    "seq_length": Foreign("sequence_length"),
    "max_prompt_tokens_length": Foreign("prompt_length"),
    "max_response_tokens_length": Foreign("response_length"),
    "save": Foreign("checkpoint_config.output_dir"),
    "save_contents": Foreign(note="a checkpoint holds all that a run needs to go on"),
    "load_contents": Foreign(note="a checkpoint is restored whole"),
    "no_load_optim": Foreign(note="a checkpoint is restored whole; pretrain takes its model alone"),
    "no_load_rng": Foreign(note="a checkpoint is restored whole"),
    "no_save_optim": Foreign(note="a checkpoint holds all that a run needs to go on"),
    "no_save_rng": Foreign(note="a checkpoint holds all that a run needs to go on"),
    "n": Foreign("num_return_sequences_in_group", note="in RLVR; agentic: train_env_manager.group_size"),
    "name": Foreign("<role>.strategy_args.strategy_name"),
    "num_scheduler_steps": Foreign(note="the engine schedules every step by itself"),
    "pipeline_parallel_size": Foreign(
        "<role>.strategy_args.strategy_config.pipeline_model_parallel_size", note="with megatron strategies"
    ),
    "expert_parallel_size": Foreign(
        "<role>.strategy_args.strategy_config.expert_model_parallel_size", note="with megatron strategies"
    ),
    "decoder_first_pipeline_num_layers": Foreign(
        "<role>.strategy_args.strategy_config.num_layers_in_first_pipeline_stage", note="with megatron strategies"
    ),
    "decoder_last_pipeline_num_layers": Foreign(
        "<role>.strategy_args.strategy_config.num_layers_in_last_pipeline_stage", note="with megatron strategies"
    ),
    "groupgemm": Foreign("<role>.strategy_args.strategy_config.moe_grouped_gemm", note="with megatron strategies"),
    "infer_tensor_parallel_size": Foreign("actor_infer.num_gpus_per_worker"),
    "infer_pipeline_parallel_size": Foreign(
        "actor_infer.num_gpus_per_worker", note="an engine is one tensor-parallel group"
    ),
    "update_weights_bucket_megabytes": Foreign("model_update_buffer_size_mb"),
    "parameter_sync_frequency": Foreign("actor_train.model_update_frequency"),
    "transfer_backend": Foreign(note="where the roles sit decides how weights travel"),
    "max_concurrency": Foreign(note="engines take requests as they come"),
    # whole sections and placement of other libraries
    "trainer": Foreign(
        note="its keys are top-level keys here: max_steps, save_steps, eval_steps, num_gpus_per_node, num_nodes"
    ),
    "actor_rollout_ref": Foreign(note="its parts are actor_train, actor_infer and reference"),
    "actor": Foreign("actor_train", note="a section", transform=by_hand),
    "actor_config": Foreign(note="its parts are actor_train and reference"),
    "rollout": Foreign("actor_infer", note="a section; the algorithm's keys are top-level keys", transform=by_hand),
    "ref": Foreign("reference", note="a section", transform=by_hand),
    "ref_policy": Foreign("reference", note="a section", transform=by_hand),
    "policy_trainer": Foreign("actor_train", note="a section", transform=by_hand),
    "generate_config": Foreign(note="its parts are actor_infer.generating_args and actor_infer.strategy_args"),
    "megatron_training": Foreign(
        note="its parts are top-level keys, actor_train.training_args and actor_train.strategy_args"
    ),
    "rl_config": Foreign(note="its keys are top-level keys here"),
    "algorithm": Foreign(note="its keys are top-level keys here"),
    "runtime_args": Foreign(note="its keys are top-level keys here"),
    "train_backend": Foreign(
        "actor_train.strategy_args.strategy_name",
        note="fsdp2_train, deepspeed_train or megatron_train",
        transform=by_hand,
    ),
    "rollout_backend": Foreign("actor_infer.strategy_args.strategy_name", note="hf_infer, vllm or sglang"),
    "colocation": Foreign(note="roles with overlapping device_mappings share their devices"),
    "actor_resource": Foreign("actor_train.device_mapping", transform=by_hand),
    "resource_pool": Foreign("<role>.device_mapping", transform=by_hand),
    # data
    "dataset_dir": Foreign("actor_train.data_args.file_name", note="with its folder"),
    "data_path": Foreign("actor_train.data_args.file_name"),
    "train_files": Foreign("actor_train.data_args.file_name"),
    "val_files": Foreign("validation.data_args.file_name"),
    "prompt_key": Foreign("actor_train.data_args.prompt"),
    "data_shuffle": Foreign("actor_train.data_args.shuffle"),
    "data_rerank": Foreign("is_num_return_sequences_expand"),
    "train_batch_size": Foreign("rollout_batch_size", note="prompts of a step, times num_return_sequences_in_group"),
    "sample_per_episode": Foreign(
        "rollout_batch_size", note="counts prompts here, times num_return_sequences_in_group", transform=by_hand
    ),
    "num_inference_per_prompt": Foreign("num_return_sequences_in_group"),
    "n_samples_per_prompt": Foreign("num_return_sequences_in_group"),
    "num_episode": Foreign("max_steps"),
    "train_iters": Foreign("max_steps"),
    "save_episode_interval": Foreign("save_steps"),
    "save_freq": Foreign("save_steps"),
    "test_freq": Foreign("eval_steps"),
    "project_name": Foreign("tracker_kwargs.project", note="with track_with wandb"),
    "experiment_name": Foreign("exp_name"),
    "enable_wandb": Foreign("track_with", note="wandb", transform=by_hand),
    "use_wandb": Foreign("track_with", note="wandb", transform=by_hand),
    "use_tensorboard": Foreign("track_with", note="tensorboard", transform=by_hand),
    "wandb_project": Foreign("tracker_kwargs.project", note="with track_with wandb"),
    "wandb_dir": Foreign("tracker_kwargs.log_dir", note="with track_with wandb"),
    "wandb_save_dir": Foreign("tracker_kwargs.log_dir", note="with track_with wandb"),
    "wandb_name": Foreign("tracker_kwargs.name", note="with track_with wandb"),
    "wandb_id": Foreign("tracker_kwargs.id", note="with track_with wandb"),
    "log_args_dict": Foreign("track_with", note="and tracker_kwargs", transform=by_hand),
    # the algorithm
    "clip_ratio": Foreign("pg_clip"),
    "clip_eps": Foreign("pg_clip"),
    "clip_ratio_low": Foreign("pg_clip_low", note="with use_pg_clip_range: true"),
    "clip_ratio_high": Foreign("pg_clip_high", note="with use_pg_clip_range: true"),
    "neg_clip_ratio": Foreign("pg_clip_low", note="with use_pg_clip_range: true"),
    "pos_clip_ratio": Foreign("pg_clip_high", note="with use_pg_clip_range: true"),
    "clip_ratio_c": Foreign("dual_clip_c", note="with dual_clip_loss: true"),
    "lam": Foreign("lambd"),
    "entropy_coef": Foreign("entropy_loss_coef"),
    "entropy_coeff": Foreign("entropy_loss_coef"),
    "kl_coef": Foreign("kl_loss_coef", note="with use_kl_loss: true; of a KL in the reward init_kl_coef"),
    "kl_ctrl_type": Foreign("target_kl", note="null is fixed", transform=by_hand),
    "cliprange_value": Foreign("value_clip"),
    "use_kl_in_reward": Foreign("add_token_level_kl"),
    "use_group_sequence_policy": Foreign("importance_sampling", note="seq", transform=by_hand),
    # rewards and evaluation
    "rule_reward": Foreign(note="the verifiers of rewards.<domain>.verifiers score answers"),
    "verifier_function": Foreign(note="the names of rewards.<domain>.verifiers say it"),
    "verifier_weight": Foreign(note="each of rewards.<domain>.verifiers has its weight"),
    "custom_reward_function": Foreign(note="the verifier custom of rewards.<domain>.verifiers calls a function"),
    "eval_temperature": Foreign(
        "validation.generating_args.temperature", note="agentic: val_env_manager.generating_args"
    ),
    "eval_top_p": Foreign("validation.generating_args.top_p", note="agentic: val_env_manager.generating_args"),
    "eval_top_k": Foreign("validation.generating_args.top_k", note="agentic: val_env_manager.generating_args"),
    "judge_api_key": Foreign(note="args.judge_api_key_env of a verifier llm_judge names the variable that holds it"),
    "num_cpu": Foreign(note="world_size and num_processes of a reward domain say it"),
}
"""By the last part of the foreign key. Read only for keys that the schema does not know."""


def advice(key: str) -> str | None:
    """The hint for a key that is not known where it stands; ``None`` where no library is known to call one so."""
    return _PIPELINES.get(key) or (FOREIGN[key].advice if key in FOREIGN else None)
