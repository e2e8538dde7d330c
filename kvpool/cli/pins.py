"""`kvpool pin`: blocks that should stay, set, listed and ended."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpool.cli.ask import master_at
from kvpool.cli.blocks import PIN_WORDS, Namespace, hash_of
from kvpool.cli.common import (
    DeadlineOption,
    JsonOption,
    MasterOption,
    PoolGroup,
    TokenFileOption,
    parse_time_ms,
    print_json,
    table,
    usage,
)
from kvpool.cli.ns import confirm
from kvpool.errors import ConfigError

app = typer.Typer(cls=PoolGroup, no_args_is_help=True, rich_markup_mode=None, help="Pins: keep blocks, list and end such wishes.")

Hashes = Annotated[list[str] | None, typer.Argument(metavar="[HASH]...", help="Prefix hashes as `kvpool ls` prints them.")]
Shard = Annotated[int, typer.Option("--shard", min=0, max=65535, help="Of these hashes.")]
WORDS = ("absent", "pinned", "refused", "unpinned", "not_pinned")


@app.command("set")
def set_(
    namespace: Namespace,
    hashes: Hashes = None,
    all_: Annotated[bool, typer.Option("--all", help="Every block that is there now.")] = False,
    level: Annotated[str, typer.Option("--level", metavar="soft|hard", help="Evicted last, or never.")] = "soft",
    ttl: Annotated[str, typer.Option("--ttl", metavar="TIME", help="The pin ends after this time.")] = "1h",
    shard: Shard = 0,
    master: MasterOption = None,
    token_file: TokenFileOption = None,
    deadline: DeadlineOption = "5s",
    json: JsonOption = False,
) -> None:
    """Pin blocks. Exit status 1 when a hard pin was refused: hard pins have their share of a tier."""
    from kvpool.core.keys import pack_keys
    from kvpool.core.pins import check_ttl_s, level_of
    from kvpool.core.types import MAX_BATCH_KEYS
    from kvpool.v1 import master_pb2 as pb

    if bool(hashes) == all_:
        raise ConfigError("say either hashes or --all")
    with usage(level="--level", ttl_s="--ttl"):
        wish, ttl_ms = level_of(level), check_ttl_s(parse_time_ms(ttl, option="--ttl") / 1000)
    packed = [hash_of(text) for text in hashes or []]
    counts = dict.fromkeys(WORDS[:3], 0)
    pending: list[str] = []
    with master_at(master, token_file=token_file, deadline=deadline) as asked:
        uid = asked.namespace(namespace).uid
        keys = [key for key, *_ in asked.blocks(uid)] if all_ else [pack_keys(digest, shard=shard) for digest in packed]
        for start in range(0, len(keys), MAX_BATCH_KEYS):
            part = b"".join(keys[start : start + MAX_BATCH_KEYS])
            reply = asked.call("Pin", pb.PinRequest(namespace=uid, keys=part, level=wish, ttl_ms=ttl_ms))
            pending += [name for name in reply.pending_workers if name not in pending]
            for code in reply.outcomes:
                counts[WORDS[code]] += 1
    _say(namespace, counts, pending, json=json)
    if counts["refused"]:
        raise typer.Exit(1)


@app.command("unset")
def unset(
    namespace: Namespace,
    hashes: Hashes = None,
    all_: Annotated[bool, typer.Option("--all", help="Every pin of the namespace.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask (--all).")] = False,
    shard: Shard = 0,
    master: MasterOption = None,
    token_file: TokenFileOption = None,
    deadline: DeadlineOption = "5s",
    json: JsonOption = False,
) -> None:
    """End pins; the blocks stay until they are evicted."""
    from kvpool.core.keys import pack_keys
    from kvpool.core.types import MAX_BATCH_KEYS
    from kvpool.v1 import master_pb2 as pb

    if bool(hashes) == all_:
        raise ConfigError("say either hashes or --all")
    packed = [hash_of(text) for text in hashes or []]
    counts = dict.fromkeys(WORDS[3:], 0)
    pending: list[str] = []
    with master_at(master, token_file=token_file, deadline=deadline) as asked:
        uid = asked.namespace(namespace).uid
        if all_ and not yes:
            confirm(f"end every pin of {namespace}?", as_json=json)
        for start in range(0, max(1, len(packed)), MAX_BATCH_KEYS):
            part = pack_keys(b"".join(packed[start : start + MAX_BATCH_KEYS]), shard=shard)
            reply = asked.call("Unpin", pb.UnpinRequest(namespace=uid, keys=part, all=all_))
            pending += [name for name in reply.pending_workers if name not in pending]
            for code in reply.outcomes:
                counts[WORDS[code]] += 1
    _say(namespace, counts, pending, json=json)


@app.command("list")
def list_(
    namespace: Namespace,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most this many.")] = 1000,
    master: MasterOption = None,
    token_file: TokenFileOption = None,
    deadline: DeadlineOption = "5s",
    json: JsonOption = False,
) -> None:
    """Pins of a namespace: prefix hash, shard, level, seconds left, copies that are there."""
    from itertools import islice

    from kvpool.core.types import HASH_BYTES

    with master_at(master, token_file=token_file, deadline=deadline) as asked:
        found = list(islice(asked.pins(asked.namespace(namespace).uid), limit + 1))
    rows = [
        {
            "hash": key[:HASH_BYTES].hex(),
            "shard": int.from_bytes(key[HASH_BYTES:], "little"),
            "level": PIN_WORDS[level],
            "left_s": left_ms / 1000,
            "copies": copies,
        }
        for key, level, left_ms, copies in found[:limit]
    ]
    more = len(found) > limit
    if json:
        print_json({"namespace": namespace, "pins": rows, "more": more})
        return
    table(("HASH", "SHARD", "LEVEL", "SECONDS LEFT", "COPIES"), [tuple(row.values()) for row in rows], empty="no pins")
    if more:
        print(f"... more than {limit}; see --limit")


def _say(namespace: str, counts: dict[str, int], pending: list[str], *, json: bool) -> None:
    if json:
        print_json({"namespace": namespace, **counts, "pending_workers": pending})
        return
    print(f"{namespace}: {', '.join(f'{n} {word}' for word, n in counts.items())}")
    if pending:
        print(f"still to be confirmed by {', '.join(pending)}")
