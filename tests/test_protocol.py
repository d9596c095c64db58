"""The sans-io connection, case by case, over a link and a clock of the test's own."""

from __future__ import annotations

import msgpack
import pytest
from pair import End, Pair

from streamrt.errors import ClosedError
from transport import calls as our_calls
from transport import messages, protocol, serving, wire
from transport.errors import LocalProtocolError
from transport.events import (
    Abort,
    Announce,
    Announced,
    BufferHeader,
    CancelCall,
    Closed,
    DataReady,
    EndFuture,
    FailCall,
    FinishCall,
    FreeBuffers,
    Frozen,
    Goodbye,
    HoldCall,
    Key,
    Launch,
    LeaseStreams,
    MarkLost,
    NoMemory,
    OpenFailed,
    Outcome,
    PeerGone,
    Pull,
    Pulled,
    Ready,
    Released,
    ReleaseWords,
    Retire,
    Retired,
    Send,
    Side,
    StartCall,
    StopCall,
    StreamsGranted,
    Watch,
)
from transport.limits import Limits
from transport.protocol import Connection
from transport.transfers import OutgoingTransfer
from transport.wire import Malformed


def staged(nbytes: int) -> BufferHeader:
    return BufferHeader(nbytes, "cpu", "staging", "cpu")


def opened(**arguments: object) -> Pair:
    pair = Pair(**arguments)  # type: ignore[arg-type]
    pair.drive_bounded(0.5)
    return pair


def kinds(end: End) -> list[type]:
    return [type(effect) for effect in end.effects]


# The table ------------------------------------------------------------------------------------------------------------


def test_every_state_and_message_is_in_the_table_or_a_fault() -> None:
    for state, row in protocol.TABLE.items():
        for handler in row.values():
            assert callable(getattr(Connection, handler)), (state, handler)
    handled = {message for row in protocol.TABLE.values() for message in row}
    assert handled == {message for message, _ in wire._TABLE.values()}


@pytest.mark.parametrize("module", [our_calls, serving])
def test_every_state_of_a_call_can_be_reached_and_left(module: object) -> None:
    table = module.TRANSITIONS  # type: ignore[attr-defined]
    first, *_, ended = table
    reached, edge = {first}, [first]
    while edge:
        for state in table[edge.pop()].values():
            if state not in reached:
                reached.add(state)
                edge.append(state)
    assert reached == set(table)
    assert not table[ended]
    assert all(ended in row.values() for state, row in table.items() if state is not ended)


# The handshake --------------------------------------------------------------------------------------------------------


def test_both_sides_are_ready_and_know_of_each_other() -> None:
    pair = opened()
    assert pair.a.info == {"name": "b"}
    assert pair.b.info == {"name": "a"}
    assert pair.a.connection.statistics().version == 1


def test_calls_wait_for_the_handshake() -> None:
    pair = Pair()
    pair.a.start(3)
    assert pair.messages("a") == ["Hello"]
    pair.drive_bounded()
    assert pair.a.ended[1].outcome is Outcome.VALUE
    pair.check_quiet()


@pytest.mark.parametrize(("ours", "theirs"), [((1, 1), (2, 3)), ((3, 4), (1, 2))])
def test_versions_that_do_not_meet_are_told_to_both(ours: tuple[int, int], theirs: tuple[int, int]) -> None:
    pair = Pair(limits=Limits(versions=ours), b_limits=Limits(versions=theirs))
    pair.a.start()
    pair.drive_bounded()
    for end, first, second in ((pair.a, ours, theirs), (pair.b, theirs, ours)):
        assert end.closed is not None
        assert end.closed.version_mismatch
        assert f"we speak version {'' if first[0] == first[1] else first[0]}" in end.closed.reason
        assert str(first[1]) in end.closed.reason
        assert str(second[1]) in end.closed.reason
    assert pair.a.ended[1].outcome is Outcome.PROTOCOL
    pair.check_quiet()


def test_versions_that_overlap_take_the_highest_of_both() -> None:
    pair = opened(limits=Limits(versions=(1, 4)), b_limits=Limits(versions=(2, 6)))
    assert {end.connection.statistics().version for end in pair.ends} == {4}


def test_a_hello_of_a_newer_shape_is_a_version_mismatch() -> None:
    connection = Connection(initiator=False, hello={}, session=bytes(16), limits=Limits(), now=0.0)
    connection.receive([msgpack.packb([1, 0, b"", b"streamrt", 7, 9, "new", {}])], 0.0)
    assert connection.drain()[-1].version_mismatch  # type: ignore[union-attr]


def test_a_welcome_to_somebody_else_is_refused() -> None:
    pair = opened()
    welcome = next(frames for name, frames in pair.captured if name == "b")
    connection = Connection(initiator=True, hello={}, session=b"another nonce 16", limits=Limits(), now=0.0)
    connection.receive(welcome, 0.0)
    effects = connection.drain()
    assert isinstance(effects[-1], Closed)
    assert "session" in effects[-1].reason


def test_somebody_elses_protocol_is_refused() -> None:
    connection = Connection(initiator=False, hello={}, session=bytes(16), limits=Limits(), now=0.0)
    connection.receive([b"GET / HTTP/1.1\r\n"], 0.0)
    effects = connection.drain()
    assert [type(effect) for effect in effects] == [Send, MarkLost, ReleaseWords, Closed]
    assert not effects[-1].version_mismatch  # type: ignore[union-attr]


def test_a_handshake_that_takes_too_long_ends() -> None:
    pair = Pair(limits=Limits(handshake_timeout=3.0))
    pair.kill(pair.b, seen=False)
    pair.a.start(2)
    pair.drive_bounded(4.0)
    assert pair.a.closed is not None
    assert "handshake" in pair.a.closed.reason
    assert pair.a.ended[1].outcome is Outcome.PEER_LOST
    assert "not sent" in pair.a.ended[1].message
    pair.check_quiet()


@pytest.mark.parametrize("nonce", [b"", bytes(15), bytes(17)])
def test_a_nonce_of_another_size_is_refused(nonce: bytes) -> None:
    with pytest.raises(LocalProtocolError):
        Connection(initiator=True, hello={}, session=nonce, limits=Limits(), now=0.0)


@pytest.mark.parametrize("hello", [{"x": object()}, {1: 2}, {"x": bytes(10**6)}])
def test_a_hello_that_cannot_be_sent_is_refused(hello: dict[str, object]) -> None:
    with pytest.raises(LocalProtocolError):
        Connection(initiator=False, hello=hello, session=bytes(16), limits=Limits(), now=0.0)


# One call -------------------------------------------------------------------------------------------------------------


def test_the_life_of_a_call() -> None:
    pair = opened()
    pair.b.plan = lambda launch: (staged(9), staged(0))
    pair.a.start(20, 0, body=b"skeleton")
    pair.drive_bounded(1.0)
    end = pair.a.ended[1]
    assert (end.outcome, end.body) == (Outcome.VALUE, b"value 1")
    launch = pair.b.launched[1]
    assert (launch.function, launch.body, launch.deadline, launch.notify) == ("f", b"skeleton", None, False)
    assert kinds(pair.a)[2:] == [Send, Watch, Send, Send, Send, FreeBuffers, LeaseStreams, Pull, Pull, EndFuture]
    assert kinds(pair.b)[2:] == [LeaseStreams, Pull, Pull, Pull, Launch, Send, Watch, Send, Send, FreeBuffers]
    assert pair.a.freed == {Key(1, True, Side.REQUEST): True}
    pair.check_quiet()


