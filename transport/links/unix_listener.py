"""AF_UNIX links at a path: for processes of one host that are not each other's children.

The path's permissions keep other users out, and `UnixLink.credentials` says who has come.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat

from transport.address import Address, parse_address
from transport.errors import AddressError, AuthError
from transport.links import Link, LinkBroken
from transport.links.unix_link import UnixLink
from transport.security import check_credentials

CONNECT_SECONDS = 5.0


class UnixListener:
    """Accepts AF_UNIX links at a path, which is readable and writable by our user alone."""

    def __init__(self, address: str | Address) -> None:
        parsed = parse_address(address)
        self.address = str(parsed)
        self._path = parsed.path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        try:
            _remove_stale(self._path)
            self._socket.bind(self._path)
            os.chmod(self._path, 0o600)  # before `listen`, so that nobody can be in time
            self._socket.listen(128)
        except OSError as error:
            self._socket.close()
            raise AddressError(f"cannot listen on {self.address}: {error.strerror}; choose another path") from error

    def fileno(self) -> int:
        """The descriptor to poll for reading, -1 when closed.  Does not touch the device."""
        return self._socket.fileno()

    def accept(self) -> list[Link]:
        """The links that are new since the last call; other users' are closed.  Does not block the host."""
        links: list[Link] = []
        while self.fileno() >= 0:
            try:
                link = UnixLink(self._socket.accept()[0])
                check_credentials(link.credentials())
            except AuthError:
                link.close()
            except (BlockingIOError, ConnectionError):
                break
            else:
                links.append(link)
        return links

    def pump(self) -> None:
        """Nothing: each link has its own socket.  Does not block the host."""

    def close(self) -> None:
        """Stops listening and removes the path; links live on.  Idempotent.  Does not block the host."""
        if self.fileno() >= 0:
            self._socket.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)


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

    Raises `LinkBroken` where nobody listens.
    """
    parsed = parse_address(address)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_SECONDS)
        sock.connect(parsed.path)
    except OSError as error:
        sock.close()
        raise LinkBroken(f"nobody listens on {parsed} ({error.strerror or error})") from error
    return UnixLink(sock)


def listen(address: str | Address) -> UnixListener:
    """Listens at a path.  Raises `AddressError` where it is in use.  Does not block the host."""
    return UnixListener(address)
