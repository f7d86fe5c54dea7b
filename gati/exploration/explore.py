"""The verb `explore`: a network and held-out data in, a cache library out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gati.allocation import freed_memory_kept
from gati.caches import parse_variant
from gati.engine.cores import check_lookup_cores
from gati.engine.threads import on_granted_threads
from gati.errors import DataError, VariantError
from gati.exploration.budget import Budget, Clock
from gati.exploration.candidates import check_names, wanted
from gati.exploration.claims import check_nothing_depends_on, claim_folder, is_finished
from gati.exploration.companions import (
    is_accompanying,
    keep_accompanying,
    load_companions,
    measure_companions,
)
from gati.exploration.completion import complete
from gati.exploration.devices import on_device, resolve_device
from gati.exploration.distributed import opened_executor, trained_on
from gati.exploration.itself import offer_itself
from gati.exploration.library import BaseOutcomes, Library
from gati.exploration.memory import lack_of_memory_told
from gati.exploration.modes import modes_of_training
from gati.exploration.opening import fitted
from gati.exploration.prepare import prepare
from gati.exploration.prepared import PreparedModel
from gati.exploration.progress import Progress, SilentProgress, told_if_long
from gati.exploration.schedule import check_duration, students_for
from gati.exploration.settings import settings_of, sources_of
from gati.exploration.stages import TrainingStages
from gati.exploration.state import RunState, locked
from gati.model.data import load_data
from gati.model.labels import ClassNames, LabelMap
from gati.model.load import load_model
from gati.variants import ITSELF


@modes_of_training()
def explore(
    model: str,
    checkpoint: str | Path | None = None,
    *,
    data: Any,
    train_data: Any | None = None,
    out: str | Path,
    unique: bool = False,
    blocks: str | None = None,
    variants: Sequence[str] | None = None,
    device: str = "cpu",
    epochs: float | None = None,
    budget_s: float | None = None,
    seed: int = 0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    resize: int | None = None,
    sample_rate: int | None = None,
    seconds: float | None = None,
    tokenizer: str | Path | None = None,
    max_length: int | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    class_names: ClassNames | None = None,
    label_map: LabelMap | None = None,
    companions: Sequence[tuple[str | Path, str | Path | None]] = (),
    ray: str | None = None,
    ray_cores: int = 1,
    ray_gpus: int = 0,
    lookup_cores: int = 1,
    progress: Progress | None = None,
    clock: Clock = time.monotonic,
) -> Library:
    """Train and measure caches for a network, and write the cache library.

    The cost of lookups is measured first. Then caches that read the network's input are trained: students,
    or, for images of at least 96 pixels a side, a copy of the network with fewer pixels and fewer blocks, if
    its lookup takes at most 45 % of the network's time. Exits at a few blocks follow; they concentrate on
    inputs that the best of these caches does not answer. An interrupted exploration resumes when called again
    with the same arguments; a finished one is returned as it is, also by a newer Gati, and `explore_more`
    trains it further. If network, checkpoint or inputs have moved and are still the same, both go on with
    their new places, an interrupted one once it trains. A variant whose training fails is left out, with the
    reason in the trials table. The network is never changed. On the same machine the same seed gives the same
    weights, unless the budget cuts training short, the network is slow for it, memory is short, or other
    programs use the cores. Latencies are measured anew, so other variants may be skipped.

    **Arguments:**

    - `model`, `checkpoint`: what `gati.model.load.load_model` takes.
    - `data`: inputs the network was *not* trained on. Without `train_data`, a third of them is for training.
      `seed` splits the others into inputs to select on and inputs to certify on: one half each up to 800,
      one third and two thirds from 1,200 on. Certificates assume that these inputs were drawn independently
      from those that will be served. So copies must be draws of their own (queries that recur), or each input
      must be there as often as the others.
    - `train_data`: more inputs, only for training predictors; they may be the network's own training set.
      Inputs that are also in `data` are left out.
    - `out`: the cache library's directory.
    - `unique`: keep one copy of each input of `data`, for data that was oversampled or exported twice.
    - `blocks`: a pattern over module names; exits are trained at all matching blocks. By default blocks are
      detected, and a few of them chosen.
    - `variants`: such as `["student(48)", "pyramid(64)"]`; all are trained, at all blocks, if there is time.
      `"student"` means students of sizes that fit the network, and `"published"` the published variants.
      `"reduced(112)"` is the network itself on images of 112 pixels, `"reduced(128,6)"` on 128 pixels with 6
      of its blocks.
      `"default"` trains those default variants whose cost allows it, see `gati.exploration.candidates`.
    - `epochs`: epochs of training for exits; students train three times as long.
    - `budget_s`: end within this many seconds. Without `epochs`, training uses all of them. If the network
      is so slow that nothing could be trained, `DataError` says so after its first answers.
    - `sample_rate` (hertz), `seconds`: of recordings, if the network does not define its front end.
    - `tokenizer`: a local `tokenizer.json` for networks that take text; it is copied into the library. `data`
      is then a CSV or Parquet file with the columns `text_column` and `label_column`, by default `text` and,
      if it exists, `label`. Texts are truncated to `max_length` tokens: by default the tokenizer's own limit,
      at most 512, at most what the network takes, and no more than `data` needs.
    - `class_names`: the network's class names in the order of its outputs: a list, or a file with one name
      per line or a JSON list. By default those of the model, or those of the data if their number matches.
    - `label_map`: the network's class for each label of `data`, by folder name or label number: a mapping,
      or a file with a JSON object. Every label needs an entry.
    - `companions`: (model, checkpoint) pairs of smaller networks with the network's classes. If they have
      more classes, names must identify the network's among them. Each becomes a cache at the input and is
      stored in the library, which then needs neither its code nor its checkpoint; one that the budget leaves
      no time to measure is left out. With companions, `variants` may be empty: then nothing is trained.
      `("itself", None)` is the network, see `gati.exploration.itself`; on CPUs it is among the default
      variants, unless it is large or reads sequences.
    - `ray`: train on the Ray cluster at this address; `"auto"` means the cluster of this machine, `"local"`
      starts one here for the duration of the call (`pip install 'gati[ray]'`). Each worker gets `ray_cores`
      cores and `ray_gpus` GPUs. Only this machine measures latencies. The library does not depend on the
      number of workers, but it differs from one that was made without Ray.
    - `lookup_cores`: how many cores overlapped lookups have on the CPU; the network keeps the others.

    **Returns:** the finished library.

    **Raises:** `ModelError`, also if every training fails; `DataError`, `VariantError`, `BackendError`,
    `StorageError`; `LibraryError` if `out` holds another exploration that is unfinished, has compositions or
    is by another version of Gati, or another process writes to it.
    """
    began = clock()
    directory = Path(out)
    asked = wanted(variants, blocks, students_for(budget_s))
    if not asked.variants and not companions:
        raise VariantError("no variants given: name at least one, such as pyramid(64)")
    check_duration(epochs, budget_s)
    if not 0 <= seed < 2**63:
        raise DataError(f"the seed must be at least 0 and below 2**63 (got {seed})")
    target = resolve_device(device)
    named = load_model(
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
    for name in asked.variants:  # after the model, whose module may register predictors of its own
        parse_variant(name)
    check_names(asked.variants)
    reporting = progress or SilentProgress()
    with told_if_long(reporting, "reading the inputs"):
        loaded, held = fitted(named, data)
        more = train_data
        if train_data is not None and not isinstance(train_data, str | Path):
            more = load_data(train_data, loaded.preprocessing, what="--train-data")
        sources = sources_of({"data": (data, held), "train_data": (train_data, more)})
    candidates = load_companions(companions, loaded, held.tensors)
    with (
        locked(directory),
        freed_memory_kept(),
        on_device(target),
        on_granted_threads(),
        lack_of_memory_told(),
        reporting as reporter,
    ):
        for note in filter(None, (loaded.note, *(candidate.loaded.note for candidate in candidates))):
            reporter.note(note)
        settings = settings_of(
            loaded,
            class_names,
            label_map,
            candidates,
            **sources,
            blocks=blocks,
            variants=list(asked.variants),
            device=str(target),
            epochs=epochs,
            budget_s=budget_s,
            seed=seed,
            **({"unique": True} if unique else {}),
            **({"lookup_cores": lookup_cores} if lookup_cores != 1 else {}),
            **trained_on(ray, ray_cores, ray_gpus),
        )
        library, state = Library(directory), RunState(directory)
        if is_finished(library, state, settings, loaded, held, (data, train_data), reporter):
            return library
        check_lookup_cores(lookup_cores, target)
        claim_folder(library, state, settings, reporter)
        budget = Budget(budget_s, clock, began, state)
        prepared = prepare(
            loaded,
            held,
            more,
            blocks=blocks,
            asked=asked,
            device=target,
            seed=seed,
            state=state,
            progress=reporter,
            unique=unique,
            class_names=class_names,
            label_map=label_map,
            companions=candidates,
            budget=budget,
        )
        prepared = replace(prepared, profile=replace(prepared.profile, lookup_cores=lookup_cores))
        check_nothing_depends_on(library, state)  # preparing takes long enough to compose in
        _begin(library, prepared)
        measure_companions(prepared, library, state, budget, candidates, seed=seed, progress=reporter)
        if asked.defaults and blocks is None and not is_accompanying(state, ITSELF):
            keep_accompanying(
                state, offer_itself(prepared, library, seed=seed, progress=reporter, left_s=budget.left_s())
            )
            budget.note()
        with opened_executor(ray, cores=ray_cores, gpus=ray_gpus) as executor:
            TrainingStages(
                prepared,
                library,
                state,
                budget,
                epochs=epochs,
                seed=seed,
                progress=reporter,
                executor=executor,
            ).run()
        complete(
            prepared,
            library,
            state,
            budget,
            companions=[each.variant for each in candidates],
            settings=settings,
            seed=seed,
            progress=reporter,
        )
    return library


def _begin(library: Library, prepared: PreparedModel) -> None:
    """Write what is known before training, in place of an earlier exploration."""
    if prepared.loaded.preprocessing.text is not None:
        library.write_tokenizer(prepared.loaded.preprocessing.text)
    library.forget_exploration()
    library.write_input_record(prepared.inputs.record)
    library.write_base_outcomes(
        BaseOutcomes(prepared.held_out.base_class, prepared.labels, prepared.inputs.split)
    )
