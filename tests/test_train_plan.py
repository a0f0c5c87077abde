"""Plans against real modules, measured peaks, counted operations, and calculations by hand for Llama 3.1."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from heads.aligned import Aligned
from heads.base import LossSpec, trainable_parameters
from heads.target import TargetAdapter
from infer.batched import Request, decode_all
from tests.plans import big_plan, middle_model, plan_config, plan_on_cpu, random_batch
from tests.tiny import ARCHITECTURES, CONFIGS, tiny_head, tiny_target
from train.config import OptimConfig
from train.flops import StepSize, step_products, target_attention_flops, target_flops_per_token
from train.memory import PeakBytes, target_pass_bytes
from train.optim import build_optimizer
from train.plan import Case
from train.plan_cli import STRATEGIES

# --- by hand, Llama 3.1 ---------------------------------------------------------------------------------------


def test_sizes_of_llama_by_hand() -> None:
    small, large = big_plan("8B"), big_plan("70B")
    assert sum(p.numel() for p in small.target.model.parameters()) == 8_030_261_248  # as published
    assert sum(p.numel() for p in large.target.model.parameters()) == 70_553_706_496
    assert small.target_bytes == 2 * 8_030_261_248
    assert small.slot_bytes == 2 * 32 * 8 * 128 * 2 and large.slot_bytes == 2 * 80 * 8 * 128 * 2
    assert small.root_bytes == 2 * (2 * 128_256 * 4096 + 4096)
    width, inner, keys = 4096, 14_336, 1024
    attention = 2 * width * width + 2 * (2 * width * keys) + width * width  # reads [embedding, hidden state]
    head = 3 * width * width + attention + 3 * width * inner + 4 * width + 32_000 * width
    assert small.trained == head == 424_689_664
    assert small.columns == 4 * width and small.cache_bytes == small.tokens * 4 * width * 2


@pytest.mark.parametrize(("size", "parameters"), [("8B", 8_030_261_248), ("70B", 70_553_706_496)])
def test_memory_of_llama_by_hand(size: str, parameters: int) -> None:
    plan = big_plan(size)
    one, eight = (plan.memory(Case(plan.config, count, "fsdp2")) for count in (1, 8))
    assert one["training"]["target"] == 2 * parameters and one["features"]["target"] == 2 * parameters
    states = sum(one["training"][name] for name in ("weights", "gradients", "moments"))
    assert states == 16 * plan.trained
    divided = sum(eight["training"][name] for name in ("weights", "gradients", "moments"))
    assert divided == pytest.approx(2 * plan.trained, abs=32)
    layers = 2 * parameters - plan.root_bytes
    assert eight["training"]["target"] == eight["features"]["target"] == plan.root_bytes + layers // 8
    assert eight["training"]["gathered"] == 3 * 4 * plan.trained  # weights, fresh gradients, and what is sent of them
    rows = (128 + 2) * 2048  # two of the engine itself
    assert (
        one["answers"]["cache"] == rows * plan.slot_bytes and eight["answers"]["cache"] == rows * plan.slot_bytes // 8
    )
    fits = {count: plan.fits(Case(plan.config, count, "ddp")) for count in (1, 8)}
    small = size == "8B"
    assert fits == {1: small, 8: small} and plan.fits(Case(plan.config, 8, "fsdp2"))


def test_flops_and_times_of_llama_by_hand() -> None:
    plan = big_plan("8B")
    per_token = target_flops_per_token(plan.target)
    assert per_token == 2 * (8_030_261_248 - 2 * 128_256 * 4096 - 65 * 4096)  # embedding, LM head, norms
    case = Case(plan.config, 8, "ddp")
    times = plan.times(case)
    attention = 4 * 32 * 128 * 2048 * 32  # per token: queries and values, of all 2,048 positions, in 32 layers
    rate = 8 * 0.4 * 312e12 / (per_token + attention)
    assert times.features == pytest.approx(plan.tokens / rate)
    assert plan.tokens == round(50_000_000 * (384 + 160) / 384)
    assert times.tokens == times.steps * 8 * 4096 and times.tokens == pytest.approx(2 * plan.tokens, rel=1e-3)
    # one step: arithmetic, gradients twice over the link, AdamW's reads and writes
    trained, width = plan.trained, 4096
    layer = trained - 3 * width * width - 32_000 * width - 4 * width
    products = 2 * 4096 * (2 * 3 * width * width + 3 * (3 * layer + 3 * 32_000 * width) + 32_000 * width)
    flops = products + 3.5 * 4 * 4096 * 4096 * 2049 / 2 * 3
    seconds = flops / 312e12 + 28 * trained / 2e12 + 8 * trained * 7 / 8 / 50e9
    assert times.training == pytest.approx(times.steps * seconds / 0.4)
    step = (plan.target_bytes + 128 * 1024 * plan.slot_bytes) / 2e12  # reading takes longer than 128 rows' arithmetic
    assert times.answers == pytest.approx((plan.tokens / 128 * step + plan.tokens * per_token / 312e12) / 0.4)


# --- against real modules and measured peaks ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2", "gpt2"])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa", "hydra"])
def test_parameters_are_those_of_real_modules(name: str, kind: str, tmp_path: Path) -> None:
    plan = plan_on_cpu(tmp_path, CONFIGS[name], head={"kind": kind, "draft_vocab": 256}, data={"max_length": 32})
    real = tiny_target(name)
    assert plan.target_bytes == sum(4 * p.numel() for p in real.model.parameters())
    assert plan.slot_bytes == real.cache_bytes_per_slot
    options: dict[str, Any] = {"taps": (0, 1, 2)} if kind == "eagle3" else {}
    config = tiny_head(real, kind=kind, **options).config
    head = type(plan.head)(replace(config, draft_vocab_size=256))
    assert plan.trained == trainable_parameters(head)
    assert [(n, p.shape) for n, p in plan.head.named_parameters()] == [(n, p.shape) for n, p in head.named_parameters()]
    assert all(p.is_meta for p in [*plan.head.parameters(), *plan.target.model.parameters()])


def _grouped_flops(a: Any, b: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 2 * a[0] * a[1] * b[-1]  # every row goes through one expert


# Falcon with ALiBi has no explicit masks; Llama 4 lets all experts run and drops what was not chosen.
COUNTED = sorted(set(ARCHITECTURES) - {"falcon_alibi", "llama4_text"})


@pytest.mark.parametrize("name", COUNTED)
def test_flops_of_the_target_match_a_count_of_operations(name: str) -> None:
    with torch.device("meta"):
        target = TargetAdapter(AutoModelForCausalLM.from_config(ARCHITECTURES[name], dtype=torch.bfloat16))
    ids = torch.zeros(2, 96, dtype=torch.long, device="meta")
    mapping = {torch.ops.aten._grouped_mm: _grouped_flops}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        target.hidden_states(ids, torch.ones(2, 96, dtype=torch.bool, device="meta"))
    said = 2 * 96 * target_flops_per_token(target) + target_attention_flops(target, 2 * 96 * 96)
    assert said == pytest.approx(counter.get_total_flops(), rel=0.04)


@pytest.mark.parametrize("name", COUNTED)
def test_memory_of_a_pass_is_within_a_factor_of_two(name: str) -> None:
    _check_pass(tiny_target(ARCHITECTURES[name]), 4, 64)


@pytest.mark.parametrize(("rows", "length"), [(1, 1024), (8, 128)])
def test_memory_of_a_larger_pass_is_within_a_factor_of_two(rows: int, length: int) -> None:
    _check_pass(tiny_target(middle_model()), rows, length, (0, 1, 3))


def _check_pass(target: TargetAdapter, rows: int, length: int, taps: tuple[int, ...] = ()) -> None:
    target.tap(taps)
    ids, valid = torch.ones(rows, length, dtype=torch.long), torch.ones(rows, length, dtype=torch.bool)
    with PeakBytes() as meter:
        target.features(ids, valid, taps)
    columns = target.hidden_size + len(taps) * target.config.hidden_size
    assert 0.5 < target_pass_bytes(target, rows, length, columns) / meter.peak < 2


@pytest.mark.parametrize("name", ["tiny", "middle"])
def test_memory_of_answers_is_within_a_factor_of_two(name: str, tmp_path: Path) -> None:
    config = CONFIGS["llama"] if name == "tiny" else middle_model()
    plan = plan_on_cpu(tmp_path, config, data={"max_length": 96, "prompt_tokens": 48, "batch_size": 8})
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 512, (8, 48), generator=generator).tolist()
    target = tiny_target(config)
    stops = frozenset(range(0, config.vocab_size, 20))  # rows end one by one
    with PeakBytes() as meter:
        decode_all(target, [Request(prompt, 48, 1.0) for prompt in prompts], 100, stops)
    parts = plan.memory(Case(plan.config, 1, "ddp"))["answers"]
    assert 0.5 < (parts["cache"] + parts["activations"]) / meter.peak < 2


SPEC = LossSpec(0.5, 1.0, 0.8)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa", "hydra"])
def test_memory_of_training_is_within_a_factor_of_two(kind: str, tmp_path: Path) -> None:
    """A whole step, optimizer included, of a head half of whose memory is its states."""
    steps = {"loss": {"unroll_steps": 3}} if kind.startswith("eagle") else {}
    plan = plan_on_cpu(tmp_path, middle_model(), head={"kind": kind}, train={"tokens_per_batch": 512}, **steps)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = type(plan.head)(plan.head.config)
    head.bind(tiny_target(middle_model()))
    optimizer = build_optimizer(head.parameters(), OptimConfig())
    with PeakBytes() as meter:
        for _ in range(2):
            optimizer.zero_grad()
            head(random_batch(head, 512, plan.steps(Case(plan.config, 1, "ddp"))), SPEC).loss_sum.backward()
            optimizer.step()
    measured = meter.peak + 4 * trainable_parameters(head) + plan.target_bytes
    parts = plan.memory(Case(plan.config, 1, "ddp"))["training"]
    assert parts["moments"] == sum(
        x.numel() * x.element_size() for state in optimizer.state.values() for x in state.values() if x.ndim
    )
    assert 0.6 < sum(parts.values()) / measured < 1.7
    own = sum(size for name, size in parts.items() if name not in ("target", "weights"))
    assert 0.5 < own / meter.peak < 2


@pytest.mark.parametrize("projection", ["shared", "own"])
@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_flops_of_heads_side_by_side_match_a_count(kind: str, projection: str) -> None:
    """EAGLE's: tests/test_train_benchmark.py."""
    target = tiny_target(middle_model(64))
    head = tiny_head(target, kind=kind, blocks=2, projection=projection)
    head = type(head)(replace(head.config, draft_vocab_size=4096))
    head.set_draft_vocab(torch.arange(4096))
    head.bind(target)
    batch = random_batch(head, 512, head.max_depth or 0)
    with FlopCounterMode(display=False) as counter:
        head(batch, SPEC).loss_sum.backward()
    size = StepSize(batch.steps, 512, 512, Aligned(batch).teacher_RH.shape[0])
    said = sum(product.flops for product in step_products(head, size))
    assert said == pytest.approx(counter.get_total_flops(), rel=0.03)


