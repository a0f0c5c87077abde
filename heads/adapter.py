"""Adapters of the peft library: merged into a target's weights, or alive in the model that a user passes.

peft is imported only where an adapter is used, since that takes seconds.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils.hub import cached_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"  # of the adapter inside peft
_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AdapterFiles:
    """A peft adapter on disk. name: as the user gave it."""

    name: str
    config: Path
    weights: Path

    @functools.cached_property
    def sha256(self) -> str:
        """Of the weights' file."""
        digest = hashlib.sha256()
        with self.weights.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()


def find_adapter(name: str) -> AdapterFiles:
    """The files of an adapter, by directory or hub id.

    Raises:
        ValueError: one of them is not there. Weights in a pickle (adapter_model.bin) are never read.
    """
    found = []
    for file, hint in (
        (CONFIG, "expected the directory or hub id of a peft adapter"),
        (WEIGHTS, "an adapter_model.bin, a pickle, is not read: save the adapter with safe_serialization"),
    ):
        try:
            path = cached_file(name, file)
        except OSError as error:
            raise ValueError(f"target.adapter: {name!r} has no {file}; {hint} ({error})") from error
        assert path is not None, "cached_file finds or raises"
        found.append(Path(path))
    return AdapterFiles(name, *found)


def adapter_digest(name: str | None) -> str | None:
    """sha256 of an adapter's weights; None where there is no adapter."""
    return None if name is None else find_adapter(name).sha256


def is_adapter(folder: str) -> bool:
    """Whether a directory holds an adapter, and no model of its own."""
    return (Path(folder) / CONFIG).is_file() and not (Path(folder) / "config.json").is_file()


def adapter_in(folder: str, adapter: str | None) -> str | None:
    """A head's adapter by a path that can be opened: it may be a directory in the head's own."""
    inside = adapter is not None and ".." not in Path(adapter).parts and (Path(folder) / adapter).is_dir()
    return str(Path(folder) / adapter) if inside and adapter is not None else adapter


# ---- merged ------------------------------------------------------------------------------------------------


def merge_adapter(model: Any, files: AdapterFiles, base_names: Sequence[str]) -> Any:
    """The model, in place, with the adapter in its weights: W' = round(W + delta W), computed in fp32 or wider.

    What the adapter trained as a whole (modules_to_save) replaces the model's. A weight that is shared, as tied
    embeddings are, is parted from its other uses where the adapter changes only one of them.

    Args:
        base_names: what the model is called; an adapter made for something else is told, in a line on stderr.

    Raises:
        ValueError: the adapter is damaged, is of a kind that is not a change of weights, does not fit the model, or
            cannot be merged into its (quantised, offloaded) weights.
    """
    from peft import get_peft_model

    config = _read_config(files)
    _check_base(config.base_model_name_or_path, files.name, base_names)
    if getattr(model, "peft_config", None):
        raise ValueError(f"target.adapter: {base_names[0]!r} has an adapter already, which the library found beside it")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"target.adapter: {files.name!r} cannot be merged into offloaded weights; choose a device_map that keeps "
            "the target in memory"
        )
    tensors = _read_weights(files)
    what = f"target.adapter: {files.name!r} ({_kind(config)}, for {config.base_model_name_or_path!r})"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of renamed bases and tied weights: both are handled here
        try:
            wrapped: Any = get_peft_model(model, config, _NAME)
        except (ValueError, TypeError, KeyError, NotImplementedError, ImportError) as error:
            raise ValueError(f"{what} does not fit {type(model).__name__}: {error}") from error
        _load(wrapped, tensors, what)
        try:
            _merge_layers(wrapped)
            merged = wrapped.merge_and_unload(safe_merge=True)  # what is left: modules_to_save
        except (ValueError, TypeError, NotImplementedError, RuntimeError, ImportError) as error:
            raise ValueError(f"{what} cannot be merged into the weights of {type(model).__name__}: {error}") from error
    _check_finite(merged, what)
    embedding, head = merged.get_input_embeddings(), merged.get_output_embeddings()
    if head is not None and head.weight is not embedding.weight:
        for one in (merged.config, merged.config.get_text_config()):
            one.tie_word_embeddings = False  # else the library would tie them again, when saving for example
    return merged


def _read_config(files: AdapterFiles) -> Any:
    from peft import PeftConfig

    try:
        config = PeftConfig.from_pretrained(str(files.config.parent))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"target.adapter: {files.config} is not a peft config that can be read: {error!r}") from error
    if config.peft_type is None:
        raise ValueError(f"target.adapter: {files.config} has no peft_type, expected a peft adapter's config")
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise ValueError(
            f"target.adapter: {files.name!r} is of type {_kind(config)}, which adds to the context instead of changing "
            "weights, so it cannot be merged; expected LoRA or another adapter of weights"
        )
    return config


