"""`compose` on whole libraries: what it chooses, writes, explains and refuses."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gati.composition import backends, pareto
from gati.composition import compose as compose_module
from gati.composition.backends import choose_backend
from gati.composition.candidates import full_candidates, relaxed_candidates, without_dominated
from gati.composition.compose import Settings, compose, compose_library
from gati.composition.composition import Composition
from gati.composition.threads import using_threads
from gati.errors import (
    BackendError,
    CompositionError,
    GatiError,
    LibraryError,
    SolverError,
    StorageError,
    VariantError,
)
from gati.exploration.library import Library
from gati.exploration.state import FinishedTrial, RunState
from gati.types import Trial, TrialId
from tests.composition.libraries import make_library, rewrite
from tests.permissions import close

published = pytest.mark.parametrize("objective", ["relaxed", "full"])


@pytest.fixture
def library(tmp_path) -> Library:
    return make_library(tmp_path / "library")


@published
def test_the_composition_is_written_where_the_other_verbs_find_it(library, objective):
    composition = compose(library.directory, accuracy=0.9, objective=objective)
    assert Composition.load(library.composition_path("default")) == composition
    assert composition.exits
    assert composition.expected.mean_latency_ms < composition.expected.base_latency_ms
    assert composition.expected.gain == pytest.approx(2.0 * 0.475 / composition.expected.mean_latency_ms)
    assert composition.checkpoint_sha256 == library.manifest.checkpoint_sha256
    assert composition.objective == objective


def test_several_compositions_live_side_by_side(library):
    compose(library.directory, accuracy=0.9, objective="full", name="fast")
    compose(library.directory, accuracy=0.99, objective="full", name="careful")
    assert Composition.load(library.composition_path("fast")).accuracy_target == 0.9
    assert Composition.load(library.composition_path("careful")).accuracy_target == 0.99


def test_the_composition_names_the_files_of_its_caches(library):
    for trial in library.trials:
        library.cache_path(trial.trial_id).parent.mkdir(exist_ok=True)
        library.cache_path(trial.trial_id).write_text(f"weights of {trial.trial_id}")
    composition = compose(library.directory, accuracy=0.9, objective="full")
    assert composition.exits
    for leaving in composition.exits:
        content = library.cache_path(leaving.trial_id).read_bytes()
        assert leaving.cache_sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.slow
@pytest.mark.usefixtures("unbounded")
@pytest.mark.parametrize("by_latency", [False, True], ids=["accuracy", "latency"])
@pytest.mark.parametrize("gone", [False, True], ids=["replaced", "begun"])
def test_a_library_that_was_explored_anew_meanwhile_gets_no_composition(
    library, monkeypatch, by_latency, gone
):
    """What was counted is about the caches that were there before."""

    def explored_anew(composition: Composition, of: Library) -> Composition:
        if gone:
            library.manifest_path.unlink()
        else:
            library.write_manifest(replace(library.manifest, seed=1))
        return composition

    monkeypatch.setattr(compose_module, "with_headroom", explored_anew)
    with pytest.raises(LibraryError, match="explore has begun to replace .* run this command again once"):
        if by_latency:
            pareto.compose_within_latency(library.directory, 1.5)
        else:
            compose(library.directory, accuracy=0.9)
    assert not library.composition_path().exists()


@published
def test_the_tables_are_enough_and_the_file_says_that_no_outcomes_were_used(tmp_path, objective):
    whole = make_library(tmp_path / "whole")
    bare = make_library(tmp_path / "bare", outcomes=False)
    assert compose(whole.directory, accuracy=0.9, objective=objective).expected_from == "replay"
    from_table = compose(bare.directory, accuracy=0.9, objective=objective)
    assert from_table.expected_from == "table"
    assert from_table.exits


@published
def test_solvers_agree_on_what_a_library_gives(tmp_path, objective):
    library = make_library(tmp_path / "library", outcomes=False, overlapped=True)
    latencies = [
        compose(library.directory, accuracy=0.9, objective=objective, solver=solver).expected.mean_latency_ms
        for solver in ("auto", "highs")
    ]
    assert latencies[0] == pytest.approx(latencies[1], abs=1e-6)


@published
def test_auto_takes_the_better_placement(tmp_path, objective):
    library = make_library(tmp_path / "library", overlapped=True)
    latency = {
        placement: compose(
            library.directory, accuracy=0.9, objective=objective, placement=placement
        ).expected.mean_latency_ms
        for placement in ("inline", "overlapped", "auto")
    }
    assert latency["auto"] == min(latency.values())


@pytest.mark.parametrize(
    ("lookup_ms", "blocks"),
    [pytest.param(0.19, (0, 1, 2), id="ends before"), pytest.param(0.21, (0, 2), id="ends after")],
)
def test_lookups_that_overlap_the_network_do_not_overlap_each_other(tmp_path, lookup_ms, blocks):
    """The network takes 0.2 ms for a block, also if lookups have several cores, which they share."""
    library = rewrite(
        make_library(tmp_path / "library", blocks=6, overlapped=True), overlapped_lookup_ms=lookup_ms
    )
    manifest = library.manifest
    library.write_manifest(replace(manifest, profile=replace(manifest.profile, lookup_cores=2)))
    for placement, cores in (("inline", 1), ("overlapped", 2)):
        compose(library.directory, accuracy=0.9, objective="full", placement=placement, name=placement)
        chosen = Composition.of(library, placement)
        assert chosen.lookup_cores == cores
    assert tuple(leaving.block_index for leaving in chosen.exits) == blocks


@published
def test_memory_is_kept_to_the_byte(tmp_path, objective):
    library = make_library(tmp_path / "library", outcomes=False)
    for limit in (4000, 7999, 8000, "12KiB"):
        composition = compose(library.directory, accuracy=0.9, objective=objective, memory_bytes=limit)
        assert 0 < composition.expected.memory_bytes <= composition.memory_limit_bytes


@published
def test_a_memory_limit_below_every_cache_is_refused_with_the_smallest_size(library, objective):
    with pytest.raises(CompositionError, match="3999 bytes is too small .* needs 4000 bytes .3.9 KiB."):
        compose(library.directory, memory_bytes=3999, objective=objective)
    assert not library.composition_path("default").exists()


@published
def test_an_unreachable_accuracy_gives_no_caches_and_says_why(tmp_path, objective):
    library = make_library(tmp_path / "library", quality=0.0)
    composition = compose(library.directory, accuracy=0.9999, objective=objective)
    assert composition.exits == ()
    assert composition.note.startswith("no caches: none both reaches agreement 0.9999")
    assert composition.expected.gain == 1.0


@published
def test_a_library_of_skipped_variants_gives_no_caches_and_says_why(library, objective):
    rewrite(library, status="skipped", reason="takes longer than the rest of the network")
    composition = compose(library.directory, objective=objective)
    assert composition.exits == ()
    assert "holds no trained variant" in composition.note


@pytest.mark.slow
def test_the_same_library_gives_the_same_composition_twice(library):
    settings = Settings(accuracy=0.9)
    first, second = (compose_library(library, settings) for _ in range(2))
    assert first == replace(second, created=first.created)
    assert first.gap is not None and 0.0 <= first.gap < 1.0
    assert datetime.fromisoformat(first.created).tzinfo == UTC


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        (
            {"accuracy": 1.0},
            CompositionError,
            "accuracy target is 1.0, but must lie strictly between 0 and 1",
        ),
        ({"accuracy": 97}, CompositionError, "accuracy target is 97"),
        ({"confidence": 95}, CompositionError, "confidence is 95, but must lie strictly between 0 and 1"),
        ({"memory_bytes": "lots"}, GatiError, "'lots' is not a size; write for example 256MiB"),
        ({"objective": "best"}, CompositionError, "unknown objective 'best'; choose one of: relaxed, full"),
        ({"solver": "cplex"}, SolverError, "unknown solver 'cplex'; choose one of: auto, gurobi, highs"),
        ({"placement": "beside"}, BackendError, "unknown placement 'beside'; choose one of: auto, inline"),
        (
            {"placement": "overlapped"},
            BackendError,
            "'overlapped' was not measured on backend 'torch' .measured: inline",
        ),
        ({"backend": "abacus"}, BackendError, "unknown backend 'abacus'; choose one of auto"),
        ({"name": "../x"}, CompositionError, "'../x' cannot be the name of a composition; use letters"),
    ],
)
def test_bad_wishes_are_refused_in_one_line_and_nothing_is_written(library, wanted, error, message):
    with pytest.raises(error, match=message) as caught:
        compose(library.directory, **wanted)
    assert "\n" not in str(caught.value)
    assert not (library.directory / "compositions").exists()


@pytest.mark.parametrize(
    ("outcomes", "wanted", "message"),
    [
        (
            True,
            {"placement": "overlapped", "backend": "openvino"},
            "was not measured on backend 'openvino'",
        ),
        (True, {"placement": "overlapped", "threads": 63}, "was not measured with threads=63: gati explore"),
        (True, {"placement": "overlapped", "threads": "auto"}, "was not measured with threads=auto: gati"),
        (True, {"memory_bytes": 10}, "10 bytes is too small for any cache"),
        (False, {}, "objective 'exact' needs the per-input outcomes"),
    ],
)
def test_what_a_library_cannot_give_is_refused_before_anything_is_measured(
    tmp_path, monkeypatch, outcomes, wanted, message
):
    def measured(*_):
        raise AssertionError("measured")

    library = make_library(tmp_path / "library", overlapped=True, outcomes=outcomes)
    monkeypatch.setattr(compose_module, "choose_backend", measured)
    with pytest.raises(GatiError, match=message):
        compose(library.directory, **wanted)


@pytest.mark.parametrize("verb", [compose, pareto.pareto, lambda at: pareto.compose_within_latency(at, 1.0)])
def test_a_checkpoint_that_has_changed_is_refused_before_anything_is_measured(
    library, tmp_path, monkeypatch, verb
):
    """Each verb after it refused the composition."""

    def measured(*_):
        raise AssertionError("measured")

    checkpoint = tmp_path / "weights.pt"
    checkpoint.write_bytes(b"trained further")
    library.write_manifest(replace(library.manifest, checkpoint_path=str(checkpoint)))
    for module in (compose_module, pareto):
        monkeypatch.setattr(module, "choose_backend", measured)
    with pytest.raises(LibraryError, match=f"made from weights abababababab, but {checkpoint} now has"):
        verb(library.directory)
    assert not (library.directory / "compositions").exists()


@pytest.mark.parametrize("at", ["there", "elsewhere", "in a closed folder", "closed"])
def test_a_checkpoint_that_is_the_same_or_cannot_be_read_does_not_keep_from_composing(
    library, tmp_path, monkeypatch, at
):
    """Whoever composes needs no network, and may be another user than who explored."""
    folder = tmp_path / "home"
    folder.mkdir()
    checkpoint = folder / "weights.pt"
    checkpoint.write_bytes(b"trained" if at == "there" else b"trained further")
    sha256 = hashlib.sha256(b"trained").hexdigest()
    changes = {"checkpoint_path": str(checkpoint), "checkpoint_sha256": sha256}
    library.write_manifest(replace(library.manifest, **changes))
    if at == "elsewhere":
        checkpoint.unlink()
    elif at == "in a closed folder":
        close(monkeypatch, folder)
    elif at == "closed":
        access = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: path != str(checkpoint) and access(path, mode))
    assert compose(library.directory, accuracy=0.9, objective="full").exits


def test_caches_of_a_family_that_is_not_registered_are_refused(library):
    """As on the command line, after a program of the user's explored with a family of its own."""
    library = rewrite(library, variant="peek(64)")
    with pytest.raises(VariantError, match=r"has caches peek\(64\), a family that is not registered here"):
        compose(library.directory, objective="full")
    assert not (library.directory / "compositions").exists()
    compose(rewrite(library, status="replaced").directory, objective="full")


