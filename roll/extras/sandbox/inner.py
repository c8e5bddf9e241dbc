"""The inside of the sandbox: a program of its own, started by path as ``inner.py JOB STATUS LIFELINE``.

It uses the standard library only. The arguments are descriptors: ``JOB`` has a marshalled dictionary, which
``roll.extras.sandbox.run`` made; to ``STATUS`` ``ready`` is written once the isolation stands (before that any failure
is the sandbox's, after it the program's); the end of ``LIFELINE`` ends the run. In its order:

1. ``enter_namespaces`` (back end ``namespaces``; bubblewrap has done it already): new user, mount, PID, network, IPC,
   UTS and cgroup namespaces, a root of read-only binds in a tmpfs, no ``/proc``, no ``/sys``, no ``/etc``.
2. ``give_up_privileges``: an unprivileged user without capabilities, resource limits, a filter of system calls.
3. ``start_program``: a child, watched by this process, which ends the namespace after it.
4. ``run_command`` becomes a program of the machine; or ``harness.py``, whose text is in the job, runs a Python source
   or its tests.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import select
import struct
import sys
import time

# Modules that take milliseconds (contextlib, typing) are not imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn

INSIDE_UID = 65534  # "nobody", which every container maps

_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_AT_FDCWD, _AT_RECURSIVE, _MNT_DETACH = -100, 0x8000, 2
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 22, 38
_SIGKILL = 9
_SYS_MOUNT_SETATTR = 442  # the same everywhere
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}
_DENIED = {  # system call: its numbers on x86_64 and aarch64
    "socket": (41, 198),  # socketpair stays: asyncio needs it
    "shmget": (29, 194),  # memory that no limit counts, as of the next three
    "semget": (64, 190),
    "msgget": (68, 186),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
}
_CLONE, _CLONE3 = (56, 220), 435
_FAMILIES = (1, 2, 10)  # of sockets where there is a network: AF_UNIX, AF_INET, AF_INET6

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: Any) -> None:
    """A call of the C library that raises ``OSError`` with its name."""
    if getattr(_libc, name)(*args) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{args}: {os.strerror(number)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _call("mount", *texts, ctypes.c_ulong(flags), None if options is None else options.encode())


def _set_attributes(path: str, attributes: int, flags: int = _AT_RECURSIVE) -> None:
    """``mount_setattr``: unlike a remount it keeps the attributes that a user namespace may not clear."""
    buffer = ctypes.create_string_buffer(struct.pack("QQQQ", attributes, 0, 0, 0), 32)
    _call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), flags, buffer, ctypes.c_size_t(32))


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _unshare() -> None:
    """New namespaces, in which this process is ``INSIDE_UID``; as root, it keeps user 0 until it has mounted."""
    uid, gid, launcher = os.getuid(), os.getgid(), os.getpid()
    if uid != 0:
        _call("unshare", _NEW_NAMESPACES)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{INSIDE_UID} {uid} 1")
        _write("/proc/self/gid_map", f"{INSIDE_UID} {gid} 1")
        return
    # Two users can be mapped from outside only. The second is another user outside too: the kernel exempts the
    # user 0 from the limit on processes.
    (ready, tell), (done, confirm) = os.pipe(), os.pipe()
    mapper = os.fork()
    if mapper == 0:
        failed = 1
        os.close(tell)  # its end says that the launcher is gone
        try:
            if os.read(ready, 1):
                for name in ("uid_map", "gid_map"):
                    _write(f"/proc/{launcher}/{name}", f"0 0 1\n{INSIDE_UID} {INSIDE_UID} 1\n")
                failed = 0
        finally:
            os.write(confirm, b"x")
            os._exit(failed)
    _call("unshare", _NEW_NAMESPACES)
    os.write(tell, b"x")
    os.read(done, 1)
    if os.waitpid(mapper, 0)[1] != 0:
        raise PermissionError("uid_map: the kernel refused to map user 0 and user 65534")
    for descriptor in (ready, tell, done, confirm):
        os.close(descriptor)


def _bind(source: str, root: str, *, writable: bool = False) -> None:
    target = root + source
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, target, None, _MS_BIND | _MS_REC)
    kept = _ATTR_NOSUID | (0 if source.startswith("/dev/") else _ATTR_NODEV)
    _set_attributes(target, kept if writable else kept | _ATTR_RDONLY)


def _build_root(view: dict[str, Any]) -> None:
    """A root that shows ``binds`` read-only, ``writable`` as they are, and an empty, bounded ``/tmp``."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    root = "/proc"  # a folder that exists everywhere, under which nothing lies that is bound
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755,size=1m")
    os.mkdir(f"{root}/tmp")
    options = f"mode=700,uid={INSIDE_UID},gid={INSIDE_UID},size={view['temp_bytes']},nr_inodes={view['temp_files']}"
    _mount("tmpfs", f"{root}/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options)
    for path, target in view["links"]:
        os.symlink(target, root + path)
    for path in view["binds"]:
        _bind(path, root)
    for path in view.get("writable", ()):
        _bind(path, root, writable=True)
    os.chdir(root)
    _call("syscall", {"x86_64": 155, "aarch64": 41}[os.uname().machine], b".", b".")  # pivot_root
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")
    _set_attributes("/", _ATTR_RDONLY, 0)


def _offer_port(port: int, channel: int) -> None:
    """Listens on a port of this namespace's loopback; the socket, which the caller can use outside, goes to it."""
    import fcntl
    import socket

    with socket.socket() as listener, socket.socket(fileno=channel) as caller:
        fcntl.ioctl(listener, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))
        listener.bind(("127.0.0.1", port))
        listener.listen(256)
        socket.send_fds(caller, [b"x"], [listener.fileno()])


