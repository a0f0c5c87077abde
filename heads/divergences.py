"""How far a draft's distribution is from the target's: pure functions of both, with their slopes.

Each takes p, the target's probabilities [.., r, V] (they sum to 1 over the draft vocabulary), and log q, the draft's
log-probabilities [.., r, V], and returns (loss [.., r], slope [.., r, V]), where slope is d loss / d z of the logits z
with log q = log_softmax(z). Since dq_v/dz_u = q_v (1[u = v] - q_u), a loss with derivative g_v = dl/dq_v has the slope

    dl/dz_v = q_v (g_v - sum_u q_u g_u)

Losses are in nats, except `total_variation` and `acceptance`, which are probabilities.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
_TOP_K = 10


def soft_ce(p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """-sum p log q: EAGLE (arXiv 2401.15077, section 3.2), EAGLE-3."""
    return -(p * log_q).sum(-1), log_q.exp() - p


def forward_kl(p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum p (log p - log q): `soft_ce` less the target's entropy, with the same slope, 0 at p = q."""
    loss, slope = soft_ce(p, log_q)
    return loss + torch.xlogy(p, p).sum(-1), slope


def reverse_kl(p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p) = sum q (log q - log p): seeks modes (as in MiniLLM, arXiv 2306.08543)."""
    q = log_q.exp()
    # p = 0 is possible after rounding; the smallest number keeps the logarithm finite
    ratio = log_q - p.clamp_min(torch.finfo(p.dtype).tiny).log()
    loss = (q * ratio).sum(-1)
    return loss, q * (ratio - loss[..., None])


def top_k_ce(p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """-sum of p log q over the 10 likeliest tokens of p: HASS (arXiv 2408.15766, section 3.1)."""
    index = p.topk(min(_TOP_K, p.shape[-1]), -1).indices
    kept = torch.zeros_like(p).scatter(-1, index, p.gather(-1, index))
    return -(kept * log_q).sum(-1), kept.sum(-1, keepdim=True) * log_q.exp() - kept


def acceptance(p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """1 - sum min(p, q): the chance that speculative sampling rejects a drawn draft (arXiv 2211.17192, theorem 3.5)."""
    q = log_q.exp()
    below = q * (q < p)  # where more of q is accepted
    share = below.sum(-1, keepdim=True)
    return 1 - torch.minimum(p, q).sum(-1), q * share - below


def total_variation(p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """1/2 sum |p - q|. As both sum to 1, it is `acceptance`."""
    return acceptance(p, log_q)


def log_acceptance(p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """-log sum min(p, q): its slope does not vanish where hardly anything is accepted, as that of `acceptance` does."""
    rejected, slope = acceptance(p, log_q)
    accepted = (1 - rejected).clamp_min(torch.finfo(p.dtype).tiny)
    return -accepted.log(), slope / accepted[..., None]


DIVERGENCES: dict[str, Divergence] = {
    "soft_ce": soft_ce,
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
    "top_k_ce": top_k_ce,
    "acceptance": acceptance,
    "log_acceptance": log_acceptance,
}
