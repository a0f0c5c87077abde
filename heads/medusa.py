"""Medusa (arXiv 2401.10774) and Hydra (arXiv 2402.05109): K small heads on the target's last feature.

Head k reads the feature f_p of token p (after the target's final norm) and drafts token p + 2 + k, where token p + 1 is
the target's own. With M residual blocks:

    x_0 = f_p;   x_m = x_{m-1} + SiLU(W_m x_{m-1} + b_m);   q(token p + 2 + k) = softmax(LMHead(x_M))

All weights and biases start at zero, so that a new head is the identity and its logits are the target's. The LM head is
the target's own (shared, frozen), or one of each head's own, started from the target's rows. Parameters are named and
used as in vLLM's layout (`blocks.{k}.layers.{m}`, `lm_heads.{k}`).

Medusa's heads do not know what the others drafted: their distributions are marginals. In Hydra the first block of head
k also reads the embeddings of the tokens on the way to its own, the target's included:

    x_1 = f_p + SiLU(W_1 [f_p, c e(t_{p+1}), .., c e(t_{p+1+k})] + b_1)

The constant c (`embedding_scale`) is ours; it can be multiplied into W_1. Hydra's published form has a linear map in
place of the residual f_p, which here is the identity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heads.aligned import Aligned
from heads.base import ChildSampler, DraftHead, HeadBatch, HeadOutput, LossSpec, Needs, TreePolicy
from heads.config import HeadConfig
from heads.growing import grow
from heads.losses import Projection
from heads.static import StaticPlan
from heads.training import distilled
from heads.tree import DraftTree, Proposal


@dataclass
class MedusaState:
    """What decoding keeps of the decided tokens: the feature of the last one before the root, [B, 1, H]."""

    feature_B1H: Tensor | None = None


class Blocks(nn.Module):
    """The residual blocks of one draft head; the first one reads `inputs` vectors side by side, the feature first."""

    def __init__(self, hidden_size: int, count: int, inputs: int) -> None:
        super().__init__()
        widths = [inputs * hidden_size] + [hidden_size] * (count - 1)
        self.layers = nn.ModuleList([nn.Linear(width, hidden_size) for width in widths])
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, feature: Tensor, others: Sequence[Tensor] = ()) -> Tensor:
        x, given = feature, torch.cat([feature, *others], -1) if others else feature
        for layer in self.layers:
            x = x + F.silu(layer(given))
            given = x
        return x


class MedusaHead(DraftHead):
    needs = Needs(features=True)
    proposals: tuple[Proposal, ...] = ("top_k",)  # marginals: drawn path by path they would not fit together
    reads_path = False

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        heads, blocks = config.num_draft_heads or 0, config.num_blocks or 0
        for name in ("num_draft_heads", "num_blocks"):
            if not getattr(config, name):
                raise ValueError(
                    f"head config: {name} is {getattr(config, name)!r}, expected 1 or more ({config.kind})"
                )
        self.blocks = nn.ModuleList(
            [Blocks(config.hidden_size, blocks, k + 2 if self.reads_path else 1) for k in range(heads)]
        )
        self.lm_heads = nn.ModuleList()
        if config.own_projection:
            vocab = config.draft_vocab_size or config.vocab_size
            for _ in range(heads):
                self.lm_heads.append(nn.Linear(config.hidden_size, vocab, bias=False))

    @property
    def max_depth(self) -> int:
        return len(self.blocks)

    def init_from_target(self) -> str:
        if self.config.own_projection:
            self._start_projections(self.lm_heads.parameters())
        return ""

    def projection(self, step: int) -> Projection:
        if not self.config.own_projection:
            return super().projection(step)
        weight: Any = self.lm_heads[step].weight
        return Projection(lambda x, w: self.target.scale_logits(F.linear(x, w)), (weight,))

    def projections(self, steps: int) -> list[Projection]:
        if not self.config.own_projection:
            return super().projections(steps)
        return [self.projection(step) for step in range(steps)]

    # ---- training ------------------------------------------------------------------------------------------

    def unroll(self, batch: HeadBatch) -> Iterator[Tensor]:
        """Output of every head at every root, [B, T, H] each."""
        for k in range(batch.steps):
            yield self.run(k, batch.feature_BTH, [batch.token_KBT[j] for j in range(k + 1)])

    def run(self, k: int, feature: Tensor, tokens: Sequence[Tensor]) -> Tensor:
        """Head k on features [.., H]; `tokens` [..]: t_{p+1} .. t_{p+1+k}, which only Hydra reads."""
        return self.blocks[k](feature)

    def embed(self, token: Tensor, dtype: torch.dtype) -> Tensor:
        return self.target.embed(token).to(dtype) * self.config.embedding_scale

    def forward(self, batch: HeadBatch, loss: LossSpec, measure: bool = False) -> HeadOutput:
        rows = Aligned(batch)
        outputs = []
        for k in range(batch.steps):
            tokens = [rows.at(k, batch.token_KBT[j]) for j in range(k + 1)]
            outputs.append(self.run(k, rows.at(k, batch.feature_BTH), tokens))
        return distilled(self, batch, rows, outputs, loss, measure)

    # ---- decoding ------------------------------------------------------------------------------------------

    def start(self, capacity: int, rows: int = 1) -> MedusaState:
        return MedusaState()

    @torch.inference_mode()
    def commit(
        self, state: MedusaState, feature_BAF: Tensor, next_token_BA: Tensor, counts: Sequence[int] | None = None
    ) -> None:
        rows, count = next_token_BA.shape
        last_B = torch.tensor([count] * rows if counts is None else list(counts), device=feature_BAF.device) - 1
        state.feature_B1H = feature_BAF[torch.arange(rows, device=last_B.device), last_B][:, None]

    @torch.inference_mode()
    def draft(self, state: Any, root_B: Tensor, policy: TreePolicy, sampler: ChildSampler | None = None) -> DraftTree:
        assert state.feature_B1H is not None, "commit comes before draft"
        assert sampler is None or "sampled" in self.proposals, f"{self.config.kind} heads are not sampled"
        given = (state.feature_B1H, root_B, policy, policy.plan(root_B.device))
        if self._compiled is not None and sampler is None:
            return self._compiled(*given)
        return self._draft(*given, sampler)

    def _draft(
        self,
        feature_B1H: Tensor,
        root_B: Tensor,
        policy: TreePolicy,
        plan: StaticPlan | None,
        sampler: ChildSampler | None = None,
    ) -> DraftTree:
        outputs = [self.run(k, feature_B1H, ()) for k in range(min(policy.depth, self.max_depth))]
        if self.config.own_projection:
            logits_BKV = torch.cat([self.step_logits(k, output) for k, output in enumerate(outputs)], 1)
        else:  # the LM head is read once for all heads
            logits_BKV = self.draft_logits(torch.cat(outputs, 1))

        def expand(_: Tensor, path_BWD: Tensor, seen_BWS: Tensor) -> Tensor:
            level = path_BWD.shape[2]
            return logits_BKV[:, level : level + 1]  # whatever the path is

        return grow(root_B, logits_BKV[:, :1], policy, expand, lambda logits: logits, self.draft_ids, sampler, plan)

    def keep_rows(self, state: MedusaState, rows: Tensor) -> None:
        state.feature_B1H = None if state.feature_B1H is None else state.feature_B1H[rows]


class HydraHead(MedusaHead):
    """Sequentially dependent heads: children are drafted given the path to them."""

    proposals = ("top_k", "sampled")
    reads_path = True

    def run(self, k: int, feature: Tensor, tokens: Sequence[Tensor]) -> Tensor:
        assert len(tokens) == k + 1, f"head {k} reads {k + 1} tokens, not {len(tokens)}"
        return self.blocks[k](feature, [self.embed(token, feature.dtype) for token in tokens])

    def _draft(
        self,
        feature_B1H: Tensor,
        root_B: Tensor,
        policy: TreePolicy,
        plan: StaticPlan | None,
        sampler: ChildSampler | None = None,
    ) -> DraftTree:
        def expand(_: Tensor, path_BWD: Tensor, seen_BWS: Tensor) -> Tensor:
            rows, nodes, level = path_BWD.shape
            path = [root_B[:, None].expand(rows, nodes), *path_BWD.unbind(2)]
            return self.step_logits(level, self.run(level, feature_B1H.expand(rows, nodes, -1), path))

        first_B1V = self.step_logits(0, self.run(0, feature_B1H, [root_B[:, None]]))
        return grow(root_B, first_B1V, policy, expand, lambda logits: logits, self.draft_ids, sampler, plan)
