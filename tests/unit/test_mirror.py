"""The client's copy of the index: what events, resyncs and own writes do to it. Events are the protocol's own messages."""

from __future__ import annotations

import threading
import time

from kvpool.client.mirror_index import OLD_GRACE_S, MirrorIndex
from kvpool.client.peers import STATE_DOWN, STATE_JOINING, STATE_UP, Peers
from kvpool.core.keys import pack_keys, split_keys
from kvpool.core.types import MissCause, NamespaceUid, Tiers
from kvpool.transport.base import LinkOptions
from kvpool.v1 import master_pb2 as pb

UID, OTHER = NamespaceUid(b"n" * 16), NamespaceUid(b"o" * 16)
DRAM, SSD = int(Tiers.DRAM), int(Tiers.SSD)


def packed(*numbers: int) -> bytes:
    return pack_keys(b"".join(number.to_bytes(32, "big") for number in numbers), shard=0)


def keys(*numbers: int) -> list[bytes]:
    return split_keys(packed(*numbers))


class Mirrored:
    """A mirror index that is fed by hand, with a clock of its own."""

    def __init__(self, *uids: NamespaceUid, bytes_max: int = 1 << 30) -> None:
        self.now = 100.0
        self.peers = Peers(host_id="here", options=LinkOptions())
        self.index = MirrorIndex(self.peers, bytes_max=bytes_max, now_s=lambda: self.now)
        self.epoch, self.seq = 1, 0
        self.uids = uids or (UID,)
        for uid in self.uids:
            assert self.index.want(uid)
        self.index.begin_stream()

    def tell(self, **event: object) -> list[NamespaceUid]:
        self.seq += 1
        return self.index.apply(pb.WatchEvent(epoch=self.epoch, seq=self.seq, **event), frozenset(self.uids))

    def holder(self, number: int, worker: str, incarnation: int = 1, state: int = STATE_UP) -> None:
        self.tell(holder=pb.HolderInfo(holder=number, worker_id=worker, incarnation=incarnation, host_id="here", state=state))

    def change(self, holder: int, *numbers: int, tiers: int = DRAM, uid: NamespaceUid = UID) -> list[NamespaceUid]:
        return self.tell(change=pb.IndexChange(namespace=uid, holder=holder, keys=packed(*numbers),
                                               tiers=bytes([tiers]) * len(numbers)))  # fmt: skip

    def snapshot(self, *, end: bool = True) -> None:
        """An empty snapshot."""
        self.tell(resync=True)
        if end:
            self.tell(snapshot_end=True)

    def where(self, *numbers: int, uid: NamespaceUid = UID) -> list[dict[str, int]] | None:
        """Per key: worker -> tiers."""
        found = self.index.locate(uid, keys(*numbers))
        if found is None:
            return None
        return [{self.peers.worker_id(peer): tiers for peer, tiers in candidates} for candidates in found]


def test_nothing_is_answered_before_the_first_snapshot_is_complete() -> None:
    mirror = Mirrored()
    mirror.tell(resync=True)
    mirror.holder(1, "w1")
    mirror.change(1, 1, 2)
    assert mirror.where(1) is None
    assert mirror.index.match(UID, keys(1)) is None
    mirror.tell(snapshot_end=True)
    assert mirror.where(1, 2, 3) == [{"w1": DRAM}, {"w1": DRAM}, {}]
    assert mirror.index.match(UID, keys(1, 2, 3)) == 2


def test_changes_come_and_go() -> None:
    mirror = Mirrored()
    mirror.snapshot()
    mirror.holder(1, "w1")
    mirror.holder(2, "w2")
    mirror.change(1, 1)
    mirror.change(2, 1, tiers=SSD)
    assert mirror.where(1) == [{"w1": DRAM, "w2": SSD}]
    mirror.change(1, 1, tiers=0)
    assert mirror.where(1) == [{"w2": SSD}]
    mirror.tell(change=pb.IndexChange(namespace=UID, all=True))
    assert mirror.where(1) == [{}]