# --- strategies -----------------------------------------------------------------------------------------------


@pytest.fixture
def world_of_eight():
    """Eight processes of which this is one and the others do nothing: memory is as it would be, numbers are not."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_what_fsdp2_keeps_is_what_it_really_keeps(world_of_eight: None, tmp_path: Path) -> None:
    plan = plan_on_cpu(tmp_path, middle_model(), train={"tokens_per_batch": 512})
    head = type(plan.head)(plan.head.config)
    head.bind(tiny_target(middle_model()))
    mesh = init_device_mesh("cpu", (8,))
    fully_shard(head, mesh=mesh)
    optimizer = torch.optim.AdamW(head.parameters())
    head(random_batch(head, 256, 3), SPEC).loss_sum.backward()
    optimizer.step()

    def local(tensors: Any) -> int:
        return sum(x.to_local().numel() * x.element_size() for x in tensors)

    parts = plan.memory(Case(plan.config, 8, "fsdp2"))["training"]
    assert parts["weights"] == pytest.approx(local(head.parameters()), rel=0.01)
    assert parts["gradients"] == pytest.approx(local(p.grad for p in head.parameters()), rel=0.01)
    moments = (x for state in optimizer.state.values() for x in state.values() if x.ndim)
    assert parts["moments"] == pytest.approx(local(moments), rel=0.01)


def test_ddp_needs_buckets(tmp_path: Path) -> None:
    """In a group of one, which has them, too."""
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    plan = plan_on_cpu(tmp_path, middle_model(), train={"tokens_per_batch": 512})
    head = type(plan.head)(plan.head.config)
    head.bind(tiny_target(middle_model()))
    with PeakBytes() as meter:
        wrapped = torch.nn.parallel.DistributedDataParallel(head)
        for _ in range(2):  # buckets are built anew after the first backward pass
            wrapped.zero_grad()
            wrapped(random_batch(head, 32, 3), SPEC).loss_sum.backward()
        live = meter.live
    dist.destroy_process_group()
    one, eight = (plan.memory(Case(plan.config, n, "ddp"))["training"] for n in (1, 8))
    assert eight["gradients"] - one["gradients"] == 4 * plan.trained
    assert live == pytest.approx(eight["gradients"], rel=0.1)


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3"])
@pytest.mark.parametrize("size", ["8B", "70B"])
def test_more_devices_never_need_more_memory_each(size: str, strategy: str) -> None:
    plan = big_plan(size)
    found = [plan.memory(Case(plan.config, count, strategy)) for count in (1, 2, 3, 4, 7, 8, 16, 64, 512)]
    for phase in ("answers", "features", "training"):
        totals = [sum(memory[phase].values()) for memory in found]
        assert totals == sorted(totals, reverse=True)
        assert totals[-1] < totals[0] or (strategy == "zero2" and phase != "training")


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("strategy", ["fsdp2", "zero2", "zero3"])
def test_more_devices_never_need_more_memory_of_a_tiny_run(strategy: str, precision: str, tmp_path: Path) -> None:
    """From two on: on one device nothing is gathered, and a tiny target's layers are most of it."""
    plan = plan_on_cpu(tmp_path, CONFIGS["llama"])
    plan.dtype = torch.float32 if precision == "no" else torch.bfloat16
    totals = [plan.needed(Case(plan.config, count, strategy)) for count in (2, 3, 4, 8, 100)]
    assert totals == sorted(totals, reverse=True) and (strategy == "zero2" or totals[-1] < totals[0])


