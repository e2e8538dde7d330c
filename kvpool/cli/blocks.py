"""`kvpool ls` and `kvpool rm`: the blocks of a namespace."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvpool.cli.ask import master_at
from kvpool.cli.common import DeadlineOption, JsonOption, MasterOption, TokenFileOption, print_json, table
from kvpool.cli.ns import confirm
from kvpool.errors import ConfigError

Namespace = Annotated[str, typer.Argument(metavar="NAMESPACE", help="The namespace.")]
PIN_WORDS = (None, "soft", "hard")
REMOVE_WORDS = ("removed", "pending", "absent")


def ls(
    namespace: Namespace,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most this many.")] = 1000,
    master: MasterOption = None,
    token_file: TokenFileOption = None,
    deadline: DeadlineOption = "5s",
    json: JsonOption = False,
) -> None:
    """Blocks of a namespace: prefix hash, shard, tiers, copies and pin."""
    from itertools import islice

    from kvpool.core.types import HASH_BYTES, Tiers

    with master_at(master, token_file=token_file, deadline=deadline) as asked:
        found = list(islice(asked.blocks(asked.namespace(namespace).uid), limit + 1))
    rows: list[dict[str, Any]] = [
        {
            "hash": key[:HASH_BYTES].hex(),
            "shard": int.from_bytes(key[HASH_BYTES:], "little"),
            "tiers": [tier.name.lower() for tier in Tiers if tier & tiers and tier.name],
            "copies": copies,
            "pin": PIN_WORDS[pin],
        }
        for key, tiers, copies, pin in found[:limit]
    ]
    more = len(found) > limit
    if json:
        print_json({"namespace": namespace, "blocks": rows, "more": more})
        return
    lines = [(row["hash"], row["shard"], "+".join(row["tiers"]), row["copies"], row["pin"] or "-") for row in rows]
    table(("HASH", "SHARD", "TIERS", "COPIES", "PIN"), lines, empty="no blocks")
    if more:
        print(f"... more than {limit}; see --limit")


def rm(
    namespace: Namespace,
    hashes: Annotated[
        list[str] | None, typer.Argument(metavar="[HASH]...", help="Prefix hashes as `kvpool ls` prints them.")
    ] = None,
    shard: Annotated[int, typer.Option("--shard", min=0, max=65535, help="Of these hashes.")] = 0,
    all_: Annotated[bool, typer.Option("--all", help="Every block of the namespace.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask (--all).")] = False,
    master: MasterOption = None,
    token_file: TokenFileOption = None,
    deadline: DeadlineOption = "5s",
    json: JsonOption = False,
) -> None:
    """Remove blocks for good. Exit status 1 while a worker has not confirmed."""
    from kvpool.core.keys import pack_keys
    from kvpool.core.types import MAX_BATCH_KEYS
    from kvpool.v1 import master_pb2 as pb

    if bool(hashes) == all_:
        raise ConfigError("say either hashes or --all")
    packed = [hash_of(text) for text in hashes or []]
    counts = dict.fromkeys(REMOVE_WORDS, 0)
    pending: list[str] = []
    n_removed = 0
    with master_at(master, token_file=token_file, deadline=deadline) as asked:
        uid = asked.namespace(namespace).uid
        if all_ and not yes:
            confirm(f"remove every block of {namespace}?", as_json=json)
        for start in range(0, max(1, len(packed)), MAX_BATCH_KEYS):
            keys = pack_keys(b"".join(packed[start : start + MAX_BATCH_KEYS]), shard=shard)
            reply = asked.call("Remove", pb.RemoveRequest(namespace=uid, keys=keys, all=all_))
            n_removed += reply.n_removed
            pending += [name for name in reply.pending_workers if name not in pending]
            for code in reply.outcomes:
                counts[REMOVE_WORDS[code]] += 1
    if all_:
        counts["removed"] = n_removed
    if json:
        print_json({"namespace": namespace, **counts, "pending_workers": pending})
    else:
        print(f"{namespace}: {', '.join(f'{n} {word}' for word, n in counts.items())}")
        if pending:
            print(f"still to be confirmed by {', '.join(pending)}")
    if pending:
        raise typer.Exit(1)


def hash_of(text: str) -> bytes:
    """32 bytes. Raises ConfigError naming the text."""
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise ConfigError(f"hash {text!r}: must be 64 hexadecimal digits, as `kvpool ls` prints them")
    return digest
