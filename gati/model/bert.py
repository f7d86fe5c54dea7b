"""BERT (Devlin et al. 2019) as PyTorch modules of plain operators, with the names of its public weights.

`from_folder` reads a Hugging Face folder (`config.json`, `model.safetensors`) without any other package.
Positions are absolute, the activation is GELU, and attention masks padding.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from gati.errors import CheckpointError, ModelError, one_line
from gati.model.labels import if_named
from gati.model.usable import check_one_label

_SIZES = {
    "vocabulary": "vocab_size",
    "length": "max_position_embeddings",
    "kinds": "type_vocab_size",
    "width": "hidden_size",
    "inner_width": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
}
_POSITIONS = "embeddings.position_ids"  # 0, 1, 2, ...: older files have them
_IGNORED = ("pooler.", "cls.", "classifier.", _POSITIONS)  # not in the encoder
_CLASSIFIER = "BertForSequenceClassification"
_CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")


@dataclass(frozen=True)
class BertSettings:
    """Sizes of the network; defaults are MiniLM-L6's."""

    vocabulary: int = 30522
    length: int = 512  # of the longest sequence, in tokens
    kinds: int = 2  # token types
    width: int = 384
    inner_width: int = 1536
    layers: int = 6
    heads: int = 12
    epsilon: float = 1e-12

    @classmethod
    def from_file(cls, path: Path) -> BertSettings:
        """Read a `config.json`. Raises `ModelError` for another architecture or a damaged file."""
        return cls.of(_config(path), path)

    @classmethod
    def of(cls, config: dict[str, Any], path: Path) -> BertSettings:
        """Read the settings from a parsed `config.json`; `path` is for messages. Raises as `from_file`."""
        try:
            kind, activation = config.get("model_type"), config.get("hidden_act", "gelu")
            if kind != "bert" or activation != "gelu":
                raise ModelError(
                    f"{path} describes {kind!r} with {activation!r}; only 'bert' with 'gelu' is supported"
                )
            sizes = {ours: _whole(theirs, config[theirs]) for ours, theirs in _SIZES.items()}
            found = cls(**sizes, epsilon=float(config["layer_norm_eps"]))
            if min(sizes.values()) < 1:
                raise ValueError("a size is below 1")
        except (KeyError, TypeError, ValueError) as error:
            raise _unreadable(path, error) from error
        if found.width % found.heads:
            raise ModelError(
                f"{path} has {found.width} channels, not a multiple of its {found.heads} heads; copy it again"
            )
        return found


class _Embeddings(nn.Module):
    def __init__(self, settings: BertSettings) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(settings.vocabulary, settings.width)
        self.position_embeddings = nn.Embedding(settings.length, settings.width)
        self.token_type_embeddings = nn.Embedding(settings.kinds, settings.width)
        self.LayerNorm = nn.LayerNorm(settings.width, settings.epsilon)

    def forward(self, ids: Tensor, kinds: Tensor | None) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.word_embeddings(ids) + self.position_embeddings(places)
        table = self.token_type_embeddings
        normal: Tensor = self.LayerNorm(hidden + (table.weight[0] if kinds is None else table(kinds)))
        return normal


class _SelfAttention(nn.Module):
    def __init__(self, settings: BertSettings) -> None:
        super().__init__()
        self.heads, width = settings.heads, settings.width
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        parts = (self._split(layer(hidden)) for layer in (self.query, self.key, self.value))
        query, key, value = parts  # (B, heads, length, width / heads)
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3]) + bias  # (B, heads, length, length)
        mixed: Tensor = scores.softmax(3) @ value
        return mixed.transpose(1, 2).flatten(2)

    def _split(self, values: Tensor) -> Tensor:
        return torch.unflatten(values, 2, (self.heads, -1)).transpose(1, 2)


class _Output(nn.Module):
    def __init__(self, settings: BertSettings, inputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, settings.width)
        self.LayerNorm = nn.LayerNorm(settings.width, settings.epsilon)

    def forward(self, values: Tensor, residual: Tensor) -> Tensor:
        normal: Tensor = self.LayerNorm(self.dense(values) + residual)
        return normal


class _Layer(nn.Module):
    def __init__(self, settings: BertSettings) -> None:
        super().__init__()
        attention = {"self": _SelfAttention(settings), "output": _Output(settings, settings.width)}
        self.attention = nn.ModuleDict(attention)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(settings.width, settings.inner_width)})
        self.output = _Output(settings, settings.inner_width)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        hidden = self.attention["output"](self.attention["self"](hidden, bias), hidden)
        found: Tensor = self.output(nn.functional.gelu(self.intermediate["dense"](hidden)), hidden)
        return found


class _Layers(nn.Module):
    def __init__(self, settings: BertSettings) -> None:
        super().__init__()
        self.layer = nn.ModuleList(_Layer(settings) for _ in range(settings.layers))

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        for layer in self.layer:
            hidden = layer(hidden, bias)
        return hidden


