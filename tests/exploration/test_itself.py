"""The network itself as a companion: for engines whose lookups run in 8-bit integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gati
from gati.caches import Companion, load_cache
from gati.composition.costs import on_backend
from gati.composition.engines import EngineAnswers
from gati.composition.outcomes import outcomes_of
from gati.composition.pieces import Pieces
from gati.engine.backends import BACKENDS
from gati.errors import DataError, ModelError
from gati.evaluation.peers import build_peers
from gati.exploration import candidates, memory
from gati.exploration.companions import load_companions
from gati.exploration.explore import explore
from gati.exploration.library import SELECT, Library
from gati.exploration.progress import SilentProgress
from gati.exploration.splits import held_out
from gati.model.entry import INPUT
from gati.model.load import LoadedModel
from gati.model.preprocess import Preprocessing
from gati.variants import ITSELF
from tests.composition.test_published_forms import candidate
from tests.exploration.networks import fitted_on_digits, write_digits
from tests.exploration.quick import quick_selectors

pytestmark = pytest.mark.slow

COARSE = "openvino-int8-lookups"
coarse = pytest.mark.skipif(not BACKENDS[COARSE].installed(), reason=f"{COARSE} is not installed")


class Block(nn.Module):
    """One normalised convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Plain(nn.Module):
    """Four blocks, one after another."""

    preprocessing = Preprocessing((0.3,), (0.4,), channels=1)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(1), *(Block(16) for _ in range(3))])
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(nn.functional.avg_pool2d(x, 2).flatten(1))


class Skipping(Plain):
    """The first block's input is needed again after the second one."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.blocks[1](self.blocks[0](x)) + x
        hidden = self.blocks[3](self.blocks[2](hidden))
        return self.head(nn.functional.avg_pool2d(hidden, 2).flatten(1))


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        quick_selectors(patch)
        patch.setattr(candidates, "too_slow", lambda *_: "left out here")  # nothing is trained
        patch.setattr("gati.exploration.itself._LATEST", 1.0)  # four blocks are few
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    held, _ = write_digits(tmp_path_factory.mktemp("digits"))
    return held


def explored(
    kind: type[nn.Module],
    data: Path,
    out: Path,
    variants: Sequence[str] | None = (),
    companions: Sequence[tuple[str, None]] = (("itself", None),),
    **options: Any,
) -> Library:
    network = fitted_on_digits(kind, Plain.preprocessing, seed=1, steps=90)
    save_file({name: tensor.detach().clone() for name, tensor in network.state_dict().items()}, out / "net")
    return explore(
        f"{__file__}:{kind.__name__}",
        (out / "net").rename(out / "net.safetensors"),
        data=data,
        out=out / "library",
        variants=variants,
        companions=companions,
        **options,
    )


class Noted(SilentProgress):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def by_default(data: Path, out: Path, **options: Any) -> tuple[list[str], list[str]]:
    """Where the network itself is offered when no one names it, and the notes about it."""
    noted = Noted()
    found = explored(Plain, data, out, **{"variants": None, "companions": ()} | options, progress=noted)
    offered = [trial.block for trial in found.trials if trial.variant == ITSELF]
    return offered, [note for note in noted.notes if "itself" in note]


@pytest.fixture(scope="module")
def library(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Library:
    return explored(Plain, data, tmp_path_factory.mktemp("plain"))


def test_it_is_offered_whole_and_behind_the_first_block(library: Library) -> None:
    assert [(trial.block, trial.variant) for trial in library.trials] == [
        (INPUT, "companion(itself)"),
        ("blocks.0", "companion(itself)"),
    ]
    whole, rest = library.trials
    assert whole.agreement == rest.agreement == 1.0
    assert whole.parameters > rest.parameters > 4 * 2000  # three convolutions and the head
    assert whole.memory_bytes > rest.memory_bytes >= 4 * rest.parameters


def test_what_follows_a_block_answers_as_the_network_does(library: Library) -> None:
    network = Pieces(library).traced
    held, _ = held_out(library)
    x = held.images(np.arange(100))
    expected = network.base(x).softmax(1)
    for trial in library.trials:
        cache = load_cache(library.cache_path(trial.trial_id))
        first = network.cut([trial.block])[0]
        torch.testing.assert_close(cache(first.run(x)[0])[0], expected, rtol=1e-3, atol=1e-4)


@coarse
def test_it_is_offered_by_default(data: Path, tmp_path: Path) -> None:
    offered, notes = by_default(data, tmp_path)
    assert offered == [INPUT, "blocks.0"]
    (note,) = notes
    assert note.startswith("the network itself is offered at input and blocks.0")


@pytest.mark.parametrize(
    "named", [{"variants": ("fc(16)",)}, {"blocks": "blocks.*"}], ids=["variants", "blocks"]
)
def test_it_is_not_offered_to_those_who_name_what_they_want(
    data: Path, tmp_path: Path, named: dict[str, Any]
) -> None:
    assert by_default(data, tmp_path, **named) == ([], [])


def test_a_large_network_is_not_stored_twice_more_by_default(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gati.exploration.itself._LARGEST_BYTES", 10_000)
    assert by_default(data, tmp_path) == ([], [])


def test_without_a_backend_whose_lookups_run_in_8_bit_integers_it_is_not_offered(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gati.exploration.itself.BACKENDS", {"torch": BACKENDS["torch"]})
    assert by_default(data, tmp_path) == ([], [])


@coarse
def test_one_whose_rest_gives_other_answers_is_left_out_by_default_and_refused_if_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def different(self: Companion, x: Tensor) -> Tensor:
        return torch.rand(len(x), 10)

    monkeypatch.setattr(Companion, "forward", different)
    offered, notes = by_default(data, tmp_path)
    assert offered == []
    assert notes == [
        "left out companion(itself): what follows block 'blocks.0' gives other answers than the network, so "
        "it cannot be a companion"
    ]
    (tmp_path / "named").mkdir()
    with pytest.raises(ModelError, match=r"what follows block 'blocks\.0' gives other answers"):
        explored(Plain, data, tmp_path / "named")


def test_no_more_inputs_are_compared_at_a_time_than_memory_holds(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that needs too much is killed without a word, and again when it resumes."""
    answer, asked = Companion.forward, list[int]()

    def counted(self: Companion, x: Tensor) -> Tensor:
        asked.append(len(x))
        return answer(self, x)

    monkeypatch.setattr(Companion, "forward", counted)
    monkeypatch.setattr(memory, "available_bytes", lambda: 200_000)
    explored(Plain, data, tmp_path)
    assert max(asked) <= 16