def test_a_library_with_a_block_that_no_engine_takes_is_refused(library):
    """A Gati before could explore it."""
    profile = library.manifest.profile
    blocks = (replace(profile.blocks[0], name="base"), *profile.blocks[1:])
    library.write_manifest(replace(library.manifest, profile=replace(profile, blocks=blocks)))
    with pytest.raises(GatiError, match="^no exit can be at block 'base'.*explore with other --blocks$"):
        compose(library.directory)
    assert not (library.directory / "compositions").exists()


@pytest.mark.parametrize(
    ("limits", "remedies"),
    [
        ({}, "lower --accuracy, or explore longer"),
        ({"memory_bytes": 4000}, "lower --accuracy, raise --memory, or explore longer"),
        ({"slowdown": 0.01}, "lower --accuracy, raise --slowdown, or explore longer"),
    ],
)
def test_without_caches_the_limits_that_were_set_are_named(tmp_path, limits, remedies):
    library = make_library(tmp_path / "library", quality=0.0)
    composition = compose(library.directory, accuracy=0.9999, objective="full", **limits)
    assert composition.note.endswith(f"within the limits; {remedies}")


def test_a_folder_without_library_is_refused(tmp_path):
    with pytest.raises(LibraryError, match="no cache library"):
        compose(tmp_path)


