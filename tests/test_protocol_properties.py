"""Properties of the sans-io connection under random work, random faults and random frames."""

from __future__ import annotations

import dataclasses
import functools
import random

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pair import End, Pair
from strategies import any_message, frame_lists, near_message

from streamrt.errors import ClosedError
from transport import messages
from transport.deadlines import Deadlines
from transport.errors import LocalProtocolError, RemoteProtocolError
from transport.events import (
    Abort,
    BufferHeader,
    CancelCall,
    Closed,
    DataReady,
    FailCall,
    FinishCall,
    Goodbye,
    HoldCall,
    Key,
    Launch,
    NoMemory,
    OpenFailed,
    Outcome,
    Pulled,
    Released,
    Side,
    StartCall,
    StreamsGranted,
)
from transport.lease import ReceiveWindow, SendWindow, SlotTable
from transport.limits import Limits
from transport.protocol import Connection
from transport.transfers import Coverage
from transport.wire import Malformed, encode

LIMITS = Limits(window=2000, heartbeat=1.0, peer_timeout=6.0, handshake_timeout=6.0)
WHICH = st.integers(0, 1)
SIZES = st.lists(st.sampled_from([0, 1, 6, 7, 8, 40, 900, 2500]), max_size=3)
CHANNELS = st.sampled_from(["staging", "staging", "shared_memory", "ucx"])


