"""Links to workers that are late, wrong, half there or gone: every call ends by its deadline, with the right cause, and
nobody's answer is taken for another's."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import numpy as np
import pytest
import xxhash

from kvpool.core.frames import READ_ENTRY, CodesAnswer, Header, Op, ReadAnswer, ReadRequest, Status
from kvpool.core.keys import KeyBatch
from kvpool.core.types import BlockCode, MissCause, NamespaceUid, Tiers, miss_code
from kvpool.errors import InvalidArgument, Unauthenticated, VersionMismatch
from kvpool.transport.base import LinkCause, LinkError, LinkOptions, WorkerLink
from kvpool.transport.tcp import TcpLink
from tests.support.frame_peer import FramePeer

UID = NamespaceUid(b"n" * 16)
SIZE = 1000
LATER = int(BlockCode.LATER)


def batch(n: int) -> KeyBatch:
    return KeyBatch(UID, b"".join(i.to_bytes(34, "little") for i in range(1, n + 1)))


def value(key: bytes) -> bytes:
    return bytes([key[0]]) * SIZE


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def buffers(n: int, size: int = SIZE) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in range(n)]


def link_to(peer: FramePeer, **more: object) -> TcpLink:
    return TcpLink(peer.address, LinkOptions(token="secret", **more), worker_id="w")  # type: ignore[arg-type]


def read_answer(codes: list[int], keys: list[bytes], *, bad: int = -1) -> tuple[bytes, bytes]:
    entries = np.zeros(len(codes), dtype=READ_ENTRY)
    entries["code"], entries["tier"] = codes, Tiers.DRAM
    hits = [i for i, code in enumerate(codes) if code == BlockCode.HIT_INLINE]
    entries["size"][hits], entries["n_sums"][hits] = SIZE, 1
    payload = [value(keys[i]) for i in hits]
    sums = np.array([xxhash.xxh3_64_intdigest(data) for data in payload], dtype=np.uint64)
    if bad >= 0:
        payload[bad] = bytes(SIZE)
    return ReadAnswer(entries, sums).encode(), b"".join(payload)


def good_answer() -> tuple[bytes, bytes]:
    return read_answer([0], batch(1).split())


def serve(codes_of, **how):
    """A script that answers READ with what `codes_of(number of keys)` says."""

    def script(peer: FramePeer, sock: socket.socket, header: Header, meta: bytes, payload: bytes) -> None:
        keys = ReadRequest.decode(meta).batch.split()
        peer.answer(sock, header, *read_answer(codes_of(len(keys)), keys, **how))

    return script


def read(link: WorkerLink, n: int, outs: list[memoryview] | None = None, deadline: float | None = None, **more: object):
    return link.read(batch(n), outs or buffers(n), chunk_bytes=4096, deadline=deadline or soon(), **more)  # type: ignore[arg-type]


@pytest.fixture
def closing():
    links: list[TcpLink] = []
    yield lambda link: links.append(link) or link
    for link in links:
        link.close()


def test_blocks_arrive_and_the_connection_is_used_again(closing):
    with FramePeer(serve(lambda n: [0] * n)) as peer:
        link = closing(link_to(peer))
        for _ in range(3):
            outs = buffers(3)
            got = read(link, 3, outs)
            assert got.n_leading == 3
            assert [bytes(out) for out in outs] == [value(key) for key in batch(3).split()]
            assert got.sizes == [SIZE] * 3
            assert got.tiers == bytes([Tiers.DRAM]) * 3
        assert peer.n_connections == 1
        assert isinstance(link, WorkerLink)
        assert link.counters.read_bytes == 9 * SIZE


def test_what_comes_later_is_asked_again(closing):
    asked = []

    def codes_of(n: int) -> list[int]:
        asked.append(n)
        return [0] * min(2, n) + [LATER] * (n - 2)

    with FramePeer(serve(codes_of)) as peer:
        outs = buffers(5)
        assert read(closing(link_to(peer)), 5, outs).n_leading == 5
        assert asked == [5, 3, 1]
        assert [bytes(out) for out in outs] == [value(key) for key in batch(5).split()]


def test_a_worker_that_puts_everything_off_is_not_asked_for_ever(closing):
    with FramePeer(serve(lambda n: [LATER] * n)) as peer, pytest.raises(LinkError) as caught:
        read(closing(link_to(peer)), 2)
    assert caught.value.cause is LinkCause.BUSY


def test_after_the_first_miss_nothing_is_asked(closing):
    miss = miss_code(MissCause.EVICTED)
    with FramePeer(serve(lambda n: [0, miss] + [LATER] * (n - 2))) as peer:
        got = read(closing(link_to(peer)), 4, first_miss=True)
    assert got.codes == bytes([0, miss, LATER, LATER])
    assert got.n_leading == 1


def test_a_wrong_byte_is_a_miss(closing):
    with FramePeer(serve(lambda n: [0] * n, bad=1)) as peer:
        link = closing(link_to(peer))
        got = read(link, 3)
        assert got.codes == bytes([0, miss_code(MissCause.CORRUPT), 0])
        assert got.n_leading == 1
        assert link.counters.corrupt_blocks == 1


@pytest.mark.parametrize("length", [0, (3 << 20) - 5], ids=["whole", "range"])
@pytest.mark.parametrize("flipped", [None, 0, 1_600_000, (3 << 20) - 7])
def test_large_blocks_are_checked_to_the_last_byte(closing, length, flipped):
    size, chunk = (3 << 20), 1 << 18
    data = np.random.default_rng(1).bytes(size)

    def script(peer: FramePeer, sock: socket.socket, header: Header, meta: bytes, payload: bytes) -> None:
        entries = np.zeros(1, dtype=READ_ENTRY)
        entries["size"], sent = size, bytearray(data[:length] if length else data)
        sums = [xxhash.xxh3_64_intdigest(sent)] if length else [xxhash.xxh3_64_intdigest(c) for c in np.split(np.array(sent), 12)]
        entries["n_sums"] = len(sums)
        if flipped is not None:
            sent[flipped] ^= 1
        peer.answer(sock, header, ReadAnswer(entries, np.array(sums, dtype=np.uint64)).encode(), bytes(sent))

    with FramePeer(script) as peer:
        outs = buffers(1, length or size)
        got = closing(link_to(peer)).read(batch(1), outs, chunk_bytes=chunk, deadline=soon(), byte_range=(0, length))
    assert got.codes[0] == (0 if flipped is None else miss_code(MissCause.CORRUPT))
    assert flipped is not None or bytes(outs[0]) == data[: length or size]


def test_a_buffer_that_is_too_small_is_refused_and_untouched(closing):
    with FramePeer(serve(lambda n: [0] * n)) as peer:
        outs = [*buffers(1), memoryview(bytearray(SIZE - 1)), *buffers(1, SIZE + 5)]
        got = read(closing(link_to(peer)), 3, outs)
    assert got.codes == bytes([0, BlockCode.REJECTED, 0])
    assert got.sizes == [SIZE] * 3
    assert bytes(outs[1]) == bytes(SIZE - 1)
    assert bytes(outs[2]) == value(batch(3).split()[2]) + bytes(5)


def test_silence_costs_the_deadline_and_the_late_answer_is_nobodys(closing):
    def script(peer: FramePeer, sock: socket.socket, header: Header, meta: bytes, payload: bytes) -> None:
        keys = ReadRequest.decode(meta).batch.split()
        if len(keys) == 1:
            peer.released.wait(10)
        peer.answer(sock, header, *read_answer([0] * len(keys), keys))

    with FramePeer(script) as peer:
        link = closing(link_to(peer))
        link.connect(deadline=soon())
        start = time.monotonic()
        with pytest.raises(LinkError) as caught:
            read(link, 1, deadline=soon(0.2))
        assert caught.value.cause is LinkCause.TIMEOUT
        assert 0.15 < time.monotonic() - start < 1.5
        peer.released.set()
        assert read(link, 2).n_leading == 2
        assert peer.n_connections == 2


def test_half_an_answer_costs_the_deadline_and_keeps_what_was_checked(closing):
    def script(peer: FramePeer, sock: socket.socket, header: Header, meta: bytes, payload: bytes) -> None:
        keys = ReadRequest.decode(meta).batch.split()
        if len(keys) == 3:
            peer.answer(sock, header, *read_answer([0, LATER, LATER], keys))
            return
        meta, payload = read_answer([0] * len(keys), keys)
        head = Header(header.op, header.flags | 1 << 15, Status.OK, header.request_id, 0, len(meta), len(payload)).encode()
        sock.sendall(head + meta + payload[: SIZE // 2])
        peer.released.wait(10)

    with FramePeer(script) as peer:
        got = read(closing(link_to(peer)), 3, deadline=soon(0.3))
    timeout = miss_code(MissCause.TIMEOUT)
    assert got.codes == bytes([0, timeout, timeout])
    assert got.error is not None
    assert got.error.cause is LinkCause.TIMEOUT


@pytest.mark.parametrize(
    "spoil",
    [
        lambda peer, sock, header: sock.sendall(b"GARBAGE!" * 20),
        lambda peer, sock, header: peer.answer(sock, header, *good_answer(), request_id=header.request_id + 1),
        lambda peer, sock, header: peer.answer(sock, Header(Op.PING, request_id=header.request_id)),
        lambda peer, sock, header: peer.answer(sock, header, b"short"),
        lambda peer, sock, header: peer.answer(sock, header, *read_answer([0, 0], [b"x" * 34] * 2)),
        lambda peer, sock, header: peer.answer(sock, header, read_answer([0], [b"x" * 34])[0], b"few"),
        lambda peer, sock, header: peer.answer(sock, header, read_answer([0], [b"x" * 34])[0], bytes(SIZE + 1)),
        lambda peer, sock, header: peer.answer(sock, header, read_answer([int(BlockCode.HIT_SHARED)], [b"x" * 34])[0]),
        lambda peer, sock, header: peer.answer(sock, header, read_answer([int(BlockCode.FULL)], [b"x" * 34])[0]),
    ],
    ids=["garbage", "other request", "other op", "short meta", "more entries", "less payload", "more payload", "shared over tcp",
         "no code of a read"],
)  # fmt: skip
def test_nonsense_closes_the_connection(closing, spoil):
    with FramePeer(lambda peer, sock, header, meta, payload: spoil(peer, sock, header)) as peer:
        link = closing(link_to(peer))
        for n_connections in (1, 2):
            with pytest.raises(LinkError) as caught:
                read(link, 1)
            assert caught.value.cause is LinkCause.PROTOCOL
            assert peer.n_connections == n_connections


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (Status.UNKNOWN_NAMESPACE, LinkCause.UNKNOWN_NAMESPACE),
        (Status.DEADLINE, LinkCause.TIMEOUT),
        (Status.BUSY, LinkCause.BUSY),
        (Status.NOT_READY, LinkCause.NOT_READY),
        (Status.NOT_FOUND, LinkCause.NOT_FOUND),
        (Status.BAD_REQUEST, LinkCause.BAD_REQUEST),
        (Status.INTERNAL, LinkCause.INTERNAL),
    ],
)
def test_a_refusal_has_its_cause_and_leaves_the_connection(closing, status, cause):
    with FramePeer(lambda peer, sock, header, meta, payload: peer.answer(sock, header, b"because", status=status)) as peer:
        link = closing(link_to(peer))
        for _ in range(2):
            with pytest.raises(LinkError, match="because") as caught:
                link.drop(batch(1), deadline=soon())
            assert caught.value.cause is cause
        assert peer.n_connections == 1
        assert link.counters.errors == 2


def refuse(status: Status, reason: bytes, request_id: int | None = None):
    return lambda peer, sock, header, meta, payload: peer.answer(sock, header, reason, status=status, request_id=request_id)


def raw_version(peer, sock, header, meta, payload):
    sock.sendall(header.encode()[:4] + b"\x09" + bytes(35))


@pytest.mark.parametrize(
    ("hello", "error", "message"),
    [
        (refuse(Status.UNAUTHENTICATED, b"wrong token"), Unauthenticated, "wrong token"),
        (refuse(Status.VERSION, b"versions 2, 3 are spoken here"), VersionMismatch, "2, 3.*frame version 1"),
        (refuse(Status.VERSION, b"unread", 0), VersionMismatch, "unread"),
        (raw_version, VersionMismatch, "version 9.*speaks 1"),
        (refuse(Status.BUSY, b"full", 0), LinkError, "full"),
        (lambda peer, sock, header, meta, payload: peer.answer(sock, header, b"[]"), LinkError, "greeting"),
    ],
    ids=["token", "version", "version unread", "raw version", "busy", "nonsense"],
)
def test_a_refused_greeting_says_why(closing, hello, error, message):
    with FramePeer(lambda *_: None, hello=hello) as peer, pytest.raises(error, match=message):
        closing(link_to(peer)).connect(deadline=soon())


def test_a_worker_that_closes_is_known_at_once(closing):
    with FramePeer(lambda peer, sock, header, meta, payload: sock.shutdown(socket.SHUT_RDWR)) as peer:
        link = closing(link_to(peer))
        start = time.monotonic()
        with pytest.raises(LinkError) as caught:
            read(link, 1, deadline=soon(10))
    assert caught.value.cause is LinkCause.CLOSED
    assert time.monotonic() - start < 5
    with pytest.raises(LinkError) as caught:
        read(link, 1)
    assert caught.value.cause is LinkCause.REFUSED


def test_another_incarnation_is_refused(closing):
    with FramePeer(serve(lambda n: [0] * n)) as peer:
        link = closing(TcpLink(peer.address, LinkOptions(), incarnation=78))
        with pytest.raises(LinkError) as caught:
            read(link, 1)
    assert caught.value.cause is LinkCause.RESTARTED


def test_an_idle_connection_that_was_closed_is_replaced(closing):
    with FramePeer(serve(lambda n: [0] * n)) as peer:
        link = closing(link_to(peer))
        assert read(link, 1).n_leading == 1
        peer._sockets[0].shutdown(socket.SHUT_RDWR)
        assert read(link, 1).n_leading == 1
        assert peer.n_connections == 2


def test_closing_ends_calls_under_way():
    begun = threading.Event()

    def script(peer: FramePeer, sock: socket.socket, header: Header, meta: bytes, payload: bytes) -> None:
        begun.set()
        peer.released.wait(20)

    with FramePeer(script) as peer:
        link = link_to(peer)
        failed: list[LinkError] = []

        def call() -> None:
            try:
                link.stat(deadline=soon(20))
            except LinkError as error:
                failed.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        assert begun.wait(5)
        start = time.monotonic()
        link.close()
        thread.join(5)
        assert not thread.is_alive()
        assert time.monotonic() - start < 5
        assert failed[0].cause is LinkCause.CLOSED
        with pytest.raises(LinkError):
            link.stat(deadline=soon())


def test_lanes_share_a_bulk_read(closing):
    sizes = 1 << 20
    n = 16
    seen: list[int] = []

    def script(peer: FramePeer, sock: socket.socket, header: Header, meta: bytes, payload: bytes) -> None:
        keys = ReadRequest.decode(meta).batch.split()
        seen.append(len(keys))
        entries = np.zeros(len(keys), dtype=READ_ENTRY)
        entries["tier"], entries["size"], entries["n_sums"] = Tiers.SSD, sizes, sizes // 4096
        data = [bytes([key[0]]) * sizes for key in keys]
        sums = [xxhash.xxh3_64_intdigest(d[:4096]) for d in data for _ in range(sizes // 4096)]
        peer.answer(sock, header, ReadAnswer(entries, np.array(sums, dtype=np.uint64)).encode(), b"".join(data))

    with FramePeer(script) as peer:
        outs = buffers(n, sizes)
        got = read(closing(link_to(peer, lanes=2)), n, outs, deadline=soon(20))
        assert got.n_leading == n
        assert sorted(seen) == [8, 8]
        assert all(bytes(out) == bytes([i + 1]) * sizes for i, out in enumerate(outs))


class Interrupt(Exception):
    pass


def test_an_interrupted_call_gives_up_its_connection(closing):
    """Ctrl-C, or a signal handler that raises: the answer that comes later is not the next call's."""

    def script(peer: FramePeer, sock: socket.socket, header: Header, meta: bytes, payload: bytes) -> None:
        if peer.n_connections == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
            peer.released.wait(10)
        peer.answer(sock, header, *good_answer())

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with FramePeer(script) as peer:
            link = closing(link_to(peer))
            link.connect(deadline=soon())
            with pytest.raises(Interrupt):
                read(link, 1)
            peer.released.set()
            assert read(link, 1).n_leading == 1
            assert peer.n_connections == 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_after_a_fork_the_child_is_refused(closing):
    with FramePeer(serve(lambda n: [0] * n)) as peer:
        link = closing(link_to(peer))
        link.connect(deadline=soon())
        child = os.fork()
        if child == 0:
            refused = 0
            uses = (
                lambda: read(link, 1),
                lambda: link.stat(deadline=soon()),
                lambda: link.reserve(batch(1), [1], deadline=soon()),
            )
            for call in uses:
                try:
                    call()
                except InvalidArgument as error:
                    refused += "fork" in str(error)
            link.close()
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert read(link, 1).n_leading == 1


