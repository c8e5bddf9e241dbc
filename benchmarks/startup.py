"""How long a user waits: for ``import roll``, for a checked configuration, for the first rollout of a run.

    python benchmarks/startup.py [RUN_FOLDER] [--repeat 3] [--demonstrations]

Every figure is the fastest of fresh processes. ``RUN_FOLDER`` (or its summary.json) is that of a real run, which notes
when its first rollout began; ``--demonstrations`` runs one step of both, from empty folders and once, which takes
minutes. Exit code 1 when the import is slow or loads a heavy package.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORT_LIMIT_S = 1.0
HEAVY = ("torch", "ray", "transformers")

IMPORT = f"""
import sys, time
start = time.perf_counter()
import roll
print(time.perf_counter() - start, *(name for name in {HEAVY} if name in sys.modules))
"""


def import_seconds() -> tuple[float, list[str]]:
    """Seconds of ``import roll`` itself, the interpreter's start left out, and the heavy packages that it loaded."""
    seconds, *loaded = _run("-c", IMPORT).split()
    return float(seconds), loaded


def command_seconds(*arguments: str) -> float:
    """Seconds of a whole command, the interpreter's start included."""
    start = time.perf_counter()
    _run(*arguments)
    return time.perf_counter() - start


def _run(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def demonstration(name: str, launcher: str) -> list[tuple[str, float]]:
    """Start-up figures of a demonstration that begins with nothing, the warm start included."""
    with tempfile.TemporaryDirectory() as folder:
        data = [f"data_generator.folder={folder}/data"] if name == "rlvr_math" else []
        _run(launcher, "--config_name", name, f"output_dir={folder}", "max_steps=1", *data)
        return [(f"{name}: {label.strip()}", value) for label, value in run_figures(Path(folder, name))]


def run_figures(path: Path) -> list[tuple[str, float]]:
    """Start-up figures of a finished run, in seconds."""
    summary = json.loads((path / "summary.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    if "first_rollout_s" not in summary:
        raise SystemExit(f"{path}: no first_rollout_s in the summary; its status is {summary.get('status')!r}")
    figures = [("launch to first rollout", float(summary["first_rollout_s"]))]
    if warm_start := summary.get("seconds", {}).get("warm start"):
        figures += [("  of which warm start of the tiny model", float(warm_start))]
    return figures


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path, nargs="?", help="folder or summary.json of a run")
    parser.add_argument("--demonstrations", action="store_true", help="run both to their first rollout, and a step")
    parser.add_argument("--repeat", type=int, default=3, help="processes per figure")
    options = parser.parse_args()
    imports = [import_seconds() for _ in range(options.repeat)]
    seconds, loaded = min(imports)
    launcher = "examples/start_agentic_pipeline.py"
    validate = (launcher, "--config_name", "agentic_sokoban", "--validate-only")
    rows = [
        ("import roll", seconds),
        ("--help", min(command_seconds(launcher, "--help") for _ in range(options.repeat))),
        ("--validate-only", min(command_seconds(*validate) for _ in range(options.repeat))),
        *(run_figures(options.run) if options.run else []),
    ]
    if options.demonstrations:
        rows += demonstration("agentic_sokoban", launcher)
        rows += demonstration("rlvr_math", "examples/start_rlvr_pipeline.py")
    for label, value in rows:
        print(f"{label:40} {1000 * value:9.1f} ms")
    print(f"{'loaded by import roll':40} {', '.join(loaded) or 'none of ' + ', '.join(HEAVY)}")
    return int(seconds >= IMPORT_LIMIT_S or bool(loaded))


if __name__ == "__main__":
    sys.exit(main())
