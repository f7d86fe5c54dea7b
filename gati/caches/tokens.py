"""Predictors for token sequences: hidden outputs [B, length, D] in which padding is zero.

They ignore padding and do not depend on the length, so padding never changes an answer. A position that is
zero in every channel counts as padding: `gati.model.masks` zeroes padding, and normalisation layers never
output an all-zero token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gati.caches.predictors import register_predictor
from gati.model.inputs import TensorInputs
from gati.model.masks import MASK

# Variants tried by default at the blocks of a token network, instead of predictors for maps.
TOKEN_VARIANTS = ("tokens-mean(256)", "tokens-attention(4,128)", "tokens-conv(96)")
_UNSEEN = 0.05  # initial embedding scale: small, so that words unseen in training contribute little
_WIDTH = 64
_NEVER = -1e4  # an attention score whose weight is exactly 0, even in half precision


def of_any_length(variant: str) -> bool:
    """Whether a variant reads sequences of any length and ignores padding."""
    return variant.startswith("tokens-")


def is_token(hidden: Tensor) -> Tensor:
    """Return a bool mask [B, length, 1] of the tokens in [B, length, D]."""
    return hidden.abs().amax(2, keepdim=True) > 0


class TokenMean(nn.Module):
    """Tokens [B, length, D] -> their mean [B, D]."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Average the tokens; zero if there are none."""
        return hidden.sum(1) / is_token(hidden).to(hidden.dtype).sum(1).clamp_min(1.0)


class FirstToken(nn.Module):
    """Tokens [B, length, D] -> the first one [B, D], where many networks aggregate information."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Take the first token."""
        return hidden[:, 0]


class TokenAttention(nn.Module):
    """Tokens [B, length, D] -> `heads` weighted means and the plain mean: [B, (heads + 1) D]."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.score = nn.Linear(channels, heads)

    def forward(self, hidden: Tensor) -> Tensor:
        """Weight tokens by learned scores."""
        token = is_token(hidden)
        scores = self.score(hidden).masked_fill(~token, _NEVER)  # [B, length, heads]
        weights = scores.softmax(1).transpose(1, 2)  # [B, heads, length]
        mean = hidden.sum(1) / token.to(hidden.dtype).sum(1).clamp_min(1.0)
        return torch.cat((torch.bmm(weights, hidden).flatten(1), mean), 1)


class TokenConvolution(nn.Module):
    """Tokens [B, length, D] -> mean and maximum of `width` filters over three tokens: [B, 2 width]."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.filters = nn.Conv1d(channels, width, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the filters and mask out padding."""
        token = is_token(hidden).to(hidden.dtype)
        found = self.filters(hidden.transpose(1, 2)).relu().transpose(1, 2) * token  # [B, length, width]
        return torch.cat((found.sum(1) / token.sum(1).clamp_min(1.0), found.amax(1)), 1)


class TokenReader(nn.Module):
    """Packed integers [B, arrays, length], or only ids [B, length] -> embeddings, with padding zero.

    `ids` and `mask` are indices of arrays; without a mask, `mask` equals `ids`.
    """

    def __init__(self, vocabulary: int, width: int, ids: int, mask: int) -> None:
        super().__init__()
        self.ids, self.mask = ids, mask
        self.words = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.words.weight, std=_UNSEEN)

    def forward(self, x: Tensor) -> Tensor:
        """Look up word embeddings, [B, length, width]."""
        whole = x.long()  # training passes them as float32
        if whole.dim() == 2:
            whole = whole.unsqueeze(1)
        hidden: Tensor = self.words(whole[:, self.ids])
        if self.mask != self.ids:
            hidden = hidden * whole[:, self.mask].unsqueeze(2).to(hidden.dtype)
        return hidden


@register_predictor("tokens-student", reads="input")
def tokens_student(
    hidden_shape: tuple[int, ...], classes: int, width: int, vocabulary: int, ids: int = 0, mask: int = 0
) -> nn.Module:
    """Embeddings of `width` numbers -> filters over three words -> mean and maximum -> classes.

    A student for token networks with `vocabulary` tokens. `ids` and `mask` are indices into the packed
    arrays, equal if there is no mask.
    """
    arrays = hidden_shape[0] if len(hidden_shape) == 2 else 1
    if len(hidden_shape) > 2 or min(width, vocabulary) < 1 or max(ids, mask) >= arrays:
        raise ValueError("it reads ids (length) or packed arrays (arrays, length)")
    return nn.Sequential(
        TokenReader(vocabulary, width, ids, mask),
        TokenConvolution(width, 2 * width),
        *_light(4 * width, 2 * width, classes),
    )


def token_students(tensors: TensorInputs) -> tuple[str, ...]:
    """Return the default students for a network with these inputs; none if no embedding reads them."""
    ids = [place for place, part in enumerate(tensors.parts) if part.rows and len(part.shape) == 1]
    one_length = len({part.shape for part in tensors.parts}) == 1
    if tensors.dtype != torch.int64 or not ids or not one_length:
        return ()
    place = max(ids, key=lambda each: tensors.parts[each].rows or 0)
    mask = next((at for at, part in enumerate(tensors.parts) if part.name == MASK), place)
    return (f"tokens-student({_WIDTH},{tensors.parts[place].rows},{place},{mask})",)


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
    """`heads` weighted means of the tokens and the plain mean -> `width` units -> classes."""
    if heads < 1:
        raise ValueError("it needs at least 1 head")
    channels = _channels(hidden_shape)
    return nn.Sequential(TokenAttention(channels, heads), *_light((heads + 1) * channels, width, classes))


@register_predictor("tokens-conv")
def tokens_convolved(hidden_shape: tuple[int, ...], classes: int, width: int) -> nn.Module:
    """`width` filters over three tokens -> mean and maximum -> `width` units -> classes."""
    return nn.Sequential(TokenConvolution(_channels(hidden_shape), width), *_light(2 * width, width, classes))


def _channels(hidden_shape: tuple[int, ...]) -> int:
    if len(hidden_shape) != 2:
        raise ValueError("it reads tokens (length, channels)")
    return hidden_shape[1]


def _light(values: int, width: int, classes: int) -> list[nn.Module]:
    if width < 1:
        raise ValueError("the width must be at least 1")
    hidden = nn.Linear(values, width, bias=False)
    return [hidden, nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, classes)]