class Traffic(RuleBasedStateMachine):
    """Two ends at random work.  `check_quiet` at the end: tables empty, every call ended once, credit all returned."""

    @initialize(seed=st.integers(0, 2**16), delay=st.sampled_from([0.0, 0.05, 0.3]), manual=st.booleans())
    def begin(self, seed: int, delay: float, manual: bool) -> None:
        self.pair = Pair(seed=seed, limits=LIMITS)
        self.harmed = False
        for end in self.pair.ends:
            end.delay, end.manual, end.chunk = delay, manual, 300
            end.plan = functools.partial(self.plan, end)

    def plan(self, end: End, launch: Launch) -> tuple[BufferHeader, ...] | None:
        kind = self.pair.rng.choice(["error", "nothing", "buffer", "enclosed"])
        if kind in ("error", "nothing"):
            return None if kind == "error" else ()
        key = Key(launch.call, False, Side.REPLY)
        return end.headers(key, self.pair.rng.choice([0, 5, 2500]), channel="ucx", enclose=kind == "enclosed")

    def end(self, which: int) -> End:
        return self.pair.ends[which]

    def alive(self, which: int) -> End | None:
        end = self.end(which)
        return None if end.dead or end.closed is not None else end

    @rule(
        which=WHICH,
        sizes=SIZES,
        channel=CHANNELS,
        deadline=st.sampled_from([None, None, 0.0, 0.1, 1.0]),
        notify=st.booleans(),
        enclose=st.booleans(),
    )
    def start(
        self, which: int, sizes: list[int], channel: str, deadline: float | None, notify: bool, enclose: bool
    ) -> None:
        if (end := self.alive(which)) is not None:
            enclose = enclose and channel != "staging"
            try:
                end.start(*sizes, channel=channel, deadline=deadline, notify=notify, enclose=enclose)
            except ClosedError:
                pass

    @rule(which=WHICH, deadline=st.sampled_from([None, None, 0.0, 0.1, 1.0]))
    def hold(self, which: int, deadline: float | None) -> None:
        if (end := self.alive(which)) is not None:
            try:
                end.hold(deadline=deadline)
            except ClosedError:
                pass

    @rule(which=WHICH, pick=st.integers(0, 100), deadline=st.sampled_from([None, None, 0.0, 1.0]), go=st.booleans())
    def leave_hold(self, which: int, pick: int, deadline: float | None, go: bool) -> None:
        """A held call goes, also when the end says goodbye, or is cancelled."""
        if (end := self.alive(which)) is not None and (waiting := sorted(end.held - set(end.ended))):
            held = waiting[pick % len(waiting)]
            if go:
                end.go(held, deadline=deadline)
            else:
                end.command(CancelCall(held))

    @rule(which=WHICH, pick=st.integers(0, 100))
    def cancel(self, which: int, pick: int) -> None:
        if (end := self.alive(which)) is not None and end.calls:
            end.command(CancelCall(1 + pick % end.calls))

    @rule(which=WHICH, sizes=SIZES, channel=CHANNELS, pick=st.integers(0, 100), enclose=st.booleans())
    def finish(self, which: int, sizes: list[int], channel: str, pick: int, enclose: bool) -> None:
        if (end := self.alive(which)) is not None and end.running:
            call = sorted(end.running)[pick % len(end.running)]
            end.finish(call, *sizes, channel=channel, enclose=enclose and channel != "staging")

    @rule(which=WHICH)
    def fail(self, which: int) -> None:
        if (end := self.alive(which)) is not None and end.running:
            end.fail(min(end.running))

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.02, 0.1, 1.0]))
    def wait(self, seconds: float) -> None:
        self.pair.drive_bounded(seconds)

    @rule(which=WHICH, channels=st.sets(st.sampled_from(["shared_memory", "ucx"])))
    def unopenable(self, which: int, channels: set[str]) -> None:
        self.end(which).unopenable = channels

    @rule(which=WHICH, every=st.sampled_from([0, 2, 3]))
    def no_memory(self, which: int, every: int) -> None:
        self.end(which).no_memory = lambda key: bool(every) and key.call % every == 0

    @rule(on=st.booleans())
    def repeat(self, on: bool) -> None:
        self.pair.repeat = lambda name, number: on and number % 2 == 0

    @rule(which=WHICH)
    def goodbye(self, which: int) -> None:
        if (end := self.alive(which)) is not None:
            end.command(Goodbye())

    @precondition(lambda self: not self.harmed)
    @rule(which=WHICH, how=st.sampled_from(["kill", "vanish", "cut", "drop", "abort"]), go=st.integers(0, 3))
    def harm(self, which: int, how: str, go: int) -> None:
        if go or self.alive(which) is None:
            return  # so that most runs get far first
        self.harmed = True
        name, at = self.end(which).name, self.pair._sent[self.end(which).name]
        match how:
            case "kill":
                self.pair.kill(self.end(which))
            case "vanish":
                self.pair.kill(self.end(which), seen=False)
            case "cut":
                self.pair.cut()
            case "drop":
                self.pair.drop = lambda one, number: one == name and number == at
            case "abort":
                self.end(which).command(Abort("enough"))

    @invariant()
    def statistics_are_sane(self) -> None:
        if not hasattr(self, "pair"):
            return
        for end in self.pair.ends:
            numbers = dataclasses.asdict(end.connection.statistics())
            assert all(value >= 0 for name, value in numbers.items() if name not in ("state", "available")), numbers

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        for end in self.pair.ends:
            end.manual = False
        for _ in range(30):
            for which in (0, 1):
                while (end := self.alive(which)) is not None and (waiting := end.held - set(end.ended)):
                    end.go(max(waiting))
                while (end := self.alive(which)) is not None and end.running and not end.delay:
                    end.finish(min(end.running))
                if (end := self.alive(which)) is not None:
                    for call in list(end.running):
                        end.finish(call)
            self.pair.drive_bounded(1.0)
        self.pair.check_quiet()
        farewells = [end.connection._farewell for end in self.pair.ends]
        said = any(farewell.leaving or farewell.heard for farewell in farewells)
        if not self.harmed:
            for end in self.pair.ends:
                assert end.closed == (Closed(graceful=True) if said else None)
                assert all(one.outcome is not Outcome.PEER_LOST for one in end.ended.values())


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def _planned(end: End, choose: random.Random, launch: Launch) -> tuple[BufferHeader, ...]:
    key, size = Key(launch.call, False, Side.REPLY), choose.choice([0, 90, 3000])
    return end.headers(key, size, channel="shared_memory", enclose=choose.random() < 0.3)


def _storm(seed: int) -> Pair:
    """Plain random work without Hypothesis: many calls, all faults that leave the link whole."""
    choose = random.Random(seed)
    pair = Pair(seed=seed, limits=LIMITS)
    for end in pair.ends:
        end.delay, end.chunk = 0.2, 100
        end.unopenable = {choose.choice(["ucx", "shared_memory"])}
        end.plan = functools.partial(_planned, end, choose)
    for _ in range(60):
        end = choose.choice(pair.ends)
        sizes, deadline = (choose.choice([0, 5, 700]), choose.choice([1, 2500])), choose.choice([None, 1.0])
        end.start(*sizes, deadline=deadline, channel="ucx", enclose=choose.random() < 0.3)
        if choose.random() < 0.2:
            end.command(CancelCall(choose.randint(1, end.calls)))
        pair.drive_bounded(choose.choice([0.0, 0.1]))
    pair.drive_bounded(60.0)
    pair.check_quiet()
    return pair


