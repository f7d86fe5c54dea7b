"""What explore does before training: it prepares the network, data, splits, blocks and latencies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from gati.caches import reads_input
from gati.caches.tokens import of_any_length
from gati.costs.lengths import profile_at_lengths
from gati.documents import values_of
from gati.errors import BackendError, DataError, LibraryError
from gati.exploration.alike import warning_of_neighbours
from gati.exploration.augment import Augmentation, choose_augmentation
from gati.exploration.budget import Budget, Clock
from gati.exploration.candidates import Specification, Wanted, for_tokens, measured_costs, specify
from gati.exploration.feasible import TimeLimit
from gati.exploration.library import NetworkProbe
from gati.exploration.lookup_costs import lookup_seconds
from gati.exploration.measure import base_answers, selector_seconds
from gati.exploration.memory import spare_bytes
from gati.exploration.network import Network, answers_otherwise, computes_otherwise, example_of, probe_of
from gati.exploration.places import find_places
from gati.exploration.progress import Progress, told_if_long
from gati.exploration.splits import Inputs, content_hash, split_inputs
from gati.exploration.state import RunState
from gati.model.data import load_data
from gati.model.labels import (
    ClassNames,
    LabelledData,
    LabelMap,
    fit_labels,
    names_of_classes,
    read_class_names,
    read_label_map,
)
from gati.model.lengths import length_shares, with_lengths
from gati.model.load import LoadedModel
from gati.model.outputs import check_base_outputs, check_more_than_one_class, outputs_kind
from gati.model.packed import fit_tensors, fit_text
from gati.model.segments import TracedModel, trace
from gati.model.sequence import Data
from gati.types import BlockProfile, OutputsKind, Profile, Trial

_TRIED = 128  # inputs used to find allowed augmentations
_TRYING_SHARE, _MOST_TRIALS = 0.05, 9  # of a budget; answers to each of these inputs
_COMPARED = 32  # inputs, when a run is resumed
KEPT_PICTURES_BYTES = 1 << 30  # of decoded training images
_GREY = "--data are read as grey pictures: the network takes one channel"
_UNKNOWN = (
    "--data are preprocessed tensors, and how images become such tensors is not known: the library will take "
    "only tensors; give --mean, --std and --resize to use it with images"
)


class HeldOut(NamedTuple):
    """The base model's class of every held-out input, int64 [n]."""

    base_class: npt.NDArray[np.int64]
    outputs_kind: OutputsKind
    classes: int


class MeasuringTimes(NamedTuple):
    """Seconds of each kind of measurement, estimated to reserve time at the end of a budget."""

    held_out_s: float  # all held-out inputs through the base model
    selector_s: float  # choosing one trial's selector
    lookup_s: float  # the costs of one lookup, inline and overlapped

    def all_of(self, trials: int, lookups: int, passes: int) -> float:
        """Seconds for `trials` trials, `lookups` different lookups and `passes` over the held-out inputs."""
        return passes * 1.5 * self.held_out_s + trials * self.selector_s + lookups * self.lookup_s


@dataclass(frozen=True)
class Prepared:
    """What all training shares."""

    module: nn.Module  # the base model
    traced: TracedModel
    inputs: Inputs
    held_out: HeldOut
    profile: Profile
    specifications: tuple[Specification, ...]
    augmentation: Augmentation
    bold_augmentation: Augmentation  # where inputs are scarce: stronger changes teach more slowly
    device: torch.device
    expected: MeasuringTimes


@dataclass(frozen=True)
class PreparedModel(Prepared):
    """What `prepare` returns for a network that was just loaded, with its class names and labels."""

    loaded: LoadedModel
    class_names: tuple[str, ...] | None
    labels: npt.NDArray[np.int64] | None  # the network's class numbers of the held-out inputs
    probe: NetworkProbe


