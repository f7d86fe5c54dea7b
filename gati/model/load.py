"""Loading the network that the user's MODEL names.

Data flow: **source** -> *_build* -> **network, preprocessing** -> *checkpoint* -> **LoadedModel**.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gati.errors import DataError, ModelError, one_line
from gati.files import absolute, lasting_source
from gati.model.adapted import giving_scores
from gati.model.bert import SequenceClassifier, class_names_in
from gati.model.checkpoint import apply_checkpoint, fit_prefixes, load_checkpoint, state_sha256
from gati.model.exported import load_exported
from gati.model.folders import is_folder
from gati.model.labels import names_in_config
from gati.model.preprocess import Preprocessing
from gati.model.processors import prepared_by_processor
from gati.model.published import (
    NetworkRecipe,
    classes_argument,
    timm_recipe,
    torchvision_recipe,
    without_auxiliaries,
)
from gati.model.sound import LogMel
from gati.model.source import import_object, with_operators
from gati.model.text import TOKENIZER, read_tokenizer, with_padding
from gati.model.usable import check_one_label, check_weights, frozen, other_precision, without_compile
from gati.model.user_code import note_weights, unshared

_FORMS = (
    "torchvision:NAME, timm:NAME, package.module:callable, file.py:callable, a torch.export file (.pt2) or a "
    "folder with config.json and model.safetensors of a BERT classifier"
)
_SEED = 0


@dataclass(frozen=True)
class LoadedModel:
    """A network ready to use: on the CPU, in eval mode, no parameter requiring a gradient.

    `checkpoint_sha256` is the hash of the checkpoint file, or of the network's state without one. `note` is
    for the user, or empty. `preprocessing_from` is where preprocessing comes from: a `default`, the preset of
    a `published` network, whose users may prepare its inputs in another way, or they have `told` it.
    `channels_known` is False for a network without convolutions.
    """

    module: nn.Module
    source: str
    checkpoint_path: str | None
    checkpoint_sha256: str
    preprocessing: Preprocessing
    class_names: tuple[str, ...] | None = None
    note: str = ""
    preprocessing_from: Literal["default", "published", "told"] = "told"
    channels_known: bool = True


@contextmanager
def plain_defaults() -> Iterator[None]:
    """Tensors are made as float32 on the CPU, outside inference mode, whatever the program has set."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    elsewhere = torch.get_default_device().type != "cpu"
    try:
        with torch.inference_mode(False), torch.device("cpu") if elsewhere else nullcontext():
            yield
    finally:
        torch.set_default_dtype(dtype)


@plain_defaults()
def load_model(
    source: str | Path,
    checkpoint: str | Path | None = None,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    resize: int | None = None,
    class_names: Sequence[str] | None = None,
    sample_rate: int | None = None,
    seconds: float | None = None,
    tokenizer: str | Path | None = None,
    max_length: int | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
) -> LoadedModel:
    """Load a network and its weights. Nothing is ever downloaded.

    `source` is one of `torchvision:NAME`, `timm:NAME`, `package.module:callable`, `file.py:callable`, a
    `torch.export` file, or a folder with `config.json` and `model.safetensors` of a BERT classifier. A
    callable takes no arguments and returns an `nn.Module`, which may return class scores as `logits` among
    others (see `class_scores`); its attribute `preprocessing`, if any, is a `Preprocessing`. Class names are
    read from the network's `config.id2label`, as models of `transformers` have it; so is the id that fills up
    texts, and if an image processor is stored with the weights, preprocessing is as by that. Networks of
    torchvision, timm and `gati.zoo` get as many classes as the checkpoint's last layer has rows. Initial
    weights use a fixed seed; the caller's random state is not changed.

    `mean`, `std` (after division by 255) and `resize` (pixels of the shorter side, 0 for none) override the
    network's own values; `sample_rate` (hertz) and `seconds` those of its spectrogram front end, or add one.
    `tokenizer`, by default the `tokenizer.json` in the network's folder, encodes text, truncated to
    `max_length` tokens; `text_column` and `label_column` are the columns of tables.

    A network whose weights are all float16, bfloat16 or float64 is converted to float32; checkpoints of any
    precision are.

    **Raises:** `ModelError`; `CheckpointError` for the weights; `DataError` for the tokenizer.
    """
    if not isinstance(source, str | os.PathLike):
        raise ModelError(
            f"the model is a {type(source).__name__}; name what makes it, as package.module:callable or "
            "file.py:callable: every command loads it again"
        )
    source = str(source)
    module, recipe, sha256, notes = _weighted(source, checkpoint)
    all_told = all(each is not None for each in (mean, std, resize))
    told = any(each is not None for each in (mean, std, resize, sample_rate, seconds))
    prepared = None if recipe.preprocessing or all_told else prepared_by_processor(module)
    if prepared is not None and not told:
        notes.append(prepared.note)
    module = giving_scores(frozen(module, source), may_change=not recipe.is_users)
    config = getattr(module, "config", None)
    channels = recipe.channels or _channels_of_convolution(module)
    known = recipe.preprocessing or (prepared.preprocessing if prepared is not None else None)
    preset = known or _identity(channels or 3)
    if prepared is not None and prepared.is_unknown:
        preset = dataclasses.replace(preset, unknown=True)
    preprocessing = _override(preset, mean, std, resize)
    preprocessing = _with_sound(preprocessing, sample_rate, seconds)
    preprocessing = _with_text(preprocessing, source, tokenizer, max_length, text_column, label_column)
    if preprocessing.text is not None:
        text = with_padding(preprocessing.text, _padding_in(config))
        preprocessing = dataclasses.replace(preprocessing, text=text)
    own = recipe.class_names or names_in_config(config)
    told_by_code = recipe.preprocessing is not None and not recipe.is_published
    return LoadedModel(
        module,
        lasting_source(source),
        None if checkpoint is None else str(absolute(Path(checkpoint))),
        sha256 or state_sha256(module),
        preprocessing,
        own if class_names is None else tuple(str(name) for name in class_names),
        "; ".join(notes),
        preprocessing_from="told" if told or told_by_code else "default" if known is None else "published",
        channels_known=known is not None or channels is not None,
    )


