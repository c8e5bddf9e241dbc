"""Task folders of Harbor without Docker: their instructions as a dataset, their files, their verifier's reward.

A task's scripts speak of ``/app``, ``/tests`` and ``/logs``. A command sees them so in a mount namespace of its own:
the machine's files as they are, and those folders beside them. That isolates nothing; tasks that need more than files
(an image that is built, services, no network) are refused with the reason.

``tasks`` is a ``dataset_cls``. ``python -m roll.rollout.agents.harbor_task play <command>`` runs an agent program where
the task's files are, and ``… verify`` is a command for ``agent.verify``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.configs.data import DataArguments

_COLUMN = "harbor"
_SYSTEM = re.compile(r"/(bin|boot|dev|etc|home|lib\w*|media|mnt|opt|proc|root|run|sbin|srv|sys|tmp|usr|var)?(/|$)")
_HARMLESS = ("FROM", "CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "MAINTAINER")
_LAST_WORDS = 500

_ENTER = """
root=$1 tops=$2 where=$3
shift 3
PATH="$PATH:/usr/sbin:/sbin"
mount -t tmpfs -o mode=755 roll "$root"
for entry in /* /.[!.]*; do
  case "$tops" in *" $entry "*) continue;; esac
  if [ -L "$entry" ]; then cp -P "$entry" "$root$entry"
  elif [ -d "$entry" ]; then mkdir "$root$entry"; mount --rbind "$entry" "$root$entry"
  fi
done
while [ "$1" != -- ]; do
  mkdir -p "$root$1"; mount --bind "$2" "$root$1"
  shift 2
done
shift
exec chroot "$root" sh -c 'cd "$0" && exec "$@"' "$where" "$@"
"""
"""Makes a root folder of the machine's own and of places, which come as pairs, and runs a command in it."""


class TaskError(ValueError):
    """A task cannot be run here, or its verifier gave no reward."""


@dataclass
class _Image:
    """Instructions of a Dockerfile, as far as files go."""

    workdir: str = "/app"
    copies: list[tuple[str, str]] = field(default_factory=list)
    """From the folder ``environment`` to the working folder, both relative; of a folder its content is copied."""
    env: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)


def tasks(args: DataArguments, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of the tasks in ``file_name``: folders of tasks, or of folders of them (a ``dataset_cls``).

    Raises:
        DataError: every task that cannot be played, with all reasons.
    """
    from roll.data.files import DataError

    problems = []
    for name in args.file_names or [""]:
        folders = _folders(Path(name).expanduser()) if name else []
        if not folders:
            problems.append(f"{name or 'file_name'}: no task.toml in it, nor in its folders")
        for folder in folders:
            try:
                yield row(folder)
            except (TaskError, OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                problems.append(f"{folder}: {error}")
    if problems:
        raise DataError(problems)


def row(folder: Path) -> dict[str, Any]:
    """A task as a row of a dataset.

    Raises:
        TaskError: it needs what is not here.
    """
    config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    environment, verifier = config.get("environment", {}), config.get("verifier", {})
    image = _image(folder / "environment" / "Dockerfile")
    refused = [*_needs(config), *image.refused]
    files = {path.name for path in (folder / "environment").glob("*compose*")}
    refused += [f"environment/{name}: services need Docker" for name in sorted(files)]
    if not (folder / "tests" / "test.sh").is_file():
        refused.append("tests/test.sh: there is none")
    if (folder / "tests" / "Dockerfile").exists():
        refused.append("tests/Dockerfile: an environment of the verifier's own needs Docker")
    workdir = environment.get("workdir") or image.workdir
    if _SYSTEM.match(workdir) or not workdir.startswith("/"):
        refused.append(f"the working folder {workdir} is the system's, expected one such as /app")
    env = {**image.env, **environment.get("env", {})}
    for key, value in {**env, **verifier.get("env", {})}.items():
        if "${" in value:
            refused.append(f"{key} = {value}: values of the host are not passed on")
    if refused:
        raise TaskError("; ".join(refused))
    return {
        "id": config.get("task", {}).get("name", folder.name),
        "prompt": (folder / "instruction.md").read_text(encoding="utf-8"),
        _COLUMN: {
            "folder": str(folder.resolve()),
            "workdir": workdir,
            "copies": image.copies,
            "env": env,
            "verifier_env": verifier.get("env", {}),
            "verifier_timeout": verifier.get("timeout_sec", 600.0),
        },
    }


def prepare(task: Mapping[str, Any], work: Path) -> None:
    """Copies the task's files to the working folder."""
    source = Path(task["folder"]) / "environment"
    for name, target in task["copies"]:
        if (source / name).is_dir():
            shutil.copytree(source / name, work / target, dirs_exist_ok=True)
        else:
            (work / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, work / target)


def verify(task: Mapping[str, Any], work: Path) -> float:
    """The reward that the task's verifier writes, of what is in the working folder.

    Its logs begin empty, and no program has seen them or the tests before.

    Raises:
        TaskError: it takes too long, or writes none.
    """
    with tempfile.TemporaryDirectory(prefix="roll-harbor-") as folder:
        root, tests, logs = Path(folder, "root"), Path(folder, "tests"), Path(folder, "logs")
        root.mkdir()
        shutil.copytree(Path(task["folder"]) / "tests", tests)
        for name in ("verifier", "agent", "artifacts"):
            (logs / name).mkdir(parents=True)
        places = {task["workdir"]: work, "/tests": tests, "/logs": logs}
        env = os.environ | task["env"] | task["verifier_env"]
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                entering(root, places, task["workdir"], ["bash", "/tests/test.sh"]),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(task["verifier_timeout"])
            except subprocess.TimeoutExpired:
                raise TaskError(f"the verifier took longer than {task['verifier_timeout']:g} s") from None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            words = os.pread(output.fileno(), _LAST_WORDS, max(0, os.fstat(output.fileno()).st_size - _LAST_WORDS))
            said = words.decode("utf-8", "replace").strip()
        return _reward(logs / "verifier", said)


def entering(root: Path, places: Mapping[str, Path], where: str, command: Sequence[str]) -> list[str]:
    """The command that runs another one where it sees folders at other places.

    Args:
        places: folders of this machine by where they are seen.
    """
    tops = "".join(f" /{PurePosixPath(place).parts[1]} " for place in places)
    pairs = [str(part) for place in places.items() for part in place]
    alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-euc", _ENTER, "sh"]
    return [*alone, str(root), tops, where, *pairs, "--", *command]


def _reward(folder: Path, said: str) -> float:
    """``reward.json``, else ``reward.txt``."""
    try:
        if (folder / "reward.json").exists():
            told = json.loads((folder / "reward.json").read_text())
            parts = told if isinstance(told, dict) else {"reward": told}
            value = parts["reward"] if "reward" in parts else sum(parts.values()) / len(parts)
        else:
            value = float((folder / "reward.txt").read_text())
        reward = float(value)
    except FileNotFoundError as error:
        raise TaskError(f"the verifier wrote no /logs/verifier/reward.txt{f': {said}' if said else ''}") from error
    except (ValueError, TypeError, ZeroDivisionError) as error:
        raise TaskError(f"the verifier's reward is not a number: {error}") from error
    if not math.isfinite(reward):
        raise TaskError(f"the verifier's reward is {reward}, expected a finite number")
    return reward


def _folders(path: Path) -> list[Path]:
    if (path / "task.toml").is_file():
        return [path]
    return [folder for folder in sorted(path.glob("*")) if (folder / "task.toml").is_file()]


def _needs(config: Mapping[str, Any]) -> Iterator[str]:
    """Lists what a task.toml asks for that is not here."""
    environment, verifier = config.get("environment", {}), config.get("verifier", {})
    if config.get("steps"):
        yield "steps: tasks of several steps are not supported"
    for key in ("docker_image", "gpus", "tpu", "mcp_servers", "healthcheck", "skills_dir"):
        if environment.get(key):
            yield f"environment.{key}: needs Docker"
    if environment.get("os", "linux") != "linux":
        yield f"environment.os: got {environment['os']}, expected linux"
    for name, section in (("environment", environment), ("agent", config.get("agent", {})), ("verifier", verifier)):
        if section.get("network_mode", "public") != "public" or section.get("allow_internet") is False:
            yield f"{name}.network_mode: the network cannot be kept away without Docker"
        if section.get("user") not in (None, "root", 0):
            yield f"{name}.user: other users need Docker"
    if verifier.get("environment_mode") == "separate" or verifier.get("environment") or verifier.get("collect"):
        yield "verifier.environment: one of the verifier's own needs Docker"


def _image(dockerfile: Path) -> _Image:
    """A Dockerfile that only says where files are; what else it says is refused."""
    image = _Image()
    if not dockerfile.exists():
        return image
    lines = dockerfile.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            words = [] if line.lstrip().startswith("#") else shlex.split(line)
        except ValueError:  # an apostrophe, for one
            words = line.split()
        name = words[0].upper() if words else ""
        arguments = [word for word in words[1:] if not word.startswith("--")]
        if not name or name in _HARMLESS:
            continue
        if name == "WORKDIR" and len(arguments) == 1:
            image.workdir = str(PurePosixPath(image.workdir, arguments[0]))
        elif name == "ENV" and all("=" in argument for argument in arguments):
            image.env |= dict(argument.split("=", 1) for argument in arguments)
        elif name == "COPY" and len(arguments) > 1 and len(arguments) == len(words) - 1:
            image.refused += _copy(image, dockerfile.parent, arguments[:-1], arguments[-1])
        else:
            image.refused.append(f"environment/Dockerfile:{number}: {name}: nothing is built without Docker")
    return image


def _copy(image: _Image, folder: Path, names: Sequence[str], target: str) -> Iterator[str]:
    at = PurePosixPath(image.workdir, target)
    if not at.is_relative_to(image.workdir) or ".." in at.parts:
        yield f"COPY to {target}: expected a place in {image.workdir}"
        return
    inside = at.relative_to(image.workdir)
    into = target.endswith(("/", ".")) or len(names) > 1
    for name in names:
        here = str(PurePosixPath("/", name).relative_to("/"))
        found = [folder] if here == "." else [] if ".." in name else sorted(folder.glob(here))
        if not found:
            yield f"COPY {name}: no such file in environment"
        for path in found:
            place = inside / path.name if into and not path.is_dir() else inside
            image.copies.append((str(path.relative_to(folder)), str(place)))


def main(arguments: Sequence[str]) -> None:
    """``play <command>`` or ``verify``, in the folder and with the task of an episode (``ROLL_TASK``)."""
    with open(os.environ["ROLL_TASK"], encoding="utf-8") as file:
        task = json.load(file)["extra_info"][_COLUMN]
    work = Path.cwd()
    if arguments[0] == "verify":
        reward = verify(task, work)
        Path(os.environ["ROLL_REWARD"]).write_text(json.dumps({"reward": reward, "success": reward >= 1}))
        return
    prepare(task, work)
    os.environ.update(task["env"])
    root = Path(os.environ["ROLL_TASK"]).parent / "root"
    root.mkdir()
    command = entering(root, {task["workdir"]: work}, task["workdir"], arguments[1:])
    os.execvp(command[0], command)


if __name__ == "__main__":
    if not sys.argv[1:] or sys.argv[1] not in ("play", "verify") or (sys.argv[1] == "play") != (len(sys.argv) > 2):
        raise SystemExit("usage: python -m roll.rollout.agents.harbor_task play <command> … | verify")
    try:
        main(sys.argv[1:])
    except TaskError as told:
        raise SystemExit(str(told)) from None