def test_streams_are_leased_before_data_is_pulled_and_early_data_waits() -> None:
    pair = opened()
    pair.b.no_memory = lambda key: False
    pair.b._soon = lambda action: pair.after(1.0, action)  # type: ignore[method-assign]
    pair.a.start(20)
    pair.drive_bounded(0.5)
    assert kinds(pair.b)[-1] is LeaseStreams
    pair.drive_bounded(5.0)
    assert pair.a.ended[1].outcome is Outcome.VALUE


def test_zero_byte_buffers_need_no_data() -> None:
    pair = opened()
    pair.a.start(0, 0)
    pair.drive_bounded()
    assert "Data" not in pair.messages("a")
    assert Watch not in kinds(pair.a)
    assert pair.a.ended[1].outcome is Outcome.VALUE


def test_a_notify_runs_and_has_no_future() -> None:
    pair = opened()
    pair.b.plan = lambda launch: (staged(5),)
    pair.a.start(10, notify=True)
    pair.drive_bounded()
    assert pair.b.launched[1].notify
    assert pair.a.freed == {Key(1, True, Side.REQUEST): True}
    assert pair.b.freed == {Key(1, False, Side.REPLY): False}
    assert "Reply" not in pair.messages("b")
    pair.check_quiet()


def test_the_callees_error_arrives_in_words() -> None:
    pair = opened()
    pair.b.plan = lambda launch: None
    pair.a.start(10)
    pair.drive_bounded()
    end = pair.a.ended[1]
    assert (end.outcome, end.type_name, end.message, end.traceback_text) == (
        Outcome.REMOTE_ERROR,
        "ValueError",
        "no",
        "trace",
    )
    pair.check_quiet()


def test_errors_of_any_size_and_of_no_valid_text_are_sent() -> None:
    pair = opened()
    pair.b.manual = True
    pair.a.start()
    pair.drive_bounded()
    pair.b.running.clear()
    pair.b.command(FailCall(1, "E" * 1000, "\ud800" + "m" * 10**6, "t" * 10**6))
    pair.drive_bounded()
    assert pair.a.ended[1].message.startswith("\\ud800mmm")
    assert len(pair.a.ended[1].traceback_text) == wire.MAX_TRACEBACK_BYTES


def test_a_call_that_cannot_be_run_is_failed_before_its_data_is_there() -> None:
    pair = opened()
    pair.b.no_memory = lambda key: False
    pair.b._soon = lambda action: None  # type: ignore[method-assign]
    pair.a.start(50)
    pair.drive_bounded(0.1)
    pair.b.command(FailCall(1, "UnknownFunctionError", "no f", ""))
    pair.drive_bounded()
    assert pair.a.ended[1].type_name == "UnknownFunctionError"
    assert not pair.b.launched
    pair.check_quiet()


def test_calls_both_ways_nest() -> None:
    pair = opened()
    pair.b.manual = pair.a.manual = True
    pair.a.start(5)
    pair.drive_bounded()
    pair.b.start(5)
    pair.drive_bounded()
    pair.a.finish(1, 3)
    pair.drive_bounded()
    assert pair.b.ended[1].outcome is Outcome.VALUE
    pair.b.finish(1, 3)
    pair.drive_bounded()
    assert pair.a.ended[1].outcome is Outcome.VALUE
    pair.check_quiet()


# Deadlines and cancels ------------------------------------------------------------------------------------------------


def test_b27_a_late_reply_is_swallowed_and_its_credit_given_back() -> None:
    """pytorch#33803: a reply after the caller's time-out completed a dead future and aborted the process."""
    pair = opened(limits=Limits(window=10_000))
    pair.b.manual = True
    pair.a.start(5, deadline=1.0)
    pair.drive_bounded(0.5)
    pair.b.finish(1, 5000)  # the reply crosses the cancel
    assert pair.a.ended == {}
    pair.now += 0.51
    pair.a.connection.handle_timeout(pair.now)
    pair.a.drain()
    pair.drive_bounded(2.0)
    assert pair.a.ended[1].outcome is Outcome.DEADLINE
    assert pair.a.connection.statistics().late_replies == 1
    pair.check_quiet()
    for _ in range(100):
        pair.b.manual = False
        pair.a.start(900)
        pair.drive_bounded(0.5)
    assert sum(end.outcome is Outcome.VALUE for end in pair.a.ended.values()) == 100
    pair.check_quiet()


def test_a_deadline_tells_the_callee_and_frees_what_was_not_sent() -> None:
    pair = opened()
    pair.a._soon = lambda action: None  # type: ignore[method-assign]
    pair.a.start(100, deadline=1.0)
    pair.drive_bounded()
    assert pair.a.ended[1].outcome is Outcome.DEADLINE
    assert pair.messages("a")[-1] in ("Cancel", "Ping", "Pong")
    assert "Cancel" in pair.messages("a")
    assert pair.a.freed == {Key(1, True, Side.REQUEST): False}
    assert 1 in pair.b.stopped
    pair.check_quiet()


def test_a_call_whose_time_is_up_in_the_line_never_goes_out() -> None:
    pair = opened(limits=Limits(window=1000))
    pair.b._soon = lambda action: None  # type: ignore[method-assign]  # holds the window
    pair.a.start(900)
    pair.a.start(900, deadline=1.0)
    pair.a.start(900)
    pair.drive_bounded(0.2)
    pair.a.command(CancelCall(3))
    pair.drive_bounded(3.0)
    assert pair.a.ended[2].outcome is Outcome.DEADLINE
    assert pair.a.ended[3].outcome is Outcome.CANCELLED
    assert pair.messages("a").count("Call") == 1
    assert "Cancel" not in pair.messages("a")


def test_the_callee_drops_a_call_whose_time_ran_out_before_launch() -> None:
    pair = opened()
    pair.b._soon = lambda action: pair.after(2.0, action)  # type: ignore[method-assign]
    pair.drop = lambda name, number: False
    pair.a.start(5, deadline=1.0, notify=True)
    pair.drive_bounded(5.0)
    assert pair.b.launched == {}
    assert "deadline" in pair.b.stopped[1]
    pair.check_quiet()


def test_a_deadline_travels_as_remaining_time_for_clocks_differ() -> None:
    pair = opened()
    pair.b.manual = True
    pair.a.start(deadline=3.0)
    sent = pair.now
    pair.drive_bounded(0.5)
    deadline = pair.b.launched[1].deadline
    assert deadline is not None
    assert sent + 3.0 < deadline < sent + 3.1


# Held calls -----------------------------------------------------------------------------------------------------------


def test_a_held_call_sends_nothing_before_its_rest_is_there() -> None:
    pair = opened()
    held = pair.a.hold()
    assert pair.a.connection.statistics().calls == 1
    other = pair.a.start()
    pair.drive_bounded()
    assert pair.messages("a").count("Call") == 1
    assert pair.a.ended[other].outcome is Outcome.VALUE
    call = pair.a.go(held, body=b"rest")
    pair.drive_bounded()
    assert call == other + 1
    assert bytes(pair.b.launched[call].body) == b"rest"
    assert pair.a.ended[call].outcome is Outcome.VALUE
    assert held not in pair.a.ended
    pair.check_quiet()


