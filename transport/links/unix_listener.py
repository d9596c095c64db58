"""AF_UNIX links at a path: for processes of one host that are not each other's children.

The path's permissions keep other users out, and `UnixLink.credentials` says who has come.

A process that has no descriptor left cannot even refuse a connection, and a listener that stays readable keeps whoever
polls it busy.  So each listener holds one in reserve, with which it takes such a connection and closes it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat

from transport.address import Address, parse_address
from transport.errors import AddressError, AuthError
from transport.links import Link, LinkBroken, Unreached
from transport.links.unix_link import UnixLink
from transport.security import check_credentials

CONNECT_SECONDS = 5.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)
_NOBODY = (errno.ENOENT, errno.ECONNREFUSED)
_log = logging.getLogger("transport")


class UnixListener:
    """Accepts AF_UNIX links at a path, which is readable and writable by our user alone."""

    def __init__(self, address: str | Address) -> None:
        parsed = parse_address(address)
        self.address = str(parsed)
        self._path = parsed.path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._reserve = -1
        self._complained = False
        try:
            _remove_stale(self._path)
            self._socket.bind(self._path)
            os.chmod(self._path, 0o600)  # before `listen`, so that nobody can be in time
            self._socket.listen(128)
            self._reserve = _open_reserve()
        except OSError as error:
            self._socket.close()
            raise AddressError(f"cannot listen on {self.address}: {error.strerror}; choose another path") from error

    def fileno(self) -> int:
        """The descriptor to poll for reading, -1 when closed.  Does not touch the device."""
        return self._socket.fileno()

    def accept(self) -> list[Link]:
        """The links that are new since the last call; other users' are closed, and those for which no descriptor is
        left.  Does not block the host.
        """
        links: list[Link] = []
        while self.fileno() >= 0:
            try:
                link = UnixLink(self._socket.accept()[0])
                check_credentials(link.credentials())
            except AuthError:
                link.close()
            except (BlockingIOError, ConnectionError):
                break
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    _log.warning("%s cannot take a connection: %s", self.address, error.strerror)
                    break
                if not self._turn_away():
                    break
            else:
                self._complained = False
                links.append(link)
                if self._reserve < 0:
                    self._reserve = _open_reserve()
        return links

    def _turn_away(self) -> bool:
        """Closes the connection that is next, with the descriptor in reserve; whether that could be done."""
        if self._reserve < 0:
            return False
        os.close(self._reserve)
        try:
            self._socket.accept()[0].close()
        except OSError:  # it has gone by itself, or another thread was faster
            return False
        finally:
            self._reserve = _open_reserve()
        if not self._complained:
            self._complained = True
            _log.warning(
                "%s closes connections: this process has no descriptors left; raise its limit (ulimit -n)", self.address
            )
        return True

    def pump(self) -> None:
        """Nothing: each link has its own socket.  Does not block the host."""

    def close(self) -> None:
        """Stops listening and removes the path; links live on.  Idempotent.  Does not block the host."""
        if self.fileno() >= 0:
            self._socket.close()
            if self._reserve >= 0:
                os.close(self._reserve)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


def _open_reserve() -> int:
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _remove_stale(path: str) -> None:
    """Removes a socket on which nobody listens; leaves everything else for `bind` to refuse."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            return


def connect(address: str | Address) -> UnixLink:
    """Connects to a `UnixListener`.  Blocks the host at most five seconds.

    Raises `Unreached` where nobody listens, `LinkBroken` for what else keeps it from connecting.
    """
    parsed = parse_address(address)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_SECONDS)
        sock.connect(parsed.path)
    except OSError as error:
        sock.close()
        kind = Unreached if error.errno in _NOBODY else LinkBroken
        raise kind(f"nobody listens there ({error.strerror or error})") from error
    return UnixLink(sock)


def listen(address: str | Address) -> UnixListener:
    """Listens at a path.  Raises `AddressError` where it is in use.  Does not block the host."""
    return UnixListener(address)
