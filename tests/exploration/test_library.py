"""The cache library on disk."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gati import exploration
from gati.errors import LibraryError, StorageError
from gati.exploration.library import FORMAT, BaseOutcomes, Library, Manifest, TrialOutcomes
from gati.exploration.state import RunState, StagePlan, gone, locked
from gati.types import BlockProfile, OperatingPoint, Profile, Trial, TrialId
from tests.permissions import close


def _manifest(complete: bool = True) -> Manifest:
    block = BlockProfile(0, "layer1.0", "BasicBlock", (16, 32, 32), 0.5, 0.75)
    return Manifest(
        model_source="gati.zoo:resnet20",
        checkpoint_path=None,
        checkpoint_sha256="0" * 64,
        preprocessing={"mean": [0.0]},
        class_names=("cat", "dog"),
        classes=2,
        outputs_kind="logits",
        input_shape=(3, 32, 32),
        profile=Profile("torch", "cpu", 2, 1.5, (block,)),
        seed=0,
        counts={"select": 2},
        data={},
        settings={},
        versions={},
        complete=complete,
    )


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    library = Library(tmp_path)
    library.write_manifest(_manifest())
    assert Library.open(tmp_path).manifest == _manifest()


def test_a_library_of_an_older_gati_calls_its_variants_as_today(tmp_path: Path) -> None:
    names = {"pool(64)": "pool-linear(64)", "conv(3,1)": "conv2d(3,1)", "fc(8)": "fc(8)", "mine": "mine"}
    library = Library(tmp_path)
    library.write_trials([Trial(TrialId(f"a--{name}"), 0, "a", name, "trained") for name in names], [])
    library.write_manifest(replace(_manifest(), settings={"variants": list(names)}))
    assert [trial.variant for trial in Library.open(tmp_path).trials] == list(names)
    library.write_manifest(replace(_manifest(), format=1, settings={"variants": list(names)}))
    old = Library.open(tmp_path)
    assert [trial.variant for trial in old.trials] == list(names.values())
    assert old.manifest.settings["variants"] == list(names.values())


def test_tables_and_outcomes_come_back_as_they_were_written(tmp_path: Path) -> None:
    library = Library(tmp_path)
    trained = Trial(
        TrialId("a--fc-8"), 0, "a", "fc(8)", "trained", selector="margin", lookup_ms=0.25, loss=1e-7
    )
    skipped = Trial(
        TrialId("a--fc-9"), 0, "a", "fc(9)", "skipped", reason="a lookup takes 2 ms, the rest 1 ms"
    )
    points = [OperatingPoint(trained.trial_id, 0.1 + 0.2, 0.5, 1.0)]
    library.write_trials([trained, skipped], points)
    assert library.trials == (trained, skipped)
    assert library.operating_points == tuple(points)

    outcomes = TrialOutcomes(np.array([0.5, 0.25], np.float32), np.array([1, 0]))
    library.write_outcomes(trained.trial_id, outcomes)
    for before, after in zip(outcomes, library.outcomes(trained.trial_id), strict=True):
        assert np.array_equal(before, after)
    base = BaseOutcomes(np.array([1, 0]), None, np.array([0, 1], np.uint8))
    library.write_base_outcomes(base)
    assert library.base_outcomes().label is None
    assert np.array_equal(library.base_outcomes().split, base.split)


def test_no_library_an_unfinished_a_newer_and_a_damaged_one_are_one_line_each(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=r"no cache library in .* run gati explore --out first"):
        Library.open(tmp_path)
    Library(tmp_path).write_manifest(_manifest(complete=False))
    with pytest.raises(LibraryError, match="is unfinished: run the same gati explore command again"):
        Library.open(tmp_path)
    text = json.dumps({**json.loads(_manifest().to_json()), "format": FORMAT + 1})
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(LibraryError, match=rf"has format {FORMAT + 1}, this Gati reads up to {FORMAT}"):
        Library.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(LibraryError, match="is damaged .*run gati explore again with another --out"):
        Library.open(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 1}')
    with pytest.raises(
        LibraryError, match="has no field 'model_source'; restore it from a backup, or .* another --out"
    ):
        Library.open(tmp_path)


def test_a_library_in_a_closed_folder_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Library(tmp_path / "library").write_manifest(_manifest())
    close(monkeypatch, tmp_path / "library")
    with pytest.raises(StorageError, match=r"^cannot read .*library/.*: Permission denied; check the disk"):
        Library.open(tmp_path / "library")


@pytest.mark.parametrize("error", [errno.EACCES, errno.ESTALE])
def test_a_manifest_that_cannot_be_looked_at_is_not_said_to_be_missing(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a link into a closed folder, or on a network disk that went away."""
    library, stat = Library(tmp_path), os.stat
    library.write_manifest(_manifest())

    def refused(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if path == library.manifest_path:
            raise OSError(error, os.strerror(error), str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", refused)
    with pytest.raises(StorageError) as told:
        Library.open(tmp_path)
    reason = f"{os.strerror(error)}; check the disk and the permissions"
    assert str(told.value) == f"cannot read {library.manifest_path}: {reason}"


def test_a_damaged_row_is_named_by_its_line(tmp_path: Path) -> None:
    library = Library(tmp_path)
    library.write_trials([Trial(TrialId("t"), 0, "a", "fc(8)", "trained")], [])
    table = tmp_path / "trials.csv"
    table.write_text(table.read_text().replace("t,0,a", "t,zero,a"))
    with pytest.raises(LibraryError, match=r"trials.csv, line 2: .*zero"):
        _ = library.trials


def test_two_runs_in_one_directory_are_refused(tmp_path: Path) -> None:
    with (
        locked(tmp_path),
        pytest.raises(LibraryError, match=r"another gati explore \(process \d+\) is writing"),
        locked(tmp_path),
    ):
        pass
    with locked(tmp_path):
        pass


def test_a_link_may_lead_to_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    link, real = tmp_path / "link", tmp_path / "disk" / "library"
    link.symlink_to(real)
    with pytest.raises(RuntimeError), locked(link):
        raise RuntimeError
    assert not real.parent.exists() and link.is_symlink()
    with locked(link):
        (link / "manifest.json").write_text("{}")
    assert (real / "manifest.json").is_file()


def test_a_name_that_is_too_long_for_a_folder_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        StorageError, match=r"^cannot write to .*: File name too long; choose another folder, or make it writ"
    ):
        locked(tmp_path / ("x" * 300)).__enter__()


def test_a_disk_without_file_locks_is_not_taken_for_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refused)
    with pytest.raises(StorageError, match=r"cannot lock .*\.lock: No locks available; choose an --out"):
        locked(tmp_path / "new" / "out").__enter__()
    assert not (tmp_path / "new").exists()