def test_a_library_that_is_still_explored_says_how_far_it_is(tmp_path):
    state = RunState(tmp_path)
    state.claim({"model": "package:model"})
    state.write_spent(720.0)
    state.write_finished(FinishedTrial(Trial(TrialId("t"), 0, "input", "student(8)", "trained"), ()))
    told = r"has not finished in .* \(variants so far: 1, in 12 min\): wait until it ends, or, if it was"
    with pytest.raises(LibraryError, match=told):
        compose(tmp_path)
    (row,) = (tmp_path / ".state" / "rows").iterdir()
    row.write_text('{"trial": {"of another version": 1}, "points": []}')
    with pytest.raises(LibraryError, match=told):
        compose(tmp_path)


def test_a_library_that_is_finished_or_cannot_be_read_meanwhile_is_one_line(tmp_path, monkeypatch):
    state = RunState(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", lambda _: True)  # as it was before the other process finished
        assert state.claimed() == {}
    (state.directory / "settings.json").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"cannot read .*settings.json: Is a directory; check the disk"):
        state.claimed()


@pytest.mark.parametrize("threads", [None, 1])
def test_overlapped_lookups_of_a_library_that_was_copied_are_those_that_explore_measured(
    tmp_path, monkeypatch, threads
):
    """`explore` alone measures them, so nothing is measured again, and the composition says so."""
    library = make_library(tmp_path / "library", overlapped=True)
    manifest = library.manifest
    elsewhere = replace(manifest.profile, processor="abacus", threads=1)
    library.write_manifest(replace(manifest, profile=elsewhere))

    def taken(library, backend, *, explored, **_):
        assert explored and backend == "torch", "measured"
        return library

    monkeypatch.setattr(backends, "network_times", lambda library, names, pieces: dict.fromkeys(names, 1.0))
    monkeypatch.setattr(backends, "on_backend", taken)
    for objective in ("full", "exact"):
        settings = Settings(accuracy=0.9, objective=objective, placement="overlapped", threads=threads)
        with using_threads(threads):
            assert choose_backend(library, settings).manifest.profile == elsewhere
    composition = compose(
        library.directory, accuracy=0.9, objective="full", placement="overlapped", threads=threads
    )
    assert composition.placement == "overlapped" and composition.exits
    assert "measured on another processor, abacus" in composition.note


