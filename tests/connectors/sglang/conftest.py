"""Only where the engines' environment has sglang (`make test-engines`); elsewhere these tests are not collected."""

from __future__ import annotations

import importlib.util

HAS_SGLANG = importlib.util.find_spec("sglang") is not None
collect_ignore_glob = [] if HAS_SGLANG else ["test_*.py"]

if HAS_SGLANG:
    from tests.connectors.sglang import real

    real.load_all()
