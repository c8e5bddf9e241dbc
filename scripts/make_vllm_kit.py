#!/usr/bin/env python3
"""Packs vLLM for a machine with a GPU of one kind, but without a network, beside what make_gpu_kit.sh packs.

    scripts/make_vllm_kit.py FOLDER --there THERE [--kit KIT] [--python 3.12] [--architecture 90]

vLLM's wheel holds kernels for every architecture since Turing; all but those of one are made zeros, which compress to
nothing, and what a plain model does not use is left out (FlashInfer, kernels that are compiled on demand, the server in
Rust): some 48 MB are left of 330. Its kernels ask for no version of PyTorch (they use the stable interface of its
library): vLLM 0.32, which is built for PyTorch 2.13, has run with 2.11. THERE is a file with what `pip list
--format=freeze` prints on that machine (or names alone); KIT is a folder of make_gpu_kit.sh. scripts/gpu_check.py
unpacks both (--kit KIT --kit FOLDER). Run it with the interpreter of `make test`, whose versions it takes.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
NOT_NEEDED = (
    *("torch", "torchaudio", "torchvision", "torchcodec", "triton"),  # of that machine, or for sound and video
    *("flashinfer-python", "tilelang", "tokenspeed-mla", "humming-kernels", "quack-kernels", "nvidia-cutlass-dsl"),
    *("nvidia-cudnn-frontend", "fastsafetensors", "instanttensor", "pynvvideocodec"),
)
LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",  # Hopper takes FlashAttention 3
    "vllm/third_party/deep_gemm",
    "vllm/third_party/fmha_sm100",
    "mistral_common/data",
)
PIECE_BYTES = 55_000_000
FATBIN = b"\x50\xed\x55\xba"
"""Of CUDA's containers of kernels (fatbinary.h), in the byte order of the file."""
CUBIN = 2
"""The kind of an entry that holds machine code; 1 is PTX, which a driver compiles."""


def needs(lines: Iterable[str], python: str) -> list[Requirement]:
    """What a package asks for without extras."""
    here = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    found = map(Requirement, lines)
    return [each for each in found if each.marker is None or each.marker.evaluate(here)]


def pins_of(asked: Iterable[str], python: str, present: set[str]) -> list[str]:
    """name==version, as installed here, of all that vLLM needs and the other machine lacks."""
    seen: dict[str, str] = {}
    wanted = needs(asked, python)
    while wanted:
        name = canonicalize_name(wanted.pop().name)
        if name in seen or name in NOT_NEEDED or name in present or name.startswith(("nvidia-", "cuda-")):
            continue
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # the CPU build does without
            seen[name] = name
            continue
        seen[name] = f"{name}=={found.version}"
        wanted += needs(found.requires or (), python)
    return sorted(seen.values())


def keep_architecture(library: Path, architecture: int) -> None:
    """Makes zeros of a library's kernels for other architectures, in place; their entries stay, so offsets hold."""
    data = bytearray(library.read_bytes())
    start = data.find(FATBIN)
    while start >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", data, start)
        end = start + header + size
        if version != 1 or header != 16 or end > len(data):  # the same four bytes by chance
            end = start + len(FATBIN)
        else:
            entry = start + header
            while entry < end:
                kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
                (built_for,) = struct.unpack_from("<I", data, entry + 28)
                body = entry + entry_header
                if (kind, built_for) != (CUBIN, architecture):
                    data[body : body + payload] = bytes(payload)
                entry = body + payload
        start = data.find(FATBIN, end)
    library.write_bytes(data)


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def fetch(folder: Path, python: str, *pins: str) -> None:
    platforms = [f"manylinux_2_{number}_x86_64" for number in (39, 35, 34, 31, 28, 27, 26, 24, 17)]
    names = [*platforms, "manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    flags = [word for name in names for word in ("--platform", name)]
    pip("download", "--no-deps", "--only-binary=:all:", "--python-version", python, *flags, "-d", str(folder), *pins)


def names_in(kit: Path | None) -> set[str]:
    """Packages that a kit of make_gpu_kit.sh holds."""
    if kit is None:
        return set()
    with tempfile.TemporaryFile() as whole:
        for piece in sorted(kit.glob("kit.tar.xz.*")):
            whole.write(piece.read_bytes())
        whole.seek(0)
        with tarfile.open(fileobj=whole, mode="r:xz") as archive:
            folders = [name.removeprefix("./").split("/")[0] for name in archive.getnames()]
    suffix = ".dist-info"
    return {
        canonicalize_name(name.removesuffix(suffix).rpartition("-")[0]) for name in folders if name.endswith(suffix)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--there", type=Path, required=True)
    parser.add_argument("--kit", type=Path)
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--architecture", type=int, default=90, help="of the GPU's kernels: 90 is Hopper's")
    args = parser.parse_args()
    there = {canonicalize_name(line.partition("==")[0].strip()) for line in args.there.read_text().splitlines() if line}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheels, site = Path(scratch) / "wheels", Path(scratch) / "site"
        fetch(wheels, args.python, *extras["vllm"])
        (wheel,) = wheels.glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            asked = email.message_from_bytes(archive.read(name)).get_all("Requires-Dist") or ()
        pins = pins_of(asked, args.python, there | names_in(args.kit))
        for pin in pins:
            fetch(wheels, args.python, pin)
        for path in wheels.glob("*.whl"):
            with zipfile.ZipFile(path) as archive:
                archive.extractall(site)
        for name in LEFT_OUT:
            path = site / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for library in (site / "vllm").rglob("*.so"):
            keep_architecture(library, args.architecture)
        whole = Path(scratch) / "vllm.tar.xz"
        subprocess.run(["tar", "-C", site, "-I", "xz -T0 -6", "-cf", whole, "."], check=True)
        data = whole.read_bytes()
    sums = []
    for number, start in enumerate(range(0, len(data), PIECE_BYTES)):
        piece = args.folder / f"vllm.tar.xz.{number:02}"
        piece.write_bytes(data[start : start + PIECE_BYTES])
        sums.append(f"{hashlib.sha256(piece.read_bytes()).hexdigest()}  {piece.name}")
    (args.folder / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    print(f"vLLM in {args.folder}: {1 + len(pins)} packages, {len(data) / 1e6:.0f} MB in {len(sums)} pieces")


if __name__ == "__main__":
    main()
