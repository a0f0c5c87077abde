"""An independent forward of each layout, on the exported files, gives our logits and our drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads.base import DraftHead, TreePolicy
from heads.formats.files import read_folder
from heads.formats.opening import OpenedHead
from heads.formats.registry import LAYOUTS
from heads.target import TargetAdapter
from tests import reference_heads as reference
from tests.layouts import IDS, H, V, a_head, even_target, exported, facts, odd_target, with_token_map

T = 7


@pytest.fixture(scope="module")
def target() -> TargetAdapter:
    return odd_target()


def inputs(target: TargetAdapter, width: int) -> tuple[Tensor, list[int]]:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(T, width * H, generator=generator, dtype=torch.float64)
    return features, torch.randint(0, V, (T,), generator=generator).tolist()


def drafted(head: DraftHead, features: Tensor, tokens: list[int], steps: int) -> tuple[Tensor, list[int]]:
    """Our first draft's logits and chain."""
    state = head.start(64)
    head.commit(state, features[None], torch.tensor([tokens]))
    tree = head.draft(state, torch.tensor(tokens[-1:]), TreePolicy(1, steps, steps + 1))
    logits = head.step_logits(0, state.last_B1H)[0, 0] if hasattr(state, "last_B1H") else torch.zeros(0)
    return logits, tree.token_BN[0, 1:].tolist()


def close(left: Tensor, right: Tensor) -> bool:
    """Both in fp64 but for the norms, which are fp32 by definition: their last bit may differ."""
    return bool(torch.allclose(left, right, rtol=1e-6, atol=1e-6))


@pytest.fixture
def wide(target: TargetAdapter) -> Iterator[tuple[Tensor, Tensor]]:
    """The target's embedding and LM head in fp64."""
    target.model.double()
    yield target.embedding.weight.detach(), target.lm_head.weight.detach()
    target.model.float()


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_eagle_from_its_definition(target: TargetAdapter, wide: Any, tmp_path: Path, to: str) -> None:
    head = a_head(target, "eagle", scale=1.7).double()
    out = exported(target, head, to, tmp_path)
    features, tokens = inputs(target, 1)
    head.bind(target)
    first, chain = drafted(head, features, tokens, 4)
    embedding, lm_head = wide
    theirs, expected = reference.eagle(out, embedding, lm_head, features, tokens, 4)
    assert close(first, theirs) and chain == expected


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("vllm", {}),
        ("vllm", {"vocab": True}),
        ("vllm", {"norm_before_residual": True, "norm_output": True, "fc_norm": True}),
        ("sglang", {"vocab": True}),
        ("speculators", {"vocab": True, "norm_before_residual": True}),
        ("trtllm", {"vocab": True, "norm_output": True}),
    ],
)
def test_eagle3_from_its_definition(
    target: TargetAdapter, wide: Any, tmp_path: Path, to: str, options: dict[str, Any]
) -> None:
    head = a_head(target, "eagle3", **options).double()
    out = exported(target, head, to, tmp_path)
    features, tokens = inputs(target, 3)
    head.bind(target)
    first, chain = drafted(head, features, tokens, 4)
    theirs, expected = reference.eagle3(out, wide[0], features, tokens, 4)
    assert close(first, theirs) and chain == expected


@pytest.mark.parametrize(("to", "vocab"), [("vllm", False), ("vllm", True), ("medusa", False), ("trtllm", False)])
def test_medusa_from_its_definition(target: TargetAdapter, wide: Any, tmp_path: Path, to: str, vocab: bool) -> None:
    head = a_head(target, "medusa", heads=3).double()
    out = exported(target, head, to, tmp_path)
    if vocab:
        out = with_token_map(out)
        config, state = LAYOUTS[to].kinds["medusa"].read(read_folder(out), facts(target))
        head = OpenedHead(out, to, config, state).build()
    feature = inputs(target, 1)[0][-1]
    head.bind(target)
    if to == "vllm":
        theirs = reference.medusa_vllm(out, feature)
    else:
        theirs = (
            reference.medusa_trtllm(out, feature)
            if to == "trtllm"
            else reference.medusa_original(out, feature, wide[1])
        )
    for k, logits in enumerate(theirs):
        mine = head.step_logits(k, head.run(k, feature, ()))  # type: ignore[operator]  # Medusa's own
        assert close(mine, logits[IDS] if vocab else logits)
        assert not vocab or int(logits.isfinite().sum()) == len(IDS)


def test_hydra_from_its_definition(target: TargetAdapter, wide: Any, tmp_path: Path) -> None:
    head = a_head(target, "hydra", heads=3, blocks=2, scale=1.7).double()
    out = exported(target, head, "hydra", tmp_path)
    features, tokens = inputs(target, 1)
    head.bind(target)
    path = [torch.tensor(token) for token in tokens[:3]]
    theirs = reference.hydra_original(out, features[-1], [wide[0][token] for token in path])
    for k, logits in enumerate(theirs):
        mine = head.step_logits(k, head.run(k, features[-1], path[: k + 1]))  # type: ignore[operator]  # Hydra's own
        assert close(mine, logits)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_the_eagle_repository_from_its_definition(tmp_path: Path, kind: str) -> None:
    even = even_target()
    even.model.double()
    head = a_head(even, kind, vocab=kind == "eagle3").double()
    out = exported(even, head, "eagle", tmp_path)
    embedding, lm_head = even.embedding.weight.detach(), even.lm_head.weight.detach()
    features, tokens = inputs(even, 3 if kind == "eagle3" else 1)
    first, chain = drafted(head, features, tokens, 4)
    if kind == "eagle":
        theirs, expected = reference.eagle(out, embedding, lm_head, features, tokens, 4)
    else:
        theirs, expected = reference.eagle3(out, embedding, features, tokens, 4)
    assert close(first, theirs) and chain == expected
