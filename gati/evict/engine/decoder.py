"""A decoder-only transformer with a paged KV cache: Llama's architecture and weight names.

Rotary positions, RMSNorm before each half of a layer, grouped-query attention, SwiGLU (Touvron et al. 2023).
Tokens of several requests run through the layers as one batch without padding; only attention is
computed per request, over that request's pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gati.errors import ModelError


@dataclass(frozen=True)
class DecoderSettings:
    """Sizes of a network. The defaults are a small byte-level network with 3.2 million weights."""

    vocabulary: int = 257
    ends: tuple[int, ...] = (256,)  # end-of-text tokens; by default, tokens are the 256 bytes and this one
    layers: int = 4
    width: int = 256
    heads: int = 8
    key_heads: int = 2
    inner_width: int = 704
    length: int = 8192  # maximum length of a sequence in tokens
    rotary_base: float = 10_000.0
    epsilon: float = 1e-5
    tied: bool = False  # whether the embedding and the last layer share weights

    def __post_init__(self) -> None:
        """Raises ModelError for sizes that do not fit each other."""
        sizes = (self.vocabulary, self.layers, self.width, self.heads, self.key_heads, self.inner_width)
        if min(*sizes, self.length) < 1:
            raise ModelError(f"every size of a decoder must be at least 1: {self}")
        for end in self.ends:
            if not 0 <= end < self.vocabulary:
                raise ModelError(f"the end-of-text token {end} is not below vocabulary, {self.vocabulary}")
        if self.width % self.heads or self.head_width % 2:
            raise ModelError(
                f"width {self.width} does not divide into {self.heads} heads of even width; change either"
            )
        if self.heads % self.key_heads:
            raise ModelError(
                f"heads is {self.heads}, not a multiple of key_heads, {self.key_heads}; change key_heads"
            )

    @property
    def head_width(self) -> int:
        """Channels of one head."""
        return self.width // self.heads

    @property
    def cost_growth(self) -> float:
        """By what share of a first token's multiply-adds each earlier token increases those of a token."""
        every_token = self.width * (2 * self.width + 2 * self.key_heads * self.head_width)
        every_token += 3 * self.width * self.inner_width
        return 2 * self.width / every_token


class Stretch(NamedTuple):
    """Tokens of one request in a batch: rows `start` to `stop`, after `before` tokens with known keys.

    `pages` [p] are the request's pages, from its first token to the last one of these.
    """

    start: int
    stop: int
    before: int
    pages: Tensor


class TokenBatch(NamedTuple):
    """The tokens of one step: `tokens`, `positions`, and where keys and values go (`page`, `place`), all [n].

    `wanted` [m] are the rows whose next token is needed.
    """

    tokens: Tensor
    positions: Tensor
    page: Tensor
    place: Tensor
    stretches: Sequence[Stretch]
    wanted: Tensor


class _Around(NamedTuple):
    """Inputs shared by all layers: rotations of the positions [2, n, 1, half], a mask for each stretch."""

    turns: Tensor
    masks: list[Tensor | None]


class _Attention(nn.Module):
    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        self.settings = settings
        width, own, shared = settings.width, settings.heads, settings.key_heads
        self.q_proj = nn.Linear(width, own * settings.head_width, bias=False)
        self.k_proj = nn.Linear(width, shared * settings.head_width, bias=False)
        self.v_proj = nn.Linear(width, shared * settings.head_width, bias=False)
        self.o_proj = nn.Linear(own * settings.head_width, width, bias=False)

    def forward(self, hidden: Tensor, batch: TokenBatch, around: _Around, cache: Tensor) -> Tensor:
        """Map [n, width] to the same; the layer's `cache` is [pages, 2, tokens, key heads, head width]."""
        count, each = len(hidden), self.settings.head_width
        queries = _turned(self.q_proj(hidden).view(count, -1, each), around.turns)
        cache[batch.page, 0, batch.place] = _turned(self.k_proj(hidden).view(count, -1, each), around.turns)
        cache[batch.page, 1, batch.place] = self.v_proj(hidden).view(count, -1, each)
        found = torch.empty_like(queries)
        for stretch, mask in zip(batch.stretches, around.masks, strict=True):
            found[stretch.start : stretch.stop] = _attended(queries, stretch, mask, cache)
        mixed: Tensor = self.o_proj(found.view(count, -1))
        return mixed