def test_a_storm_replays_from_its_seed() -> None:
    first, again, other = _storm(1), _storm(1), _storm(2)
    assert first.trace == again.trace
    assert first.trace != other.trace
    assert {one.outcome for one in first.a.ended.values()} >= {Outcome.VALUE, Outcome.DEADLINE}


# Frames ---------------------------------------------------------------------------------------------------------------


def _open_end(initiator: bool) -> tuple[Connection, bytes]:
    """An open end with a call of each direction under way, and the session that its peer would use."""
    pair = Pair(limits=LIMITS)
    pair.a.manual = pair.b.manual = True
    pair.drive_bounded(0.2)
    for end in pair.ends:
        end.start(8)
        pair.drive_bounded(0.2)
        end._watch = lambda key, index, header: None  # type: ignore[method-assign]
        end.start(8, 20)
    pair.drive_bounded(0.2)
    end = pair.a if initiator else pair.b
    return end.connection, end.connection._peer_session


@given(st.booleans(), st.lists(frame_lists, max_size=4))
def test_random_frames_never_raise(initiator: bool, batch: list[list[bytes]]) -> None:
    for connection in (
        _open_end(initiator)[0],
        Connection(initiator=initiator, hello={}, session=bytes(16), limits=LIMITS, now=0.0),
    ):
        for frames in batch:
            connection.receive(frames, 101.0)
            connection.drain()


