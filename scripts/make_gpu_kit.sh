#!/usr/bin/env bash
# Packs what a machine with a GPU, but without a network, lacks to run ROLL's tests and benchmarks: all dependencies but
# torch (and what belongs to it), installed into one folder, which is compressed into pieces of at most 55 MB.
#
#     scripts/make_gpu_kit.sh KIT_FOLDER [PYTHON_VERSION [THERE]]
#
# PYTHON_VERSION is the other machine's (3.12 by default); THERE is a file with what `pip list --format=freeze` prints
# there (or names alone, one a line): those packages stay out. PYTHON is the interpreter that has the engines (.venv of
# `make test` by default): the versions are those installed there. EXTRAS are those of pyproject.toml that the kit gets
# ("lora deepspeed megatron liger"); vLLM has a kit of its own (make_vllm_kit.py).
# scripts/gpu_check.py unpacks the kit.
set -euo pipefail
cd "$(dirname "$0")/.."
KIT=$(realpath -m "${1:?usage: scripts/make_gpu_kit.sh KIT_FOLDER [PYTHON_VERSION [THERE]]}")
TARGET=${2:-3.12}
THERE=${3:-/dev/null}
PYTHON=${PYTHON:-.venv/bin/python}
EXTRAS=${EXTRAS:-lora deepspeed megatron liger}
UNUSED="ray/jars ray/rllib ray/llm ray/dashboard/client" # large, and no part of what runs here
WORK=$(mktemp -d)
WHEELS=$WORK/wheels
trap 'rm -rf "$WORK"' EXIT

rm -rf "$KIT"
mkdir -p "$KIT" "$WHEELS"

# What pyproject.toml asks for.
"$PYTHON" - "$EXTRAS" >"$WORK/requirements.txt" <<'PY'
import sys
import tomllib

TESTING = ("pytest", "hypothesis", "setuptools")  # of the extra dev; linters and other libraries' programs stay here
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
texts = [*project["dependencies"], *(text for extra in sys.argv[1].split() for text in extras[extra])]
texts += [text for text in extras["dev"] if text.startswith(TESTING)]
print("\n".join(text for text in texts if not text.startswith("torch")))
PY

# name==version of everything that these need, as installed here, for the other Python.
"$PYTHON" - "$TARGET" "$WORK/requirements.txt" "$THERE" >"$WORK/pins" <<'PY'
import sys
from importlib import metadata

from packaging.requirements import Requirement

BELONGS_TO_TORCH = ("torch", "triton", "nvidia-", "cuda-")
wanted = open(sys.argv[2]).read().splitlines()
there = {line.partition("==")[0].strip().lower().replace("_", "-").replace(".", "-") for line in open(sys.argv[3])}
python = {"python_version": sys.argv[1], "python_full_version": f"{sys.argv[1]}.0"}
seen = {}
while wanted:
    requirement = Requirement(wanted.pop())
    name = requirement.name.lower().replace("_", "-").replace(".", "-")
    if name.startswith(BELONGS_TO_TORCH):
        continue
    new = set(requirement.extras) - seen.get(name, (None, set()))[1]
    if name in seen and not new:
        continue
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:  # only needed by another Python than this one
        seen[name] = (None, set())
        continue
    seen[name] = (found.version, seen.get(name, (None, set()))[1] | set(requirement.extras))
    for text in found.requires or ():
        needed = Requirement(text)
        contexts = [{**python, "extra": extra} for extra in ("", *requirement.extras)]
        if needed.marker is None or any(needed.marker.evaluate(context) for context in contexts):
            wanted.append(text.partition(";")[0])
for name, (version, _) in sorted(seen.items()):
    if name not in there:
        print(f"{name}=={version}" if version else name)
PY

fetch() {
  "$PYTHON" -m pip download --quiet --no-deps --dest "$WHEELS" --python-version "$TARGET" \
    --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform linux_x86_64 \
    --only-binary=:all: "$@" 2>/dev/null
}
# Many at a time; where that fails, one by one, and what there is only as sources is built here, which makes a wheel for
# any machine if nothing in it is compiled.
mapfile -t pins <"$WORK/pins"
for ((first = 0; first < ${#pins[@]}; first += 16)); do
  batch=("${pins[@]:first:16}")
  fetch "${batch[@]}" && continue
  for pin in "${batch[@]}"; do
    fetch "$pin" || DS_BUILD_OPS=0 "$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir "$WHEELS" "$pin"
  done
done
if compiled=$(ls "$WHEELS" | grep -v -E 'none-any|linux.*x86_64' | grep '\.whl$'); then
  echo "built for this machine only: $compiled" >&2
  exit 1
fi

"$PYTHON" -m pip install --quiet --no-deps --no-compile --no-index --target "$WORK/site" --python-version "$TARGET" \
  --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
  --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform linux_x86_64 --only-binary=:all: \
  "$WHEELS"/*.whl
(cd "$WORK/site" && rm -rf $UNUSED)
tar -C "$WORK/site" -cf - . | xz -T0 -6 | split --bytes=55MB --numeric-suffixes - "$KIT/kit.tar.xz."
(cd "$KIT" && sha256sum kit.tar.xz.* >SHA256SUMS)
echo "kit in $KIT: ${#pins[@]} packages for Python $TARGET, $(du -csm "$KIT"/kit.tar.xz.* | tail -1 | cut -f1) MB in" \
  "$(ls "$KIT"/kit.tar.xz.* | wc -l) pieces"
