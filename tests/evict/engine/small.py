"""A tiny network, and the same computed plainly: every token at once, nothing kept."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from gati.evict.engine.decoder import Decoder, DecoderSettings
from gati.evict.engine.engine import PrefixEngine, PrefixEngineLimits, pool_for
from gati.evict.engine.generation import Generation, GenerationRequest
from gati.evict.engine.pages import KeptPrefixes

SETTINGS = DecoderSettings(
    vocabulary=13, ends=(12,), layers=2, width=24, heads=6, key_heads=3, inner_width=20, length=96
)
PAGE_TOKENS = 4
DECODER = Decoder.random(SETTINGS, seed=1, dtype=torch.float64)  # in which no two logits are nearly equal
PAGE_BYTES = pool_for(DECODER, 2**20, PAGE_TOKENS).page_bytes


def engine(
    pages: int = 64,
    kept: KeptPrefixes | None = None,
    decoder: Decoder = DECODER,
    **limits: int,
) -> PrefixEngine:
    """An engine of tiny pages."""
    pool = pool_for(decoder, pages * PAGE_BYTES, PAGE_TOKENS)
    kept = kept or KeptPrefixes("lru")
    return PrefixEngine(decoder, pool, kept, PrefixEngineLimits(**limits), page_tokens=PAGE_TOKENS)


def request(prompt: Sequence[int], most_tokens: int = 1) -> GenerationRequest:
    """Greedy, to the last token."""
    return GenerationRequest(tuple(prompt), most_tokens, ends_early=False, keeps_logits=True)


def generated(running: PrefixEngine, prompt: Sequence[int], most_tokens: int = 1) -> Generation:
    """One request from begin to end."""
    generation = running.submit(request(prompt, most_tokens))
    running.run_until_idle()
    return generation


def save_decoder(decoder: Decoder, folder: Path) -> None:
    """Write a network as Hugging Face does."""
    settings, weights = decoder.settings, decoder.state_dict()
    config = {
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": settings.vocabulary,
        "num_hidden_layers": settings.layers,
        "hidden_size": settings.width,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.key_heads,
        "intermediate_size": settings.inner_width,
        "max_position_embeddings": settings.length,
        "rms_norm_eps": settings.epsilon,
        "rope_theta": settings.rotary_base,
        "tie_word_embeddings": settings.tied,
        "eos_token_id": list(settings.ends),
    }
    if settings.tied:
        del weights["lm_head.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")


def plain_logits(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits after every token, [n, vocabulary], with loops over heads and positions."""
    settings = decoder.settings
    weights = {name: weight.double() for name, weight in decoder.state_dict().items()}
    hidden = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    for number in range(settings.layers):
        layer = {
            name.removeprefix(f"model.layers.{number}."): weight
            for name, weight in weights.items()
            if name.startswith(f"model.layers.{number}.")
        }
        seen = _normed(hidden, layer["input_layernorm.weight"], settings.epsilon)
        hidden = hidden + _attention(settings, layer, seen)
        seen = _normed(hidden, layer["post_attention_layernorm.weight"], settings.epsilon)
        gate = seen @ layer["mlp.gate_proj.weight"].T
        up = seen @ layer["mlp.up_proj.weight"].T
        hidden = hidden + (gate * torch.sigmoid(gate) * up) @ layer["mlp.down_proj.weight"].T
    hidden = _normed(hidden, weights["model.norm.weight"], settings.epsilon)
    return hidden @ weights["lm_head.weight"].T


def _normed(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return hidden / (hidden.square().mean(dim=-1, keepdim=True) + epsilon).sqrt() * weight


def _attention(settings: DecoderSettings, layer: dict[str, Tensor], seen: Tensor) -> Tensor:
    each, count = settings.head_width, len(seen)
    queries, keys, values = (
        (seen @ layer[f"self_attn.{name}_proj.weight"].T).view(count, -1, each) for name in "qkv"
    )
    rows = []
    for at in range(count):
        heads = []
        for head in range(settings.heads):
            group = head // (settings.heads // settings.key_heads)
            own = _rotated(queries[at, head], at, settings.rotary_base)
            scores = torch.stack(
                [own @ _rotated(keys[other, group], other, settings.rotary_base) for other in range(at + 1)]
            )
            heads.append(torch.softmax(scores / math.sqrt(each), dim=0) @ values[: at + 1, group])
        rows.append(torch.cat(heads))
    return torch.stack(rows) @ layer["self_attn.o_proj.weight"].T


def _rotated(vector: Tensor, position: int, base: float) -> Tensor:
    """Pairs of channels as complex numbers, turned."""
    half = len(vector) // 2
    angle = position * base ** -(torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(vector[:half], vector[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag))