@given(st.booleans(), st.lists(near_message | any_message, min_size=1, max_size=8), st.data())
@settings(max_examples=300, deadline=None)
def test_messages_in_any_order_never_raise_and_end_in_order(
    initiator: bool, batch: list[messages.Message], data: st.DataObject
) -> None:
    connection, session = _open_end(initiator)
    for offset, message in enumerate(batch):
        sequence = connection.statistics().messages_received + data.draw(st.sampled_from([0, 0, 0, 0, -1, 1]))
        frames = [bytearray(frame) for frame in encode(message, max(0, sequence), session)]
        if data.draw(st.integers(0, 4)) == 0:
            frames[0][data.draw(st.integers(0, len(frames[0]) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        connection.receive([bytes(frame) for frame in frames], 101.0 + offset)
    effects = connection.drain()
    closed = [effect for effect in effects if isinstance(effect, Closed)]
    stats = connection.statistics()
    assert len(closed) == (stats.state == "closed")
    if closed:
        assert effects[-1] is closed[0]
        assert (stats.calls, stats.serving, stats.waiting, stats.sending) == (0, 0, 0, 0)


# Wrong commands and facts ---------------------------------------------------------------------------------------------

_calls = st.integers(-2, 4)
_headers = st.builds(
    BufferHeader, st.integers(-1, 9), st.just("cpu"), st.sampled_from(["staging", "x"]), st.just("cpu")
)
_keys = st.builds(Key, _calls, st.booleans(), st.sampled_from(Side))
_commands = st.one_of(
    st.builds(StartCall, _calls, st.just("f"), st.just(b""), st.lists(_headers, max_size=2).map(tuple)),
    st.builds(
        StartCall,
        _calls,
        st.just("f"),
        deadline=st.sampled_from([None, 102.0, float("nan")]),
        notify=st.booleans(),
        held=_calls,
        body=st.just(b""),
    ),
    st.builds(
        HoldCall, _calls, st.sampled_from(["f", "x" * 1000]), st.sampled_from([None, 100.0, 103.0, float("nan")])
    ),
    st.builds(CancelCall, _calls),
    st.builds(FinishCall, _calls, st.just(b""), st.lists(_headers, max_size=2).map(tuple)),
    st.builds(FailCall, _calls, st.just("E"), st.just("m")),
)
_facts = st.one_of(
    st.builds(DataReady, _keys, st.integers(-1, 3), st.integers(-1, 9), st.binary(max_size=9)),
    st.builds(StreamsGranted, _keys),
    st.builds(NoMemory, _keys, st.just("")),
    st.builds(OpenFailed, _keys, st.integers(-1, 3), st.just("")),
    st.builds(Pulled, _keys, st.integers(-1, 3)),
    st.builds(Released, _keys),
)


@given(st.booleans(), st.lists(st.one_of(_commands, _facts), max_size=10))
@settings(max_examples=300, deadline=None)
def test_what_raises_has_changed_nothing(initiator: bool, inputs: list[object]) -> None:
    connection, _ = _open_end(initiator)
    for one in inputs:
        connection.drain()
        before, timeout = connection.statistics(), connection.next_timeout()
        try:
            if isinstance(one, StartCall | HoldCall | CancelCall | FinishCall | FailCall):
                connection.command(one, 101.0)
            else:
                connection.fact(one, 101.0)  # type: ignore[arg-type]
        except LocalProtocolError:
            assert connection.drain() == []
            assert connection.statistics() == before
            assert connection.next_timeout() == timeout


# The parts ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(-1, 41), st.integers(-1, 12)), max_size=30))
def test_coverage_is_a_set_of_bytes(total: int, ranges: list[tuple[int, int]]) -> None:
    coverage, model = Coverage(total), set[int]()
    for offset, length in ranges:
        wanted = set(range(offset, offset + length))
        fits = length > 0 and offset >= 0 and offset + length <= total and not wanted & model
        try:
            coverage.add(offset, length)
        except Malformed:
            assert not fits
        else:
            assert fits
            model |= wanted
        assert coverage.covered == len(model)
        assert coverage.complete == (len(model) == total)


@given(st.integers(1, 10**6), st.data())
def test_credit_never_runs_dry_and_never_runs_over(window: int, data: st.DataObject) -> None:
    sender, receiver = SendWindow(window), ReceiveWindow(window)
    held: list[int] = []
    for cost in data.draw(st.lists(st.integers(256, 2 * 10**6), max_size=20)):
        while not sender.admits(cost):
            assert held, "the sender waits for a receiver that holds nothing"
            receiver.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
            if told := receiver.due():
                sender.give_back(told)
        sender.take(cost)
        receiver.accept(cost)  # never a fault of a sender that keeps to its window
        held.append(cost)
        assert sender.outstanding == receiver.held + receiver.owed
    with_too_much = sender.outstanding + 1
    try:
        sender.give_back(with_too_much)
    except RemoteProtocolError:
        return
    raise AssertionError("more credit came back than was used")


def test_credit_saved_up_does_not_hold_back_a_message_of_nearly_the_window() -> None:
    sender, receiver = SendWindow(8 * 2**20), ReceiveWindow(8 * 2**20)
    for cost in (900_000, 8 * 2**20 - 1):
        assert sender.admits(cost)
        sender.take(cost)
        receiver.accept(cost)
        receiver.release(cost)
        if told := receiver.due():
            sender.give_back(told)


@given(
    st.integers(1, 4),
    st.sampled_from([(32, 0), (32, 2**31 - 2), (32, 2**32 - 2), (64, 2**64 - 2)]),
    st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=40),
)
def test_slots_are_free_exactly_after_their_generation(
    capacity: int, width: tuple[int, int], steps: list[tuple[bool, int]]
) -> None:
    bits, first = width
    table, words, leased = SlotTable(capacity, bits=bits, first=first), [first] * capacity, dict[int, int]()
    for lease, pick in steps:
        if lease:
            slot = table.lease()
            assert (slot is None) == (len(leased) == capacity)
            if slot is not None:
                assert slot.word not in leased
                assert slot.generation == (words[slot.word] + 1) % 2**bits
                leased[slot.word] = slot.generation
        elif leased:
            word = sorted(leased)[pick % len(leased)]
            assert not table.observe(word, words[word]), "an old generation frees nothing"
            words[word] = leased.pop(word)
            assert table.observe(word, words[word])
            assert not table.observe(word, words[word]), "freed once"
        assert {slot.word: slot.generation for slot in table.leased()} == leased
        assert len(table) == len(leased)
    assert table.quarantine() == len(leased)
    assert len(table) == 0


@given(st.lists(st.tuples(st.sampled_from("ads"), st.integers(0, 50), st.integers(0, 20)), max_size=200))
def test_deadlines_are_a_sorted_map(steps: list[tuple[str, int, int]]) -> None:
    deadlines, model, fresh, now = Deadlines(), dict[int, float](), 0, 0.0
    for what, pick, when in steps:
        if what == "a":
            fresh += 1
            deadlines.add(fresh, now + when)
            model[fresh] = now + when
        elif what == "d":
            deadlines.discard(pick)
            model.pop(pick, None)
        else:
            now += when / 4
            due = sorted((at, call) for call, at in model.items() if at <= now)
            assert deadlines.expired(now) == [call for _, call in due]
            for _, call in due:
                del model[call]
        assert len(deadlines.known) == len(model)
        assert deadlines.next() == min(model.values(), default=None)
