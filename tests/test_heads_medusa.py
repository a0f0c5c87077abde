"""Medusa and Hydra heads in training: shapes, shifts, gradients, against definitions written out densely."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from heads.base import HeadBatch, LossSpec, Needs, trainable_parameters
from heads.config import HeadConfig
from heads.kinds import kind_of
from heads.registry import build_head
from tests.tiny import prompt_ids, tiny_head, tiny_target
from tests.tiny_run import check_overfitting
from train.batching import make_batch
from train.conversations import TokenRow

KINDS = ["medusa", "hydra"]
SPEC = LossSpec(0.0, 1.0, 0.8)


def make(target: Any, lengths: list[int], heads: int, dtype: torch.dtype = torch.float32) -> HeadBatch:
    generator = torch.Generator().manual_seed(5)
    rows, features = [], []
    for number, length in enumerate(lengths):
        rows.append(TokenRow(str(number), tuple(prompt_ids(length, number)), ((2, length),), "t"))
        features.append(torch.randn(length, target.hidden_size, generator=generator, dtype=dtype))
    return make_batch(rows, features, heads, Needs())


def new_head(target: Any, kind: str, draft_vocab: int | None = None, **options: Any) -> Any:
    """As training makes it, before the first step."""
    chosen = {**kind_of(kind).options, **options}
    config = HeadConfig.derive(
        kind, target.config, target.vocab_size, target.name, draft_vocab_size=draft_vocab, options=chosen
    )
    head = build_head(config)
    if draft_vocab is not None:
        head.draft_token_ids.copy_(torch.arange(0, 2 * draft_vocab, 2))
    head.bind(target)
    head.init_from_target()
    return head


def written_out(head: Any, k: int, feature: torch.Tensor, tokens: list[torch.Tensor]) -> torch.Tensor:
    """The formula of the module's docstring from the state dict alone."""
    weights = head.state_dict()
    given = feature
    if head.config.kind == "hydra":
        scale = head.config.embedding_scale
        given = torch.cat([feature, *(scale * head.target.embedding.weight[t].to(feature.dtype) for t in tokens)], -1)
    x = feature
    for layer in range(head.config.num_blocks):
        z = given @ weights[f"blocks.{k}.layers.{layer}.weight"].T + weights[f"blocks.{k}.layers.{layer}.bias"]
        x = x + z * torch.sigmoid(z)
        given = x
    return x


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_counted_by_hand_and_none_is_shared(kind: str) -> None:
    target = tiny_target("llama")
    head = tiny_head(target, kind=kind, heads=3, blocks=2)
    width = target.hidden_size
    first = [width * (k + 2) if kind == "hydra" else width for k in range(3)]
    assert trainable_parameters(head) == sum(n * width + width + width * width + width for n in first)
    pointers = [p.data_ptr() for p in head.parameters()]
    assert len(set(pointers)) == len(pointers) == 3 * 2 * 2
    own = tiny_head(target, kind=kind, heads=3, blocks=2, projection="own")
    assert trainable_parameters(own) == trainable_parameters(head) + 3 * target.vocab_size * width


