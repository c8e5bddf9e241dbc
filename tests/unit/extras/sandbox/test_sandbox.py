"""The sandbox against programs that try to get out, to stay, or to take the machine."""

import asyncio
import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from roll.extras.sandbox import pool as module
from roll.extras.sandbox import run as sandbox_run
from roll.extras.sandbox.pool import Sandbox, SandboxError, SandboxLimits, SandboxResult
from roll.rewards.types import SandboxUnavailableError
from tests.support.processes import happens

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")

LIMITS = SandboxLimits(wall_seconds=20, cpu_seconds=5, memory_mb=256, output_kb=64, temp_mb=8, file_mb=4, files=100)
SECRET = "the-secret-that-must-not-get-out"


@pytest.fixture(scope="module", params=["bubblewrap", "namespaces"])
def sandbox(request) -> Sandbox:
    try:
        return Sandbox(backend=request.param)
    except SandboxUnavailableError as error:
        pytest.skip(f"{request.param} does not isolate here: {error}")


@pytest.fixture(scope="module")
def adopts_orphans():
    """Processes that lose their parent become ours, so that none is overlooked."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    yield
    libc.prctl(36, 0, 0, 0, 0)


def descendants() -> set[int]:
    """But for what is dead and waits for us only."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE or process.ppid() != os.getpid():
                found.add(process.pid)
    return found


@pytest.fixture(autouse=True)
def nothing_stays(adopts_orphans, monkeypatch, tmp_path_factory):
    """After each test: no process, no temporary file, no open descriptor more than before."""
    # A folder of their own: other tests that run meanwhile have sandboxes too.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("sandboxes")))
    processes, files, descriptors = descendants(), leftovers(), len(os.listdir("/proc/self/fd"))
    yield
    assert happens(lambda: not descendants() - processes, 3)
    assert not leftovers() - files
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def leftovers() -> set[Path]:
    return {path for path in Path(tempfile.gettempdir()).glob("roll-sandbox*") if path.is_dir()}


def run(sandbox: Sandbox, source: str, stdin: str = "", **limits) -> SandboxResult:
    return asyncio.run(sandbox.run_program(source, stdin, LIMITS.model_copy(update=limits)))


HEAD = """
import ctypes, errno, json, os, signal, sys
facts = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what):
    try:
        return what()
    except (OSError, ValueError) as error:
        return type(error).__name__
"""


def says(sandbox: Sandbox, source: str, facts: object = None, **limits) -> list[str]:
    """The lines of a program that is told ``facts`` and ends normally."""
    result = run(sandbox, HEAD + source, json.dumps(facts), **limits)
    assert (result.exit_code, result.timed_out) == (0, False), result
    return result.stdout.splitlines()


# --- ordinary programs ------------------------------------------------------------------------------------------------


def test_a_program_reads_its_input_and_ends(sandbox):
    result = run(sandbox, "import sys\nprint(int(input()) * 2)\nprint('ä', file=sys.stderr)\nexit(3)", "21\n")
    assert (result.stdout, result.stderr, result.exit_code) == ("42\n", "ä\n", 3)
    assert not result.timed_out and not result.output_truncated
    assert result.cpu_s is not None and 0 <= result.cpu_s < 5 and result.wall_s > 0


def test_the_whole_standard_library_is_there_and_the_temporary_folder_can_be_used(sandbox):
    source = """
import asyncio, collections, decimal, hashlib, heapq, itertools, json, random, re, sqlite3, tempfile, threading
with tempfile.TemporaryFile() as file:
    file.write(b"abc")
open("x.txt", "w").write("here")
threading.stack_size(64 << 20)
thread = threading.Thread(target=lambda: print("thread"))
thread.start()
thread.join()
async def main():
    print(open("/tmp/x.txt").read(), __name__)
asyncio.run(main())
"""
    assert run(sandbox, source).stdout == "thread\nhere __main__\n"


async def test_runs_at_the_same_time_do_not_disturb_each_other(sandbox):
    calls = [sandbox.run_program("print(int(input()) ** 2)", str(i), LIMITS) for i in range(12)]
    assert [result.stdout for result in await asyncio.gather(*calls)] == [f"{i * i}\n" for i in range(12)]


