"""Can this model verify trees? Measured at load, because no config field says so.

A model may ignore explicit positions or 4-D masks, keep a state that cannot be rolled back, or need a mask
per layer type. All of that shows in the logits of one small tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heads.cache import SlotCache
from heads.target import TargetAdapter
from heads.tree import additive_mask, ancestor_mask, paths, tree_positions
from infer.prefill import prefill

_PREFIX = 5  # tokens before the tree
_PARENTS = (-1, 0, 0, 1, 1, 2, 3, 5)  # two levels of branching, depth 3, siblings in no regular order
_PATH = (0, 2, 5)  # committed after the first tree; its slots are not contiguous

# Relative to the largest logit. fp32 differs by summation order only (about 1e-6). In half precision passes
# of another width run other matrix kernels: 0.02 on SmolLM2-135M in bf16, where a wrong mask, position or
# commit gives 0.25 or more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.03, torch.bfloat16: 0.08}


@torch.inference_mode()
def probe_tree(target: TargetAdapter) -> float:
    """Largest error of tree scoring, relative to the largest logit (at least 1).

    A random tree is scored in one pass over a prefix in the cache, a path of it with gaps is committed, and a
    second tree is scored on top. Every node must have the logits that the model gives its path alone, in a
    plain call without cache, mask or positions.
    """
    generator = torch.Generator().manual_seed(0)
    nodes, vocab = len(_PARENTS), min(target.vocab_size, 1000)
    draw = torch.randint(0, vocab, (_PREFIX + 2 * nodes,), generator=generator).tolist()
    prefix, first, second = draw[:_PREFIX], draw[_PREFIX : _PREFIX + nodes], draw[_PREFIX + nodes :]
    cache = target.new_cache(_PREFIX + len(_PATH) + 2 * nodes)
    prefill(target, prefix, cache)
    found, expected = [_score_tree(target, first, cache)], [_score_paths(target, prefix, first)]
    cache.commit(_PREFIX, list(_PATH))
    prefix += [first[node] for node in _PATH]
    found.append(_score_tree(target, second, cache))
    expected.append(_score_paths(target, prefix, second))
    right = torch.cat(expected)
    error = (torch.cat(found) - right).abs().max()
    return float(error / right.abs().max().clamp_min(1.0))


def _score_tree(target: TargetAdapter, tokens: list[int], cache: SlotCache) -> Tensor:
    parent_1N = torch.tensor([_PARENTS], device=target.device)
    ancestors_1NN = ancestor_mask(parent_1N)
    positions = tree_positions(ancestors_1NN.sum(-1) - 1, torch.tensor([cache.length], device=target.device))
    visible = torch.cat([ancestors_1NN.new_ones(1, len(tokens), cache.length), ancestors_1NN], -1)
    ids = torch.tensor([tokens], device=target.device)
    out = target.forward(ids, positions, additive_mask(visible, target.dtype), cache)
    return out.logits_BNV[0].float()


def _score_paths(target: TargetAdapter, prefix: list[int], tokens: list[int]) -> Tensor:
    """The library's own logits at the end of every node's path, [N, V]."""
    rows: list[Tensor] = [torch.empty(0)] * len(tokens)
    for path in sorted(paths(_PARENTS), key=len, reverse=True):  # a leaf's pass scores its ancestors too
        if rows[path[-1]].numel():
            continue
        ids = torch.tensor([prefix + [tokens[node] for node in path]], device=target.device)
        logits = target.model(input_ids=ids, use_cache=False).logits[0].float()
        for depth, node in enumerate(path):
            rows[node] = logits[len(prefix) + depth]
    return torch.stack(rows)


def require_tree(target: TargetAdapter) -> float:
    """The probe's error, if it is within the tolerance of the target's dtype.

    Raises:
        ValueError: the target cannot verify drafted trees, with the measured error or the model's own
            complaint.
    """
    tolerance = _TOLERANCE.get(target.dtype, _TOLERANCE[torch.bfloat16])
    name = target.name or type(target.model).__name__
    try:
        error = probe_tree(target)
    except Exception as failure:  # whatever a foreign model raises on a tree is the answer to the probe
        raise ValueError(
            f"target {name!r} cannot score a tree of drafts: {type(failure).__name__}: {failure}"
        ) from failure
    if not error <= tolerance:  # also refuses NaN
        raise ValueError(
            f"target {name!r} scores a tree of drafts wrongly: relative error of the logits {error:.3g}, "
            "expected at "
            f"most {tolerance:g} in {target.dtype}; its attention does not follow 4-D masks and explicit "
            "positions, or "
            "its cache cannot keep a tree path"
        )
    return error
