"""Segments and words: sealed, checked before they are mapped, shared with another process, cyclic."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrt.errors import ClosedError, ExhaustedError, LifetimeError
from streamrt.segment import STRIDE, Segment, Word, WordTable, reached

STARTS = [(32, 0), (32, 2**31 - 100), (32, 2**32 - 100), (64, 2**32 - 100), (64, 2**63 - 100), (64, 2**64 - 100)]


def test_a_segment_is_zeroed_whole_pages_and_cannot_change_its_size():
    with Segment.create(100) as segment:
        assert segment.nbytes % os.sysconf("SC_PAGESIZE") == 0
        assert bytes(segment.view) == bytes(segment.nbytes)
        assert segment.address % STRIDE == 0
        for size in (0, 2 * segment.nbytes):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fd, size)


@pytest.mark.parametrize("nbytes", [0, -1, 2**30 + 1])
def test_an_impossible_size_is_refused(nbytes):
    with pytest.raises(ValueError, match="not possible"):
        Segment.create(nbytes)


def test_attach_maps_the_same_memory():
    with Segment.create(4096) as segment, Segment.attach(os.dup(segment.fd)) as other:
        Word(segment, 128).store(7)
        assert Word(other, 128).load() == 7
        assert other.address != segment.address


def _unsealed() -> int:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    return fd


def _regular() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(4096)
        return os.dup(file.fileno())


def _odd() -> int:
    import fcntl

    fd = os.memfd_create("odd", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 100)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


@pytest.mark.parametrize(
    ("make", "message"), [(_unsealed, "can still change its size"), (_regular, "is no memfd"), (_odd, "has 100 bytes")]
)
def test_attach_refuses_what_could_fault_later_and_closes_it(make, message):
    fd = make()
    with pytest.raises(ValueError, match=message):
        Segment.attach(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_close_is_idempotent_and_a_late_use_says_so():
    segment = Segment.create(4096)
    word = Word(segment, 0)
    fd = segment.fd
    segment.close()
    segment.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    for use in (word.load, lambda: word.store(1), lambda: word.lost, word.mark_lost):
        with pytest.raises(LifetimeError, match="after its segment was closed"):
            use()
    with pytest.raises(ClosedError):
        Word(segment, 0)
    assert "unmapped" in repr(word)


def test_a_dropped_segment_gives_its_descriptor_back():
    segment = Segment.create(4096)
    fd = segment.fd
    del segment
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_words_do_not_touch_each_other():
    with Segment.create(4096) as segment:
        words = [
            Word(segment, offset, bits) for offset, bits in zip(range(0, 4096, STRIDE), [32, 64] * 32, strict=True)
        ]
        for word in words:
            word.store(2**word.bits - 1)
            word.mark_lost()
        for word in words[1::2]:
            word.reset(5)
        assert [word.load() for word in words] == [2**32 - 1, 5] * 32
        assert [word.lost for word in words] == [True, False] * 32


@pytest.mark.parametrize(("offset", "bits"), [(1, 32), (4, 32), (-64, 32), (4096, 32), (4090, 64), (0, 16)])
def test_a_word_outside_or_unaligned_is_refused(offset, bits):
    with Segment.create(4096) as segment, pytest.raises(ValueError, match="word"):
        Word(segment, offset, bits)


@given(st.sampled_from([32, 64]), st.integers(0, 2**64 - 1), st.integers(-(2**63), 2**63 - 1))
def test_reached_is_the_signed_comparison_of_the_gpu(bits, value, ahead):
    half = 1 << (bits - 1)
    ahead = (ahead + half) % (2 * half) - half  # what the driver computes: (int)(current - value) >= 0
    current = (value + ahead) % (2 * half)
    assert reached(current, value % (2 * half), bits) == (ahead >= 0)


@pytest.mark.parametrize(("bits", "start"), STARTS)
def test_reached_across_the_wrap(bits, start):
    mask = 2**bits - 1
    for step in range(200):
        current = (start + step) & mask
        assert reached(current, current, bits)
        assert not reached(current, (current + 1) & mask, bits)
        assert reached((current + 1) & mask, current, bits)
        assert reached(current, (start) & mask, bits)


@pytest.mark.parametrize(("bits", "start"), STARTS)
def test_another_process_sees_every_value_in_order(bits, start):
    """The child answers each value on a second word, and marks its own word lost when the last answer was seen."""
    child = (
        "import os, sys; from streamrt.segment import Segment, Word, reached\n"
        "fd, bits, start = map(int, sys.argv[1:]); s = Segment.attach(fd); a, b = Word(s, 0, bits), Word(s, 64, bits)\n"
        "for k in range(1, 202):\n"
        "    v = (start + k) & (2**bits - 1)\n"
        "    while not reached(a.load(), v, bits): os.sched_yield()\n"
        "    assert a.load() == v\n"
        "    if k <= 200: b.store(v)\n"
        "b.mark_lost(); b.store(start)\n"
    )
    with Segment.create(4096) as segment:
        ours, theirs = Word(segment, 0, bits), Word(segment, 64, bits)
        ours.store(start)
        theirs.store(start)
        process = subprocess.Popen(
            [sys.executable, "-c", child, str(segment.fd), str(bits), str(start)], pass_fds=(segment.fd,)
        )
        try:
            for k in range(1, 201):
                value = (start + k) & (2**bits - 1)
                ours.store(value)
                while not reached(theirs.load(), value, bits):
                    assert process.poll() is None
                    os.sched_yield()
            ours.store((start + 201) & (2**bits - 1))
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
        assert theirs.lost
        assert theirs.last_good == (start + 200) & (2**bits - 1)
        assert theirs.load() == start


def test_a_second_mark_does_not_make_the_released_value_good():
    with Segment.create(4096) as segment:
        word = Word(segment, 0)
        word.store(3)
        word.mark_lost()
        word.store(100)  # the release
        word.mark_lost()
        assert word.last_good == 3


def test_a_table_leases_each_word_once_and_fresh():
    with Segment.create(4096) as segment:
        table = WordTable(segment)
        taken: list[Word] = []
        start = threading.Barrier(4)

        def lease() -> None:
            start.wait()
            for _ in range(16):
                taken.append(table.lease())

        threads = [threading.Thread(target=lease) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({word.offset for word in taken}) == 64 == segment.nbytes // STRIDE
        with pytest.raises(ExhaustedError, match="release some or create a larger segment"):
            table.lease()
        taken[0].store(9)
        taken[0].mark_lost()
        table.release(taken[0])
        again = table.lease(64)
        assert (again.offset, again.load(), again.lost) == (taken[0].offset, 0, False)


def test_a_table_refuses_what_it_did_not_lease_and_keeps_quarantined_words():
    with Segment.create(4096) as segment, Segment.create(4096) as other:
        table = WordTable(segment)
        word = table.lease()
        table.release(word)
        for stranger in (word, Word(segment, 640), Word(other, 0)):
            with pytest.raises(LifetimeError, match="not leased"):
                table.release(stranger)
        table.quarantine(table.lease())
        assert table.free == 63
        assert word.offset not in {table.lease().offset for _ in range(63)}
