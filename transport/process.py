"""What one process knows of another on the same host: who it is, whether it lives, whether it is stopped.

Loss is certain when a process's pidfd fires.  A pid alone proves nothing, since it is used again: the start time from
``/proc`` tells two processes of one pid apart.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
from pathlib import Path

from streamrt.errors import UnavailableError

_SYS_PIDFD_OPEN = 434  # on every architecture that CUDA runs on
DEVICE_FAILED = 70  # the exit code of a process that serves and whose device has failed for good


@functools.cache
def boot_id() -> str:
    """The running kernel's id: equal for two processes of one host.  Does not touch the device."""
    return _read("/proc/sys/kernel/random/boot_id")


@functools.cache
def memory_bytes() -> int:
    """The memory that this process may fill at most: the host's, or its control group's.  Does not touch the device."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read("/sys/fs/cgroup/memory.max")
    return min(total, int(limit)) if limit.isdecimal() else total


def pid_namespace() -> str:
    """The namespace in which our pids mean something.  Does not touch the device."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def start_time(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 if there is none.  Does not touch the device."""
    fields = _stat(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def stopped(pid: int) -> bool:
    """Whether the process is stopped (SIGSTOP, a debugger).  Does not touch the device."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in ("T", "t")


def identity() -> str:
    """This process, unlike any other that lives or lived on any host.  Does not touch the device."""
    return f"{boot_id()}/{pid_namespace()}/{os.getpid()}/{start_time(os.getpid())}"


def ended(pid: int, started: int) -> bool:
    """Whether the process is certainly over, also where its parent has not taken notice.  Does not touch the device."""
    try:
        os.kill(pid, 0)  # asks only
    except ProcessLookupError:
        return True
    except OSError:
        return False
    fields = _stat(pid)
    if len(fields) <= 19:  # it cannot be looked at: no descriptor is left here, or /proc hides it
        return False
    return fields[0] in ("Z", "X") or (started != 0 and int(fields[19]) != started)


def open_pidfd(pid: int, started: int) -> int | None:
    """A descriptor that becomes readable when the process ends; None if it is gone already, or is another one.

    Raises `UnavailableError` where it cannot be watched, which says nothing of whether it lives.  Does not touch the
    device.
    """
    try:
        descriptor = _pidfd_open(pid)
    except ProcessLookupError:
        return None
    except OSError as error:  # no such call, forbidden, no descriptor left
        raise UnavailableError(f"process {pid} cannot be watched: {error.strerror}") from error
    found = start_time(pid) if started else 0
    if found == started:
        return descriptor
    ended_by_now = select.poll()
    ended_by_now.register(descriptor, select.POLLIN)
    over = bool(ended_by_now.poll(0))
    os.close(descriptor)
    if not found and not over:
        raise UnavailableError(f"process {pid} cannot be watched: /proc does not show it, so it may be another one")
    return None


def _pidfd_open(pid: int) -> int:
    opener = getattr(os, "pidfd_open", None)  # left out of Pythons that were built where the headers are old (conda)
    if opener is not None:
        return int(opener(pid))
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    descriptor = int(call(ctypes.c_long(_SYS_PIDFD_OPEN), ctypes.c_long(pid), ctypes.c_long(0)))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor


def _stat(pid: int) -> list[str]:
    text = _read(f"/proc/{pid}/stat")
    return text[text.rfind(")") + 2 :].split() if ")" in text else []  # the command's name may hold spaces


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
