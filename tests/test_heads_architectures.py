"""Any causal LM: masks by position, trees, features and heads on tiny models of many architectures.

The reference is always the library's own pass, without our masks, positions, cache or attention. Prompts are longer
than two windows (or chunks) of the models that have them.
"""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from heads.base import LossSpec
from heads.cache import SlotCache
from heads.config import HeadConfig
from heads.layers import rotary
from heads.masks import LayerMasks, Masks
from heads.target import TargetAdapter
from heads.tree import ancestor_mask, paths
from infer.probe import prefix_length, probe_tree, require_tree
from tests.tiny import _COMMON, _GATED, ARCHITECTURES, library_greedy, prompt_ids, tiny_head, tiny_model
from train.batching import make_batch
from train.conversations import TokenRow

FIT = [name for name in ARCHITECTURES if name != "falcon_alibi"]
IDS = prompt_ids(36)
HIDDEN = torch.finfo(torch.float32).min


@functools.cache
def adapter(name: str) -> TargetAdapter:
    return TargetAdapter(tiny_model(ARCHITECTURES[name]), taps=(0, 1), name=name)


@functools.cache
def reference(name: str) -> Any:
    return tiny_model(ARCHITECTURES[name])


@functools.cache
def library_states(name: str) -> Any:
    return reference(name)(torch.tensor([IDS]), output_hidden_states=True)


WINDOWED = [name for name in FIT if not LayerMasks(ARCHITECTURES[name]).plain]


def test_the_table_has_every_kind_of_layer() -> None:
    kinds = [frozenset(LayerMasks(config).sizes) for config in ARCHITECTURES.values()]
    for kind in ({"full_attention"}, {"sliding_attention"}, {"full_attention", "sliding_attention"}):
        assert kinds.count(frozenset(kind)) >= 3
    assert {"chunked_attention", "full_attention"} in kinds
    assert all(2 * size < len(IDS) for name in WINDOWED for size in adapter(name).masks.sizes.values() if size)


# ---- trees -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIT)
def test_trees_are_scored_right(name: str) -> None:
    target = adapter(name)
    assert probe_tree(target) < 1e-4
    require_tree(target)
    assert all(size is None or prefix_length(target) > size for size in target.masks.sizes.values())


def score(target: TargetAdapter, tokens: list[int], parents: list[int], cache: SlotCache) -> torch.Tensor:
    """Logits [N, V] of a tree on top of the cache, whose slots are positions 0 .. length - 1."""
    ancestors = ancestor_mask(torch.tensor([parents]))
    positions = cache.length - 1 + ancestors.sum(-1)
    visible = torch.cat([ancestors.new_ones(1, len(tokens), cache.length), ancestors], -1)
    keys = torch.cat([torch.arange(cache.length)[None], positions], -1)
    masks = target.masks.build(visible, positions, keys, target.dtype)
    return target.forward(torch.tensor([tokens]), positions, masks, cache).logits_BNV[0]


@pytest.mark.parametrize("name", FIT)
def test_trees_along_the_librarys_greedy_text(name: str) -> None:
    """The library decodes with its own sliding cache; trees on ours must choose its tokens, round after round."""
    target, prompt, new = adapter(name), IDS[:20], 19
    want = library_greedy(reference(name), prompt, new)
    assert len(set(want)) > 5, "a text that repeats itself proves little"
    cache = target.new_cache(64)
    logits = score(target, prompt, list(range(-1, len(prompt) - 1)), cache)
    assert int(logits[-1].argmax()) == want[0]
    parents, path = [-1, 0, 0, 1, 2, 2, 5], [0, 2, 5, 6]  # junk lies between the nodes of the right path
    for done in range(0, new - 4, 3):
        root, *right = want[done : done + 4]
        junk = [(token + 1) % 512 for token in right]
        tokens = [root, junk[0], right[0], junk[1], junk[1], right[1], right[2]]
        base = cache.length
        logits = score(target, tokens, parents, cache)
        with torch.inference_mode():
            cache.commit([base], [path[:3]])  # the last token is the next root
        assert logits[path].argmax(-1).tolist() == want[done + 1 : done + 5]


