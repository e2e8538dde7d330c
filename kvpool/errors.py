"""The errors of kvpool's public faces, and the one table that maps them to gRPC and back.

Outcomes (a miss, a full pool, a block that is there already) are values, see `kvpool.core.types`.
An error here means that the call as a whole could not be carried out.
"""

from __future__ import annotations

from typing import ClassVar


class KVPoolError(Exception):
    """Base of all errors that kvpool raises. `code` is stable; `retryable` says whether the same call may succeed later."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False


class InvalidArgument(KVPoolError):
    """An argument is wrong; the message names it and says what is allowed."""

    code = "invalid_argument"


class LayoutMismatch(InvalidArgument):
    """The namespace exists with another layout fingerprint; both are in the message."""

    code = "layout_mismatch"


class NamespaceNotFound(KVPoolError):
    """No namespace of this name (or it was deleted)."""

    code = "namespace_not_found"


class Unauthenticated(KVPoolError):
    """No token, or one that the server does not know."""

    code = "unauthenticated"


class PermissionDenied(KVPoolError):
    """The token is known and may not do this."""

    code = "permission_denied"


class QuotaExceeded(KVPoolError):
    """A limit of the namespace or of the service was reached; the message has the limit."""

    code = "quota_exceeded"


class MasterUnavailable(KVPoolError):
    """No master answered within the deadline; the message has the addresses that were tried. `leader`: where the one that refused
    says that the leader is ("host:port"; "" unknown)."""

    code = "master_unavailable"
    retryable = True
    leader: str = ""


class StoreUnavailable(MasterUnavailable):
    """The store of the masters did not answer in time, or takes no writes now. A write may or may not have been done."""

    code = "store_unavailable"


class Fenced(MasterUnavailable):
    """This master is not the leader (any more): the store has a newer epoch, or another owner. Nothing was written."""

    code = "fenced"


class DeadlineExceeded(KVPoolError):
    """The call's deadline passed before it could be finished."""

    code = "deadline_exceeded"
    retryable = True


class VersionMismatch(KVPoolError):
    """Two processes share no protocol version; the message has both."""

    code = "version_mismatch"


class ConfigError(KVPoolError):
    """A setting is unknown or out of range; the message names key, source and what is allowed."""

    code = "config"


BY_CODE: dict[str, type[KVPoolError]] = {
    cls.code: cls
    for cls in (
        KVPoolError,
        InvalidArgument,
        LayoutMismatch,
        NamespaceNotFound,
        Unauthenticated,
        PermissionDenied,
        QuotaExceeded,
        MasterUnavailable,
        StoreUnavailable,
        Fenced,
        DeadlineExceeded,
        VersionMismatch,
        ConfigError,
    )
}

GRPC_STATUS: dict[str, str] = {
    # kvpool code -> name of the grpc.StatusCode that carries it (metadata key ERROR_CODE_KEY has the kvpool code)
    "internal": "INTERNAL",
    "invalid_argument": "INVALID_ARGUMENT",
    "layout_mismatch": "FAILED_PRECONDITION",
    "namespace_not_found": "NOT_FOUND",
    "unauthenticated": "UNAUTHENTICATED",
    "permission_denied": "PERMISSION_DENIED",
    "quota_exceeded": "RESOURCE_EXHAUSTED",
    "master_unavailable": "UNAVAILABLE",
    "store_unavailable": "UNAVAILABLE",
    "fenced": "UNAVAILABLE",
    "deadline_exceeded": "DEADLINE_EXCEEDED",
    "version_mismatch": "FAILED_PRECONDITION",
    "config": "INVALID_ARGUMENT",
}

ERROR_CODE_KEY = "kvpool-error-code"
LEADER_KEY = "kvpool-leader"  # where a master that does not lead says who does; "" unknown
