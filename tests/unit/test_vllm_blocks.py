"""Paged tensors as blocks of bytes: what is gathered is what is scattered, in each layout that vLLM has, on CPUs and GPUs."""

from __future__ import annotations

import pytest

from kvpool.errors import InvalidArgument

torch = pytest.importorskip("torch")
DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
N_BLOCKS, HEADS, TOKENS, DIM, LAYERS = 7, 2, 4, 6, 3

# Physical order of [layer, block, head, token, content], as in vLLM's KVCacheLayout.
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "LHBNC": (0, 2, 1, 3, 4), "BLHNC": (1, 0, 2, 3, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}  # fmt: skip


def caches(order: tuple[int, ...], dtype: object, device: str) -> dict[str, object]:
    """Layers as views of one allocation, in random bytes."""
    shape = (LAYERS, N_BLOCKS, HEADS, TOKENS, 2 * DIM)
    n_bytes = torch.empty((), dtype=dtype).element_size()
    for length in shape:
        n_bytes *= length
    flat = torch.randint(0, 256, (n_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).to(device).view(dtype)
    whole = flat.view([shape[axis] for axis in order]).permute([order.index(axis) for axis in range(5)])
    return {f"model.layers.{layer}.attn": whole[layer] for layer in range(LAYERS)}


def bits(tensor: object) -> object:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8", "float8_e4m3fn"])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_travel_whole(order: str, dtype: str, device: str) -> None:
    from kvpool.connectors.vllm.blocks import PagedBlocks

    source, target = (caches(ORDERS[order], getattr(torch, dtype), device) for _ in range(2))
    for layer in target.values():
        bits(layer)  # contiguous copies only
        layer.view(torch.uint8).zero_()
    read, write = PagedBlocks(source, N_BLOCKS), PagedBlocks(target, N_BLOCKS)
    assert read.block_bytes == LAYERS * HEADS * TOKENS * 2 * DIM * getattr(torch, dtype).itemsize
    host = read.host(3)
    assert host.shape == (3, read.block_bytes) and host.device.type == "cpu"
    read.gather([5, 0, 2], host, after=read.ready())
    write.scatter(host, [1, 6, 3])
    for name, layer in source.items():
        there = target[name]
        for block, other in ((5, 1), (0, 6), (2, 3)):
            assert torch.equal(bits(layer[block]), bits(there[other]))
        for untouched in (0, 2, 4, 5):
            assert not bits(there[untouched]).any()
    again = write.host(3)
    write.gather([1, 6, 3], again)
    assert torch.equal(again, host)


def test_layers_go_by_their_number() -> None:
    """The tenth layer comes after the second, whichever is registered first."""
    from kvpool.connectors.vllm.blocks import PagedBlocks

    layers = {f"layers.{n}": torch.full((2, 4), n, dtype=torch.uint8) for n in (10, 2, 0)}
    paged = PagedBlocks(layers, 2)
    host = paged.host(1)
    paged.gather([1], host)
    assert host.tolist() == [[0] * 4 + [2] * 4 + [10] * 4]


def test_a_tensor_without_that_many_blocks_is_named() -> None:
    from kvpool.connectors.vllm.blocks import PagedBlocks

    with pytest.raises(InvalidArgument, match=r"'layers\.0'"):
        PagedBlocks({"layers.0": torch.zeros((3, 4))}, 2)
    with pytest.raises(InvalidArgument, match="no layers"):
        PagedBlocks({}, 2)
