"""SGLang's HiCache on the pool: module_path kvpool.connectors.sglang_hicache, class_name KVPoolHiCacheStorage."""

from kvpool.connectors.sglang_hicache.storage import KVPoolHiCacheStorage

__all__ = ["KVPoolHiCacheStorage"]
