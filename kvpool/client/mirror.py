"""The stream (Watch) that keeps the client's copy of the index, on one thread. What an event does is in `mirror_index`."""

from __future__ import annotations

import logging
import random
import threading
from typing import Any, Final

import grpc

from kvpool.client.master import MasterLink, is_gone
from kvpool.client.mirror_index import MirrorIndex
from kvpool.client.peers import Peers
from kvpool.core.types import NamespaceUid
from kvpool.errors import InvalidArgument, MasterUnavailable
from kvpool.transport.rpc import error_of
from kvpool.v1 import master_pb2 as pb

log = logging.getLogger(__name__)

RECONNECT_S: Final = (0.1, 0.5)  # a pause is drawn from this range


class Mirror:
    """Thread-safe. The thread begins with the first namespace that is followed; `close` ends it. Lookups: see `index`."""

    def __init__(self, master: MasterLink, peers: Peers, *, bytes_max: int) -> None:
        self._master = master
        self.index = MirrorIndex(peers, bytes_max=bytes_max)
        self._lock = threading.Lock()
        self._stream: Any = None
        self._restart = False
        self._closed = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self.connected = False
        self._events = self._reconnects = 0

    def follow(self, uid: NamespaceUid) -> None:
        """From now on this namespace is mirrored, within the budget."""
        if not self.index.want(uid):
            return
        with self._lock:
            self._restart_stream()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="kvpool-mirror", daemon=True)
                self._thread.start()

    def _restart_stream(self) -> None:
        self._restart = True
        self._wake.set()
        if self._stream is not None:
            self._stream.cancel()

    def stats(self) -> dict[str, Any]:
        """Counters and size of the mirror."""
        return {"events": self._events, "resyncs": self.index.resyncs, "reconnects": self._reconnects,
                "connected": self.connected, **self.index.sizes()}  # fmt: skip

    def close(self) -> None:
        """Ends the thread; waiters are woken. Idempotent."""
        self.index.close()
        with self._lock:
            self._closed = True
            self._wake.set()
            if self._stream is not None:
                self._stream.cancel()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                self._restart = False
                self._wake.clear()
            uids, epoch, seq = self.index.begin_stream()
            pause = True
            if uids:
                pause = self._watch(pb.WatchRequest(namespaces=uids, epoch=epoch, after_seq=seq), frozenset(uids))
            self.connected = False
            with self._lock:
                restart = self._restart or self._closed
            if not restart:
                self._reconnects += 1
                if pause:
                    self._wake.wait(random.uniform(*RECONNECT_S) if uids else None)

    def _watch(self, request: pb.WatchRequest, uids: frozenset[NamespaceUid]) -> bool:
        """One stream, until it ends or is to be begun again. False: another master is there to be asked at once."""
        stub = None
        try:
            stub = self._master.stub
            stream = stub.Watch(request)
            with self._lock:
                self._stream = stream
                if self._restart or self._closed:
                    stream.cancel()
            for event in stream:
                self._events += 1
                if not self._master.heard(stub, event.epoch):
                    log.warning("event=watch_of_old_epoch epoch=%d", event.epoch)
                    return self._master.failed(stub, counted=False)
                self.connected = True
                for uid in self.index.apply(event, uids):
                    log.warning("event=mirror_too_large namespace=%s", uid.hex())
                    with self._lock:
                        self._restart_stream()
        except grpc.RpcError as error:
            if not self._restart and not self._closed:
                found = error_of(error)
                log.debug("event=watch_ended code=%s reason=%s", found.code, found)
                if stub is not None:
                    leader = found.leader if isinstance(found, MasterUnavailable) else ""
                    return self._master.failed(stub, hint=leader, counted=False, gone=is_gone(error))
        except InvalidArgument:  # the client is closed
            return True
        except ValueError:  # the channel was closed: another thread went on to the next master
            return False
        finally:
            with self._lock:
                ended, self._stream = self._stream, None
            if ended is not None:
                ended.cancel()
        return True
