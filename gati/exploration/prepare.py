"""What explore does before training: it prepares the network, data, splits, blocks and latencies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from gati.caches import reads_input
from gati.caches.tokens import of_any_length
from gati.costs.lengths import profile_at_lengths
from gati.documents import values_of
from gati.errors import DataError, GatiError, LibraryError, StorageError
from gati.exploration.alike import warning_of_neighbours
from gati.exploration.augment import choose_augmentations
from gati.exploration.budget import Budget
from gati.exploration.candidates import Specification, Wanted, for_tokens, measured_costs, specify
from gati.exploration.companions import NamedNetwork, check_companions
from gati.exploration.feasible import TimeLimit
from gati.exploration.kept_answers import KeptAnswers
from gati.exploration.library import NetworkProbe
from gati.exploration.lookups import lookup_seconds
from gati.exploration.measure import base_answers, base_batches, selector_seconds
from gati.exploration.memory import is_lack_of_memory, spare_bytes
from gati.exploration.network import Network, answers_otherwise, computes_otherwise, example_for, probe_of
from gati.exploration.places import find_places
from gati.exploration.prepared import KEPT_PICTURES_BYTES, HeldOut, MeasuringTimes, PreparedModel
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
from gati.model.lengths import with_lengths
from gati.model.load import LoadedModel
from gati.model.outputs import check_base_outputs, check_more_than_one_class, outputs_kind
from gati.model.segments import TracedModel, trace
from gati.model.sequence import Data
from gati.types import BlockProfile, Profile, Trial

_COMPARED = 32  # inputs, when a run is resumed
_UNKNOWN = (
    "--data are preprocessed tensors, and how images become such tensors is not known: the library will take "
    "only tensors; give --mean, --std and --resize to use it with images"
)


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
    unique: bool,
    class_names: ClassNames | None,
    label_map: LabelMap | None,
    companions: Sequence[NamedNetwork],
    budget: Budget,
) -> PreparedModel:
    """Check model and data, measure the base model and untrained lookups, and skip what cannot pay off.

    `loaded` and `held` are the results of `fitted`. `companions` also read the input; they are checked before
    any input is answered, and have no specification.

    **Raises:** `DataError` if `budget` does not suffice to measure and train anything; and as `explore`.
    """
    more = None if train_data is None else load_data(train_data, loaded.preprocessing, what="--train-data")
    given = {"--data": held} if more is None else {"--data": held, "--train-data": more}
    with told_if_long(progress, f"reading {' and '.join(given)}, to find copies"):
        inputs = split_inputs(held, more, seed, unique=unique)
        contents = {option: content_hash(data) for option, data in given.items()}
    measured = _stored(state)
    if measured is not None:
        _check_same_inputs(measured.contents, contents)
        if measured.split != inputs.split_hash():  # it trained on what would certify now
            raise _another_version(state, "which split the inputs of --data differently")
    module = loaded.module.to(device)
    tensors = loaded.preprocessing.tensors
    example = (inputs.held_out.images(np.arange(2)) if tensors is None else tensors.example()).to(device)
    accompanying = [each.variant for each in companions]
    places = find_places(module, blocks, example, asked.variants, accompanying)
    traced = trace(module, example, places.names)
    asked = for_tokens(asked, traced, tensors)
    if not all(map(of_any_length, (*asked.variants, *accompanying))):  # some support one length only
        loaded = replace(loaded, preprocessing=replace(loaded.preprocessing, lengths=()))
    probed = example_for(module, loaded.preprocessing, traced.input_shape, device)
    probe = probe_of(Network(module, traced), probed)
    if measured is not None and computes_otherwise(measured.probe, probe, (device.type,)):
        raise _other_network()
    traced = with_lengths(traced, module, example, loaded.preprocessing)
    named, labelled = _name_classes(loaded, held, traced.classes, class_names, label_map)
    rows = inputs.record.rows
    labels = None if labelled.data.labels is None else labelled.data.labels[rows]
    unknown = _UNKNOWN if loaded.preprocessing.unknown else ""
    for note in (places.note, *inputs.notes, labelled.note, warning_of_neighbours(held), unknown):
        if note:
            progress.note(note)
    inputs.train.keep(spare_bytes(KEPT_PICTURES_BYTES))
    if measured is None:
        known = _Known(loaded, traced, inputs, contents, probe, named)
        measured = _measure(
            known, asked, companions, seed=seed, state=state, budget=budget, progress=progress
        )
    elif _answers_otherwise(measured.held_out.base_class, module, inputs.held_out, device):
        raise _other_network()
    tried = budget.inputs_to_try(measured.expected.held_out_s / len(inputs.held_out))
    plain, bold = choose_augmentations(inputs.train, module, device, state, tried)
    return PreparedModel(
        module,
        traced,
        inputs,
        measured.held_out,
        measured.profile,
        measured.specifications,
        plain,
        bold,
        device,
        measured.expected,
        loaded,
        named,
        labels,
        measured.probe,
    )


class _Known(NamedTuple):
    """What is known before the network answers its inputs; its module and `traced` are on the device."""

    loaded: LoadedModel
    traced: TracedModel
    inputs: Inputs
    contents: dict[str, str]  # hashes of all inputs, by option
    probe: NetworkProbe
    class_names: tuple[str, ...] | None


class _Measured(NamedTuple):
    """What is measured before training, and of what; a run that resumes reads it again."""

    contents: dict[str, str]
    split: str
    probe: NetworkProbe
    held_out: HeldOut
    profile: Profile
    specifications: tuple[Specification, ...]
    expected: MeasuringTimes

    def to_json(self) -> dict[str, Any]:
        """The values that `_stored` reads."""
        return {
            "profile": asdict(self.profile),
            "specifications": [asdict(item) for item in self.specifications],
            "expected": self.expected,
            "contents": self.contents,
            "split": self.split,
            "probe": values_of(self.probe),
            "answers": {**self.held_out._asdict(), "base_class": self.held_out.base_class.tolist()},
        }


def _measure(
    known: _Known,
    asked: Wanted,
    companions: Sequence[NamedNetwork],
    *,
    seed: int,
    state: RunState,
    budget: Budget,
    progress: Progress,
) -> _Measured:
    """Let the network answer the held-out inputs, measure what everything costs, and keep that in `state`."""
    loaded, traced, inputs, contents, probe, class_names = known
    module, held, device, split = loaded.module, inputs.held_out, traced.device, inputs.split_hash()
    identity = f"{sorted(contents.items())} {split} torch {torch.__version__}"
    kept = KeptAnswers(
        state,
        budget,
        hashlib.sha256(identity.encode()).hexdigest(),
        values_of(probe),
        lambda values: not computes_otherwise(_probe(values, state), probe, (device.type,)),
    )
    with _giving_up(state):
        check_companions(companions, loaded, held, traced.classes, class_names)
        outputs = _answered(module, held, device, kept, budget, progress)
        held_out = _answers(outputs)
        progress.note(f"measuring {len(traced.blocks)} blocks and the cost of lookups on {device}")
        profile = profile_at_lengths(traced)
        costs = measured_costs(traced, module, profile.base_ms)
        specifications = specify(traced, module, profile, asked, costs)
        expected = MeasuringTimes(
            kept.seconds,
            selector_seconds(outputs, inputs.split, seed, budget.clock),
            lookup_seconds(traced, specifications, budget.clock),
        )
        _check_time_to_train(budget, specifications, expected.held_out_s, len(outputs))
    measured = _Measured(contents, split, probe, held_out, profile, specifications, expected)
    state.write_costs(measured.to_json())
    kept.forget()
    budget.note()
    return measured


def _answered(
    module: nn.Module,
    held: Data,
    device: torch.device,
    kept: KeptAnswers,
    budget: Budget,
    progress: Progress,
) -> torch.Tensor:
    """The network's answers [n, K] to the held-out inputs, of which an interrupted run may have kept some.

    **Raises:** `ModelError` for answers that are no class scores; `DataError` if the time is too short.
    """
    if len(kept):
        if _answers_otherwise(kept.rows.argmax(1).numpy(), module, held, device):
            kept.forget()
        else:
            progress.note(f"{len(kept)} of {len(held)} held-out inputs are answered already")
    if len(kept) < len(held):
        rest = held.subset(np.arange(len(kept), len(held)))
        with told_if_long(progress, f"answering {len(rest)} held-out inputs with the network"):
            batches = base_batches(module, rest, device, TimeLimit(budget, len(rest)))
            kept.collect(map(_not_all_nan, batches))
    return check_base_outputs(kept.rows)


def _not_all_nan(outputs: torch.Tensor) -> torch.Tensor:
    """Raise `ModelError` if no answer of a batch is finite: there is no need to wait for the others."""
    return outputs if bool(torch.isfinite(outputs).all(1).any()) else check_base_outputs(outputs)


def _answers(outputs: torch.Tensor) -> HeldOut:
    base_class = outputs.argmax(1).numpy()
    check_more_than_one_class(base_class, "--data")
    return HeldOut(base_class, outputs_kind(outputs), outputs.shape[1])


def _check_time_to_train(
    budget: Budget, specifications: Sequence[Specification], held_out_s: float, inputs: int
) -> None:
    """Raise `DataError` if measurements have left too little time; exits alone must be measured, too."""
    trained = [item.trial.variant for item in specifications if item.trial.status == "trained"]
    if trained:
        measured = 0 if any(map(reads_input, trained)) else inputs
        TimeLimit(budget, inputs).check_training(held_out_s / inputs, measured=measured)


@contextmanager
def _giving_up(state: RunState) -> Iterator[None]:
    """An error inside gives the exploration up, as its corrected command is another one.

    Not what may pass, as a full disk, a read error or too little memory: then the same command resumes.
    """
    try:
        yield
    except GatiError as error:
        cause = error.__cause__
        of_system = isinstance(cause, OSError) and cause.errno is not None  # not of damaged images
        if not (isinstance(error, StorageError) or of_system or is_lack_of_memory(cause)):
            state.clear()
        raise


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


# An interrupted run ---------------------------------------------------------------------------------------


def _stored(state: RunState) -> _Measured | None:
    """What an earlier run has measured; None if it measured nothing yet."""
    stored = state.costs()
    if stored is None:
        return None
    try:
        answers = HeldOut(**stored["answers"])
        blocks = tuple(
            BlockProfile(**{**block, "output_shape": tuple(block["output_shape"])})
            for block in stored["profile"]["blocks"]
        )
        specifications = tuple(
            Specification(Trial(**item["trial"]), tuple(item["hidden_shape"]))
            for item in stored["specifications"]
        )
        return _Measured(
            stored["contents"],
            stored["split"],
            _probe(stored["probe"], state),
            answers._replace(base_class=np.array(answers.base_class, dtype=np.int64)),
            replace(Profile(**{**stored["profile"], "blocks": ()}), blocks=blocks),
            specifications,
            MeasuringTimes(*stored["expected"]),
        )
    except (KeyError, TypeError) as error:  # fields that are missing, or unknown here
        raise _another_version(state, "which measured other things") from error


def _probe(values: object, state: RunState) -> NetworkProbe:
    return NetworkProbe.from_values(values, str(state.directory))


def _check_same_inputs(before: dict[str, str], now: dict[str, str]) -> None:
    """Refuse other inputs than the exploration began with: it may have trained on what is now held out."""
    for option in sorted(before.keys() | now.keys()):
        if before.get(option) != now.get(option):
            raise DataError(
                f"the inputs of {option}, or their order, have changed since this exploration began: "
                "restore them, or choose another --out"
            )


def _another_version(state: RunState, what: str) -> LibraryError:
    return LibraryError(
        f"this exploration began with another version of Gati or NumPy, {what}: choose another --out, or "
        f"delete {state.directory} to start again"
    )


def _answers_otherwise(
    known: npt.NDArray[np.int64], module: nn.Module, held: Data, device: torch.device
) -> bool:
    """Whether the network gives a few of the first inputs another class than the `known` ones [m]."""
    few = np.linspace(0, len(known) - 1, min(_COMPARED, len(known))).astype(np.int64)
    return answers_otherwise(known[few], base_answers(module, held.subset(few), device), device.type)


def _other_network() -> LibraryError:
    """Outcomes of exits that are finished are of the hidden outputs and answers that the network had."""
    return LibraryError(
        "the network has the same weights as when this exploration began, but computes a different "
        "result: restore its code, or choose another --out"
    )