def test_a_disk_without_room_for_the_lock_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """Here no file may grow; a full disk says the same in other words."""
    usual, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    try:
        with pytest.raises(StorageError, match=r"cannot lock .*\.lock: File too large; choose an --out"):
            locked(tmp_path / "new" / "out").__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (usual, most))
    assert not (tmp_path / "new").exists()


def test_what_another_version_began_is_said_to_be_its_own(tmp_path: Path) -> None:
    state = RunState(tmp_path)
    state.claim({"gati": "1.0", "families": 1, "seed": 0})
    with pytest.raises(
        LibraryError,
        match=r"unfinished exploration by Gati 1.0, and this is 1.1: .* delete .*\.state to start",
    ):
        state.claim({"gati": "1.1", "families": 2, "seed": 0})


def test_another_exploration_may_not_go_on_with_an_unfinished_one(tmp_path: Path) -> None:
    state = RunState(tmp_path)
    state.claim({"seed": 0, "model": "a"})
    state.claim({"seed": 0, "model": "a"})
    with pytest.raises(LibraryError, match=r"unfinished exploration with another seed \(0, now 1\)"):
        state.claim({"seed": 1, "model": "a"})


def test_an_unfinished_round_is_told_from_an_unfinished_exploration(tmp_path: Path) -> None:
    begun = {"round": 2, "budget_s": 60.0, "epochs": None}
    state = RunState(tmp_path)
    state.claim(begun)
    with pytest.raises(
        LibraryError,
        match=r"round of training with another budget_s \(60.0, now 30.0\): .* give up that round",
    ):
        state.claim({**begun, "budget_s": 30.0})
    with pytest.raises(LibraryError, match=r"unfinished round of training \(gati explore --more\): repeat"):
        state.claim({"seed": 0, "model": "a", "budget_s": 60.0})
    state.clear()
    state.claim({"seed": 0, "model": "a"})
    with pytest.raises(
        LibraryError, match=r"must end .* its command, or delete .*\.state to give that exploration up$"
    ):
        state.claim(begun)


def test_the_map_of_the_room_names_every_module_once() -> None:
    named = re.findall("`([a-z_]+)`", exploration.__doc__ or "")
    there = {path.stem for path in Path(exploration.__file__).parent.glob("*.py")} - {"__init__"}
    assert len(named) == len(set(named)) and set(named) == there


def test_each_stage_keeps_its_plan(tmp_path: Path) -> None:
    """All are made before any is trained where several train at once."""
    state = RunState(tmp_path)
    plans = {"students": StagePlan(100, 60.0, "torch", 3), "exits": StagePlan(20, None, batch_size=8)}
    for stage, plan in plans.items():
        state.write_plan(stage, plan)
    assert {stage: RunState(tmp_path).plan(stage) for stage in plans} == plans
    assert state.plan("others") is None


def test_only_what_is_a_path_is_looked_for_there(tmp_path: Path) -> None:
    code, missing = tmp_path / "own.py", tmp_path / "val.npz"
    code.write_text("")
    named = ("torchvision:resnet18", "package.module:build", None, str(tmp_path), f"{code}:build")
    assert [gone(source) for source in named] == [None] * len(named)
    code.unlink()
    assert [gone(source) for source in (f"{code}:build", str(missing))] == [str(code), str(missing)]
