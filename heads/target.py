"""The frozen target: any causal language model of transformers, unmodified.

Shapes: B rows, N query tokens, S key slots (filled cache + N), T sequence length, H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
)
from transformers.masking_utils import sdpa_mask

from heads.adapter import find_adapter, is_adapter, merge_adapter
from heads.attention import grouped_attention
from heads.cache import SlotCache
from heads.compiled import StaticPasses
from heads.embedded import resolve_target
from heads.masks import LayerMasks, Masks

if TYPE_CHECKING:
    from heads.divided import Peers

GQA_SDPA = "draftsmith_gqa_sdpa"


def gqa_sdpa(
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
    out = grouped_attention(query, key, value, attention_mask, scale=scaling, causal=causal)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(GQA_SDPA, gqa_sdpa)
AttentionMaskInterface.register(GQA_SDPA, sdpa_mask)  # for calls with a 2-D padding mask, as `generate` makes


@dataclass(frozen=True)
class TargetOutput:
    """logits_BNV: of the kept positions. hidden_BNH: all positions, after the final norm. taps: layer -> [B,N,H].

    All on the target's `head_device`.
    """

    logits_BNV: Tensor
    hidden_BNH: Tensor
    taps: dict[int, Tensor]


@dataclass(frozen=True)
class ExactLimit:
    """Beyond this many cache slots (tree included) a tree's logits are not those of its paths, for this reason."""

    slots: int
    reason: str