def _exit_code(status: int) -> int:
    """As a shell says it: 128 + n for a process that signal n killed."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def enter_namespaces(view: dict[str, Any], status: int, lifeline: int) -> None:
    """Returns in the init of a new PID namespace that sees ``view`` only.

    This process stays outside and waits. The kernel kills all of the namespace when its init ends, and no signal from
    inside can end it.
    """
    _unshare()
    init = os.fork()
    if init:
        for descriptor in (0, 1, 2, status, lifeline):  # the pipes must end with the program
            os.close(descriptor)
        os._exit(_exit_code(os.waitpid(init, 0)[1]))
    os.setsid()  # a signal to the program's process group must not reach the parent
    try:  # noqa: SIM105
        _write("/proc/sys/user/max_user_namespaces", "0")
    except OSError:  # read-only in many containers; the filter of system calls forbids namespaces too
        pass
    if view.get("port"):
        _offer_port(view["port"], view["channel"])
    _build_root(view)
    if os.getuid() == 0:
        _change_user(INSIDE_UID)
    _drop_capabilities()


def start_program(status: int, lifeline: int, max_seconds: float) -> None:
    """Returns in a child, which the program is; this process watches it and ends with it, and so does the namespace.

    It also ends when ``lifeline`` is closed on the other side: the caller has had enough, or is dead. (A parent-death
    signal would not do: bubblewrap as root may not signal the user that this process has become.)
    """
    program = os.fork()
    if program == 0:
        os.setsid()
        os.write(status, b"ready")
        os.close(status)
        os.close(lifeline)
        return
    for descriptor in range(3):
        os.close(descriptor)
    cpu_s, code, deadline = 0.0, None, time.monotonic() + max_seconds
    poll = select.poll()
    poll.register(lifeline, 0)  # hanging up is always reported
    poll.register(os.pidfd_open(program), select.POLLIN)
    while code is None and time.monotonic() < deadline:
        if any(descriptor == lifeline for descriptor, _ in poll.poll(200)):
            break
        for pid, ended, used in _reap():
            cpu_s += used
            code = ended if pid == program else code
    try:  # noqa: SIM105
        os.killpg(program, _SIGKILL)  # what is left, where there is no namespace
    except OSError:
        pass
    if code is not None:
        os.write(status, f" {code} {cpu_s}".encode())
    os._exit(0)


def _reap() -> Iterator[tuple[int, int, float]]:
    """Children that have ended, adopted ones too: their ids, exit codes and CPU seconds."""
    while True:
        try:
            pid, status, usage = os.wait3(os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, _exit_code(status), usage.ru_utime + usage.ru_stime


def _change_user(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _drop_capabilities() -> None:
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0), 8)
    _call("capset", header, ctypes.create_string_buffer(24))


def _seccomp_filter(machine: str, network: bool) -> bytes:
    """A BPF program that refuses ``_DENIED`` and new namespaces (``EPERM``), and ends on a foreign ABI.

    It is a second wall: each call is harmless in the namespaces already, but is where kernels had holes, or reserves
    memory that no limit counts.
    """
    column = _COLUMN[machine]
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    kill, refuse, unknown, allow = 0x80000000, 0x00050001, 0x00050026, 0x7FFF0000
    code = [(load, 0, 0, 4), (equal, 1, 0, _AUDIT_ARCH[machine]), (answer, 0, 0, kill), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, kill)]  # x32
    code += [(equal, 0, 1, _CLONE3), (answer, 0, 0, unknown)]  # its flags cannot be read here; libc falls back
    for name, numbers in _DENIED.items():
        if name == "socket" and network:
            code += [(equal, 0, 3 + len(_FAMILIES), numbers[column]), (load, 0, 0, 16)]
            code += [(equal, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)]
            code += [(answer, 0, 0, refuse), (answer, 0, 0, allow)]
            continue
        code += [(equal, 0, 1, numbers[column]), (answer, 0, 0, refuse)]
    code += [(equal, 0, 3, _CLONE[column]), (load, 0, 0, 16), (any_bit, 0, 1, _NEW_NAMESPACES), (answer, 0, 0, refuse)]
    code += [(answer, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *line) for line in code)


def give_up_privileges(limits: dict[str, int], drop_to: int | None, network: bool = False) -> None:
    """Resource limits, hard ones; another user; no new privileges; no core, no debugger; a system call filter.

    Where the namespace has a ``network``, the filter lets sockets of the Internet and of files be made.
    """
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    if drop_to is not None:
        _change_user(drop_to)
        _drop_capabilities()
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    machine = os.uname().machine
    if machine in _COLUMN:
        lines = _seccomp_filter(machine, network)
        program = ctypes.create_string_buffer(lines, len(lines))
        head = struct.pack("HxxxxxxP", len(lines) // 8, ctypes.addressof(program))
        _call("prctl", _PR_SET_SECCOMP, 2, ctypes.create_string_buffer(head, len(head)), 0, 0)


def _read_all(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def run_command(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Becomes a program of the machine; 127 where it cannot be started."""
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def main(job_descriptor: int, status: int, lifeline: int) -> None:
    """Isolates this process as the job says, then runs its source."""
    os.lseek(job_descriptor, 0, os.SEEK_SET)
    job = marshal.loads(_read_all(job_descriptor))
    os.close(job_descriptor)
    if job["view"] is not None:
        enter_namespaces(job["view"], status, lifeline)
    if job["chdir"] is not None:
        os.chdir(job["chdir"])
    give_up_privileges(job["limits"], job["drop_to"], network=bool(job["view"] and job["view"].get("port")))
    start_program(status, lifeline, job["max_seconds"])
    if job["mode"] == "command":
        run_command(job["command"], job["environment"])
    harness: dict[str, Any] = {"__name__": "harness"}
    exec(job["compiled"] or compile(job["harness"], "harness.py", "exec", dont_inherit=True), harness)
    if job["mode"] == "program":
        harness["run_program"](job["source"], job["provided"])
    else:
        harness["run_tests"](job["source"], job["max_bytes"], marshal.loads, job["provided"])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
