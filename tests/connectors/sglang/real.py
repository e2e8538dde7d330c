"""SGLang's real storage classes on a machine without a GPU.

The package itself does not import here (it wants CUDA kernels), so `sglang` and `sglang.srt` are bare packages with its path, and
what only GPU code uses (triton, torchvision, IPython) is an empty shell. All that a test names is SGLang's own: factory, base
class, configuration, transfers, and the host pools with their memory.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

SHELLS = ("triton", "torchvision", "IPython")


class _Nothing:
    """Stands for whatever GPU code wants at import: a decorator, a type in an annotation, a constant."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and not kwargs and callable(args[0]) else _Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __getitem__(self, index: Any) -> Any:
        return _Nothing()


class _Shell(types.ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else _Nothing()


class _Shells:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in SHELLS:
            return importlib.machinery.ModuleSpec(name, _Shells, is_package=True)  # type: ignore[arg-type]
        return None

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Shell(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None: ...


def load() -> None:
    """Makes `import sglang.srt.mem_cache...` work. Once a process."""
    if "sglang" in sys.modules:
        return
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations, "sglang is not installed"
    # these look for the shells' originals while they load, and must not find the shells
    from transformers import AutoConfig, AutoProcessor, PretrainedConfig  # noqa: F401

    importlib.import_module("torch.utils.flop_counter")
    importlib.import_module("torch._dynamo")
    root = Path(next(iter(spec.submodule_search_locations)))
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    sys.meta_path.append(_Shells)  # type: ignore[arg-type]


def mha_pool(*, layout: str = "page_first", pages: int = 16, page_size: int = 8, layers: int = 3, heads: int = 2,
             head_dim: int = 16, dtype: str = "bfloat16") -> Any:  # fmt: skip
    """SGLang's host pool of an attention model with K and V, filled with nothing in particular."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    kind = getattr(torch, dtype)
    tokens = page_size * 2

    def device() -> tuple[Any, ...]:
        return tuple(torch.zeros(tokens, heads, head_dim, dtype=kind) for _ in range(layers))

    k, v = device(), device()
    pointers = [torch.tensor([t.data_ptr() for t in side], dtype=torch.uint64) for side in (k, v)]
    buffers = KVBuffers(k=k, v=v, k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=KVBufferLayout.NHD)
    info = MHABufferInfo(buffers=buffers, page_size=page_size, head_num=heads, head_dim=head_dim, v_head_dim=head_dim, dtype=kind,
                         device=torch.device("cpu"))  # fmt: skip
    return MHATokenToKVPoolHost(info, 1.0, 0, page_size, layout, pin_memory=False, device="cpu", device_capacity_tokens=tokens,
                                start_layer=0, end_layer=layers, host_token_capacity=pages * page_size)  # fmt: skip


def mla_pool(*, layout: str = "page_first", pages: int = 16, page_size: int = 8, layers: int = 3, rank: int = 24,
             rope: int = 8) -> Any:  # fmt: skip
    """SGLang's host pool of an MLA model."""
    import torch
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    tokens = page_size * 2
    rows = tuple(torch.zeros(tokens, 1, rank + rope, dtype=torch.bfloat16) for _ in range(layers))
    info = MLABufferInfo(buffers=rows, data_ptrs=torch.tensor([t.data_ptr() for t in rows], dtype=torch.uint64),
                         layer_indices=tuple(range(layers)), device_layer_num=layers, page_size=page_size, kv_lora_rank=rank,
                         qk_rope_head_dim=rope, kv_cache_dim=rank + rope, dtype=torch.bfloat16,
                         device=torch.device("cpu"))  # fmt: skip
    return MLATokenToKVPoolHost(info, 1.0, 0, page_size, layout, pin_memory=False, device="cpu", device_capacity_tokens=tokens,
                                start_layer=0, end_layer=layers, target_layer_num=layers,
                                host_token_capacity=pages * page_size)  # fmt: skip


def fill(pool: Any, seed: int) -> None:
    """Every byte of the pool's memory from a seed."""
    import torch

    flat = pool.kv_buffer.view(torch.uint8)
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))


def page_bytes(pool: Any, page: int) -> bytes:
    """A page's bytes, as SGLang itself gives them."""
    import torch

    return bytes(pool.get_data_page(page * pool.page_size, flat=True).contiguous().view(torch.uint8).numpy())


def indices(pool: Any, pages: Any) -> Any:
    """Host indices of all tokens of these pages."""
    import torch

    return torch.cat([torch.arange(p * pool.page_size, (p + 1) * pool.page_size) for p in pages])


def page_hashes(tokens: list[int], page_size: int, prior: str | None = None) -> list[str]:
    """SGLang's own chain of page hashes."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    return list(get_storage_hash_str(tokens, prior, page_size=page_size))


def config(**changes: Any) -> Any:
    """SGLang's storage configuration of one rank."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    facts: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False,
        "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "meta/tiny", "extra_config": {},
    }  # fmt: skip
    return HiCacheStorageConfig(**(facts | changes))


def load_all() -> None:
    """`load`, and every module that the tests use; what these say of a machine without a GPU is not ours to hear."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load()
        for name in ("hicache_storage", "storage.backend_factory", "pool_host.mha", "pool_host.mla", "utils"):
            importlib.import_module(f"sglang.srt.mem_cache.{name}")
        importlib.import_module("sglang.srt.observability.metrics_collector")
        importlib.import_module("kvpool.connectors.sglang_hicache")
