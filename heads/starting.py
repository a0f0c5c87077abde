"""What a new head's decoder layer can take over from the target's last one, whatever the model calls its modules.

Only what means the same is taken: a matrix of the right name and shape, a norm that behaves as an RMS norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from heads.divided import gathered
from heads.layers import DecoderLayer
from heads.target import TargetAdapter

_READING = ("q_proj", "k_proj", "v_proj")
_ATTENTION = (*_READING, "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


@torch.no_grad()
def start_from_last_layer(layer: DecoderLayer, hidden_norm: nn.Module, norm: nn.Module, target: TargetAdapter) -> bool:
    """Copies attention, MLP and norms; False, and nothing is changed, where the target's layer is of another make.

    Args:
        layer: its attention reads [embedding, hidden state]; the target's matrices go to the right half.
        hidden_norm: of the hidden state before attention. norm: of the output.
    """
    with gathered(target.last_layer):
        return _start(layer, hidden_norm, norm, target)


def _start(layer: DecoderLayer, hidden_norm: nn.Module, norm: nn.Module, target: TargetAdapter) -> bool:
    last: Any = target.last_layer
    pairs: list[tuple[Tensor, Tensor | None]] = []
    for part, names in (("self_attn", _ATTENTION), ("mlp", _MLP)):
        mine: Any = getattr(layer, part)
        theirs: Any = getattr(last, part, None)
        for name in names:
            weight = getattr(mine, name).weight
            if name in _READING:
                weight = weight[:, weight.shape[1] // 2 :]
            pairs.append((weight, _matrix(getattr(theirs, name, None))))
    eps = getattr(target.config, "rms_norm_eps", 1e-6)
    norms: tuple[tuple[Any, Any], ...] = (
        (hidden_norm, getattr(last, "input_layernorm", None)),
        (layer.post_attention_layernorm, getattr(last, "post_attention_layernorm", None)),
        (norm, getattr(target.decoder, "norm", None)),
    )
    pairs += [(mine.weight, rms_weight(theirs, len(mine.weight), eps)) for mine, theirs in norms]
    if any(source is None or source.shape != weight.shape for weight, source in pairs):
        return False
    for weight, source in pairs:
        assert source is not None, "checked above"
        weight.copy_(source)
    return True


def _matrix(module: Any) -> Tensor | None:
    """The weight of a plain linear layer; None for anything else (quantised, adapted, missing)."""
    return module.weight if type(module) is nn.Linear and module.weight.is_floating_point() else None


def rms_weight(norm: Any, width: int, eps: float) -> Tensor | None:
    """The factors w [H] of a module that is w * x / rms(x), measured on it, since some store w - 1; else None."""
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape != (width,) or weight.is_meta:
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, width, generator=generator).to(weight.device, weight.dtype)
    plain = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    factor = (norm(x).float() * plain).sum(0) / plain.square().sum(0)
    error = (norm(x).float() - factor * plain).abs().max()
    return factor if error <= 8 * torch.finfo(weight.dtype).eps * norm(x).float().abs().max() else None
