"""The frozen target: any causal language model of transformers, unmodified.

Shapes: B rows, N query tokens, S key slots (filled cache + N), T sequence length, H hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.masking_utils import sdpa_mask

from heads.cache import SlotCache
from heads.embedded import resolve_target
from heads.tree import additive_mask

_GQA_SDPA = "draftsmith_gqa_sdpa"


def _gqa_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa attention, except that grouped keys are never repeated in memory.

    With a mask the library copies every key and value once per query head of its group, which on a CPU costs
    several times the attention itself; the kernel can index the groups instead.
    """
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise ValueError(
            "this model's attention needs a soft-cap, sinks or a bias: load it with target.attention: eager"
        )
    causal = attention_mask is None and query.shape[2] > 1
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, is_causal=causal, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(_GQA_SDPA, _gqa_sdpa)
AttentionMaskInterface.register(_GQA_SDPA, sdpa_mask)  # for calls with a 2-D padding mask, as `generate` makes


@dataclass(frozen=True)
class TargetOutput:
    """logits_BNV: of the kept positions. hidden_BNH: all positions, after the final norm. taps: layer -> [B,N,H]."""

    logits_BNV: Tensor
    hidden_BNH: Tensor
    taps: dict[int, Tensor]


class TargetAdapter:
    """Runs a causal LM on explicit positions and 4-D additive masks, and reads its hidden states by hooks.

    Args:
        model: a loaded `PreTrainedModel` with an LM head. It is set to eval and frozen.
        taps: layers whose output (0-based, before the final norm) is wanted with every pass;
            `taps[k]` equals transformers' `hidden_states[k + 1]` (except after the last layer, which that tuple norms).
        name: how the target was named by the user, for provenance.
    """

    def __init__(self, model: Any, taps: Sequence[int] = (), name: str = "", revision: str | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.name, self.revision = name, revision
        self.config = model.config.get_text_config()
        self.hidden_size: int = self.config.hidden_size
        self.num_layers: int = self.config.num_hidden_layers
        self.embedding: Any = model.get_input_embeddings()
        self.lm_head: Any = model.get_output_embeddings()
        if self.lm_head is None:
            raise ValueError(f"target.path: {name or type(model).__name__} has no LM head; a causal LM is needed")
        self.vocab_size: int = self.lm_head.weight.shape[0]
        self._hidden: Tensor | None = None
        self._taps: dict[int, Tensor] = {}
        self.tap_layers: tuple[int, ...] = ()
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters
        model.base_model.register_forward_hook(self._store_hidden)
        self.tap(taps)
        self._avoid_repeated_keys()

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        revision: str | None = None,
        trust_remote_code: bool = False,
        cache_dir: str | None = None,
        taps: Sequence[int] = (),
    ) -> TargetAdapter:
        """Loads "embedded", a hub id or a local directory.

        Raises:
            ValueError: nothing loadable at `path` (with the library's reason).
        """
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                resolve_target(path, cache_dir),
                dtype=dtype if isinstance(dtype, torch.dtype) or dtype == "auto" else getattr(torch, dtype),
                revision=revision,
                trust_remote_code=trust_remote_code,
            )
        except OSError as error:
            raise ValueError(f"target.path: cannot load {path!r} as a causal LM: {error}") from error
        model = model.to(device)
        if model.device.type == "cpu":
            # Weights mapped from the file start at odd addresses; aligned copies make small products 10 % faster.
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        return cls(model, taps, name=path, revision=revision)

    def tap(self, layers: Sequence[int]) -> None:
        """Reads these layers' outputs with every pass from now on, besides those read already."""
        for k in layers:
            if k not in self.tap_layers:
                _layer(self.model, k).register_forward_hook(self._store_tap(k))
                self.tap_layers = (*self.tap_layers, k)

    def _avoid_repeated_keys(self) -> None:
        heads = getattr(self.config, "num_attention_heads", 1)
        grouped = getattr(self.config, "num_key_value_heads", heads) != heads
        capped = getattr(self.config, "attn_logit_softcapping", None) is not None
        if grouped and not capped and self.config._attn_implementation == "sdpa" and self.device.type == "cpu":
            self.model.set_attn_implementation(_GQA_SDPA)

    def _store_hidden(self, module: nn.Module, args: Any, output: Any) -> None:
        self._hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state

    def _store_tap(self, k: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._taps[k] = output[0] if isinstance(output, tuple) else output

        return hook

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every end-of-sequence id of the generation config (a model may have several), else of the config."""
        for config in (getattr(self.model, "generation_config", None), self.config):
            eos = getattr(config, "eos_token_id", None)
            if eos is not None:
                return frozenset(eos if isinstance(eos, (list, tuple)) else [eos])
        return frozenset()

    def new_cache(self, capacity: int) -> SlotCache:
        return SlotCache(self.num_layers, capacity)

    @torch.inference_mode()
    def forward(
        self,
        ids_BN: Tensor,
        position_BN: Tensor,
        mask_B1NS: Tensor,
        cache: SlotCache,
        keep_last: int = 0,
    ) -> TargetOutput:
        """One pass over N new tokens per row, appended to the cache.

        Args:
            mask_B1NS: additive float mask in the model's dtype (0 where visible, finfo.min elsewhere); a boolean
                mask would be silently wrong under eager attention.
            keep_last: logits of the last k positions only; 0 means all.
        """
        assert mask_B1NS.is_floating_point() and mask_B1NS.shape[-1] == cache.length + ids_BN.shape[1], "mask shape"
        kwargs: dict[str, Any] = {self._cache_name: cache}
        if self._keeps_logits and keep_last:
            # As an index, not a count: a count makes a strided view, on which a CPU's bf16 LM head is 100x slower.
            kwargs["logits_to_keep"] = torch.arange(ids_BN.shape[1] - keep_last, ids_BN.shape[1], device=ids_BN.device)
        out = self.model(input_ids=ids_BN, position_ids=position_BN, attention_mask=mask_B1NS, use_cache=True, **kwargs)
        assert self._hidden is not None, "the base model's hook did not run"
        logits = out.logits[:, -keep_last:] if keep_last else out.logits
        return TargetOutput(logits, self._hidden, dict(self._taps))

    @torch.inference_mode()
    def hidden_states(self, ids_BT: Tensor, valid_BT: Tensor) -> Tensor:
        """Hidden states after the final norm, [B, T, H], of right-padded rows, without cache or logits."""
        causal = torch.ones(ids_BT.shape[1], ids_BT.shape[1], dtype=torch.bool, device=ids_BT.device).tril()
        visible = causal & valid_BT[:, None, :]
        visible |= torch.eye(ids_BT.shape[1], dtype=torch.bool, device=ids_BT.device)  # no fully masked row
        positions = torch.arange(ids_BT.shape[1], device=ids_BT.device).expand_as(ids_BT)
        mask = additive_mask(visible, self.dtype)
        self.model.base_model(input_ids=ids_BT, position_ids=positions, attention_mask=mask, use_cache=False)
        assert self._hidden is not None, "the base model's hook did not run"
        return self._hidden

    def features(self, ids_BT: Tensor, valid_BT: Tensor, taps: Sequence[int] = ()) -> Tensor:
        """`hidden_states`, then the outputs of these (tapped) layers: [B, T, H * (1 + len(taps))]."""
        hidden = self.hidden_states(ids_BT, valid_BT)
        return torch.cat([hidden, *(self._taps[k] for k in taps)], -1) if taps else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's logits [..., V] of hidden states after the final norm [..., H].

        Models that scale or cap their logits outside the LM head are handled by their config's own fields;
        `check_head_path` proves that this is the model's whole head path.
        """
        return self._scaled(self.lm_head(hidden.to(self.lm_head.weight.dtype)))

    def logits_of_tokens(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        """`logits` for these token ids only, [..., H] to [..., len(token_ids)]; copies their rows of the LM head."""
        weight = self.lm_head.weight.detach()[token_ids]
        bias = getattr(self.lm_head, "bias", None)
        bias = None if bias is None else bias.detach()[token_ids]
        return lambda hidden: self._scaled(F.linear(hidden.to(weight.dtype), weight, bias))

    def _scaled(self, logits: Tensor) -> Tensor:
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / divisor
        if (factor := getattr(self.config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * factor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits

    def check_head_path(self) -> None:
        """Raises ValueError unless `logits(hidden)` reproduces the model's own logits on a short random input."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, min(self.vocab_size, 1000), (1, 8), generator=generator).to(self.device)
        positions = torch.arange(8, device=self.device)[None]
        visible = torch.ones(8, 8, dtype=torch.bool, device=self.device).tril()[None]
        with torch.inference_mode():
            out = self.forward(ids, positions, additive_mask(visible, self.dtype), self.new_cache(8))
            error = (self.logits(out.hidden_BNH) - out.logits_BNV).abs().max().item()
        scale = out.logits_BNV.abs().max().item()
        # bf16 keeps 8 bits: allow one unit in the last place of the largest logit
        if not error <= 2 * torch.finfo(self.dtype).eps * max(scale, 1.0):
            raise ValueError(
                f"target.path: {self.name}: its logits are not lm_head(hidden) with a known scale or cap "
                f"(difference {error:.3g}); a head cannot be trained from its hidden states"
            )


def pick_device(wanted: str) -> str:
    """ "auto" becomes cuda where there is one, else cpu."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


def _layer(model: Any, index: int) -> nn.Module:
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None) or getattr(decoder, "h", None)
    if layers is None or not 0 <= index < len(layers):
        raise ValueError(f"no decoder layer {index} in {type(model).__name__}")
    return layers[index]