@pytest.mark.parametrize(
    ("source", "code"),
    [("raise ValueError('x')", 1), ("def f(:", 1), ("import ctypes; ctypes.string_at(0)", 139),
     ("import os; os.abort()", 134), ("import os; os.kill(os.getpid(), 15)", 143), ("import os; os._exit(7)", 7),
     ("x = 'a\0b'", 1), ("x = '\ud800'", 1)],
)  # fmt: skip
def test_ways_to_end_have_the_exit_code_of_a_shell(sandbox, source, code):
    result = run(sandbox, source)
    assert (result.exit_code, result.stdout, result.timed_out) == (code, "", False)


# --- taking the machine -----------------------------------------------------------------------------------------------


def test_fork_bomb(sandbox):
    source = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    result = run(sandbox, source, wall_seconds=1)
    assert result.timed_out and result.exit_code == 137


@pytest.mark.parametrize("start", ["fork", "thread"])
def test_processes_and_threads_are_counted(sandbox, start):
    source = """
import threading, time
def fork():
    if os.fork() == 0:
        time.sleep(30)
def thread():
    threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
threading.stack_size(1 << 16)
started = 0
try:
    while started < 50:
        globals()[facts]()
        started += 1
except (OSError, RuntimeError):
    pass
print(started, flush=True)
os._exit(0)
"""
    assert int(says(sandbox, source, start)[0]) <= LIMITS.processes + 3


def test_memory_bomb(sandbox):
    source = """
kept = []
try:
    while True:
        kept.append(bytearray(16 << 20))
except MemoryError:
    count = len(kept)
    del kept
    print(count)
"""
    assert int(says(sandbox, source)[0]) * 16 < LIMITS.memory_mb
    assert run(sandbox, "try:\n    x = bytearray(1 << 40)\nexcept MemoryError:\n    print('no')").stdout == "no\n"


SHARED = """
import mmap, time
def hold():
    memory = mmap.mmap(-1, facts["mb"] << 20)
    for page in range(0, len(memory), 4096):
        memory[page] = 1
    return memory
if facts["one"]:
    memory = hold()
for _ in range(5):
    if os.fork() == 0:
        memory = memory if facts["one"] else hold()
        time.sleep(facts["seconds"])
        os._exit(sum(memory[::1 << 20]) != facts["mb"])
print([os.wait()[1] for _ in range(5)])
"""


def test_shared_mappings_of_all_processes_count_once_against_the_limit(sandbox):
    """Each process stays within its address space; together they hold four times as much as they may."""
    source = "import json, os, sys\nfacts = json.loads(sys.stdin.read())\n" + SHARED
    facts = json.dumps({"mb": 104, "one": False, "seconds": 30})
    result = run(sandbox, source, facts, memory_mb=128, processes=8, wall_seconds=20)
    assert result.memory_exceeded and not result.timed_out
    assert (result.exit_code, result.stdout) == (137, "") and result.wall_s < 15
    facts = {"mb": 80, "one": True, "seconds": 0.5}
    assert says(sandbox, SHARED, facts, memory_mb=128, processes=8) == ["[0, 0, 0, 0, 0]"]


