#!/usr/bin/env bash
# Everything that only a GPU can show, in less than ten minutes: the `gpu` tests, the demonstration, the benchmarks.
#
#     scripts/gpu_check.sh KIT_FOLDER OUT_FOLDER      on a machine with one CUDA GPU, torch >= 2.11 and Transformers
#     scripts/gpu_check.sh --rehearse OUT_FOLDER      the same steps, smaller, on a machine without one (with PYTHON)
#
# KIT_FOLDER is what scripts/make_gpu_kit.sh gathered; its parts may have been brought one by one. No network is needed.
# OUT_FOLDER gets check.json (versions, every step with its exit code and seconds, the figures) and check.log. The exit
# code is 0 if every step succeeded. A step that fails or takes too long does not keep the next from running.
set -uo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 2 ] || { sed -n '4,6p' "$0" | cut -c3- >&2; exit 2; }
KIT=$1
mkdir -p "$2"
OUT=$(realpath "$2")
LOG=$OUT/check.log
: >"$LOG"
: >"$OUT/steps"
export PYTHONPATH=$PWD HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

step() { # name, seconds at most, command…
  local name=$1 limit=$2 began rc
  shift 2
  printf '\n===== %s: %s\n' "$name" "$*" >>"$LOG"
  began=$(date +%s)
  timeout --kill-after=10 "$limit" "$@" >>"$LOG" 2>&1
  rc=$?
  printf '%s\t%s\t%s\n' "$name" "$rc" "$(($(date +%s) - began))" >>"$OUT/steps"
  printf '%-24s exit code %-4s %4s s\n' "$name" "$rc" "$(($(date +%s) - began))"
  return $rc
}

install_kit() { # a virtual environment that sees the machine's own packages, among them its torch
  local wheels
  wheels=$(mktemp -d)
  find "$KIT" -name '*.whl' -exec ln -sf {} "$wheels/" \;
  find "$KIT" -name '*.piece' | sed -E 's/\.[0-9]+\.piece$//' | sort -u | while read -r whole; do
    cat $(find "$KIT" -name "$(basename "$whole").*.piece" | sort -t. -k1,1) >"$wheels/$(basename "$whole")"
  done
  (cd "$wheels" && sha256sum --quiet --check "$KIT/SHA256SUMS") || return 1
  python3 -m venv --system-site-packages "$OUT/venv" || return 1
  "$OUT/venv/bin/python" -m pip install --quiet --no-index --find-links "$wheels" -r "$KIT/requirements.txt"
}

if [ "$KIT" = --rehearse ]; then
  PYTHON=${PYTHON:-.venv/bin/python}
  TESTS=(tests/gpu/test_cuda.py --collect-only -m gpu)
  DEMO=(max_steps=1 save_steps=1 eval_steps=0 val_before_train=false rollout_batch_size=64
    train_env_manager.env_groups=64
    val_batch_size=32 val_env_manager.env_groups=32 warm_start.max_steps=20 warm_start.eval_steps=20
    warm_start.eval_episodes=32 warm_start.demonstrations=640 warm_start.min_success=0.0 warm_start.min_valid=0.0)
  BENCH=(--rehearse --rounds 1 --engines fsdp2_train,hf_infer)
else
  KIT=$(realpath "$KIT")
  export -f install_kit
  export KIT OUT
  step install 150 bash -c install_kit || { echo "the kit cannot be installed, see $LOG" >&2; exit 1; }
  PYTHON=$OUT/venv/bin/python
  TESTS=(tests/gpu tests/integration/test_colocation.py -m gpu --timeout 200)
  DEMO=(max_steps=30 'actor_train.device_mapping=[0]' 'actor_infer.device_mapping=[0]' 'critic.device_mapping=[0]')
  BENCH=()
fi

step versions 60 "$PYTHON" -c '
import json, platform, sys, torch, transformers
gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
facts = {"gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda, "transformers": transformers.__version__,
         "python": platform.python_version()}
open(sys.argv[1], "w").write(json.dumps(facts))
print(facts)' "$OUT/versions.json"
step tests 240 "$PYTHON" -m pytest -q -rs -p no:cacheprovider "${TESTS[@]}"
step demonstration 150 "$PYTHON" examples/start_agentic_pipeline.py --config_name agentic_sokoban \
  "output_dir=$OUT/output" exp_name=gpu_demo "${DEMO[@]}"
step benchmarks 180 "$PYTHON" benchmarks/gpu.py "${BENCH[@]}" --json "$OUT/figures.json"

"$PYTHON" - "$OUT" <<'PY'
import json
import sys
from pathlib import Path

out = Path(sys.argv[1])


def read(path):
    return json.loads(path.read_text()) if path.exists() else None


steps = [line.split("\t") for line in (out / "steps").read_text().splitlines()]
summary = read(out / "output" / "gpu_demo" / "summary.json") or {}
kept = ("status", "steps", "wall_s", "first_rollout_s", "eval", "tokens_per_s", "seconds", "error")
check = {
    "versions": read(out / "versions.json"),
    "steps": {name: {"exit_code": int(code), "seconds": int(seconds)} for name, code, seconds in steps},
    "demonstration": {key: summary[key] for key in kept if key in summary},
    "figures": read(out / "figures.json"),
}
(out / "check.json").write_text(json.dumps(check, indent=2) + "\n")
sys.exit(any(int(code) for _, code, _ in steps))
PY
code=$?
rm -f "$OUT/steps" "$OUT/versions.json" "$OUT/figures.json"
echo "see $OUT/check.json and $OUT/check.log"
exit $code
