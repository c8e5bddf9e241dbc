#!/usr/bin/env bash
# Five stages on two CPU cores, each from the model that an earlier one saved, one after the other:
#
#     examples/chain_math.sh [SEED [FOLDER [KEY=VALUE ...]]]
#
# imitation → a reward model → reinforcement learning with it → on-policy distillation into a smaller model. Everything
# is kept in FOLDER (./output/chain_math/seed<SEED>); a stage that is complete there is not run again. Further words
# change keys of all stages (max_steps=4). The stages' configurations are examples/chain_math/*.yaml.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
seed=${1:-0}
folder=$(realpath -m "${2:-./output/chain_math/seed$seed}")
shift $(($# < 2 ? $# : 2))
words=("$@")

# Runs a stage with further KEY=VALUE of its own, and names the model that it has saved: $folder/models/<stage>.
stage() {
    local name=$1
    shift
    [[ -e $folder/models/$name ]] && return
    roll train "$here/chain_math/$name.yaml" seed="$seed" output_dir="$folder" "$@" "${words[@]}"
    local saved
    saved=$(ls -d "$folder/$name"/checkpoints/checkpoint-*/actor_train | tail -n 1)
    mkdir -p "$folder/models"
    ln -s "../${saved#"$folder/"}" "$folder/models/$name"
}

stage 1-sft
stage 2-student # smaller than the first, and taught the same
stage 3-reward pretrain="$folder/models/1-sft"
stage 4-rl pretrain="$folder/models/1-sft" # and 3-reward, which scores the answers
stage 5-distill pretrain="$folder/models/2-student" teacher_pretrain="$folder/models/4-rl"

python "$here/../scripts/stage_gains.py" "$folder"
