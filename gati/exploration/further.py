"""Training the caches of a finished library further, in rounds.

A round starts from the weights at the end of the previous one; the learning rate rises and falls once more.
Its caches get new names and files, such as `layer2.3--pyramid-64--r2`, so a cache that a composition uses
never changes. If a cache of the round is better on the select split, its row replaces the older one, which
stays in the table as `replaced`: compositions that use it keep working, and new ones choose the better cache.
Inputs, split and ledger stay the same.

    training/TRIAL.safetensors  weights to resume training from
    training/rounds.json        what each further round did
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gati.allocation import freed_memory_kept
from gati.documents import DocumentKind
from gati.engine.threads import on_granted_threads
from gati.errors import DataError, LibraryError
from gati.exploration.augment import choose_augmentations
from gati.exploration.budget import Budget, Clock
from gati.exploration.candidates import Specification
from gati.exploration.devices import on_device, resolve_device
from gati.exploration.distributed import opened_executor, trained_on
from gati.exploration.feasible import nothing_trained
from gati.exploration.library import Library
from gati.exploration.lookups import finish_trials, lookup_seconds, points_of
from gati.exploration.measure import seconds_per_input, selector_seconds
from gati.exploration.memory import lack_of_memory_told, spare_bytes
from gati.exploration.modes import modes_of_training
from gati.exploration.network import load_network
from gati.exploration.prepared import KEPT_PICTURES_BYTES, HeldOut, MeasuringTimes, Prepared
from gati.exploration.progress import Progress, SilentProgress, told_if_long
from gati.exploration.schedule import check_duration
from gati.exploration.splits import explored_inputs
from gati.exploration.stages import TrainingStages
from gati.exploration.state import FinishedTrial, RunState, locked
from gati.types import OperatingPoint, Trial, TrialId

_ROUNDS = DocumentKind(
    1, LibraryError, "restore it from a backup, or run gati explore again with another --out"
)
_TIMED = 32  # inputs
_OF_ROUND = re.compile(r"--r\d+$")


@dataclass(frozen=True)
class FurtherRound:
    """One further round: its number, from 2, and its result."""

    number: int
    budget_s: float | None
    epochs: float | None
    seconds: float
    better: tuple[TrialId, ...]
    no_better: tuple[TrialId, ...]
    left_out: dict[TrialId, str]  # why: there was no time for it, or it failed


@modes_of_training()
def explore_more(
    directory: str | Path,
    *,
    budget_s: float | None = None,
    epochs: float | None = None,
    data: Any | None = None,
    train_data: Any | None = None,
    ray: str | None = None,
    ray_cores: int = 1,
    ray_gpus: int = 0,
    progress: Progress | None = None,
    clock: Clock = time.monotonic,
) -> Library:
    """Train the caches of a finished library further, and keep those that improve.

    After an interruption, the same call resumes; once finished, it starts another round. The library can be
    used meanwhile: caches that compositions use never change.

    - `budget_s`, `epochs`: as for `explore`; one of them is required.
    - `data`, `train_data`: the inputs of the exploration; required if they were given as objects or have
      moved.
    - `ray`, `ray_cores`, `ray_gpus`: as for `explore`.

    **Returns:** the library.

    **Raises:** `LibraryError` for a library that is unfinished, in use by another process, or has no weights
    to train further; `DataError` if its inputs are missing or have changed, or if the time is too short to
    train anything; otherwise as `explore`.
    """
    began = clock()
    if budget_s is None and epochs is None:
        raise DataError("the training time is missing: give --more TIME, such as 1h")
    check_duration(epochs, budget_s)
    workers = trained_on(ray, ray_cores, ray_gpus)
    library = Library.open(directory)
    device = resolve_device(library.manifest.profile.device)
    with (
        locked(library.directory),
        freed_memory_kept(),
        on_device(device),
        on_granted_threads(),
        lack_of_memory_told(),
        progress or SilentProgress() as reporter,
    ):
        state, rounds = RunState(library.directory), _rounds(library)
        if state.claimed().get("round") in [each["number"] for each in rounds]:
            state.clear()  # the round had finished; only this was left to do
            return library
        number = 2 + len(rounds)
        state.claim({"round": number, "budget_s": budget_s, "epochs": epochs, **workers})
        budget = Budget(budget_s, clock, began, state)
        specifications, before = _to_train(library, number)
        with told_if_long(reporter, "reading the inputs, and measuring"):
            prepared = _prepare(library, data, train_data, specifications, budget, state, device)
        reporter.note(f"round {number}: training {len(specifications)} caches further")
        with opened_executor(ray, cores=ray_cores, gpus=ray_gpus) as executor:
            TrainingStages(
                prepared,
                library,
                state,
                budget,
                epochs=epochs,
                seed=_seed(library.manifest.seed, number),
                progress=reporter,
                executor=executor,
                before=before,
            ).run()
        finished = state.finished()
        _check_something_trained(finished, budget, state)
        late = partial(budget.is_spent, prepared.expected.lookup_s)
        rows = finish_trials(prepared, library, finished, reporter, [], late)
        new = [row for row in rows if row.status == "trained"]
        library.write_trials(
            with_round(library.trials, new, before),
            _with_points(library.operating_points, points_of(finished, new)),
        )
        _enter(library, FurtherRound(number, budget_s, epochs, budget.spent_s, *_outcome(finished, new)))
        for row in new:  # training no longer continues from the older weights
            library.training_path(before[row.trial_id].trial_id).unlink(missing_ok=True)
        state.clear()
    return library


def named_in_round(trial_id: TrialId, number: int) -> TrialId:
    """The name of a trial in round `number`: for 3, `a--grid-8` and `a--grid-8--r2` give `a--grid-8--r3`."""
    return TrialId(f"{_OF_ROUND.sub('', trial_id)}--r{number}")


def with_round(trials: Sequence[Trial], new: Sequence[Trial], before: Mapping[TrialId, Trial]) -> list[Trial]:
    """The trials table after a round, with each new row before the one it replaces. Idempotent."""
    replacing = {before[row.trial_id].trial_id: row for row in new}
    added = {row.trial_id for row in new}
    rows: list[Trial] = []
    for trial in trials:
        if trial.trial_id in added:
            continue
        better = replacing.get(trial.trial_id)
        if better is None:
            rows.append(trial)
        else:
            reason = f"trained further as {better.trial_id}"
            rows += [better, replace(trial, status="replaced", reason=reason)]
    return rows


def _with_points(old: Sequence[OperatingPoint], new: Sequence[OperatingPoint]) -> list[OperatingPoint]:
    added = {point.trial_id for point in new}
    return [*(point for point in old if point.trial_id not in added), *new]


def _to_train(library: Library, number: int) -> tuple[tuple[Specification, ...], dict[TrialId, Trial]]:
    """The specifications of this round, and the earlier trial that each of them continues."""
    shapes = {block.index: block.output_shape for block in library.manifest.blocks}
    found, before = [], {}
    for trial in library.trials:
        started = trial
        if trial.status == "replaced" and trial.reason.endswith(f"--r{number}"):
            started = replace(
                trial, status="trained", reason=""
            )  # replaced by this round before it was interrupted
        if started.status != "trained" or named_in_round(trial.trial_id, number) == trial.trial_id:
            continue
        if not library.training_path(trial.trial_id).is_file():
            continue
        name = named_in_round(trial.trial_id, number)
        unmeasured = replace(
            started, trial_id=name, loss=None, agreement=None, hit_rate_at_97=None, hit_rate_at_99=None
        )
        found.append(Specification(unmeasured, shapes[trial.block_index]))
        before[name] = started
    if not found:
        raise LibraryError(
            f"{library.directory} has no weights to continue from (training/): an older Gati explored it, "
            "or nothing was trained; explore again with another --out"
        )
    return tuple(found), before


def _prepare(
    library: Library,
    data: Any | None,
    train_data: Any | None,
    specifications: tuple[Specification, ...],
    budget: Budget,
    state: RunState,
    device: torch.device,
) -> Prepared:
    manifest = library.manifest
    network = load_network(library, device)
    inputs = explored_inputs(library, data, train_data)
    inputs.train.keep(spare_bytes(KEPT_PICTURES_BYTES))
    base = library.base_outcomes()
    stored = state.costs()
    if stored is None:
        clock, count = budget.clock, len(inputs.held_out)
        answers = torch.nn.functional.one_hot(torch.from_numpy(base.base_class), manifest.classes)
        expected = MeasuringTimes(
            count * seconds_per_input(network.module, inputs.held_out, device, clock, _TIMED),
            selector_seconds(answers.float(), inputs.split, manifest.seed, clock),
            lookup_seconds(network.traced, specifications, clock),
        )
        state.write_costs({"expected": expected})
        budget.note()
    else:
        expected = MeasuringTimes(*stored["expected"])
    tried = budget.inputs_to_try(expected.held_out_s / len(inputs.held_out))
    plain, bold = choose_augmentations(inputs.train, network.module, device, state, tried)
    return Prepared(
        network.module,
        network.traced,
        inputs,
        HeldOut(base.base_class, manifest.outputs_kind, manifest.classes),
        manifest.profile,
        specifications,
        plain,
        bold,
        device,
        expected,
    )


def _seed(seed: int, number: int) -> int:
    """A seed of its own for each round, which gives other orders and views."""
    return seed + 1_000_003 * (number - 1)


# Record of rounds -------------------------------------------------------------------------------------------


def _check_something_trained(
    finished: Mapping[TrialId, FinishedTrial], budget: Budget, state: RunState
) -> None:
    """Raise `DataError` if there was no time for any cache; then there was no round."""
    trials = [row.trial for row in finished.values()]
    if any(trial.status == "failed" or trial.agreement is not None for trial in trials):
        return
    state.clear()
    raise nothing_trained(budget, "--more")


def _outcome(
    finished: Mapping[TrialId, FinishedTrial], new: Sequence[Trial]
) -> tuple[tuple[TrialId, ...], tuple[TrialId, ...], dict[TrialId, str]]:
    better = tuple(row.trial_id for row in new)
    others = {name: row.trial for name, row in finished.items() if name not in better}
    measured = tuple(name for name, trial in others.items() if trial.agreement is not None)
    return better, measured, {name: others[name].reason for name in others if name not in measured}


def _rounds(library: Library) -> list[dict[str, Any]]:
    path = _rounds_path(library)
    if not path.is_file():
        return []
    document = _ROUNDS.read(path)
    with _ROUNDS.reading(str(path)):
        return list(document["rounds"])


def _enter(library: Library, done: FurtherRound) -> None:
    rounds = [each for each in _rounds(library) if each["number"] != done.number]
    _ROUNDS.write(_rounds_path(library), {"rounds": [*rounds, asdict(done)]})


def _rounds_path(library: Library) -> Path:
    return library.directory / "training" / "rounds.json"
