"""`gati doctor`: what a network, its data and this machine allow. Takes under a minute and writes nothing.

Checks are independent: one that fails becomes a finding with advice, and the others still run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gati.composition.binomial import check_confidence
from gati.composition.plans import DEFAULT_CONFIDENCE
from gati.costs.profile import measure_profile
from gati.engine.threads import on_granted_threads
from gati.errors import DataError, one_line
from gati.evaluation.diagnosis import (
    CheapestLookup,
    DataForecast,
    Diagnosis,
    EngineSpeed,
    ExploreForecast,
    forecast_targets,
    parts_of,
)
from gati.evaluation.engine_speeds import engine_speeds
from gati.evaluation.examination import Examination
from gati.evaluation.forecast import Rates, forecast_explore
from gati.exploration.alike import warning_of_neighbours
from gati.exploration.candidates import Specification, for_tokens, measured_costs, specify, wanted
from gati.exploration.inspect import example_inputs
from gati.exploration.library import SELECT
from gati.exploration.opening import fitted
from gati.exploration.places import find_places
from gati.exploration.schedule import students_for
from gati.exploration.splits import split_inputs
from gati.model.data import load_data
from gati.model.load import LoadedModel, load_model
from gati.model.outputs import check_base_outputs, outputs_kind
from gati.model.segments import TracedModel, trace
from gati.model.sequence import Data
from gati.model.user_code import running_user_code
from gati.types import OutputsKind, Profile

_SAMPLED = 64  # most inputs run through the network
_FOR_ANSWERS = 0.15  # share of the time for these, and again for the search for an input of another class
_COUNTED = 10_000  # above this many inputs, duplicates are not searched for
_REPETITIONS = 15
_BEFORE_ENGINES = 0.6  # share of the time after which no further engine is started
_FOR_ENGINES = 0.25  # share of the time for timing them
_BUDGET_S = 25 * 60.0


@on_granted_threads()
def doctor(
    model: str | Path,
    checkpoint: str | Path | None = None,
    *,
    data: Any = None,
    train_data: Any = None,
    unique: bool = False,
    blocks: str | None = None,
    size: tuple[int, int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    resize: int | None = None,
    sample_rate: int | None = None,
    seconds: float | None = None,
    tokenizer: str | Path | None = None,
    max_length: int | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    budget_s: float = _BUDGET_S,
    confidence: float = DEFAULT_CONFIDENCE,
    seed: int = 0,
    within_s: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> Diagnosis:
    """Report what Gati could do for a network, before any training. Writes nothing.

    Reports whether the network can be cut, its blocks and their latencies, the speed of the plain network on
    the engines here, the gain of an oracle with the cheapest caches, how far `explore` gets in `budget_s`,
    and what the inputs can certify. Arguments are those of `explore`; `size` is for use without `data`, as
    for `blocks`. After about `within_s` seconds no further check is started; skipped ones are listed.

    A check that fails becomes a finding with advice; the others still run.

    **Raises:** `ModelError` or `CheckpointError` if the network cannot be loaded; `DataError` for
    `train_data` or `unique` without `data`; `CompositionError` for a confidence outside (0, 1).
    """
    check_confidence(confidence)
    if data is None and (train_data is not None or unique):
        raise DataError("--train-data and --unique need --data: give that, too, or leave them out")
    examination = Examination(clock, within_s)
    loaded = load_model(
        model,
        checkpoint,
        mean=mean,
        std=std,
        resize=resize,
        sample_rate=sample_rate,
        seconds=seconds,
        tokenizer=tokenizer,
        max_length=max_length,
        text_column=text_column,
        label_column=label_column,
    )
    if loaded.note:
        examination.note("model", loaded.note)
    given = _Given(data, train_data, unique, confidence, seed)
    inputs = None if data is None else examination.ask("data", partial(_inputs, loaded, given, examination))
    loaded = loaded if inputs is None else inputs.loaded
    answered = _ask_network(loaded, inputs, size, examination)
    cut, prospects = None, _Prospects()
    if answered is not None:
        cut = examination.ask("blocks", partial(_cut, loaded, answered, blocks, examination))
    if answered is not None and cut is not None:
        prospects = _ask_prospects(loaded, inputs, answered, cut, blocks, budget_s, examination)
    return Diagnosis(
        model=loaded.source,
        parameters=sum(parameter.numel() for parameter in loaded.module.parameters()),
        input_shape=None if answered is None else tuple(answered.example.shape[1:]),
        profile=None if cut is None else cut.profile,
        engines=prospects.engines,
        lookups=() if cut is None else _cheapest(prospects.specifications, cut.profile),
        explore=prospects.explore,
        data=None if inputs is None else inputs.forecast,
        findings=tuple(examination.findings),
        seconds=examination.spent_s,
    )


@dataclass(frozen=True)
class _Given:
    """What the user passed in addition to the network."""

    data: Any
    train_data: Any
    unique: bool
    confidence: float
    seed: int


@dataclass(frozen=True)
class _FoundInputs:
    """The inputs as `explore` would split them, and a sample."""

    loaded: LoadedModel  # adapted to these inputs
    held: Data
    sample: Tensor
    training: Data
    held_out: int
    forecast: DataForecast


@dataclass(frozen=True)
class _Answered:
    """Inputs [n, ...] that the network ran on, and how long that took."""

    example: Tensor
    outputs: Tensor  # [n, K]
    seconds: float

    @property
    def kind(self) -> OutputsKind:
        """What the network ends with."""
        return outputs_kind(self.outputs)

    @property
    def classes(self) -> list[int]:
        """The classes that the network predicts for them."""
        return [int(each) for each in self.outputs.argmax(1).unique()]

    @property
    def answer_s(self) -> float:
        """Seconds per input, in a batch."""
        return self.seconds / len(self.example)


@dataclass(frozen=True)
class _Cut:
    """The network cut at its blocks."""

    traced: TracedModel
    profile: Profile


@dataclass(frozen=True)
class _Prospects:
    """What `explore` would train, how far it would get, and how fast the plain network is on each engine."""

    specifications: tuple[Specification, ...] = ()
    engines: tuple[EngineSpeed, ...] = ()
    explore: ExploreForecast | None = None


def _ask_network(
    loaded: LoadedModel,
    inputs: _FoundInputs | None,
    size: tuple[int, int] | None,
    examination: Examination,
) -> _Answered | None:
    """What the network answers; a finding if it cannot, or answers the same class to every input."""
    sample = None if inputs is None else inputs.sample
    answered = examination.ask("network", partial(_answers, loaded, sample, size, examination))
    if inputs is not None and answered is not None and len(answered.classes) == 1:
        examination.ask("network", partial(_check_classes, loaded, inputs.held, answered, examination))
    return answered


def _ask_prospects(
    loaded: LoadedModel,
    inputs: _FoundInputs | None,
    answered: _Answered,
    cut: _Cut,
    blocks: str | None,
    budget_s: float,
    examination: Examination,
) -> _Prospects:
    costs = partial(_specifications, cut, loaded, blocks, budget_s)
    specifications = examination.ask("caches", costs) or ()
    engines = examination.ask("engines", partial(_engines, cut, answered, examination)) or ()
    if inputs is None or not specifications:
        return _Prospects(specifications, engines)
    forecast = partial(
        forecast_explore,
        loaded.module,
        cut.traced,
        specifications,
        inputs.training,
        inputs.held_out,
        answered.kind,
        _rates(answered, engines),
        cut.profile.base_ms,
        budget_s,
        examination.clock,
    )
    return _Prospects(specifications, engines, examination.ask("explore", forecast))


def _inputs(loaded: LoadedModel, given: _Given, examination: Examination) -> _FoundInputs:
    loaded, held = fitted(loaded, given.data)
    separate = given.train_data is not None
    more = load_data(given.train_data, loaded.preprocessing, what="--train-data") if separate else None
    sample = held.images(_evenly(len(held), _SAMPLED))
    exact = len(held) + (0 if more is None else len(more)) <= _COUNTED
    if exact:
        divided = split_inputs(held, more, given.seed, unique=given.unique)
        select, certify = int((divided.split == SELECT).sum()), divided.evidence
        training, measured_on = divided.train, len(divided.split)
        for note in (*divided.notes, warning_of_neighbours(held)):
            if note:
                examination.note("data", note)
    else:
        train, select, certify = parts_of(len(held), separate)
        training = held.subset(range(train)) if more is None else more
        measured_on = select + certify
        examination.note("data", f"more than {_COUNTED:,} inputs: duplicates were not searched for")
    targets = forecast_targets(certify, given.confidence, separate)
    forecast = DataForecast(len(held), len(training), select, certify, exact, given.confidence, targets)
    return _FoundInputs(loaded, held, sample, training, measured_on, forecast)


@torch.inference_mode()
def _answers(
    loaded: LoadedModel, sample: Tensor | None, size: tuple[int, int] | None, examination: Examination
) -> _Answered:
    """Run the network on the sample, or on a part that takes it about `_FOR_ANSWERS` of the time."""
    example = example_inputs(loaded, size) if sample is None else sample
    module, clock = loaded.module, examination.clock
    with _running_on(example):
        module(example[:1].clone())  # warm-up
        began = clock()
        module(example[:1].clone())
        fitting = _FOR_ANSWERS * examination.within_s / max(clock() - began, 1e-9)
        example = example[_evenly(len(example), int(min(max(fitting, 2), len(example))))]
        began = clock()
        outputs = check_base_outputs(module(example.clone()))
        return _Answered(example, outputs, clock() - began)


def _running_on(inputs: Tensor) -> AbstractContextManager[None]:
    return running_user_code(
        lambda error: (
            f"the network fails on inputs of shape {list(inputs.shape)} ({one_line(error)}); give inputs of "
            "the shape it expects, or --resize PIXELS for images of another size"
        )
    )


@torch.inference_mode()
def _check_classes(loaded: LoadedModel, held: Data, answered: _Answered, examination: Examination) -> None:
    """Raise DataError if the network predicts one class for all inputs, as `explore` would.

    Where one class is much more common than others, a sample may hold no other one, as here. So more inputs
    are looked at, for `_FOR_ANSWERS` of the time; if that is not enough to see all of them, a note says so.
    """
    (first,) = answered.classes
    ends_s = examination.spent_s + _FOR_ANSWERS * examination.within_s
    order = np.random.default_rng(0).permutation(len(held))
    for start in range(0, len(held), len(answered.example)):
        if examination.spent_s > ends_s:
            examination.note(
                "network",
                f"the network predicts class {first} for all {start} inputs that were looked at: unless "
                "that class is so common, check --checkpoint and the preprocessing (--mean, --std)",
            )
            return
        rows = held.images(order[start : start + len(answered.example)])
        with _running_on(rows):
            outputs = check_base_outputs(loaded.module(rows))
        if bool((outputs.argmax(1) != first).any()):
            return
    raise DataError(
        f"the network predicts the same class for all {len(held)} inputs: give inputs of several classes, or "
        "check --checkpoint and the preprocessing (--mean, --std)"
    )


def _evenly(length: int, count: int) -> NDArray[np.int64]:
    """At most `count` of the positions below `length`, evenly spaced."""
    return np.unique(np.linspace(0, length - 1, count).astype(np.int64))


def _cut(loaded: LoadedModel, answered: _Answered, pattern: str | None, examination: Examination) -> _Cut:
    example = torch.cat((answered.example, answered.example))[:2]
    places = find_places(loaded.module, pattern, example, wanted(None, pattern, 1).variants)
    if places.note:
        examination.note("blocks", places.note)
    traced = trace(loaded.module, example, places.names)
    return _Cut(traced, measure_profile(traced, repetitions=_REPETITIONS))


def _rates(answered: _Answered, engines: Sequence[EngineSpeed]) -> Rates:
    return Rates(answered.answer_s, {each.name: each.base_ms for each in engines if each.base_ms})


def _engines(cut: _Cut, answered: _Answered, examination: Examination) -> tuple[EngineSpeed, ...]:
    found, disturbance = engine_speeds(
        cut.traced,
        answered.example,
        answered.kind,
        answered.answer_s,
        _FOR_ENGINES * examination.within_s,
        partial(examination.is_late, _BEFORE_ENGINES),
    )
    if disturbance:
        examination.note("engines", f"the latencies may be wrong: {disturbance}")
    return found


def _specifications(
    cut: _Cut, loaded: LoadedModel, blocks: str | None, budget_s: float
) -> tuple[Specification, ...]:
    """Return what `explore` would train at these blocks by default, with the cost of each lookup."""
    asked = for_tokens(wanted(None, blocks, students_for(budget_s)), cut.traced, loaded.preprocessing.tensors)
    measure = measured_costs(cut.traced, loaded.module, cut.profile.base_ms)
    return specify(cut.traced, loaded.module, cut.profile, asked, measure)


def _cheapest(specifications: Sequence[Specification], profile: Profile) -> tuple[CheapestLookup, ...]:
    """Return the cheapest lookup of each block that would get caches, in forward order."""
    reach_ms = {block.name: block.reach_ms for block in profile.blocks}
    found: dict[str, CheapestLookup] = {}
    for trial in (item.trial for item in specifications):
        if trial.status != "trained" or trial.lookup_ms is None:
            continue
        one = CheapestLookup(
            block=trial.block,
            variant=trial.variant,
            reach_ms=reach_ms[trial.block],
            lookup_ms=trial.lookup_ms,
            base_ms=profile.base_ms,
        )
        if trial.block not in found or one.lookup_ms < found[trial.block].lookup_ms:
            found[trial.block] = one
    return tuple(found.values())
