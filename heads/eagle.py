"""EAGLE (arXiv 2401.15077): one decoder layer that predicts the target's next feature.

At index p the head reads the feature of token p (after the target's final norm) and the embedding of token p + 1,
and predicts the feature of token p + 1, whose logits (the target's own LM head) propose token p + 2:

    x = fc([c * embedding, feature]);  g = layer(x);  q(.) = softmax(LMHead(g))

Drafting goes on with g in place of the next feature. Parameters and their names are the published format's: `fc`
without bias, input order [embedding, feature], `layers.0` without input norm, no final norm. The constant c
(`embedding_scale`) is ours; multiplied into the left half of `fc` it gives the published form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.base import (
    ChildSampler,
    DraftHead,
    HeadBatch,
    HeadOutput,
    LossSpec,
    Needs,
    StepCounts,
    TreePolicy,
    head_dtype,
)
from heads.cache import visible_slots, write_slots
from heads.config import HeadConfig
from heads.growing import grow
from heads.layers import DecoderLayer, attend, attend_unrolled, rotary
from heads.losses import best_token, feature_loss_sum, soft_ce_sum
from heads.tree import DraftTree, additive_mask


@dataclass
class EagleState:
    """Keys and values of a batch: [B, kv_heads, slots, hd], `lengths` of them committed (true features) per row."""

    keys: Tensor
    values: Tensor
    lengths: list[int]
    last_B1H: Tensor | None = None  # head output at the last committed position


class EagleHead(DraftHead):
    needs = Needs(features=True)

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config, input_norm=False)])
        self.rope = rotary(config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        with torch.no_grad():
            # Let the feature through from the start, but faintly: at full strength the head begins by repeating the
            # current token's distribution with great confidence, and without it, it first learns a bigram model.
            self.fc.weight[:, config.hidden_size :] += 0.3 * torch.eye(config.hidden_size)

    @property
    def layer(self) -> DecoderLayer:
        return self.layers[0]  # type: ignore[return-value]

    def unroll(self, batch: HeadBatch) -> Iterator[Tensor]:
        """The head's output of every step, [B, T, H] each; a step reads the output of the one before it.

        Step 0 sees true features up to its root; step s sees those and the root's own steps 1..s, which is what
        decoding sees (`attend_unrolled`).
        """
        feature = batch.feature_BTH if batch.noise_BTH is None else batch.feature_BTH + batch.noise_BTH
        length = feature.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool, device=feature.device).tril()
        visible = (visible & batch.valid_BT[:, None]) | torch.eye(length, dtype=torch.bool, device=feature.device)
        mask = additive_mask(visible, feature.dtype)
        positions = torch.arange(length, device=feature.device)[None]
        true_kv: tuple[Tensor, Tensor] | None = None
        chain: list[tuple[Tensor, Tensor]] = []
        for k in range(batch.steps):
            x = self.fuse(batch.token_KBT[k], feature)
            q, key, value = self.layer.qkv(x, self.rope(x, positions + k))
            if true_kv is None:
                true_kv = (key, value)
                attended = attend(q, key, value, mask)
            else:
                chain.append((key, value))
                attended = attend_unrolled(q, *true_kv, chain, mask)
            feature = self.layer.finish(x, attended)
            yield feature
            feature = feature.detach()  # as in HASS (arXiv 2408.15766): no gradient through the chain of drafts

    def forward(self, batch: HeadBatch, loss: LossSpec, measure: bool = False) -> HeadOutput:
        total = torch.zeros((), device=batch.feature_BTH.device)
        counts = StepCounts(batch.weight_KBT)
        for k, feature in enumerate(self.unroll(batch)):
            weight = batch.weight_KBT[k]
            mine, theirs = feature[weight], batch.teacher[k][weight]
            feature_sum = feature_loss_sum(mine, theirs)
            token_sum = soft_ce_sum(mine, theirs, self.draft_logits) if loss.token_weight else total.new_zeros(())
            total = total + loss.step_decay**k * (loss.feature_weight * feature_sum + loss.token_weight * token_sum)
            if measure:
                match = self.best_draft(mine) == best_token(theirs, self.target.logits)
                counts.add(k, match, feature_sum.detach(), token_sum.detach())
        return HeadOutput(total, batch.weight_KBT[0].sum(), counts.named)

    def fuse(self, token: Tensor, feature: Tensor) -> Tensor:
        """fc([embedding of the next token, feature]): [.., H]."""
        embedding = self.target.embed(token).to(feature.dtype) * self.config.embedding_scale
        return self.fc(torch.cat([embedding, feature], -1))

    # ---- decoding ------------------------------------------------------------------------------------------

    def start(self, capacity: int, rows: int = 1) -> EagleState:
        attn = self.layer.self_attn
        shape = (rows, attn.kv_heads, capacity, attn.head_dim)
        weight = self.fc.weight
        # zeros: slots that a row does not see are still multiplied (by 0)
        return EagleState(
            torch.zeros(shape, dtype=weight.dtype, device=weight.device),
            torch.zeros(shape, dtype=weight.dtype, device=weight.device),
            [0] * rows,
        )

    @torch.inference_mode()
    def commit(
        self, state: EagleState, feature_BAF: Tensor, next_token_BA: Tensor, counts: Sequence[int] | None = None
    ) -> None:
        rows, count = next_token_BA.shape
        counts = [count] * rows if counts is None else counts
        device = next_token_BA.device
        x = self.fuse(next_token_BA, feature_BAF.to(head_dtype(self)))
        length_B = torch.tensor(state.lengths, device=device)
        position_BA = length_B[:, None] + torch.arange(count, device=device)
        cos, sin = self.rope(x, position_BA)
        self._store(state, *self.layer.keys_values(x, (cos, sin)), offset=0)
        # Only the last decided token's output is needed. Picked by index: a slice would keep a longer row's stride,
        # with which a CPU's bf16 LM head is 25x slower.
        row_B, last_B = torch.arange(rows, device=device), torch.tensor(counts, device=device) - 1
        x, rope = x[row_B, last_B][:, None], (cos[row_B, last_B][:, None], sin[row_B, last_B][:, None])
        state.lengths = [length + n for length, n in zip(state.lengths, counts, strict=True)]
        end = max(state.lengths)
        mask = None
        if min(state.lengths) != end:  # else the last token sees all there is
            visible_BS = torch.arange(end, device=device) < (length_B + last_B + 1)[:, None]
            mask = additive_mask(visible_BS[:, None], x.dtype)
        state.last_B1H = self._attend(state, x, self.layer.query(x, rope), end, mask)

    @torch.inference_mode()
    def draft(
        self, state: EagleState, root_B: Tensor, policy: TreePolicy, sampler: ChildSampler | None = None
    ) -> DraftTree:
        assert state.last_B1H is not None, "commit comes before draft"
        length_B = torch.tensor(state.lengths, device=root_B.device)
        ragged = min(state.lengths) != max(state.lengths)

        def expand(feature_BWH: Tensor, path_BWD: Tensor, seen_BWS: Tensor) -> Tensor:
            # seen_BWS: which drafted slots each node sees; the committed ones are visible to all
            drafted, token_BW = seen_BWS.shape[2], path_BWD[:, :, -1]
            x = self.fuse(token_BW, feature_BWH.to(head_dtype(self)))
            position_BW = (length_B[:, None] + path_BWD.shape[2] - 1).expand_as(token_BW)
            q, keys, values = self.layer.qkv(x, self.rope(x, position_BW))
            self._store(state, keys, values, offset=drafted - token_BW.shape[1])
            end = max(state.lengths) + drafted
            if ragged:
                visible = visible_slots(seen_BWS, length_B, end)
            else:
                visible = torch.cat([seen_BWS.new_ones(*seen_BWS.shape[:2], end - drafted), seen_BWS], -1)
            return self._attend(state, x, q, end, additive_mask(visible, x.dtype))

        return grow(root_B, state.last_B1H, policy, expand, self.draft_logits, self.draft_ids, sampler)

    def keep_rows(self, state: EagleState, rows: Tensor) -> None:
        state.lengths = [state.lengths[row] for row in rows.tolist()]
        state.keys, state.values = state.keys[rows], state.values[rows]
        state.last_B1H = None if state.last_B1H is None else state.last_B1H[rows]

    def _store(self, state: EagleState, keys: Tensor, values: Tensor, offset: int) -> None:
        write_slots(state.keys, keys, state.lengths, offset)
        write_slots(state.values, values, state.lengths, offset)

    def _attend(self, state: EagleState, x: Tensor, q: Tensor, end: int, mask: Tensor | None) -> Tensor:
        attended = attend(q, state.keys[:, :, :end], state.values[:, :, :end], mask)
        return self.layer.finish(x, attended)