def resolve_device(name: str) -> torch.device:
    """Turn `cpu`, `cuda` or `cuda:1` into a device. Raises `BackendError` if it is not there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BackendError(f"unknown device {name!r}: choose cpu, cuda or cuda:INDEX") from error
    if device.type not in ("cpu", "cuda"):
        raise BackendError(f"device {name!r} is not supported: choose cpu, cuda or cuda:INDEX")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(
            "no CUDA device is available here: use --device cpu, or install the GPU build of torch"
        )
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise BackendError(
            f"device {name!r} is not available here: choose one from cuda:0 to cuda:{count - 1}"
        )
    return device


def fitted(loaded: LoadedModel, data: Any) -> tuple[LoadedModel, Data]:
    """Open the held-out data, and adapt the network to the arrays or texts in it.

    **Raises:** `DataError`; `ModelError` for arrays that the network does not take.
    """
    loaded, held = _opened(fit_text(loaded), data)
    if held.tensors is None:
        unknown = not (held.is_images or loaded.preprocessing_told or loaded.preprocessing.sound)
        return replace(loaded, preprocessing=replace(loaded.preprocessing, unknown=unknown)), held
    loaded = fit_tensors(loaded, held.tensors, "--data")
    lengths = length_shares(loaded.module, held.tensors, held)
    return replace(loaded, preprocessing=replace(loaded.preprocessing, lengths=lengths)), held


def _opened(loaded: LoadedModel, data: Any) -> tuple[LoadedModel, Data]:
    """Open the held-out data: as grey images if only that fits a network that does not tell its channels."""
    known, note = loaded.preprocessing, loaded.note
    try:
        held = load_data(data, known, what="--data")
        if loaded.channels_known or held.tensors is not None or _takes(loaded.module, held):
            return loaded, held
        if held.images(np.arange(1)).shape[1] > 1:
            note = "; ".join(filter(None, (note, _GREY)))
    except DataError:
        if loaded.channels_known:
            raise
    if len({*known.mean}) == len({*known.std}) == 1:
        grey = replace(known, mean=known.mean[:1], std=known.std[:1], channels=1)
        with suppress(DataError):
            held = load_data(data, grey, what="--data")
            if _takes(loaded.module, held):
                return replace(loaded, preprocessing=grey, note=note), held
    return loaded, load_data(data, known, what="--data")


@torch.inference_mode()
def _takes(module: nn.Module, held: Data) -> bool:
    try:
        module(held.images(np.arange(min(2, len(held)))))
    except Exception:  # of the user's code, or of inputs that it does not take
        return False
    return True


def prepare(
    loaded: LoadedModel,
    held: Data,
    train_data: Any | None,
    *,
    blocks: str | None,
    asked: Wanted,
    device: torch.device,
    seed: int,
    state: RunState,
    progress: Progress,
    unique: bool = False,
    class_names: ClassNames | None = None,
    label_map: LabelMap | None = None,
    companions: Sequence[str] = (),
    check: Callable[[LoadedModel, Data, int, Sequence[str] | None], None] | None = None,
    clock: Clock = time.monotonic,
    budget: Budget | None = None,
) -> PreparedModel:
    """Check model and data, measure the base model and untrained lookups, and skip what cannot pay off.

    `loaded` and `held` are the results of `fitted`. `companions` are variants that also read the input; they
    have no specification. `check` looks at the held-out inputs and the classes before any are answered.

    **Raises:** `DataError` if `budget` does not suffice to measure and train anything; and as `explore`.
    """
    more = None if train_data is None else load_data(train_data, loaded.preprocessing, what="--train-data")
    given = {"--data": held} if more is None else {"--data": held, "--train-data": more}
    with told_if_long(progress, f"reading {' and '.join(given)}, to find copies"):
        inputs = split_inputs(held, more, seed, unique=unique)
        contents = {option: content_hash(data) for option, data in given.items()}
    stored = state.costs()
    if stored is not None:
        _check_same_inputs(stored.get("contents", contents), contents)
        _check_same_split(stored.get("split", ""), inputs, held, state)
    module = loaded.module.to(device)
    tensors = loaded.preprocessing.tensors
    example = (inputs.held_out.images(np.arange(2)) if tensors is None else tensors.example()).to(device)
    places = find_places(module, blocks, example, asked.variants, companions)
    traced = trace(module, example, places.names)
    asked = for_tokens(asked, traced, tensors)
    if not all(map(of_any_length, (*asked.variants, *companions))):  # some variants support one length only
        loaded = replace(loaded, preprocessing=replace(loaded.preprocessing, lengths=()))
    probe = probe_of(Network(module, traced), example_of(loaded.preprocessing, traced.input_shape).to(device))
    if stored is not None and "probe" in stored:
        known = NetworkProbe.from_values(stored["probe"], str(state.directory))
        if computes_otherwise(known, probe, (device.type,)):
            raise _other_network()
        probe = known
    traced = with_lengths(traced, module, example, loaded.preprocessing)
    named, labelled = _name_classes(loaded, held, traced.classes, class_names, label_map)
    rows = inputs.record.rows
    labels = None if labelled.data.labels is None else labelled.data.labels[rows]
    unknown = _UNKNOWN if loaded.preprocessing.unknown else ""
    for note in (places.note, *inputs.notes, labelled.note, warning_of_neighbours(held), unknown):
        if note:
            progress.note(note)
    inputs.train.keep(spare_bytes(KEPT_PICTURES_BYTES))
    if stored is None:
        if check is not None:
            check(loaded, inputs.held_out, traced.classes, named)
        limit = None if budget is None else TimeLimit(budget, len(inputs.held_out))
        began = clock()
        with told_if_long(progress, f"answering {len(inputs.held_out)} held-out inputs with the network"):
            outputs = check_base_outputs(base_answers(module, inputs.held_out, device, limit))
        held_out_s = clock() - began
        held_out = _answers(outputs)
        progress.note(f"measuring {len(places.names)} blocks and the cost of lookups on {device}")
        profile = profile_at_lengths(traced)
        costs = measured_costs(traced, module, profile.base_ms)
        specifications = specify(traced, module, profile, asked, costs)
        expected = MeasuringTimes(
            held_out_s,
            selector_seconds(outputs, inputs.split, seed, clock),
            lookup_seconds(traced, specifications, clock),
        )
        if limit is not None:
            _check_time_to_train(limit, specifications, held_out_s / len(outputs))
        state.write_costs(
            {
                "profile": asdict(profile),
                "specifications": [asdict(item) for item in specifications],
                "expected": expected,
                "contents": contents,
                "split": inputs.split_hash(),
                "probe": values_of(probe),
                "answers": {**held_out._asdict(), "base_class": held_out.base_class.tolist()},
            }
        )
        if budget is not None:
            budget.note()
    else:
        profile, specifications, expected = _from_stored(stored)
        held_out = _answers_before(stored, module, inputs.held_out, device)
    tried = inputs_to_try(held_out_s=expected.held_out_s, inputs=len(inputs.held_out), budget=budget)
    plain, bold = choose_augmentations(inputs, module, device, state, tried)
    return PreparedModel(
        module,
        traced,
        inputs,
        held_out,
        profile,
        specifications,
        plain,
        bold,
        device,
        expected,
        loaded,
        named,
        labels,
        probe,
    )


def _check_same_inputs(before: dict[str, str], now: dict[str, str]) -> None:
    """Refuse other inputs than the exploration began with: it may have trained on what is now held out."""
    for option in sorted(before.keys() | now.keys()):
        if before.get(option) != now.get(option):
            raise DataError(
                f"the inputs of {option}, or their order, have changed since this exploration began: "
                "restore them, or choose another --out"
            )


def _check_same_split(before: str, inputs: Inputs, held: Data, state: RunState) -> None:
    """Refuse another split of the same inputs, by another version: it trained on what would certify now.

    Versions that stored no hash, "", split inputs without copies in the same way.
    """
    same = before == inputs.split_hash() if before else len(np.unique(held.identities)) == len(held)
    if not same:
        raise LibraryError(
            "this exploration began with another version of Gati, which split copies among the inputs of "
            f"--data differently: choose another --out, or delete {state.directory} to start again"
        )


def _other_network() -> LibraryError:
    """Outcomes of exits that are finished are of the hidden outputs and answers that the network had."""
    return LibraryError(
        "the network has the same weights as when this exploration began, but computes a different "
        "result: restore its code, or choose another --out"
    )


def _check_time_to_train(limit: TimeLimit, specifications: Sequence[Specification], input_s: float) -> None:
    """Raise `DataError` if measurements have left too little time; exits alone must be measured, too."""
    trained = [item.trial.variant for item in specifications if item.trial.status == "trained"]
    if trained:
        limit.check_training(input_s, measured=0 if any(map(reads_input, trained)) else limit.count)


def inputs_to_try(*, held_out_s: float, inputs: int, budget: Budget | None) -> int:
    """On how many inputs to try augmentations: fewer if the network is slow for the budget.

    `held_out_s` is the time of its answers to `inputs` inputs.
    """
    if budget is None or budget.budget_s is None or held_out_s <= 0:
        return _TRIED
    affordable = _TRYING_SHARE * budget.budget_s / (_MOST_TRIALS * held_out_s / inputs)
    return min(_TRIED, int(affordable))


def choose_augmentations(
    inputs: Inputs, module: torch.nn.Module, device: torch.device, state: RunState, most: int
) -> tuple[Augmentation, Augmentation]:
    """The augmentations for exits and for students; none if the training inputs are not images.

    They are tried on at most `most` inputs; on less than 16, there are none. A resumed run has the same.
    """
    if not inputs.train.is_images or not most:
        return Augmentation(), Augmentation()
    stored = state.costs() or {}
    if "augmentation" in stored:
        bold = Augmentation(*stored["augmentation"])
    else:
        # those of a folder are sorted by class, and a mirrored 0 is a 0
        tried = np.random.default_rng(0).permutation(len(inputs.train))[:most]
        sample = inputs.train.images(np.sort(tried)).to(device)
        bold = choose_augmentation(module, sample, bold=True)
        state.write_costs({**stored, "augmentation": bold})
    return bold._replace(least_side=1.0, light=0.0), bold


def _name_classes(
    loaded: LoadedModel,
    held: Data,
    classes: int,
    class_names: ClassNames | None,
    label_map: LabelMap | None,
) -> tuple[tuple[str, ...] | None, LabelledData]:
    mapped = None if label_map is None else read_label_map(label_map, classes)
    given = loaded.class_names if class_names is None else read_class_names(class_names, classes)
    named = names_of_classes(classes, given, held, mapped)
    return named, fit_labels(held, classes, named, mapped)


def _answers(outputs: torch.Tensor) -> HeldOut:
    base_class = outputs.argmax(1).numpy()
    check_more_than_one_class(base_class, "--data")
    return HeldOut(base_class, outputs_kind(outputs), outputs.shape[1])


def _answers_before(
    stored: dict[str, Any], module: torch.nn.Module, held: Data, device: torch.device
) -> HeldOut:
    """The answers of the run that was interrupted, a few of them compared; an older Gati kept none."""
    if "answers" not in stored:
        return _answers(base_answers(module, held, device))
    found = HeldOut(**stored["answers"])
    classes = np.array(found.base_class, dtype=np.int64)
    few = np.linspace(0, len(held) - 1, _COMPARED).astype(np.int64)
    if answers_otherwise(classes[few], base_answers(module, held.subset(few), device), device.type):
        raise _other_network()
    return found._replace(base_class=classes)


def _from_stored(stored: dict[str, Any]) -> tuple[Profile, tuple[Specification, ...], MeasuringTimes]:
    blocks = tuple(
        BlockProfile(**{**block, "output_shape": tuple(block["output_shape"])})
        for block in stored["profile"]["blocks"]
    )
    profile = replace(Profile(**{**stored["profile"], "blocks": ()}), blocks=blocks)
    specifications = tuple(
        Specification(Trial(**item["trial"]), tuple(item["hidden_shape"]))
        for item in stored["specifications"]
    )
    return profile, specifications, MeasuringTimes(*stored["expected"])
