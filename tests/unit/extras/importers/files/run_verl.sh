#!/bin/bash
set -x
# A small run.
export VLLM_USE_V1=1
NODES=${NODES:-1}
answers=8
prompts=32
max_prompt=$((256 * 2))
max_response=$((max_prompt * 3 / 2))
train_files="['$HOME/data/gsm8k/train.parquet', '$HOME/data/math/train.parquet']"

DATA=(
    data.train_files="$train_files"
    data.val_files=$HOME/data/gsm8k/test.parquet
    data.train_batch_size=${prompts}   # prompts of a step
    data.max_prompt_length=$max_prompt
)

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    "${DATA[@]}" \
    data.max_response_length=$max_response \
    data.truncation='left' \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.actor.optim.lr=2e-6 \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((2 * (max_prompt + max_response))) \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.fsdp_config.param_offload=False \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=$answers \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    actor_rollout_ref.rollout.val_kwargs.n=4 \
    +actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 \
    trainer.logger='["console","wandb"]' \
    trainer.project_name='small' \
    trainer.experiment_name="a run" \
    trainer.default_local_dir=$(date +%s)/ckpt \
    trainer.n_gpus_per_node=4 \
    trainer.nnodes=$NODES \
    trainer.save_freq=-1 \
    trainer.total_epochs=3 $@ 2>&1 | tee log.txt
