"""Networks from a folder: `config.json`, `model.safetensors` and, unless tokens are bytes, `tokenizer.json`.

These are Hugging Face's files for Llama networks. A `generation_config.json` says which tokens end a text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from gati.errors import CheckpointError, ModelError, one_line
from gati.evict.engine.decoder import Decoder, DecoderSettings

_CONFIG, _GENERATION, _WEIGHTS = "config.json", "generation_config.json", "model.safetensors"
_FIELDS = {
    "vocabulary": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "inner_width": "intermediate_size",
    "length": "max_position_embeddings",
    "epsilon": "rms_norm_eps",
}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ROTATIONS = ".rotary_emb.inv_freq"  # stored by older versions of transformers; computed here


def load_decoder(folder: Path) -> Decoder:
    """Read a network, as float32.

    Raises ModelError for other architectures, CheckpointError for damaged files.
    """
    settings = _settings(folder)
    path = folder / _WEIGHTS
    try:
        weights = {name: each for name, each in load_file(path).items() if not name.endswith(_ROTATIONS)}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({one_line(error)}); copy it again") from error
    if settings.tied:
        weights.setdefault(_HEAD, weights.get(_EMBEDDING, torch.empty(0)))
    decoder = Decoder.empty(settings)
    try:
        decoder.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit {folder / _CONFIG}: {one_line(error)}") from error
    return decoder.float()


def _settings(folder: Path) -> DecoderSettings:
    path = folder / _CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        sizes = {ours: config[theirs] for ours, theirs in _FIELDS.items()}
        kind, rotary = config.get("model_type"), config.get("rope_parameters") or {}
        settings = DecoderSettings(
            **sizes,
            ends=_ends(folder, config),
            key_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
            rotary_base=float(rotary.get("rope_theta") or config.get("rope_theta") or 10_000.0),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{path} does not describe a network ({one_line(error)}); give a folder with {_CONFIG} and "
            f"{_WEIGHTS} of a Llama"
        ) from error
    unlike = {
        "model_type": kind != "llama",
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "rope_scaling": bool(config.get("rope_scaling")),
        "rope_parameters": rotary.get("rope_type", "default") != "default",
        "head_dim": config.get("head_dim") not in (None, settings.head_width),
    }
    for name, differs in unlike.items():
        if differs:
            raise ModelError(
                f"{path} has {name} = {config.get(name)!r}, which is not supported; use a Llama without it"
            )
    return settings


def _ends(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The end-of-text tokens: those for generation if there are any, else the network's."""
    path, ends = folder / _GENERATION, None
    try:
        if path.exists():
            ends = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({one_line(error)}); copy it again, or remove it") from error
    if ends is None:
        path, ends = folder / _CONFIG, config.get("eos_token_id", config["vocab_size"] - 1)
    found = ends if isinstance(ends, list) else [] if ends is None else [ends]
    count = config["vocab_size"]
    if any(type(each) is not int or not 0 <= each < count for each in found):
        raise ModelError(f"{path} has eos_token_id = {ends!r}; give tokens from 0 to {count - 1}")
    return tuple(found)