MACHINE = os.uname().machine
REFUSED = {"PermissionError", "OSError"}  # OSError: user 0 does not even exist
CALLS = {"x86_64": [321, 298, 323, 425, 250, 248, 304, 175], "aarch64": [280, 241, 282, 425, 219, 217, 265, 105]}
CLONE = {"x86_64": 56, "aarch64": 220}
PROGRAMS = {
    "memory that no limit counts is refused": (
        "print(attempt(lambda: os.memfd_create('x')))\nprint(libc.shmget(0, 1 << 20, 0o1600))",
        ["PermissionError", "-1"],
    ),
    "open files are counted": (
        "kept = []\n"
        "print(attempt(lambda: [kept.append(os.open('/dev/null', 0)) for _ in range(1000)]), len(kept) < 64)",
        ["OSError True"],
    ),
    "limits cannot be raised": (
        """
import resource
for name in ("NPROC", "AS", "CPU", "FSIZE", "NOFILE", "CORE"):
    number = getattr(resource, "RLIMIT_" + name)
    print(attempt(lambda: resource.setrlimit(number, (resource.getrlimit(number)[0] + 1,) * 2)))
""",
        ["ValueError"] * 6,
    ),
    "a file and the folder have a bound": (
        """
def fill(name):
    with open(name, "wb", buffering=0) as file:
        while file.write(b"x" * 100000) == 100000:
            pass
print(attempt(lambda: fill("a")), os.path.getsize("a") <= 4 << 20)
for name in "bcdef":
    attempt(lambda: fill(name))
print(sum(os.path.getsize(name) for name in os.listdir()) <= 8 << 20)
""",
        [{"OSError True", "None True"}, "True"],
    ),
    "passwords and accounts are not there": (
        "for path in ('/etc/passwd', '/etc/shadow', '/etc/hosts', '/root/.ssh', '/root/.bashrc'):\n"
        "    print(attempt(lambda: os.stat(path)))",
        ["FileNotFoundError"] * 5,
    ),
    "names are not resolved": (
        "import socket\nprint(attempt(lambda: socket.getaddrinfo('example.com', 80)))",
        ["gaierror"],
    ),
    "the own folder can be deleted": (
        "import shutil\nopen('x', 'w').write('x')\n"
        "shutil.rmtree('/tmp', ignore_errors=True)\nprint(os.listdir('/tmp'))",
        ["[]"],
    ),
    "only the three streams are open": (
        """
print([n for n in range(64) if attempt(lambda: os.fstat(n)) != "OSError"])
print(attempt(lambda: os.write(0, b"forged")))
""",
        ["[0, 1, 2]", REFUSED],
    ),
    "another program sees as little": (
        """
import subprocess
for line in ("cat /etc/passwd", "ls /proc /home", "echo $ROLL_SECRET", "test `id -u` = 0 && echo root"):
    print(repr(subprocess.run(["/bin/sh", "-c", line], capture_output=True, text=True).stdout))
""",
        ["''", "''", r"'\n'", "''"],
    ),
    "no way to another user": (
        """
print(os.getuid() != 0, os.geteuid() != 0, 0 not in os.getgroups())
for call in (os.setuid, os.setgid, os.seteuid):
    print(attempt(lambda: call(0)))
print(attempt(lambda: os.setgroups([0])))
print(attempt(lambda: os.chown("/tmp", 0, 0)))
print(libc.prctl(39, 0, 0, 0, 0))  # PR_GET_NO_NEW_PRIVS
""",
        ["True True True", *[REFUSED] * 5, "1"],
    ),
    "no capabilities": (
        """
data = (ctypes.c_uint32 * 6)()
print(libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), data), list(data))
print(attempt(lambda: os.mknod("disk", 0o60600, os.makedev(8, 0))))
print(attempt(lambda: os.nice(-5)))
print(attempt(lambda: os.chroot("/tmp")), attempt(lambda: os.sched_setscheduler(0, 1, os.sched_param(1))))
""",
        [f"0 {[0] * 6}", REFUSED, REFUSED, "PermissionError PermissionError"],
    ),
    "namespaces and mounts are refused": (
        f"""
def call(name, *args):
    ctypes.set_errno(0)
    print(getattr(libc, name)(*args), errno.errorcode.get(ctypes.get_errno()))
for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000):
    call("unshare", flag)
call("mount", b"none", b"/tmp", b"tmpfs", 0, None)
call("mount", None, b"/", None, 32, None)
call("umount2", b"/tmp", 2)
call("setns", 0, 0)
call("syscall", {CLONE.get(MACHINE)}, 0x10000000 | 17, 0, 0, 0, 0)
call("syscall", 435, 0, 0)
call("syscall", 428, -100, b"/", 0)
""",
        [{"-1 EPERM", "-1 ENOSYS"}] * 11,
    ),
    "dangerous system calls are refused": (
        f"for number in {CALLS.get(MACHINE)}:\n    print(libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno())",
        [f"-1 {errno.EPERM}"] * 8,
    ),
    "nothing outside the temporary folder can be written": (
        """
library = os.path.dirname(os.__file__)
for folder in ("/", "/usr", "/usr/bin", "/etc", "/dev", "/root", os.path.dirname(sys.executable), library):
    print(attempt(lambda: open(folder + "/x", "w")))
    print(attempt(lambda: os.chmod(folder, 0o777)))
for what in (lambda: open(os.__file__, "a"), lambda: os.unlink(os.__file__), lambda: os.rename("/usr", "/x")):
    print(attempt(what))
""",
        [REFUSED | {"FileNotFoundError"}] * 19,
    ),
    "devices are harmless": (
        """
print(sorted(os.listdir("/dev")))
print(attempt(lambda: os.open("/dev/tty", 2)))
print(open("/dev/null", "w").write("x"), len(open("/dev/urandom", "rb").read(4)))
""",
        [
            str([name for name in ("full", "null", "random", "urandom", "zero") if os.path.exists(f"/dev/{name}")]),
            "FileNotFoundError",
            "1 4",
        ],
    ),
}
"""What a program tries, and what each line may say of it."""


