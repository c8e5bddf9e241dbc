#!/bin/sh
# Makes an environment in which SGLang runs without a GPU, for strategy_config.python_executable.
# Usage: scripts/make_sglang_env.sh [folder]   (default: .venv-sglang)
set -eu
cd "$(dirname "$0")/.."
folder=${1:-.venv-sglang}
case $folder in /*) ;; *) folder=$PWD/$folder ;; esac # absolute: workers run in folders of their own
"${PYTHON:-python3}" -m venv "$folder"
# Without dependencies: sglang's own list asks for other builds of torch, and for kernels that no CPU can run.
if ! "$folder/bin/pip" install --quiet --no-deps --requirement constraints/sglang-cpu.txt; then
    echo "constraints/sglang-cpu.txt: pip could not get all of it (see above). Expected: the package index has every
version that is pinned there, built for $("$folder/bin/python" -V). Pin one that it has, and run this again." >&2
    exit 1
fi
"$folder/bin/pip" install --quiet --no-deps --editable .
"$folder/bin/python" -W ignore -c "
from roll.distributed.strategy.sglang import cpu
cpu.prepare()
import sglang.srt.entrypoints.engine"
echo "SGLang is installed; use strategy_config.python_executable: $folder/bin/python"
