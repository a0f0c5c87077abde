"""EAGLE (arXiv 2401.15077): one decoder layer that predicts the target's next feature.

At index p the head reads the feature of token p (after the target's final norm) and the embedding of token p + 1,
and predicts the feature of token p + 1, whose logits (the target's own LM head) propose token p + 2:

    x = fc([c * embedding, feature]);  g = layer(x);  q(.) = softmax(LMHead(g))

Drafting goes on with g in place of the next feature. Parameters and their names are the published format's: `fc`
without bias, input order [embedding, feature], `layers.0` without input norm, no final norm. The constant c
(`embedding_scale`) is ours; multiplied into the left half of `fc` it gives the published form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heads.base import DraftHead, HeadBatch, HeadOutput, LossSpec, Needs, TreePolicy, head_dtype
from heads.config import HeadConfig
from heads.growing import grow_tree
from heads.layers import DecoderLayer, attend, attend_unrolled, rotary
from heads.losses import best_token, feature_loss_sum, soft_ce_sum
from heads.tree import DraftTree, additive_mask


@dataclass
class EagleState:
    """Keys and values of one generation: [1, kv_heads, slots, hd], `length` of them committed (true features)."""

    keys: Tensor
    values: Tensor
    length: int = 0
    last_11H: Tensor | None = None  # head output at the last committed position


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
        counts: dict[str, Tensor] = {}
        prefix = batch.weight_KBT[0]  # roots whose steps so far all agree with the target
        for k, feature in enumerate(self.unroll(batch)):
            weight = batch.weight_KBT[k]
            mine, theirs = feature[weight], batch.teacher[k][weight]
            feature_sum = feature_loss_sum(mine, theirs)
            token_sum = soft_ce_sum(mine, theirs, self.draft_logits) if loss.token_weight else total.new_zeros(())
            total = total + loss.step_decay**k * (loss.feature_weight * feature_sum + loss.token_weight * token_sum)
            if measure:
                match = self.best_draft(mine) == best_token(theirs, self.target.logits)
                hit = torch.zeros_like(weight)
                hit[weight] = match
                tried = (prefix & weight).sum()
                prefix = prefix & hit
                counts |= {
                    f"tried/{k}": tried,
                    f"feature_loss/{k}": feature_sum.detach(),
                    f"token_loss/{k}": token_sum.detach(),
                    f"positions/{k}": weight.sum(),
                    f"match/{k}": match.sum(),
                    f"prefix/{k}": prefix.sum(),
                }
        return HeadOutput(total, batch.weight_KBT[0].sum(), counts)

    def fuse(self, token: Tensor, feature: Tensor) -> Tensor:
        """fc([embedding of the next token, feature]): [.., H]."""
        embedding = self.target.embedding(token).to(feature.dtype) * self.config.embedding_scale
        return self.fc(torch.cat([embedding, feature], -1))

    # ---- decoding ------------------------------------------------------------------------------------------

    def start(self, capacity: int) -> EagleState:
        attn = self.layer.self_attn
        shape = (1, attn.kv_heads, capacity, attn.head_dim)
        weight = self.fc.weight
        return EagleState(
            torch.empty(shape, dtype=weight.dtype, device=weight.device),
            torch.empty(shape, dtype=weight.dtype, device=weight.device),
        )

    @torch.inference_mode()
    def commit(self, state: EagleState, feature_1AH: Tensor, next_token_1A: Tensor) -> None:
        count = next_token_1A.shape[1]
        device = next_token_1A.device
        slots = torch.arange(state.length + count, device=device)
        visible = slots <= slots[state.length :, None]
        out = self._decode(state, feature_1AH, next_token_1A, slots[None, state.length :], visible[None], state.length)
        state.length += count
        # Not out[:, -1:]: that keeps a longer row's stride, with which a CPU's bf16 LM head is 25x slower.
        state.last_11H = out[0, -1][None, None]

    @torch.inference_mode()
    def draft(self, state: EagleState, root_token: int, policy: TreePolicy) -> DraftTree:
        assert state.last_11H is not None, "commit comes before draft"

        def expand(feature_1WH: Tensor, token_1W: Tensor, level: int, visible_WS: Tensor) -> Tensor:
            # visible_WS: which drafted slots each node sees; the committed ones are visible to all
            width, drafted = visible_WS.shape
            committed = visible_WS.new_ones(width, state.length)
            visible = torch.cat([committed, visible_WS], -1)[None]
            position = torch.full_like(token_1W, state.length + level - 1)
            start = state.length + drafted - width
            return self._decode(state, feature_1WH, token_1W, position, visible, start)

        return grow_tree(root_token, state.last_11H, policy, expand, self.draft_logits, self.draft_ids)

    def _decode(
        self, state: EagleState, feature: Tensor, token: Tensor, position: Tensor, visible_1NS: Tensor, start: int
    ) -> Tensor:
        """One pass; keys go to slots `start`.. of the state. Returns the head's outputs [1, N, H]."""
        dtype = head_dtype(self)
        x = self.fuse(token, feature.to(dtype))
        q, key, value = self.layer.qkv(x, self.rope(x, position))
        end = start + token.shape[1]
        assert end <= state.keys.shape[2], f"draft cache of {state.keys.shape[2]} slots asked for {end}"
        state.keys[:, :, start:end], state.values[:, :, start:end] = key, value
        mask = additive_mask(visible_1NS, dtype)
        return self.layer.finish(x, attend(q, state.keys[:, :, :end], state.values[:, :, :end], mask))
