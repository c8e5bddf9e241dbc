#!/bin/sh
# Makes an environment in which SGLang runs without a GPU, for strategy_config.python_executable.
# Usage: scripts/make_sglang_env.sh [folder]   (default: .venv-sglang)
set -eu
cd "$(dirname "$0")/.."
folder=${1:-.venv-sglang}
"${PYTHON:-python3}" -m venv "$folder"
# Without dependencies: sglang's own list asks for other builds of torch, and for kernels that no CPU can run.
"$folder/bin/pip" install --quiet --no-deps --requirement constraints/sglang-cpu.txt
"$folder/bin/pip" install --quiet --no-deps --editable .
"$folder/bin/python" -c "
from roll.distributed.strategy.sglang import cpu
cpu.prepare()
import sglang.srt.entrypoints.engine"
echo "SGLang is installed; use strategy_config.python_executable: $folder/bin/python"