@pytest.mark.parametrize(("source", "lines"), PROGRAMS.values(), ids=PROGRAMS)
def test_a_program_is_told_what_it_may(sandbox, source, lines):
    said, allowed = says(sandbox, source), [may if isinstance(may, set) else {may} for may in lines]
    assert [(line, may) for line, may in zip(said, allowed, strict=True) if line not in may] == []


def test_two_runs_share_nothing(sandbox):
    assert run(sandbox, "open('mark', 'w').write('x')").exit_code == 0
    assert run(sandbox, "import os; print(os.listdir('/tmp'))").stdout == "[]\n"


def test_endless_computation_is_killed_by_its_cpu_time_and_endless_sleep_by_the_clock(sandbox):
    source = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True:\n    pass"
    result = run(sandbox, source, cpu_seconds=1, wall_seconds=60)
    assert (result.exit_code, result.timed_out) == (137, False) and result.cpu_s >= 0.5
    source = "import signal, time\nfor n in (1, 2, 3, 13, 14, 15):\n    signal.signal(n, signal.SIG_IGN)\n"
    result = run(sandbox, source + "print('asleep', flush=True)\ntime.sleep(1000)", wall_seconds=1)
    assert result.timed_out and result.wall_s < 3


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_huge_output_ends_the_run(sandbox, stream):
    result = run(sandbox, f"import sys\nwhile True:\n    sys.{stream}.write('x' * 10000)")
    assert result.output_truncated and not result.timed_out
    assert len(getattr(result, stream)) == LIMITS.output_kb << 10


def test_closed_output_does_not_end_the_watch(sandbox):
    result = run(sandbox, "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(1000)", wall_seconds=1)
    assert result.timed_out and result.stdout == ""


def test_many_files(sandbox):
    if sandbox.backend == "bubblewrap":
        pytest.skip("bubblewrap does not bound the number of files")
    source = "print(attempt(lambda: [open(str(n), 'w').close() for n in range(1000)]), len(os.listdir()) < 100)"
    assert says(sandbox, source) == ["OSError True"]


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def secret_files(tmp_path):
    """Files with the secret in the test's folder, the home folder and the shared temporary folder."""
    paths = [tmp_path / "secret.txt"]
    for folder in (Path.home(), Path("/tmp"), Path("/dev/shm"), Path("/var/tmp")):
        if folder.is_dir() and os.access(folder, os.W_OK):
            handle, name = tempfile.mkstemp(prefix=".canary-", dir=folder)
            os.close(handle)
            paths.append(Path(name))
    for path in paths:
        path.write_text(SECRET)
        path.chmod(0o666)
    yield [str(path) for path in paths]
    for path in paths:
        assert path.read_text() == SECRET
        path.unlink()


def test_files_of_this_machine_cannot_be_read_or_written(sandbox, secret_files):
    source = """
for path in facts:
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT):
        if flags == os.O_RDONLY or not path.startswith("/tmp/"):
            print(attempt(lambda: os.open(path, flags)))
"""
    assert set(says(sandbox, source, secret_files)) <= {"FileNotFoundError", "PermissionError", "OSError"}


def test_folders_of_this_machine_are_not_there(sandbox):
    source = """
for path in facts:
    print(path, attempt(lambda: sorted(os.listdir(path))))
"""
    hidden = ["/proc", "/sys", "/run", "/var", "/boot", "/mnt", "/opt", "/srv", os.getcwd(), "/dev/shm"]
    hidden = [path for path in hidden if not sys.base_prefix.startswith(path)]
    assert says(sandbox, source, hidden) == [f"{path} FileNotFoundError" for path in hidden]
    home, base = Path.home(), Path(sys.base_prefix)
    first = base.relative_to(home).parts[:1] if base.is_relative_to(home) else ()
    told = says(sandbox, source, [str(home), "/etc", "/home"])
    assert told[0] in (f"{home} {list(first)}", f"{home} FileNotFoundError")
    assert told[1] in ("/etc ['ld.so.cache']", "/etc FileNotFoundError")


