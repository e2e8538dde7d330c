"""What the proxy is told at start: nodes, limits, deadlines. Frozen; `cli` makes it from flags."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds, sizes in bytes, lengths in tokens."""

    prefill: tuple[str, ...]  # base URLs
    decode: tuple[str, ...]
    prefill_min_tokens: int = 512  # prompts with fewer tokens to compute go straight to decode
    bytes_per_token: float = 4.0  # of text that is not tokenised yet
    slo_ttft_s: float = 2.0
    slo_itl_s: float = 0.1
    prefill_timeout_s: float = 10.0  # all of the prefill step, a second node included
    first_token_timeout_s: float = 120.0  # of one decode node
    idle_timeout_s: float = 30.0  # between two pieces of an answer
    request_timeout_s: float = 600.0  # all of a request
    connect_timeout_s: float = 2.0
    client_timeout_s: float = 30.0  # for a client to send its request, or to take a piece of the answer
    probe_interval_s: float = 2.0
    body_bytes_max: int = 4 << 20
    answer_bytes_max: int = 64 << 20  # of one answer that is not streamed
    event_bytes_max: int = 4 << 20  # of one event of a stream
    requests_max: int = 256  # at once; beyond, 429
    decode_attempts_max: int = 3  # nodes tried until the first token
    affinity_entries_max: int = 131_072
    affinity_slack: int = 8  # requests that a node may have more than the idlest and still be preferred for its blocks
    breaker_failures_max: int = 3  # in a row
    breaker_open_s: float = 2.0  # doubles with each failed trial
    breaker_open_max_s: float = 30.0
