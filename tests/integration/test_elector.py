"""A master that stood still: what it says of itself until the store has told it more. The store here is the test itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvpool.core.election import LeaseTerms, Role
from kvpool.core.types import Epoch
from kvpool.errors import StoreUnavailable
from kvpool.master.election import Elector, LeaseReply, now_ms

TERMS = LeaseTerms(ttl_ms=400, renew_ms=60, margin_ms=50, poll_ms=40, reply_ms=150)
STOOD_STILL_MS = 60_000


class Store:
    """Grants epoch 1; what comes of a renewal is `renewal`'s to say."""

    def __init__(self) -> None:
        self.renewal: Callable[[], Awaitable[LeaseReply]] = self.renewed
        self.adopted: list[Epoch | None] = []

    async def take(self, *, floor: Epoch, address: str) -> LeaseReply:
        return LeaseReply(True, Epoch(1), "me", address, 400, 0)

    async def renew(self, epoch: Epoch, *, address: str) -> LeaseReply:
        return await self.renewal()

    async def release(self, epoch: Epoch) -> None: ...

    def adopt(self, epoch: Epoch | None) -> None:
        self.adopted.append(epoch)

    async def renewed(self) -> LeaseReply:
        return LeaseReply(True, Epoch(1), "me", "me:1", 400, 0)


def run(check: Callable[[Store, Elector, Callable[[], None]], Awaitable[None]]) -> None:
    """With a leader of epoch 1, and what makes its clock jump as it does for a process that was stopped."""

    async def main() -> None:
        jumped = [0]
        store = Store()
        elector = Elector(store, address="me:1", terms=TERMS, clock=lambda: now_ms() + jumped[0])

        def jump() -> None:
            jumped[0] += STOOD_STILL_MS

        task = asyncio.create_task(elector.run())
        try:
            async with asyncio.timeout(5):
                while elector.standing().role is not Role.LEADER:
                    await elector.changed(elector.standing())
                await check(store, elector, jump)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_it_says_nothing_until_the_store_has_told_it_that_another_leads() -> None:
    async def check(store: Store, elector: Elector, jump: Callable[[], None]) -> None:
        asked, told = asyncio.Event(), asyncio.Event()

        async def lost() -> LeaseReply:
            asked.set()
            await told.wait()
            return LeaseReply(False, Epoch(2), "other", "other:1", 300, 0)

        store.renewal = lost
        jump()
        assert elector.standing().role is Role.LAPSED
        answer = asyncio.create_task(elector.confirmed())
        await asked.wait()
        assert not answer.done()
        told.set()
        standing = await answer
        assert (standing.role, standing.epoch, standing.leader) == (Role.FOLLOWER, 2, "other:1")
        assert store.adopted[-1] is None

    run(check)


def test_a_request_from_before_it_stood_still_tells_nothing() -> None:
    async def check(store: Store, elector: Elector, jump: Callable[[], None]) -> None:
        asked = asyncio.Event()

        async def silent() -> LeaseReply:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        async def lost() -> LeaseReply:
            return LeaseReply(False, Epoch(2), "other", "other:1", 300, 0)

        store.renewal = silent
        await asked.wait()
        jump()  # the request is under way; its time is up as soon as the process goes on
        store.renewal = lost
        assert elector.standing().role is Role.LAPSED
        assert (await elector.confirmed()).role is Role.FOLLOWER

    run(check)


def test_with_the_store_away_it_goes_on_as_lapsed_and_without_waiting() -> None:
    async def check(store: Store, elector: Elector, jump: Callable[[], None]) -> None:
        async def away() -> LeaseReply:
            raise StoreUnavailable("store: away")

        store.renewal = away
        jump()
        assert (await elector.confirmed()).role is Role.LAPSED
        failures = elector.failures
        assert failures > 0
        for _ in range(100):
            assert (await elector.confirmed()).role is Role.LAPSED
        assert elector.failures == failures  # nobody waited for another request
        store.renewal = store.renewed
        while elector.standing().role is not Role.LEADER:
            await elector.changed(elector.standing())
        assert (await elector.confirmed()).epoch == 1

    run(check)


def test_when_it_cannot_find_out_it_does_not_lead() -> None:
    async def check(store: Store, elector: Elector, jump: Callable[[], None]) -> None:
        async def stuck() -> LeaseReply:
            while True:  # does not even end when it is cancelled
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    if done.is_set():
                        raise

        done = asyncio.Event()
        store.renewal = stuck
        jump()
        assert (await elector.confirmed()).role is Role.FOLLOWER
        done.set()

    run(check)