def test_environment_is_empty(sandbox, monkeypatch):
    monkeypatch.setenv("ROLL_SECRET", SECRET)
    source = """
libc.getenv.restype = ctypes.c_char_p
print(sorted(set(os.environ) - {"PWD", "LC_CTYPE"}), libc.getenv(b"ROLL_SECRET"), os.environ["HOME"])
"""
    assert says(sandbox, source) == ["['HOME', 'LANG', 'PATH', 'TMPDIR'] None /tmp"]


def test_other_processes_cannot_be_seen(sandbox):
    source = """
print(os.getpid() < 10, os.getppid() < 10)
for path in (f"/proc/{facts}/environ", "/proc/self/mem", "/proc/1/root", f"/proc/{facts}/cwd"):
    print(attempt(lambda: os.open(path, 0)))
"""
    assert says(sandbox, source, os.getpid()) == ["True True"] + ["FileNotFoundError"] * 4


def test_symbolic_links_and_dots_lead_nowhere(sandbox, secret_files):
    source = """
for path in facts:
    attempt(lambda: os.unlink("link"))
    os.symlink(path, "link")
    print(attempt(lambda: open("link").read()))
    print(attempt(lambda: open("../" * 30 + path).read()))
    print(attempt(lambda: os.link(path, "hard")))
"""
    assert set(says(sandbox, source, secret_files)) <= {"FileNotFoundError", "PermissionError"}


# --- network ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def listeners():
    """A TCP, a UDP, a Unix and an abstract Unix socket of this machine, and what came in."""
    path, abstract = tempfile.mktemp(prefix="roll-socket-", dir="/tmp"), f"\0roll-{os.getpid()}"
    tcp = socket.create_server(("127.0.0.1", 0))
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    sockets = [tcp, udp]
    for address in (path, abstract):
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].bind(address)
        sockets[-1].listen()
    os.chmod(path, 0o777)
    yield [tcp.getsockname()[1], udp.getsockname()[1], path, abstract]
    for item in sockets:
        item.setblocking(False)
        with pytest.raises(BlockingIOError):
            item.recv(1) if item.type == socket.SOCK_DGRAM else item.accept()
        item.close()
    os.unlink(path)


def test_sockets(sandbox, listeners):
    source = """
import socket
tcp, udp, path, abstract = facts
print(attempt(lambda: socket.create_connection(("127.0.0.1", tcp), 1)))
print(attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", udp))))
print(attempt(lambda: socket.socket(socket.AF_INET6)))
print(attempt(lambda: socket.socket(socket.AF_UNIX).connect(path)))
print(attempt(lambda: socket.socket(socket.AF_UNIX).connect(abstract)))
print(attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)))
print(attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW)))
print(attempt(lambda: socket.socket(40, socket.SOCK_STREAM)))
"""
    assert set(says(sandbox, source, listeners)) == {"PermissionError"}


def test_the_network_namespace_holds_without_the_filter(sandbox, listeners, monkeypatch, tmp_path):
    """Each wall stands alone: here the filter of system calls is left out."""
    text = sandbox_run.INNER.read_text()
    weak = text.replace('"socket": (41, 198),', "")
    assert weak != text
    weaker = tmp_path / "inner.py"
    weaker.write_text(weak)
    monkeypatch.setattr(sandbox_run, "INNER", weaker)
    source = """
import socket
tcp, udp, path, abstract = facts
print(attempt(lambda: socket.create_connection(("127.0.0.1", tcp), 1)))
print(attempt(lambda: socket.create_connection(("1.1.1.1", 53), 1)))
print(attempt(lambda: socket.socket(socket.AF_UNIX).connect(path)))
print(attempt(lambda: socket.socket(socket.AF_UNIX).connect(abstract)))
"""
    assert says(sandbox, source, listeners)[1:] == ["OSError", "FileNotFoundError", "ConnectionRefusedError"]
    assert says(sandbox, source, listeners)[0] in ("ConnectionRefusedError", "OSError")


# --- other processes --------------------------------------------------------------------------------------------------


@pytest.fixture
def witness():
    """A process of the same user outside, which must survive."""
    process = subprocess.Popen(["sleep", "100"])
    yield process.pid
    assert process.poll() is None
    process.kill()
    process.wait()