def test_a_held_call_is_one_before_the_handshake_too() -> None:
    pair = Pair()
    held = pair.a.hold()
    call = pair.a.go(held)
    assert "Call" not in pair.messages("a")
    pair.drive_bounded()
    assert pair.a.ended[call].outcome is Outcome.VALUE
    pair.check_quiet()


def test_held_calls_go_in_any_order() -> None:
    pair = opened()
    first, second, third = (pair.a.hold(function=name) for name in "fgh")
    assert [pair.a.go(held) for held in (third, first, second)] == [1, 2, 3]
    pair.drive_bounded()
    assert sorted(pair.a.ended) == [1, 2, 3]
    pair.check_quiet()


@pytest.mark.parametrize("call", [0, 1, -1, -2])
def test_ids_of_held_calls_fall_strictly(call: int) -> None:
    """Else one that has ended could be cancelled, or sent, in the place of another."""
    pair = opened()
    assert (pair.a.hold(), pair.a.hold()) == (-1, -2)
    pair.a.command(CancelCall(-1))
    with pytest.raises(LocalProtocolError, match="count them down"):
        pair.a.command(HoldCall(call, "f"))
    assert pair.a.connection.statistics().calls == 1
    pair.a.command(HoldCall(-5, "f"))
    assert pair.a.connection.statistics().calls == 2


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (HoldCall(-1, "f", float("nan")), "not a number"),
        (HoldCall(-1, "f" * 1000), "cannot be sent"),
    ],
)
def test_a_wrong_hold_changes_nothing(command: HoldCall, message: str) -> None:
    pair = opened()
    with pytest.raises(LocalProtocolError, match=message):
        pair.a.command(command)
    assert pair.a.connection.statistics().calls == 0
    assert pair.a.hold() == -1, "its id is not used up"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (StartCall(2, "f", b"", held=-2), "is not held"),  # never was
        (StartCall(2, "f", b"", held=1), "is not held"),  # a call that is open
        (StartCall(1, "f", b"", held=-1), "rise strictly"),
        (StartCall(2, "f", b"", held=-1, notify=True), "notify"),
        (StartCall(2, "f", b"", held=-1, deadline=float("nan")), "not a number"),
    ],
)
def test_a_wrong_start_of_a_held_call_leaves_it_held(command: StartCall, message: str) -> None:
    pair = opened()
    pair.b.manual = True
    open_call, held = pair.a.start(), pair.a.hold()
    with pytest.raises(LocalProtocolError, match=message):
        pair.a.connection.command(command, pair.now)
    assert pair.a.connection.statistics().calls == 2
    call = pair.a.go(held)
    pair.drive_bounded(0.5)
    assert set(pair.b.running) == {open_call, call}
    for running in list(pair.b.running):
        pair.b.finish(running)
    pair.drive_bounded()
    pair.check_quiet()


def test_a_cancelled_held_call_was_never_sent() -> None:
    pair = opened()
    held = pair.a.hold(deadline=1.0)
    pair.a.command(CancelCall(held))
    assert pair.a.ended[held].outcome is Outcome.CANCELLED
    pair.a.command(CancelCall(held))  # one that has ended is left alone
    with pytest.raises(LocalProtocolError, match="is not held"):
        pair.a.go(held)
    assert pair.a.connection.statistics().calls == 0
    assert not pair.a.connection._calls.deadlines.known
    pair.drive_bounded()
    assert not {"Call", "Cancel"} & set(pair.messages("a"))
    pair.check_quiet()


@pytest.mark.parametrize("call", [0, -1, -3, 1])
def test_a_call_that_was_never_held_cannot_be_cancelled(call: int) -> None:
    pair = opened()
    if call == -3:
        assert (pair.a.hold(), pair.a.hold()) == (-1, -2)
    with pytest.raises(LocalProtocolError, match="never started"):
        pair.a.command(CancelCall(call))


def test_a_held_call_that_has_gone_is_cancelled_by_its_new_id() -> None:
    pair = opened()
    pair.b.manual = True
    held = pair.a.hold()
    call = pair.a.go(held)
    pair.a.command(CancelCall(held))
    assert pair.a.connection.statistics().calls == 1
    pair.a.command(CancelCall(call))
    assert pair.a.ended[call].outcome is Outcome.CANCELLED
    assert held not in pair.a.ended
    pair.drive_bounded(0.5)
    assert pair.b.stopped == {call: "cancelled by the caller"}


def test_the_time_of_a_held_call_runs() -> None:
    pair = opened()
    held = pair.a.hold(deadline=1.0)
    assert pair.a.connection.next_timeout() is not None
    pair.drive_bounded(0.9)
    assert pair.a.ended == {}
    pair.drive_bounded(0.2)
    assert pair.a.ended[held].outcome is Outcome.DEADLINE
    assert "before it was sent" in pair.a.ended[held].message
    assert str(held) not in pair.a.ended[held].message
    with pytest.raises(LocalProtocolError, match="is not held"):
        pair.a.go(held)
    assert not {"Call", "Cancel"} & set(pair.messages("a"))
    pair.check_quiet()


def test_a_held_call_that_goes_takes_its_deadline_along() -> None:
    pair = opened()
    pair.b.manual = True
    held = pair.a.hold(deadline=2.0)
    pair.drive_bounded(0.5)
    call = pair.a.go(held, deadline=1.5)
    pair.drive_bounded(0.5)
    assert pair.b.launched[call].deadline is not None
    pair.drive_bounded(2.0)
    assert {number: one.outcome for number, one in pair.a.ended.items()} == {call: Outcome.DEADLINE}
    assert call in pair.b.stopped


def test_a_held_call_whose_time_is_up_as_it_goes_does_not_go() -> None:
    pair = opened()
    call = pair.a.go(pair.a.hold(deadline=1.0), deadline=0.0)
    assert {number: one.outcome for number, one in pair.a.ended.items()} == {call: Outcome.DEADLINE}
    pair.drive_bounded(2.0)
    assert "Call" not in pair.messages("a")
    pair.check_quiet()


@pytest.mark.parametrize("how", ["abort", "cut", "kill"])
def test_a_held_call_is_lost_with_the_connection_and_says_that_it_was_not_sent(how: str) -> None:
    pair = opened()
    held = pair.a.hold(deadline=60.0)
    match how:
        case "abort":
            pair.a.command(Abort("enough"))
        case "cut":
            pair.cut()
        case "kill":
            pair.kill(pair.b)
    pair.drive_bounded(1.0)
    assert pair.a.ended[held].outcome is Outcome.PEER_LOST
    assert pair.a.ended[held].message.endswith("a call of 'f': it was not sent")
    assert kinds(pair.a)[-2:] == [EndFuture, Closed]
    with pytest.raises(ClosedError):
        pair.a.go(held)
    with pytest.raises(ClosedError):
        pair.a.hold()
    pair.check_quiet()


