"""The command line: flags to settings."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final
from urllib.parse import urlsplit

from kvpool_pd_proxy.server import serve
from kvpool_pd_proxy.settings import Settings

NODES_MAX: Final = 64  # of one role


def main(argv: Sequence[str] | None = None) -> None:
    """Runs until SIGINT or SIGTERM. Exit status 0, 1 (cannot start) or 2 (usage)."""
    parser = _parser()
    words = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=words.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for role in ("prefill", "decode"):
        urls = getattr(words, role)
        if len(urls) > NODES_MAX or len(set(urls)) < len(urls):
            parser.error(f"--{role}: at most {NODES_MAX} nodes, each once")
    settings = Settings(**{field.name: _value(words, field.name) for field in fields(Settings) if hasattr(words, field.name)})
    try:
        bound = socket.create_server((words.host, words.port), family=socket.AF_INET6 if ":" in words.host else socket.AF_INET)
    except OSError as error:
        sys.exit(f"error: cannot listen on {words.host}:{words.port}: {error}")
    with bound:
        asyncio.run(serve(settings, bound))


def _value(words: argparse.Namespace, name: str) -> Any:
    value = getattr(words, name)
    return tuple(value) if isinstance(value, list) else value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvpool-pd-proxy",
        description="An OpenAI-compatible proxy in front of prefill and decode nodes that share a kvpool.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, of = parser.add_argument, Settings(prefill=(), decode=())
    add(
        "--prefill",
        action="append",
        type=_url,
        default=[],
        metavar="URL",
        help="a prefill node, e.g. http://127.0.0.1:8100; repeat it",
    )
    add("--decode", action="append", type=_url, required=True, metavar="URL", help="a decode node; repeat it")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=_port, default=8000, help="0: any free one, named in the ready line")
    add(
        "--prefill-min-tokens",
        type=_whole,
        default=of.prefill_min_tokens,
        help="with fewer tokens to compute a prompt goes to decode",
    )
    add(
        "--bytes-per-token",
        type=_positive,
        default=of.bytes_per_token,
        help="to guess the length of text that is not tokenised yet",
    )
    for flag, name, text in (
        ("--slo-ttft", "slo_ttft_s", "goodput: most to the first token"),
        ("--slo-itl", "slo_itl_s", "goodput: most between two tokens, the mean of a request"),
        ("--prefill-timeout", "prefill_timeout_s", "most for the prefill step; then decode computes the prompt itself"),
        ("--first-token-timeout", "first_token_timeout_s", "most for a decode node's first token"),
        ("--idle-timeout", "idle_timeout_s", "most between two pieces of a node's answer"),
        ("--request-timeout", "request_timeout_s", "most for a whole request"),
        ("--client-timeout", "client_timeout_s", "most for a client to send its request, or to take a piece of its answer"),
        ("--probe-interval", "probe_interval_s", "between two looks at each node's /health"),
    ):
        add(flag, dest=name, type=_seconds, default=getattr(of, name), metavar="TIME", help=f"{text} (e.g. 500ms, 2s)")
    add("--max-requests", dest="requests_max", type=_count, default=of.requests_max, help="at once; beyond, 429")
    add(
        "--max-body",
        dest="body_bytes_max",
        type=_count,
        default=of.body_bytes_max,
        metavar="BYTES",
        help="of one request; beyond, 413",
    )
    add(
        "--affinity-slack",
        type=_whole,
        default=of.affinity_slack,
        help="requests that a node with the blocks may be ahead of the idlest",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.username
    except ValueError:
        good = False
    if not good or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise argparse.ArgumentTypeError(f"{text!r} is not http://host:port")
    return f"{parts.scheme}://{parts.netloc}"


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m)?", text)
    value = float(found[1]) * {"ms": 0.001, "s": 1.0, "m": 60.0, None: 1.0}[found[2]] if found else 0.0
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time like 500ms, 2s or 5m")
    return value


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1_000:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _count(text: str) -> int:
    if not _whole(text):
        raise argparse.ArgumentTypeError("at least 1")
    return int(text)


def _port(text: str) -> int:
    if _whole(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text} is not a port")
    return int(text)
