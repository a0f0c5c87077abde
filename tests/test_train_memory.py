"""The meter of allocations, how a training step's memory grows with its length, and the estimate made before a run."""

from __future__ import annotations

import gc
from dataclasses import fields
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from heads.base import DraftHead, HeadBatch, LossSpec, trainable_parameters
from heads.config import HeadConfig
from heads.drafter import HiddenStateDrafter
from heads.kinds import kind_of
from heads.registry import build_head
from tests.tiny import tiny_target
from train.batching import make_batch
from train.conversations import TokenRow
from train.dense import dense_loss
from train.memory import MemoryEstimate, PeakBytes, estimate_memory

MIB = 2**20
SPEC = LossSpec(0.5, 1.0, 0.8)


# --- the meter ------------------------------------------------------------------------------------------------


def test_the_meter_counts_what_lives() -> None:
    with PeakBytes() as meter:
        a = torch.zeros(1000)
        assert (meter.live, meter.peak) == (4000, 4000)
        b = a + 1
        assert (meter.live, meter.peak) == (8000, 8000)
        del a
        gc.collect()
        assert (meter.live, meter.peak) == (4000, 8000)
        c = torch.zeros(500, dtype=torch.float64)
        assert (meter.live, meter.peak) == (8000, 8000)
    assert b.shape == (1000,) and c.shape == (500,)


def test_the_meter_counts_a_storage_once_and_none_that_was_there() -> None:
    before, other = torch.zeros(1000), torch.zeros(1000)
    with PeakBytes() as meter:
        view = before[10:]
        before.add_(1)
        views = [before.view(10, 100).t(), other.expand(5, 1000)]
        assert meter.peak == 0
        made = torch.zeros(100)
        part, same = made[3:], made.mul_(2)
        assert (meter.live, meter.peak) == (400, 400)
        del made, same
        gc.collect()
        assert meter.live == 400  # the view holds the storage
        del part
        gc.collect()
        assert meter.live == 0
        del before, view, views  # gone inside, but they never counted
        gc.collect()
        assert (meter.live, meter.peak) == (0, 400)


def test_the_meter_sees_what_autograd_keeps_and_the_backward_pass() -> None:
    weight = torch.ones(1000, requires_grad=True)
    with PeakBytes() as meter:
        y = weight
        for _ in range(10):
            y = y.exp()  # keeps its result
        assert meter.live == 10 * 4000
        total = y.sum()
        total.backward()
        assert meter.peak >= 11 * 4000
        del y, total
        gc.collect()
        assert meter.live == 4000  # the gradient
    assert weight.grad is not None


def test_memory_of_recomputed_steps_is_smaller() -> None:
    layers = [torch.nn.Linear(64, 64) for _ in range(8)]

    def run(recompute: bool) -> int:
        x = torch.ones(512, 64, requires_grad=True)
        with PeakBytes() as meter:
            for layer in layers:
                part = torch.nn.Sequential(layer, torch.nn.GELU(), torch.nn.Softmax(-1))
                x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False) if recompute else part(x)
            x.square().sum().backward()
        return meter.peak

    assert run(True) < 0.7 * run(False)


# --- how a step's memory grows --------------------------------------------------------------------------------


VOCAB = 8192  # so large that the loss goes through a batch in chunks


def _head(kind: str, width: int = 64, draft_vocab: int | None = None, **options: Any) -> DraftHead:
    """Random, in fp32, bound to a random target."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=3,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 32,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    target = tiny_target(config)
    options = {**kind_of(kind).options, **options}
    derived = HeadConfig.derive(kind, config, VOCAB, "tiny", draft_vocab_size=draft_vocab, options=options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = build_head(derived)
    if draft_vocab is not None:
        head.set_draft_vocab(torch.arange(draft_vocab))
    head.bind(target)
    return head.train()


def _batch(head: DraftHead, length: int, steps: int, dtype: torch.dtype = torch.float32) -> HeadBatch:
    """One text, nearly all of it supervised: the longest one that there can be."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
    feature = torch.randn(length, head.config.hidden_size * (1 + len(head.needs.taps)), generator=generator)
    row = TokenRow("r", tuple(ids), ((1, length),), "t")
    return make_batch([row], [feature], steps, head.needs, packed=length, dtype=dtype)


