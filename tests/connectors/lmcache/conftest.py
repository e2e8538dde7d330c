"""Only where the engines' environment has lmcache (`make test-engines`); elsewhere these tests are not collected."""

from __future__ import annotations

import importlib
import importlib.util
import warnings

HAS_LMCACHE = importlib.util.find_spec("lmcache") is not None
collect_ignore_glob = [] if HAS_LMCACHE else ["test_*.py"]

if HAS_LMCACHE:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what these say of a machine without a GPU is not ours to hear
        for name in ("lmcache.v1.distributed.l2_adapters", "lmcache.v1.storage_backend.remote_backend",
                     "kvpool.connectors.lmcache.l2"):  # fmt: skip
            importlib.import_module(name)
