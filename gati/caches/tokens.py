"""Predictors of sequences of tokens: hidden outputs [B, length, D] in which padding is zero.

They read tokens alone and know no length, so that padding never changes an answer. What is zero in every
channel counts as padding: `gati.model.masks` makes it so, and no layer that normalises hands on such a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gati.caches.predictors import register_predictor

__all__ = ["TOKEN_VARIANTS", "FirstToken", "TokenAttention", "TokenConvolution", "TokenMean", "is_token"]

# What is tried by default at the blocks of a network that reads tokens, in place of predictors of maps.
TOKEN_VARIANTS = ("tokens-mean(256)", "tokens-attention(4,128)", "tokens-conv(96)")
_NEVER = -1e4  # an attention score whose weight is exactly 0, in half precision too


def is_token(hidden: Tensor) -> Tensor:
    """Where tokens are in [B, length, D]: bool [B, length, 1]."""
    return hidden.abs().amax(2, keepdim=True) > 0


class TokenMean(nn.Module):
    """Tokens [B, length, D] -> their mean [B, D]."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Average; of no tokens it is zero."""
        return hidden.sum(1) / is_token(hidden).to(hidden.dtype).sum(1).clamp_min(1.0)


class FirstToken(nn.Module):
    """Tokens [B, length, D] -> the first one [B, D], where many networks gather what they know."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Take it."""
        return hidden[:, 0]


class TokenAttention(nn.Module):
    """Tokens [B, length, D] -> `heads` weighted means of them, and the plain one: [B, (heads + 1) D]."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.score = nn.Linear(channels, heads)

    def forward(self, hidden: Tensor) -> Tensor:
        """Weigh tokens by learned scores."""
        token = is_token(hidden)
        scores = self.score(hidden).masked_fill(~token, _NEVER)  # [B, length, heads]
        weights = scores.softmax(1).transpose(1, 2)  # [B, heads, length]
        mean = hidden.sum(1) / token.to(hidden.dtype).sum(1).clamp_min(1.0)
        return torch.cat((torch.bmm(weights, hidden).flatten(1), mean), 1)


class TokenConvolution(nn.Module):
    """Tokens [B, length, D] -> what `width` filters of three tokens find: mean and maximum [B, 2 width]."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.filters = nn.Conv1d(channels, width, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Filter, and leave out what was found at padding."""
        token = is_token(hidden).to(hidden.dtype)
        found = self.filters(hidden.transpose(1, 2)).relu().transpose(1, 2) * token  # [B, length, width]
        return torch.cat((found.sum(1) / token.sum(1).clamp_min(1.0), found.amax(1)), 1)


@register_predictor("tokens-mean")
def tokens_mean(hidden_shape: tuple[int, ...], classes: int, width: int) -> nn.Module:
    """The mean of the tokens -> `width` units -> classes."""
    return nn.Sequential(TokenMean(), *_light(_channels(hidden_shape), width, classes))


@register_predictor("tokens-first")
def tokens_first(hidden_shape: tuple[int, ...], classes: int, width: int) -> nn.Module:
    """The first token -> `width` units -> classes."""
    return nn.Sequential(FirstToken(), *_light(_channels(hidden_shape), width, classes))


@register_predictor("tokens-attention")
def tokens_attention(hidden_shape: tuple[int, ...], classes: int, heads: int, width: int) -> nn.Module:
    """`heads` weighted means of the tokens, and the plain one -> `width` units -> classes."""
    if heads < 1:
        raise ValueError("it needs 1 head or more")
    channels = _channels(hidden_shape)
    return nn.Sequential(TokenAttention(channels, heads), *_light((heads + 1) * channels, width, classes))


@register_predictor("tokens-conv")
def tokens_convolved(hidden_shape: tuple[int, ...], classes: int, width: int) -> nn.Module:
    """`width` filters of three tokens each, their mean and maximum -> `width` units -> classes."""
    return nn.Sequential(TokenConvolution(_channels(hidden_shape), width), *_light(2 * width, width, classes))


def _channels(hidden_shape: tuple[int, ...]) -> int:
    if len(hidden_shape) != 2:
        raise ValueError("it reads tokens (length, channels)")
    return hidden_shape[1]


def _light(values: int, width: int, classes: int) -> list[nn.Module]:
    if width < 1:
        raise ValueError("the width must be 1 or more")
    hidden = nn.Linear(values, width, bias=False)
    return [hidden, nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, classes)]
