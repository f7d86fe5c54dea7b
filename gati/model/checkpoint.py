"""Loading trained weights without running code from the file.

Data flow: **file** -> *load_checkpoint* -> **state dict, unwrapped** -> *apply_checkpoint* -> **network**.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from gati.errors import CheckpointError, one_line
from gati.model.bindings import storage

_CONTAINERS = (  # the usual names: others count only if what is under these does not fit
    "state_dict", "model_state_dict", "model", "net", "network", "state_dict_ema", "model_ema", "ema"
)  # fmt: skip
_OPTIMIZER = "optim"  # its moments have the names and shapes of the weights in some files
_COMPILED = "_orig_mod."
_PREFIXES = ("module.", "model.", _COMPILED, "net.")
_AVERAGED = "n_averaged"  # of torch.optim.swa_utils.AveragedModel
_COUNT = "num_batches_tracked"  # files older than torch 0.4.1 lack it, and inference does not read it
_LISTED_KEYS = 5
_DEEPEST = 5  # levels of mappings in each other


class Checkpoint(NamedTuple):
    """The weights in a file, and its sha256; `note` says which weights of several were taken, or is empty."""

    state: dict[str, Tensor]
    sha256: str
    note: str


def load_checkpoint(path: str | Path, wanted: Mapping[str, Any] | None = None) -> Checkpoint:
    """Read the state dict in a file.

    `.safetensors` files are read by safetensors, all others by `torch.load(weights_only=True)`. The state may
    be inside other mappings, such as `state_dict` or `model`. If several hold tensors, that with the most
    keys of `wanted`, the network's state, is taken, the first of these. If none holds any of these keys, but
    all of them under a prefix, as in a LightningModule, what is under it is taken. Mappings of any other name
    are looked into only if nothing fits otherwise. Tensors are on the CPU.

    **Raises:** `CheckpointError` for a missing or damaged file, another format, one that needs unpickling,
    one that is written meanwhile, or several mappings of unusual names that fit.
    """
    path = Path(path)
    if os.path.isdir(path):
        raise CheckpointError(f"checkpoint {path} is a folder; give the file with the weights inside it")
    try:
        written = _last_written(path)
        with path.open("rb") as handle:
            sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"no checkpoint at {path}; check the path") from error
    except OSError as error:
        raise CheckpointError(
            f"cannot read checkpoint {path}: {error.strerror}; check its permissions"
        ) from error
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    if _last_written(path) != written:  # the hash would be that of other weights
        raise CheckpointError(
            f"checkpoint {path} was written while it was read: run the command again once it is complete"
        )
    state, note = _unwrap(content, path, wanted or {})
    return Checkpoint(state, sha256, note)


def _last_written(path: Path) -> tuple[int, ...] | None:
    """What changes when a file is written or replaced; None while there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def apply_checkpoint(module: nn.Module, state: Mapping[str, Tensor], path: str | Path) -> None:
    """Load `state` into `module`; all names and shapes must match.

    A prefix that all keys of the file have and none of the network's (`module.`, `model.`, `_orig_mod.`) is
    removed. Of tensors that the network shares, one is enough: safetensors keeps only one. Older names count
    if the network's layers take them. `path` is for messages.

    **Raises:** `CheckpointError` naming the first missing and unexpected keys, or the first wrong shape, or
    why the network's own code does not load them.
    """
    wanted = module.state_dict()
    state = fit_prefixes(state, wanted)
    given = {_memory_of(tensor) for key, tensor in wanted.items() if key in state}
    missing = [
        key
        for key, tensor in wanted.items()
        if key not in state
        and isinstance(tensor, Tensor)
        and not key.endswith(_COUNT)
        and _memory_of(tensor) not in given
    ]
    unexpected = [key for key in state if key not in wanted]
    if missing and unexpected:  # in place of each other, perhaps
        missing, unexpected = _load_older(module, state, missing, unexpected)
        if not missing and not unexpected:
            return
    if missing or unexpected:
        raise CheckpointError(
            f"checkpoint {path} does not fit the network: {_counted('missing', missing)}, "
            f"{_counted('unexpected', unexpected)}; give the checkpoint of this architecture"
        )
    for key, tensor in state.items():
        if tensor.shape != wanted[key].shape:
            raise CheckpointError(
                f"checkpoint {path} does not fit the network: {key} has shape {list(tensor.shape)} in the "
                f"file and {list(wanted[key].shape)} in the network; give the checkpoint of this architecture"
            )
    try:
        with suppress(Exception):  # of layers that ask for the version of their weights
            module.load_state_dict(OrderedDict(state), strict=False)
            return
        current = OrderedDict(state)
        current._metadata = getattr(wanted, "_metadata", None)  # type: ignore[attr-defined]
        module.load_state_dict(current, strict=False)
    except Exception as error:  # of the network's code
        raise CheckpointError(
            f"checkpoint {path} cannot be loaded into the network ({one_line(error)}); give the checkpoint "
            "of this architecture"
        ) from error


