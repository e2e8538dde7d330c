"""The async face of kvpool; it lives in `kvpool.client.aio`."""

from kvpool.client.aio import AsyncClient, AsyncNamespace, AsyncPutSession, connect

__all__ = ["AsyncClient", "AsyncNamespace", "AsyncPutSession", "connect"]
