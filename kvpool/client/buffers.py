"""The caller's buffers as flat byte views, one a block: arrays, tensors, anything with the buffer protocol.

Two forms: one array or tensor [n_blocks, ...] whose rows are the blocks, or a sequence with one buffer a block. What put reads is
copied when it is not contiguous; what get fills is refused with the reason instead, since a copy would never reach the caller.
torch is not imported: a tensor can only come from a caller who has loaded it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool.errors import InvalidArgument
from kvpool.transport.base import Strided


def sources(blocks: Any, *, n_hashes: int, block_bytes: int, variable: bool) -> Sequence[memoryview]:
    """What a put sends: a view of the bytes of each block, uint8. At most `n_hashes`; with fewer only the leading blocks are put.

    Fixed layouts want exactly `block_bytes` each, variable ones 1..`block_bytes`. InvalidArgument names `blocks` and the index.
    """
    views = _views(blocks, "blocks", n_hashes=n_hashes, writable=False)
    for index, size in enumerate(_sizes(views)):
        if size != block_bytes and not (variable and 0 < size < block_bytes):
            allowed = f"1..{block_bytes}" if variable else str(block_bytes)
            raise InvalidArgument(f"blocks[{index}]: {size} bytes; the namespace's blocks have {allowed}")
    return views


def targets(out: Any, *, n_hashes: int, block_bytes: int, variable: bool, range_bytes: int = 0) -> Sequence[memoryview]:
    """What a get fills: a writable view of each buffer, uint8. At most `n_hashes`; with fewer only the leading blocks are got.

    Fixed layouts want exactly `block_bytes` each (a byte range: exactly its length); variable ones take any size, and a block
    that is larger than its buffer is not served. InvalidArgument names `out` and the index.
    """
    views = _views(out, "out", n_hashes=n_hashes, writable=True)
    wanted = range_bytes or (0 if variable else block_bytes)
    for index, size in enumerate(_sizes(views)):
        if wanted and size != wanted:
            what = "the byte range has" if range_bytes else "the namespace's blocks have"
            raise InvalidArgument(f"out[{index}]: {size} bytes; {what} {wanted}")
        if size == 0:
            raise InvalidArgument(f"out[{index}]: an empty buffer")
    return views


def flat_source(data: Any, name: str) -> memoryview:
    """One buffer of bytes to be sent; a copy when it is not contiguous."""
    return _flat(data, name, writable=False)


def _views(value: Any, name: str, *, n_hashes: int, writable: bool) -> Sequence[memoryview]:
    if isinstance(value, list | tuple):
        _check_count(len(value), name, n_hashes)
        return [_flat(one, f"{name}[{index}]", writable=writable) for index, one in enumerate(value)]
    array = _array(value, name)
    if array.ndim < 2:
        raise InvalidArgument(f"{name}: one flat buffer; give a list of one buffer a block, or an array [n_blocks, block_bytes]")
    _check_count(len(array), name, n_hashes)
    if writable and not array.flags.writeable:
        raise InvalidArgument(f"{name}: read-only; a get writes into it")
    if array.flags.c_contiguous:
        n = len(array)
        if n == 0 or array.nbytes == 0:
            return [memoryview(b"")] * n
        return Strided(_bytes_of(array), array.nbytes // n)
    return [_flat(row, f"{name}[{index}]", writable=writable) for index, row in enumerate(array)]


def _sizes(views: Sequence[memoryview]) -> Sequence[int]:
    """What to check: every size, or the one size of all rows."""
    if isinstance(views, Strided):
        return (views.each,) if len(views) else ()
    return [view.nbytes for view in views]


def _check_count(n_buffers: int, name: str, n_hashes: int) -> None:
    if n_buffers > n_hashes:
        raise InvalidArgument(f"{name}: {n_buffers} buffers for {n_hashes} hashes")


def _flat(value: Any, name: str, *, writable: bool) -> memoryview:
    """One block's buffer as a flat uint8 view."""
    if isinstance(value, memoryview | bytearray | bytes):
        view = memoryview(value)
        if view.c_contiguous and view.nbytes:
            view = view if view.format == "B" and view.ndim == 1 else view.cast("B")
        elif view.nbytes and not writable:
            view = memoryview(view.tobytes())
        elif view.nbytes:
            raise InvalidArgument(f"{name}: not contiguous; a get fills buffers in place")
        else:
            view = memoryview(bytearray())
        if writable and view.readonly:
            raise InvalidArgument(f"{name}: read-only; a get writes into it")
        return view
    array = _array(value, name)
    if writable and not array.flags.writeable:
        raise InvalidArgument(f"{name}: read-only; a get writes into it")
    if not array.flags.c_contiguous:
        if writable:
            raise InvalidArgument(f"{name}: not contiguous (strides {array.strides}); a get fills buffers in place")
        array = np.ascontiguousarray(array)
    return _bytes_of(array) if array.nbytes else memoryview(bytearray())


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    """C-contiguous array of any type -> flat uint8 view. Never a copy: `reshape` and `view` of contiguous memory are views."""
    return array.reshape(-1).view(np.uint8).data


def _array(value: Any, name: str) -> np.ndarray[Any, Any]:
    """Anything array-like as a numpy array that shares its memory."""
    if isinstance(value, np.ndarray):
        array = value
    elif (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        array = _from_tensor(torch, value, name)
    elif hasattr(value, "__array_interface__"):
        array = np.asarray(value)
    else:
        try:
            view = memoryview(value)
        except TypeError:
            kind = type(value).__name__
            raise InvalidArgument(f"{name}: {kind} is no buffer; give arrays, tensors or what has the buffer protocol") from None
        array = np.asarray(view)
    if array.dtype.hasobject:
        raise InvalidArgument(f"{name}: an array of Python objects has no bytes of its own")
    return array


def _from_tensor(torch: Any, tensor: Any, name: str) -> np.ndarray[Any, Any]:
    if tensor.device.type != "cpu":
        raise InvalidArgument(f"{name}: a tensor on {tensor.device}; transports here move host memory: give a CPU tensor")
    tensor = tensor.detach()
    if tensor.dim() and tensor.is_contiguous():
        tensor = tensor.view(torch.uint8)  # numpy has no bfloat16 nor float8; bytes are all that is wanted
    try:
        array: np.ndarray[Any, Any] = tensor.numpy()
    except (TypeError, RuntimeError) as error:
        raise InvalidArgument(f"{name}: {error}; give a contiguous tensor") from None
    return array


def total_bytes(views: Sequence[memoryview]) -> int:
    """Bytes in all the views."""
    if isinstance(views, Strided):
        return views.whole.nbytes
    return sum(view.nbytes for view in views)