def test_signals_reach_nobody_outside(sandbox, witness):
    seen = []
    old = {number: signal.signal(number, lambda *got: seen.append(got)) for number in (signal.SIGTERM, signal.SIGUSR1)}
    source = """
for pid in facts:
    for number in (15, 10, 9):
        print(attempt(lambda: os.kill(pid, number)))
print(attempt(lambda: os.kill(os.getppid(), 9)))
"""
    try:
        # A test run whose parent has ended is a child of process 1, and a process 1 is in the sandbox too.
        outside = [pid for pid in (os.getpid(), os.getppid(), witness) if pid != 1]
        lines = says(sandbox, source, outside)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    assert lines[:-1] == ["ProcessLookupError"] * 3 * len(outside) and not seen


@pytest.mark.parametrize(
    "call",
    ["os.kill(-1, 9)", "os.killpg(0, 9)", "os.kill(0, 9)", "os.kill(1, 9)", "os.kill(1, 19)", "os.kill(1, 14)",
     "os.kill(1, 2)", "os.kill(os.getppid(), 11)"],
)  # fmt: skip
def test_killing_all_that_can_be_seen_ends_at_most_the_run(sandbox, witness, call):
    result = run(sandbox, f"import os\ntry:\n    {call}\nexcept OSError:\n    pass\nprint('on')")
    assert not result.timed_out and result.stdout in ("", "on\n")


def test_tracing_and_foreign_memory_are_refused(sandbox, witness):
    source = """
for pid in (1, os.getppid(), facts):
    print(libc.ptrace(16, pid, 0, 0), ctypes.get_errno() in (errno.EPERM, errno.ESRCH))
    print(libc.process_vm_readv(pid, None, 0, None, 0, 0) == 0)
"""
    assert says(sandbox, source, witness) == ["-1 True", "False"] * 3


def test_a_daemon_does_not_survive(sandbox):
    source = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
print("parent leaves")
"""
    started = time.monotonic()
    result = run(sandbox, source)
    assert result.stdout == "parent leaves\n" and not result.timed_out and time.monotonic() - started < 15


def test_nothing_survives_the_end_of_the_one_who_waits(sandbox):
    """The process that started the run is killed; no timer of its own is left to end it."""
    script = (
        "import asyncio, sys\nfrom roll.extras.sandbox.pool import Sandbox, SandboxLimits\n"
        "async def main():\n"
        f"    box = Sandbox(backend={sandbox.backend!r})\n"
        "    task = asyncio.ensure_future(box.run_program('import time\\ntime.sleep(1000)', '',\n"
        "        SandboxLimits(wall_seconds=500)))\n"
        "    await asyncio.sleep(1.0)\n    print('started', flush=True)\n    await task\n"
        "asyncio.run(main())\n"
    )
    before = descendants()
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    assert len(descendants() - before) > 1
    process.kill()
    process.wait()
    process.stdout.close()
    # nothing_stays waits for the rest


async def test_cancelling_ends_the_run(sandbox):
    task = asyncio.ensure_future(sandbox.run_program("import time\ntime.sleep(1000)", "", LIMITS))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await sandbox.run_program("print(1)", "", LIMITS)).stdout == "1\n"


# --- privileges -------------------------------------------------------------------------------------------------------


def test_a_foreign_abi_ends_the_program(sandbox):
    if os.uname().machine != "x86_64":
        pytest.skip("x32 exists on x86_64 only")
    source = "print(libc.syscall(0x40000000 + 41, 2, 1, 0))"
    result = run(sandbox, "import ctypes\nlibc = ctypes.CDLL(None)\n" + source)
    assert (result.exit_code, result.stdout) == (159, "")  # SIGSYS


# --- text -------------------------------------------------------------------------------------------------------------

BREAKOUTS = [
    "'''\nimport os; os._exit(1)\n'''",
    '"""; raise SystemExit #',
    "$(touch /tmp/roll-sandbox-broken-out); `id`; | & > /tmp/x \\ ' \" !",
    "a\0b\r\n\x1b[31m\x04\x1a",
    "\\x00\\N{BULLET}%s{0}{{}}",
    "--help\n-c import os",
    "ünï©ødé 🦊 \u2028\u2029",
    '}]}\n{"mode": "program"}',
    "",
]


def test_text_is_data(sandbox):
    """In the input, and as a literal of the source."""
    echo = "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())"
    for text in BREAKOUTS:
        assert run(sandbox, echo, text).stdout == text
    together = "".join(f"sys.stdout.buffer.write({text!r}.encode())\n" for text in BREAKOUTS)
    assert run(sandbox, f"import sys\n{together}").stdout == "".join(BREAKOUTS)
    assert not Path("/tmp/roll-sandbox-broken-out").exists()


