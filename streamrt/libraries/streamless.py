"""What the libraries share that have no current stream of their own, or none on a kind of device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from streamrt.stream import Stream

if TYPE_CHECKING:
    from streamrt.captures import Recorder
    from streamrt.device import Device
    from streamrt.libraries import ArrayInfo


class Streamless:
    """The stream part of the `Library` Protocol for a library that has no streams, and the methods built on others."""

    def save(self, device: Device) -> Any:
        return None

    def set_device(self, device: Device) -> None:
        return None

    def current_stream(self, device: Device) -> Stream | None:
        return None

    def handle_reader(self, device: Device) -> Callable[[], int] | None:
        return None

    def here_reader(self, device: Device) -> Callable[[], Any] | None:
        return None

    def set_current_stream(self, device: Device, stream: Stream) -> Any:
        return None

    def push_stream(self, device: Device, stream: Stream) -> Any:
        return self.set_current_stream(device, stream)

    def exchange(self, device: Device, stream: Stream) -> Any:
        return None

    def set_aside(self, token: Any) -> None:
        """Nothing: no stream was pushed.  Does not touch the device."""

    def take_up(self, token: Any) -> None:
        """Nothing: none was set aside.  Does not touch the device."""

    def restore(self, token: Any) -> None:
        return None

    def recorder(self, stream: Stream) -> Recorder | None:
        return None

    def refusal(self, dtype: str, device: Device) -> str | None:
        raise NotImplementedError

    def describe(self, array: Any) -> ArrayInfo:
        raise NotImplementedError

    def copied(self, array: Any, dtype: str | None = None) -> Any:
        raise NotImplementedError

    def resolve(self, array: Any, *, detach: bool = False) -> Any:
        return array

    def index_reader(self) -> Callable[[Any], int] | None:
        return None

    def address_reader(self) -> Callable[[Any], int] | None:
        return None

    def memory_of(self, array: Any) -> object:
        return array

    def holds(self, dtype: str, device: Device) -> bool:
        return self.refusal(dtype, device) is None

    def accepts(self, info: ArrayInfo) -> bool:
        return True

    def retain(self, array: Any, stream: Stream) -> Any:
        return array

    def contiguous(self, array: Any) -> Any:
        return array if self.describe(array).strides is None else self.copied(array)


def join_current(device: Device, stream: Stream, current: Stream | None) -> None:
    """Enqueues on `stream` a wait for the library's current stream, or on the host backend for the backend's."""
    if current is None and device.kind == "host":
        current = Stream.borrow(device.backend.current_stream(device.index), device)
    if current is not None:
        stream.wait(current, edge="array.join")