class _Gated(nn.Module):
    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(settings.width, settings.inner_width, bias=False)
        self.up_proj = nn.Linear(settings.width, settings.inner_width, bias=False)
        self.down_proj = nn.Linear(settings.inner_width, settings.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [n, width] to the same shape."""
        found: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return found


class _Layer(nn.Module):
    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(settings.width, settings.epsilon)
        self.self_attn = _Attention(settings)
        self.post_attention_layernorm = nn.RMSNorm(settings.width, settings.epsilon)
        self.mlp = _Gated(settings)

    def forward(self, hidden: Tensor, batch: TokenBatch, around: _Around, cache: Tensor) -> Tensor:
        """Map [n, width] to the same shape."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), batch, around, cache)
        mixed: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return mixed


class _Stack(nn.Module):
    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(settings.vocabulary, settings.width)
        self.layers = nn.ModuleList(_Layer(settings) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.width, settings.epsilon)


class Decoder(nn.Module):
    """The network. Its parameters have the names of Llama's weights."""

    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        self.settings = settings
        self.model = _Stack(settings)
        self.lm_head = nn.Linear(settings.width, settings.vocabulary, bias=False)
        self._tie()

    @classmethod
    def empty(cls, settings: DecoderSettings) -> Decoder:
        """Make a network with uninitialised weights."""
        with torch.device("meta"):
            decoder = cls(settings)
        decoder = decoder.to_empty(device="cpu")
        decoder._tie()  # tie again, since every layer now has its own memory
        return decoder.eval()

    @classmethod
    def random(cls, settings: DecoderSettings, seed: int, dtype: torch.dtype = torch.float32) -> Decoder:
        """Make a network with random weights from `seed`, the same on every machine."""
        decoder = cls.empty(settings)
        generator = torch.Generator().manual_seed(seed)
        for parameter in decoder.parameters():
            if parameter.ndim == 1:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=1.0 / math.sqrt(parameter.shape[1]), generator=generator)
        return decoder.to(dtype)

    @torch.inference_mode()
    def forward(self, batch: TokenBatch, cache: Tensor) -> Tensor:
        """Compute a step: keys and values of the batch go into `cache`, and logits are returned.

        `cache` is [pages, layers, 2, tokens of a page, key heads, head width]; the logits of the wanted rows
        are [m, vocabulary].
        """
        masks = [_mask(stretch) for stretch in batch.stretches]
        around = _Around(self._turns(batch.positions), masks)
        hidden = self.model.embed_tokens(batch.tokens)
        for number, layer in enumerate(self.model.layers):
            hidden = layer(hidden, batch, around, cache[:, number])
        logits: Tensor = self.lm_head(self.model.norm(hidden[batch.wanted]))
        return logits

    def _tie(self) -> None:
        if self.settings.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _turns(self, positions: Tensor) -> Tensor:
        """Cosine and sine of each position's angles, [2, n, 1, head width / 2]."""
        half = self.settings.head_width // 2
        steps = torch.arange(half, dtype=torch.float64) / half
        angles = positions[:, None].double() * self.settings.rotary_base**-steps
        found = torch.stack((angles.cos(), angles.sin()))[:, :, None]
        return found.to(self.lm_head.weight.dtype)


def _turned(heads: Tensor, turns: Tensor) -> Tensor:
    """Rotate pairs of channels, one from each half, [n, heads, head width]."""
    first, second = heads.chunk(2, dim=-1)
    cosine, sine = turns
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _mask(stretch: Stretch) -> Tensor | None:
    """The attention mask [t, total]; None if each token attends to all, or to all up to itself."""
    count = stretch.stop - stretch.start
    if count == 1 or not stretch.before:
        return None
    return torch.ones(count, stretch.before + count, dtype=torch.bool).tril(stretch.before)


def _attended(queries: Tensor, stretch: Stretch, mask: Tensor | None, cache: Tensor) -> Tensor:
    """Causal attention of one request's tokens, [t, heads, head width]."""
    count = stretch.stop - stretch.start
    total = stretch.before + count
    keys, values = (
        cache[:, kind].index_select(0, stretch.pages).flatten(0, 1)[:total].transpose(0, 1)[None]
        for kind in (0, 1)
    )  # [1, key heads, total, head width]
    found = F.scaled_dot_product_attention(
        queries[stretch.start : stretch.stop].transpose(0, 1)[None],
        keys,
        values,
        attn_mask=mask,
        is_causal=count > 1 and mask is None,
        enable_gqa=True,
    )
    return found[0].transpose(0, 1)
