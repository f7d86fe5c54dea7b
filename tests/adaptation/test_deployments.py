"""How many versions a stream keeps, and what is left of those that cannot be stored."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from gati.adaptation.deployments import Deployed, Deployments
from gati.adaptation.retrain import Measurement, Retrained
from gati.composition.load import Served
from gati.errors import RepositoryError, StorageError
from gati.versions.lineage import SampleWindow
from gati.versions.places import folder_of
from gati.versions.repository import ModelRepository
from gati.versions.setting import Setting
from tests.adaptation.deployed import make_deployed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_deployed(tmp_path_factory.mktemp("deployed"))


@pytest.fixture
def few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gati.adaptation.deployments._KEEP", 3)


def published(deployments: Deployments, served: Served, parent: Deployed | None = None) -> Deployed:
    """The same caches again, as a version."""
    setting = Setting(served.composition, tuple(served.engine.exits))
    measured = Measurement(100, 0.5, 0.99, 1.0)
    return deployments.publish(
        Retrained((setting,), 0, measured, measured, {}),
        parent=parent or deployments.open(0),
        trained=SampleWindow(100),
        signature=np.zeros(17, np.float32),
        reason="interval",
    )


@pytest.mark.usefixtures("few_are_kept")
def test_versions_that_are_never_proven_do_not_fill_the_disk(served: Served, tmp_path: Path) -> None:
    """Only an activation removed old ones: where none could be proven, there was one more each interval."""
    repository = ModelRepository(tmp_path / "versions")
    deployments = Deployments(served, repository, "digits", tmp_path / "local")
    deployments.activate(published(deployments, served))
    numbers = [published(deployments, served).number for _ in range(8)]
    assert numbers == list(range(2, 10))
    assert [each.version for each in repository.versions("digits")] == [1, *range(6, 10)]
    assert len(list((tmp_path / "local").iterdir())) <= 6


def test_versions_are_published_where_old_ones_cannot_be_deleted(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a bucket with a policy of retention: no version could be published any more."""
    repository = ModelRepository(tmp_path / "versions")
    deployments = Deployments(served, repository, "digits", tmp_path / "local")

    def forbidden(*_: object, **__: object) -> None:
        raise StorageError("access denied")

    monkeypatch.setattr(repository, "collect_garbage", forbidden)
    assert published(deployments, served).number == 1
    assert "old versions of digits stay: access denied" in caplog.text


def test_a_version_that_cannot_be_stored_leaves_nothing(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = ModelRepository(tmp_path / "versions")
    deployments = Deployments(served, repository, "digits", tmp_path / "local")

    def full(*_: object) -> None:
        raise StorageError("disk full")

    monkeypatch.setattr(repository, "publish", full)
    for _ in range(3):
        with pytest.raises(StorageError, match="disk full"):
            published(deployments, served)
    assert list((tmp_path / "local").iterdir()) == []


@pytest.mark.usefixtures("few_are_kept")
def test_versions_that_were_proven_stay_however_many_are_not(served: Served, tmp_path: Path) -> None:
    """Each of them counted among those that are kept: a scene of yesterday was learned from anew."""
    repository = ModelRepository(tmp_path / "versions")
    deployments = Deployments(served, repository, "digits", tmp_path / "local")
    for at in range(10):
        version = published(deployments, served)
        if at in (0, 2, 4):
            deployments.activate(version)
    assert [each.version for each in repository.versions("digits")] == [1, 3, 5, *range(7, 11)]


def test_no_number_is_given_out_twice_after_versions_were_deleted(served: Served, tmp_path: Path) -> None:
    """Numbers began at 1 again: settings of the new version answered by the proof of the old one."""
    repository = ModelRepository(tmp_path / "versions")
    deployments = Deployments(served, repository, "digits", tmp_path / "local")
    serving = published(deployments, served)
    shutil.rmtree(tmp_path / "versions")
    for _ in range(2):
        with pytest.raises(RepositoryError, match=r"^version 1 of digits was deleted .*; restart$"):
            published(deployments, served, parent=serving)
    assert deployments.open(serving.number) is serving and repository.versions("digits") == []
    restarted = Deployments(served, repository, "digits", tmp_path / "again")
    assert published(restarted, served).number == 1


def test_versions_are_published_after_one_that_does_not_serve_was_deleted(
    served: Served, tmp_path: Path
) -> None:
    repository = ModelRepository(tmp_path / "versions")
    deployments = Deployments(served, repository, "digits", tmp_path / "local")
    first, second = published(deployments, served), published(deployments, served)
    shutil.rmtree(tmp_path / "versions" / folder_of("digits", first.number))
    third = published(deployments, served, parent=second)
    assert third.number == 3 and repository.version("digits", 3).lineage.parent == 2
