"""Where an engine's own answers are certified, exactly the network that gave them must serve."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from gati.composition.compose import keep_graphs
from gati.composition.composition import Composition
from gati.composition.costs import CostedLibrary
from gati.composition.engines import EngineAnswers, graphs_needed, graphs_of
from gati.composition.ledger import composition_identity
from gati.composition.load import load, open_served
from gati.composition.problem import Candidate
from gati.composition.stored_graphs import UNUSED_S, graph_folder, remove_unused_graphs
from gati.engine.backends import BACKENDS, Graph, GraphBackend
from gati.engine.exits import EngineExit
from gati.errors import CompositionError
from gati.evaluation.bench import bench
from gati.evaluation.certify import certify
from gati.exploration.library import CERTIFY, SELECT, Library
from gati.types import Trial
from gati.versions.engines import open_version, save_version
from gati.versions.setting import graph_in
from tests.composition.test_costs import costs_of
from tests.engine.networks import BLOCKS, CLASSES, traced_network
from tests.engine.served import exit_at, images, rewrite


class Network(bytes):
    """A converted network; they count how many of them there are."""

    alive: ClassVar[int] = 0
    most: ClassVar[int] = 0

    def __new__(cls, content: str) -> Network:
        cls.alive += 1
        cls.most = max(cls.most, cls.alive)
        return super().__new__(cls, content.encode())

    def __del__(self) -> None:
        Network.alive -= 1


class Coarse(GraphBackend):
    """Makes networks that give every input one class, which depends on how they were quantised."""

    precision: ClassVar[Literal["f32", "bf16", "int8"]] = "int8"
    class_given: ClassVar[int] = 0
    compiled: ClassVar[list[bytes]]

    def assembled(
        self,
        traced: Any,
        settings: Sequence[Sequence[EngineExit]],
        *_: Any,
        cuts: Collection[str] = (),
        **__: Any,
    ) -> Iterator[bytes]:
        for exits in settings:
            thresholds = [leaving.threshold for leaving in exits]
            yield Network(f"{self.class_given} {sorted(cuts)} {thresholds}")

    def compile(self, model: bytes, threads: int | None = None) -> Graph:
        self.compiled.append(bytes(model))
        probabilities = torch.eye(CLASSES)[int(model[:1])][None]

        class Constant(Graph):
            def answer(self, x: Tensor) -> tuple[Tensor, int]:
                return probabilities, 0

        return Constant()


@pytest.fixture
def library(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library with a composition for the coarse backend."""
    monkeypatch.setattr(Coarse, "compiled", [], raising=False)
    monkeypatch.setattr(Coarse, "class_given", 0)
    monkeypatch.setattr(Coarse, "name", "coarse", raising=False)
    monkeypatch.setitem(BACKENDS, "coarse", Coarse)
    rewrite(directory, backend="coarse")
    library = Library(directory)
    exits = [exit_at(index, 0.0) for index in (0, 1)]
    library.write_trials(
        [Trial(each.trial_id, each.block_index, each.block, each.variant, "trained") for each in exits], []
    )
    return Library.open(directory)


class Inputs:
    def __len__(self) -> int:
        return 6

    def images(self, rows: Sequence[int]) -> Tensor:
        return torch.zeros(len(rows), 1, 6, 6)


def answers_of(library: Library) -> EngineAnswers:
    pieces: Any = SimpleNamespace(
        held_out=(Inputs(), np.array([SELECT, CERTIFY] * 3, dtype=np.uint8)),
        traced=traced_network(),
        convert=None,
        cuts=set(),
        cache=lambda trial_id: None,
    )
    return EngineAnswers(library, "coarse", pieces)


def compose(library: Library, name: str) -> Composition:
    """Certify the default composition's exits by the engine's own answers, and write it as `name`."""
    costed = CostedLibrary(library, costs_of(library, "coarse"))
    costed.__dict__["answers"] = answers_of(library)
    chosen = replace(Composition.load(library.composition_path()), name=name)
    composition = keep_graphs(costed, chosen)
    composition.save(library.composition_path(name))
    return composition


def class_of(library: Library, name: str) -> int:
    (answer,) = load(library.directory, composition=name)(torch.zeros(1, 1, 6, 6))
    return answer.class_index


def setting(*thresholds: float) -> list[Candidate]:
    return [
        Candidate(
            trial_id=exit_at(index, threshold).trial_id, block_index=index, variant="", threshold=threshold,
            hit_rate=0.5, accuracy=1.0, lookup_ms=0.1, penalty_ms=0.1, memory_bytes=1,
        )
        for index, threshold in enumerate(thresholds)
    ]  # fmt: skip


