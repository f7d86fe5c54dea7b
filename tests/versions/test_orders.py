"""What a repository does first, which protects from a kill, a power failure, or another process."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gati.errors import UnknownVersionError
from gati.versions.history import Action
from gati.versions.repository import ModelRepository
from tests.versions.test_repository import numbers, publish


def files_below(path: Path) -> set[str]:
    found = {path, *path.rglob("*")} if path.is_dir() else {path}
    return {os.path.realpath(each) for each in found}


def test_what_appears_under_its_name_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a version or an entry of the history may be empty after the power failed."""
    flushed: set[str] = set()
    appeared: list[str] = []
    flush, rename, replace = os.fsync, os.rename, os.replace

    def noted(descriptor: int) -> None:
        flushed.add(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        flush(descriptor)

    def checked(source: Path, target: Path) -> None:
        assert files_below(Path(source)) <= flushed, "something of it was not flushed"
        appeared.append(str(target))
        (rename if Path(source).is_dir() else replace)(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", checked)
    monkeypatch.setattr(os, "replace", checked)
    repository = ModelRepository(tmp_path / "models")
    publish(repository)
    repository.activate("cars", 1)
    assert [Path(each).parent.name for each in appeared] == ["versions", "activations"]
    assert {str(Path(each).parent) for each in appeared} <= flushed, "its folder must list it, too"


def test_a_version_copied_to_another_number_is_none(tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path / "models")
    publish(repository)
    versions = tmp_path / "models" / "cars" / "versions"
    shutil.copytree(versions / "00000001", versions / "00000002")
    assert numbers(repository) == [1] and publish(repository) == [3]


def test_who_collects_marks_a_version_before_asking_who_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever takes it into use after that question sees the mark."""
    repository, other = (ModelRepository(tmp_path / "models") for _ in range(2))
    publish(repository, 3)
    actives = repository.actives

    def asked(model: str) -> dict[str, int]:
        found = actives(model)
        for take in (other.activate, other.pin):
            with pytest.raises(UnknownVersionError, match="being removed"):
                take(model, 1)
        return found

    monkeypatch.setattr(repository, "actives", asked)
    assert repository.collect_garbage("cars", keep=2) == [1]
    assert numbers(other) == [2, 3] and other.active("cars") is None


@pytest.mark.parametrize("made_for", ["", "gate"])
def test_whose_entry_is_overtaken_writes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_for: str
) -> None:
    """Two activate at once, with the same number: what was activated last by both is active."""
    repository = ModelRepository(tmp_path / "models")
    publish(repository, 2)
    history, others = repository._history, ["f" * 32]
    append = history.append

    def append_and_be_overtaken(model: str, number: int, action: Action, made_for: str = "") -> str:
        path = append(model, number, action, made_for)
        if others:
            ours = (tmp_path / "models" / path).read_text()
            theirs = ours.replace(f"[{number}]", "[2]")
            assert theirs != ours
            history._place.put(f"{path[: path.rindex('-')]}-{others.pop()}.json", theirs.encode())
        return path

    monkeypatch.setattr(history, "append", append_and_be_overtaken)
    repository.activate("cars", 1, made_for)
    assert repository.active("cars") == 1 and not others
    assert [each.version for each in repository.history("cars")] == [1, 2, 1]
