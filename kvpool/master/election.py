"""One master's part in the election: asks the store for the lease in time, and tells the master what it is now.

What to ask when, and what an answer means, is `core.election`; the store's scripts are `redis_scripts`. Runs on the master's loop
as one task. A master looks at `standing()` before each act of a leader, for it may have stood still meanwhile; `changed` is for
what takes longer: loading the state as a new leader, letting go of it as an old one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kvpool.core.election import Ask, Election, Granted, LeaseTerms, Refused, Role, Standing, Take
from kvpool.core.types import Epoch
from kvpool.errors import KVPoolError

log = logging.getLogger(__name__)

RELEASE_S: Final = 1.0
CANCELS_MAX: Final = 5


@dataclass(frozen=True, slots=True)
class LeaseReply:
    """What the store says about the lease. `writes`: the number of the last write."""

    granted: bool
    epoch: Epoch
    owner: str
    address: str
    left_ms: int
    writes: int


class Lease(Protocol):
    """The store's side (`redis_store.RedisStore`). Each call ends within its own deadline, KVPoolError when it got no answer."""

    async def take(self, *, floor: Epoch, address: str) -> LeaseReply: ...

    async def renew(self, epoch: Epoch, *, address: str) -> LeaseReply: ...

    async def release(self, epoch: Epoch) -> None: ...

    def adopt(self, epoch: Epoch | None) -> None: ...


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class Elector:
    """`address`: what other masters tell those who look for the leader."""

    def __init__(self, lease: Lease, *, address: str, terms: LeaseTerms | None = None, clock: Callable[[], int] = now_ms) -> None:
        self._lease = lease
        self._address = address
        self._clock = clock
        self._core = Election(address=address, terms=terms)
        self._told = self._core.standing(clock())
        self._news = asyncio.Event()
        self._asked = asyncio.Event()  # set, and replaced, when a request has ended
        self._unanswered_ms: int | None = None  # when the last request that got no answer was sent
        self._trouble = ""
        self.failures = 0  # requests that the store did not answer

    def standing(self) -> Standing:
        """What this master is at this moment."""
        return self._core.standing(self._clock())

    async def changed(self, seen: Standing) -> Standing:
        """Returns as soon as the standing is another one than `seen`. Changes that went by in between are not told one by one."""
        while True:
            news = self._news
            now = self.standing()
            if now != seen:
                return now
            wait_s = self._core.wait_ms(self._clock()) / 1000
            try:
                async with asyncio.timeout(wait_s + 0.001):  # a lease runs out without any news
                    await news.wait()
            except TimeoutError:
                continue

    async def confirmed(self) -> Standing:
        """`standing()`, but as LAPSED only when the store was asked just now and did not answer. A process that stood still past
        its lease finds out here whether another one leads by now; FOLLOWER when it cannot find out in time."""
        terms = self._core.terms
        fresh_ms = terms.poll_ms + 2 * terms.reply_ms + terms.margin_ms
        until_ms = self._clock() + fresh_ms
        while True:
            now = self._clock()
            standing = self._core.standing(now)
            asked = self._unanswered_ms is not None and now - self._unanswered_ms <= fresh_ms
            if standing.role is not Role.LAPSED or asked:
                return standing
            if now >= until_ms:
                return Standing(Role.FOLLOWER, standing.epoch, "")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout((until_ms - now) / 1000):
                    await self._asked.wait()

    async def run(self) -> None:
        """Until cancelled; then gives the lease back."""
        try:
            while True:
                now = self._clock()
                ask = self._core.ask(now)
                self._tell()
                if ask is not None:
                    await self._send(ask)
                    self._tell()
                await asyncio.sleep(self._core.wait_ms(self._clock()) / 1000)
        finally:
            await self._leave()

    async def _send(self, ask: Ask) -> None:
        sent_ms = self._clock()
        try:
            await self._send_one(ask, sent_ms)
        finally:
            self._asked.set()
            self._asked = asyncio.Event()

    async def _send_one(self, ask: Ask, sent_ms: int) -> None:
        try:
            async with asyncio.timeout(self._core.terms.reply_ms / 1000):
                if isinstance(ask, Take):
                    reply = await self._lease.take(floor=ask.floor, address=self._address)
                else:
                    reply = await self._lease.renew(ask.epoch, address=self._address)
        except (KVPoolError, TimeoutError) as error:
            self._fail(ask, error, sent_ms)
            return
        except Exception as error:
            log.exception("event=election_failed")
            self._fail(ask, error, sent_ms)
            return
        self._trouble = ""
        answer = Granted(reply.epoch) if reply.granted else Refused(reply.epoch, reply.owner, reply.address, reply.left_ms)
        self._core.answer(ask.number, answer, self._clock())
        if reply.granted:
            self._lease.adopt(reply.epoch)
        elif not isinstance(ask, Take):
            self._lease.adopt(None)

    def _fail(self, ask: Ask, error: Exception, sent_ms: int) -> None:
        self.failures += 1
        self._unanswered_ms = sent_ms
        self._core.failed(ask.number, self._clock())
        trouble = type(error).__name__
        log.log(logging.DEBUG if trouble == self._trouble else logging.WARNING, "event=lease_unanswered error=%r",
                str(error) or "no answer in time")  # fmt: skip
        self._trouble = trouble

    def _tell(self) -> None:
        now = self.standing()
        if now == self._told:
            return
        level = logging.WARNING if self._told.role is Role.LEADER else logging.INFO
        log.log(level, "event=standing role=%s epoch=%d leader=%s was=%s", now.role.value, now.epoch, now.leader or "unknown",
                self._told.role.value)  # fmt: skip
        self._told = now
        self._news.set()
        self._news = asyncio.Event()

    async def _leave(self) -> None:
        standing = self.standing()
        self._core.resign(self._clock())
        self._lease.adopt(None)
        self._tell()
        if standing.role is not Role.FOLLOWER:
            try:
                async with asyncio.timeout(RELEASE_S):
                    await self._lease.release(standing.epoch)
            except (KVPoolError, TimeoutError) as error:
                log.info("event=lease_not_released error=%r", str(error))


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancels it until it has ended, bounded: a library below may swallow one cancellation, and waiting would never end."""
    for _ in range(CANCELS_MAX):
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=RELEASE_S + 0.5)
        if done:
            break
    if task.done() and not task.cancelled() and task.exception() is not None:
        log.info("event=task_ended error=%r", str(task.exception()))
