"""Writes into ``docs/architecture.md`` which files of ``roll/`` run in a steady step of ``rlvr_math``.

    python scripts/step_path.py           # measures and writes the list between its two marks; five minutes
    python scripts/step_path.py --print   # measures and prints it alone

The demonstration runs shortened. From the start of its third step to the start of the fourth, every function that is
called or resumed in the driver or in any other process of the run is noted by a profile function (``sys.setprofile``
in every thread; Python 3.11 has no ``sys.monitoring``), which a ``sitecustomize`` module sets in all of them.
Modules of ``roll.configs`` are left out: they describe values, and a step only reads these.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import defaultdict
from pathlib import Path

from generate_strategy_docs import replace

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
SHORT = [
    "max_steps=4",
    "save_steps=1000",
    "eval_steps=0",
    "val_batch_size=8",
    "warm_start.max_steps=1",
    "warm_start.eval_steps=1",
    "warm_start.eval_episodes=8",
    "warm_start.min_success=0.0",
    "actor_train.training_args.per_device_train_batch_size=16",
    "actor_train.training_args.gradient_accumulation_steps=2",
    "rollout_batch_size=8",
]
RECORDER = """
import mmap, os, sys, threading

root, folder = {root!r}, {folder!r}
flag = mmap.mmap(os.open(os.path.join(folder, "flag"), os.O_RDWR), 1)
STEP, FIRST = "RLPipeline.step", 3
found = set()


def note(frame, event, arg):
    if event != "call":
        return
    code = frame.f_code
    if not code.co_filename.startswith(root):
        return
    if code.co_qualname == STEP:
        step = frame.f_locals["step"]
        flag[0] = 1 if step == FIRST else 2 if step == FIRST + 1 else flag[0]
    if flag[0] == 1 and code not in found:
        found.add(code)
        with open(os.path.join(folder, "found-" + str(os.getpid())), "a") as out:
            out.write(code.co_filename[len(root):] + " " + code.co_qualname + chr(10))


threading.setprofile(note)
sys.setprofile(note)
"""


def functions_of_step() -> dict[str, set[str]]:
    """By file below ``roll/``, the qualified names of the functions that ran in the step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "flag").write_bytes(b"\0")
        recorder = RECORDER.format(root=f"{ROOT / 'roll'}/", folder=name)
        (folder / "sitecustomize.py").write_text(recorder, encoding="utf-8")
        script = ROOT / "examples" / "start_rlvr_pipeline.py"
        command = [sys.executable, str(script), "--config_name", "rlvr_math", f"output_dir={name}/output", *SHORT]
        paths = os.pathsep.join([name, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        functions = defaultdict[str, set[str]](set)
        for file in folder.glob("found-*"):
            for line in file.read_text(encoding="utf-8").splitlines():
                path, function = line.split(" ", 1)
                if not path.startswith("configs/"):
                    functions[path].add(function)
    return functions


def class_of(function: str) -> str | None:
    """The class that a qualified name belongs to."""
    names = function.partition(".<locals>")[0].split(".")[:-1]
    return ".".join(names) or None


def code_lines(file: Path) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    source = file.read_text(encoding="utf-8")
    described = set[int]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=last) if last is not None:
                described.update(range(first, last + 1))
    layout = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in layout:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - described)


def report(functions: dict[str, set[str]]) -> str:
    """The figures and the list, as Markdown."""
    classes = {(path, name) for path, names in functions.items() for each in names if (name := class_of(each))}
    lines = sum(code_lines(ROOT / "roll" / path) for path in functions)
    folders = defaultdict[str, list[str]](list)
    for path in sorted(functions):
        folders[str(Path(path).parent)].append(f"`{Path(path).name}`")
    rows = [f"| `{folder}/` | {len(files)} | {', '.join(files)} |" for folder, files in folders.items()]
    return "\n".join(
        [
            f"{len(functions)} files of {lines:,} code lines, and {len(classes)} classes with a function that runs:",
            "",
            "| Folder | Files | |",
            "|---|---|---|",
            *rows,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="print the list and leave the page as it is")
    args = parser.parse_args()
    text = report(functions_of_step())
    if args.print:
        sys.stdout.write(f"{text}\n")
    else:
        replace(PAGE, "step", text)


if __name__ == "__main__":
    main()
