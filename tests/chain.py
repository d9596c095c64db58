"""A chain of processes A -> B -> C for tests of death: this one is A, and who was killed is followed by another."""

from __future__ import annotations

import os
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rpc_processes import Worker

import transport


class Chain:
    """B and C serve one device each, and A is connected to both."""

    def __init__(
        self, service: str, devices: dict[str, str], listen: Path | None, spares: int = 0, order: str | None = None
    ) -> None:
        """`listen` is a folder for AF_UNIX sockets, None for TCP.  `spares` workers of each kind are kept started, for
        where a start takes long.  `order` is what all of them ask for."""
        self.service, self.devices, self.listen = service, devices, listen
        self.options = [] if order is None else ["--order", order]
        self.workers: dict[str, Worker] = {}
        self.peers: dict[str, transport.Peer] = {}
        self._starting = ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1)))
        self._spares: dict[str, list[Future[Worker]]] = {
            name: [self._starting.submit(self._worker, name) for _ in range(spares)] for name in ("c", "b")
        }
        for name in ("c", "b"):
            self.start(name)

    def _worker(self, name: str) -> Worker:
        address = "tcp://127.0.0.1:0" if self.listen is None else f"unix://{self.listen}/{uuid.uuid4().hex}"
        return Worker(self.service, "--device", self.devices[name], "--listen", address, *self.options)

    def start(self, name: str) -> None:
        spares = self._spares[name]
        if spares:
            spares.append(self._starting.submit(self._worker, name))
        self.workers[name] = spares.pop(0).result() if spares else self._worker(name)
        self.peers[name] = transport.connect(self.workers[name].address)

    def kill(self, name: str) -> None:
        self.workers[name].process.kill()

    def replace(self, name: str) -> None:
        self.peers.pop(name).close(0.1)
        worker = self.workers.pop(name)
        worker.process.kill()
        worker.process.communicate()
        self.start(name)

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close(0.5)
        for spares in self._spares.values():
            for spare in spares:
                if not spare.cancel():
                    self.workers[uuid.uuid4().hex] = spare.result()
        self._starting.shutdown()
        for worker in self.workers.values():
            worker.process.kill()
            worker.process.communicate()