@pytest.mark.parametrize("projection", ["shared", "own"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_a_new_head_is_the_target(name: str, kind: str, projection: str) -> None:
    """Logits of every head are the target's own at its feature, also over a reduced vocabulary."""
    target = tiny_target(name)
    batch = make(target, [9, 5], 3)
    want = target.logits(batch.feature_BTH)
    for draft_vocab in (None, 128):
        head = new_head(target, kind, draft_vocab, heads=3, blocks=2, projection=projection)
        expected = want if draft_vocab is None else want[..., head.draft_token_ids]
        for k, output in enumerate(head.unroll(batch)):
            assert torch.equal(output, batch.feature_BTH)
            torch.testing.assert_close(head.step_logits(k, output), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_unroll_is_the_formula(kind: str) -> None:
    """Golden forward, in fp64, from named tensors: other names, another order or another activation fail."""
    target = tiny_target("llama")
    target.model.double()
    head = tiny_head(target, kind=kind, heads=3, blocks=2).double()
    batch = make(target, [9, 6], 3, torch.float64)
    for k, output in enumerate(head.unroll(batch)):
        tokens = [batch.token_KBT[j] for j in range(k + 1)]
        torch.testing.assert_close(output, written_out(head, k, batch.feature_BTH, tokens))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("projection", ["shared", "own"])
@pytest.mark.parametrize("hard", [0.0, 0.3])
@pytest.mark.parametrize("draft_vocab", [None, 128])
def test_loss_and_gradients_are_the_dense_ones(
    kind: str, projection: str, hard: float, draft_vocab: int | None
) -> None:
    """Oracle: every head, root and position on its own, with the whole [V] distributions."""
    target = tiny_target("llama")
    target.model.double()
    head = new_head(target, kind, draft_vocab, heads=3, blocks=2, projection=projection).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in head.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    batch = make(target, [11, 4, 7], 3, torch.float64)
    out = head(batch, LossSpec(0.0, 1.0, 0.8, hard), measure=True)
    out.loss_sum.backward()
    mine = {name: parameter.grad.clone() for name, parameter in head.named_parameters()}
    head.zero_grad()
    ids = head.draft_token_ids if draft_vocab else torch.arange(target.vocab_size)
    dense = torch.zeros((), dtype=torch.float64)
    matches = [0, 0, 0]
    for k, output in enumerate(head.unroll(batch)):
        for row, root in batch.weight_KBT[k].nonzero().tolist():
            theirs = target.logits(batch.teacher[k][row, root])
            p = theirs[ids].softmax(-1)
            label = (ids == batch.token_KBT[k + 1][row, root]).nonzero()[:, 0]
            if len(label):
                p = (1 - hard) * p + hard * F.one_hot(label[0], len(ids)).double()
            log_q = head.step_logits(k, output[row, root]).log_softmax(-1)
            dense = dense - 0.8**k * (p * log_q).sum()
            matches[k] += int(ids[log_q.argmax()] == theirs.argmax())
    dense.backward()
    torch.testing.assert_close(out.loss_sum, dense)
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(mine[name], parameter.grad, rtol=1e-9, atol=1e-11, msg=name)
    assert [int(out.counts[f"match/{k}"]) for k in range(3)] == matches
    assert int(out.counts["positions/2"]) == int(batch.weight_KBT[2].sum()) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_head_is_trained_and_the_target_stays_bit_identical(kind: str) -> None:
    target = tiny_target("llama_tied")
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    head = tiny_head(target, kind=kind)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        head(make(target, [12, 9], 4), SPEC).loss_sum.backward()
        optimizer.step()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in head.parameters())
    assert all(p.grad is None and not p.requires_grad for p in target.model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.model.state_dict().items())
    assert not any("embed" in name or "lm_head" in name for name in head.state_dict())


def test_a_config_without_heads_is_refused() -> None:
    target = tiny_target("llama")
    config = HeadConfig.derive("medusa", target.config, target.vocab_size, target.name)
    with pytest.raises(ValueError, match="num_draft_heads is None"):
        build_head(config)


def test_evaluation_makes_no_gradients() -> None:
    target = tiny_target("llama")
    head = tiny_head(target, kind="medusa", projection="own")
    with torch.no_grad():
        out = head(make(target, [12], 4), SPEC, measure=True)
    assert not out.loss_sum.requires_grad and all(p.grad is None for p in head.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_head_k_learns_the_token_k_plus_2_further_on(kind: str) -> None:
    """Features that name their token, token ids that count: head k must learn to add k + 2, and nothing else fits.

    With the feature of token p at index p, an error of one in any shift makes the learnt offset wrong.
    """
    target = tiny_target("llama")
    vocab, heads = 60, 3
    code = F.normalize(torch.randn(vocab, target.hidden_size, generator=torch.Generator().manual_seed(0)), dim=-1)
    target.lm_head.weight.data[:] = 0
    target.lm_head.weight.data[:vocab] = 30 * code  # token v has its largest logit at code v
    rows, features = [], []
    for start in range(0, 40, 3):
        ids = torch.arange(start, start + 20)
        rows.append(TokenRow(str(start), tuple(ids.tolist()), ((1, 20),), "t"))
        features.append(code[ids + 1])  # the target's greedy text counts up by one: f_p predicts t_{p+1}
    batch = make_batch(rows, features, heads, Needs())
    head = new_head(target, kind, heads=heads, blocks=1)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-2)
    for _ in range(150):
        optimizer.zero_grad()
        out = head(batch, LossSpec(0.0, 1.0, 1.0))
        (out.loss_sum / out.weight_sum).backward()
        optimizer.step()
    for k in range(heads):
        tokens = [torch.tensor(10 + 1 + j) for j in range(k + 1)]
        drafted = head.best_draft(head.run(k, code[11], tokens)[None], k)
        assert int(drafted) == 10 + k + 2


@pytest.mark.parametrize(
    ("name", "kind", "projection"),
    [
        ("llama", "medusa", "shared"),
        ("llama", "medusa", "own"),
        ("llama", "hydra", "shared"),
        ("gpt2", "hydra", "shared"),
    ],
)
def test_overfitted_conversation_is_accepted_nearly_whole(name: str, kind: str, projection: str) -> None:
    """Trained on one conversation, decoding must accept nearly everything: the shifts of batching and engine agree."""
    target = tiny_target(name)
    head = new_head(target, kind, heads=4, blocks=4, projection=projection)
    check_overfitting(name, target, head, LossSpec(0.0, 1.0, 1.0), draft_steps=4, lr=1e-2, steps=300)