def _load_older(
    module: nn.Module, state: Mapping[str, Tensor], missing: list[str], unexpected: list[str]
) -> tuple[list[str], list[str]]:
    """Load a state whose names may be older; return what of `missing` and `unexpected` no layer has taken.

    Layers take the names of their older versions, as those of torchvision's ViT and weight normalisation do.
    If any are left, the network has the weights that it had before.
    """
    before = module.state_dict()
    kept = [(tensor, tensor.clone()) for tensor in before.values() if isinstance(tensor, Tensor)]
    writes = {key: before[key]._version for key in missing}
    # of the network's code, or about a shape: the names already say that it does not fit
    with suppress(Exception):
        unknown = module.load_state_dict(OrderedDict(state), strict=False).unexpected_keys
        after = module.state_dict()
        missing = [
            key
            for key in missing
            if _memory_of(after.get(key)) == _memory_of(before[key]) and before[key]._version == writes[key]
        ]
        unexpected = [key for key in unexpected if key in unknown]
    if missing or unexpected:
        for tensor, value in kept:
            if not torch.equal(tensor, value):  # nothing can be written to expanded ones
                tensor.copy_(value)
    return missing, unexpected


def _memory_of(tensor: Any) -> tuple[Any, ...]:
    """What is equal for two tensors of a state that share all of their memory."""
    if not isinstance(tensor, Tensor):  # what a module's `get_extra_state` returns
        return (id(tensor),)
    layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return (storage(tensor), *layout)


def fit_prefixes(state: Mapping[str, Tensor], wanted: Mapping[str, Any]) -> dict[str, Tensor]:
    """Remove wrappers' prefixes that all keys of `state` have, but not all of `wanted`.

    `torch.compile` wraps modules at any depth. The counter that torch's averages of weights have next to
    them is left out.
    """
    compiled = any(_COMPILED in key for key in wanted)
    fitted = {
        key if compiled else key.replace(_COMPILED, ""): tensor
        for key, tensor in state.items()
        if key != _AVERAGED or key in wanted
    }
    while fitted and not fitted.keys() & wanted.keys():
        prefix = next((p for p in _PREFIXES if all(key.startswith(p) for key in fitted)), None)
        if prefix is None or all(key.startswith(prefix) for key in wanted):
            break
        fitted = {key.removeprefix(prefix): tensor for key, tensor in fitted.items()}
    return fitted


def state_sha256(module: nn.Module) -> str:
    """Return the sha256 of a network's state: names, dtypes, shapes and values of its tensors."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if not isinstance(tensor, Tensor):  # what a module's `get_extra_state` returns
            continue
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path, device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, "safetensors file", error) from error


def _read_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of pickle protocols before it refuses
            # The arguments of the training, plain values. For good: undoing it would disturb other threads.
            torch.serialization.add_safe_globals([argparse.Namespace])
            return torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        if _is_pickle(path) and ("Unsupported" in str(error) or "GLOBAL" in str(error)):
            raise _refused(path) from error
        raise _damaged(path, "torch checkpoint", error) from error
    except RuntimeError as error:
        if "TorchScript" in str(error):
            raise _refused(path) from error
        raise _damaged(path, "torch checkpoint", error) from error
    except Exception as error:  # torch raises many types for damaged files
        raise _damaged(path, "torch checkpoint", error) from error


def _is_pickle(path: Path) -> bool:
    """Whether a file is a pickle, bare or in torch's zip; others fail with the same error."""
    with path.open("rb") as handle:
        return handle.read(2).startswith((b"\x80", b"PK"))


def _refused(path: Path) -> CheckpointError:
    return CheckpointError(
        f"refused checkpoint {path}: it needs unpickling, which can run any code; "
        "save the state dict alone (torch.save(model.state_dict(), ...)) or as .safetensors"
    )


def _damaged(path: Path, kind: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path} is not a readable {kind} ({type(error).__name__}): damaged, truncated or of "
        "another format; copy it again"
    )


