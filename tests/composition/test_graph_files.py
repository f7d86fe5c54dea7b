"""Files of converted networks: their names tell apart whatever was converted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gati.composition.engines import graph_files
from gati.exploration.library import HiddenProbe, Library, NetworkProbe
from tests.composition.libraries import make_library

PROBE = NetworkProbe(
    input_sha256="cd" * 32,
    scores=(0.5, -0.25),
    hidden={"layer1.0": HiddenProbe(values=(0.125,), scale=1.0)},
)


@pytest.fixture
def library(tmp_path: Path) -> Library:
    library = make_library(tmp_path / "library")
    library.write_manifest(replace(library.manifest, probe=PROBE))
    return Library.open(library.directory)


def names(library: Library, **changes: Any) -> set[str]:
    """The files' names, with the manifest changed."""
    library.write_manifest(replace(library.manifest, **changes))
    setting = [(library.trials[0].trial_id, 0.5)]
    return {path.name for path in graph_files(Library(library.directory), setting, "openvino")}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"input_shape": (3, 64, 64)}, id="inputs of another size"),
        pytest.param({"probe": replace(PROBE, scores=(-0.5, 0.25))}, id="code with other scores"),
        pytest.param({"probe": replace(PROBE, hidden={})}, id="code with other hidden outputs"),
        pytest.param({"checkpoint_sha256": "ef" * 32}, id="other weights"),
    ],
)
def test_another_network_has_other_files(library: Library, changes: dict[str, Any]) -> None:
    before = names(library)
    assert len(before) == 2
    assert not before & names(library, **changes)


def test_what_does_not_change_the_network_does_not_change_its_files(library: Library) -> None:
    assert names(library) == names(library, explore_seconds=7.0, counts={"select": 1})


def test_a_library_of_an_older_gati_without_a_probe_has_files_too(library: Library) -> None:
    assert len(names(library, probe=None)) == 2
