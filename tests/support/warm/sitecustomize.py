"""Lets a Python process start as a fork of one that has imported what runs need, which takes eight CPU seconds.

Python imports this file when it starts, in every process that has this folder in ``PYTHONPATH``; ``start.py`` puts it
there. Ray's workers and agents, and on request the scripts of ``examples``, then become a process that passes on
signals and the exit code of the fork that does their work. Every other program starts as usual, and so does one whose
environment differs in what libraries read when they are imported.
"""

import json
import os
import sys
from pathlib import Path

SOCKET, DECISIVE, SCRIPTS = "ROLL_WARM_SOCKET", "ROLL_WARM_DECISIVE", "ROLL_WARM_SCRIPTS"
"""Environment variables: where forks are made, what their environment has to agree with, whether scripts are forked."""
READ_AT_IMPORT = ("ATEN_", "HF_", "KMP_", "LD_", "MKL_", "OMP_", "PYTORCH_", "RAY_", "TORCH_", "TRANSFORMERS_")
"""Beginnings of names of variables that libraries read when they are imported."""
READ_LATER = {
    "RAY_ADDRESS",
    "RAY_AUTH_MODE",
    "RAY_CLIENT_MODE",  # Ray itself sets it to 0
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
    "RAY_IGNORE_UNHANDLED_ERRORS",
    "RAY_JOB_ID",
    "RAY_LD_PRELOAD_ON_WORKERS",
    "RAY_NODE_ID",
    "RAY_RAYLET_PID",
    "RAY_USAGE_STATS_ENABLED",
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC",
    "RAY_enable_pipe_based_agent_to_parent_health_check",  # of agents alone, all of which have it
    "RAY_gcs_server_port_wait_time_s",  # of daemons alone
}
"""Variables that are not, though they begin so."""
FIRST_JOB = "01000000"
"""The job that a new cluster begins with."""
AGENTS = ("/ray/dashboard/agent.py", "/ray/_private/runtime_env/agent/main.py")


def decisive(environment: dict[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environment.items() if name.startswith(READ_AT_IMPORT) and name not in READ_LATER
    }


def script_of(command: list[str], environment: dict[str, str]) -> list[str]:
    """The script that a fork runs for a command, with its arguments; changes a worker's environment as Ray does."""
    if len(command) < 2 or command[0] != sys.executable:
        return []
    if len(command) > 2 and command[1] == "-u" and command[2].endswith(AGENTS):
        return command[2:]
    name, arguments = command[1], command[2:]
    if name.endswith("/ray/_private/workers/setup_worker.py"):
        context, language = "--serialized-runtime-env-context=", "--language="
        setup = json.loads(next((a.removeprefix(context) for a in arguments if a.startswith(context)), "{}"))
        variables = setup.get("env_vars", {})
        others = {key for key, value in setup.items() if value} - {"env_vars", "py_executable"}
        if setup.get("py_executable", sys.executable) != sys.executable or f"{language}PYTHON" not in arguments:
            return []
        if others or any("$" in value for value in variables.values()):
            return []
        environment |= variables
        return [argument for argument in arguments if not argument.startswith((context, language))]
    is_script = Path(name).parent.name == "examples" and Path(name).name.startswith("start_")
    return command[1:] if is_script and environment.get(SCRIPTS) else []


def hand_over() -> None:
    """Becomes the process that stands for a fork, where there is to be one."""
    environment = dict(os.environ)
    script = script_of(sys.orig_argv, environment) if SOCKET in environment else []
    if script and decisive(environment) == json.loads(environment[DECISIVE]):
        # It imports next to nothing, and tests find it as a process of the run by its environment.
        os.execve(sys.executable, [sys.executable, "-I", "-S", __file__, *script], environment)


def with_ray(path: str, job: str) -> str:
    """The socket where forks are made that have imported Ray for the job; asks for it if it is not there."""
    import socket

    if not os.path.exists(f"{path}-{job}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.connect(path)
            asking.send(json.dumps({"job": job}).encode())
            asking.recv(64)
    return f"{path}-{job}"


def stand_for_a_fork() -> None:
    """Asks for a fork that runs the script of the command line, and ends as it ends."""
    import contextlib
    import ctypes
    import signal
    import socket

    if of_ray := "RAY_RAYLET_PID" in os.environ:
        # Ray's own code in the fork looks for the raylet by a number that it read when it was imported.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
    dispositions = {number: signal.getsignal(number) for number in numbers}
    request = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "ignored": [number for number, handler in dispositions.items() if handler == signal.SIG_IGN],
    }
    passed_on = set(dispositions) - set(request["ignored"])
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # until there is somebody to pass them on to
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting:
        waiting.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        where = os.environ[SOCKET]
        if of_ray:
            where = with_ray(where, os.environ.get("RAY_JOB_ID", FIRST_JOB))
        waiting.connect(where)
        socket.send_fds(waiting, [json.dumps(request).encode()], [0, 1, 2])
        fork = int(waiting.recv(64))
        for descriptor in (0, 1, 2):  # whoever reads its output waits for the fork alone
            os.close(descriptor)

        def pass_on(number: int, _: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(fork, number)

        for number in passed_on:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
        status = int(waiting.recv(64) or -signal.SIGKILL)
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    stand_for_a_fork()
else:
    hand_over()