@pytest.mark.parametrize("leaver", ["a", "b"])
def test_a_graceful_end_waits_for_a_held_call_which_is_made(leaver: str) -> None:
    pair = opened()
    held = pair.a.hold()
    (pair.a if leaver == "a" else pair.b).command(Goodbye())
    pair.drive_bounded(3.0)
    assert pair.a.closed is None
    assert "Bye" not in pair.messages("a")
    with pytest.raises(ClosedError):
        pair.a.hold()
    with pytest.raises(ClosedError):
        pair.a.start()
    call = pair.a.go(held)
    pair.drive_bounded(3.0)
    assert pair.a.ended[call].outcome is Outcome.VALUE
    assert pair.a.closed == pair.b.closed == Closed(graceful=True)
    pair.check_quiet()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_graceful_end_goes_on_when_a_held_call_is_given_up(how: str) -> None:
    pair = opened()
    held = pair.a.hold(deadline=4.0)
    pair.a.command(Goodbye())
    pair.drive_bounded(3.0)
    assert pair.a.closed is None
    if how == "cancel":
        pair.a.command(CancelCall(held))
    pair.drive_bounded(3.0)
    assert pair.a.closed == pair.b.closed == Closed(graceful=True)
    pair.check_quiet()


def test_a_peer_cannot_name_a_held_call() -> None:
    pair = opened()
    held = pair.a.hold()
    with pytest.raises(Malformed):
        wire.check(messages.Reply(held, b"", ()))
    with pytest.raises(Malformed):
        wire.check(messages.Error(held, "E", "m", ""))


# ----------------------------------------------------------------------------------------------------------------------


def test_cancel_reaches_a_running_function_and_drops_its_reply() -> None:
    pair = opened()
    pair.b.manual = True
    call = pair.a.start(5)
    pair.drive_bounded()
    pair.a.command(CancelCall(call))
    assert pair.a.ended[1].outcome is Outcome.CANCELLED
    pair.drive_bounded()
    assert pair.b.stopped == {1: "cancelled by the caller"}
    pair.b.finish(1, 10)
    pair.drive_bounded()
    assert pair.b.freed == {Key(1, False, Side.REPLY): False}
    assert "Reply" not in pair.messages("b")
    pair.check_quiet()


def test_cancel_while_the_reply_is_coming_frees_it_on_both_sides() -> None:
    pair = opened()
    pair.b.manual = True
    pair.a.start(5)
    pair.drive_bounded()
    pair.b._soon = lambda action: None  # type: ignore[method-assign]  # its bytes never get ready
    pair.b.finish(1, 10)
    pair.drive_bounded(0.1)
    assert kinds(pair.a)[-1] is LeaseStreams
    pair.a.command(CancelCall(1))
    pair.drive_bounded()
    assert pair.b.freed == {Key(1, False, Side.REPLY): False}
    pair.check_quiet()


def test_a_second_cancel_does_not_stop_twice() -> None:
    pair = opened()
    pair.b.manual = True
    pair.a.start()
    pair.drive_bounded(0.2)
    Wiretap(pair).send(messages.Cancel(1), messages.Cancel(1))
    assert kinds(pair.b).count(StopCall) == 1
    assert pair.b.closed is None


def test_a_call_is_not_launched_past_its_deadline_however_late_the_timeout_is_handled() -> None:
    pair = opened()
    pair.b._soon = lambda action: None  # type: ignore[method-assign]
    pair.a.start(10, deadline=1.0, notify=True)
    pair.drive_bounded(0.5)
    pair.now += 1.0
    pair.b.fact(StreamsGranted(THEIRS))
    assert pair.b.launched == {}
    assert 1 in pair.b.stopped


def test_cancel_while_a_reply_by_reference_is_unopened_gives_its_slot_back() -> None:
    pair = opened()
    pair.b.manual = True
    pair.a.start()
    pair.drive_bounded(0.5)
    pair.a._open = lambda pull, memory: None  # type: ignore[method-assign]
    pair.b.finish(1, 10, channel="shared_memory")
    pair.drive_bounded(0.5)
    assert pair.b.slots == 1
    pair.a.command(CancelCall(1))
    pair.drive_bounded(0.5)
    pair.check_quiet()


def test_bytes_for_a_channel_that_the_buffer_does_not_go_by_are_dropped() -> None:
    pair = opened()
    pair.a._watch = lambda key, index, header: None  # type: ignore[method-assign]
    pair.a.start(4)
    pair.drive_bounded(0.1)
    before = pair.a.connection.statistics()
    pair.a.fact(DataReady(REQUEST, 0, 0, b"a descriptor", "shared_memory"))
    assert pair.a.connection.statistics() == before


def test_cancelling_what_has_ended_changes_nothing() -> None:
    pair = opened()
    pair.a.start()
    pair.drive_bounded()
    before = pair.a.connection.statistics()
    pair.a.command(CancelCall(1))
    assert pair.a.connection.statistics() == before


# Wrong commands -------------------------------------------------------------------------------------------------------


def _bad_commands() -> dict[str, object]:
    return {
        "id used": StartCall(1, "f", b""),
        "id 0": StartCall(0, "f", b""),
        "id over 63 bits": StartCall(2**63, "f", b""),
        "function too long": StartCall(9, "f" * 600, b""),
        "body too long": StartCall(9, "f", bytes(wire.MAX_BODY_BYTES + 1)),
        "too many buffers": StartCall(9, "f", b"", (staged(1),) * 2000),
        "negative size": StartCall(9, "f", b"", (staged(-1),)),
        "no such channel": StartCall(9, "f", b"", (BufferHeader(1, "cpu", "pigeon", "cpu"),)),
        "too large": StartCall(9, "f", b"", (staged(2**41),)),
        "deadline is no number": StartCall(9, "f", b"", deadline=float("nan")),
        "cancel of a call that never was": CancelCall(9),
        "finish of a call that never was": FinishCall(9, b""),
        "fail of a call that never was": FailCall(9, "E", ""),
        "finish with a bad buffer": FinishCall(1, b"", (staged(-1),)),
        "finish of a call that is not launched": FinishCall(2, b""),
        "retire of a bad id": Retire(-1),
        "announcement of an address that is too long": Announce("ucx", b"a" * 8193),
    }


@pytest.mark.parametrize("command", _bad_commands().values(), ids=_bad_commands().keys())
def test_a_wrong_command_raises_and_changes_nothing(command: object) -> None:
    pair = opened()
    for end in pair.ends:
        end.manual = True
        end.start(5)
    pair.drive_bounded(0.5)
    for end in pair.ends:
        end._soon = lambda action: None  # type: ignore[method-assign]
        end.start(5)  # call 2 is on its way and not launched
    pair.drive_bounded(0.5)
    before, timeout = pair.a.connection.statistics(), pair.a.connection.next_timeout()
    with pytest.raises(LocalProtocolError):
        pair.a.connection.command(command, pair.now)  # type: ignore[arg-type]
    assert pair.a.connection.drain() == []
    assert pair.a.connection.statistics() == before
    assert pair.a.connection.next_timeout() == timeout


REQUEST = Key(1, True, Side.REQUEST)
THEIRS = Key(1, False, Side.REQUEST)


