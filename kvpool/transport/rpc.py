"""gRPC as kvpool uses it: channel and server options, opening a channel with a token, errors to gRPC and back.

Owns nothing that lives: channels belong to who opened them. grpc is imported where it is used, so that `import kvpool` stays
light.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import kvpool
from kvpool.errors import BY_CODE, ERROR_CODE_KEY, GRPC_STATUS, LEADER_KEY, DeadlineExceeded, KVPoolError, MasterUnavailable
from kvpool.quantities import split_address

if TYPE_CHECKING:
    import grpc

# Names are resolved as by every other program here. gRPC's own resolver takes one line of /etc/hosts a name: of a master with two
# addresses, the first one dead, it never tries the second. Read once, when gRPC's core starts.
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")

AUTHORIZATION: Final = "authorization"
MESSAGE_BYTES_MAX: Final = 64 << 20  # a Welcome with what a worker missed; gRPC's own 4 MiB refuses legal batches
MESSAGE_TEXT_MAX: Final = 2000  # of an error's message: it travels in HTTP/2 headers, which are limited to 8 KiB

_COMMON: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)
CHANNEL_OPTIONS: Final[tuple[tuple[str, int | str], ...]] = (
    *_COMMON,
    ("grpc.primary_user_agent", f"kvpool/{kvpool.__version__}"),  # every call says its release, at no cost
    ("grpc.enable_http_proxy", 0),  # the pool's own channels never go through a proxy of the environment
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 1000),  # C core's name for "how long one attempt to connect may take"
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),  # streams may be silent for long: pings go on
    ("grpc.use_local_subchannel_pool", 1),  # closing this channel closes its connection
)
SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    *_COMMON,
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind the same port
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),  # the keepalive above is no flood
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 10_000),  # a client that vanished without a word is noticed
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


def auth_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """Metadata that carries the token; () without one."""
    return ((AUTHORIZATION, f"Bearer {token}"),) if token else ()


def open_channel(address: str, token: str = "", aio: bool = False) -> Any:
    """A lazy channel to "host:port" (IPv6 as "[::1]:port"); every call through it carries the token. A grpc.Channel, thread-safe,
    for blocking stubs, or with `aio` a grpc.aio.Channel on the running loop. The caller closes it."""
    import grpc

    if aio:
        import grpc.aio

        interceptors = _aio_bearer(token) if token else None
        return grpc.aio.insecure_channel(target_of(address), options=CHANNEL_OPTIONS, interceptors=interceptors)
    channel = grpc.insecure_channel(target_of(address), options=CHANNEL_OPTIONS)
    return grpc.intercept_channel(channel, _sync_bearer(token)) if token else channel


def target_of(address: str) -> str:
    """gRPC target of a "host:port": the address family is decided by the resolver, proxies never come in."""
    return f"dns:///{address}"


class _Details(NamedTuple):
    """grpc.ClientCallDetails with other metadata."""

    method: Any
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any = None


def _with_token(details: Any, token: str) -> _Details:
    metadata = [*(details.metadata or ()), *auth_metadata(token)]
    return _Details(details.method, details.timeout, metadata, details.credentials, details.wait_for_ready,
                    getattr(details, "compression", None))  # fmt: skip


def _sync_bearer(token: str) -> Any:
    import grpc

    api: Any = grpc

    bases: Any = (api.UnaryUnaryClientInterceptor, api.UnaryStreamClientInterceptor, api.StreamStreamClientInterceptor)

    class Bearer(*bases):  # type: ignore[misc]
        def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
            return continuation(_with_token(details, token), request)

        intercept_unary_stream = intercept_unary_unary
        intercept_stream_stream = intercept_unary_unary

    return Bearer()


def _aio_bearer(token: str) -> Sequence[Any]:
    import grpc.aio

    api: Any = grpc.aio

    def details_of(details: Any) -> Any:
        metadata = api.Metadata(*(details.metadata or ()), *auth_metadata(token))
        return api.ClientCallDetails(details.method, details.timeout, metadata, details.credentials, details.wait_for_ready)

    class UnaryUnary(api.UnaryUnaryClientInterceptor):  # type: ignore[misc]
        async def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
            return await continuation(details_of(details), request)

    class UnaryStream(api.UnaryStreamClientInterceptor):  # type: ignore[misc]
        async def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
            return await continuation(details_of(details), request)

    class StreamStream(api.StreamStreamClientInterceptor):  # type: ignore[misc]
        async def intercept_stream_stream(self, continuation: Callable[..., Any], details: Any, requests: Any) -> Any:
            return await continuation(details_of(details), requests)

    return (UnaryUnary(), UnaryStream(), StreamStream())


# --- errors -------------------------------------------------------------------------------------------------------------


def status_of(error: KVPoolError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """What a server aborts a call with: status, message, trailing metadata."""
    import grpc

    status: grpc.StatusCode = getattr(grpc.StatusCode, GRPC_STATUS.get(error.code, "INTERNAL"))
    metadata = [(ERROR_CODE_KEY, error.code)]
    if isinstance(error, MasterUnavailable) and error.leader:
        metadata.append((LEADER_KEY, error.leader))
    return status, str(error)[:MESSAGE_TEXT_MAX], tuple(metadata)


def error_of(error: grpc.RpcError, *, address: str = "") -> KVPoolError:
    """The kvpool error behind a failed call. A server that did not answer (refused, cut, or silent until the deadline) is
    MasterUnavailable, naming the address."""
    import grpc

    call: Any = error
    text = call.details() if hasattr(call, "details") else str(error)
    metadata = dict(_metadata(call))
    if ERROR_CODE_KEY in metadata:
        found = BY_CODE.get(str(metadata[ERROR_CODE_KEY]), KVPoolError)(text)
        if isinstance(found, MasterUnavailable):
            found.leader = _address(metadata.get(LEADER_KEY))
        return found
    code = call.code() if hasattr(call, "code") else None
    at = f" at {address}" if address else ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return MasterUnavailable(f"no answer from the master{at} within the deadline")
    if code is grpc.StatusCode.UNAVAILABLE:
        return MasterUnavailable(f"the master{at} cannot be reached: {text}")
    if code is grpc.StatusCode.CANCELLED:
        return DeadlineExceeded(f"the call to the master{at} was cancelled")
    by_status = {
        grpc.StatusCode.UNAUTHENTICATED: "unauthenticated",
        grpc.StatusCode.PERMISSION_DENIED: "permission_denied",
        grpc.StatusCode.INVALID_ARGUMENT: "invalid_argument",
        grpc.StatusCode.UNIMPLEMENTED: "version_mismatch",
        grpc.StatusCode.RESOURCE_EXHAUSTED: "quota_exceeded",
    }
    name = "" if code is None else code.name
    return BY_CODE.get(by_status.get(code, "internal") if code else "internal", KVPoolError)(f"the master{at}: {name} {text}")


def raise_for(error: grpc.RpcError, *, address: str = "") -> NoReturn:
    """Raises the kvpool error behind a failed call."""
    raise error_of(error, address=address) from error


def _address(value: object) -> str:
    """An address that came from the wire; "" for anything that is none."""
    try:
        split_address(str(value))
    except ValueError:
        return ""
    return str(value)


def _metadata(call: Any) -> Iterator[tuple[str, Any]]:
    found = call.trailing_metadata() if hasattr(call, "trailing_metadata") else None
    for entry in found or ():
        yield entry[0], entry[1]
