"""What needs a GPU: the same texts as on the CPU, half precision, compiled passes with CUDA graphs, `device_map`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from heads.base import TreePolicy
from heads.target import TargetAdapter
from infer.engine import DecodeOptions, RowRequest, decode
from infer.probe import require_tree
from infer.stopping import StopRule
from tests.tiny import library_greedy, prompt_ids, tiny_head, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device: scripts/gpu_check.sh runs these where there is one"
    ),
]
PROMPTS = [prompt_ids(length, seed=length) for length in (7, 1, 12)]
POLICY = TreePolicy(width=3, depth=3, total=8)


def on_gpu(dtype: torch.dtype = torch.float32) -> TargetAdapter:
    return TargetAdapter(tiny_model("llama").to("cuda", dtype), name="tiny")


def texts(target: TargetAdapter, compiled: bool = False, drafted: bool = True) -> list[list[int]]:
    head = tiny_head(target).to(target.head_device, target.dtype) if drafted else None
    rows = [RowRequest(prompt, StopRule(frozenset(), 24)) for prompt in PROMPTS]
    return [result.ids for result in decode(target, head, rows, DecodeOptions(POLICY, compiled=compiled))]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("drafted", [False, True])
def test_greedy_in_fp32(compiled: bool, drafted: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = tiny_model("llama")
    assert texts(on_gpu(), compiled, drafted) == [library_greedy(model, prompt, 24) for prompt in PROMPTS]


def test_half_precision_passes_the_probe_and_decodes() -> None:
    target = on_gpu(torch.bfloat16)
    require_tree(target)
    assert [len(text) for text in texts(target)] == [24, 24, 24]


def test_device_map(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    target = TargetAdapter.load(str(tmp_path), dtype="float32", device_map="auto")
    require_tree(target)
    model = tiny_model("llama")
    assert texts(target) == [library_greedy(model, prompt, 24) for prompt in PROMPTS]
