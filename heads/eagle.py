"""EAGLE (arXiv 2401.15077): one decoder layer that predicts the target's next feature.

At index p the head reads the feature of token p (after the target's final norm) and the embedding of token p + 1,
and predicts the feature of token p + 1, whose logits (the target's own LM head) propose token p + 2:

    x = fc([c * embedding, feature]);  g = layer(x);  q(.) = softmax(LMHead(g))

Drafting goes on with g in place of the next feature. Parameters and their names are the published format's: `fc`
without bias, input order [embedding, feature], `layers.0` without input norm, no final norm. The constant c
(`embedding_scale`) is ours; multiplied into the left half of `fc` it gives the published form.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heads.base import Needs
from heads.config import HeadConfig
from heads.drafter import HiddenStateDrafter
from heads.layers import DecoderLayer, rotary


class EagleHead(HiddenStateDrafter):
    needs = Needs(features=True)
    detaches = True  # as in HASS (arXiv 2408.15766)

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
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

    def read(self, feature: Tensor) -> Tensor:
        return feature

    def join(self, token: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        embedding = self.target.embed(token).to(hidden.dtype) * self.config.embedding_scale
        x = self.fc(torch.cat([embedding, hidden], -1))
        return x, x
