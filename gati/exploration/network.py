"""The base model of a cache library, loaded and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gati.errors import BackendError, LibraryError, ModelError
from gati.exploration.library import HiddenProbe, Library, NetworkProbe
from gati.exploration.state import gone
from gati.exploration.weights import check_same_weights
from gati.model.entry import INPUT_KIND
from gati.model.hooks import collect_hidden
from gati.model.lengths import with_lengths
from gati.model.load import load_model
from gati.model.packed import packed
from gati.model.preprocess import Preprocessing
from gati.model.segments import TracedModel, trace

_EXAMPLE_SEED = 0
_PROBED = 16  # classes
_PROBED_HIDDEN = 8  # values of each hidden output
_STRIDE = 2_654_435_761  # between them, modulo their number; a prime, so that no dimension is left out
# Differences between engines and devices due to rounding are below this share of the largest value.
ROUNDING = {"cpu": 1e-2, "cuda": 5e-2}


class Network(NamedTuple):
    """A base model as the user's code built it, and the same model traced; they share their weights."""

    module: nn.Module
    traced: TracedModel


def load_network(library: Library, device: torch.device) -> Network:
    """Load the base model on `device`; this runs the model's own code.

    **Raises:** `LibraryError` if the weights are not those the library was made from, or if the code has
    changed and computes a different result or other hidden outputs; `ModelError` naming the library if its
    network or checkpoint has moved; and as `load_model`.
    """
    manifest = library.manifest
    try:
        loaded = load_model(manifest.model_source, manifest.checkpoint_path)
    except ModelError as error:
        if (place := gone(manifest.model_source) or gone(manifest.checkpoint_path)) is None:
            raise
        raise ModelError(
            f"the library in {library.directory} was made from {place}, which is not there any more: put it "
            "back, or repeat the gati explore command of this library with its new place"
        ) from error
    check_same_weights(library, loaded.checkpoint_sha256)
    preprocessing = library.preprocessing
    tensors = preprocessing.tensors
    module = loaded.module if tensors is None else packed(loaded.module, tensors)
    module = module.to(device)
    example = example_for(module, preprocessing, manifest.input_shape, device)
    names = [block.name for block in manifest.blocks]
    traced = trace(module, example, names)
    devices = (device.type, manifest.profile.device.partition(":")[0])
    if manifest.probe is not None and computes_otherwise(
        manifest.probe, probe_of(Network(module, traced), example), devices
    ):
        raise LibraryError(
            f"{manifest.model_source} has the same weights as when the library in {library.directory} was "
            "made, but computes a different result: caches and certificates do not apply to it; restore its "
            "code, or run gati explore again with another --out"
        )
    return Network(module, with_lengths(traced, module, example, preprocessing))


def probe_of(network: Network, example: Tensor) -> NetworkProbe:
    """The network's scores and hidden outputs for the first input of `example_for`, from one forward pass."""
    x, traced = example[:1], network.traced
    blocks = [name for name in traced.blocks if traced.block_kinds[name] != INPUT_KIND]
    with torch.inference_mode(), collect_hidden(network.module, blocks) as hidden:
        scores = network.module(x.to(traced.device, copy=True))[0, :_PROBED]
        return NetworkProbe(
            input_sha256=hashlib.sha256(x.cpu().numpy().tobytes()).hexdigest(),
            scores=_plain(scores),
            hidden={name: _probe_of_hidden(hidden[name]) for name in blocks},
        )


def _probe_of_hidden(hidden: Tensor) -> HiddenProbe:
    values = hidden.flatten().double()
    at = [number * _STRIDE % len(values) for number in range(_PROBED_HIDDEN)]
    (scale,) = _plain(values.square().mean().sqrt()[None])
    return HiddenProbe(values=_plain(values[at]), scale=scale)


def _plain(values: Tensor) -> tuple[float, ...]:
    return tuple(values.double().cpu().nan_to_num().tolist())


def computes_otherwise(known: NetworkProbe, found: NetworkProbe, devices: Collection[str]) -> bool:
    """Whether anything differs by more than the rounding of these kinds of devices.

    False if the inputs differ, as with another version of NumPy.
    """
    if known.input_sha256 != found.input_sha256:
        return False
    rounding = max(ROUNDING[each] for each in devices)
    return _differ(known.scores, found.scores, rounding, 1.0) or any(
        _differ(known.hidden[name].values, found.hidden[name].values, rounding, known.hidden[name].scale)
        for name in known.hidden.keys() & found.hidden.keys()
    )


def answers_otherwise(known: npt.NDArray[np.int64], outputs: Tensor, device: str) -> bool:
    """Whether `outputs` [n, K] give any input another class than `known` [n], by more than rounding."""
    largest = outputs.amax(1)
    lacking = largest - outputs.gather(1, torch.from_numpy(known)[:, None])[:, 0]
    return not bool((lacking <= ROUNDING[device] * outputs.abs().amax(1)).all())


def _differ(known: Sequence[float], found: Sequence[float], rounding: float, scale: float) -> bool:
    """Whether values differ by more than rounding, a share of the largest one or of `scale`, if larger."""
    if len(known) != len(found):
        return True
    before, now = np.array(known), np.array(found)
    return bool(np.abs(before - now).max() > rounding * max(scale, np.abs(before).max()))


def example_of(preprocessing: Preprocessing, input_shape: tuple[int, ...]) -> Tensor:
    """Two inputs of noise, or of random values in the range of the network's arrays; the same everywhere."""
    if preprocessing.tensors is not None:
        return preprocessing.tensors.example()
    noise = np.random.RandomState(_EXAMPLE_SEED).standard_normal(
        (2, *input_shape)
    )  # RandomState is stable across versions
    return torch.from_numpy(noise.astype(np.float32))


def example_for(
    module: nn.Module, preprocessing: Preprocessing, input_shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """As `example_of`, on `device`; from 0 to 1, as pictures, if the network gives NaN for noise.

    So does one that takes the logarithm or the root of its pixels.
    """
    noise = example_of(preprocessing, input_shape).to(device)
    if preprocessing.tensors is not None or not _gives_nan(module, noise):
        return noise
    values = np.random.RandomState(_EXAMPLE_SEED).random_sample(tuple(noise.shape))
    return torch.from_numpy(values.astype(np.float32)).to(device)


@torch.inference_mode()
def _gives_nan(module: nn.Module, x: Tensor) -> bool:
    try:
        return bool(module(x.clone()).isnan().any())
    except Exception:  # of the user's code, which tracing tells
        return False


def traced_network(library: Library, devices: Collection[str] = ("cpu",)) -> TracedModel:
    """Load and trace the base model on the device that the library was measured on.

    Raises BackendError if that device is not of a kind in `devices`, and as `load_network`.
    """
    device = torch.device(library.manifest.profile.device)
    if device.type not in devices and device.type == "cpu":
        raise BackendError("this library was measured on the cpu; run gati explore again with --device cuda")
    if device.type not in devices:
        raise BackendError(
            "this library was measured on a GPU, but that backend runs on the cpu; use torch or cuda-graph"
        )
    return load_network(library, device).traced
