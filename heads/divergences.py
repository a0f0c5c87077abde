"""How far a draft's distribution q is from the target's p at one position: the losses a draft head can be trained with.

Every function takes p_rV, the target's probabilities over the draft vocabulary (rows sum to 1, zeros allowed), and
log_q_rV, the draft's log-probabilities log_softmax(z), of the same dtype (fp32 or fp64). It returns the loss per row,
and its analytic slope d loss_r / d z_rv with respect to the draft's logits z. With g = d loss / d q that is

    d loss / d z_v = q_v (g_v - sum_u q_u g_u)

whose rows sum to 0. log_q_rV may be overwritten and must not be used afterwards, and the slope is the caller's to
overwrite. p_rV is left alone. Losses are in nats, except the probabilities `total_variation` and `acceptance`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heads.topk import top_k_of

Divergence = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (p_rV, log_q_rV) -> (loss_r, slope_rV)

_TOP_K = 10


def soft_ce(p_rV: Tensor, log_q_rV: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy, -sum p log q (nats), as in EAGLE (arXiv 2401.15077). Slope: q - p."""
    loss_r = (p_rV * log_q_rV).sum(-1).neg_()
    return loss_r, log_q_rV.exp_().sub_(p_rV)


def forward_kl(p_rV: Tensor, log_q_rV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum p (log p - log q) (nats), as in DistillSpec (arXiv 2310.08461).

    The cross-entropy less the entropy of p, which no draft can change: the slope is the same, q - p.
    """
    loss_r = _log(p_rV).sub_(log_q_rV).mul_(p_rV).sum(-1)
    return loss_r, log_q_rV.exp_().sub_(p_rV)


def reverse_kl(p_rV: Tensor, log_q_rV: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p) = sum q (log q - log p) (nats), as in DistillSpec (arXiv 2310.08461).

    Slope: q (log q - log p - loss). Where p is 0, the true loss is infinite; here log p is that of the least number.
    """
    q_rV = log_q_rV.exp()
    ratio_rV = log_q_rV.sub_(_log(p_rV))
    loss_r = (q_rV * ratio_rV).sum(-1)
    return loss_r, ratio_rV.sub_(loss_r[:, None]).mul_(q_rV)


def total_variation(p_rV: Tensor, log_q_rV: Tensor) -> tuple[Tensor, Tensor]:
    """1/2 sum |p - q| (a probability), as in DistillSpec (arXiv 2310.08461).

    Speculative sampling accepts a token drawn from q with probability sum min(p, q) (arXiv 2211.17192).
    Since both sum to 1 and min(p, q) = (p + q - |p - q|) / 2, the expected rejection 1 - sum min(p, q) is this very
    number, hence `acceptance`.
    """
    difference_rV, q_rV = _difference(p_rV, log_q_rV)
    return difference_rV.abs().sum(-1).mul_(0.5), _variation_slope(difference_rV, q_rV)


acceptance = total_variation  # 1 - sum min(p, q): the sum of absolute differences does not cancel near p = q


def log_acceptance(p_rV: Tensor, log_q_rV: Tensor) -> tuple[Tensor, Tensor]:
    """-log sum min(p, q) (nats): the surprise of an acceptance, as in LK losses (arXiv 2602.23881).

    Slope: that of the total variation, divided by sum min(p, q); so it does not vanish far from p.
    """
    difference_rV, q_rV = _difference(p_rV, log_q_rV)
    accepted_r = torch.minimum(p_rV, q_rV).sum(-1).clamp_min_(torch.finfo(p_rV.dtype).tiny)
    return -accepted_r.log(), _variation_slope(difference_rV, q_rV).div_(accepted_r[:, None])


def top_k_ce(p_rV: Tensor, log_q_rV: Tensor) -> tuple[Tensor, Tensor]:
    """-sum over the 10 likeliest tokens of p of p log q (nats), as in HASS (arXiv 2408.15766).

    Slope: m q - p, where p counts on those tokens only and m is its sum there.
    """
    top_rK, index_rK = top_k_of(p_rV, min(_TOP_K, p_rV.shape[-1]))
    loss_r = -(top_rK * log_q_rV.gather(-1, index_rK)).sum(-1)
    slope_rV = log_q_rV.exp_().mul_(top_rK.sum(-1, keepdim=True))
    return loss_r, slope_rV.scatter_add_(-1, index_rK, -top_rK)


def _log(p_rV: Tensor) -> Tensor:
    """log p, with that of the least normal number for 0: times p it is 0, as it should be."""
    return p_rV.clamp_min(torch.finfo(p_rV.dtype).tiny).log_()


def _difference(p_rV: Tensor, log_q_rV: Tensor) -> tuple[Tensor, Tensor]:
    """(q - p, q)"""
    q_rV = log_q_rV.exp_()
    return q_rV - p_rV, q_rV


def _variation_slope(difference_rV: Tensor, q_rV: Tensor) -> Tensor:
    """q (g - sum q g) with g = -1 where q < p, else 0, the derivative of 1 - sum min(p, q). Consumes both.

    That of 1/2 sum |p - q| is larger by 1/2 everywhere, which makes no difference, but rounds away small slopes.
    """
    g_rV = difference_rV.sign_().clamp_max_(0)  # making booleans of floats is several times slower on a CPU
    mean_r1 = (q_rV * g_rV).sum(-1, keepdim=True)
    return g_rV.sub_(mean_r1).mul_(q_rV)


DIVERGENCES: dict[str, Divergence] = {
    "soft_ce": soft_ce,
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
    "top_k_ce": top_k_ce,
    "acceptance": acceptance,
    "log_acceptance": log_acceptance,
}
