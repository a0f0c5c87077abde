"""EAGLE-3: wiring against a forward written from the format's definition, the draft vocabulary, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from heads.base import Needs
from heads.checkpoint import load_head, save_head
from heads.config import HeadConfig
from heads.eagle3 import Eagle3Head
from heads.registry import build_head
from heads.starting import rms_weight
from tests.tiny import VOCAB, prompt_ids, tiny_head, tiny_target
from train.batching import make_batch
from train.conversations import TokenRow

TAPS = (0, 1, 2)


def eagle3(**options: Any) -> Any:
    return tiny_head(tiny_target("llama"), kind="eagle3", taps=TAPS, **options)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, theta: float) -> torch.Tensor:
    """x: [heads, L, hd]; the halves form the pairs."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def reference(head: Any, taps: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Logits [L, Vd] of the first drafts, from the weights by name, as the checkpoint format defines it."""
    w, c = head.state_dict(), head.config
    eps, heads, kv_heads, dim = c.rms_norm_eps, c.num_attention_heads, c.num_key_value_heads, c.head_dim
    if c.fc_norm:
        parts = taps.split(c.hidden_size, -1)
        taps = torch.cat([rms(part, w[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)], -1)
    hidden = taps @ w["fc.weight"].T
    embed = head.target.embedding.weight[tokens]
    normed = rms(hidden, w["midlayer.hidden_norm.weight"], eps)
    x = torch.cat([rms(embed, w["midlayer.input_layernorm.weight"], eps), normed], -1)
    q, k, v = (
        (x @ w[f"midlayer.self_attn.{name}_proj.weight"].T).view(len(tokens), -1, dim).transpose(0, 1) for name in "qkv"
    )
    theta = c.rope_parameters["rope_theta"]
    q, k = rotate(q, theta), rotate(k, theta).repeat_interleave(heads // kv_heads, 0)
    scores = q @ k.transpose(1, 2) / dim**0.5
    scores += torch.full(scores.shape[1:], float("-inf")).triu(1)
    attended = scores.softmax(-1) @ v.repeat_interleave(heads // kv_heads, 0)
    g = normed if c.norm_before_residual else hidden
    g = g + attended.transpose(0, 1).flatten(1) @ w["midlayer.self_attn.o_proj.weight"].T
    m = rms(g, w["midlayer.post_attention_layernorm.weight"], eps)
    gate, up = (m @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    g = g + (F.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
    return rms(g, w["norm.weight"], eps) @ w["lm_head.weight"].T


@pytest.mark.parametrize(
    "options", [{}, {"fc_norm": True}, {"norm_before_residual": True}, {"fc_norm": True, "norm_output": True}], ids=str
)
def test_first_drafts_are_those_of_the_format(options: dict[str, Any]) -> None:
    """Both in training and in decoding."""
    head, ids = eagle3(**options), prompt_ids(12)
    taps = torch.randn(11, 192, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = reference(head, taps, ids[1:])
        state = head.start(16)
        for p in range(11):
            head.commit(state, taps[None, p : p + 1], torch.tensor([[ids[p + 1]]]))
            torch.testing.assert_close(head.step_logits(0, state.last_B1H)[0, 0], want[p], rtol=1e-4, atol=1e-4)
        row = TokenRow("r", tuple(ids), ((1, 12),), "t")
        columns = torch.cat([torch.zeros(12, 64), torch.cat([taps, torch.zeros(1, 192)])], -1)
        batch = make_batch([row], [columns], 1, head.needs)
        output = next(iter(head.unroll(batch)))
        torch.testing.assert_close(head.step_logits(0, output)[0, :10], want[:10], rtol=1e-4, atol=1e-4)


def test_names_and_shapes_are_the_formats() -> None:
    target = tiny_target("llama")
    config = HeadConfig.derive(
        "eagle3", target.config, VOCAB, "t", draft_vocab_size=100, options={"projection": "own", "taps": TAPS}
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in build_head(config).state_dict().items()}
    assert shapes == {
        "d2t": (100,),
        "t2d": (VOCAB,),
        "fc.weight": (64, 192),
        "midlayer.self_attn.q_proj.weight": (64, 128),
        "midlayer.self_attn.k_proj.weight": (32, 128),
        "midlayer.self_attn.v_proj.weight": (32, 128),
        "midlayer.self_attn.o_proj.weight": (64, 64),
        "midlayer.mlp.gate_proj.weight": (96, 64),
        "midlayer.mlp.up_proj.weight": (96, 64),
        "midlayer.mlp.down_proj.weight": (64, 96),
        "midlayer.input_layernorm.weight": (64,),
        "midlayer.hidden_norm.weight": (64,),
        "midlayer.post_attention_layernorm.weight": (64,),
        "norm.weight": (64,),
        "lm_head.weight": (100, 64),
    }


@given(st.sets(st.integers(0, VOCAB - 1), min_size=1, max_size=60))
def test_the_draft_vocabulary_is_kept_as_offsets_and_mask(chosen: set[int]) -> None:
    ids = torch.tensor(sorted(chosen))
    config = HeadConfig.derive("eagle3", tiny_target("llama").config, VOCAB, "t", options={"taps": TAPS})
    head = Eagle3Head(replace(config, draft_vocab_size=len(ids)))
    head.set_draft_vocab(ids)
    assert head.draft_ids is not None and torch.equal(head.draft_ids, ids)
    assert torch.equal(torch.arange(len(ids)) + head.d2t, head.t2d.nonzero()[:, 0])
    assert head.d2t.dtype == torch.int64 and head.t2d.dtype == torch.bool
    assert bool((head.d2t >= 0).all()) and bool((head.d2t.diff() >= 0).all())
    assert head.draft_index(ids).tolist() == list(range(len(ids)))


def test_saved_and_loaded_with_its_vocabulary(tmp_path: Path) -> None:
    target = tiny_target("llama")
    config = HeadConfig.derive(
        "eagle3", target.config, VOCAB, "t", draft_vocab_size=50, options={"projection": "own", "taps": [0, 2]}
    )
    head = build_head(config)
    head.set_draft_vocab(torch.arange(3, 153, 3))
    head.bind(target)
    head.init_from_target()
    save_head(head, tmp_path / "head", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "head/model.safetensors")
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    again = load_head(tmp_path / "head", torch.float32)
    assert again.config == config and again.config.taps == (0, 2) and again.needs == Needs(False, (0, 2))
    assert again.draft_ids is not None and torch.equal(again.draft_ids, torch.arange(3, 153, 3))
    rows = target.lm_head.weight[again.draft_ids]
    assert torch.equal(again.state_dict()["lm_head.weight"], rows.bfloat16().float())


def test_layers_are_chosen_as_engines_do() -> None:
    """Their default in the convention of outputs; explicit for targets too shallow for it."""
    config: Any = tiny_target("llama").config

    def chosen(layers: int, **options: Any) -> Any:
        changed = type(config)(**{**config.to_dict(), "num_hidden_layers": layers})
        return HeadConfig.derive("eagle3", changed, VOCAB, "t", options={"taps": None, **options}).taps

    assert [chosen(n) for n in (30, 24, 7)] == [(1, 14, 26), (1, 11, 20), (1, 2, 3)]
    assert [chosen(n) for n in (3, 1)] == [(0, 1, 2), (0,)]
    for wrong in ([], [2, 1], [1, 1], [0, 3], [-1]):
        with pytest.raises(ValueError, match=r"head\.taps is .*0 \.\. 2"):
            chosen(3, taps=wrong)


def test_a_target_whose_layers_have_another_width_is_refused() -> None:
    head, target = eagle3(), tiny_target("llama")
    target.config.hidden_size = 32
    with pytest.raises(ValueError, match="choose another head"):
        head.bind(target)


def test_the_layer_starts_as_the_targets_last_one() -> None:
    """Where embeddings count nothing, its first draft is what the target says, had it read its last layer's input."""
    target = tiny_target("llama")
    head: Any = tiny_head(target, kind="eagle3", taps=(0, 1))
    for parameter in head.parameters():
        torch.nn.init.zeros_(parameter)
    assert head.init_from_target() == "the layer starts as the target's last one"
    ids = prompt_ids(12)
    target.tap((0, 1))
    columns = target.features(torch.tensor([ids]), torch.ones(1, 12, dtype=torch.bool), (0, 1)).clone()
    batch = make_batch([TokenRow("r", tuple(ids), ((1, 12),), "t")], [columns[0]], 1, head.needs)
    with torch.no_grad():
        logits = head.step_logits(0, next(iter(head.unroll(batch))))[0, :10]
        want = target.logits(columns[0, :10, :64])  # the last of its three layers reads the tap of layer 1
    torch.testing.assert_close(logits, want, rtol=1e-3, atol=1e-3)


def test_a_target_of_another_make_starts_nothing() -> None:
    target = tiny_target("gpt2")
    head: Any = tiny_head(target, kind="eagle3", taps=(0, 1))
    before = head.midlayer.mlp.up_proj.weight.clone()
    assert "at random" in head.init_from_target()
    assert torch.equal(head.midlayer.mlp.up_proj.weight, before)


@pytest.mark.parametrize("plus", [0.0, 1.0])
def test_norms_are_read_by_what_they_do(plus: float) -> None:
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(64, generator=torch.Generator().manual_seed(1)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return rms(x, self.weight + plus, 1e-6)

    found = rms_weight(Norm(), 64, 1e-6)
    assert found is not None
    torch.testing.assert_close(found, Norm().weight + plus, rtol=1e-5, atol=1e-5)
    assert rms_weight(torch.nn.LayerNorm(64), 64, 1e-6) is None
    assert rms_weight(None, 64, 1e-6) is None
