"""Losses that learned caches are trained with (DESIGN: training)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["distillation_loss", "selector_loss"]


def distillation_loss(
    predictor_logits: Tensor, base_logits: Tensor, *, temperature: float = 2.0, soft_weight: float = 0.5
) -> Tensor:
    """Make a predictor imitate the base model; both logits are [B, K], the result a scalar.

    `w * T^2 * KL(softmax(base / T) || softmax(predictor / T)) + (1 - w) * CE(predictor, argmax base)`
    with w = `soft_weight` and T = `temperature` (Hinton et al. 2015, section 2). Labels play no part.
    """
    hard = F.cross_entropy(predictor_logits, base_logits.argmax(1))
    soft = F.kl_div(
        F.log_softmax(predictor_logits / temperature, 1),
        F.log_softmax(base_logits / temperature, 1),
        reduction="batchmean",
        log_target=True,
    )
    return soft_weight * temperature**2 * soft + (1 - soft_weight) * hard


def selector_loss(score_logits: Tensor, agrees: Tensor, *, false_positive_penalty: float = 3.0) -> Tensor:
    """Cross-entropy of selector logits [..., B] against agreement [B]; the result keeps the leading shape.

    An input that disagrees counts `false_positive_penalty` times: a wrong early answer costs more than
    a miss, which only costs time.
    """
    target = agrees.to(score_logits.dtype).expand_as(score_logits)
    weight = 1 + (false_positive_penalty - 1) * (1 - target)
    return F.binary_cross_entropy_with_logits(score_logits, target, weight, reduction="none").mean(-1)