class TargetAdapter:
    """Runs a causal LM on explicit positions and 4-D additive masks, and reads its hidden states by hooks.

    Args:
        model: a loaded `PreTrainedModel` with an LM head. It is set to eval and frozen.
        taps: layers whose output (0-based, before the final norm) is wanted with every pass;
            `taps[k]` equals transformers' `hidden_states[k + 1]` (except after the last layer, which that tuple norms).
        name: how the target was named by the user, for provenance.

    Attributes:
        adapter: the peft adapter that `load` merged into the weights, as the user named it; adapter_sha256: its file.
        masks: the mask of every kind of layer (`heads.masks`).
        hidden_size: width of the features, which the LM head reads; taps are `config.hidden_size` wide.
    """

    def __init__(self, model: Any, taps: Sequence[int] = (), name: str = "", revision: str | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        self.name, self.revision = name, revision
        self.adapter: str | None = None
        self.adapter_sha256: str | None = None
        self.peers: Peers | None = None  # the processes that it is divided over
        self.config = model.config.get_text_config()
        self.num_layers: int = self.config.num_hidden_layers
        self.embedding: Any = model.get_input_embeddings()
        self.lm_head: Any = model.get_output_embeddings()
        if self.lm_head is None:
            raise ValueError(f"target.path: {name or type(model).__name__} has no LM head; a causal LM is needed")
        # A quantised weight may be packed into another shape; the module knows its sizes.
        rows, columns = self.lm_head.weight.shape[0], self.lm_head.weight.shape[-1]
        self.vocab_size: int = getattr(self.lm_head, "out_features", rows)
        self.hidden_size: int = getattr(self.lm_head, "in_features", columns)
        self.masks = LayerMasks(self.config)
        self.decoder, self._layers = _decoder(model, self.num_layers)
        self._hidden: Tensor | None = None
        self._taps: dict[int, Tensor] = {}
        self.tap_layers: tuple[int, ...] = ()
        self._compiled: StaticPasses | None = None
        self._static: StaticPasses | None = None  # the same, where passes are to be compiled now
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters
        self.decoder.register_forward_hook(self._store_hidden)
        self.tap(taps)
        self._avoid_repeated_keys()

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        device_map: str | dict[str, Any] | None = None,
        quantize: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        cache_dir: str | None = None,
        taps: Sequence[int] = (),
        adapter: str | None = None,
    ) -> TargetAdapter:
        """Loads "embedded", a hub id or a local directory, quantised checkpoints included.

        Args:
            dtype: "auto" is the stored one, or float32 on a CPU that has no instructions for that one.
            adapter: directory or hub id of a peft adapter, to be merged into the weights (`heads.adapter`).
            device_map: spreads the layers over devices, as transformers does; `device` is then not used.
            quantize: "4bit" or "8bit" makes transformers quantise the weights while loading (bitsandbytes).

        Raises:
            ValueError: nothing loadable at `path`, or not in this form (with the library's reason).
        """
        source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        kwargs: dict[str, Any] = {} if quantize is None else {"quantization_config": _bits(quantize)}
        files = None if adapter is None else find_adapter(adapter)
        if is_adapter(path):
            raise ValueError(f"target.path: {path!r} is an adapter; give its base here, and this as target.adapter")
        try:
            directory = resolve_target(path, cache_dir)
            config = AutoConfig.from_pretrained(directory, **source)
            stored = getattr(config, "quantization_config", None)
            if device_map is None and (kwargs or stored is not None):
                device_map = {"": str(device)}  # quantised weights are placed while loading, and may not be moved later
            if isinstance(dtype, str) and dtype != "auto":
                dtype = getattr(torch, dtype)
            if dtype == "auto" and device_map in (None, {"": "cpu"}) and torch.device(device).type == "cpu":
                dtype = quick_on_cpu(getattr(config, "dtype", None)) or dtype
            model: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                device_map=device_map,
                **source,
                **kwargs,
            )
        except (OSError, ImportError) as error:
            raise ValueError(f"target.path: cannot load {path!r} as a causal LM: {error}") from error
        if files is not None:  # before the move to a device: the sums of a CPU, the same on every machine
            model = merge_adapter(model, files, (path, directory))
        if device_map is None:
            model = model.to(device)
            if model.device.type == "cpu":
                # Weights mapped from the file start at odd addresses; aligned copies make small products 10 % faster.
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
        target = cls(model, taps, name=path if adapter is None else f"{path} with {adapter}", revision=revision)
        if files is not None:
            target.adapter, target.adapter_sha256 = adapter, files.sha256
        return target

    def tap(self, layers: Sequence[int]) -> None:
        """Reads these layers' outputs with every pass from now on, besides those read already."""
        for k in layers:
            if k not in self.tap_layers:
                if not 0 <= k < len(self._layers):
                    raise ValueError(f"no decoder layer {k}: {type(self.model).__name__} has {self.num_layers}")
                self._layers[k].register_forward_hook(self._store_tap(k))
                self.tap_layers = (*self.tap_layers, k)

    def _avoid_repeated_keys(self) -> None:
        heads = getattr(self.config, "num_attention_heads", 1)
        grouped = getattr(self.config, "num_key_value_heads", heads) not in (None, heads)
        capped = getattr(self.config, "attn_logit_softcapping", None) is not None
        through_interface = getattr(self.model, "_supports_attention_backend", False)
        sdpa = self.config._attn_implementation == "sdpa"
        if grouped and not capped and through_interface and sdpa and self.device.type == "cpu":
            self.model.set_attn_implementation(GQA_SDPA)

    def _store_hidden(self, module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state
        self._hidden = hidden.to(self.head_device)

    def _store_tap(self, k: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._taps[k] = (output[0] if isinstance(output, tuple) else output).to(self.head_device)

        return hook

    @property
    def layers(self) -> nn.ModuleList:
        return self._layers

    @property
    def last_layer(self) -> nn.Module:
        return self._layers[-1]

    @property
    def device(self) -> torch.device:
        """Where inputs, positions and masks go."""
        return _device_of(self.embedding)

    @property
    def head_device(self) -> torch.device:
        """Where logits, features and taps come out, and where draft heads live. One device: the same as `device`."""
        return _device_of(self.lm_head)

    @property
    def dtype(self) -> torch.dtype:
        """Of the activations. The first parameter's may be a storage format (fp8) in a quantised model."""
        return self.embedding.weight.dtype

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every end-of-sequence id of the generation config (a model may have several), else of the config."""
        for config in (getattr(self.model, "generation_config", None), self.config):
            eos = getattr(config, "eos_token_id", None)
            if eos is not None:
                return frozenset(eos if isinstance(eos, (list, tuple)) else [eos])
        return frozenset()

    @property
    def exact_limit(self) -> ExactLimit | None:
        """What no probe of a short row can see: rules that change with length and look at more than positions."""
        limits: list[ExactLimit] = []
        if "local" in (getattr(self.config, "attention_layers", None) or ()):
            limits.append(ExactLimit(self.config.window_size, "its local attention counts cache slots, not positions"))
        if getattr(self.config, "attn_temperature_tuning", False):
            slots = self.config.floor_scale - 1
            limits.append(ExactLimit(slots, "its attention temperature goes by cache slots, not positions"))
        rope = getattr(self.config, "rope_parameters", None) or {}
        for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
            if part.get("rope_type") == "longrope":
                slots = part.get("original_max_position_embeddings") or self.config.max_position_embeddings
                limits.append(ExactLimit(slots, "its rotary frequencies change with the longest position of a pass"))
        return min(limits, key=lambda limit: limit.slots, default=None)

    def new_cache(self, capacity: int, rows: int = 1) -> SlotCache:
        """A cache for as many slots per row (more of them where passes are compiled)."""
        return SlotCache(self.num_layers, capacity if self._static is None else self._static.capacity(capacity), rows)

    @contextmanager
    def static_passes(self, on: bool = True) -> Iterator[None]:
        """Within it, passes of few tokens are compiled. Their masks are as wide as the cache (`mask_width`)."""
        if on and self._compiled is None:
            self._compiled = StaticPasses(self.model, self._cache_name)
        before, self._static = self._static, self._compiled if on else None
        try:
            yield
        finally:
            self._static = before

    def mask_width(self, tokens: int, cache: SlotCache) -> int:
        """Slots that the masks of the next pass of `tokens` tokens must have."""
        static = self._static is not None and self._static.fits(tokens)
        return cache.capacity if static else cache.length + tokens

    @functools.cached_property
    def cache_bytes_per_slot(self) -> int:
        """Keys and values of one token in all layers, measured on one pass over one token."""
        cache = SlotCache(self.num_layers, 1)
        zero = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        seen = torch.ones(1, 1, 1, dtype=torch.bool, device=self.device)
        with self.static_passes(False):
            self.forward(zero, zero, self.masks.build(seen, zero, zero, self.dtype), cache)
        return cache.bytes

    @property
    def max_positions(self) -> int | None:
        """Longest row that the model can represent, in tokens; None if its config does not say."""
        limit = getattr(self.config, "max_position_embeddings", None)
        return limit if isinstance(limit, int) else None

    def embed(self, token_ids: Tensor) -> Tensor:
        """Input embeddings [..., H] of token ids, on `head_device`."""
        return self.embedding(token_ids.to(self.device)).to(self.head_device)

    @torch.inference_mode()
    def forward(
        self,
        ids_BN: Tensor,
        position_BN: Tensor,
        masks: Masks,
        cache: SlotCache,
        keep: Sequence[int] | None = None,
    ) -> TargetOutput:
        """One pass over N new tokens per row, appended to the cache.

        Args:
            masks: additive float masks [B, 1, N, S] in the model's dtype (0 where visible, finfo.min elsewhere), as
                `self.masks` builds them: one, or one per kind of layer. A boolean mask would be silently wrong under
                eager attention.
            keep: columns whose logits are wanted; None means all.
        """
        ids_BN, position_BN, count = ids_BN.to(self.device), position_BN.to(self.device), ids_BN.shape[1]
        slots = self.mask_width(count, cache)
        for mask in masks.values() if isinstance(masks, dict) else (masks,):
            assert mask.is_floating_point() and mask.shape[-1] == slots, f"mask of {mask.shape[-1]} slots, not {slots}"
        if self._static is not None and self._static.fits(count):
            logits = self._static(ids_BN, position_BN, masks, cache)
            logits = logits if keep is None else logits[:, list(keep)]
        else:
            kwargs: dict[str, Any] = {self._cache_name: cache}
            if self._keeps_logits and keep is not None:
                # An index, not a count: a count makes a strided view, on which a CPU's bf16 LM head is 100x slower.
                kwargs["logits_to_keep"] = torch.tensor(keep, device=ids_BN.device)
            out = self.model(input_ids=ids_BN, position_ids=position_BN, attention_mask=masks, use_cache=True, **kwargs)
            logits = out.logits if keep is None or self._keeps_logits else out.logits[:, list(keep)]
        cache.advance(count)
        assert self._hidden is not None, "the decoder's hook did not run"
        taps = {k: tap[:, :count] for k, tap in self._taps.items()}
        return TargetOutput(logits.to(self.head_device), self._hidden[:, :count], taps)

    @torch.inference_mode()
    def hidden_states(self, ids_BT: Tensor, valid_BT: Tensor) -> Tensor:
        """Hidden states after the final norm, [B, T, H], of right-padded rows, without cache or logits."""
        return self.hidden_states_with_grad(ids_BT, valid_BT)

    def hidden_states_with_grad(self, ids_BT: Tensor, valid_BT: Tensor) -> Tensor:
        """`hidden_states` in the caller's gradient mode: for trainable weights inside the model (LoRA)."""
        length = ids_BT.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=ids_BT.device).tril()
        visible = causal & valid_BT[:, None, :]
        visible |= torch.eye(length, dtype=torch.bool, device=ids_BT.device)  # no fully masked row
        positions = torch.arange(length, device=ids_BT.device).expand_as(ids_BT)
        masks = self.masks.build(visible, positions, positions, self.dtype)
        self.decoder(input_ids=ids_BT, position_ids=positions, attention_mask=masks, use_cache=False)
        assert self._hidden is not None, "the decoder's hook did not run"
        hidden = self._hidden
        if hidden.requires_grad:
            self._hidden, self._taps = None, {}  # else they would keep the graph alive
        return hidden

    def features(self, ids_BT: Tensor, valid_BT: Tensor, taps: Sequence[int] = ()) -> Tensor:
        """`hidden_states`, then the outputs of these (tapped) layers: [B, T, H * (1 + len(taps))]."""
        hidden = self.hidden_states(ids_BT, valid_BT)
        return torch.cat([hidden, *(self._taps[k] for k in taps)], -1) if taps else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's logits [..., V] of hidden states after the final norm [..., H].

        Models that scale or cap their logits outside the LM head are handled by their config's own fields;
        `check_head_path` proves that this is the model's whole head path.
        """
        return self.scale_logits(self.lm_head(hidden.to(self._head_dtype)))

    def logits_of_tokens(self, token_ids: Tensor) -> Callable[[Tensor], Tensor]:
        """`logits` for these token ids only, [..., H] to [..., len(token_ids)]; copies their rows of the LM head.

        Where there are no rows to copy (`lm_head_rows`), all logits are made and selected.
        """
        rows = self.lm_head_rows(token_ids)
        if rows is None:
            return lambda hidden: self.logits(hidden)[..., token_ids]
        weight, bias = rows
        return lambda hidden: self.scale_logits(F.linear(hidden.to(weight.dtype), weight, bias))

    def lm_head_rows(self, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor | None] | None:
        """Copies of the LM head's weight [n, H] and bias [n] for these token ids (None: all).

        None where the LM head is quantised or offloaded, or has a live adapter: there are no rows to copy then.
        """
        if hasattr(self.lm_head, "base_layer"):  # what peft puts around a module
            return None
        weight = self.lm_head.weight.detach()
        whole = weight.shape == (self.vocab_size, self.hidden_size) and weight.dtype == self._head_dtype
        if not whole or weight.device != self.head_device:
            return None
        bias = getattr(self.lm_head, "bias", None)
        bias = None if bias is None else bias.detach()
        if token_ids is None:
            return weight.clone(), None if bias is None else bias.clone()
        return weight[token_ids], None if bias is None else bias[token_ids]

    @property
    def _head_dtype(self) -> torch.dtype:
        """What the LM head computes in: its weight's dtype, unless that is a storage format."""
        dtype = self.lm_head.weight.dtype
        return dtype if dtype.is_floating_point and torch.finfo(dtype).bits >= 16 else self.dtype

    def scale_logits(self, logits: Tensor) -> Tensor:
        """What the model does to its logits behind the LM head."""
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
        masks = self.masks.build(visible, positions, positions, self.dtype)
        with torch.inference_mode():
            out = self.forward(ids, positions, masks, self.new_cache(8))
            error = (self.logits(out.hidden_BNH) - out.logits_BNV).abs().max().item()
        scale = out.logits_BNV.abs().max().item()
        # bf16 keeps 8 bits: allow one unit in the last place of the largest logit
        if not error <= 2 * torch.finfo(self.dtype).eps * max(scale, 1.0):
            raise ValueError(
                f"target.path: {self.name}: its logits are not lm_head(hidden) with a known scale or cap "
                f"(difference {error:.3g}); a head cannot be trained from its hidden states"
            )


def _bits(quantize: str) -> BitsAndBytesConfig:
    if quantize not in ("4bit", "8bit"):
        raise ValueError(f"target.quantize is {quantize!r}, expected 4bit, 8bit or nothing")
    return BitsAndBytesConfig(load_in_4bit=quantize == "4bit", load_in_8bit=quantize == "8bit")


def pick_device(wanted: str) -> str:
    """ "auto" becomes cuda where there is one, else cpu."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it natively, else float32."""
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported()
    else:
        fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def quick_on_cpu(stored: torch.dtype | None) -> torch.dtype | None:
    """float32 for a stored dtype whose products a CPU would emulate (9 times slower on AVX2), else None."""
    if stored == torch.float16:
        fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_fp16_supported()
    else:
        fast = stored != torch.bfloat16 or fast_dtype(torch.device("cpu")) == stored
    return None if fast else torch.float32


def _decoder(model: Any, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """The module that turns ids into features (final norm included), and its list of layers.

    Raises:
        ValueError: there is no such list.
    """
    found = model.get_decoder()
    for module in model.children() if found is model else (found,):
        lists = {name: child for name, child in module.named_children() if isinstance(child, nn.ModuleList)}
        for name, layers in lists.items():
            if name in ("layers", "h") or len(layers) == num_layers:
                return module, layers
    raise ValueError(f"target.path: {type(model).__name__} has no list of decoder layers; a causal LM is needed")


def _device_of(module: nn.Module) -> torch.device:
    """Where a module computes: its weight's device, or where accelerate's hook brings offloaded weights and inputs."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        device = getattr(one, "execution_device", None)
        if device is not None:
            return torch.device(device)
    weight = module.weight
    assert isinstance(weight, Tensor), "embedding and LM head have a weight"
    return weight.device