def test_a_retired_holder_takes_its_entries_along() -> None:
    mirror = Mirrored()
    mirror.snapshot()
    mirror.holder(1, "w1")
    mirror.change(1, 1)
    mirror.tell(retired=1)
    assert mirror.where(1) == [{}]
    mirror.change(1, 2)
    assert mirror.where(2) == [{}], "a late change of a holder that is gone is no entry"


def test_a_new_inventory_of_one_worker_never_leaves_a_hole() -> None:
    mirror = Mirrored()
    mirror.snapshot()
    mirror.holder(1, "w1")
    mirror.change(1, 1, 2)
    mirror.holder(2, "w1")
    mirror.change(2, 1)
    assert mirror.where(1, 2) == [{"w1": DRAM}, {"w1": DRAM}]
    mirror.tell(retired=1)
    assert mirror.where(1, 2) == [{"w1": DRAM}, {}]


def test_a_new_master_does_not_empty_it() -> None:
    mirror = Mirrored()
    mirror.snapshot()
    mirror.holder(7, "w1")
    mirror.holder(8, "w2")
    mirror.change(7, 1, 2)
    mirror.change(8, 3)
    mirror.epoch, mirror.seq = 2, 0
    mirror.tell(resync=True)
    assert mirror.where(1, 2, 3) == [{"w1": DRAM}, {"w1": DRAM}, {"w2": DRAM}]
    mirror.holder(1, "w2", state=STATE_JOINING)  # numbers begin again in the new epoch
    mirror.change(1, 3)
    assert mirror.where(1, 2, 3) == [{"w1": DRAM}, {"w1": DRAM}, {"w2": DRAM}]
    mirror.tell(snapshot_end=True)
    assert mirror.where(1, 2) == [{"w1": DRAM}] * 2, "the new master has not heard of w1 yet"
    mirror.holder(2, "w1", state=STATE_JOINING)
    mirror.change(2, 1)
    assert mirror.where(1, 2) == [{"w1": DRAM}] * 2, "w1 is still telling what it has"
    mirror.holder(2, "w1", state=STATE_UP)
    assert mirror.where(1, 2, 3) == [{"w1": DRAM}, {}, {"w2": DRAM}]


def test_a_worker_that_came_back_as_another_incarnation_has_only_what_it_says() -> None:
    mirror = Mirrored()
    mirror.snapshot()
    mirror.holder(1, "w1", incarnation=1)
    mirror.change(1, 1, 2)
    mirror.epoch = 2
    mirror.tell(resync=True)
    mirror.holder(1, "w1", incarnation=2)
    mirror.change(1, 2, tiers=SSD)
    mirror.tell(snapshot_end=True)
    assert mirror.where(1, 2) == [{}, {"w1": SSD}]


def test_a_worker_that_never_comes_back_is_forgotten_after_a_while() -> None:
    mirror = Mirrored()
    mirror.snapshot()
    mirror.holder(1, "w1")
    mirror.change(1, 1)
    mirror.epoch = 2
    mirror.snapshot()
    mirror.now += OLD_GRACE_S - 1
    mirror.tell(heartbeat=True)
    assert mirror.where(1) == [{"w1": DRAM}]
    mirror.now += 2
    mirror.tell(heartbeat=True)
    assert mirror.where(1) == [{}]


def test_own_writes_are_seen_at_once_and_survive_a_resync_until_the_worker_is_back() -> None:
    mirror = Mirrored()
    mirror.snapshot()
    mirror.holder(1, "w1")
    peer = mirror.peers.find("w1", 1)
    assert peer is not None
    mirror.index.wrote(UID, peer.number, packed(5))
    assert mirror.where(5) == [{"w1": DRAM}]
    mirror.epoch = 2
    mirror.tell(resync=True)
    mirror.index.wrote(UID, peer.number, packed(6))
    mirror.tell(snapshot_end=True)
    assert mirror.where(5, 6) == [{"w1": DRAM}] * 2, "unlisted blocks: the master was away"
    mirror.holder(1, "w1", state=STATE_JOINING)
    mirror.change(1, 5, 6)
    mirror.holder(1, "w1")
    assert mirror.where(5, 6) == [{"w1": DRAM}] * 2