def test_a_block_that_passes_on_more_than_its_output_is_passed_over(data: Path, tmp_path: Path) -> None:
    found = explored(Skipping, data, tmp_path)
    assert [trial.block for trial in found.trials] == [INPUT, "blocks.2"]


def test_in_float32_it_has_no_cost_and_is_never_composed(library: Library) -> None:
    for backend in ("torch", "openvino", "onnxruntime"):
        if BACKENDS[backend].installed():
            assert {trial.lookup_ms for trial in on_backend(library, backend).trials} == {None}
            chosen = gati.compose(library.directory, accuracy=0.9, backend=backend, name=backend)
            assert chosen.exits == (), backend


def test_peers_with_exits_after_blocks_do_not_use_it(library: Library) -> None:
    with pytest.raises(DataError, match="no trained caches after blocks"):
        build_peers(library, Plain(), accuracy=0.9)


def test_a_lookup_saves_time_if_it_ends_before_the_network_does(library: Library) -> None:
    measured = library.manifest.profile
    blocks = tuple(replace(block, reach_ms=0.25 * block.index) for block in measured.blocks)
    profile = replace(measured, base_ms=4.0, blocks=blocks)  # numbers that differences represent exactly
    for trial, block in zip(library.trials, profile.blocks, strict=False):
        left_ms = profile.base_ms - block.reach_ms
        assert replace(trial, lookup_ms=0.9 * left_ms).saves_time(profile)
        assert not replace(trial, lookup_ms=left_ms).saves_time(profile)
        assert not replace(trial, lookup_ms=None).saves_time(profile)


def test_its_checkpoint_is_the_networks() -> None:
    base = LoadedModel(Plain(), "mine:plain", None, "", Plain.preprocessing)
    (found,) = load_companions([("itself", None)], base)
    assert found.loaded is base
    with pytest.raises(DataError, match="companion 'itself' has the network's own checkpoint: give 'none'"):
        load_companions([("itself", "mine.pt")], base)


@coarse
@pytest.mark.parametrize("place", [0, 1])
def test_what_its_8_bit_lookups_answer_is_asked_of_the_engine(library: Library, place: int) -> None:
    """At any threshold the engine lets those leave whose score reaches it, with the class that was told."""
    costed = on_backend(library, COARSE)
    select = outcomes_of(costed, SELECT)
    trial = costed.trials[place]
    told, tabled = select.trial(trial.trial_id), library.outcomes(trial.trial_id)
    assert not np.array_equal(told.score, tabled.score[select.inputs])
    assert np.abs(told.score - tabled.score[select.inputs]).max() < 0.5
    ranked = np.sort(told.score)
    engine = EngineAnswers(costed, COARSE, Pieces(costed))
    for at in (len(ranked) // 4, len(ranked) // 2):
        threshold = float((ranked[at - 1] + ranked[at]) / 2)
        left_at, answer = engine([candidate(trial.block_index, trial_id=trial.trial_id, threshold=threshold)])
        leaving = told.score >= threshold
        close = np.abs(told.score - threshold) < 1e-5
        np.testing.assert_array_equal((left_at[select.inputs] == 0)[~close], leaving[~close])
        here = leaving & ~close
        np.testing.assert_array_equal(answer[select.inputs][here], told.predicted[here])


@coarse
def test_settings_between_others_run_only_inputs_that_leave_elsewhere(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    costed = on_backend(library, COARSE)
    trial, pieces, ran = costed.trials[0], Pieces(costed), []
    run = EngineAnswers._run

    def counted(self: EngineAnswers, model: bytes, rows: np.ndarray) -> Any:
        ran.append(len(rows))
        return run(self, model, rows)

    monkeypatch.setattr(EngineAnswers, "_run", counted)
    scores = outcomes_of(costed, SELECT).trial(trial.trial_id).score
    thresholds = np.quantile(scores, np.linspace(0.1, 0.9, 9))
    path = [
        [candidate(trial.block_index, trial_id=trial.trial_id, threshold=float(each))] for each in thresholds
    ]
    together = EngineAnswers(costed, COARSE, pieces).of_split(SELECT)
    together.ask(path)
    assert ran[:2] == [len(scores)] * 2
    assert sum(ran[2:]) <= 3 * len(scores)  # each halving runs at most the inputs that are open
    for setting in path[::3]:
        alone = EngineAnswers(costed, COARSE, pieces).of_split(SELECT)
        for here, there in zip(together(setting), alone(setting), strict=True):
            np.testing.assert_array_equal(here, there)
