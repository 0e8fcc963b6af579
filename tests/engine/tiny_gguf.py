"""Makes a Llama of a hundred thousand random parameters as a GGUF file, whose tokens are bytes.

usage: VENV/bin/python tests/engine/tiny_gguf.py FILE      (VENV as made by install_llama_cpp.py)

The same bytes every time. Special tokens are never drawn, so that an answer runs to its limit.
"""

import sys
from pathlib import Path

HIDDEN, LAYERS, FORWARD, HEAD, HEADS, KV_HEADS = 64, 2, 128, 16, 4, 2
CONTEXT_TOKENS_MAX = 8192
SEED = 20
SPECIAL = ["<|end|>", "<|turn|>"]
# llama.cpp does not load a byte-pair tokenizer without at least one pair.
MERGE = ("t h", "th")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }}: {{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in vocabularies like GPT-2's."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def make(file: Path) -> None:
    import numpy as np
    from gguf import GGUFWriter, TokenType

    tokens = [*SPECIAL, *byte_characters(), MERGE[1]]
    writer = GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT_TOKENS_MAX)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (len(tokens) - len(SPECIAL))
    )
    writer.add_token_merges([MERGE[0]])
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(value=False)
    writer.add_chat_template(CHAT_TEMPLATE)

    random = np.random.default_rng(SEED)

    def draw(*shape: int) -> "np.ndarray":
        return (random.standard_normal(shape) * 0.2).astype(np.float32)

    output = draw(len(tokens), HIDDEN)
    output[: len(SPECIAL)] = 0
    # Bytes that are no text of their own are never drawn either: every token is a character.
    for at, token in enumerate(tokens):
        if not (len(token) == 1 and " " < token < "\x7f"):
            output[at] = 0
    tensors = {
        "token_embd.weight": draw(len(tokens), HIDDEN),
        "output.weight": output,
        "output_norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        tensors |= {
            f"{at}attn_norm.weight": np.ones(HIDDEN, np.float32),
            f"{at}ffn_norm.weight": np.ones(HIDDEN, np.float32),
            f"{at}attn_q.weight": draw(HEADS * HEAD, HIDDEN),
            f"{at}attn_k.weight": draw(KV_HEADS * HEAD, HIDDEN),
            f"{at}attn_v.weight": draw(KV_HEADS * HEAD, HIDDEN),
            f"{at}attn_output.weight": draw(HIDDEN, HEADS * HEAD),
            f"{at}ffn_gate.weight": draw(FORWARD, HIDDEN),
            f"{at}ffn_up.weight": draw(FORWARD, HIDDEN),
            f"{at}ffn_down.weight": draw(HIDDEN, FORWARD),
        }
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
