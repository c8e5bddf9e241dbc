#!/usr/bin/env bash
# supervised training of a small model on worked sums
set -eu
GPUS=${GPUS:-2}
OUT=${1:-out}
torchrun --standalone --nnodes=1 --nproc_per_node=$GPUS -m verl.trainer.fsdp_sft_trainer \
    data.train_files=data/sums/train.parquet data.val_files=data/sums/test.parquet \
    data.prompt_key=extra_info data.response_key=extra_info \
    data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] \
    data.train_batch_size=32 data.micro_batch_size_per_gpu=4 data.max_length=512 data.truncation=right \
    model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct model.enable_gradient_checkpointing=True \
    model.lora_rank=8 model.lora_alpha=32 model.target_modules=[q_proj,v_proj] \
    optim.lr=2e-5 optim.lr_scheduler=wsd ulysses_sequence_parallel_size=2 use_remove_padding=true \
    trainer.project_name=sums trainer.experiment_name=worked-sums trainer.logger=['console'] \
    trainer.total_epochs=2 trainer.save_freq=50 trainer.default_hdfs_dir=null $@
