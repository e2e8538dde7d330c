"""What the clients of a run do, for the checker to judge: puts of chains, whole and in parts, gets of prefixes, holds and gets
under them, views, removals, namespaces made and deleted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvpool.client.views import RENEW_CALL_S
from kvpool.core.keys import KeyBatch
from kvpool.core.namespaces import NO_UID, NamespaceSpec
from kvpool.errors import KVPoolError, NamespaceNotFound
from kvpool.sim.checker import Op
from kvpool.sim.cluster import Cluster
from kvpool.sim.disk import sleep
from kvpool.sim.scenario import Client
from kvpool.sim.threads import blocking
from kvpool.sim.values import PART_BYTES, PARTS, value_of

DEADLINES_S: Final = (0.25, 0.6, 1.5, 3.0)
HOLD_MS: Final = (300, 1000, 3000)
PUT, GET, HOLD, REMOVE, SESSION, VIEW, CREATE, DELETE = "put", "get", "hold", "remove", "session", "view", "create", "delete"
KINDS: Final = (PUT,) * 14 + (GET,) * 18 + (HOLD,) * 5 + (REMOVE,) * 4 + (SESSION,) * 4 + (VIEW,) * 4 + (CREATE,) * 4 + (DELETE,)
LEAVE_S: Final = RENEW_CALL_S + 0.1  # to leave a view, for each worker


class Load:
    """One client's calls, one after the other."""

    def __init__(self, cluster: Cluster, client: Client) -> None:
        self.cluster, self.client, self.checker = cluster, client.client, cluster.checker
        self.name, self.process = client.name, client.process
        self.random = client.process.random
        self.over = False
        self.opened: dict[str, NamespaceSpec] = {}  # of those that come and go

    async def run(self) -> None:
        loop, draw = self.process.loop, self.random
        for spec in self.cluster.specs:
            await self.client.follow(spec)
        while not self.over:
            await sleep(loop, draw.expovariate(1 / 0.03))
            spec, chain = self._some()
            favoured = self.cluster.scenario.favours
            kind = favoured if favoured and draw.random() < 0.5 else draw.choice(KINDS)
            if kind in (CREATE, DELETE):
                await self._name(kind)
            elif kind == PUT:
                await self.put(spec, self._prefix(spec, chain))
            elif kind == GET:
                await self.get(spec, self._prefix(spec, chain))
            elif kind == HOLD:
                await self.hold(spec, self._prefix(spec, chain))
            elif kind == SESSION:
                await self.session(spec, self._prefix(spec, chain))
            elif kind == VIEW:
                await self.view(spec, self._prefix(spec, chain))
            else:
                start = draw.randrange(self.cluster.scenario.chain_blocks)
                await self.remove(spec, self.cluster.batch(spec, chain, start, start + draw.choice((1, 1, 3, 16))))

    def _some(self) -> tuple[NamespaceSpec, int]:
        own = list(self.opened.values())
        specs = own if own and self.random.random() < 0.4 else self.cluster.specs
        return self.random.choice(specs), self.random.randrange(self.cluster.scenario.n_chains)

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
        try:
            outcomes = await self.client.put(spec, batch, until=until)
        except NamespaceNotFound as error:
            self._gone(op, spec, str(error))
            return
        self._note("put", batch, " ".join(outcome.value for outcome in outcomes))
        self.checker.put_ended(op, outcomes)

    async def get(self, spec: NamespaceSpec, batch: KeyBatch) -> None:
        until = self._until()
        op = self.checker.begin(self.name, "get", batch.namespace, batch.split(), until_s=until)
        self._note("gets", batch, "")
        try:
            got = await self.client.get(spec, batch, until=until)
        except NamespaceNotFound as error:
            self._gone(op, spec, str(error))
            return
        self._note("got", batch, said(got.values, got.paths, got.cause, got.complete))
        self.checker.get_ended(op, got)

    async def hold(self, spec: NamespaceSpec, batch: KeyBatch) -> None:
        """A hold, perhaps other calls in between, a get under it while it must live, release."""
        loop, draw = self.process.loop, self.random
        ttl_ms = draw.choice(HOLD_MS)
        until = self._until()
        begun = loop.time()
        op = self.checker.begin(self.name, "hold", batch.namespace, batch.split(), until_s=until)
        try:
            token = await self.client.hold(spec, batch, ttl_ms=ttl_ms, until=until)
        except NamespaceNotFound as error:
            self._gone(op, spec, str(error))
            return
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
        try:
            got = await self.client.get(spec, batch, until=until, held=token)
        except NamespaceNotFound as error:
            self._gone(op, spec, str(error))
            return
        kept = alive and loop.time() + 0.02 < begun + ttl_ms / 1000
        self._note("got held", batch, said(got.values, got.paths, got.cause, got.complete))
        self.checker.get_ended(op, got, promised=n_held if kept else 0)
        await self.client.release(token)

    def _gone(self, op: Op, spec: NamespaceSpec, error: str) -> None:
        self.cluster.note(self.name, f"{spec.name} is no namespace (any more)", *op.keys)
        self.checker.unknown_namespace(op, error)
        self.opened.pop(spec.name, None)

    async def session(self, spec: NamespaceSpec, batch: KeyBatch) -> None:
        """A put layer by layer, parts in any order, some twice; committed, given up, or short of a part."""
        loop, draw = self.process.loop, self.random
        until = loop.time() + draw.choice(DEADLINES_S) + 1.0
        op = self.checker.begin(self.name, "put", spec.uid, batch.split(), until_s=until)
        self.checker.count("put in parts")
        self._note("puts in parts", batch, "")
        try:
            put = await self.client.session(spec, batch, until=until)
        except NamespaceNotFound as error:
            self._gone(op, spec, str(error))
            return
        parts = [(i, part) for i in range(len(batch)) for part in range(PARTS)]
        draw.shuffle(parts)
        whole = draw.random() < 0.9
        for i, part in parts[: None if whole else -1] + parts[: draw.randrange(3)]:
            at, stop = part * PART_BYTES, min(PARTS, part + draw.choice((1, 1, 2))) * PART_BYTES
            await blocking(put.write, i, at, value_of(op.keys[i])[at:stop])
            await sleep(loop, draw.expovariate(1 / 0.002))
        if draw.random() < 0.15:
            await blocking(put.abort)
            self._note("gives up its put", batch, "")
            self.checker.ended(op)
            return
        result = await blocking(put.commit)
        self._note("put in parts", batch, " ".join(outcome.value for outcome in result.outcomes))
        self.checker.put_ended(op, result.outcomes)

    async def view(self, spec: NamespaceSpec, batch: KeyBatch) -> None:
        """Memory of this host's workers is looked at for a while, and left."""
        loop, draw = self.process.loop, self.random
        until = self._until()
        op = self.checker.begin(self.name, "view", spec.uid, batch.split(), until_s=until)
        try:
            view = await self.client.view(spec, batch, until=until)
        except NamespaceNotFound as error:
            self._gone(op, spec, str(error))
            return
        self.checker.ended(op)
        self._note("views", batch, f"{view.n_blocks} blocks")
        sights: Sequence[Any] = list(view)
        seen = []
        for _ in range(1 + draw.randrange(3) if sights else 0):
            await sleep(loop, draw.expovariate(1 / draw.choice((0.05, 0.5))))
            seen.append([sight.now() for sight in sights])
        leaves = self.checker.begin(self.name, "leave view", spec.uid, op.keys, until_s=loop.time() + 3 * LEAVE_S)
        lost = ""
        try:
            await blocking(view.close)
        except KVPoolError as error:
            lost = str(error)
        self._note("leaves its view", batch, lost or "all well")
        self.checker.view_left(leaves, seen, lost, taken=op)

    async def _name(self, kind: str) -> None:
        """A namespace that comes and goes is made, or opened, or deleted."""
        names = self.cluster.names
        if not names:
            return
        name, until = self.random.choice(names), self._until()
        op = self.checker.begin(self.name, kind, NO_UID, (), until_s=until)
        if kind == DELETE:
            self.checker.names.delete_begins(name, at_s=op.begun_s)
        result = ""
        try:
            if kind == CREATE:
                spec = self.opened[name] = await self.client.create(self.cluster.wanted(name), until=until)
                self.cluster.opened(spec)
                self.checker.names.created(name, spec.uid, begun_s=op.begun_s, now_s=self.process.loop.time())
                result = spec.uid.hex()[:8]
            else:
                pending = await self.client.delete(name, until=until)
                result = f"pending: {', '.join(pending)}" if pending else "deleted everywhere"
                if not pending:
                    self.checker.deleted(op, name, self.cluster.keys_of)
        except KVPoolError as error:
            result = f"failed: {error}"
        self.cluster.note(self.name, f"{kind} {name}: {result}")
        self.checker.ended(op)

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
