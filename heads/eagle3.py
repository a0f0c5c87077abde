"""EAGLE-3 (arXiv 2503.01840): drafts from three layers of the target, trained on its own drafts, for tokens alone.

At index p the head reads the outputs a_1, a_2, a_3 of three target layers at token p (before the final norm) and the
embedding e of token p + 1, and proposes token p + 2:

    h = fc([a_1, a_2, a_3]);   x = [input_layernorm(e), hidden_norm(h)];   g = h + Attention(x);   g = g + MLP(norm(g))
    q(.) = softmax(lm_head(norm(g)))

Attention reads 2H columns, its residual is h. Drafting goes on with g, before the norm, in place of the next h. There
is no loss on features, so the layer may put into g what it needs later; training unrolls several drafts and the
gradient goes through all of them ("training-time test", section 3.2). The LM head is trained; it has the rows of the
draft vocabulary. Parameters, names and wiring are the published format's (`midlayer`, `d2t`, `t2d`).

Options, as in EAGLE-3.1 and in speculators: `fc_norm` norms each a_i before fc; `norm_output` hands on norm(g);
`norm_before_residual` takes hidden_norm(h) as the residual.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from heads.base import Needs
from heads.config import HeadConfig
from heads.drafter import HiddenStateDrafter
from heads.layers import DecoderLayer, rotary
from heads.losses import Projection
from heads.starting import start_from_last_layer
from heads.target import TargetAdapter


class Eagle3Head(HiddenStateDrafter):
    """d2t: offsets [Vd], draft id i is target id i + d2t[i]; t2d: which target ids are in the draft vocabulary, [V]."""

    d2t: Tensor
    t2d: Tensor
    midlayer: DecoderLayer

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        if not config.taps:
            raise ValueError(f"head config: taps is {config.taps!r}, expected layers of the target (eagle3)")
        width, eps = config.hidden_size, config.rms_norm_eps
        self.needs = Needs(features=False, taps=config.taps)
        self.fc = nn.Linear(len(config.taps) * width, width, bias=False)
        self.midlayer = DecoderLayer(config, input_norm=False, attention_input=2 * width)
        self.midlayer.input_layernorm = LlamaRMSNorm(width, eps)
        self.midlayer.hidden_norm = LlamaRMSNorm(width, eps)
        self.norm = LlamaRMSNorm(width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList([LlamaRMSNorm(width, eps) for _ in config.taps])
        if config.own_projection:
            self.lm_head = nn.Linear(width, config.draft_vocab_size or config.vocab_size, bias=False)
        self.rope = rotary(config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    @property
    def layer(self) -> DecoderLayer:
        return self.midlayer

    def bind(self, target: TargetAdapter) -> None:
        if target.config.hidden_size != self.config.hidden_size:
            raise ValueError(
                f"head.kind eagle3 reads layers that are {target.config.hidden_size} wide in {target.name!r}, whose LM "
                f"head reads {self.config.hidden_size}: choose another head.kind"
            )
        super().bind(target)

    # ---- the draft vocabulary, in the published form -----------------------------------------------------------

    def _make_draft_vocab(self, size: int) -> None:
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(self.config.vocab_size, dtype=torch.bool))

    def set_draft_vocab(self, ids: Tensor) -> None:
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()[ids] = True

    @property
    def draft_ids(self) -> Tensor | None:
        if self.config.draft_vocab_size is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    # ---- wiring ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def init_from_target(self) -> str:
        """The LM head starts as the target's rows, the layer as the target's last one, on the last of the taps.

        So the head begins by guessing what the target says at the token before, and has to learn from the embedding by
        how much the next token changes that.
        """
        if self.config.own_projection:
            self._start_projections([self.lm_head.weight])
        norm: Any = self.midlayer.hidden_norm
        if not start_from_last_layer(self.midlayer, norm, self.norm, self.target):
            return "the layer starts at random: the target's last one is of another make"
        width = self.config.hidden_size
        self.fc.weight[:, -width:] += torch.eye(width, device=self.fc.weight.device)
        return "the layer starts as the target's last one"

    def read(self, feature: Tensor) -> Tensor:
        if self.config.fc_norm:
            parts = feature.split(self.config.hidden_size, -1)
            feature = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(feature)

    def join(self, token: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        layer: Any = self.midlayer
        embedding = layer.input_layernorm(self.target.embed(token).to(hidden.dtype))
        normed = layer.hidden_norm(hidden)
        residual = normed if self.config.norm_before_residual else hidden
        return torch.cat([embedding, normed], -1), residual

    def hand_on(self, output: Tensor) -> Tensor:
        return self.norm(output) if self.config.norm_output else output

    def normed(self, output: Tensor) -> Tensor:
        return self.norm(output)

    def projection(self, step: int) -> Projection:
        if not self.config.own_projection:
            return super().projection(step)
        return Projection(lambda x, w: self.target.scale_logits(F.linear(x, w)), (self.lm_head.weight,))