@pytest.mark.parametrize("wanted", [{"objective": "full"}, {"placement": "overlapped", "confidence": None}])
def test_what_compares_no_backends_reads_no_comparison(tmp_path, wanted):
    library = make_library(tmp_path / "library", blocks=2, overlapped=True)
    (library.directory / "profiles").mkdir()
    (library.directory / "profiles" / "networks.json").write_text("{")
    assert compose(library.directory, accuracy=0.9, **wanted).exits


def test_missing_outcomes_of_one_trial_are_an_error_and_not_a_guess(library):
    library.outcomes_path(library.trials[0].trial_id).unlink()
    with pytest.raises(LibraryError, match=r"cannot read .*outcomes.*; restore it from a backup, or"):
        compose(library.directory, accuracy=0.9)
    assert not library.composition_path().exists()


def test_the_relaxed_form_sees_each_variant_at_its_largest_accurate_hit_rate(library):
    candidates = relaxed_candidates(library.trials, library.operating_points, "inline", 0.9)
    assert len({c.trial_id for c in candidates}) == len(candidates) > 0
    for candidate in candidates:
        better = [
            point
            for point in library.operating_points
            if point.trial_id == candidate.trial_id and point.accuracy >= 0.9
        ]
        assert candidate.hit_rate == max(point.hit_rate for point in better)


def test_dominated_candidates_are_dropped_and_nothing_else(library):
    candidates = full_candidates(library.trials, library.operating_points, "inline", 0.9)
    assert without_dominated(candidates) == candidates
    worse = [c.__class__(**{**c.__dict__, "lookup_ms": c.lookup_ms + 1}) for c in candidates]
    assert without_dominated([*worse, *candidates]) == candidates
