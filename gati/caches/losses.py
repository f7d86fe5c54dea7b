"""Training losses of learned caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped


def distillation_loss(
    predictor_logits: Float[Tensor, "b k"],
    base_logits: Float[Tensor, "b k"],
    *,
    temperature: float = 2.0,
    soft_weight: float = 0.5,
    row_weights: Float[Tensor, " b"] | None = None,
) -> Float[Tensor, ""]:
    """Distillation loss of a predictor against the base model; both logits are [B, K], the result a scalar.

    `w * T^2 * KL(softmax(base / T) || softmax(predictor / T)) + (1 - w) * CE(predictor, argmax base)`
    with w = `soft_weight` and T = `temperature` (Hinton et al. 2015, section 2), averaged over rows with
    weights `row_weights` [B]. Labels are not used.
    """
    soft = F.kl_div(
        F.log_softmax(predictor_logits / temperature, 1),
        F.log_softmax(base_logits / temperature, 1),
        reduction="none",
        log_target=True,
    ).sum(1)
    loss = soft_weight * temperature**2 * soft
    if soft_weight < 1:
        loss = loss + (1 - soft_weight) * F.cross_entropy(
            predictor_logits, base_logits.argmax(1), reduction="none"
        )
    return _mean(loss, row_weights)


def feature_loss(
    found: Float[Tensor, "b d"],
    wanted: Float[Tensor, "b d"],
    *,
    row_weights: Float[Tensor, " b"] | None = None,
) -> Float[Tensor, ""]:
    """Cosine distance between features [B, D] and the base model's features, as a scalar.

    The base model's features are standardised per row first. Norms do not matter, so the scale of the hidden
    outputs affects neither the weight of this loss nor the step size.
    """
    return _mean(1 - F.cosine_similarity(found, F.layer_norm(wanted, wanted.shape[1:])), row_weights)


def _mean(loss: Tensor, row_weights: Tensor | None) -> Tensor:
    return loss.mean() if row_weights is None else (row_weights * loss).sum() / row_weights.sum()


def selector_loss(
    score_logits: Float[Tensor, "*models b"],
    agrees: Shaped[Tensor, " b"],
    *,
    false_positive_penalty: float = 3.0,
    counted: Shaped[Tensor, "*models b"] | None = None,
) -> Float[Tensor, "*models"]:
    """Cross-entropy of selector logits [..., B] against agreement [B]; keeps the leading shape.

    Inputs that disagree are weighted by `false_positive_penalty`: a wrong early answer costs more than a
    miss, which only costs time. The mean is over all inputs, or those in the mask `counted` [..., B].
    """
    target = agrees.to(score_logits.dtype).expand_as(score_logits)
    weight = 1 + (false_positive_penalty - 1) * (1 - target)
    losses = F.binary_cross_entropy_with_logits(score_logits, target, weight, reduction="none")
    return losses.mean(-1) if counted is None else (losses * counted).sum(-1) / counted.sum(-1)
