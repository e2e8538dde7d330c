"""Which way to a worker: shared memory on the same host, else TCP, or what was forced.

Owns the choice only; the ways are `shm` and `tcp`.
"""

from __future__ import annotations

from kvpool.errors import InvalidArgument
from kvpool.transport.base import LinkCause, LinkError, LinkOptions, WorkerAddress, WorkerLink
from kvpool.transport.shm import ShmLink
from kvpool.transport.tcp import TcpLink

TRANSPORTS = ("auto", "shm", "tcp")


def link(worker: WorkerAddress, options: LinkOptions, *, deadline: float) -> WorkerLink:
    """A connected link to one worker incarnation. `auto`: shared memory when both sit on the same host and the worker's socket
    answers, else TCP. Raises LinkError (also when `shm` is forced and impossible), Unauthenticated, VersionMismatch,
    InvalidArgument for a transport that this build does not have."""
    if options.transport not in TRANSPORTS:
        raise InvalidArgument(f"transport: {options.transport!r} is none of {', '.join(TRANSPORTS)}")
    local = bool(worker.unix_name) and worker.host_id == options.host_id != ""
    if options.transport == "shm" and not local:
        raise LinkError(LinkCause.REFUSED, f"worker {worker.worker_id} is not on this host: no shared memory (shm) with it")
    if local and options.transport != "tcp":
        shm = ShmLink(worker.unix_name, options, incarnation=worker.incarnation, worker_id=worker.worker_id)
        try:
            shm.connect(deadline=deadline)
            return shm
        except LinkError as error:
            shm.close()
            if options.transport == "shm" or error.cause is not LinkCause.REFUSED:
                raise
        except BaseException:
            shm.close()
            raise
    tcp = TcpLink(worker.address, options, incarnation=worker.incarnation, worker_id=worker.worker_id)
    try:
        tcp.connect(deadline=deadline)
    except BaseException:
        tcp.close()
        raise
    return tcp
