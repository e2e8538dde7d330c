"""`python clients/decode_node --model MODEL`: a decode node. README.md says what it is."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vllm_node import run  # it lies beside this directory

run("decode_node", port=8200)
