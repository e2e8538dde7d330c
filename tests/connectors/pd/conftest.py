"""Only where the engines' environment has vLLM (`make test-engines`); elsewhere these tests are not collected."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
