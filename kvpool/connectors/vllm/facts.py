"""vLLM's configuration as the connector's own values: the identity of the engine, and how its KV is cut into shards.

Both halves call this with their own copy of the configuration and must come to the same identity.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens, resolve_kv_cache_block_sizes, resolve_none_hash_seed
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvpool.connectors.vllm.identity import Identity, text_digest, weights_digest
from kvpool.connectors.vllm.settings import ConnectorSettings
from kvpool.core.types import MAX_BLOCK_BYTES
from kvpool.errors import ConfigError

_KNOWN_TOKENS = 32  # of the block whose hash is compared


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """`n_shards`: different shares of a block; `replicas`: ranks side by side with the same share; `world`: ranks that report."""

    identity: Identity
    block_tokens: int
    hashes_per_block: int
    n_shards: int
    replicas: int
    world: int

    def shard_of(self, rank: int) -> int:
        """The share that this rank (of the world, tensor parallel ranks side by side) loads, and saves when it `saves`."""
        return rank // self.replicas

    def saves(self, rank: int) -> bool:
        """One of the ranks with the same share saves it."""
        return rank % self.replicas == 0


def facts_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: ConnectorSettings) -> EngineFacts:
    """ConfigError says what of this configuration the connector cannot do; the engine then starts and works without the pool."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    if len(kv_cache_config.kv_cache_groups) != 1 or tuple(kv_cache_config.prefix_cacheable_group_ids) != (0,):
        groups = [type(group.kv_cache_spec).__name__ for group in kv_cache_config.kv_cache_groups]
        raise ConfigError(f"the model has KV cache groups {groups}; one group of attention layers is what can be shared")
    block_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    replicas = max(1, kv_cache_config.kv_tp_replicas)
    tp, pp, pcp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.prefill_context_parallel_size
    seed, known = _known_hash(cache.prefix_caching_hash_algo)
    directory = None if settings.model else _weights_directory(model)
    group = kv_cache_config.kv_cache_groups[0]
    device = _device(vllm_config, group.kv_cache_spec)
    block_bytes = _block_bytes(vllm_config, kv_cache_config)
    config = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        config.pop(name, None)
    identity = Identity.of(
        {
            "engine": "vllm " + ".".join(vllm.__version__.split(".")[:2]),
            "model": settings.model or _model_name(model.model),
            "revision": model.revision or "",
            "config": text_digest([config, str(model.quantization)]),
            "weights": "" if directory is None else weights_digest(directory),
            "dtype": str(model.dtype).removeprefix("torch."),
            "kv": str(cache.cache_dtype),
            "block": block_tokens,
            "cache": kv_cache_config.kv_cache_layout or "default",
            "device": device,
            "bytes": block_bytes,
            "tp": tp,
            "pp": pp,
            "cp": f"{parallel.decode_context_parallel_size}/{pcp}",
            "rep": replicas,
            "algo": cache.prefix_caching_hash_algo,
            "seed": seed,
            "hash": known,
        },
        block_bytes=block_bytes,
        block_tokens=block_tokens,
    )
    world = parallel.world_size
    return EngineFacts(identity, block_tokens, block_tokens // hash_tokens, -(-world // replicas), replicas, world)


def _known_hash(algo: str) -> tuple[str, str]:
    """A name of the seed of the engine's hashes, and the hash that its own function gives the tokens 0, 1, 2...: two engines
    for which these are equal name the same tokens alike. ConfigError when the seed is another one in each process."""
    function = get_hash_fn_by_name(algo)
    seed = resolve_none_hash_seed(function)
    if seed != resolve_none_hash_seed(function):
        raise ConfigError(f"prefix_caching_hash_algo={algo!r} has a random seed in each process; set PYTHONHASHSEED to the same "
                          "number for all engines, or use sha256")  # fmt: skip
    parent = BlockHash(function(seed))
    block: Any = hash_block_tokens(function, parent, list(range(_KNOWN_TOKENS)), None)
    given = "set" if os.environ.get("PYTHONHASHSEED") is not None else "unset"
    return f"{given}/{text_digest(seed)[:8]}", bytes(block).hex()[:16]  # a seed may be a secret: collisions could be made with it


def _model_name(model: str) -> str:
    """What stays the same when two hosts have the weights in different directories."""
    return Path(model).name if os.path.isdir(model) else model.rpartition("/")[2]  # noqa: PTH112


def _weights_directory(model: Any) -> Path | None:
    """Where the weights lie on this host; None when that cannot be found out."""
    directory = Path(model.model)
    if directory.is_dir():
        return directory
    try:
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(model.model, "config.json", revision=model.revision)
    except Exception:  # whatever is wrong with the hub's cache, the name and the revision remain
        return None
    return Path(config).parent if isinstance(config, str) else None


def _device(vllm_config: VllmConfig, spec: Any) -> str:
    """Device type, with what decides how the bytes are arranged inside a block: on CPUs the instruction set of the kernel."""
    kind = str(vllm_config.device_config.device_type)
    if kind != "cpu":
        return kind
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(vllm_config.model_config.dtype, spec.block_size, getattr(spec, "head_size", None),
                        vllm_config.cache_config.cache_dtype)  # fmt: skip
    return f"cpu/{isa}"


def _block_bytes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Bytes of a block on one rank; with pipeline parallelism, where ranks may have different numbers of layers, the most that it
    can be."""
    group = kv_cache_config.kv_cache_groups[0]
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    pages = [(specs[name] if specs else group.kv_cache_spec).page_size_bytes for name in group.layer_names]
    n_bytes = int(sum(pages))
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        n_bytes = int(max(pages)) * vllm_config.model_config.hf_text_config.num_hidden_layers
    if not 0 < n_bytes <= MAX_BLOCK_BYTES:
        raise ConfigError(f"a block has {n_bytes} bytes on one rank; the limit is {MAX_BLOCK_BYTES}: use a smaller block size")
    return n_bytes
