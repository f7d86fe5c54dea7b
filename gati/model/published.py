"""Networks of torchvision and timm, with the preprocessing and the classes of their published weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gati.errors import ModelError
from gati.model.preprocess import INTERPOLATIONS, Preprocessing
from gati.model.source import import_timm, import_torchvision, near

_AUXILIARY = ("aux1", "aux2", "AuxLogits")


@dataclass(frozen=True)
class NetworkRecipe:
    """How to build a network: `build(num_classes)`, None meaning the network's own default.

    Others than published networks are built with their own number of classes only.
    """

    build: Callable[[int | None], nn.Module]
    preprocessing: Preprocessing | None = None
    class_names: tuple[str, ...] | None = None
    channels: int | None = None  # of its input, if known
    is_published: bool = False  # with the preprocessing of published weights, and as many classes as asked
    is_users: bool = False  # `build` returns the user's own object


def torchvision_recipe(name: str) -> NetworkRecipe:
    """How to build a classifier of torchvision. Raises `ModelError` if there is none of that name."""
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
        network: Any = models.get_model(name, weights=None, **classes_argument(classes))
        if hasattr(network, "transform_input"):  # torchvision turns it on with the weights it publishes
            network.transform_input = True
        built: nn.Module = network
        return built

    return NetworkRecipe(build, preprocessing, tuple(weights.meta["categories"]), is_published=True)


def timm_recipe(name: str) -> NetworkRecipe:
    """How to build a network of timm. Raises `ModelError` if there is none of that name."""
    timm = import_timm()
    if not timm.is_model(name):
        raise ModelError(f"timm has no model {name!r}{near(name, timm.list_models())}")
    config = timm.data.resolve_model_data_config(None, pretrained_cfg=_timm_config(timm, name), verbose=False)
    channels, height, width = config["input_size"]
    crop = int(min(height, width))
    side = int(crop / float(config["crop_pct"]))
    stretched = config["crop_mode"] == "squash"
    preprocessing = Preprocessing(
        mean=tuple(float(value) for value in config["mean"]),
        std=tuple(float(value) for value in config["std"]),
        resize=None if stretched else side,
        crop=crop,
        size=(side, side) if stretched else None,
        interpolation=_known_interpolation(config["interpolation"]),
        channels=int(channels),
    )

    def build(classes: int | None) -> nn.Module:
        network: nn.Module = timm.create_model(name, pretrained=False, **classes_argument(classes))
        if getattr(network, "num_classes", None) == 0:
            raise ModelError(
                f"timm:{name} returns features, not class scores; name a callable that returns "
                f"timm.create_model({name!r}, num_classes=...)"
            )
        return network

    return NetworkRecipe(build, preprocessing, _timm_names(timm, name), is_published=True)


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
    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError as error:  # about what comes after the dot
        raise ModelError(f"timm has no weights {name!r}{near(name, timm.list_pretrained())}") from error
    return {} if config is None else dict(config.to_dict())


def without_auxiliaries(network: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Remove auxiliary classifiers from `network`, and return `state` without their weights.

    They only run in training, so users leave them out, or with the number of classes they had. torchvision
    itself removes those of GoogLeNet when it loads published weights.
    """
    removed = [name for name in _AUXILIARY if getattr(network, name, None) is not None]
    for name in removed:
        setattr(network, name, None)
        network.aux_logits = False  # type: ignore[assignment]
    return {key: tensor for key, tensor in state.items() if key.partition(".")[0] not in removed}


def classes_argument(classes: int | None) -> dict[str, int]:
    """The argument for a number of classes; none for the network's own default."""
    return {} if classes is None else {"num_classes": classes}


def _known_interpolation(name: str) -> str:
    """Map other names to the nearest of ours: `lanczos` to bicubic, timm's `random` to bilinear."""
    return name if name in INTERPOLATIONS else {"lanczos": "bicubic"}.get(name, "bilinear")
