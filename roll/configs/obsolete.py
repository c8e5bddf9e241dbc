"""Documented keys that a pipeline has no use for, and what to do instead."""

from __future__ import annotations

OBSOLETE: dict[str, str] = {
    "local_rank": "remove it: every worker gets its rank from its cluster",
    "pipeline_cls": "remove it: the start script chooses the pipeline",
    "num_return_sequences_in_group": "it belongs to RLVR; here train_env_manager.group_size makes several episodes",
    "is_num_return_sequences_expand": "remove it: every request asks for one completion; use group_size",
    "custom_envs": "it belongs to the agentic pipeline; here rewards and data_args say what is played",
    "train_env_manager": "it belongs to the agentic pipeline; use num_return_sequences_in_group",
    "val_env_manager": "it belongs to the agentic pipeline; here validation",
    "rewards": "it belongs to RLVR; here the environments pay",
    "validation": "it belongs to RLVR; here val_env_manager",
    "val_n_sample": "use validation.generating_args.num_return_sequences",
    "val_greedy": "use validation.generating_args.do_sample",
    "global_template": "use actor_train.data_args.template",
    "max_length": "use max_new_tokens; sequence_length bounds the whole sample",
    "length_penalty": "remove it: it only concerns beam search",
    "logprobs": "remove it: log-probabilities are always returned",
    "include_stop_str_in_output": "remove it: the stop string is always kept",
    "model_name_or_path": "use pretrain (or reward_pretrain for the critic)",
    "model_type": "remove it: the role decides which head the model gets",
    "offload_nccl": "remove it",
    "enable_reference": "remove it: use_kl_loss or add_token_level_kl start the reference",
    "async_generation_ratio": "remove it: rollouts are on-policy",
    "num_train_epochs": "use max_steps and ppo_epochs",
    "dirty_data_mask": "remove it",
    "open_feedback_turn": "remove it",
    "use_token_reward": "remove it",
}
"""Last part of the key -> advice. Read only for keys that the schema does not know."""
