"""`kvpool ns`: namespaces, listed, shown, made and deleted."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpool.cli.ask import master_at
from kvpool.cli.common import (
    DeadlineOption,
    JsonOption,
    MasterOption,
    PoolGroup,
    TokenFileOption,
    format_bytes,
    parse_size,
    parse_time_ms,
    print_error,
    print_json,
    table,
    usage,
)
from kvpool.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from kvpool.core.layout import KVLayout
    from kvpool.v1 import master_pb2 as pb

app = typer.Typer(cls=PoolGroup, no_args_is_help=True, rich_markup_mode=None, help="Namespaces: list, show, create, delete.")

KEPT = ("replicas", "quota_bytes", "ttl_s", "write_policy", "read_policy", "read_timeout_ms")  # no part of what a namespace is

Name = Annotated[str, typer.Argument(metavar="NAME", help="The namespace.")]


@app.command("list")
def list_(
    master: MasterOption = None,
    token_file: TokenFileOption = None,
    deadline: DeadlineOption = "5s",
    json: JsonOption = False,
) -> None:
    """All namespaces, with their quotas and pins."""
    from kvpool.v1 import master_pb2 as pb

    with master_at(master, token_file=token_file, deadline=deadline) as asked:
        statuses = {s.namespace.uid: s for s in asked.call("Describe", pb.DescribeRequest()).namespaces}
        found = [facts_of(n) | _keeping(statuses.get(n.uid)) for n in asked.namespaces()]
    if json:
        print_json({"namespaces": found})
        return
    rows = [
        (n["name"], format_bytes(n["block_bytes"]), n["hash"], n["replicas"], quota_words(n), ttl_words(n), pin_words(n),
         n["layout"]["model"])
        for n in found
    ]  # fmt: skip
    table(("NAMESPACE", "BLOCK", "HASH", "REPLICAS", "QUOTA USED", "TTL", "PINS", "MODEL"), rows, empty="no namespaces")


@app.command("show")
def show(
    name: Name,
    master: MasterOption = None,
    token_file: TokenFileOption = None,
    deadline: DeadlineOption = "5s",
    json: JsonOption = False,
) -> None:
    """One namespace: its layout, settings, blocks and bytes."""
    from kvpool.v1 import master_pb2 as pb

    with master_at(master, token_file=token_file, deadline=deadline) as asked:
        facts = facts_of(asked.namespace(name))
        reply = asked.call("Describe", pb.DescribeRequest())
    for entry in reply.namespaces:
        if entry.namespace.name == name:
            facts |= {"blocks": entry.blocks, "bytes": entry.bytes, **_keeping(entry)}
    if json:
        print_json(facts)
        return
    layout = facts.pop("layout")
    rows = [*facts.items(), *((f"layout.{key}", value) for key, value in layout.items())]
    table(("FIELD", "VALUE"), [(key, _cell(value)) for key, value in rows], empty="")


@app.command("create")
def create(
    name: Name,
    block_bytes: Annotated[
        str | None, typer.Option("--block-bytes", metavar="SIZE", help="Opaque values of up to this size.")
    ] = None,
    block_tokens: Annotated[int, typer.Option("--block-tokens", min=1, help="Tokens a block of opaque values.")] = 1,
    layout: Annotated[
        Path | None, typer.Option("--layout", metavar="FILE", help="JSON of a KVLayout, or all of `ns show NAME --json`.")
    ] = None,
    hash: Annotated[str, typer.Option("--hash", metavar="KIND", help="sha256, xxh3_128 or external.")] = "sha256",  # noqa: A002
    salt: Annotated[str, typer.Option("--salt", metavar="HEX", help="Bytes that go into every hash.")] = "",
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="Copies of a block, on different workers.")] = 1,
    quota: Annotated[str | None, typer.Option("--quota", metavar="SIZE", help="At most this much in the pool.")] = None,
    ttl: Annotated[str | None, typer.Option("--ttl", metavar="TIME", help="Blocks expire so long after their last put.")] = None,
    write_policy: Annotated[
        str, typer.Option("--write-policy", metavar="POLICY", help="Blocks go to SSD: back, through or selective.")
    ] = "back",
    read_policy: Annotated[
        str, typer.Option("--read-policy", metavar="POLICY", help="Gets wait for SSD: wait, best_effort or timeout.")
    ] = "wait",
    read_timeout: Annotated[
        str | None, typer.Option("--read-timeout", metavar="TIME", help="How long, with --read-policy timeout.")
    ] = None,
    master: MasterOption = None,
    token_file: TokenFileOption = None,
    deadline: DeadlineOption = "5s",
    json: JsonOption = False,
) -> None:
    """Create a namespace; one that exists must have the same layout, hash and salt."""
    from kvpool.core.layout import KVLayout
    from kvpool.core.namespaces import NamespaceSpec, check_hash
    from kvpool.master.wire import spec_to_proto
    from kvpool.v1 import master_pb2 as pb

    if (block_bytes is None) == (layout is None):
        raise ConfigError("say either --block-bytes or --layout")
    if read_policy == "timeout" and read_timeout is None:
        raise ConfigError("--read-timeout: needed with --read-policy timeout, at least 1ms")
    if read_policy in ("wait", "best_effort") and read_timeout is not None:
        raise ConfigError(f"--read-timeout: only with --read-policy timeout, not with {read_policy}")
    try:
        salt_bytes = bytes.fromhex(salt)
    except ValueError:
        raise ConfigError(f"--salt: {salt!r} is not hexadecimal") from None
    with usage(
        namespace="NAME", block_bytes="--block-bytes", block_tokens="--block-tokens", hash="--hash", replicas="--replicas",
        quota_bytes="--quota", ttl_s="--ttl", write_policy="--write-policy", read_policy="--read-policy",
        read_timeout_ms="--read-timeout",
    ):  # fmt: skip
        if layout is not None:
            meaning = _layout_of(layout)
        else:
            meaning = KVLayout.opaque(parse_size(block_bytes or "", option="--block-bytes"), block_tokens)
        spec = NamespaceSpec.of(
            name,
            meaning,
            hash=check_hash(hash),
            salt=salt_bytes,
            replicas=replicas,
            quota_bytes=None if quota is None else parse_size(quota, option="--quota"),
            ttl_s=None if ttl is None else parse_time_ms(ttl, option="--ttl") / 1000,
            write_policy=write_policy,
            read_policy=read_policy,
            read_timeout_ms=None if read_timeout is None else int(parse_time_ms(read_timeout, option="--read-timeout")),
        )
    message = spec_to_proto(spec)
    with master_at(master, token_file=token_file, deadline=deadline) as asked:
        reply = asked.call("CreateNamespace", pb.CreateNamespaceRequest(namespace=message))
    if json:
        print_json({"created": reply.created, **facts_of(reply.namespace)})
        return
    asked_for, there = facts_of(message), facts_of(reply.namespace)
    kept = [f"{key} {there[key] or 'none'}" for key in KEPT if there[key] != asked_for[key]]
    if reply.created:
        print(f"{name}: created")
    else:
        print(f"{name}: exists already, with this layout" + (f"; it keeps its {', '.join(kept)}" if kept else ""))


@app.command("delete")
def delete(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    master: MasterOption = None,
    token_file: TokenFileOption = None,
    deadline: DeadlineOption = "5s",
    json: JsonOption = False,
) -> None:
    """Delete a namespace and all its blocks, everywhere."""
    from kvpool.v1 import master_pb2 as pb

    with master_at(master, token_file=token_file, deadline=deadline) as asked:
        asked.namespace(name)
        if not yes:
            confirm(f"delete namespace {name} and all its blocks?", as_json=json)
        reply = asked.call("DeleteNamespace", pb.DeleteNamespaceRequest(name=name))
    pending = list(reply.pending_workers)
    if json:
        print_json({"deleted": name, "n_removed": reply.n_removed, "pending_workers": pending})
        return
    print(f"{name}: deleted, {reply.n_removed} blocks" + (f"; still to be confirmed by {', '.join(pending)}" if pending else ""))


def _layout_of(file: Path) -> KVLayout:
    """The layout in the file: alone, or within a namespace as `ns show` prints it. Raises ConfigError naming file and field."""
    import json

    from kvpool.core.layout import KVLayout

    try:
        text = file.read_text(encoding="utf-8")
        with contextlib.suppress(ValueError, RecursionError):  # (KVLayout says what is wrong)
            whole = json.loads(text)
            if isinstance(whole, dict) and isinstance(whole.get("layout"), dict):
                text = json.dumps(whole["layout"])
        return KVLayout.from_json(text)
    except InvalidArgument as error:
        raise ConfigError(f"--layout: {file}: {str(error).removeprefix('layout: ')}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--layout: {file}: no UTF-8 text") from None
    except OSError as error:
        raise ConfigError(f"--layout: {file}: {error.strerror or error}") from None


def _cell(value: object) -> str:
    """A fact for people."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {n}" for key, n in value.items())
    return "-" if value is None or value == "" else str(value)


