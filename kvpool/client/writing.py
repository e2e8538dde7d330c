"""The put: what is known to be there is confirmed with its holder, the rest is written where it belongs, elsewhere when refused.

Which worker is decided by `core.placement` (here, from the mirror's knowledge, or in the master); bytes move in `transport`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from kvpool.client.buffers import total_bytes
from kvpool.client.context import Context, Counters, pick, pick_views
from kvpool.client.placing import key_above
from kvpool.client.placing import targets as find_targets
from kvpool.client.reading import locate_everywhere
from kvpool.client.results import PutResult
from kvpool.core.fetch import Candidates
from kvpool.core.keys import KeyBatch
from kvpool.core.namespaces import NamespaceSpec
from kvpool.core.types import BlockCode, Outcome
from kvpool.errors import NamespaceNotFound
from kvpool.transport.base import LinkCause, LinkError, Touched, WorkerLink
from kvpool.v1 import master_pb2 as pb

PATIENCE_S: Final = 1.0  # for a worker that has not heard of the namespace yet, or is catching up

T = TypeVar("T")

_OUTCOMES: Final = {
    int(BlockCode.STORED): Outcome.STORED,
    int(BlockCode.ALREADY): Outcome.ALREADY,
    int(BlockCode.UNLISTED): Outcome.UNLISTED,
}
_RANK: Final = {Outcome.STORED: 0, Outcome.ALREADY: 1, Outcome.UNLISTED: 2, Outcome.FULL: 3, Outcome.REJECTED: 4}


@dataclass(slots=True)
class _Block:
    """What is known of one block of the put so far."""

    outcome: Outcome = Outcome.REJECTED
    reason: str = ""
    on: set[int] = field(default_factory=set)  # peers that confirmed to have it
    tried: set[int] = field(default_factory=set)

    def there(self, peer: int, outcome: Outcome) -> None:
        """The peer has it; the best of what several say counts."""
        if not self.on or _RANK[outcome] < _RANK[self.outcome]:
            self.outcome = outcome
        self.on.add(peer)
        self.reason = ""

    def coded(self, peer: int, code: int, name: str) -> bool:
        """What the peer (by name) answered; True when it has the block."""
        outcome = _OUTCOMES.get(code)
        if outcome is not None:
            self.there(peer, outcome)
        elif code == BlockCode.FULL:
            self.refused(peer, Outcome.FULL, f"worker {name} has no room")
        elif code == BlockCode.FULL_QUOTA:
            self.refused(peer, Outcome.FULL, quota_reason(name))
        else:
            self.refused(peer, Outcome.REJECTED, f"worker {name} refused the block")
        return outcome is not None

    def refused(self, peer: int, outcome: Outcome, reason: str) -> None:
        """The peer did not take it: FULL says more than REJECTED."""
        self.tried.add(peer)
        if not self.on and (not self.reason or _RANK[outcome] <= _RANK[self.outcome]):
            self.outcome, self.reason = outcome, reason


class Putter:
    """One put. Used by one thread; its parallel writes only read their blocks."""

    def __init__(self, context: Context, spec: NamespaceSpec, batch: KeyBatch, blocks: Sequence[memoryview], *,
                 deadline: float, wait_listed: bool, hint: int = 0) -> None:  # fmt: skip
        self._hint = hint
        self.context, self.spec, self.deadline, self.wait_listed = context, spec, deadline, wait_listed
        self.batch = batch if len(blocks) == len(batch) else batch.slice(0, len(blocks))
        self.blocks = blocks
        self.keys = self.batch.split()
        self.states = [_Block() for _ in self.keys]
        self._unknown_namespace = False

    def run(self) -> PutResult:
        """Per block: stored, found, or why not."""
        first_of = {key: index for index, key in zip(range(len(self.keys) - 1, -1, -1), reversed(self.keys), strict=True)}
        unique = sorted(first_of.values()) if len(first_of) < len(self.keys) else range(len(self.keys))
        if unique:
            places, above = self._places(unique)
            self._confirm(unique, places)
            if any(len(self.states[i].on) < self.spec.replicas for i in unique):
                self._write(unique, above)
        if len(unique) == len(self.keys):
            return _result(self.states)
        outcomes, copies, reasons = [], [], []
        for index, key in enumerate(self.keys):  # the first of several wins, the others find it there
            state = self.states[first_of[key]]
            outcomes.append(Outcome.ALREADY if state.on and first_of[key] != index else state.outcome)
            copies.append(len(state.on))
            reasons.append(state.reason)
        return PutResult(outcomes, copies, reasons)

    # --- what is there --------------------------------------------------------------------------------------------------

    def _places(self, unique: Sequence[int]) -> tuple[list[Candidates], Candidates]:
        """Who is said to have each unique block, and the block above the first one."""
        above = key_above(self.batch)
        keys = [*([above] if above else ()), *(self.keys[i] for i in unique)]
        known = self.context.known(self.spec.uid, keys)
        if known is None:
            known = locate_everywhere(self.context, self.spec, b"".join(keys), deadline=self.deadline)
        return (known[1:], known[0]) if above else (known, ())

    def _confirm(self, unique: Sequence[int], places: Sequence[Candidates]) -> None:
        """Asks up to `replicas` of the workers that are said to have a block whether they do."""
        asked: dict[int, list[int]] = {}
        for index, candidates in zip(unique, places, strict=True):
            usable = [peer for peer, _ in candidates if isinstance(self.context.peers.cost(peer), int)]
            for peer in usable[: self.spec.replicas]:
                asked.setdefault(peer, []).append(index)
        if not asked:
            return
        answers = self.context.run_all([partial(self._touch, peer, indices) for peer, indices in asked.items()])
        for (peer, indices), touched in zip(asked.items(), answers, strict=True):
            if isinstance(touched, LinkError):
                continue
            found = Outcome.ALREADY if touched.listed or not self.wait_listed else Outcome.UNLISTED
            gone = []
            for index, there in zip(indices, touched.tiers, strict=True):
                if there:
                    self.states[index].there(peer, found)
                else:
                    gone.append(index)
            if gone and self.context.mirror is not None:
                self.context.mirror.index.stale(self.spec.uid, peer, pick(self.batch, gone).keys)

    def _touch(self, number: int, indices: Sequence[int]) -> Touched | LinkError:
        batch = pick(self.batch, indices)

        def ask(link: WorkerLink, until: float) -> Touched:
            return link.touch(batch, wait_listed=self.wait_listed, deadline=until, hint=self._hint)

        return self._call(number, ask, alternatives=True)

    # --- writing --------------------------------------------------------------------------------------------------------

    def _write(self, unique: Sequence[int], above: Candidates) -> None:
        """Writes every block that lacks copies, in rounds: what one worker refuses goes to the next."""
        wanted = self.spec.replicas
        missing = [i for i in unique if len(self.states[i].on) < wanted]
        first = missing[0]
        before = key_above(self.batch) if first == 0 else self.keys[first - 1]
        targets = find_targets(self.context, self.spec, key=self.keys[first], above=before, deadline=self.deadline,
                               parents=self._chain_peers(first, above), n_bytes=total_bytes(self.blocks))  # fmt: skip
        if not targets:
            for index in missing:
                self.states[index].refused(0, Outcome.REJECTED, "no worker can be written to now")
            return
        for _ in targets:
            work: dict[int, list[int]] = {}
            for index in missing:
                state = self.states[index]
                fresh = [t for t in targets if t not in state.on and t not in state.tried]
                for target in fresh[: wanted - len(state.on)]:
                    work.setdefault(target, []).append(index)
            if not work or time.monotonic() >= self.deadline:
                break
            answers = self.context.run_all([partial(self._write_to, target, indices, len(targets) > len(work))
                                            for target, indices in work.items()])  # fmt: skip
            for (target, indices), codes in zip(work.items(), answers, strict=True):
                self._wrote(target, indices, codes)
            missing = [i for i in missing if len(self.states[i].on) < wanted]
        for index in missing:
            state = self.states[index]
            if not state.on and not state.reason:
                state.reason = "the deadline passed before a worker took it"
        self._check_namespace(missing)

    def _chain_peers(self, first: int, above: Candidates) -> list[int]:
        """Who has the block above the first one to be written: chains stay together."""
        if not self.batch.chained:
            return []
        return sorted(self.states[first - 1].on) if first else [peer for peer, _ in above]

    def _write_to(self, number: int, indices: Sequence[int], alternatives: bool) -> bytes | LinkError:
        batch, blocks = pick(self.batch, indices), pick_views(self.blocks, indices)

        def ask(link: WorkerLink, until: float) -> bytes:
            return link.write(batch, blocks, chunk_bytes=self.spec.chunk_bytes, wait_listed=self.wait_listed, deadline=until,
                              hint=self._hint)  # fmt: skip

        return self._call(number, ask, alternatives=alternatives)

    def _call(self, number: int, ask: Callable[[WorkerLink, float], T], *, alternatives: bool) -> T | LinkError:
        peer = self.context.peers.get(number)
        if peer is None:
            return LinkError(LinkCause.CLOSED, "the worker is not known any more")
        try:
            return self.context.peers.call(peer, ask, deadline=self.deadline, alternatives=alternatives,
                                           patient_until=time.monotonic() + PATIENCE_S)  # fmt: skip
        except LinkError as error:
            return error

    def _wrote(self, target: int, indices: Sequence[int], codes: bytes | LinkError) -> None:
        name = self.context.peers.worker_id(target)
        if isinstance(codes, LinkError):
            self._unknown_namespace = self._unknown_namespace or codes.cause is LinkCause.UNKNOWN_NAMESPACE
            for index in indices:
                self.states[index].refused(target, Outcome.REJECTED, f"worker {name}: {codes}")
            return
        there = [index for index, code in zip(indices, codes, strict=True) if self.states[index].coded(target, code, name)]
        if there and self.context.mirror is not None:
            self.context.mirror.index.wrote(self.spec.uid, target, pick(self.batch, there).keys)

    def _check_namespace(self, missing: Sequence[int]) -> None:
        """A namespace that no worker knows may have been deleted: then the caller is told so."""
        if not missing or not self._unknown_namespace:
            return
        request = pb.OpenNamespaceRequest(name=self.spec.name, fingerprint=self.spec.fingerprint)
        reply = self.context.master.ask("OpenNamespace", request, deadline=min(self.deadline, time.monotonic() + 1.0))
        if reply is not None and reply.namespace.uid != self.spec.uid:
            raise NamespaceNotFound(f"namespace {self.spec.name!r} was deleted and made again; open it again")


def quota_reason(name: str) -> str:
    """Why a worker (by name) has no room for one namespace."""
    return f"quota: the namespace has its part of the quota at worker {name}, and nothing there that may go for this"


def settle(context: Context, spec: NamespaceSpec, batch: KeyBatch, answers: Sequence[tuple[int, bytes]],
           refusals: Sequence[str]) -> PutResult:  # fmt: skip
    """The result of a put whose workers (peer, codes [n]) have all answered. `refusals`: why other workers did not take part."""
    keys = batch.split()
    states = [_Block() for _ in keys]
    for peer, codes in answers:
        name = context.peers.worker_id(peer)
        there = [key for key, state, code in zip(keys, states, codes, strict=True) if state.coded(peer, code, name)]
        if there and context.mirror is not None:
            context.mirror.index.wrote(spec.uid, peer, b"".join(there))
    full = any("no room" in reason or reason.startswith("quota") for reason in refusals)
    for state in states:
        if not state.on and not state.reason:
            state.outcome = Outcome.FULL if full else Outcome.REJECTED
            state.reason = "; ".join(refusals) or "no worker can be written to now"
    return _result(states)


def _result(states: Sequence[_Block]) -> PutResult:
    return PutResult([state.outcome for state in states], [len(state.on) for state in states], [state.reason for state in states])


def count_put(counters: Counters, result: PutResult, n_bytes: int) -> None:
    """Adds one put to the namespace's counters."""
    with counters.lock:
        counters.puts += 1
        counters.bytes_put += n_bytes
        for outcome in Outcome:
            n = result.outcomes.count(outcome)
            if n:
                counters.outcomes[outcome.value] = counters.outcomes.get(outcome.value, 0) + n
