"""Loading the network that the user's MODEL names.

Data flow: **source** -> *_build* -> **network, preprocessing** -> *checkpoint* -> **LoadedModel**.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gati.errors import DataError, ModelError, one_line
from gati.files import lasting_source
from gati.model.adapted import giving_scores
from gati.model.bert import SequenceClassifier, class_names_in
from gati.model.checkpoint import apply_checkpoint, fit_prefixes, load_checkpoint, state_sha256
from gati.model.exported import load_exported
from gati.model.labels import names_in_config
from gati.model.preprocess import INTERPOLATIONS, Preprocessing
from gati.model.sound import LogMel
from gati.model.source import import_object, import_timm, import_torchvision, near, with_operators
from gati.model.text import TOKENIZER, read_tokenizer
from gati.model.usable import check_weights, frozen, other_precision, without_compile

_FORMS = (
    "torchvision:NAME, timm:NAME, package.module:callable, file.py:callable, a torch.export file (.pt2) or a "
    "folder with config.json and model.safetensors of a BERT classifier"
)
_SEED = 0


@dataclass(frozen=True)
class LoadedModel:
    """A network ready to use: on the CPU, in eval mode, no parameter requiring a gradient.

    `checkpoint_sha256` is the hash of the checkpoint file, or of the network's state without one. `note` is
    for the user, or empty. `preprocessing_known` is False if preprocessing is only a default.
    `preprocessing_told` is False also if it is the preset of a published network: users may prepare its
    inputs in another way. `channels_known` is False for a network without convolutions.
    """

    module: nn.Module
    source: str
    checkpoint_path: str | None
    checkpoint_sha256: str
    preprocessing: Preprocessing
    class_names: tuple[str, ...] | None = None
    note: str = ""
    preprocessing_known: bool = True
    preprocessing_told: bool = True
    channels_known: bool = True


@dataclass(frozen=True)
class _Recipe:
    """How to build a network: `build(num_classes)`, None meaning the network's own default."""

    build: Callable[[int | None], nn.Module]
    preprocessing: Preprocessing | None = None
    class_names: tuple[str, ...] | None = None
    any_classes: bool = False  # whether `build` accepts a number
    channels: int | None = None  # of its input, if known
    is_published: bool = False  # and its preprocessing that of the published weights
    is_users: bool = False  # `build` returns the user's own object


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
    read from the network's `config.id2label`, as models of `transformers` have it. Networks of
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
    recipe = _recipe(source)
    module = _build(source, recipe, None)
    precision = other_precision(module)
    if precision:
        module = module.float()
    state, sha256 = (None, "") if checkpoint is None else load_checkpoint(checkpoint, module.state_dict())
    if state is not None:
        classes = _other_class_count(module, state) if recipe.any_classes else None
        if classes is not None:
            module = _build(source, recipe, classes)
            recipe = dataclasses.replace(recipe, class_names=None)
        apply_checkpoint(module, state, checkpoint or "")
    module = giving_scores(frozen(module, source), may_change=not recipe.is_users)
    channels = recipe.channels or _channels_of_convolution(module)
    preprocessing = _override(recipe.preprocessing or _identity(channels or 3), mean, std, resize)
    preprocessing = _with_sound(preprocessing, sample_rate, seconds)
    preprocessing = _with_text(preprocessing, source, tokenizer, max_length, text_column, label_column)
    own = recipe.class_names or names_in_config(getattr(module, "config", None))
    named = own if class_names is None else tuple(str(name) for name in class_names)
    note = ""
    if state is None and recipe.any_classes:
        note = f"no checkpoint given: the weights of {source} are random (seed {_SEED})"
    if precision:
        note = f"the weights of {source} are {precision}: the network runs in float32, which caches read"
    path = None if checkpoint is None else str(Path(checkpoint).resolve())
    weights = sha256 or state_sha256(module)
    given = any(each is not None for each in (mean, std, resize, sample_rate, seconds))
    known = given or recipe.preprocessing is not None
    told = given or (known and not recipe.is_published)
    return LoadedModel(
        module,
        lasting_source(source),
        path,
        weights,
        preprocessing,
        named,
        note,
        preprocessing_known=known,
        preprocessing_told=told,
        channels_known=recipe.preprocessing is not None or channels is not None,
    )


def _recipe(source: str) -> _Recipe:
    if source.startswith("torchvision:"):
        return _torchvision_recipe(source.removeprefix("torchvision:"))
    if source.startswith("timm:"):
        return _timm_recipe(source.removeprefix("timm:"))
    if Path(source).is_dir():
        return _folder_recipe(Path(source))
    if source.endswith(".pt2"):
        return _exported_recipe(Path(source))
    if ":" in source:
        return _callable_recipe(source)
    raise ModelError(f"unknown model {source!r}; write {_FORMS}")


def _exported_recipe(path: Path) -> _Recipe:
    module, shape = load_exported(path)
    channels = (shape[1] if len(shape) == 4 else None) or 3
    return _Recipe(lambda classes: module, channels=channels)


