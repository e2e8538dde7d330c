"""`python clients/prefill_node --model MODEL`: a prefill node. README.md says what it is."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vllm_node import run  # it lies beside this directory

run("prefill_node", port=8100)
