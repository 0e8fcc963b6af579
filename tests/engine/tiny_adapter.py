"""Makes a LoRA adapter with random weights for the model of `tiny_model.py`.

usage: VENV/bin/python tests/engine/tiny_adapter.py FOLDER SEED

Spread as wide as the model's own weights, so that every answer differs from the model's.
"""

import json
import sys
from pathlib import Path

RANK = 8
HIDDEN, LAYERS, HEAD, HEADS, KV_HEADS = 128, 2, 32, 4, 2


def make(folder: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name, size in (("q_proj", HEADS * HEAD), ("v_proj", KV_HEADS * HEAD)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}."
            tensors[f"{at}lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=random) * 0.3
            tensors[f"{at}lora_B.weight"] = torch.randn(size, RANK, generator=random) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0, "bias": "none", "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "tiny", "inference_mode": True, "modules_to_save": None,
        "use_rslora": False, "use_dora": False,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    make(Path(sys.argv[1]), int(sys.argv[2]))
