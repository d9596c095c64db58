"""Graphs through `torch.cuda.CUDAGraph`: torch's allocations come from a private pool of the graph, and its random
numbers go on from replay to replay.  Neither can be had from outside.

Whatever else is enqueued on the stream meanwhile (CuPy's kernels, copies of the runtime) is part of the same graph.

Where the driver gives no graph at the end, torch is left as if the capture went on.  Its allocator frees nothing that
needs an event any more: it is told here.  Its generator refuses to give random numbers: another capture, that succeeds,
brings it out of that.  Its allocator of pinned memory goes on to ask the graph object: that is kept for good.

Source: pytorch, aten/src/ATen/cuda/CUDAGraph.cpp, `capture_begin` and `capture_end`; CUDAGeneratorImpl.cpp,
`CUDAGeneratorState::increase`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from streamrt.captures import Executable, not_ended

if TYPE_CHECKING:
    from streamrt.stream import Stream

_broken: list[Any] = []


class TorchRecorder:
    """A capture by torch, of the stream that is current in torch."""

    def __init__(self, stream: Stream) -> None:
        """Made by `TorchLibrary.recorder`.  Does not touch the device."""
        self._stream = stream
        self._graph: Any = None
        self._pool: Any = None
        self._scratch: Any = None

    def begin(self) -> None:
        torch.cuda._lazy_init()
        self._pool = torch.cuda.graph_pool_handle()
        self._graph = torch.cuda.CUDAGraph()
        self._scratch = torch.empty(1, device=str(self._stream.device))
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Executable:
        try:
            self._graph.capture_end()
        except RuntimeError as error:
            self._clean_up()
            raise not_ended(error) from error
        return TorchExecutable(self._graph)

    def abort(self) -> None:
        if self._graph is None:
            return
        try:
            self._scratch.zero_()  # torch warns of a graph with nothing in it
            self._graph.capture_end()
        except RuntimeError:
            self._clean_up()
        self._graph = None

    def _clean_up(self) -> None:
        device = self._stream.device
        device.backend.recorder(device.index, self._stream.handle).abort()
        for tell in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with suppress(RuntimeError):  # torch came far enough to do so itself
                tell(device.index, self._pool)
        _broken.append(self._graph)
        healthy = torch.cuda.CUDAGraph()
        healthy.capture_begin(capture_error_mode="thread_local")
        self._scratch.zero_()
        healthy.capture_end()


class TorchExecutable:
    """A graph of torch's."""

    __slots__ = ("_graph",)

    def __init__(self, graph: Any) -> None:
        """Made by `TorchRecorder.end`.  Does not touch the device."""
        self._graph = graph

    empty = False  # not known: the library says so by itself, if it does

    def launch(self, stream: int) -> None:
        """Enqueues the graph on torch's current stream, which the caller has made sure is `stream`."""
        self._graph.replay()
