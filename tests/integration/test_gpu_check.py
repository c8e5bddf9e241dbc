"""What is run on a machine with a GPU, rehearsed on one without: the same steps, smaller."""

import argparse
import hashlib
import importlib
import importlib.util
import io
import json
import struct
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from tests.integration.conftest import ROOT, done


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_of_the_kit", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


kit = load("scripts/gpu_check.py")
vllm_kit = load("scripts/make_vllm_kit.py")


@pytest.mark.slow  # minutes of trainers, an engine and a demonstration
@pytest.mark.timeout(2000)
def test_the_whole_check_is_rehearsed_without_a_gpu_and_leaves_its_figures(tmp_path):
    done(sys.executable, ROOT / "scripts" / "gpu_check.py", tmp_path, "--rehearse", "--minutes", 32, timeout=None)
    check = json.loads((tmp_path / "check.json").read_text())
    assert [name for name in check["steps"] if name != "versions"] == [step.name for step in kit.STEPS]
    assert {step["result"] for step in check["steps"].values()} <= {"ok", "needs a GPU", "left out"}
    assert {name: run["status"] for name, run in check["runs"].items()} == dict.fromkeys(
        ("agentic_sokoban", "rlvr_shapes"), "completed"
    )
    assert {"train/fsdp2_train sharded", "attention/one_call", "ipc/plain process"} <= set(check["figures"])
    assert check["figures"].get("vllm/batched 2048", {"skipped": "needs a GPU"}) == {"skipped": "needs a GPU"}


def test_one_row_is_rehearsed_and_others_say_what_they_need(tmp_path):
    gpu = importlib.import_module("benchmarks.gpu")
    arguments = argparse.Namespace(rehearse=True, rounds=1, seconds=300)
    figures = gpu.measured("ipc", "plain process", tmp_path / "model", arguments)
    assert (figures["rounds"], figures["kept_mib"]) == (50, 0)
    assert gpu.lacks("attention", "fa3") == "needs the package flash_attn_interface"
    assert gpu.lacks("vllm", "batched 2048").startswith("needs ") and not gpu.lacks("train", "fsdp2_train sharded")


def test_a_library_keeps_kernels_of_one_architecture(tmp_path):
    def entry(kind: int, architecture: int, code: bytes) -> bytes:
        return struct.pack("<HHIQIIHHI", kind, 257, 32, len(code), 0, 0, 0, 0, architecture) + code

    def container(*entries: bytes) -> bytes:
        body = b"".join(entries)
        return vllm_kit.FATBIN + struct.pack("<HHQ", 1, 16, len(body)) + body

    noise = b"text" + vllm_kit.FATBIN + b"no container"
    first = (entry(2, 80, b"\x01" * 40), entry(2, 90, b"\x02" * 24), entry(1, 90, b"\x03" * 16))
    library = tmp_path / "some.so"
    library.write_bytes(noise + container(*first) + b"rest" + container(entry(2, 90, b"\x04" * 8)))
    vllm_kit.keep_architecture(library, 90)
    kept = (entry(2, 80, bytes(40)), entry(2, 90, b"\x02" * 24), entry(1, 90, bytes(16)))
    assert library.read_bytes() == noise + container(*kept) + b"rest" + container(entry(2, 90, b"\x04" * 8))


def taken(tmp_path: Path, *steps: object, minutes: float = 5.0) -> tuple[dict, str]:
    check = kit.Check(tmp_path, tmp_path, minutes)
    check.facts = {"machine": {"gpu": "X"}, "packages": {}, "missing": ["vllm: no figures of it"]}
    for step in steps:
        check.take(
            step, {"python": sys.executable, "out": str(tmp_path), "workers": []}, False, {"PATH": "/usr/bin:/bin"}
        )
    return json.loads((tmp_path / "check.json").read_text()), (tmp_path / "check.md").read_text()


def step(name: str, code: str, seconds: float = 60.0, **more: object) -> object:
    return kit.Step(name, f"what {name} shows", seconds, ("{python}", "-c", code), **more)


def test_a_step_that_hangs_or_fails_does_not_keep_the_next_from_running(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "LEAST_SECONDS", 0.1)
    monkeypatch.setattr(kit, "INTERRUPTED_SECONDS", 0.2)
    writes = f"open(r'{tmp_path}/figures-good.json', 'w').write('{{\"good/row\": {{\"ms\": 1234}}}}')"
    check, page = taken(
        tmp_path,
        step("hangs", "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)", seconds=0.5),
        step("fails", "print('FAILED tests/gpu/test_x.py::test_y - why'); raise SystemExit(3)"),
        step("absent", "", needs=("vllm",)),
        step("good", writes),
    )
    assert [each["result"] for each in check["steps"].values()] == ["too slow", "failed", "left out", "ok"]
    assert check["failed_tests"] == ["tests/gpu/test_x.py::test_y"]
    assert check["steps"]["absent"]["why"] == "needs the package vllm"
    assert "| row | 1,234 |" in page and "missing: vllm: no figures of it" in page and "exit code 3" in page


def test_what_the_minutes_have_no_room_for_is_named(tmp_path):
    check, page = taken(tmp_path, step("late", "raise SystemExit(1)"), minutes=0.1)
    assert check["steps"]["late"]["result"] == "not begun" and "no time left" in page


def test_a_kit_is_unpacked_once_and_a_damaged_piece_is_named(tmp_path):
    folder, environment = tmp_path / "kit", tmp_path / "environment"
    folder.mkdir()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        archive.addfile(tarfile.TarInfo("package/__init__.py"))
    pieces = {"kit.tar.xz.00": buffer.getvalue()[:50], "kit.tar.xz.01": buffer.getvalue()[50:]}
    sums = [f"{hashlib.sha256(data).hexdigest()}  {name}" for name, data in pieces.items()]
    (folder / "SHA256SUMS").write_text("\n".join(sums))
    for name, data in pieces.items():
        (folder / name).write_bytes(data)
    kit.install(folder, environment)
    assert (environment / "site" / "package" / "__init__.py").exists()
    (folder / "kit.tar.xz.01").write_bytes(b"damaged")
    kit.install(folder, environment)  # it is whole already
    with pytest.raises(ValueError, match=r"kit.tar.xz.01: damaged or absent"):
        kit.install(folder, tmp_path / "other")
