"""What the EAGLE heads share: one decoder layer that drafts hidden states, unrolled in training, cached in decoding.

At index p the layer reads a hidden state made of token p's target features and the embedding of token p + 1, and its
output proposes token p + 2. Drafting goes on with that output in place of the next hidden state. The kinds differ in
what they read (`read`), how state and embedding meet (`join`), what is handed on (`hand_on`) and how an output becomes
logits (`step_logits`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from heads.aligned import ROWS, Aligned
from heads.attention import grouped_attention
from heads.base import ChildSampler, DraftHead, HeadBatch, HeadOutput, LossSpec, TreePolicy, head_dtype
from heads.cache import visible_slots, write_at
from heads.growing import grow
from heads.layers import DecoderLayer, Rotary
from heads.static import StaticPlan
from heads.training import distilled
from heads.tree import DraftTree, additive_mask
from heads.unrolled import attend_unrolled

KeysValues = tuple[Tensor, Tensor]


@dataclass
class DrafterState:
    """Keys and values of a batch: [B, kv_heads, slots, hd], `lengths` of them committed (true features) per row."""

    keys: Tensor
    values: Tensor
    lengths: list[int]
    last_B1H: Tensor | None = None  # the layer's output at the last committed position

    def check_room(self, count: int) -> None:
        """Raises AssertionError if so many slots more do not fit: index writes would fail or, on a GPU, do worse."""
        room, wanted = self.keys.shape[2], max(self.lengths) + count
        assert wanted <= room, f"state of {room} slots asked for {wanted}; start it with more"


class _Roots:
    """The supervised positions of a batch [B, T] as R rows, padded: a CPU's kernels are built anew for every shape."""

    def __init__(self, weight_BT: Tensor) -> None:
        self._shape = weight_BT.shape
        index_R = weight_BT.flatten().nonzero()[:, 0]
        padding = -len(index_R) % ROWS
        self._write_R = F.pad(index_R, (0, padding), value=weight_BT.numel())  # padding goes to a place of its own
        self._read_R = F.pad(index_R, (0, padding))

    def pick(self, x_BT: Tensor) -> Tensor:
        """[B, T, ..] to [1, R, ..]."""
        return x_BT.flatten(0, 1).index_select(0, self._read_R)[None]

    def spread(self, x_1R: Tensor) -> Tensor:
        """[1, R, ..] to [B, T, ..], 0 elsewhere."""
        room = x_1R.new_zeros(self._shape.numel() + 1, *x_1R.shape[2:])
        return room.index_copy(0, self._write_R, x_1R[0])[:-1].unflatten(0, self._shape)


