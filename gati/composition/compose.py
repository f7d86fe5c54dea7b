"""`gati compose`: choose which learned caches serve together, and predict latency and agreement."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gati.composition.backends import choose_backend, reduced_precisions, tries_all
from gati.composition.certified import Proposal, TooCoarseError, plan_uncertified, propose
from gati.composition.composition import Composition, Objective
from gati.composition.costs import CostedLibrary, disturbance, other_processor
from gati.composition.further import Further, conclude, further_inputs
from gati.composition.ledger import enter_use
from gati.composition.networks import disturbed_comparison
from gati.composition.outcomes import SplitOutcomes, outcomes_of
from gati.composition.pieces import Pieces
from gati.composition.plans import (
    DEFAULT_CONFIDENCE,
    CandidatePlan,
    Settings,
    placement_rank,
    plan_published,
)
from gati.composition.preconditions import check_checkpoint, check_library, check_settings, placements
from gati.composition.problem import Candidate
from gati.composition.prospects import with_headroom
from gati.composition.sharing import FIRST, WORTH_ASKING, Hope, deploy_one, enter
from gati.composition.stored_graphs import graph_folder, remove_unused_graphs
from gati.composition.threads import using_threads, wanted_threads
from gati.composition.verdicts import certify_published
from gati.errors import CompositionError
from gati.exploration.alike import warning_of_copies
from gati.exploration.library import CERTIFY, SELECT, Library
from gati.types import Placement
from gati.units import parse_bytes

_log = logging.getLogger(__name__)


def compose(
    directory: str | Path,
    *,
    accuracy: float = 0.99,
    confidence: float | None = DEFAULT_CONFIDENCE,
    memory_bytes: int | str | None = None,
    objective: Objective = "exact",
    solver: str = "auto",
    placement: Placement | Literal["auto"] = "auto",
    backend: str = "auto",
    name: str = "default",
    slowdown: float | Literal["auto"] | None = "auto",
    per_class: bool = False,
    certify_data: Any = None,
    threads: int | Literal["auto"] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Composition:
    """Choose caches from the library in `directory`, write the composition there, and return it.

    `accuracy` is the required agreement with the base model. `memory_bytes` limits the caches' weights and
    may be written like `"256MiB"`. `slowdown` limits the time that all lookups together add to a request that
    misses every cache, as a share of the base model's time: "auto" is 1, None or infinity no limit.
    `per_class` certifies the agreement in every class. `placement` "auto" takes the better one of those
    measured.

    `backend` runs network and lookups; "auto" takes the fastest installed one, measured on first use
    (`progress(done, of)` reports it). The published objectives, which need no model, use the backend that
    `explore` measured. In reduced precision the network's own answers sometimes differ from those in float32.
    That counts against `accuracy`, too: the certificate is about the engine's answers to the held-out inputs,
    which must still be where `explore` found them. All engines that "auto" tries share the probability of
    error, 1 - `confidence`.

    The default objective "exact" needs the library's per-input outcomes. Thresholds are certified on the
    certify split with the given `confidence`, or, if that is None, set on the select split alone. The
    published objectives "relaxed" and "full" need only the tables. If there are outcomes, their expectations
    are replayed, and the composition records whether they hold at `confidence`.

    `certify_data`, in any form that `explore` takes, with or without labels, is counted together with the
    certify split: twice as many inputs allow more than twice as many losses. Inputs that explore has seen
    count only if their answers differ. The network and the caches must still exist to answer them. Each such
    command is an attempt that shares delta with all other attempts on the library, like `certify`.

    `threads` is the number of threads that torch uses while latencies are measured. None is that of
    `explore`, or, where this processor is another one, has fewer cores or OMP_NUM_THREADS is set, the current
    one. "auto" times the plain network with several and takes the fastest. `Composition.measured_on` records
    it.

    Raises CompositionError for impossible limits, SolverError, BackendError, LibraryError, DataError.
    """
    settings = Settings(
        accuracy=accuracy,
        confidence=confidence,
        memory_limit_bytes=None if memory_bytes is None else parse_bytes(memory_bytes),
        objective=objective,
        solver=solver,
        placement=placement,
        backend=backend,
        name=name,
        slowdown=slowdown,
        per_class=per_class,
        threads=threads,
    )
    check_settings(settings)
    opened = Library.open(directory)
    check_library(opened, settings)
    check_checkpoint(opened)
    further = None if certify_data is None else _further(opened, certify_data, settings)
    pieces = Pieces(opened)
    with using_threads(wanted_threads(opened, settings, pieces)):
        chosen = choose_backend(opened, settings, progress, pieces)
        others = reduced_precisions(opened, chosen, settings, progress, pieces)
        attempt = None if further is None else further.enter(opened, settings, [chosen, *others])
        share = 1.0 if attempt is None else attempt.share
        try:
            library, composition = compose_best(chosen, others, settings, further, share)
        except TooCoarseError as refusal:  # what was counted is told
            counted = enter_use(opened, "compose", refusal.certificate)
            if attempt is not None:
                conclude(opened, attempt, counted, name, written=False)
            raise
        composition = keep_graphs(library, composition)
        if further is not None and attempt is not None:
            composition = further.told(composition, attempt)
            conclude(library, attempt, composition.certificate, name, written=True)
        return written(library, "compose", composition)


def _further(library: Library, data: Any, settings: Settings) -> Further:
    if settings.confidence is None:
        raise CompositionError(
            "nothing is certified without a confidence: give one, such as 0.95, or leave out the further "
            "inputs to certify on"
        )
    return further_inputs(library, data)


def keep_graphs(library: Library, composition: Composition) -> Composition:
    """Store what the composition's engine answered with; return the composition bound to it.

    An engine of reduced precision was chosen by its own answers, so exactly that network must serve.
    """
    if not isinstance(library, CostedLibrary) or library.answers is None:
        return composition
    return library.answers.keep(composition)


def written(library: Library, kind: Literal["compose", "latency"], composition: Composition) -> Composition:
    """Enter the use of the certify split as a use of that kind; write the composition and return it."""
    if composition.certificate is not None:
        composition = composition.certified_by(enter_use(library, kind, composition.certificate))
    composition = with_headroom(composition, library)
    library.check_unchanged()
    composition.save(library.composition_path(composition.name))
    _remove_unused_graphs(library)
    return composition


def _remove_unused_graphs(library: Library) -> None:
    folder = graph_folder(library.directory)
    if not folder.is_dir():
        return
    from gati.composition.engines import graphs_needed

    try:
        saved_s = min(library.composition_path(name).stat().st_mtime for name in library.compositions())
        remove_unused_graphs(folder, graphs_needed(library), saved_s=saved_s)
    except (CompositionError, FileNotFoundError) as error:  # what that composition needs is not known
        _log.info("no stored graph is removed: %s", error)


def compose_best(
    library: Library,
    others: Sequence[CostedLibrary],
    settings: Settings,
    further: Further | None = None,
    share: float = 1.0,
) -> tuple[Library, Composition]:
    """Compose on the engine of `library` and on `others`, of reduced precision; return the fastest result.

    All engines that are tried share `share` of delta, see `gati.composition.sharing`. `further` is counted
    with the certify split. Nothing is written. Raises as `compose`.
    """
    check_settings(settings)
    check_library(library, settings)
    if not others or settings.objective != "exact":
        return library, compose_library(library, settings, further=further, share=share)
    if settings.confidence is None:
        return _fastest_on_select(library, others, settings)

    def proposed(of: Library) -> Proposal:
        return propose(of, settings, placements(of, settings), outcomes_of(of, SELECT), inputs)

    copies = [library.copies().of(library.base_outcomes().split == CERTIFY)]
    copies += [] if further is None else [further.copies]
    inputs, draws = sum(each.evidence for each in copies), sum(each.draws for each in copies)
    hopes = []
    for other in others:
        at_best_ms = proposed(other.at_best()).hoped_ms(inputs, FIRST, draws=draws)
        if at_best_ms is not None:
            hopes.append(Hope(other.manifest.profile.backend, at_best_ms, partial(proposed, other)))
    entrants = enter(proposed(library), hopes, inputs, draws=draws)
    entrants = tuple(replace(each, share=share * each.share) for each in entrants)
    deployed, plan = deploy_one(entrants, lambda each: _to_certify_on(each.library, further, each.candidates))
    return deployed.library, to_composition(deployed.library, settings, plan)


def _fastest_on_select(
    library: Library, others: Sequence[CostedLibrary], settings: Settings
) -> tuple[Library, Composition]:
    composition = compose_library(library, settings)
    # Running an engine takes long, so rank them first as if they lost no answers.
    at_best_ms = [compose_library(each.at_best(), settings).expected.mean_latency_ms for each in others]
    for hoped_ms, _, other in sorted(zip(at_best_ms, range(len(others)), others, strict=True)):
        if hoped_ms > WORTH_ASKING * composition.expected.mean_latency_ms:
            break
        try:
            coarser = compose_library(other, settings)
        except CompositionError:  # that precision cannot promise the accuracy
            continue
        if coarser.expected.mean_latency_ms < composition.expected.mean_latency_ms:
            library, composition = other, coarser
    return library, composition


def compose_library(
    library: Library,
    settings: Settings,
    *,
    further: Further | None = None,
    share: float = 1.0,
) -> Composition:
    """Choose caches from an open library; nothing is written. Raises as `compose`."""
    check_settings(settings)
    check_library(library, settings)
    return to_composition(library, settings, plan(library, settings, further, share))


def to_composition(library: Library, settings: Settings, best: CandidatePlan) -> Composition:
    """Return the composition that deploys a plan; its note says if it is not certified."""
    composition = Composition(
        name=settings.name,
        objective=settings.objective,
        solver=best.choice.solver,
        gap=best.choice.gap,
        alpha=best.choice.alpha,
        accuracy_target=settings.accuracy,
        confidence=settings.confidence,
        memory_limit_bytes=settings.memory_limit_bytes,
        backend=library.manifest.profile.backend,
        placement=best.placement,
        exits=tuple(
            replace(leaving, cache_sha256=library.cache_sha256(leaving.trial_id)) for leaving in best.exits
        ),
        expected=best.expected,
        certificate=best.certificate,
        checkpoint_sha256=library.manifest.checkpoint_sha256,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        note=_note(library, settings, best),
        expected_from="replay" if best.replayed else "table",
        per_class=settings.per_class,
        measured_on=library.manifest.profile.conditions,
        lookup_cores=library.manifest.profile.lookup_cores if best.placement == "overlapped" else 1,
    )
    warning = composition.warning if composition.exits else ""
    notes = (composition.note, _copies_warning(library, best), other_processor(library), warning)
    return replace(composition, note="; ".join(note for note in notes if note))


def plan(
    library: Library, settings: Settings, further: Further | None = None, share: float = 1.0
) -> CandidatePlan:
    """Return the plan of least expected latency over the placements. Raises as `compose`."""
    tried = placements(library, settings)
    if settings.objective == "exact":
        select = outcomes_of(library, SELECT)
        if settings.confidence is None:
            return plan_uncertified(library, settings, tried, select)
        count = outcomes_of(library, CERTIFY).copies.evidence
        count += 0 if further is None else further.copies.evidence
        proposal = propose(library, settings, tried, select, count)
        return proposal.deploy(_to_certify_on(library, further, proposal.candidates), share)
    replayed_on = _outcomes(library, SELECT)
    plans = [plan_published(library, settings, placement, replayed_on) for placement in tried]
    best = min(plans, key=lambda plan: placement_rank(plan.placement, plan.expected.mean_latency_ms))
    certified_on = _to_certify_on(library, further, [best.choice.candidates])
    return certify_published(library, settings, best, certified_on, share)


def _to_certify_on(
    library: Library, further: Further | None, path: Sequence[Sequence[Candidate]]
) -> SplitOutcomes | None:
    """Return the outcomes of the certify split, followed by those of further inputs for this path."""
    if further is None:
        return _outcomes(library, CERTIFY)
    return further.after(outcomes_of(library, CERTIFY), path)


def _outcomes(library: Library, split: int) -> SplitOutcomes | None:
    outcomes = outcomes_of(library, split) if library.has_outcomes else None
    return outcomes if outcomes is not None and len(outcomes) else None


def _copies_warning(library: Library, plan: CandidatePlan) -> str:
    if plan.certificate is None or not library.has_outcomes:
        return ""
    return warning_of_copies(library.copies().of(library.base_outcomes().split == CERTIFY))


def _note(library: Library, settings: Settings, plan: CandidatePlan) -> str:
    if not any(trial.status == "trained" for trial in library.trials):
        return "no caches: the library holds no trained variant; see the reasons in trials.csv"
    found = plan.certificate
    if not plan.exits and found is not None and found.tested and not found.certified:
        reason = found.sentence().removesuffix(".")
        return f"no caches: {reason}; give more inputs with --certify-data, or lower --accuracy"
    if not plan.exits:
        refused = () if found is None else found.engines
        limits = (
            ("raise --memory", settings.memory_limit_bytes is not None),
            ("raise --slowdown", settings.slowdown not in ("auto", None)),
        )
        remedies = ["lower --accuracy", *(remedy for remedy, is_set in limits if is_set)]
        nothing = (
            f"no caches: none both reaches agreement {settings.accuracy:g} and saves enough time within the "
            f"limits; {', '.join(remedies)}, or explore longer"
        )
        return "; ".join([nothing, *(each.reason for each in refused if each.tested and each.reason)])
    if settings.objective != "exact" and plan.expected.agreement < settings.accuracy:
        return (
            f"replayed input by input, agreement is {plan.expected.agreement:.4f}, below the target "
            f"{settings.accuracy:g}: the published objective uses averages; use the exact objective"
        )
    compared = disturbed_comparison(library) if tries_all(settings) else ""
    return "; ".join(warning for warning in (disturbance(library), compared) if warning)
