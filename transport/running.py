"""The peer's calls over one connection: running their functions, and sending what became of them.

A function runs with the leased streams of its arguments current, behind all their pulls, unsynchronised.  Its result is
prepared on the same thread, for the streams that are current when it returns.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from streamrt import guard
from streamrt.callbacks import blocking
from streamrt.device import CPU, Device
from streamrt.errors import CaptureError, ClosedError, DeviceError, StreamrtError
from transport import context, payload
from transport.errors import CodecError, LocalProtocolError, RemoteError
from transport.events import FailCall, FinishCall, Key, Launch, Side, StopCall
from transport.inlined import Late
from transport.lend import unshared
from transport.remote_errors import clear_frames, describe_error, traceback_of
from transport.reply_room import ReplyRoom, Share
from transport.service import Function
from transport.transfer import Incoming, Outgoing, read_message

if TYPE_CHECKING:
    from transport.driver import Driver

REPLY_LOOKS = 15  # at the bytes of a result's small arrays, to save the reply a message: some 30 us
LAST_LOOKS = 60  # where no other call waits, to save that the reply is held: the 100 us that GPUs take between contexts


class Running:
    """The calls of the peer whose functions run here, by id."""

    def __init__(self, driver: Driver) -> None:
        self.calls: dict[int, context.RunningCall] = {}
        self.room = ReplyRoom()
        self._driver = driver
        self._held: collections.deque[Callable[[], None]] = collections.deque()  # while replies wait for room

    def launch(self, effect: Launch, incoming: Incoming | None) -> None:
        """Runs a function, now or when the peer's replies have room again.  Does not block the host."""
        running = context.RunningCall(self._driver, effect.call, effect.function, effect.deadline)
        self.calls[effect.call] = running
        self._held.append(functools.partial(self._start, effect, incoming, running))
        self._begin_held()

    def _start(self, effect: Launch, incoming: Incoming | None, running: context.RunningCall) -> None:
        key = (id(self._driver.service), effect.function)
        self._driver.agent.run(key, functools.partial(self._serve, effect, incoming, running))

    def stop(self, effect: StopCall, dropped: Incoming | None) -> None:
        """The caller has given up: the function is told, or never begun, or its reply is held no longer."""
        running = self.calls.get(effect.call)
        if running is not None:
            running.cancel(effect.reason)
            if self._driver.transfers.drop_held(Key(effect.call, False, Side.REPLY)):
                self._drop(effect.call)
        elif dropped is not None:
            dropped.abandon()

    def close(self) -> None:
        """The connection is over: what was held back is begun, and finds itself cancelled."""
        self._begin_held()

    def _begin_held(self) -> None:
        while self._held and not self.room.short:
            try:
                begin = self._held.popleft()
            except IndexError:
                return  # another thread was faster
            begin()

    def _serve(self, effect: Launch, incoming: Incoming | None, running: context.RunningCall) -> None:
        """Runs one call of the peer, and sends what became of it."""
        driver = self._driver
        try:
            if running.cancelled:
                self._finish(FailCall(effect.call, "CancelledError", "cancelled before it ran"), None)
                return
            with context.entered(running, driver.agent.executor):
                function = driver.service.find(effect.function)
                metas, skeleton = read_message(effect.body, incoming)
                if incoming is not None:  # else there is nothing but to rebuild it, which says so too
                    payload.check_holds(metas, incoming.headers, functools.partial(payload.kind_on, function.arrays))
                if targets := driver.transfers.inlined_targets(metas, reply=False):
                    incoming = driver.transfers.lease_inlined(targets, incoming, reply=False)
                if incoming is None or not incoming.leases:
                    self._run(effect, function, incoming, running, metas, skeleton)
                else:
                    with guard.using(*incoming.streams):
                        self._run(effect, function, incoming, running, metas, skeleton)
        except BaseException as error:  # noqa: BLE001 - also SystemExit: whatever it is, it is the caller's answer
            type_name, message = describe_error(error)
            text = traceback_of(error)
            if effect.notify:
                driver.agent.log.error("%s, notified by %s, raised:\n%s", effect.function, driver.name, text.rstrip())
            elif not isinstance(error, StreamrtError):
                driver.agent.log.info("%s for %s raised %s", effect.function, driver.name, type_name)
            self._finish(FailCall(effect.call, type_name, message, text), None)
            self._check_devices(error, incoming)
            clear_frames(error)
        finally:
            if incoming is not None:
                incoming.release()

    def _check_devices(self, error: BaseException, incoming: Incoming | None) -> None:
        """Whether a function failed because a device has: a failed device fails for good, and ends a worker.

        That of a peer, which a nested call of the function told of, is the peer's business.
        """
        try:
            for stream in incoming.streams if incoming is not None else ():
                stream.query()
        except DeviceError as failed:
            error = failed
        except CaptureError:
            pass  # the function left a capture of its own open, so the stream has not failed
        if isinstance(error, DeviceError) and not isinstance(error, RemoteError):
            self._driver.agent.device_refused(error)

    def _run(
        self,
        effect: Launch,
        function: Function,
        incoming: Incoming | None,
        running: context.RunningCall,
        metas: Sequence[payload.ArrayMeta],
        skeleton: bytes,
    ) -> None:
        driver = self._driver
        inherited = driver.link.inherited
        kind = functools.partial(payload.kind_on, function.arrays)
        buffers, inlined = (incoming.buffers, incoming.fill(metas)) if incoming is not None else ((), ())
        value = payload.rebuild(metas, skeleton, buffers, kind, inlined=inlined, allow_pickle=inherited)
        del inlined
        if not isinstance(value, tuple) or len(value) != 2:
            raise CodecError("the peer sent a call without arguments")
        args, kwargs = value
        del value
        current: Device | None = None
        if incoming is not None:
            running.points = incoming.points
            for device, lease in incoming.leases.items():
                current = current or device
                if device.kind != "host":
                    continue
                event = lease.stream.record()  # plain code is about to see host arrays, behind their pulls
                if running.points and not event.query():
                    with blocking():  # for the peer, who must not wait for this thread meanwhile
                        event.require()
                event.require()
            if (error := running.lost()) is not None:
                raise error
        device_map = driver.device_map()
        place = device_map.replying(meta.source for meta in metas)  # before it runs: the names are from the wire
        driver.service.check_arguments(function, tuple(args), kwargs)
        call = driver.service.bind(function, str(current or driver.agent.main_device or CPU))
        result = call(*args, **kwargs)
        del args, kwargs
        foreign = driver.transfers.ordered.foreign()
        if (error := running.lost()) is not None:  # on a GPU it was launched before anybody could know; marks stay
            raise error
        alone = unshared(sys.getrefcount(result), result)

        # Plain code on a virtual device makes ordinary memory where CuPy would make memory of the current device.
        plain = current if current is not None and current.kind == "host" else CPU
        share = self.room.share(lambda: running.cancelled or driver.closed is not None)
        looks, hold = REPLY_LOOKS, driver.transfers.may_hold(foreign)
        if hold:
            looks = LAST_LOOKS if len(self.calls) == 1 else 0
        try:
            prepared = payload.prepare(
                result,
                device_map,
                place,
                channel_of=driver.transfers.channel,
                detach=True,
                allow_pickle=inherited,
                looks=looks,
                plain=plain,
                room=share.take,
                unshared=alone,
                allocate_at=driver.transfers.allocator,
                hold=hold,
            )
            if prepared.late is not None:
                self._hold(effect, running, prepared.late)
                return
            outgoing = driver.transfers.ordered.outgoing_of(prepared, REPLY_LOOKS, foreign)
        except BaseException:
            self._reply_gone(share, False)
            raise
        if outgoing is not None:
            outgoing.done = functools.partial(self._reply_gone, share)
        headers = () if outgoing is None else outgoing.headers
        self._finish(FinishCall(effect.call, prepared.body, headers), outgoing)

    def _hold(self, effect: Launch, running: context.RunningCall, late: Late) -> None:
        """The reply goes by itself when its bytes are there; until then the call counts as one that runs.

        One that nobody wants is not waited for: the connection could not end before.
        """
        driver = self._driver
        with driver.lock, driver.whole:
            if driver.closed is not None:
                self.calls.pop(effect.call, None)
            else:
                if running.cancelled or effect.notify:
                    self._drop(effect.call)
                else:
                    send = functools.partial(self._send_held, effect.call)
                    driver.transfers.hold(Key(effect.call, False, Side.REPLY), late, send)
                driver.work(driver.agent.clock())
        driver.after()

    def _drop(self, call: int) -> None:
        """Ends a call whose reply was to be held and is not wanted: nothing is sent.  Under the driver's lock."""
        self.calls.pop(call, None)
        with contextlib.suppress(ClosedError):  # the connection is being lost, and with it all calls
            self._driver.protocol.command(FinishCall(call, b""), self._driver.agent.clock())

    def _send_held(self, call: int, body: bytes, now: float) -> None:
        self.calls.pop(call, None)
        self._tell(FinishCall(call, body, ()), Key(call, False, Side.REPLY), None, now)

    def _reply_gone(self, share: Share, sent: bool) -> None:
        share.give_back()
        self._begin_held()

    def _finish(self, command: FinishCall | FailCall, outgoing: Outgoing | None) -> None:
        driver = self._driver
        key = Key(command.call, False, Side.REPLY)
        with driver.lock, driver.whole:
            self.calls.pop(command.call, None)
            if driver.closed is not None:
                if outgoing is not None:
                    driver.complete(functools.partial(outgoing.close, False))
            else:
                self._tell(command, key, outgoing, driver.agent.clock())
        driver.after()

    def _tell(self, command: FinishCall | FailCall, key: Key, outgoing: Outgoing | None, now: float) -> None:
        driver = self._driver
        if outgoing is not None:
            driver.transfers.outgoing[key] = outgoing
        try:
            driver.protocol.command(command, now)
        except LocalProtocolError as error:
            if isinstance(command, FailCall):
                raise
            if outgoing is not None:
                driver.complete(functools.partial(driver.transfers.outgoing.pop(key).close, False))
            driver.protocol.command(FailCall(command.call, type(error).__name__, str(error)), now)
        driver.work(now)
