"""What the clients of a run do, for the checker to judge: puts of chains, gets of prefixes, holds, gets under them, removals."""

from __future__ import annotations

from typing import Final

from kvpool.core.keys import KeyBatch
from kvpool.core.namespaces import NamespaceSpec
from kvpool.errors import KVPoolError
from kvpool.sim.cluster import Client, Cluster
from kvpool.sim.disk import sleep

DEADLINES_S: Final = (0.25, 0.6, 1.5, 3.0)
HOLD_MS: Final = (300, 1000, 3000)
PUT, GET, HOLD, REMOVE = "put", "get", "hold", "remove"
KINDS: Final = (PUT,) * 8 + (GET,) * 9 + (HOLD,) * 3 + (REMOVE,) * 2


class Load:
    """One client's calls, one after the other."""

    def __init__(self, cluster: Cluster, client: Client) -> None:
        self.cluster, self.client, self.checker = cluster, client.client, cluster.checker
        self.name, self.process = client.name, client.process
        self.random = client.process.random
        self.over = False

    async def run(self) -> None:
        loop, draw = self.process.loop, self.random
        for spec in self.cluster.specs:
            await self.client.follow(spec)
        while not self.over:
            await sleep(loop, draw.expovariate(1 / 0.03))
            spec, chain = self._some()
            kind = draw.choice(KINDS)
            if kind == PUT:
                await self.put(spec, self._prefix(spec, chain))
            elif kind == GET:
                await self.get(spec, self._prefix(spec, chain))
            elif kind == HOLD:
                await self.hold(spec, self._prefix(spec, chain))
            else:
                start = draw.randrange(self.cluster.scenario.chain_blocks)
                await self.remove(spec, self.cluster.batch(spec, chain, start, start + draw.choice((1, 1, 3, 16))))

    def _some(self) -> tuple[NamespaceSpec, int]:
        return self.random.choice(self.cluster.specs), self.random.randrange(self.cluster.scenario.n_chains)

    def _prefix(self, spec: NamespaceSpec, chain: int) -> KeyBatch:
        """A whole chain mostly, sometimes a part of its beginning, now and then a continuation."""
        draw, n = self.random, self.cluster.scenario.chain_blocks
        if draw.random() < 0.1:
            start = draw.randrange(n)
            return self.cluster.batch(spec, chain, start, n)
        return self.cluster.batch(spec, chain, 0, n if draw.random() < 0.5 else 1 + draw.randrange(n))

    def _until(self) -> float:
        return self.process.loop.time() + self.random.choice(DEADLINES_S)

    def _note(self, what: str, batch: KeyBatch, result: str) -> None:
        story = self.cluster.story
        keys = batch.split()
        self.cluster.note(self.name, f"{what} {story.names(keys)}{': ' + result if result else ''}", *keys)

    async def put(self, spec: NamespaceSpec, batch: KeyBatch) -> None:
        until = self._until()
        op = self.checker.begin(self.name, "put", spec.uid, batch.split(), until_s=until)
        self._note("puts", batch, "")
        outcomes = await self.client.put(spec, batch, until=until)
        self._note("put", batch, " ".join(outcome.value for outcome in outcomes))
        self.checker.put_ended(op, outcomes)

    async def get(self, spec: NamespaceSpec, batch: KeyBatch) -> None:
        until = self._until()
        op = self.checker.begin(self.name, "get", batch.namespace, batch.split(), until_s=until)
        self._note("gets", batch, "")
        got = await self.client.get(spec, batch, until=until)
        self._note("got", batch, said(got.values, got.paths, got.cause, got.complete))
        self.checker.get_ended(op, got)

    async def hold(self, spec: NamespaceSpec, batch: KeyBatch) -> None:
        """A hold, perhaps other calls in between, a get under it while it must live, release."""
        loop, draw = self.process.loop, self.random
        ttl_ms = draw.choice(HOLD_MS)
        until = self._until()
        begun = loop.time()
        op = self.checker.begin(self.name, "hold", batch.namespace, batch.split(), until_s=until)
        token = await self.client.hold(spec, batch, ttl_ms=ttl_ms, until=until)
        n_held = token.n_blocks
        self._note("holds", batch, f"{n_held} blocks for {ttl_ms} ms")
        self.checker.ended(op)
        if not token.parts:
            return
        for _ in range(draw.randrange(4)):
            other, chain = self._some()
            await self.put(other, self._prefix(other, chain))
        until = loop.time() + draw.choice(DEADLINES_S)
        alive = loop.time() + 0.02 < begun + ttl_ms / 1000
        op = self.checker.begin(self.name, "get held", batch.namespace, batch.split(), until_s=until)
        got = await self.client.get(spec, batch, until=until, held=token)
        kept = alive and loop.time() + 0.02 < begun + ttl_ms / 1000
        self._note("got held", batch, said(got.values, got.paths, got.cause, got.complete))
        self.checker.get_ended(op, got, promised=n_held if kept else 0)
        await self.client.release(token)

    async def remove(self, spec: NamespaceSpec, batch: KeyBatch) -> None:
        until = self._until()
        op = self.checker.begin(self.name, "remove", batch.namespace, batch.split(), until_s=until)
        self._note("removes", batch, "")
        outcomes: bytes | None
        try:
            outcomes = await self.client.remove(spec, batch, until=until)
            result = " ".join(("removed", "pending", "absent")[code] for code in outcomes)
        except KVPoolError as error:
            outcomes, result = None, f"failed: {error}"
        self._note("removed", batch, result)
        self.checker.remove_ended(op, outcomes)


def said(values: list[bytes], paths: list[str], cause: object, complete: bool) -> str:
    """A get's answer in words."""
    miss = "" if cause is None else f", then {getattr(cause, 'value', cause)}{'' if complete else ' (index not complete)'}"
    ways = ", ".join(dict.fromkeys(paths))
    return f"{len(values)} blocks{' by ' + ways if ways else ''}{miss}"
