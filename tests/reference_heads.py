"""Draft heads written down from the definitions of their formats: plain torch, on files alone, nothing of `heads`.

All read config.json and the tensors of a folder. Features are what the target gives: after its final norm (EAGLE-1,
Medusa, Hydra), or three layers' outputs side by side (EAGLE-3).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Fields = dict[str, Any]


def files_of(folder: Path, weights: str = "model.safetensors") -> tuple[Fields, dict[str, Tensor]]:
    path = folder / weights
    tensors = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    return json.loads((folder / "config.json").read_text()), tensors


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()  # Llama's norm is computed in fp32
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [T, heads, hd], by the formula of Llama: pairs (i, i + hd / 2)."""
    half = x.shape[-1] // 2
    frequency = 1.0 / (theta ** (torch.arange(0, 2 * half, 2, dtype=torch.int64).float() / (2 * half)))
    angle = positions.float()[:, None] * frequency[None]
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Layer:
    """One Llama layer with a growing list of keys and values; input x [T, I], residual [T, H]."""

    def __init__(self, fields: Fields, tensors: dict[str, Tensor], prefix: str) -> None:
        self.fields, self.tensors, self.prefix = fields, tensors, prefix
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}.{name}.weight"]

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        c, hd = self.fields, self.fields["head_dim"]
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        outputs = []
        for row in range(len(x)):
            position = torch.tensor([len(self.keys)])
            q = rotate((self.weight("self_attn.q_proj") @ x[row]).view(1, heads, hd), position, c["rope_theta"])[0]
            k = rotate((self.weight("self_attn.k_proj") @ x[row]).view(1, kv_heads, hd), position, c["rope_theta"])[0]
            self.keys.append(k)
            self.values.append((self.weight("self_attn.v_proj") @ x[row]).view(kv_heads, hd))
            mixed = []
            for head in range(heads):
                group = head // (heads // kv_heads)
                scores = torch.stack([key[group] @ q[head] for key in self.keys]) / hd**0.5
                mixed.append(scores.softmax(0) @ torch.stack([value[group] for value in self.values]))
            y = residual[row] + self.weight("self_attn.o_proj") @ torch.cat(mixed)
            z = rms(y, self.weight("post_attention_layernorm"), c["rms_norm_eps"])
            gate, up = self.weight("mlp.gate_proj") @ z, self.weight("mlp.up_proj") @ z
            outputs.append(y + self.weight("mlp.down_proj") @ (torch.nn.functional.silu(gate) * up))
        return torch.stack(outputs)


def eagle(
    folder: Path, embedding: Tensor, lm_head: Tensor, features: Tensor, tokens: Sequence[int], steps: int
) -> tuple[Tensor, list[int]]:
    """EAGLE-1: fc([embedding, feature]) -> layer -> the target's LM head; the output is the next feature.

    Returns the first draft's logits [V], and the chain of likeliest drafts.
    """
    fields, t = files_of(folder)
    layer = Layer(fields, t, "layers.0")

    def run(ids: Tensor, hidden: Tensor) -> Tensor:
        x = torch.cat([embedding[ids], hidden], -1) @ t["fc.weight"].T + t.get("fc.bias", 0.0)
        return layer(x, x)[-1]

    output = run(torch.tensor(tokens), features)
    first, chain = lm_head @ output, []
    for _ in range(steps):
        chain.append(int((lm_head @ output).argmax()))
        output = run(torch.tensor(chain[-1:]), output[None])
    return first, chain


