"""Cleaning the folder of stored networks and quantised lookups: what goes, and what others may still read."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gati.composition.compose import compose
from gati.composition.composition import Composition
from gati.composition.engines import graph_files
from gati.composition.stored_graphs import UNUSED_S, remove_unused_graphs, store_graphs
from gati.engine.backends import BACKENDS, Graph, GraphBackend, get_backend
from gati.engine.engine import Engine
from gati.engine.exits import EngineExit
from gati.errors import BackendError, StorageError
from gati.exploration.library import Library
from tests.composition.libraries import make_library
from tests.engine.networks import traced_network

pytestmark = pytest.mark.usefixtures("unbounded")

LOOKUP = "lookup-0123456789abcdef.onnx"
OTHER = "0123456789abcdef.onnx"


def put(folder: Path, *names: str, unused_s: float = UNUSED_S + 60.0) -> list[Path]:
    """Files that were last read `unused_s` ago."""
    folder.mkdir(exist_ok=True)
    paths = [folder / name for name in names]
    then_s = time.time() - unused_s
    for path in paths:
        path.write_bytes(b"graph")
        os.utime(path, (then_s, then_s))
    return paths


@pytest.fixture
def library(tmp_path: Path) -> Library:
    return make_library(tmp_path / "library", quality=6.0)


def composed(library: Library, name: str = "default") -> Composition:
    return compose(library.directory, accuracy=0.95, backend="torch", name=name, solver="highs")


def files_of(library: Library, composition: Composition) -> list[str]:
    setting = [(leaving.trial_id, leaving.threshold) for leaving in composition.exits]
    return [path.name for path in graph_files(library, setting, composition.backend)]


@pytest.mark.slow
def test_composing_removes_what_nothing_needs_and_nothing_has_read_for_long(library: Library) -> None:
    kept = composed(library, "kept")
    assert kept.exits
    folder, needed = library.directory / "graphs", files_of(library, kept)
    shorter = f"{Path(needed[0]).stem}-64.onnx"
    stay = put(folder, *needed, shorter, "notes.txt", "0123.onnx") + put(
        folder, "f" * 16 + ".zip", unused_s=60.0
    )
    go = put(folder, OTHER, "0123456789abcdef-64.onnx", "0123456789abcdef.zip", LOOKUP, f".{OTHER}.x7.part")
    composed(library)
    assert sorted(folder.iterdir()) == sorted(stay) and not set(go) & set(stay)


@pytest.mark.slow
def test_nothing_is_removed_while_a_composition_cannot_be_read(library: Library) -> None:
    folder = library.directory / "graphs"
    (old,) = put(folder, OTHER)
    newer = library.composition_path("newer")
    newer.parent.mkdir(exist_ok=True)
    newer.write_text('{"format": 99}')
    composed(library)
    assert old.is_file()
    newer.unlink()
    composed(library)
    assert not old.exists()


def test_what_was_read_since_the_oldest_composition_was_saved_stays(tmp_path: Path) -> None:
    """Another version of Gati, which names networks otherwise, may need it."""
    before, since = put(tmp_path, OTHER, "f" * 16 + ".zip", unused_s=2 * UNUSED_S)
    saved_s = time.time() - 2 * UNUSED_S
    os.utime(before, (saved_s - 2 * 86_400.0,) * 2)
    remove_unused_graphs(tmp_path, (), saved_s=saved_s)
    assert list(tmp_path.iterdir()) == [since]


@pytest.mark.slow
def test_composing_with_the_published_forms_cleans_too(library: Library) -> None:
    (old,) = put(library.directory / "graphs", OTHER)
    compose(library.directory, accuracy=0.95, objective="relaxed", solver="highs")
    assert not old.exists()


def test_a_library_without_the_folder_gets_none(tmp_path: Path) -> None:
    remove_unused_graphs(tmp_path / "graphs", ())
    assert not list(tmp_path.iterdir())


def test_networks_are_stored_in_a_folder_that_must_be_writable(tmp_path: Path) -> None:
    folder = tmp_path / "graphs"
    store_graphs(folder, {folder / OTHER: b"network"})
    assert (folder / OTHER).read_bytes() == b"network"
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    with pytest.raises(StorageError, match="cannot write .*blocked") as caught:
        store_graphs(blocked, {blocked / OTHER: b"network"})
    assert "\n" not in str(caught.value)


class Stored(GraphBackend):
    """Answers nothing; its networks are what is stored."""

    name = "stored"

    def assembled(self, traced: Any, settings: Sequence[Sequence[EngineExit]], *_: Any, **__: Any) -> Any:
        yield from (b"made again" for _ in settings)

    def compile(self, model: bytes, threads: int | None = None) -> Graph:
        class Fixed(Graph):
            def answer(self, x: Tensor) -> tuple[Tensor, int]:
                raise AssertionError("no request is made")

        return Fixed()


def test_a_network_that_an_engine_has_opened_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "stored", Stored)
    opened, base, unread = put(tmp_path, OTHER, "f" * 16 + ".onnx", "e" * 16 + ".onnx")
    Engine(traced_network(), backend="stored", graphs=(opened, base))
    remove_unused_graphs(tmp_path, ())
    assert opened.is_file() and not base.exists() and not unread.exists()
    remove_unused_graphs(tmp_path, (), now_s=time.time() + UNUSED_S + 60.0)
    assert not opened.exists()
    Engine(traced_network(), backend="stored", graphs=(opened, base))
    assert opened.read_bytes() == b"made again"


def test_a_stored_network_is_not_opened_for_a_gpu(tmp_path: Path) -> None:
    """It runs on the CPU, and each request would fail."""
    (kept,) = put(tmp_path, OTHER)
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(BackendError, match="backend 'stored' runs on the cpu; use --backend torch on cuda"):
        Stored().early_exit(on_gpu, [], "logits", kept)


@pytest.mark.slow
@pytest.mark.skipif(not BACKENDS["onnxruntime-int8-lookups"].installed(), reason="no ONNX Runtime")
def test_a_quantised_lookup_that_a_command_has_read_stays(tmp_path: Path) -> None:
    from tests.engine.test_int8_lookups import CONVERTED, exits, requests

    def made() -> bytes:
        backend = get_backend("onnxruntime-int8-lookups", calibration=requests(20), kept=tmp_path)
        assert isinstance(backend, GraphBackend)
        (model,) = backend.assembled(traced_network(), [exits(0.5)], "logits", convert=CONVERTED)
        return model

    first = made()
    (lookup,) = tmp_path.iterdir()
    put(tmp_path, LOOKUP)
    os.utime(lookup, (0.0, 0.0))
    assert made() == first
    remove_unused_graphs(tmp_path, ())
    assert list(tmp_path.iterdir()) == [lookup]