def test_input_may_be_no_text_large_and_unread(sandbox):
    echo = "import sys\nprint(sys.stdin.buffer.read().hex(), flush=True)\nsys.stdout.buffer.write(b'\\xff')"
    assert run(sandbox, echo, "a\ud800").stdout == "61eda080\n\ufffd"
    text = "x" * 3_000_000
    assert run(sandbox, "import sys\nprint(len(sys.stdin.read()))", text).stdout == "3000000\n"
    assert run(sandbox, "print('ignored')", text).stdout == "ignored\n"


# --- the choice of a back end -----------------------------------------------------------------------------------------


def test_without_isolation_it_refuses_unless_unsafe_is_asked_for(monkeypatch, caplog):
    monkeypatch.setattr(module, "_probe", lambda backend, view: "got none" if backend != "unsafe" else None)
    with pytest.raises(SandboxUnavailableError, match=r"bubblewrap: got none; namespaces: got none.*allow_unsafe"):
        Sandbox()
    with pytest.raises(SandboxUnavailableError, match="expected allow_unsafe: true"):
        Sandbox(backend="unsafe")
    box = Sandbox(allow_unsafe=True)
    assert box.backend == "unsafe" and "WITHOUT isolation" in caplog.text and "namespaces: got none" in caplog.text
    result = run(box, "import os\nopen('x', 'w')\nprint(os.listdir(), 'roll-sandbox' in os.getcwd())")
    assert result.stdout == "['x'] True\n"
    assert run(box, "import time\ntime.sleep(100)", wall_seconds=0.5).timed_out
    assert "MemoryError" in run(box, "x = bytearray(1 << 40)").stderr


def test_a_probe_that_does_not_isolate_is_not_believed(monkeypatch, tmp_path):
    """A back end that starts programs but shows them the machine's files fails the probe."""
    fake = tmp_path / "bwrap"
    fake.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setitem(sandbox_run._ENVIRONMENT, "PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(SandboxUnavailableError, match="bubblewrap"):
        module._probe.cache_clear()
        Sandbox(backend="bubblewrap")
    module._probe.cache_clear()


def test_a_sandbox_that_breaks_is_an_error_and_no_result(sandbox, monkeypatch, tmp_path):
    broken = tmp_path / "inner.py"
    broken.write_text("raise OSError('no namespace left')")
    monkeypatch.setattr(sandbox_run, "INNER", broken)
    with pytest.raises(SandboxError, match="no namespace left"):
        run(sandbox, "print(1)")


@pytest.mark.parametrize("kwargs", [{"python": "/no/such/python"}, {"python": "python3"}, {"readable": ["relative"]}])
def test_wrong_paths_are_named(kwargs):
    with pytest.raises(ValueError, match="expected an absolute path that exists"):
        Sandbox(**kwargs)


def test_readable_paths_are_shown_read_only(sandbox, tmp_path):
    (tmp_path / "data.txt").write_text("shared")
    tmp_path.chmod(0o755)
    box = Sandbox(backend=sandbox.backend, readable=[str(tmp_path)])
    source = "print(open(facts + '/data.txt').read(), attempt(lambda: open(facts + '/data.txt', 'a')))"
    assert says(box, source, str(tmp_path))[0] in ("shared OSError", "shared PermissionError")


def test_an_interpreter_of_choice_brings_its_packages(sandbox):
    box = Sandbox(backend=sandbox.backend, python=sys.executable)
    result = run(box, "import pydantic, sys\nprint(pydantic.__name__, sys.prefix)", memory_mb=512)
    assert result.stdout == f"pydantic {sys.prefix}\n", result.stderr


def test_it_works_in_a_thread_without_the_main_loop(sandbox):
    results = []
    thread = threading.Thread(target=lambda: results.append(run(sandbox, "print(1)").stdout))
    thread.start()
    thread.join()
    assert results == ["1\n"]


def test_nothing_waits_for_ever_where_the_kernel_refuses_namespaces():
    """As it does in a chroot."""
    program = """
from roll.extras.sandbox import inner
inner.os.getuid = lambda: 0
def refuse(name, *args): raise PermissionError(f"{name}: refused")
inner._call = refuse
inner._unshare()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert result.returncode == 1 and result.stderr.endswith("PermissionError: unshare: refused\n")