@pytest.mark.parametrize(
    "fact",
    [
        DataReady(REQUEST, 0, 0, bytes(6)),
        DataReady(REQUEST, 0, 5, b"x"),
        DataReady(REQUEST, 0, 0, b""),
        DataReady(REQUEST, 1, 0, b"x"),
        DataReady(REQUEST, -1, 0, b"x"),
        StreamsGranted(REQUEST),
        StreamsGranted(THEIRS),
        Pulled(THEIRS, 0),
        OpenFailed(THEIRS, 0, "staging never fails"),
        OpenFailed(THEIRS, 7, "no such buffer"),
    ],
)
def test_a_fact_that_cannot_be_raises_and_changes_nothing(fact: object) -> None:
    pair = opened()
    for end in pair.ends:
        end._watch = lambda key, index, header: None  # type: ignore[method-assign]
        end.start(5)
    pair.drive_bounded(0.5)
    before = pair.a.connection.statistics()
    with pytest.raises(LocalProtocolError):
        pair.a.connection.fact(fact, pair.now)  # type: ignore[arg-type]
    assert pair.a.connection.drain() == []
    assert pair.a.connection.statistics() == before
    pair.a.fact(DataReady(REQUEST, 0, 1, b"ab"))
    with pytest.raises(LocalProtocolError, match="twice"):
        pair.a.fact(DataReady(REQUEST, 0, 2, b"ab"))


# Credit ---------------------------------------------------------------------------------------------------------------


def test_without_credit_a_call_waits_and_order_is_kept() -> None:
    pair = opened(limits=Limits(window=10_000))
    pair.b.no_memory = lambda key: False
    pair.b._soon = lambda action: None  # type: ignore[method-assign]  # grants nothing
    for size in (6000, 6000, 10):
        pair.a.start(size)
    pair.drive_bounded()
    stats = pair.a.connection.statistics()
    assert (stats.waiting, pair.messages("a").count("Call")) == (2, 1)
    assert stats.outstanding == 6000 + 256
    pair.b.fact(StreamsGranted(THEIRS))
    pair.drive_bounded()
    assert pair.messages("a").count("Call") == 3


def test_a_message_larger_than_the_window_goes_alone() -> None:
    pair = opened(limits=Limits(window=1000))
    for _ in range(5):
        pair.a.start(3000)
    pair.b.plan = lambda launch: (staged(5000),)
    pair.drive_bounded()
    assert [end.outcome for end in pair.a.ended.values()] == [Outcome.VALUE] * 5
    pair.check_quiet()


def test_b22_nested_calls_do_not_wait_for_each_others_credit() -> None:
    """pytorch#26362: A calls B, whose function calls A; a request's credit comes back when it is launched."""
    pair = opened(limits=Limits(window=1000))
    for end in pair.ends:
        end.manual = True
    pair.a.start(900)
    pair.drive_bounded(0.5)
    for depth in range(1, 6):
        caller = pair.ends[depth % 2]
        caller.start(900)
        pair.drive_bounded(0.5)
    assert sum(len(end.running) for end in pair.ends) == 6
    for depth in range(6, 0, -1):
        callee = pair.ends[depth % 2]
        callee.finish(max(callee.running), 900)
        pair.drive_bounded(0.5)
    assert all(one.outcome is Outcome.VALUE for end in pair.ends for one in end.ended.values())
    pair.check_quiet()


def test_small_calls_cost_no_message_of_credit_each() -> None:
    pair = opened()
    for _ in range(100):
        pair.a.start()
        pair.drive_bounded(0.1)
    assert pair.messages("a").count("Credit") + pair.messages("b").count("Credit") == 0
    pair.check_quiet()


def test_a_peer_that_sends_without_credit_is_cut_off() -> None:
    pair = opened(limits=Limits(window=1000), b_limits=Limits(window=100_000))
    pair.a.chunk = 60_000
    pair.a.connection._sender.window.size = 10**9  # type: ignore[union-attr]
    pair.b._soon = lambda action: None  # type: ignore[method-assign]
    pair.a.start(60_000)
    pair.a.start(60_000)
    pair.drive_bounded(1.0)
    assert pair.b.closed is not None
    assert "outstanding" in pair.b.closed.reason


# Memory and channels --------------------------------------------------------------------------------------------------


def test_no_memory_for_a_request_is_the_callers_error() -> None:
    pair = opened()
    pair.b.no_memory = lambda key: key.call == 1
    pair.a.start(50)
    pair.a.start(50)
    pair.drive_bounded()
    assert (pair.a.ended[1].outcome, pair.a.ended[1].type_name) == (Outcome.REMOTE_ERROR, "ExhaustedError")
    assert pair.a.ended[2].outcome is Outcome.VALUE
    assert list(pair.b.launched) == [2]
    pair.check_quiet()


def test_no_memory_for_a_reply_ends_the_call_and_the_rest_is_swallowed() -> None:
    pair = opened()
    pair.b.plan = lambda launch: (staged(100),)
    pair.a.no_memory = lambda key: True
    pair.a.start()
    pair.drive_bounded()
    assert pair.a.ended[1].outcome is Outcome.REMOTE_ERROR
    assert "no room" in pair.a.ended[1].message
    pair.check_quiet()


@pytest.mark.parametrize("channel", ["staging", "shared_memory"])
@pytest.mark.parametrize("enclose", [False, True])
def test_a_message_of_more_than_the_receiver_may_take_ends_its_call_alone(channel: str, enclose: bool) -> None:
    """The other end has less memory; neither leases for the message nor waits for the rest of it."""
    enclose = enclose and channel != "staging"
    pair = opened(b_limits=Limits(max_transfer=100))
    pair.a.start(60, 41, channel=channel, enclose=enclose)
    pair.a.start(60, 40, channel=channel, enclose=enclose)
    pair.a.start(60, 41, channel=channel, enclose=enclose, notify=True)
    pair.drive_bounded()
    ended = pair.a.ended[1]
    assert (ended.outcome, ended.type_name) == (Outcome.REMOTE_ERROR, "ExhaustedError")
    assert ended.message == "101 bytes for cpu in one message, where 100 are allowed; send them in several calls"
    assert pair.a.ended[2].outcome is Outcome.VALUE
    assert list(pair.b.launched) == [2]
    pair.check_quiet()

    pair = opened(limits=Limits(max_transfer=100), b_limits=Limits())
    sizes = iter([(101,), (100,)])
    pair.b.plan = lambda launch: pair.b.headers(
        Key(launch.call, False, Side.REPLY), *next(sizes), channel=channel, enclose=enclose
    )
    for _ in range(2):
        pair.a.start()
        pair.drive_bounded()
    ended = pair.a.ended[1]
    assert (ended.outcome, ended.type_name) == (Outcome.REMOTE_ERROR, "ExhaustedError")
    assert "has returned, but its reply found no room here: 101 bytes for cpu in one message" in ended.message
    assert pair.a.ended[2].outcome is Outcome.VALUE
    pair.check_quiet()