def test_strategies_order_as_they_should() -> None:
    plan = big_plan("8B")
    training = {name: sum(plan.memory(Case(plan.config, 8, name))["training"].values()) for name in STRATEGIES}
    assert training["zero3"] < training["fsdp2"] < training["ddp"] and training["zero3"] < training["zero2"]
    assert training["zero2"] < training["ddp"]


def test_time_falls_with_devices_and_rises_with_work() -> None:
    plan = big_plan("8B")
    one, eight = (plan.times(Case(plan.config, count, "ddp")) for count in (1, 8))
    assert eight.features == pytest.approx(one.features / 8)
    assert one.training / 8 < eight.training < one.training  # gradients are exchanged
    assert eight.steps == pytest.approx(one.steps / 8, rel=1e-3)
    divided = plan.times(Case(plan.config, 8, "fsdp2"))
    assert divided.features > eight.features  # the target is gathered for every pass
    late = plan_config(loss={"unroll_from": 0.5})
    assert plan.times(Case(late, 1, "ddp")).training < one.training
    limited = plan.times(Case(plan_config(train={"epochs": 2, "max_minutes": 10}), 1, "ddp"))
    assert limited.training == pytest.approx(600, rel=0.01) and limited.tokens == limited.steps * 4096
    assert plan.times(Case(plan_config(train={"epochs": None, "max_steps": 7}), 8, "ddp")).steps == 7