def test_what_a_worker_denies_is_not_asked_of_it_again() -> None:
    mirror = Mirrored()
    mirror.snapshot()
    mirror.holder(1, "w1")
    mirror.holder(2, "w2")
    mirror.change(1, 1)
    mirror.change(2, 1)
    peer = mirror.peers.find("w1", 1)
    assert peer is not None
    mirror.index.stale(UID, peer.number, packed(1))
    assert mirror.where(1) == [{"w2": DRAM}]
    mirror.index.forget(UID, keys(1))
    assert mirror.where(1) == [{}]


def test_a_stream_goes_on_where_it_was_and_never_in_the_middle_of_a_snapshot() -> None:
    mirror = Mirrored()
    assert mirror.index.begin_stream() == ([UID], 0, 0)
    mirror.tell(resync=True)
    mirror.holder(1, "w1")
    mirror.change(1, 1)
    assert mirror.index.begin_stream() == ([UID], 0, 0)
    mirror.tell(snapshot_end=True)
    mirror.change(1, 2)
    assert mirror.index.begin_stream() == ([UID], 1, mirror.seq)
    assert mirror.index.want(OTHER)
    mirror.change(1, 3)  # of the stream that is about to end: says nothing about the new one
    assert mirror.index.begin_stream() == (sorted([UID, OTHER]), 0, 0)


def test_what_is_too_large_is_not_mirrored_the_others_stay() -> None:
    mirror = Mirrored(UID, OTHER, bytes_max=2_000_000)
    mirror.snapshot()
    mirror.holder(1, "w1")
    mirror.change(1, 1, 2, uid=OTHER)
    over: list[NamespaceUid] = []
    for start in range(0, 40_960, 8_192):
        over += mirror.change(1, *range(start, start + 8_192))
    assert over == [UID]
    assert mirror.where(1) is None
    assert mirror.where(1, 2, uid=OTHER) == [{"w1": DRAM}] * 2
    assert not mirror.index.want(UID), "it would only be thrown away again"
    assert mirror.index.begin_stream()[0] == [OTHER]
    assert mirror.index.sizes()["bytes"] < 2_000_000


def test_a_waiter_wakes_with_the_last_block() -> None:
    mirror = Mirrored()
    mirror.snapshot()
    mirror.holder(1, "w1")
    mirror.index._now_s = time.monotonic
    found: list[int | None] = []
    waiter = threading.Thread(
        target=lambda: found.append(mirror.index.wait_match(UID, keys(1, 2), deadline=time.monotonic() + 30))
    )
    waiter.start()
    mirror.change(1, 1)
    assert not found
    mirror.change(1, 2)
    waiter.join(20)
    assert found == [2]


def test_a_waiter_ends_with_its_deadline_and_with_the_client() -> None:
    mirror = Mirrored()
    mirror.snapshot()
    assert mirror.index.wait_match(UID, keys(1), deadline=mirror.now) == 0
    mirror.index.close()
    assert mirror.index.wait_match(UID, keys(1), deadline=mirror.now + 1000) is None


def test_states_of_workers_decide_what_reading_them_costs() -> None:
    mirror = Mirrored()
    mirror.snapshot()
    mirror.holder(1, "w1")
    peer = mirror.peers.find("w1", 1)
    assert peer is not None
    assert mirror.peers.cost(peer.number) == 0
    mirror.holder(1, "w1", state=STATE_DOWN)
    assert mirror.peers.cost(peer.number) is MissCause.WORKER_LOST
    mirror.holder(1, "w1", state=STATE_UP)
    mirror.holder(2, "w1", incarnation=2)
    assert mirror.peers.cost(peer.number) is MissCause.WORKER_LOST, "a newer incarnation ends the older one"
    assert mirror.peers.cost(12345) is MissCause.WORKER_LOST