def test_a_declined_buffer_comes_by_the_next_channel_and_then_the_function_runs() -> None:
    pair = opened()
    pair.b.unopenable = pair.a.unopenable = {"shared_memory", "ucx"}
    pair.b.plan = lambda launch: (BufferHeader(30, "cpu", "shared_memory", "cpu"), staged(4))
    pair.a.start(40, 3, channel="shared_memory")
    pair.drive_bounded()
    assert pair.a.ended[1].outcome is Outcome.VALUE
    assert pair.messages("b").count("Decline") == 4
    assert pair.messages("a").count("Decline") == 2
    watches = [effect for effect in pair.a.effects if isinstance(effect, Watch)]
    assert [(one.declined, *(header.channel for header in one.buffers)) for one in watches] == [
        (None, "shared_memory", "shared_memory"),
        (0, "ucx", "shared_memory"),
        (1, "ucx", "ucx"),
        (0, "staging", "ucx"),
        (1, "staging", "staging"),
    ]
    pair.check_quiet()


def test_a_channel_that_is_left_out_is_never_the_next_one() -> None:
    pair = opened()
    pair.a.connection.leave_out("ucx")
    pair.a.connection.leave_out("staging")  # which serves everything, and stays
    pair.b.unopenable = {"shared_memory"}
    pair.a.start(40, channel="shared_memory")
    pair.drive_bounded()
    assert pair.a.ended[1].outcome is Outcome.VALUE
    watches = [effect for effect in pair.a.effects if isinstance(effect, Watch)]
    assert [one.buffers[0].channel for one in watches] == ["shared_memory", "staging"]
    pair.check_quiet()


def test_a_buffer_by_reference_is_held_until_it_is_released() -> None:
    pair = opened()
    pair.a.start(40, channel="shared_memory")
    pair.drive_bounded()
    assert pair.a.freed == {Key(1, True, Side.REQUEST): True}
    assert pair.messages("a").count("Data") == 1
    pair.check_quiet()


def test_enclosed_buffers_go_with_their_header_alone() -> None:
    pair = opened()
    pair.b.plan = lambda launch: pair.b.headers(
        Key(launch.call, False, Side.REPLY), 30, 0, channel="shared_memory", enclose=True
    )
    pair.a.start(40, 7, channel="shared_memory", enclose=True)
    pair.drive_bounded()
    assert pair.a.ended[1].outcome is Outcome.VALUE
    assert pair.a.freed == {Key(1, True, Side.REQUEST): True}
    assert not [name for end in "ab" for name in pair.messages(end) if name in ("Data", "Decline")]
    assert Watch not in kinds(pair.a) + kinds(pair.b)
    pair.check_quiet()


def test_an_enclosed_buffer_that_cannot_be_opened_ends_its_call_and_gives_its_slot_back() -> None:
    pair = opened()
    pair.b.unopenable = {"shared_memory"}
    pair.a.start(40, 7, channel="shared_memory", enclose=True)
    pair.a.start(3)
    pair.drive_bounded()
    assert pair.a.ended[1].outcome is Outcome.REMOTE_ERROR
    assert "is not for us" in pair.a.ended[1].message
    assert pair.a.ended[2].outcome is Outcome.VALUE
    assert "Decline" not in pair.messages("b")
    pair.check_quiet()


def test_the_slots_of_a_late_reply_are_given_back() -> None:
    pair = opened()
    pair.b.manual = True
    pair.a.start()
    pair.drive_bounded(1.0)
    pair.a.command(CancelCall(1))
    pair.b.finish(1, 30, channel="shared_memory", enclose=True)  # before the cancel is there
    pair.drive_bounded()
    assert pair.a.connection.statistics().late_replies == 1
    pair.check_quiet()


@pytest.mark.parametrize("opened_count", [-1, 2])
def test_no_more_can_be_opened_than_came_with_the_header(opened_count: int) -> None:
    pair = opened()
    pair.b.no_memory = lambda key: False
    pair.b._grant = lambda key, buffers: None  # type: ignore[method-assign]
    pair.a.start(40, channel="shared_memory", enclose=True)
    pair.drive_bounded(0.5)
    with pytest.raises(LocalProtocolError, match="buffers opened"):
        pair.b.fact(StreamsGranted(THEIRS, opened_count))
    assert pair.b.launched == {}


def test_who_declines_what_came_with_the_header_breaks_the_protocol() -> None:
    key = Key(1, True, Side.REQUEST)
    transfer = OutgoingTransfer(key, opened().a.headers(key, 40, channel="ucx", enclose=True))
    with pytest.raises(Malformed, match="cannot be declined"):
        transfer.decline(0, ("shared_memory", "ucx", "staging"))
    with pytest.raises(Malformed, match="came twice"):
        transfer.send(0, 0, b"again")


def test_a_decline_of_a_call_that_is_over_frees_its_slot() -> None:
    pair = opened()
    pair.b.unopenable = {"shared_memory"}
    pair.a.start(40, channel="shared_memory")
    pair.drive_bounded(0.012)
    while "Decline" not in pair.messages("b"):
        pair.step(pair.now + 1)
    pair.a.command(CancelCall(1))
    pair.drive_bounded()
    assert pair.b.launched == {}
    pair.check_quiet()


def test_a_retired_allocation_is_told_to_the_peer() -> None:
    pair = Pair()
    pair.a.command(Retire(7))
    pair.drive_bounded()
    pair.a.command(Retire(8))
    pair.drive_bounded()
    assert [effect for effect in pair.b.effects if isinstance(effect, Retired)] == [Retired(7), Retired(8)]


def test_where_a_channel_is_is_told_to_the_peer() -> None:
    pair = opened()
    pair.a.command(Announce("ucx", b"an address"))
    pair.b.command(Announce("ucx", b""))
    pair.drive_bounded()
    assert [effect for effect in pair.b.effects if isinstance(effect, Announced)] == [Announced("ucx", b"an address")]
    assert [effect for effect in pair.a.effects if isinstance(effect, Announced)] == [Announced("ucx", b"")]


def test_nothing_is_announced_before_the_handshake_is_done() -> None:
    with pytest.raises(LocalProtocolError, match="once the connection is open"):
        Pair().a.command(Announce("ucx", b"an address"))


# Faults of the peer ---------------------------------------------------------------------------------------------------


