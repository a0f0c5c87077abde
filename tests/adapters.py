"""Random peft adapters for tests: every tensor is random, so that every adapted module computes something else."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model

from tests.tiny import tiny_model

IDS = torch.randint(0, 512, (1, 10), generator=torch.Generator().manual_seed(0))


def adapted(model: Any, config: PeftConfig | None = None, seed: int = 3) -> PeftModel:
    """The model with a random adapter (default: LoRA in all linear layers), not merged, in eval mode."""
    config = config or LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        wrapped: Any = get_peft_model(model, config)
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    return wrapped.eval()


def save_adapter(folder: Path, model: str | Any = "llama", config: PeftConfig | None = None, seed: int = 3) -> Path:
    """The files of `adapted`, as peft writes them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it saves embeddings, too
        adapted(tiny_model(model) if isinstance(model, str) else model, config, seed).save_pretrained(str(folder))
    return folder


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=ids).logits
    return found
