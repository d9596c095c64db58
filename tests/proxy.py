"""A TCP proxy on 127.0.0.1 that can record, hold back and cut: the lowest boundary between two processes."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from typing import Self


class _Pair:
    """One connection through the proxy."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.forward = bytearray()  # what waits to be written to the server
        self.back = bytearray()


class TcpProxy:
    """Forwards connections to a port of this host.

    `requests` is all that clients have sent (when `record`), `forwarded` and `returned` count the bytes each way.
    """

    def __init__(self, port: int, *, record: bool = False) -> None:
        self.requests = bytearray()
        self.forwarded = 0
        self.returned = 0
        self._port = port
        self._record = record
        self._holding = False
        self._pairs: list[_Pair] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._ours, self._theirs = socket.socketpair()
        self._selector.register(self._theirs, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stop = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"

    def hold_replies(self) -> None:
        """From now on nothing comes back to clients."""
        with self._lock:
            self._holding = True

    def release_replies(self) -> None:
        with self._lock:
            self._holding = False
        self._ours.send(b"!")

    def cut(self) -> None:
        """Ends every connection at once; what was held back is lost."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
            for pair in pairs:
                self._close(pair)

    def close(self) -> None:
        self._stop = True
        self._ours.send(b"!")
        self._thread.join(10)
        self.cut()
        for sock in (self._listener, self._ours, self._theirs):
            sock.close()
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _close(self, pair: _Pair) -> None:
        for sock in (pair.client, pair.server):
            with contextlib.suppress(KeyError):
                self._selector.unregister(sock)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _run(self) -> None:
        while not self._stop:
            for key, _ in self._selector.select():
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._theirs:
                        self._theirs.recv(4096)
                    elif isinstance(key.data, _Pair) and key.data in self._pairs:
                        self._read(key.data, key.fileobj is key.data.client)
            with self._lock:
                for pair in list(self._pairs):
                    self._write(pair)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            client, _ = self._listener.accept()
            pair = _Pair(client, socket.create_connection(("127.0.0.1", self._port)))
            self._pairs.append(pair)
            for sock in (pair.client, pair.server):
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ, pair)

    def _read(self, pair: _Pair, from_client: bool) -> None:
        try:
            data = (pair.client if from_client else pair.server).recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._pairs.remove(pair)
            self._close(pair)
            return
        if from_client:
            self.forwarded += len(data)
            pair.forward += data
            if self._record:
                self.requests += data
        else:
            self.returned += len(data)
            pair.back += data

    def _write(self, pair: _Pair) -> None:
        for sock, waiting, held in ((pair.server, pair.forward, False), (pair.client, pair.back, self._holding)):
            if waiting and not held:
                sock.setblocking(True)
                try:
                    sock.sendall(waiting)
                    sock.setblocking(False)
                except OSError:
                    if pair in self._pairs:
                        self._pairs.remove(pair)
                        self._close(pair)
                    return
                waiting.clear()