class Wiretap:
    """Sends what it likes as `a`, in the session and sequence of `a`."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def send(self, *what: messages.Message) -> None:
        outbox = self.pair.a.connection._outbox
        for one in what:
            outbox.send(one, self.pair.now)
        self.pair.a.drain()
        self.pair.drive_bounded(0.5)


def _call(call: int, *sizes: int, notify: bool = False) -> messages.Call:
    return messages.Call(call, "f", b"", tuple(map(staged, sizes)), None, notify)


def _data(call: int, offset: int, payload: bytes, *, buffer: int = 0, side: Side = Side.REQUEST) -> messages.Data:
    return messages.Data(call, side, buffer, offset, "staging", payload)


FAULTS: dict[str, tuple[messages.Message, ...]] = {
    "call id falls": (_call(5), _call(4)),
    "call id repeats": (_call(5), _call(5)),
    "data of no call": (_data(1, 0, b"x"),),
    "data past the end": (_call(1, 4), _data(1, 2, b"abc")),
    "data of no such buffer": (_call(1, 4), _data(1, 0, b"a", buffer=1)),
    "data twice": (_call(1, 9), _data(1, 0, b"abcd"), _data(1, 3, b"de")),
    "data of nothing": (_call(1, 4), _data(1, 0, b"")),
    "data after all is there": (_call(1, 4), _data(1, 0, b"abcd"), _data(1, 0, b"abcd")),
    "data by an unannounced channel": (_call(1, 4), messages.Data(1, Side.REQUEST, 0, 0, "ucx", b"abcd")),
    "reply to no call": (messages.Reply(1, b"", ()),),
    "error for no call": (messages.Error(1, "E", "", ""),),
    "cancel of no call": (messages.Cancel(1),),
    "decline of no call": (messages.Decline(1, Side.REPLY, 0, ""),),
    "credit that was not used": (messages.Credit(1),),
    "a second hello": (messages.Welcome(1, bytes(16), 1, {}),),
    "bye twice": (messages.Bye(), messages.Bye()),
    "acknowledgement without bye": (messages.ByeAck(),),
}


@pytest.mark.parametrize("what", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_of_the_peers_ends_the_connection_in_order(what: tuple[messages.Message, ...]) -> None:
    pair = opened()
    pair.b.manual = True
    Wiretap(pair).send(*what)
    assert pair.b.closed is not None
    assert not pair.b.closed.graceful
    assert "broke the protocol" in pair.b.closed.reason
    assert pair.a.closed is not None, "the peer is told"


def test_a_call_after_the_peers_bye_is_a_fault() -> None:
    pair = opened()
    pair.b.manual = True
    Wiretap(pair).send(_call(1), messages.Bye())
    assert pair.b.running
    Wiretap(pair).send(_call(2))
    assert pair.b.closed is not None
    assert "after the peer's Bye" in pair.b.closed.reason


def test_a_reply_before_the_request_is_all_there_is_a_fault() -> None:
    pair = opened()
    pair.b._soon = lambda action: None  # type: ignore[method-assign]
    pair.b.start(5)
    pair.drive_bounded(0.2)
    Wiretap(pair).send(messages.Reply(1, b"", ()))
    assert pair.b.closed is not None
    assert pair.b.ended[1].outcome is Outcome.PEER_LOST


def test_data_of_a_reply_that_was_not_announced_is_a_fault() -> None:
    pair = opened()
    pair.a.manual = True
    pair.b.start()
    pair.drive_bounded(0.2)
    Wiretap(pair).send(_data(1, 0, b"x", side=Side.REPLY))
    assert pair.b.closed is not None


def test_a_lost_message_ends_the_connection() -> None:
    pair = opened()
    pair.drop = lambda name, number: name == "a" and number == 1
    pair.a.start()
    pair.a.start()
    pair.drive_bounded()
    assert pair.b.closed is not None
    assert "was lost" in pair.b.closed.reason
    assert {one.outcome for one in pair.a.ended.values()} == {Outcome.PEER_LOST}
    assert "unknown" in pair.a.ended[1].message
    pair.check_quiet()


def test_repeated_messages_are_dropped() -> None:
    pair = Pair()
    pair.repeat = lambda name, number: True
    pair.b.plan = lambda launch: (staged(20),)
    for _ in range(3):
        pair.a.start(20)
    pair.drive_bounded()
    assert list(pair.b.launched) == [1, 2, 3]
    assert pair.b.connection.statistics().duplicates >= 10
    pair.check_quiet()


def test_b26_captured_request_frames_replayed_do_not_run_again() -> None:
    """pytorch#32130: a call whose frames are sent again, on its connection or a new one, runs once."""
    pair = opened()
    pair.a.start(10)
    pair.drive_bounded()
    runs = len(pair.b.launched)
    frames = [frames for name, frames in pair.captured if name == "a"]
    for one in frames:
        pair.deliver(pair.b, one)
    pair.drive_bounded()
    assert (runs, len(pair.b.launched)) == (1, 1)
    assert pair.b.closed is None
    pair.a.start()
    pair.drive_bounded()
    assert pair.a.ended[2].outcome is Outcome.VALUE

    fresh = Connection(initiator=False, hello={}, session=b"another nonce 16", limits=Limits(), now=0.0)
    for one in frames:
        fresh.receive(one, 0.0)
    effects = fresh.drain()
    assert not any(isinstance(effect, Launch | LeaseStreams) for effect in effects)
    assert isinstance(effects[-1], Closed)
    assert "session" in effects[-1].reason


def test_b26_a_link_cut_after_the_request_leaves_the_outcome_unknown() -> None:
    """pytorch#32130: the link breaks around the reply; the call is not run again and the caller is told."""
    pair = opened()
    pair.b.manual = True
    pair.a.start(10)
    pair.drive_bounded()
    pair.cut()
    pair.drive_bounded()
    assert len(pair.b.launched) == 1
    assert pair.a.ended[1].outcome is Outcome.PEER_LOST
    assert "outcome is unknown" in pair.a.ended[1].message
    assert pair.b.stopped == {1: "the link broke"}
    pair.check_quiet()


def test_frames_sent_back_to_their_sender_are_refused() -> None:
    pair = opened()
    pair.a.start()
    pair.drive_bounded(0.2)
    name, frames = pair.captured[-2]
    pair.deliver(pair.a if name == "a" else pair.b, frames)
    assert (pair.a if name == "a" else pair.b).closed is not None


# Loss -----------------------------------------------------------------------------------------------------------------


def test_b24_a_killed_peer_ends_every_call_in_the_order_of_loss() -> None:
    """pytorch#25531: the callee is killed with calls open and data on its way; nothing stays pending."""
    pair = opened(limits=Limits(window=3000))
    pair.a.manual = pair.b.manual = True
    pair.a.start(10)
    pair.b.start(10)
    pair.drive_bounded(0.5)
    pair.b._soon = lambda action: None  # type: ignore[method-assign]
    pair.a.start(2500)
    pair.a.start(2500)
    pair.a.start(notify=True)
    pair.drive_bounded(0.5)
    start = len(pair.a.effects)
    pair.kill(pair.b)
    pair.drive_bounded(1.0)
    kinds_of_loss = kinds(pair.a)[start:]
    assert kinds_of_loss == [
        *(MarkLost, ReleaseWords, FreeBuffers, FreeBuffers),
        *(EndFuture, EndFuture, EndFuture, StopCall, Closed),
    ]
    assert ["unknown" in pair.a.ended[call].message for call in (1, 2, 3)] == [True, True, False]
    assert "not sent" in pair.a.ended[3].message
    pair.check_quiet()
    with pytest.raises(ClosedError):
        pair.a.start()
    assert pair.a.connection.next_timeout() is None
    pair.a.fact(PeerGone("again"))
    pair.a.connection.handle_timeout(pair.now + 1e6)
    assert pair.a.connection.drain() == []


def test_between_hosts_silence_is_loss_and_heartbeats_keep_a_peer() -> None:
    pair = opened(limits=Limits(peer_timeout=5.0, heartbeat=1.0))
    pair.b.manual = True
    pair.a.start()
    pair.drive_bounded(60.0)
    assert pair.a.closed is None
    pair.kill(pair.b, seen=False)
    pair.drive_bounded(4.0)
    assert pair.a.closed is None
    pair.drive_bounded(3.0)
    assert pair.a.closed is not None
    assert "silent" in pair.a.closed.reason
    pair.check_quiet()


