#!/usr/bin/env bash
# Everything that only a GPU can show, in less than ten minutes: the `gpu` tests, the demonstration, the benchmarks.
#
#     scripts/gpu_check.sh KIT_FOLDER OUT_FOLDER      on a machine with one CUDA GPU, torch >= 2.11 and Transformers
#     scripts/gpu_check.sh --rehearse OUT_FOLDER      the same steps, smaller, on a machine without one (with PYTHON)
#
# KIT_FOLDER is what scripts/make_gpu_kit.sh made; its pieces may have been brought one by one. No network is needed.
# OUT_FOLDER gets check.json (versions, every step with its exit code and seconds, the figures) and check.log, both
# written anew after every step. The exit code is 0 if every step succeeded. A step that fails or takes too long does not
# keep the next from running. All steps together take GPU_CHECK_SECONDS at most (570): what is left of them bounds each.
# What the kit is installed into stays in GPU_CHECK_ENV (/tmp/roll-gpu-check) and is used again.
set -uo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 2 ] || { sed -n '4,6p' "$0" | cut -c3- >&2; exit 2; }
KIT=$1
mkdir -p "$2"
OUT=$(realpath "$2")
LOG=$OUT/check.log
END=$(($(date +%s) + ${GPU_CHECK_SECONDS:-570}))
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
: >"$LOG"
: >"$SCRATCH/steps"
export PYTHONPATH=$PWD HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1

INTERRUPTIBLE=(env --default-signal=INT) # whoever runs this in the background has it ignored
"${INTERRUPTIBLE[@]}" true 2>/dev/null || INTERRUPTIBLE=()

step() { # name, seconds at most, command…
  local name=$1 limit=$2 began left rc=124
  shift 2
  printf '\n===== %s: %s\n' "$name" "$*" >>"$LOG"
  began=$(date +%s)
  left=$((END - began - 15))
  if [ "$left" -gt 0 ]; then
    # As by Ctrl-C, after which pytest shows what has failed so far, and a run saves.
    limit=$((limit < left ? limit : left))
    "${INTERRUPTIBLE[@]}" timeout --signal=INT --kill-after=12 "$limit" "$@" >>"$LOG" 2>&1
    rc=$?
  fi
  printf '%s\t%s\t%s\n' "$name" "$rc" "$(($(date +%s) - began))" >>"$SCRATCH/steps"
  printf '%-24s exit code %-4s %4s s\n' "$name" "$rc" "$(($(date +%s) - began))"
  report
  return $rc
}

report() { # writes check.json; fails if a step did
  "$REPORTER" - "$OUT" "$SCRATCH" <<'PY'
import json
import re
import sys
from pathlib import Path

out, scratch = map(Path, sys.argv[1:])


def read(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # not there, or a step was ended while it wrote
        return None


steps = [line.split("\t") for line in (scratch / "steps").read_text().splitlines()]
summary = read(scratch / "output" / "gpu_demo" / "summary.json") or {}
kept = ("status", "steps", "wall_s", "first_rollout_s", "eval", "tokens_per_s", "seconds", "error")
log = (out / "check.log").read_text(errors="replace")
check = {
    "versions": read(scratch / "versions.json"),
    "steps": {name: {"exit_code": int(code), "seconds": int(seconds)} for name, code, seconds in steps},
    "failed_tests": sorted(set(re.findall(r"^(?:FAILED|ERROR) (tests/\S+)", log, re.MULTILINE))),
    "demonstration": {key: summary[key] for key in kept if key in summary},
    "figures": read(scratch / "figures.json"),
}
(out / "check.json").write_text(json.dumps(check, indent=2) + "\n")
sys.exit(any(int(code) for _, code, _ in steps))
PY
}

install_kit() { # unpacks the kit beside the packages of this machine's python3, among them its torch
  [ ! -e "$GPU_CHECK_ENV/whole" ] || return 0
  rm -rf "$GPU_CHECK_ENV"
  mkdir -p "$GPU_CHECK_ENV/site"
  (cd "$KIT" && sha256sum --quiet --check SHA256SUMS) || return 1
  cat "$KIT"/kit.tar.xz.* | python3 -c '
import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz").extractall(sys.argv[1], filter="data")' "$GPU_CHECK_ENV/site" || return 1
  touch "$GPU_CHECK_ENV/whole"
}

if [ "$KIT" = --rehearse ]; then
  REPORTER=${PYTHON:-.venv/bin/python}
  PYTHON=$REPORTER
  TESTS=(tests/gpu/test_cuda.py --collect-only -m gpu)
  DEMO=(max_steps=1 save_steps=1 eval_steps=0 val_before_train=false rollout_batch_size=64
    train_env_manager.env_groups=64
    val_batch_size=32 val_env_manager.env_groups=32 warm_start.max_steps=20 warm_start.eval_steps=20
    warm_start.eval_episodes=32 warm_start.demonstrations=640 warm_start.min_success=0.0 warm_start.min_valid=0.0)
  BENCH=(--rehearse --rounds 1 --engines fsdp2_train,hf_infer)
else
  KIT=$(realpath "$KIT")
  GPU_CHECK_ENV=${GPU_CHECK_ENV:-/tmp/roll-gpu-check}
  REPORTER=python3
  export -f install_kit
  export KIT SCRATCH GPU_CHECK_ENV
  step install 150 bash -c install_kit || { echo "the kit cannot be installed, see $LOG" >&2; exit 1; }
  PYTHON=python3
  export PYTHONPATH=$GPU_CHECK_ENV/site:$PYTHONPATH
  # Several at the same time: most of a test's time is a process's start.
  TESTS=(tests/gpu tests/integration/test_colocation.py -m gpu --timeout 200 -n 12 --dist loadgroup --durations 20)
  DEMO=(max_steps=30 num_gpus_per_node=1 'actor_train.device_mapping=[0]' 'actor_infer.device_mapping=[0]'
    'critic.device_mapping=[0]')
  BENCH=()
fi

step versions 60 "$PYTHON" -c '
import json, platform, sys, torch, transformers
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
facts = {"gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__,
         "python": platform.python_version()}
open(sys.argv[1], "w").write(json.dumps(facts))
print(facts)' "$SCRATCH/versions.json"
step tests 240 env OMP_NUM_THREADS=1 "$PYTHON" -m pytest -q -rsfE -p no:cacheprovider "${TESTS[@]}"
step demonstration 150 "$PYTHON" examples/start_agentic_pipeline.py --config_name agentic_sokoban \
  "output_dir=$SCRATCH/output" exp_name=gpu_demo "${DEMO[@]}"
step benchmarks 180 "$PYTHON" benchmarks/gpu.py "${BENCH[@]}" --json "$SCRATCH/figures.json"
report
code=$?
echo "see $OUT/check.json and $OUT/check.log"
exit $code