def eagle3(
    folder: Path, embedding: Tensor, features: Tensor, tokens: Sequence[int], steps: int
) -> tuple[Tensor, list[int]]:
    """EAGLE-3: fc of three layers; attention reads [norm(embedding), norm(hidden)]; LM head of the final norm.

    Returns the first draft's logits [Vd], and the chain of likeliest drafts as target ids.
    """
    fields, t = files_of(folder)
    flat = {**fields, **fields.get("transformer_layer_config", {})}
    eps, name = flat["rms_norm_eps"], "midlayer" if "midlayer.hidden_norm.weight" in t else "layers.0"
    layer = Layer(flat, t, name)

    def run(ids: Tensor, hidden: Tensor) -> Tensor:
        normed = rms(hidden, t[f"{name}.hidden_norm.weight"], eps)
        x = torch.cat([rms(embedding[ids], t[f"{name}.input_layernorm.weight"], eps), normed], -1)
        return layer(x, normed if flat.get("norm_before_residual", False) else hidden)[-1]

    if flat.get("fc_norm"):
        width = flat["hidden_size"]
        parts = [rms(part, t[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(features.split(width, -1))]
        features = torch.cat(parts, -1)
    output = run(torch.tensor(tokens), features @ t["fc.weight"].T)
    first, chain = t["lm_head.weight"] @ rms(output, t["norm.weight"], eps), []
    for _ in range(steps):
        normed = rms(output, t["norm.weight"], eps)
        draft = int((t["lm_head.weight"] @ normed).argmax())
        chain.append(draft + (int(t["d2t"][draft]) if "d2t" in t else 0))
        output = run(torch.tensor(chain[-1:]), (normed if flat.get("norm_output") else output)[None])
    return first, chain


def medusa_vllm(folder: Path, feature: Tensor) -> list[Tensor]:
    """x <- x + SiLU(W x [+ b]); logits over the whole vocabulary, -inf outside of token_map."""
    c, t = files_of(folder)
    logits = []
    for i in range(c["num_heads"]):
        x = feature
        for j in range(c["num_hidden_layers"]):
            bias = t[f"blocks.{i}.layers.{j}.bias"] if c["medusa_fc_bias"] else 0.0
            x = x + torch.nn.functional.silu(t[f"blocks.{i}.layers.{j}.weight"] @ x + bias)
        some = t["lm_heads.0.weight" if c["original_lm_head"] else f"lm_heads.{i}.weight"] @ x
        if "token_map" in t:
            some = torch.full((c["vocab_size"],), -torch.inf, dtype=x.dtype).index_copy(0, t["token_map"], some)
        logits.append(some)
    return logits


def medusa_original(folder: Path, feature: Tensor, base_lm_head: Tensor) -> list[Tensor]:
    """Names of the Medusa repository; version 2 has the base model's LM head."""
    c, t = files_of(folder, "medusa_lm_head.safetensors")
    logits = []
    for i in range(c["medusa_num_heads"]):
        x = feature
        for j in range(c["medusa_num_layers"]):
            x = x + torch.nn.functional.silu(t[f"{i}.{j}.linear.weight"] @ x + t[f"{i}.{j}.linear.bias"])
        logits.append(t.get(f"{i}.{c['medusa_num_layers']}.weight", base_lm_head) @ x)
    return logits


def medusa_trtllm(folder: Path, feature: Tensor) -> list[Tensor]:
    c, t = files_of(folder)
    logits = []
    for i in range(c["medusa_num_heads"]):
        x = feature
        for j in range(c["medusa_num_layers"]):
            linear = f"medusa_heads.{i}.medusa_layers.{j}.linear"
            x = x + torch.nn.functional.silu(t[f"{linear}.weight"] @ x + t[f"{linear}.bias"])
        logits.append(t[f"medusa_heads.{i}.lm_head.weight"] @ x)
    return logits


def hydra_original(folder: Path, feature: Tensor, path: Sequence[Tensor]) -> list[Tensor]:
    """path: embeddings of the tokens after the feature's, one more for each head."""
    c, t = files_of(folder, "hydra_lm_head.pt")
    logits = []
    for i in range(c["hydra_num_heads"]):
        given = torch.cat([feature, *path[: i + 1]])
        first = f"hydra_mlp.{i}.0"
        x = t[f"{first}.res_connection.weight"] @ given + t[f"{first}.res_connection.bias"]
        x = x + torch.nn.functional.silu(t[f"{first}.linear.weight"] @ given + t[f"{first}.linear.bias"])
        for j in range(1, c["hydra_num_layers"]):
            linear = f"hydra_mlp.{i}.{j}.linear"
            x = x + torch.nn.functional.silu(t[f"{linear}.weight"] @ x + t[f"{linear}.bias"])
        logits.append(t[f"hydra_lm_head.{i}.weight"] @ x + t[f"hydra_lm_head.{i}.bias"])
    return logits