class SentenceEncoder(nn.Module):
    """Ids, mask and token types [B, length] -> hidden states of the last layer [B, length, width]."""

    def __init__(self, settings: BertSettings | None = None) -> None:
        super().__init__()
        settings = settings or BertSettings()
        self.embeddings = _Embeddings(settings)
        self.encoder = _Layers(settings)

    def forward(self, ids: Tensor, mask: Tensor, kinds: Tensor | None = None) -> Tensor:
        """Encode; padding is masked, and `kinds` default to 0."""
        bias = torch.where(mask != 0, 0.0, -1e9).unsqueeze(1).unsqueeze(1)  # [B, 1, 1, length]
        hidden: Tensor = self.encoder(self.embeddings(ids, kinds), bias)
        return hidden

    @classmethod
    def from_folder(cls, folder: str | Path) -> SentenceEncoder:
        """Load the encoder from a folder with `config.json` and `model.safetensors`.

        **Raises:** `ModelError` for another architecture, `CheckpointError` for weights that do not fit.
        """
        found = cls(BertSettings.from_file(Path(folder) / "config.json")).eval()
        state = _weights(Path(folder))
        own = {name.removeprefix("bert."): tensor for name, tensor in state.items()}
        _fill(found, {name: own[name] for name in own if not name.startswith(_IGNORED)}, Path(folder))
        return found


class _Pooled(SentenceEncoder):
    """The encoder with its pooler: the first token through another layer."""

    def __init__(self, settings: BertSettings) -> None:
        super().__init__(settings)
        self.pooler = nn.ModuleDict({"dense": nn.Linear(settings.width, settings.width)})

    def forward(self, ids: Tensor, mask: Tensor, kinds: Tensor | None = None) -> Tensor:
        pooled: Tensor = self.pooler["dense"](super().forward(ids, mask, kinds)[:, 0])
        return pooled.tanh()


class SequenceClassifier(nn.Module):
    """`BertForSequenceClassification`: ids, mask and token types [B, length] -> class scores."""

    def __init__(self, settings: BertSettings, class_names: tuple[str, ...]) -> None:
        super().__init__()
        self.class_names = class_names
        self.bert = _Pooled(settings)
        self.classifier = nn.Linear(settings.width, len(class_names))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Class scores [B, K]."""
        scores: Tensor = self.classifier(self.bert(input_ids, attention_mask, token_type_ids))
        return scores

    @classmethod
    def from_folder(cls, folder: str | Path) -> SequenceClassifier:
        """Load the classifier from a folder with `config.json` and `model.safetensors`.

        **Raises:** `ModelError` for another architecture, `CheckpointError` for weights that do not fit.
        """
        settings, names = _described(Path(folder))
        try:
            found = cls(settings, names).eval()
        except RuntimeError as error:  # for sizes that no memory holds
            raise _unreadable(Path(folder) / "config.json", error) from error
        state = _weights(Path(folder))
        _fill(found, {name: state[name] for name in state if not name.endswith(_POSITIONS)}, Path(folder))
        return found


def class_names_in(folder: Path) -> tuple[str, ...] | None:
    """The names of a folder's classes; None if they have none. Raises `ModelError` as `load_model`."""
    return if_named(_described(folder)[1])


def _described(folder: Path) -> tuple[BertSettings, tuple[str, ...]]:
    """The settings and the class names of a classifier."""
    path = folder / "config.json"
    config = _config(path)
    kinds = config.get("architectures")
    kinds = list(map(str, kinds)) if isinstance(kinds, list) and kinds else ["an unknown architecture"]
    kind, activation = _CLASSIFIER if _CLASSIFIER in kinds else kinds[0], config.get("hidden_act", "gelu")
    known = kind == _CLASSIFIER and (activation == "gelu" or config.get("model_type") != "bert")
    if not known and kind.endswith(_CLASSIFIERS):
        with_what = f" with {activation!r}" if kind == _CLASSIFIER else ""
        raise ModelError(
            f"{path} describes {kind}{with_what}, which needs the package transformers: write a "
            f"package.module:callable that returns transformers.{kind}.from_pretrained({str(folder)!r})"
        )
    settings = BertSettings.of(config, path)
    if kind != _CLASSIFIER:
        raise ModelError(
            f"{path} describes {kind}, which has no class scores; write a package.module:callable "
            "that adds a classifier to gati.model.bert.SentenceEncoder.from_folder"
        )
    check_one_label(config, str(folder))
    names = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    try:
        return settings, tuple(str(names[str(index)]) for index in range(len(names)))
    except (KeyError, TypeError) as error:
        raise _unreadable(path, error) from error


def _whole(name: str, value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{name} is {value!r}, no whole number")
    return value


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise TypeError(f"it holds a {type(config).__name__}")
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(path, error) from error
    return config


def _unreadable(path: Path, error: Exception) -> ModelError:
    return ModelError(f"cannot read {path} ({one_line(error)}); give a config.json of BERT")


def _weights(folder: Path) -> dict[str, Tensor]:
    try:
        return load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {folder}/model.safetensors ({one_line(error)})") from error


def _fill(module: nn.Module, state: dict[str, Tensor], folder: Path) -> None:
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        message = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{folder}/model.safetensors does not fit its config.json ({message}); copy both again"
        ) from error


class SentenceClassifier(nn.Module):
    """Ids and mask [B, length] -> class scores: a linear layer on the normalised mean of encoded tokens."""

    def __init__(self, encoder: SentenceEncoder, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        width = encoder.embeddings.LayerNorm.weight.shape[0]
        self.head = nn.Linear(width, classes)

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The head's input: vectors [B, width] of norm 1."""
        kept = attention_mask.unsqueeze(2).to(torch.float32)
        hidden = self.encoder(input_ids, attention_mask) * kept
        return nn.functional.normalize(hidden.sum(1) / kept.sum(1).clamp_min(1.0), dim=1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Class scores [B, K]."""
        scores: Tensor = self.head(self.embed(input_ids, attention_mask))
        return scores
