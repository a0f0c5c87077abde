"""Can this model verify trees? Measured at load, because no config field says so.

A model may ignore explicit positions or 4-D masks, keep a state that cannot be rolled back, or hide keys by a rule of
its own. All of that shows in the logits of one small tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.cache import SlotCache
from heads.target import TargetAdapter
from heads.tree import ancestor_mask, paths, tree_positions

_PREFIX = 5  # tokens before the tree, where no window is small enough to be crossed
_CROSSED = 64  # windows and chunks of at most this many tokens are crossed: larger ones would make a long pass
_PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5)  # two levels of branching, depth 3, siblings in no regular order
_PATH = (0, 2, 5)  # committed after the first tree; its slots are not contiguous

# Relative to the largest logit. fp32 differs by summation order only (about 1e-6). In half precision passes
# of another width run other matrix kernels: 0.02 on SmolLM2-135M in bf16, where a wrong mask, position or
# commit gives 0.25 or more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.08}


def prefix_length(target: TargetAdapter) -> int:
    """Tokens before the probe's tree: past every small window, and just before the end of a small chunk."""
    small = [size for size in target.masks.sizes.values() if size is not None and size <= _CROSSED]
    return max([_PREFIX, *(2 * size - 2 for size in small)])


@torch.inference_mode()
def probe_tree(target: TargetAdapter) -> float:
    """Largest error of tree scoring, relative to the largest logit (at least 1).

    A random tree is scored in one pass over a prefix in the cache, a path of it with gaps is committed, and a
    second tree is scored on top. Every node must have the logits that the model gives its path alone, in a
    plain call without cache, mask or positions.
    """
    generator = torch.Generator().manual_seed(0)
    nodes, vocab, count = len(_PARENTS), min(target.vocab_size, 1000), prefix_length(target)
    draw = torch.randint(0, vocab, (count + 2 * nodes,), generator=generator).tolist()
    prefix, first, second = draw[:count], draw[count : count + nodes], draw[count + nodes :]
    cache = target.new_cache(count + len(_PATH) + 2 * nodes)
    _score_prefix(target, prefix, cache)
    found, expected = [_score_tree(target, first, cache)], [_score_paths(target, prefix, first)]
    cache.commit([count], [_PATH])
    prefix += [first[node] for node in _PATH]
    found.append(_score_tree(target, second, cache))
    expected.append(_score_paths(target, prefix, second))
    right = torch.cat(expected)
    error = (torch.cat(found) - right).abs().max()
    return float(error / right.abs().max().clamp_min(1.0))


def _score_prefix(target: TargetAdapter, tokens: list[int], cache: SlotCache) -> None:
    ids = torch.tensor([tokens], device=target.device)
    positions = torch.arange(len(tokens), device=target.device)[None]
    causal = torch.ones(1, len(tokens), len(tokens), dtype=torch.bool, device=target.device).tril()
    masks = target.masks.build(causal, positions, positions, target.dtype)
    target.forward(ids, positions, masks, cache, keep=[len(tokens) - 1])


def _score_tree(target: TargetAdapter, tokens: list[int], cache: SlotCache) -> Tensor:
    parent_1N = torch.tensor([_PARENTS], device=target.device)
    ancestors_1NN = ancestor_mask(parent_1N)
    positions = tree_positions(ancestors_1NN.sum(-1) - 1, torch.tensor([cache.length], device=target.device))
    filled = torch.arange(cache.length, device=target.device)[None]
    visible = torch.cat([ancestors_1NN.new_ones(1, len(tokens), cache.length), ancestors_1NN], -1)
    masks = target.masks.build(visible, positions, torch.cat([filled, positions], -1), target.dtype)
    ids = torch.tensor([tokens], device=target.device)
    return target.forward(ids, positions, masks, cache).logits_BNV[0].float()


def _score_paths(target: TargetAdapter, prefix: list[int], tokens: list[int]) -> Tensor:
    """The library's own logits at the end of every node's path, [N, V]."""
    rows: list[Tensor] = [torch.empty(0)] * len(tokens)
    for path in sorted(paths(_PARENTS), key=len, reverse=True):  # a leaf's pass scores its ancestors too
        if rows[path[-1]].numel():
            continue
        ids = torch.tensor([prefix + [tokens[node] for node in path]], device=target.device)
        logits = target.model(input_ids=ids, use_cache=False).logits[0, len(prefix) :].float().to(target.head_device)
        for depth, node in enumerate(path):
            rows[node] = logits[depth]
    return torch.stack(rows)


def require_tree(target: TargetAdapter) -> float:
    """The probe's error, if it is within the tolerance of the target's dtype.

    Raises:
        ValueError: the target cannot verify drafted trees, with the reason, the measured error or the model's own
            complaint.
    """
    name = target.name or type(target.model).__name__
    cannot = f"target {name!r} cannot score a tree of drafts"
    plain = "plain decoding remains possible with --plain"
    if reason := unfit(target):
        raise ValueError(f"{cannot}: {reason}; {plain}")
    tolerance = _TOLERANCE.get(target.dtype, _TOLERANCE[torch.bfloat16])
    if getattr(target.model, "is_quantized", False):
        # Such products round more in any dtype; 8-bit ones also by outliers among all tokens of the pass (0.05).
        tolerance = max(tolerance, _TOLERANCE[torch.bfloat16])
    try:
        error = probe_tree(target)
    except Exception as failure:  # whatever a foreign model raises on a tree is the answer to the probe
        reason = _bias(target) or f"{type(failure).__name__}: {failure}"
        raise ValueError(f"{cannot}: {reason}; {plain}") from failure
    if not error <= tolerance:  # also refuses NaN
        reason = _bias(target) or (
            "its attention does not follow 4-D masks and explicit positions, or its cache cannot keep a tree path"
        )
        raise ValueError(
            f"target {name!r} scores a tree of drafts wrongly: relative error of the logits {error:.3g}, expected at "
            f"most {tolerance:g} in {target.dtype}; {reason}; {plain}"
        )
    return error


def unfit(target: TargetAdapter) -> str:
    """Why the target cannot score trees, as far as its structure tells; else the empty string.

    What is named here would pass a short probe, or fail it in a way that tells the user nothing.
    """
    if getattr(target.model, "_is_stateful", False):
        return "it keeps a recurrent state, which cannot go back to an accepted path"
    if target.masks.foreign:
        kinds = ", ".join(target.masks.foreign)
        return f"it has layers of the kind {kinds}, whose state or selection of keys does not follow a tree"
    return ""


def _bias(target: TargetAdapter) -> str:
    """Whether the decoder makes a bias of distances from a 2-D mask: `use_alibi`, or a method that builds one."""
    decoder = target.decoder
    if any("alibi" in name and getattr(decoder, name) for name in dir(decoder)):
        return "its attention adds a bias by distance (ALiBi) made from a 2-D mask, where a tree needs a 4-D mask"
    return ""