def _kind(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def _check_base(made_for: str | None, name: str, base_names: Sequence[str]) -> None:
    """Warns unless the last part of the names is one of the model's: paths differ between machines."""
    tails = {Path(one).name.lower() for one in base_names}
    if made_for and Path(made_for).name.lower() not in tails:
        print(
            f"warning: target.adapter {name!r} was made for {made_for!r}, and is used on {base_names[0]!r}",
            file=sys.stderr,
            flush=True,
        )


def _read_weights(files: AdapterFiles) -> dict[str, Tensor]:
    try:
        tensors = load_file(files.weights)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"target.adapter: {files.weights} cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.float()).all()):
            raise ValueError(f"target.adapter: {files.weights} holds values in {name} that are not finite")
    return tensors


def _load(wrapped: Any, tensors: dict[str, Tensor], what: str) -> None:
    """The tensors into the injected layers, all of them and nothing else (peft itself would drop strangers)."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    try:
        result: Any = set_peft_model_state_dict(wrapped, tensors, _NAME)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{what} does not fit the target: {error}") from error
    except KeyError as error:
        raise ValueError(f"{what} lacks the weights {error}") from error
    state, not_loaded = wrapped.state_dict(), set(result.missing_keys)
    wanted = get_peft_model_state_dict(wrapped, adapter_name=_NAME, save_embedding_layers=False).values()
    empty = {t.data_ptr() for t in wanted}  # by place: layers may share what is stored once
    empty -= {t.data_ptr() for key, t in state.items() if key not in not_loaded}
    missing = [key for key in not_loaded if state[key].data_ptr() in empty]
    for names, problem in ((missing, "lacks weights"), (result.unexpected_keys, "has weights without a place")):
        if names:
            raise ValueError(f"{what} {problem} in the target: {', '.join(sorted(names)[:3])} ({len(names)} in all)")


def _merge_layers(wrapped: Any) -> None:
    """Merges every adapted module by itself, so that only one is in fp32 at a time.

    peft alone rounds delta W and then the sum: on a 135M model 1 to 3 % of the weights were not the nearest bf16.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: dict[nn.Module, list[Any]] = {}
    for module in wrapped.modules():
        if isinstance(module, BaseTunerLayer):
            layers.setdefault(module.get_base_layer(), []).append(module)
    uses = Counter(id(p) for module in wrapped.modules() for p in module.parameters(recurse=False))
    quantised = bool(getattr(wrapped.get_base_model(), "is_quantized", False))
    for base, mine in layers.items():
        for name, parameter in list(base.named_parameters(recurse=False)):
            if uses[id(parameter)] > 1:
                uses[id(parameter)] -= 1
                setattr(base, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
        # A quantised module's numbers are no weights; peft unpacks and packs them itself.
        own = [] if quantised else list(base.parameters(recurse=False))
        stored = [(parameter, parameter.dtype) for parameter in own if parameter.dtype in _HALF]
        for parameter, _ in stored:
            parameter.data = parameter.data.float()
        for layer in mine:
            layer.merge(safe_merge=True)
        for parameter, dtype in stored:
            parameter.data = parameter.data.to(dtype)


def _check_finite(model: Any, what: str) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype in _HALF and not bool(torch.isfinite(parameter).all()):
            raise ValueError(f"{what} makes {name} too large for {parameter.dtype}; load the target in float32")


# ---- alive -------------------------------------------------------------------------------------------------


def unwrapped(model: Any) -> Any:
    """The transformers model inside a live PeftModel, whose layers carry the adapter; any other model as it is.

    Raises:
        ValueError: the active adapter acts outside those layers, so that the model inside is not the adapted one.
    """
    peft = sys.modules.get("peft")
    wraps = peft is not None and isinstance(model, (peft.PeftModel, peft.PeftMixedModel))
    configs: dict[str, Any] = getattr(model, "peft_config", None) or {}  # a wrapped model has it, too
    active = model.active_adapters if wraps else list(configs)
    for name in [active] if isinstance(active, str) else active:
        if configs[name].is_prompt_learning or getattr(configs[name], "alora_invocation_tokens", None):
            raise _outside(_kind(configs[name]))
    if not wraps:
        return model
    return model.get_base_model() if hasattr(model, "get_base_model") else model.base_model.model


@torch.inference_mode()
def check_wrapper(wrapper: Any, inner: Any) -> None:
    """Raises ValueError unless both are one function on a short random input: the same kernels, so to the bit."""
    embedding = inner.get_input_embeddings()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, min(embedding.weight.shape[0], 1000), (1, 8), generator=generator)
    inputs = {"input_ids": ids.to(embedding.weight.device), "use_cache": False}
    wrapper.eval()
    if not torch.equal(wrapper(**inputs).logits, inner(**inputs).logits):
        raise _outside(type(wrapper).__name__)


def _outside(what: str) -> ValueError:
    return ValueError(
        f"the adapter of this model ({what}) is not in the layers alone: it depends on the prompt, or adds to it; "
        "expected LoRA or another adapter of weights"
    )