def test_misuse_is_said_at_once(closing):
    with FramePeer(serve(lambda n: [0] * n)) as peer:
        link = closing(link_to(peer))
        with pytest.raises(InvalidArgument, match="outs"):
            link.read(batch(2), buffers(1), chunk_bytes=4096, deadline=soon())
        with pytest.raises(InvalidArgument, match="blocks"):
            link.write(batch(2), buffers(1), chunk_bytes=4096, wait_listed=False, deadline=soon())
        with pytest.raises(InvalidArgument, match="shm"):
            link.view(batch(1), deadline=soon())
        with pytest.raises(InvalidArgument, match="token"):
            closing(TcpLink(peer.address, LinkOptions(token="x" * 5000))).connect(deadline=soon())


def test_touch_says_whether_all_is_listed(closing):
    def script(peer: FramePeer, sock: socket.socket, header: Header, meta: bytes, payload: bytes) -> None:
        peer.answer(sock, header, CodesAnswer(bytes([1, 0]), number=1).encode())

    with FramePeer(script) as peer:
        link = closing(link_to(peer))
        touched = link.touch(batch(2), wait_listed=True, deadline=soon())
        assert (touched.tiers, touched.listed) == (bytes([1, 0]), True)
        assert link.touch(batch(2), wait_listed=False, deadline=soon()).listed is False