def slots_for_positions(self: LayerMasks, visible: torch.Tensor, query: Any, key: Any, dtype: torch.dtype) -> Masks:
    count, slots = visible.shape[1:]
    by_slot = torch.arange(slots)[None]
    return LayerMasks.build(self, visible, by_slot[:, slots - count :], by_slot, dtype)


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_ignored_or_counted_in_slots_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = adapter(name)
    monkeypatch.setattr(target, "masks", copy.copy(target.masks))
    target.masks.sizes = dict.fromkeys(target.masks.sizes)
    assert prefix_length(target) < 16
    assert probe_tree(target) < 1e-4  # within the window nothing is hidden
    monkeypatch.setattr("infer.probe.prefix_length", lambda target: 30)
    assert probe_tree(target) > 1e-2
    with pytest.raises(ValueError, match="wrongly"):
        require_tree(target)
    monkeypatch.undo()
    monkeypatch.setattr(target.masks, "build", functools.partial(slots_for_positions, target.masks))
    with pytest.raises(ValueError, match="wrongly"):
        require_tree(target)


REFUSED: dict[str, tuple[Any, str]] = {
    "falcon_alibi": (ARCHITECTURES["falcon_alibi"], "ALiBi"),
    "bloom": (("bloom", {"n_layer": 3, "n_head": 4}), "ALiBi"),
    "mpt": (("mpt", {"d_model": 64, "n_layers": 3, "n_heads": 4}), "ALiBi"),
    "mamba": (("mamba", {"state_size": 4}), "recurrent state"),
    "qwen3_next": (("qwen3_next", {"num_experts": 4, "head_dim": 16, "moe_intermediate_size": 32}), "recurrent state"),
    "lfm2": (("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}), "conv"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_score_trees_are_refused_with_the_reason(name: str) -> None:
    config, reason = REFUSED[name]
    if isinstance(config, tuple):
        kind, fields = config
        known = {k: v for k, v in _COMMON.items() if hasattr(CONFIG_MAPPING[kind], k)}
        config = config_of(kind, **known | fields)
    with pytest.raises(ValueError, match=f"(?s)(cannot score|wrongly).*{reason}.*--plain"):
        require_tree(TargetAdapter(tiny_model(config), name=name))


# ---- features, logits, heads -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIT)
def test_taps_features_and_logits(name: str) -> None:
    target, want = adapter(name), library_states(name)
    positions = torch.arange(len(IDS))[None]
    causal = torch.ones(1, len(IDS), len(IDS), dtype=torch.bool).tril()
    masks = target.masks.build(causal, positions, positions, target.dtype)
    out = target.forward(torch.tensor([IDS]), positions, masks, target.new_cache(len(IDS)))
    for k in (0, 1):
        torch.testing.assert_close(out.taps[k], want.hidden_states[k + 1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.logits_BNV, want.logits, atol=1e-4, rtol=1e-4)
    assert out.hidden_BNH.shape[-1] == target.hidden_size
    if out.hidden_BNH.shape == want.hidden_states[-1].shape:  # OPT projects after the library's last hidden state
        torch.testing.assert_close(out.hidden_BNH, want.hidden_states[-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.logits(out.hidden_BNH), out.logits_BNV, atol=1e-4, rtol=1e-4)
    target.check_head_path()


@pytest.mark.parametrize("name", FIT)
def test_training_features_of_padded_rows(name: str) -> None:
    target = adapter(name)
    ids, valid = torch.tensor([IDS, IDS]), torch.ones(2, len(IDS), dtype=torch.bool)
    valid[1, 25:] = False
    ids[1, 25:] = 7
    features = target.features(ids, valid, taps=(1,))
    want = library_states(name)
    for row, length in enumerate((len(IDS), 25)):
        got, tap = features[row, :length].split((target.hidden_size, features.shape[-1] - target.hidden_size), -1)
        torch.testing.assert_close(tap, want.hidden_states[2][0, :length], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(target.logits(got), want.logits[0, :length], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("name", FIT)
def test_a_head_is_derived_and_runs(name: str, kind: str) -> None:
    target = adapter(name)
    if kind == "eagle3" and target.config.hidden_size != target.hidden_size:
        with pytest.raises(ValueError, match="eagle3 reads layers that are 64 wide in 'opt', whose LM head reads 48"):
            tiny_head(target, kind=kind)
        return
    head = tiny_head(target, kind=kind)
    if kind == "eagle3":
        biased = getattr(target.lm_head, "bias", None) is not None
        with pytest.raises(ValueError, match="projection") if biased else nullcontext():
            head.init_from_target()
    target.tap(head.needs.taps)
    features = target.features(torch.tensor([IDS]), torch.ones(1, len(IDS), dtype=torch.bool), head.needs.taps)
    row = TokenRow("r", tuple(IDS), ((3, len(IDS)),), "t")
    batch = make_batch([row], [features[0].clone()], 2, head.needs)
    weight = 1.0 if kind == "eagle" else 0.0
    out = head(batch, LossSpec(feature_weight=weight, token_weight=0.1, step_decay=1.0), measure=True)
    out.loss_sum.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in head.parameters())


# ---- what is derived from configs --------------------------------------------------------------------------


def config_of(kind: str, **fields: Any) -> Any:
    config_class: Any = CONFIG_MAPPING[kind]
    return config_class(**fields)


def derived(kind: str, **fields: Any) -> HeadConfig:
    config = config_of(kind, **fields)
    return HeadConfig.derive("eagle", config, config.vocab_size, "tiny")


def test_head_config_where_architectures_differ() -> None:
    latent = derived("deepseek_v3")
    assert (latent.num_attention_heads, latent.head_dim) == (128, 56)  # not the 64 of the rotary part
    assert derived("falcon", num_attention_heads=8, hidden_size=512, num_kv_heads=2).num_key_value_heads == 2
    assert derived("gptj", n_embd=512, n_head=8).intermediate_size == 2048
    assert derived("gptj", n_embd=512, n_head=8, n_inner=300).intermediate_size == 300
    assert derived("opt", hidden_size=128, num_attention_heads=4, word_embed_proj_dim=64).hidden_size == 64
    assert derived("gpt_neox").rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}  # without the 1/4
    gemma = derived("gemma3_text").rope_parameters
    assert gemma["rope_theta"] == 1_000_000.0  # that of its full attention
    assert derived("starcoder2", norm_epsilon=3e-5).rms_norm_eps == 3e-5


@pytest.mark.parametrize(("partial", "kept"), [(1.0, True), (0.5, False)])
def test_head_config_of_frequency_lists(partial: float, kept: bool) -> None:
    """A list of factors has one per rotated pair; where the target turns half of a head, none fits the whole."""
    factors = [1.0 + i for i in range(int(32 * partial) // 2)]
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": factors, "long_factor": factors}
    rope |= {"original_max_position_embeddings": 64, "partial_rotary_factor": partial, "factor": 4.0}
    config = derived("phi3", hidden_size=128, num_attention_heads=4, rope_parameters=rope, max_position_embeddings=256)
    assert config.rope_parameters["rope_type"] == ("longrope" if kept else "default")
    assert config.rope_parameters["rope_theta"] == 500.0
    cos, _ = rotary(config)(torch.zeros(1), torch.arange(3)[None])
    assert cos.shape == (1, 3, 32)


def test_limits_that_no_short_probe_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    local = TargetAdapter(
        tiny_model(
            config_of(
                "gpt_neo",
                vocab_size=512,
                hidden_size=64,
                num_layers=2,
                num_heads=4,
                attention_types=[[["global", "local"], 1]],
                window_size=40,
                max_position_embeddings=256,
                bos_token_id=None,
                eos_token_id=None,
                initializer_range=0.35,
            )
        )
    )
    assert probe_tree(local) < 1e-4
    assert local.exact_limit is not None and local.exact_limit.slots == 40
    monkeypatch.setattr("infer.probe.prefix_length", lambda target: 60)
    assert probe_tree(local) > 1e-2
    monkeypatch.undo()
    assert adapter("llama").exact_limit is None
    scaled = adapter("llama4_text").exact_limit
    assert scaled is not None and scaled.slots == 8191
    config = copy.deepcopy(ARCHITECTURES["llama4_text"])
    config.floor_scale, config.attn_scale = 8, 2.0
    scaled_soon = TargetAdapter(tiny_model(config))
    assert scaled_soon.exact_limit is not None and scaled_soon.exact_limit.slots == 7
    assert probe_tree(scaled_soon) > 1e-4  # without the scale: 4e-7
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = config_of("phi3", **_GATED, rope_parameters=rope, original_max_position_embeddings=64)
    long = TargetAdapter(tiny_model(config))
    assert probe_tree(long) < 1e-4
    assert long.exact_limit is not None and long.exact_limit.slots == 64


# ---- masks -------------------------------------------------------------------------------------------------


class Config:
    def __init__(self, **fields: Any) -> None:
        self.num_hidden_layers = 4
        self.__dict__.update(fields)


KINDS = ["full_attention", "sliding_attention", "chunked_attention", "full_attention"]
MIXED = Config(layer_types=KINDS, sliding_window=3, attention_chunk_size=4)


def test_masks_are_by_position() -> None:
    """Against the definition, on the slots of a branching tree behind a prefix with an unused slot."""
    parents = [-1, 0, 0, 1, 2, 4]
    lengths = [len(path) for path in paths(parents)]
    query = torch.tensor([[6 + length for length in lengths]])
    key = torch.cat([torch.tensor([[0, 1, 2, 3, 99, 4, 5, 6]]), query], -1)  # slot 4 is unused
    visible = torch.cat([(key[:, None, :8] < 50).expand(1, 6, 8), ancestor_mask(torch.tensor([parents]))], -1)
    masks = LayerMasks(MIXED).build(visible, query, key, torch.float32)
    assert isinstance(masks, dict) and set(masks) == set(KINDS)
    for kind, mask in masks.items():
        assert mask.shape == (1, 1, 6, 14)
        for n in range(6):
            for s in range(14):
                q, k = int(query[0, n]), int(key[0, s])
                near = {
                    "full_attention": True,
                    "sliding_attention": q - k < 3,
                    "chunked_attention": q // 4 == k // 4,
                }[kind]
                assert mask[0, 0, n, s] == (0.0 if visible[0, n, s] and near else HIDDEN)


def test_one_row_of_positions_serves_all() -> None:
    visible = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0)) > 0.5
    position = torch.arange(4)[None]
    masks = LayerMasks(Config(sliding_window=2))
    one = masks.build(visible, position, position, torch.float32)
    three = masks.build(visible, position.expand(3, 4), position.expand(3, 4), torch.float32)
    assert isinstance(one, torch.Tensor) and isinstance(three, torch.Tensor) and torch.equal(one, three)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_a_query_that_sees_nothing_stays_finite(name: str) -> None:
    target = adapter(name)
    visible, positions = torch.zeros(1, 4, 4, dtype=torch.bool), torch.arange(4)[None]
    masks = target.masks.build(visible, positions, positions, target.dtype)
    out = target.forward(torch.tensor([IDS[:4]]), positions, masks, target.new_cache(4))
    assert out.logits_BNV.isfinite().all() and out.hidden_BNH.isfinite().all()


def test_kinds_of_layers() -> None:
    plain = LayerMasks(Config())
    assert plain.plain and plain.sizes == {"full_attention": None}
    assert LayerMasks(Config(sliding_window=None)).plain
    assert LayerMasks(Config(layer_types=["full_attention"] * 4, sliding_window=16)).plain
    # Layer types beyond the model's layers, and layers without attention, ask for no mask.
    assert LayerMasks(Config(layer_types=["full_attention"] * 3 + ["moe", "conv"])).foreign == ()
    assert LayerMasks(Config(layer_types=["full_attention", "conv"])).foreign == ("conv",)
    mixed = LayerMasks(MIXED)
    assert not mixed.plain
    assert LayerMasks(Config(attention_chunk_size=8)).sizes == {"chunked_attention": 8}
    with pytest.raises(ValueError, match=r"config\.sliding_window is None"):
        LayerMasks(Config(layer_types=["sliding_attention"] * 4, sliding_window=None))
