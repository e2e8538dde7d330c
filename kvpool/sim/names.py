"""What is known of namespaces that clients make and delete in a run, and what may be said about them: one name has one namespace
at a time, a uid is of one namespace for ever, what was made stays until somebody deletes it, what was deleted is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvpool.core.types import NamespaceUid

LATE_S: Final = 5.0  # a call that its caller gave up may still do its work for so long


@dataclass(slots=True)
class Made:
    """A namespace as its makers heard of it. `delete_begun_s` infinite: never; `deleted_s` too: nobody was told so."""

    name: str
    uid: NamespaceUid
    made_s: float  # first answer
    delete_begun_s: float = float("inf")
    deleted_s: float = float("inf")
    lost: bool = False  # the store that made it lost it


class Names:
    """`fail(text)`: a promise is broken."""

    def __init__(self, fail: Callable[[str], None]) -> None:
        self._fail = fail
        self.made: dict[NamespaceUid, Made] = {}
        self._delete_begun: dict[str, float] = {}  # by name, the last time

    def created(self, name: str, uid: NamespaceUid, *, begun_s: float, now_s: float) -> None:
        """A call to make it was answered with this uid."""
        before = self.made.get(uid)
        if before is not None:
            if before.name != name:
                self._fail(f"{name} has the uid of {before.name}")
            if begun_s >= before.deleted_s:
                self._fail(f"{name} has the uid of a namespace that was deleted before")
        else:
            self.made[uid] = Made(name, uid, now_s)
            deleting_s = self._delete_begun.get(name, -LATE_S)
            if deleting_s >= begun_s - LATE_S:  # it may have met this one
                self.made[uid].delete_begun_s = deleting_s
        for other in self.made.values():
            if other.name != name or other.uid == uid or other.lost or self.made[uid].lost:
                continue
            if other.delete_begun_s == float("inf") and self.made[uid].delete_begun_s == float("inf"):
                self._fail(f"{name} was made twice: {other.uid.hex()[:8]} and {uid.hex()[:8]}, and nobody deleted it")

    def delete_begins(self, name: str, *, at_s: float) -> None:
        self._delete_begun[name] = at_s
        for made in self.made.values():
            if made.name == name:
                made.delete_begun_s = min(made.delete_begun_s, at_s)

    def deleted(self, name: str, *, begun_s: float, now_s: float) -> list[NamespaceUid]:
        """A call to delete it was answered, and no worker is still to be told. -> those that are gone by this."""
        gone = [m for m in self.made.values() if m.name == name and m.made_s <= begun_s <= m.delete_begun_s]
        for made in gone:
            made.deleted_s = now_s
        return [made.uid for made in gone]

    def lost(self, uid: NamespaceUid) -> None:
        """The store has forgotten that it was made, or deleted; the leader who knew ended too."""
        made = self.made.get(uid)
        if made is not None:
            made.lost, made.deleted_s = True, float("inf")

    def may_be_gone(self, uid: NamespaceUid) -> bool:
        """Whether somebody has begun to delete it, or the store lost it."""
        made = self.made.get(uid)
        return made is not None and (made.lost or made.delete_begun_s < float("inf"))

    def is_gone(self, uid: NamespaceUid) -> bool:
        made = self.made.get(uid)
        return made is not None and made.deleted_s < float("inf")