def test_on_one_host_silence_alone_is_no_loss() -> None:
    pair = opened(limits=Limits(peer_timeout=5.0, heartbeat=1.0, same_host=True))
    pair.b.manual = True
    pair.a.start()
    pair.drive_bounded(0.5)
    pair.kill(pair.b, seen=False)
    pair.drive_bounded(100.0)
    assert pair.a.closed is None
    pair.a.fact(Frozen())
    pair.drive_bounded(4.0)
    pair.a.fact(Frozen())
    assert pair.a.closed is None
    pair.drive_bounded(1.5)
    assert pair.a.closed is not None
    assert "stopped" in pair.a.closed.reason


def test_a_frozen_peer_that_goes_on_is_not_lost() -> None:
    pair = opened(limits=Limits(peer_timeout=5.0, heartbeat=1.0, same_host=True))
    pair.a.fact(Frozen())
    pair.drive_bounded(20.0)
    assert pair.a.closed is None


def test_a_call_to_a_frozen_peer_ends_at_its_own_deadline() -> None:
    pair = opened(limits=Limits(same_host=True))
    pair.kill(pair.b, seen=False)
    pair.a.start(deadline=2.0)
    pair.a.fact(Frozen())
    pair.drive_bounded(3.0)
    assert pair.a.ended[1].outcome is Outcome.DEADLINE
    assert pair.a.closed is None


def test_abort_tells_the_peer_and_ends_everything() -> None:
    pair = opened()
    pair.b.manual = True
    pair.a.start(5)
    pair.drive_bounded()
    pair.a.command(Abort("we have had enough"))
    pair.drive_bounded()
    assert pair.a.closed is not None
    assert "enough" in pair.a.ended[1].message
    assert pair.b.closed is not None
    assert "enough" in pair.b.closed.reason
    assert pair.b.stopped
    pair.check_quiet()


def test_spurious_timeouts_change_nothing() -> None:
    pair = opened()
    pair.b.manual = True
    pair.a.start(5, deadline=9.0)
    pair.drive_bounded(0.5)
    before, timeout = pair.a.connection.statistics(), pair.a.connection.next_timeout()
    for _ in range(3):
        pair.a.connection.handle_timeout(pair.now)
    assert pair.a.connection.drain() == []
    assert (pair.a.connection.statistics(), pair.a.connection.next_timeout()) == (before, timeout)


# The graceful end -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("both", [False, True])
def test_goodbye_with_nothing_open(both: bool) -> None:
    pair = opened()
    pair.a.command(Goodbye())
    if both:
        pair.b.command(Goodbye())
    pair.drive_bounded()
    assert [end.closed for end in pair.ends] == [Closed(graceful=True)] * 2


def test_b34_a_graceful_end_waits_until_every_notify_has_run() -> None:
    """pyzmq#404: closing right after sending lost the last messages; the end is acknowledged by the application."""
    pair = opened()
    pair.b._soon = lambda action: pair.after(0.3, action)  # type: ignore[method-assign]
    for _ in range(10):
        pair.a.start(50, notify=True)
    pair.a.command(Goodbye())
    pair.drive_bounded(0.2)
    assert pair.a.closed is None
    pair.drive_bounded(10.0)
    assert pair.a.closed == Closed(graceful=True)
    assert len(pair.b.launched) == 10
    pair.check_quiet()


def test_goodbye_lets_calls_of_both_sides_finish_and_starts_no_new_ones() -> None:
    pair = opened()
    pair.a.manual = pair.b.manual = True
    pair.a.start(5)
    pair.b.start(5)
    pair.drive_bounded()
    pair.a.command(Goodbye())
    with pytest.raises(ClosedError, match="ending"):
        pair.a.start()
    pair.drive_bounded()
    assert "Bye" not in pair.messages("a")
    pair.b.start(6)  # the peer has not heard of it and may
    pair.drive_bounded()
    pair.b.finish(1, 3)
    pair.drive_bounded()
    assert "Bye" in pair.messages("a")
    assert pair.a.ended[1].outcome is Outcome.VALUE
    with pytest.raises(ClosedError, match="ending"):
        pair.b.start()
    for call in (1, 2):
        assert pair.a.closed is None
        pair.a.finish(call, 3)
        pair.drive_bounded()
    assert [end.closed for end in pair.ends] == [Closed(graceful=True)] * 2
    pair.check_quiet()


def test_a_function_that_still_runs_may_call_back_during_the_end() -> None:
    pair = opened()
    pair.b.manual = True
    pair.a.start(5, notify=True)
    pair.drive_bounded()
    pair.a.command(Goodbye())
    pair.drive_bounded()
    pair.b.start(4)
    pair.drive_bounded()
    assert pair.b.ended[1].outcome is Outcome.VALUE
    pair.b.finish(1)
    pair.drive_bounded()
    assert [end.closed for end in pair.ends] == [Closed(graceful=True)] * 2


def test_a_peer_that_dies_during_the_end_is_no_graceful_end() -> None:
    pair = opened()
    pair.b.manual = True
    pair.a.start(notify=True)
    pair.drive_bounded()
    pair.a.command(Goodbye())
    pair.drive_bounded(0.5)
    pair.kill(pair.b)
    pair.drive_bounded()
    assert pair.a.closed is not None
    assert not pair.a.closed.graceful


def test_the_end_waits_for_the_slots_of_replies() -> None:
    pair = opened()
    pair.b.plan = lambda launch: (BufferHeader(10, "cpu", "shared_memory", "cpu"),)
    pair.b._settle_slots = lambda key: None  # type: ignore[method-assign]
    pair.a.start()
    pair.a.command(Goodbye())
    pair.drive_bounded()
    assert pair.a.ended[1].outcome is Outcome.VALUE
    assert pair.a.closed is None
    pair.b.fact(Released(Key(1, False, Side.REPLY)))
    pair.drive_bounded()
    assert pair.a.closed == Closed(graceful=True)


def test_goodbye_before_the_handshake_is_kept() -> None:
    pair = Pair()
    pair.a.start(3)
    pair.a.command(Goodbye())
    pair.drive_bounded()
    assert pair.a.ended[1].outcome is Outcome.VALUE
    assert pair.a.closed == Closed(graceful=True)


def test_no_memory_facts_of_calls_that_are_over_are_dropped() -> None:
    pair = opened()
    pair.a.start(3)
    pair.drive_bounded()
    before = pair.b.connection.statistics()
    for fact in (NoMemory(THEIRS, "late"), StreamsGranted(THEIRS), Pulled(THEIRS, 0), OpenFailed(THEIRS, 0, "late")):
        pair.b.fact(fact)
    assert pair.b.connection.statistics() == before


def test_ready_comes_once() -> None:
    pair = opened()
    pair.a.start(3)
    pair.drive_bounded()
    assert all(kinds(end).count(Ready) == 1 for end in pair.ends)


def test_same_seed_same_trace_and_another_seed_another() -> None:
    def run(seed: int) -> list[tuple[float, str, str]]:
        pair = Pair(seed=seed)
        for end in pair.ends:
            end.delay = 0.1
            end.plan = lambda launch: (staged(30),)
            for size in (10, 0, 40):
                end.start(size, size)
        pair.drive_bounded()
        return pair.trace

    assert run(1) == run(1)
    assert run(1) != run(2)
