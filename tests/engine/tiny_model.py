"""Makes a Llama of one and a half million random parameters, with a tokenizer, for tests of a
real engine.

usage: VENV/bin/python tests/engine/tiny_model.py FOLDER      (VENV as made by install_vllm.py)

Needs no network and gives the same bytes every time, so that two engines compute the same KV. The
weights are spread wide, so that the output depends on the prompt, and special tokens are never
drawn, so that a greedy answer runs to its limit.
"""

import sys
import sysconfig
from pathlib import Path

VOCABULARY = 4096
POSITIONS_MAX = 16384
HIDDEN = 128
SEED = 20
SPECIAL = ["<|end|>", "<|turn|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message.role }}: {{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)


def make_tokenizer(folder: Path) -> int:
    """Byte-level BPE over the standard library's sources; the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train([str(path) for path in sources], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        model_max_length=POSITIONS_MAX,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def make_weights(folder: Path, vocabulary: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=POSITIONS_MAX,
            tie_word_embeddings=False,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=2,
        )
    )
    with torch.no_grad():
        model.lm_head.weight[: len(SPECIAL)] = 0
    model.to(torch.bfloat16).save_pretrained(folder)


def make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    make_weights(folder, make_tokenizer(folder))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