def confirm(question: str, *, as_json: bool) -> None:
    """Ask on a terminal; without one, --yes is needed. Exit status 1 when the answer is no."""
    import sys

    if not sys.stdin.isatty():
        raise InvalidArgument("not a terminal to ask on: say --yes")
    with contextlib.redirect_stdout(sys.stderr):  # typer would print a part of the prompt on standard output
        agreed = typer.confirm(question, err=True)
    if not agreed:
        print("kvpool: nothing was changed", file=sys.stderr)
        if as_json:
            print_error(InvalidArgument("nothing was changed"))
        raise typer.Exit(1)


def _keeping(status: pb.NamespaceStatus | None) -> dict[str, Any]:
    from kvpool.client.client import keeping_of

    return {} if status is None else keeping_of(status)


def quota_words(facts: dict[str, Any]) -> str:
    """Use beside quota."""
    if not facts.get("quota_bytes") or facts.get("used_bytes") is None:
        return "-"
    return f"{format_bytes(sum(facts['used_bytes'].values()))} of {format_bytes(facts['quota_bytes'])}"


def ttl_words(facts: dict[str, Any]) -> str:
    return f"{facts['ttl_s']:g} s" if facts.get("ttl_s") else "-"


def pin_words(facts: dict[str, Any]) -> str:
    pins = facts.get("pins") or {"soft": 0, "hard": 0}
    return f"{pins['soft']} soft, {pins['hard']} hard" if any(pins.values()) else "-"


def facts_of(namespace: pb.Namespace) -> dict[str, Any]:
    """A namespace as JSON."""
    import json

    from kvpool.master.wire import READ_POLICIES, WRITE_POLICIES

    return {
        "name": namespace.name,
        "uid": namespace.uid.hex(),
        "block_bytes": namespace.block_bytes,
        "block_tokens": namespace.block_tokens,
        "variable": namespace.variable,
        "hash": namespace.hash,
        "salt": namespace.salt.hex(),
        "replicas": namespace.replicas,
        "quota_bytes": namespace.quota_bytes or None,
        "ttl_s": namespace.ttl_ms / 1000 if namespace.ttl_ms else None,
        "write_policy": WRITE_POLICIES[namespace.write_policy].value,
        "read_policy": READ_POLICIES[namespace.read_policy].value,
        "read_timeout_ms": namespace.read_timeout_ms or None,
        "fingerprint": namespace.fingerprint.hex(),
        "layout": json.loads(namespace.layout),
    }