def _folder_recipe(folder: Path) -> _Recipe:
    """A Hugging Face folder, weights included."""
    names = class_names_in(folder)
    return _Recipe(lambda classes: SequenceClassifier.from_folder(folder), class_names=names)


def _torchvision_recipe(name: str) -> _Recipe:
    models = import_torchvision().models
    known = models.list_models(module=models)
    if name not in known:
        raise ModelError(f"torchvision has no classifier {name!r}{near(name, known)}")
    weights = models.get_model_weights(name).DEFAULT
    transforms = weights.transforms()
    preprocessing = Preprocessing(
        mean=tuple(float(value) for value in transforms.mean),
        std=tuple(float(value) for value in transforms.std),
        resize=int(transforms.resize_size[0]),
        crop=int(transforms.crop_size[0]),
        interpolation=_known_interpolation(transforms.interpolation.value),
    )

    def build(classes: int | None) -> nn.Module:
        network: Any = models.get_model(name, weights=None, **_classes_argument(classes))
        if hasattr(network, "transform_input"):  # torchvision turns it on with the weights it publishes
            network.transform_input = True
        built: nn.Module = network
        return built

    return _Recipe(
        build, preprocessing, tuple(weights.meta["categories"]), any_classes=True, is_published=True
    )


def _timm_recipe(name: str) -> _Recipe:
    timm = import_timm()
    if not timm.is_model(name):
        raise ModelError(f"timm has no model {name!r}{near(name, timm.list_models())}")
    config = timm.data.resolve_model_data_config(None, pretrained_cfg=_timm_config(timm, name), verbose=False)
    channels, height, width = config["input_size"]
    crop = int(min(height, width))
    preprocessing = Preprocessing(
        mean=tuple(float(value) for value in config["mean"]),
        std=tuple(float(value) for value in config["std"]),
        resize=int(crop / float(config["crop_pct"])),
        crop=crop,
        interpolation=_known_interpolation(config["interpolation"]),
        channels=int(channels),
    )

    def build(classes: int | None) -> nn.Module:
        network: nn.Module = timm.create_model(name, pretrained=False, **_classes_argument(classes))
        return network

    return _Recipe(build, preprocessing, _timm_names(timm, name), any_classes=True, is_published=True)


def _timm_names(timm: Any, name: str) -> tuple[str, ...] | None:
    """timm's names of ImageNet's classes, if the network was trained on them."""
    config = _timm_config(timm, name)
    if not hasattr(timm.data, "ImageNetInfo"):  # before timm 0.9
        return None
    subset = timm.data.infer_imagenet_subset(config) if config else None
    if subset is None:
        return None
    known = timm.data.ImageNetInfo(subset)
    return tuple(known.index_to_description(index) for index in range(known.num_classes()))


def _timm_config(timm: Any, name: str) -> dict[str, Any]:
    config = timm.get_pretrained_cfg(name)
    return {} if config is None else dict(config.to_dict())


def _callable_recipe(source: str) -> _Recipe:
    from gati import zoo  # the zoo imports this room

    target = import_object(source, ModelError, "model")
    preset = getattr(target, "preprocessing", None)
    if preset is not None and not isinstance(preset, Preprocessing):
        raise ModelError(
            f"{source} has an attribute preprocessing of type {type(preset).__name__}; "
            "make it a gati.model.preprocess.Preprocessing"
        )
    if isinstance(target, nn.Module):
        return _Recipe(lambda classes: target, preset, is_users=True)
    if not callable(target):
        raise ModelError(f"{source} is a {type(target).__name__}; name a callable that returns an nn.Module")
    if target in zoo.PRESETS:
        return _Recipe(
            lambda classes: target(**_classes_argument(classes)),
            zoo.PRESETS[target],
            any_classes=True,
            is_published=True,
        )
    required = _required_arguments(target)
    if required:
        raise ModelError(
            f"{source} needs arguments ({', '.join(required)}); name a callable without any, such as a "
            "function that fills them in"
        )
    return _Recipe(lambda classes: target(), preset)


def _required_arguments(target: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # builtins without a signature
        return []
    positional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in positional]


def _classes_argument(classes: int | None) -> dict[str, int]:
    return {} if classes is None else {"num_classes": classes}


def _known_interpolation(name: str) -> str:
    """Map other names to the nearest of ours: `lanczos` to bicubic, timm's `random` to bilinear."""
    return name if name in INTERPOLATIONS else {"lanczos": "bicubic"}.get(name, "bilinear")


def _build(source: str, recipe: _Recipe, classes: int | None) -> nn.Module:
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
    return module


def _seeded(recipe: _Recipe, classes: int | None) -> nn.Module:
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


def _override(
    preset: Preprocessing, mean: Sequence[float] | None, std: Sequence[float] | None, resize: int | None
) -> Preprocessing:
    changes: dict[str, Any] = {}
    if mean is not None:
        changes["mean"] = _per_channel(mean, preset.channels)
    if std is not None:
        changes["std"] = _per_channel(std, preset.channels)
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