def test_composing_again_never_changes_what_another_composition_answers(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same exits quantised by other inputs or packages give another network."""
    first = compose(library, "first")
    monkeypatch.setattr(Coarse, "class_given", 1)
    second = compose(library, "second")
    assert [class_of(library, name) for name in ("first", "second")] == [0, 1]
    assert composition_identity(library, first) != composition_identity(library, second)
    needed = {path.stem for each in (first, second) for path in graphs_of(library, each)}
    assert needed <= graphs_needed(library) and len(needed) == 3


def test_another_version_of_gati_runs_the_network_that_was_certified(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    compose(library, "first")
    monkeypatch.setattr("gati.composition.engines.__version__", "99.0")
    monkeypatch.setattr(Coarse, "class_given", 1)
    assert class_of(library, "first") == 0


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_bytes(b"1 [] []")])
def test_a_network_other_than_the_certified_one_is_refused(library: Library, change: Any) -> None:
    """It could be made again, but its certificate would not apply."""
    composition = compose(library, "first")
    path = graphs_of(library, composition)[0]
    change(path)
    with pytest.raises(
        CompositionError, match="network of composition 'first', is missing, or one"
    ) as caught:
        load(library.directory, composition="first")
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_compositions_of_an_older_gati_open_the_network_named_by_their_setting(library: Library) -> None:
    plain = Composition.load(library.composition_path())
    early, base = graphs_of(library, plain)
    early.parent.mkdir()
    for path in (early, base):
        path.write_bytes(b"2 [] []")
    assert class_of(library, "default") == 2
    compose(library, "first")
    assert early.read_bytes() == b"2 [] []"


def test_a_composition_whose_thresholds_were_changed_is_refused(library: Library) -> None:
    """Its engine would say that it uses them, and run the network with those that were certified."""
    composition = compose(library, "first")
    first, *others = composition.exits
    changed = (replace(first, threshold=0.9), *others)
    replace(composition, exits=changed).save(library.composition_path("first"))
    with pytest.raises(CompositionError, match="or one of them has changed"):
        load(library.directory, composition="first")


def test_versions_share_the_network_without_exits_whatever_is_composed_later(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is missing, a backend that must be calibrated cannot make it."""
    compose(library, "first")
    served = open_served(library.directory, composition="first")
    save_version(tmp_path / "2", served.composition, served.engine.exits)
    kept = graph_in(tmp_path / "2", "coarse")
    kept.parent.mkdir()
    kept.write_bytes(b"3 [] []")
    monkeypatch.setattr(Coarse, "class_given", 1)
    compose(library, "first")
    folder = graph_folder(library.directory)
    remove_unused_graphs(folder, graphs_needed(library), now_s=time.time() + 2 * UNUSED_S)
    monkeypatch.setattr(Coarse, "class_given", 2)
    engine = open_version(served, tmp_path / "2").engine
    x = torch.zeros(1, 1, 6, 6)
    assert [ask(x)[0].class_index for ask in (engine, engine.base)] == [3, 1]


@pytest.mark.slow
def test_to_certify_a_composition_of_an_older_gati_binds_it_to_its_network(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version would make another network, of which the certificate says nothing."""
    np.savez(tmp_path / "more.npz", images=images(20))
    found = [certify(library.directory, tmp_path / "more.npz", write=write) for write in (False, True, False)]
    assert {each.attempt.number for each in found} == {1}
    monkeypatch.setattr("gati.composition.engines.__version__", "99.0")
    monkeypatch.setattr(Coarse, "class_given", 1)
    assert class_of(library, "default") == 0


def test_bench_measures_the_network_that_serves(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converted anew, without the cuts, it may answer and take otherwise."""
    compose(library, "first")
    monkeypatch.setattr(Coarse, "class_given", 1)
    monkeypatch.setattr("gati.evaluation.bench.BACKENDS", {})
    np.savez(tmp_path / "more.npz", images=images(4))
    Coarse.compiled.clear()
    found = bench(library.directory, tmp_path / "more.npz", composition="first", repetitions=1, seconds=0)
    assert [row.name for row in found.rows] == ["base coarse", "gati coarse"]
    assert {model[:1] for model in Coarse.compiled} == {b"0"}


def test_the_network_that_answered_is_stored_wherever_others_are_cut(library: Library) -> None:
    """A graph of other pieces may round otherwise."""
    answers = answers_of(library)
    answers([])
    answers.ask([setting(0.5)])
    asked = list(Coarse.compiled)
    answers.announce([setting(0.5, 0.5)])
    answers.of_split(CERTIFY).ask([setting(0.5), setting(0.7)])
    chosen = Composition.load(library.composition_path())
    answers.keep(replace(chosen, exits=(exit_at(0, 0.5),), backend="coarse"))
    stored = {path.read_bytes() for path in (library.directory / "graphs").iterdir()}
    assert stored == set(asked)
    assert not any(BLOCKS[1].encode() in model for model in Coarse.compiled)


def test_one_network_is_in_memory_at_a_time(library: Library) -> None:
    answers = answers_of(library)
    path = [setting(*pair) for pair in [(0.1,), (0.2,), (0.3,), (0.4,), (0.1, 0.1), (0.2, 0.2), (0.3, 0.3)]]
    Network.most = Network.alive
    before = Network.alive
    answers.of_split(SELECT).ask(path)
    answers.of_split(CERTIFY).ask(path)
    assert len(Coarse.compiled) >= 4
    assert Network.most - before <= 2, "the next one is made while the last one is still there"