class _Weighted(NamedTuple):
    """A network in float32 with its weights, how it was built, the checkpoint's hash, and notes for the user.

    The hash is empty without a checkpoint.
    """

    module: nn.Module
    recipe: NetworkRecipe
    sha256: str
    notes: list[str]


def _weighted(source: str, checkpoint: str | Path | None) -> _Weighted:
    """Build the network, with as many classes as the checkpoint has if it is published, and load that."""
    recipe = _recipe(source)
    module = _build(source, recipe, None)
    notes: list[str] = []
    if precision := other_precision(module):
        module = module.float()
        notes.append(
            f"the weights of {source} are {precision}: the network runs in float32, which caches read"
        )
    state: dict[str, Tensor] = {}
    sha256 = ""
    if checkpoint is not None:
        state, sha256, note = load_checkpoint(checkpoint, module.state_dict())
        notes += [note] if note else []
    elif recipe.is_published:
        notes.append(f"no checkpoint given: the weights of {source} are random (seed {_SEED})")
    if recipe.is_users:
        module = unshared(module, sha256, source)
    if checkpoint is not None:
        if recipe.is_published:
            classes = _other_class_count(module, state)
            if classes is not None:
                module = _build(source, recipe, classes)
                recipe = dataclasses.replace(recipe, class_names=None)
            state = without_auxiliaries(module, fit_prefixes(state, module.state_dict()))
        apply_checkpoint(module, state, checkpoint)
    if recipe.is_users:
        note_weights(module, sha256)
    return _Weighted(module, recipe, sha256, notes)


def _recipe(source: str) -> NetworkRecipe:
    if source.startswith("torchvision:"):
        return torchvision_recipe(source.removeprefix("torchvision:"))
    if source.startswith("timm:"):
        return timm_recipe(source.removeprefix("timm:"))
    if is_folder(Path(source), "model", ModelError):
        return _folder_recipe(Path(source))
    if source.endswith(".pt2"):
        return _exported_recipe(Path(source))
    if ":" in source:
        return _callable_recipe(source)
    raise ModelError(f"unknown model {source!r}; write {_FORMS}")


def _exported_recipe(path: Path) -> NetworkRecipe:
    module, shape = load_exported(path)
    channels = (shape[1] if len(shape) == 4 else None) or 3
    return NetworkRecipe(lambda classes: module, channels=channels)


def _folder_recipe(folder: Path) -> NetworkRecipe:
    """A Hugging Face folder, weights included."""
    names = class_names_in(folder)
    return NetworkRecipe(lambda classes: SequenceClassifier.from_folder(folder), class_names=names)


def _callable_recipe(source: str) -> NetworkRecipe:
    from gati import zoo  # the zoo imports this room

    target = import_object(source, ModelError, "model")
    preset = getattr(target, "preprocessing", None)
    if preset is not None and not isinstance(preset, Preprocessing):
        raise ModelError(
            f"{source} has an attribute preprocessing of type {type(preset).__name__}; "
            "make it a gati.model.preprocess.Preprocessing"
        )
    if isinstance(target, nn.Module):
        return NetworkRecipe(lambda classes: target, preset, is_users=True)
    if not callable(target):
        raise ModelError(f"{source} is a {type(target).__name__}; name a callable that returns an nn.Module")
    known = next((preset for network, preset in zoo.PRESETS.items() if network is target), None)
    if known is not None:
        return NetworkRecipe(lambda classes: target(**classes_argument(classes)), known, is_published=True)
    required = _required_arguments(target)
    if required:
        raise ModelError(
            f"{source} needs arguments ({', '.join(required)}); name a callable without any, such as a "
            "function that fills them in"
        )
    return NetworkRecipe(lambda classes: target(), preset)