class HiddenStateDrafter(DraftHead):
    """checkpointing: recompute a step's activations in the backward pass instead of keeping them."""

    rope: Rotary
    detaches = False  # whether no gradient goes through the chain of drafts
    checkpointing = False

    @property
    @abstractmethod
    def layer(self) -> DecoderLayer: ...

    @abstractmethod
    def read(self, feature: Tensor) -> Tensor:
        """What the target gave (`needs`), [.., F], as hidden states [.., H]."""

    @abstractmethod
    def join(self, token: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(the attention's input [.., I], the residual [.., H]) of the next tokens [..] and hidden states [.., H]."""

    def hand_on(self, output: Tensor) -> Tensor:
        """The hidden state that the next draft starts from, [.., H], of the layer's output."""
        return output

    # ---- training ------------------------------------------------------------------------------------------

    def unroll(self, batch: HeadBatch) -> Iterator[Tensor]:
        """The layer's output of every step, [B, T, H] each, 0 where the batch supervises nothing.

        Step 0 sees true features up to its root; step s sees those and the root's own steps 1..s, which is what
        decoding sees (`attend_unrolled`). Its token is the text's own, never the draft's. Of unsupervised positions
        (prompts, padding) only the keys and values of step 0 are made.
        """
        feature = batch.feature_BTH if batch.noise_BTH is None else batch.feature_BTH + batch.noise_BTH
        hidden, roots = self.read(feature), _Roots(batch.weight_KBT[0])
        cos, sin = self.rope(hidden, batch.position_BT)
        seen: list[KeysValues] = []  # of step 0, then of the chain
        for k in range(batch.steps):
            output_1RH, keys, values = self._run_step(batch, k, roots, hidden, (cos, sin), seen)
            yield roots.spread(output_1RH)
            if k + 1 < batch.steps:
                seen.append((keys, values))
                hidden = self.hand_on(output_1RH)
                hidden = hidden.detach() if self.detaches else hidden
                cos, sin = self.rope(hidden, roots.pick(batch.position_BT) + k + 1)

    def _run_step(
        self,
        batch: HeadBatch,
        step: int,
        roots: _Roots,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        seen: Sequence[KeysValues],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output at the roots [1, R, H], keys and values [B, kv_heads, T, hd].

        hidden, rope: of all positions at step 0, later of the roots.
        """

        def run(hidden: Tensor, *earlier: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            token = batch.token_KBT[step]
            x, residual = self.join(roots.pick(token) if step else token, hidden)
            q, keys, values = self.layer.qkv(x, rope)
            if step:
                q, keys, values = (roots.spread(part.transpose(1, 2)).transpose(1, 2) for part in (q, keys, values))
            pairs = [*zip(earlier[::2], earlier[1::2], strict=True), (keys, values)]
            attended = attend_unrolled(q, *pairs[0], pairs[1:], batch.documents)
            attended_R = roots.pick(attended.transpose(1, 2)).transpose(1, 2)
            return self.layer.finish(residual if step else roots.pick(residual), attended_R), keys, values

        earlier = [x for pair in seen for x in pair]
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(run, hidden, *earlier, use_reentrant=False)
        return run(hidden, *earlier)

    def forward(self, batch: HeadBatch, loss: LossSpec, measure: bool = False) -> HeadOutput:
        rows = Aligned(batch)
        outputs = [rows.at(k, output) for k, output in enumerate(self.unroll(batch))]
        return distilled(self, batch, rows, outputs, loss, measure)

    # ---- decoding ------------------------------------------------------------------------------------------

    def start(self, capacity: int, rows: int = 1) -> DrafterState:
        attn = self.layer.self_attn
        shape = (rows, attn.kv_heads, capacity, attn.head_dim)
        weight = attn.q_proj.weight
        # zeros: slots that a row does not see are still multiplied (by 0)
        return DrafterState(
            torch.zeros(shape, dtype=weight.dtype, device=weight.device),
            torch.zeros(shape, dtype=weight.dtype, device=weight.device),
            [0] * rows,
        )

    @torch.inference_mode()
    def commit(
        self, state: DrafterState, feature_BAF: Tensor, next_token_BA: Tensor, counts: Sequence[int] | None = None
    ) -> None:
        rows, count = next_token_BA.shape
        counts = [count] * rows if counts is None else counts
        device = next_token_BA.device
        state.check_room(count)
        x, residual = self.join(next_token_BA, self.read(feature_BAF.to(head_dtype(self))))
        length_B = torch.tensor(state.lengths, device=device)
        position_BA = length_B[:, None] + torch.arange(count, device=device)
        cos, sin = self.rope(x, position_BA)
        keys, values = self.layer.keys_values(x, (cos, sin))
        write_at(state.keys, keys, position_BA)
        write_at(state.values, values, position_BA)
        # Only the last decided token's output is needed. Picked by index: a slice would keep a longer row's stride,
        # with which a CPU's bf16 LM head is 25x slower.
        row_B, last_B = torch.arange(rows, device=device), torch.tensor(counts, device=device) - 1
        x, residual = x[row_B, last_B][:, None], residual[row_B, last_B][:, None]
        rope = (cos[row_B, last_B][:, None], sin[row_B, last_B][:, None])
        state.lengths = [length + n for length, n in zip(state.lengths, counts, strict=True)]
        end = max(state.lengths)
        mask = None
        if min(state.lengths) != end:  # else the last token sees all there is
            visible_BS = torch.arange(end, device=device) < (length_B + last_B + 1)[:, None]
            mask = additive_mask(visible_BS[:, None], x.dtype)
        attended = grouped_attention(self.layer.query(x, rope), state.keys[:, :, :end], state.values[:, :, :end], mask)
        state.last_B1H = self.layer.finish(residual, attended)

    @torch.inference_mode()
    def draft(
        self, state: DrafterState, root_B: Tensor, policy: TreePolicy, sampler: ChildSampler | None = None
    ) -> DraftTree:
        assert state.last_B1H is not None, "commit comes before draft"
        state.check_room(policy.drafted_slots)
        length_B, plan = torch.tensor(state.lengths, device=root_B.device), policy.plan(root_B.device)
        given = (state.keys, state.values, state.last_B1H, length_B, root_B, policy, plan)
        if self._compiled is not None and sampler is None:
            return self._compiled(*given)
        longest = max(state.lengths)
        return self._draft(*given, sampler, longest=longest, even=min(state.lengths) == longest)

    def _draft(
        self,
        keys: Tensor,
        values: Tensor,
        last_B1H: Tensor,
        length_B: Tensor,
        root_B: Tensor,
        policy: TreePolicy,
        plan: StaticPlan | None,
        sampler: ChildSampler | None = None,
        *,
        longest: int | None = None,
        even: bool = False,
    ) -> DraftTree:
        """Free of numbers that change from round to round, if the last two are left out: it can be compiled.

        longest: of `length_B`; None: attention looks at all slots. even: all rows are as long as that.
        """

        def expand(output_BWH: Tensor, path_BWD: Tensor, seen_BWS: Tensor) -> Tensor:
            # seen_BWS: which drafted slots each node sees; the committed ones are visible to all
            (_, width, drafted), token_BW = seen_BWS.shape, path_BWD[:, :, -1]
            x, residual = self.join(token_BW, self.hand_on(output_BWH.to(head_dtype(self))))
            position_BW = (length_B[:, None] + path_BWD.shape[2] - 1).expand_as(token_BW)
            q, new_keys, new_values = self.layer.qkv(x, self.rope(x, position_BW))
            slot_BW = length_B[:, None] + torch.arange(drafted - width, drafted, device=length_B.device)
            write_at(keys, new_keys, slot_BW)
            write_at(values, new_values, slot_BW)
            end = keys.shape[2] if longest is None else longest + drafted
            if even:
                visible = torch.cat([seen_BWS.new_ones(*seen_BWS.shape[:2], end - drafted), seen_BWS], -1)
            else:
                visible = visible_slots(seen_BWS, length_B, end)
            attended = grouped_attention(q, keys[:, :, :end], values[:, :, :end], additive_mask(visible, x.dtype))
            return self.layer.finish(residual, attended)

        def logits_of(output: Tensor) -> Tensor:
            return self.step_logits(0, output)

        return grow(root_B, last_B1H, policy, expand, logits_of, self.draft_ids, sampler, plan)

    def keep_rows(self, state: DrafterState, rows: Tensor) -> None:
        state.lengths = [state.lengths[row] for row in rows.tolist()]
        state.keys, state.values = state.keys[rows], state.values[rows]
        state.last_B1H = None if state.last_B1H is None else state.last_B1H[rows]