class _Found(NamedTuple):
    """A state dict in a file, its name there, and how many tensors next to it are left out."""

    name: str
    state: dict[str, Tensor]
    others: int = 0


def _unwrap(content: Any, path: Path, wanted: Mapping[str, Any]) -> tuple[dict[str, Tensor], str]:
    """The state dict in a file's content, and a note if others fit as well, or something is left out."""
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"checkpoint {path} holds a {type(content).__name__}, not a state dict; "
            "save it with torch.save(model.state_dict(), ...)"
        )
    found = list(_states_in(content))
    if not found:
        shown = ", ".join([str(key) for key in content][:_LISTED_KEYS]) or "none"
        raise CheckpointError(
            f"checkpoint {path} holds no weights (keys: {shown}); give a file that holds a state dict"
        )
    fitting = _fitting([each for each in found if _is_usual(each.name)], wanted)
    note = ""
    if not fitting:
        fitting = _fitting([each for each in found if not _is_usual(each.name)], wanted)
        if len(fitting) > 1:
            names = ", ".join(each.name for each in fitting)
            raise CheckpointError(f"checkpoint {path} has weights under {names}: save the network's alone")
        note = f"{path}: the weights under {fitting[0].name} are used" if fitting else ""
    chosen = fitting[0] if fitting else max(found, key=lambda each: len(each.state))
    if len(fitting) > 1:
        names = ", ".join(each.name or "no name" for each in fitting)
        note = f"{path} has weights under {names}: the first are used; save others alone"
    elif chosen.others:
        note = f"{path} has more than the network's weights: those under {chosen.name} are used"
    return chosen.state, note


def _fitting(found: Sequence[_Found], wanted: Mapping[str, Any]) -> list[_Found]:
    """Those with the most of the network's weights, or, if none has any, whole networks inside them."""
    fits = [len(fit_prefixes(each.state, wanted).keys() & wanted.keys()) for each in found]
    fitting = [each for each, fit in zip(found, fits, strict=True) if fit == max(fits) > 0]
    inside = [] if fitting else [each for state in found for each in _networks_in(state, wanted)]
    return fitting or [each for each in inside if _has_shapes(each.state, wanted)] or inside


def _is_usual(name: str) -> bool:
    return not name or all(part in _CONTAINERS for part in name.split("."))


def _states_in(content: Any, name: str = "", depth: int = _DEEPEST) -> Iterator[_Found]:
    """The tensors in each mapping inside, innermost first, and those of `content` itself, with their names.

    Containers come first: files of trainings often hold a tensor next to them, such as the best accuracy.
    States of optimizers are left out: their names begin so, or numbers are their keys.
    """
    if not isinstance(content, Mapping) or depth == 0:
        return
    for key in dict.fromkeys((*_CONTAINERS, *content)):
        if isinstance(key, str) and not key.startswith(_OPTIMIZER):
            yield from _states_in(content.get(key), f"{name}.{key}" if name else key, depth - 1)
    own = {str(key): value for key, value in content.items() if isinstance(value, Tensor)}
    if own:
        yield _Found(name, own)


def _networks_in(found: _Found, wanted: Mapping[str, Any]) -> Iterator[_Found]:
    """The whole network under each prefix of a state that has more, as that of a LightningModule.

    There, the weights of a loss or an average of the network's are next to those of the network. What has
    other weights as well is another network, such as a deeper one that taught this one.
    """
    needed = [
        key for key, tensor in wanted.items() if isinstance(tensor, Tensor) and not key.endswith(_COUNT)
    ]
    fitted = fit_prefixes(found.state, wanted)
    for key in fitted if needed else ():
        prefix = key.removesuffix(needed[0])
        if prefix.endswith("."):
            part = {each.removeprefix(prefix): fitted[each] for each in fitted if each.startswith(prefix)}
            if set(needed) <= part.keys() <= wanted.keys():
                inside = f"{found.name}.{prefix[:-1]}" if found.name else prefix[:-1]
                yield _Found(inside, part, len(fitted) - len(part))


def _has_shapes(state: Mapping[str, Tensor], wanted: Mapping[str, Any]) -> bool:
    """Whether most shapes are the network's: the number of classes, and so the last layer's, may differ."""
    same = sum(tensor.shape == getattr(wanted[key], "shape", None) for key, tensor in state.items())
    return same * 2 > len(state)


def _counted(word: str, keys: list[str]) -> str:
    if not keys:
        return f"no {word} key"
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"{word} key {keys[0]}{more}"