def _required_arguments(target: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return []
    positional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in positional]


def _build(source: str, recipe: NetworkRecipe, classes: int | None) -> nn.Module:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision's on initial weights, which concern training
        try:
            module = with_operators(lambda: _seeded(recipe, classes))
        except ModelError:
            raise
        except (Exception, SystemExit) as error:
            raise ModelError(f"building {source} failed ({one_line(error)}); fix that callable") from error
    if not isinstance(module, nn.Module):
        raise ModelError(f"{source} returned a {type(module).__name__}; return an nn.Module")
    module = without_compile(module)
    check_weights(module, source)
    check_one_label(getattr(module, "config", None), source)
    return module


def _seeded(recipe: NetworkRecipe, classes: int | None) -> nn.Module:
    torch.manual_seed(_SEED)
    return recipe.build(classes)


def _other_class_count(module: nn.Module, state: dict[str, Tensor]) -> int | None:
    """Return the rows of the checkpoint's last layer if it differs from the network's only in these."""
    layers = [
        (name, layer) for name, layer in module.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))
    ]
    if not layers:
        return None
    name, layer = layers[-1]
    fitted = fit_prefixes(state, module.state_dict())
    rows = fitted.get(f"{name}.weight")
    if rows is None or rows.shape[1:] != layer.weight.shape[1:] or len(rows) == len(layer.weight):
        return None
    return len(rows)


def _channels_of_convolution(module: nn.Module) -> int | None:
    return next((layer.in_channels for layer in module.modules() if isinstance(layer, nn.Conv2d)), None)


def _identity(channels: int) -> Preprocessing:
    return Preprocessing((0.0,) * channels, (1.0,) * channels, channels=channels)


def _padding_in(config: Any) -> int | None:
    """The padding id in the config of a network of `transformers`: some find the end of a text by it."""
    found = getattr(config, "pad_token_id", None)
    return found if type(found) is int and found >= 0 else None


def _override(
    preset: Preprocessing, mean: Sequence[float] | None, std: Sequence[float] | None, resize: int | None
) -> Preprocessing:
    changes: dict[str, Any] = {}
    if mean is not None:
        changes["mean"] = _per_channel(mean, preset.channels)
    if std is not None:
        changes["std"] = _per_channel(std, preset.channels)
    if changes or resize is not None:
        changes["unknown"] = False
    if resize == 0:
        changes.update(resize=None, crop=None, size=None)
    elif resize is not None:
        changes.update(resize=resize, crop=min(preset.crop or resize, resize), size=None)
    return dataclasses.replace(preset, **changes)


def _with_sound(preset: Preprocessing, sample_rate: int | None, seconds: float | None) -> Preprocessing:
    """Override the spectrogram front end, or add one. Raises `ModelError`."""
    if sample_rate is None and seconds is None:
        return preset
    if preset.sound is not None:
        changes: dict[str, Any] = {"sample_rate": sample_rate, "seconds": seconds}
        given = {name: value for name, value in changes.items() if value is not None}
        return dataclasses.replace(preset, sound=dataclasses.replace(preset.sound, **given))
    if sample_rate is None or seconds is None:
        raise ModelError("recordings need both --sample-rate and --seconds: the network has no defaults")
    return dataclasses.replace(preset, sound=LogMel(sample_rate, seconds))


def _with_text(
    preset: Preprocessing,
    source: str,
    tokenizer: str | Path | None,
    max_length: int | None,
    text_column: str | None,
    label_column: str | None,
) -> Preprocessing:
    """Add the given tokenizer, or the one in the network's folder. Raises `DataError`."""
    own = Path(source) / TOKENIZER
    if tokenizer is None and not own.is_file():
        if max_length is not None or text_column is not None or label_column is not None:
            raise DataError("--max-length, --text-column and --label-column go with --tokenizer FILE")
        return preset
    text = read_tokenizer(
        own if tokenizer is None else tokenizer,
        max_length=max_length,
        text_column=text_column,
        label_column=label_column,
    )
    return dataclasses.replace(preset, text=text)


def _per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    numbers = tuple(float(value) for value in values)
    return numbers * channels if len(numbers) == 1 else numbers