def _peak(head: DraftHead, batch: HeadBatch, dense: bool = False, dtype: torch.dtype = torch.float32) -> int:
    """Of forward and backward, without the batch and the weights."""
    head.zero_grad(set_to_none=True)
    with PeakBytes() as meter:
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            if dense:
                assert isinstance(head, HiddenStateDrafter)
                total = dense_loss(head, batch, SPEC)
            else:
                total = head(batch, SPEC).loss_sum
        total.backward()
    return meter.peak


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_memory_grows_linearly_with_the_length_and_the_dense_steps_does_not(kind: str) -> None:
    """In one text: the case in which attention could grow with the square."""
    head = _head(kind, draft_vocab=1024)
    short, long = (_batch(head, length, 3) for length in (512, 1024))
    ours = _peak(head, long) / _peak(head, short)
    dense = _peak(head, long, dense=True) / _peak(head, short, dense=True)
    assert ours < 2.2
    assert dense > 2.6
    assert _peak(head, long) < 0.3 * _peak(head, long, dense=True)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_recomputing_saves_memory(kind: str) -> None:
    head = _head(kind, draft_vocab=1024)
    batch = _batch(head, 1024, 4)
    plain = _peak(head, batch)
    assert isinstance(head, HiddenStateDrafter)
    head.checkpointing = True
    assert _peak(head, batch) < 0.8 * plain


# --- the estimate ---------------------------------------------------------------------------------------------

CASES: list[tuple[str, dict[str, Any], int | None]] = [
    ("eagle", {}, None),
    ("eagle", {}, 4096),
    ("eagle3", {}, 4096),
    ("eagle3", {"fc_norm": True, "projection": "shared"}, None),
    ("medusa", {}, 4096),
    ("medusa", {"projection": "own", "blocks": 2}, 4096),
    ("hydra", {}, 4096),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("kind", "options", "draft_vocab"), CASES)
def test_the_estimate_is_within_a_factor_of_two(
    kind: str, options: dict[str, Any], draft_vocab: int | None, width: int, dtype: torch.dtype
) -> None:
    head = _head(kind, width, draft_vocab, **options)
    steps = head.max_depth or 3
    batch = _batch(head, 512, steps, dtype)
    estimate = estimate_memory(head, 512, steps, dtype)
    said = estimate.activations + estimate.gradients + estimate.loss
    assert 0.5 < said / _peak(head, batch, dtype=dtype) < 2


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_activations_alone_are_within_a_factor_of_two(kind: str, steps: int, checkpointing: bool) -> None:
    """What lives when all draft steps are done (recomputed: also what the backward pass needs at its peak)."""
    head = _head(kind)
    assert isinstance(head, HiddenStateDrafter)
    head.checkpointing = checkpointing
    batch = _batch(head, 512, steps)
    estimate = estimate_memory(head, 512, steps, torch.float32, checkpointing)
    with PeakBytes() as meter:
        outputs = list(head.unroll(batch))
        live = meter.live
        if checkpointing:
            torch.stack(outputs).sum().backward()
            live = meter.peak - sum(4 * p.numel() for p in head.parameters() if p.grad is not None)
    assert 0.5 < estimate.activations / live < 2


def test_the_constant_parts_are_exact() -> None:
    head = _head("eagle3")
    estimate = estimate_memory(head, 512, 3, torch.float32)
    head(_batch(head, 128, 3), SPEC).loss_sum.backward()
    optimizer = torch.optim.AdamW(head.parameters())
    optimizer.step()
    moments = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    assert estimate.moments == sum(x.numel() * x.element_size() for x in moments)
    assert estimate.weights == estimate.gradients == 4 * trainable_parameters(head)
    assert estimate.target == sum(p.numel() * 4 for p in head.target.model.parameters())
    assert estimate.batch == 2 * 512 * 4 * 64 * 4  # features and noise of four columns of 64


def test_the_estimate_grows_with_what_it_is_made_of() -> None:
    head = _head("eagle3")
    base = estimate_memory(head, 512, 3, torch.float32)
    longer = estimate_memory(head, 1024, 3, torch.float32)
    deeper = estimate_memory(head, 512, 6, torch.float32)
    assert longer.activations == 2 * base.activations and deeper.activations == 2 * base.activations
    assert longer.moments == base.moments
    assert estimate_memory(head, 512, 3, torch.float32, True).activations < base.activations
    assert base.total == sum(getattr(base, field.name) for field in fields(MemoryEstimate))


def test_the_estimate_is_one_line() -> None:
    estimate = MemoryEstimate(100 * MIB, 10 * MIB, 10 * MIB, 20 * MIB, 50 * MIB, 5 * MIB, MIB // 2)
    assert str(estimate) == (
        "about 196 MiB (target 100.0, weights 10.0, gradients 10.0, moments 20.0, "
        "activations 50.0, batch 5.0, loss 0.5)"
    )
