"""Paged KV tensors as blocks of bytes: gathers blocks into host memory, scatters host memory into blocks, in batches.

    paged   one tensor a layer, [.., n_blocks, ..]; block b of a layer is what has index b there
    host    uint8 [n, block_bytes]: the layers of a block one after the other, each C-contiguous in the tensor's own axis order

On a GPU the copies run on a stream of their own, behind an event of the engine's stream; the host side is pinned. On the CPU the
same code runs with neither.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvpool.errors import InvalidArgument

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes only: no dtype of KV is without its copies


class PagedBlocks:
    """All layers of one rank. Calls from several threads may overlap; of the same block only the caller can keep them apart."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], n_blocks: int) -> None:
        """`kv_caches`: layer name -> tensor with one axis of `n_blocks`. InvalidArgument names a layer without one."""
        self.layers = [_block_first(name, kv_caches[name], n_blocks) for name in sorted(kv_caches, key=_natural)]
        if not self.layers:
            raise InvalidArgument("kv_caches: no layers")
        self.device = self.layers[0].device
        self._sizes = [layer[0].numel() * layer.element_size() for layer in self.layers]
        self.block_bytes = sum(self._sizes)
        self._on_gpu = self.device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(self.device) if self._on_gpu else None
        self._lock = threading.Lock()  # one batch at a time on the stream

    def host(self, n: int) -> torch.Tensor:
        """Uninitialised host memory for n blocks: uint8 [n, block_bytes]."""
        return torch.empty((n, self.block_bytes), dtype=torch.uint8, pin_memory=self._on_gpu)

    def ready(self) -> Any:
        """A mark in the engine's stream: what was submitted before is in the blocks that a `gather(after=mark)` reads."""
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def gather(self, block_ids: Sequence[int], host: torch.Tensor, *, after: Any = None) -> None:
        """Copies the blocks to `host` [len(block_ids), block_bytes]; it is all there when this returns."""
        index = torch.tensor(block_ids, dtype=torch.int64)
        if not self._on_gpu:
            for layer, part in self._parts(host):
                part.copy_(layer.index_select(0, index))
            return
        with self._lock, torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            staged = torch.empty_like(host, device=self.device)
            index = index.pin_memory().to(self.device, non_blocking=True)
            for layer, part in self._parts(staged):
                part.copy_(layer.index_select(0, index))
            host.copy_(staged, non_blocking=True)
            self._stream.synchronize()

    def scatter(self, host: torch.Tensor, block_ids: Sequence[int]) -> None:
        """Copies `host` [len(block_ids), block_bytes] into the blocks; they may be read when this returns."""
        index = torch.tensor(block_ids, dtype=torch.int64)
        if not self._on_gpu:
            for layer, part in self._parts(host):
                layer.index_copy_(0, index, part)
            return
        with self._lock, torch.cuda.stream(self._stream):
            staged = host.to(self.device, non_blocking=True)
            index = index.pin_memory().to(self.device, non_blocking=True)
            for layer, part in self._parts(staged):
                layer.index_copy_(0, index, part)
            self._stream.synchronize()

    def _parts(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer with its columns of `flat`, as [n, *one block's shape]."""
        found, at = [], 0
        for layer, size in zip(self.layers, self._sizes, strict=True):
            part = flat[:, at : at + size].view(layer.dtype)
            found.append((layer, part.unflatten(1, layer.shape[1:])))
            at += size
        return found


def _block_first(name: str, tensor: torch.Tensor, n_blocks: int) -> torch.Tensor:
    """The tensor with its block axis in front (a view)."""
    axes = [axis for axis, length in enumerate(tensor.shape) if length == n_blocks]
    if not axes:
        raise InvalidArgument(f"kv_caches[{name!r}]: shape {tuple(tensor.shape)} has no axis of {n_blocks} blocks")
    return tensor.view(_INTEGERS[tensor.element_size()]).movedim(axes[0], 0)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
