"""A tiny Llama with random weights and a byte tokenizer, made in seconds without a download: `python -m
tests.support.tiny_model DIR [seed=1 kv_heads=1 ...]`.

2.5M parameters; 512 tokens: the 256 bytes, then specials; the weights are spread widely, so that the next token is never nearly
tied.
"""

from __future__ import annotations

import sys
from pathlib import Path

VOCAB = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make(directory: Path, *, seed: int = 0, kv_heads: int = 2, layers: int = 4, hidden: int = 256,
         max_tokens: int = 8192) -> Path:  # fmt: skip
    """Writes the model to `directory` unless it is there; the directory."""
    if (directory / "config.json").exists():
        return directory
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=kv_heads, head_dim=32, max_position_embeddings=max_tokens,
        initializer_range=0.2, bos_token_id=256, eos_token_id=257, pad_token_id=258, tie_word_embeddings=False,
    )  # fmt: skip
    part = directory.with_name(directory.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(part)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    vocab |= {name: len(alphabet) + index for index, name in enumerate(("<bos>", "<eos>", "<pad>"))}
    vocab |= {f"<{index}>": index for index in range(len(vocab), VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(part)
    part.rename(directory)
    return directory


if __name__ == "__main__":
    print(make(Path(sys.argv[1]), **{name: int(value) for name, _, value in (word.partition("=") for word in sys.argv[2:])}))
