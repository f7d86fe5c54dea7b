"""Companions: networks that the user already has, explored, composed and served as caches at the input."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn

import gati
from gati.adaptation.tune import Lesson, TuneRecipe, tuned
from gati.caches import Companion, LearnedCache, Reader, Reading, is_companion, load_cache, save_cache
from gati.cli import run
from gati.composition.load import open_model
from gati.engine.backends import BACKENDS
from gati.engine.backends.openvino import OpenVinoInt8Backend
from gati.engine.engine import Engine
from gati.engine.exits import BASE, EngineExit
from gati.errors import LibraryError, ModelError, VariantError
from gati.exploration import candidates
from gati.exploration.companions import class_order, load_companions, reading_of
from gati.exploration.explore import explore
from gati.exploration.library import Library
from gati.exploration.splits import held_out
from gati.model.data import load_data
from gati.model.entry import INPUT
from gati.model.load import LoadedModel
from gati.model.preprocess import Preprocessing
from gati.types import TrialId
from tests.exploration.killing import Killed, KilledAfter
from tests.exploration.networks import fitted_on_digits, trained_state, write_digits
from tests.exploration.quick import quick_selectors

pytestmark = pytest.mark.slow

NETWORKS = Path(__file__).parent / "networks.py"
GREY = Preprocessing((0.0,), (1.0,), channels=1)
OWN = Preprocessing((0.3,), (0.4,), channels=1)


class Small(nn.Module):
    """One convolution, normalised; works in place on what it is given."""

    preprocessing = OWN

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16 * 16, classes)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(1.0)
        hidden = torch.relu(self.norm(self.conv(x)))
        return self.head(nn.functional.avg_pool2d(hidden, 2).flatten(1))


class Probable(Small):
    """Ends with probabilities."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(1)


class Three(Small):
    """Knows three classes."""

    def __init__(self) -> None:
        super().__init__(classes=3)


class Relative(Small):
    """What it answers depends on the other inputs of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        answers = super().forward(x)
        return answers - answers.mean(0)


class Remembering(Small):
    """What it answers depends on what it was given before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.5).add_(x.mean())
        return super().forward(x - self.seen)


class Coloured(nn.Module):
    preprocessing = Preprocessing()

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3))


def small_state() -> dict[str, Tensor]:
    """Weights of `Small` after a moment of training on digits that are in neither split."""
    state = fitted_on_digits(Small, OWN, seed=1, steps=90).state_dict()
    return {name: tensor.detach().clone() for name, tensor in state.items()}


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(candidates, "too_slow", lambda *_: "left out here")  # nothing is trained
        quick_selectors(patch)
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("digits")
    held, _ = write_digits(folder)
    save_file(trained_state(), folder / "net.safetensors")
    save_file(small_state(), folder / "small.safetensors")
    shutil.copy(__file__, folder / "mine.py")
    return {"folder": folder, "data": held, "small": folder / "small.safetensors"}


@pytest.fixture(scope="module")
def library(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Explored with two companions of one name; then their code and checkpoint are gone."""
    made = explore(
        f"{NETWORKS}:Net",
        files["folder"] / "net.safetensors",
        data=files["data"],
        out=tmp_path_factory.mktemp("out"),
        variants=(),
        companions=[
            (f"{files['folder'] / 'mine.py'}:Small", files["small"]),
            (f"{__file__}:Small", None),
        ],
    )
    files["small"].rename(files["folder"] / "elsewhere.safetensors")
    (files["folder"] / "mine.py").unlink()
    return made


@pytest.fixture(scope="module")
def network(files: dict[str, Path], library: Library) -> nn.Module:
    module = Small()
    module.load_state_dict(small_state())
    return module.eval().requires_grad_(False)


def inputs(files: dict[str, Path], count: int) -> Tensor:
    return load_data(str(files["data"]), GREY).images(np.arange(count))


def test_each_is_a_trial_at_the_input_and_names_get_numbers(library: Library) -> None:
    found = {trial.variant: trial for trial in library.trials}
    assert list(found) == ["companion(Small)", "companion(Small-2)"]
    first, second = found.values()
    assert {first.block, second.block} == {INPUT} and first.block_index == 0
    assert first.status == "trained" and first.lookup_ms and first.overlapped_lookup_ms
    assert first.agreement > 0.8 > 0.5 > second.agreement  # the second has nobody's weights
    assert library.manifest.settings["companions"][0][0] == "companion(Small)"


def test_it_answers_as_the_network_does_on_its_own_pictures(
    library: Library, network: nn.Module, files: dict[str, Path]
) -> None:
    """What its own preprocessing makes of the image is what it is given, within rounding."""
    cache = load_cache(library.cache_path(TrialId("input--companion-Small")))
    images = np.load(files["data"])["images"][:200]
    alone = network(OWN(images))
    torch.testing.assert_close(cache(GREY(images))[0], alone.softmax(1), rtol=1e-3, atol=1e-4)
    held, _ = held_out(library)
    recorded = library.outcomes(TrialId("input--companion-Small")).predicted
    np.testing.assert_array_equal(recorded, cache(held.images(np.arange(len(held))))[0].argmax(1).numpy())
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in cache.modules())


def test_it_is_composed_certified_and_served_without_code_or_checkpoint(
    library: Library, files: dict[str, Path], tmp_path: Path
) -> None:
    directory = tmp_path / "library"
    shutil.copytree(library.directory, directory)
    copied = Library.open(directory)
    trials = [
        replace(trial, lookup_ms=1e-6 if trial.variant == "companion(Small)" else 1e3)
        for trial in copied.trials
    ]
    copied.write_trials(trials, list(copied.operating_points))
    composition = gati.compose(directory, accuracy=0.9, backend="torch", placement="inline")
    assert [leaving.variant for leaving in composition.exits] == ["companion(Small)"]
    assert composition.certificate is not None and composition.certificate.accuracy >= 0.9
    evaluation = gati.evaluate(directory, files["data"])
    assert evaluation.exits[0].hits > 0 and evaluation.agreement >= 0.9
    written = gati.export(directory, tmp_path / "model.onnx")  # asks the file and the engine the same
    assert written.exits == (INPUT,) and written.checked_inputs > 0


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(not BACKENDS[name].installed(), reason=f"{name} does not run here")
        )
        for name in ("torch", "torch-compile", "onnxruntime", "openvino", "openvino-bf16", "openvino-int8")
    ],
)
def test_on_every_backend_it_answers_or_the_network_does(
    backend: str, library: Library, files: dict[str, Path], tmp_path: Path
) -> None:
    cache = load_cache(library.cache_path(TrialId("input--companion-Small")))
    x = inputs(files, 60)
    scores = cache(x)[1].sort().values
    at = 20 + int(scores[20:40].diff().argmax())
    threshold = float(scores[at : at + 2].mean())
    traced = open_model(library.directory).traced
    leaving = EngineExit(INPUT, cache, threshold, "inline", "companion(Small)", cache.memory_bytes)
    graphs = (tmp_path / "exits", tmp_path / "base")
    if backend == "openvino-int8":  # runs what was quantised before
        (model,) = OpenVinoInt8Backend(inputs(files, 100)).assembled(traced, [[leaving]], "logits")
        graphs[0].write_bytes(model)
    answers = Engine(traced, [leaving], backend=backend, graphs=graphs)(x)
    probabilities, score = cache(x)
    hits = score >= threshold
    exact = BACKENDS[backend].precision == "f32"
    if exact:
        assert [answer.exit == INPUT for answer in answers] == hits.tolist()
    whole = traced.base(x.clone()).softmax(1)
    expected = [(probabilities if answer.exit == INPUT else whole)[row] for row, answer in enumerate(answers)]
    given = torch.stack([answer.probabilities for answer in answers])
    close = 1e-4 if exact else 0.1 if backend == "openvino-bf16" else 0.4
    torch.testing.assert_close(given, torch.stack(expected), rtol=0, atol=close)
    assert {answer.exit for answer in answers} == {INPUT, BASE}


def test_a_copy_and_what_is_pickled_answer_the_same(library: Library, files: dict[str, Path]) -> None:
    cache = load_cache(library.cache_path(TrialId("input--companion-Small")))
    x = inputs(files, 5)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert torch.equal(other(x)[0], cache(x)[0])
        assert other.structure == cache.structure


def test_it_can_be_trained_on(library: Library, files: dict[str, Path], tmp_path: Path) -> None:
    """As the adaptation to a stream does, whose versions keep it as a library does."""
    cache = load_cache(library.cache_path(TrialId("input--companion-Small-2")))
    x = inputs(files, 300)
    wanted = load_cache(library.cache_path(TrialId("input--companion-Small")))(x)[0]
    lesson = Lesson(x, wanted.clamp_min(1e-6).log(), torch.ones(300))
    taught = tuned(cache.predictor, lesson, TuneRecipe(epochs=8.0, limit_s=600.0, learning_rate=3e-3), seed=0)
    assert isinstance(taught, Companion)
    before, after = (each(x).argmax(1) == wanted.argmax(1) for each in (cache.predictor, taught))
    assert before.float().mean() < 0.5 < 0.8 < after.float().mean()
    again = LearnedCache(cache.variant, (1, 8, 8), 10, "margin", predictor=taught)
    save_cache(tmp_path / "again.safetensors", again)
    torch.testing.assert_close(load_cache(tmp_path / "again.safetensors")(x)[0], again(x)[0])


def test_a_file_whose_program_is_damaged_is_one_line(library: Library, tmp_path: Path) -> None:
    cache = load_cache(library.cache_path(TrialId("input--companion-Small")))
    assert isinstance(cache.predictor, Companion)
    cache.predictor.program = b"nothing"
    save_cache(tmp_path / "bad.safetensors", cache)
    with pytest.raises(LibraryError, match=r"bad.safetensors is not a learned cache .*damaged"):
        load_cache(tmp_path / "bad.safetensors")


def test_the_command_line_takes_several(
    files: dict[str, Path], library: Library, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(small_state(), tmp_path / "small.safetensors")
    arguments = ["explore", f"{NETWORKS}:Net", "--checkpoint", str(files["folder"] / "net.safetensors")]
    arguments += ["--data", str(files["data"]), "--out", str(tmp_path / "out"), "--variants", ""]
    mine = ["--companion", f"{__file__}:Small", "--companion-checkpoint", str(tmp_path / "small.safetensors")]
    assert run([*arguments, *mine, *mine[2:]]) == 2
    assert "2 --companion-checkpoint for 1 --companion" in capsys.readouterr().err
    probable = ["--companion", f"{__file__}:Probable", "--companion-checkpoint", mine[3]]
    assert run([*arguments, *mine, *probable]) == 0
    first, second = Library.open(tmp_path / "out").trials
    assert (first.variant, second.variant) == ("companion(Small)", "companion(Probable)")
    assert first.agreement == second.agreement
    made = Library.open(tmp_path / "out")
    one, two = (load_cache(made.cache_path(each.trial_id)) for each in (first, second))
    x = inputs(files, 20)
    torch.testing.assert_close(one(x)[0], two(x)[0])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("Three", r"companion\(Three\) has 3 classes and the network 10, and it does not name"),
        (
            "Relative",
            r"companion\(Relative\): its answer to an input depends on the other inputs of its batch",
        ),
        ("Remembering", r"companion\(Remembering\) answers the same inputs differently each time"),
        ("Coloured", r"companion\(Coloured\) takes 3 channels and the network 1; give a companion"),
        ("Missing", "has no 'Missing'"),
    ],
)
def test_what_cannot_stand_in_is_one_line_before_the_network_answers_all_inputs(
    source: str, message: str, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(*_: object) -> None:
        raise AssertionError("answers are lost")

    monkeypatch.setattr("gati.exploration.prepare.base_batches", answered)
    with pytest.raises(ModelError, match=message):
        explore(
            f"{NETWORKS}:Net",
            files["folder"] / "net.safetensors",
            data=files["data"],
            out=tmp_path,
            companions=[(f"{__file__}:{source}", None)],
            variants=(),
        )
    assert not list(tmp_path.iterdir()), "the next command may leave it out"


def test_those_that_an_interrupted_run_has_measured_are_not_measured_again(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(small_state(), tmp_path / "small.safetensors")
    given: dict[str, Any] = {
        "checkpoint": files["folder"] / "net.safetensors",
        "data": files["data"],
        "out": tmp_path / "out",
        "variants": (),
        "companions": [
            (f"{__file__}:Small", tmp_path / "small.safetensors"),
            (f"{__file__}:Small", None),
            ("itself", None),
        ],
    }
    with pytest.raises(Killed):
        explore(f"{NETWORKS}:Net", **given, progress=KilledAfter(3))

    def again(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("gati.exploration.itself.held_out_probabilities", again)
    found = explore(f"{NETWORKS}:Net", **given).trials
    names = ["companion(Small)", "companion(Small-2)", "companion(itself)"]
    assert [trial.variant for trial in found if trial.block == INPUT] == names
    assert all(trial.agreement is not None for trial in found)


def test_names_come_from_the_source(tmp_path: Path) -> None:
    given = [("gati.zoo:resnet20", None), ("gati.zoo:resnet32", None), ("gati.zoo:resnet20", None)]
    assert [each.variant for each in load_companions(given, loaded(GREY))] == [
        "companion(resnet20)",
        "companion(resnet32)",
        "companion(resnet20-2)",
    ]
    assert is_companion("companion(resnet20-2)") and not is_companion("student(8)")
    (tmp_path / "mine.py").write_text("from gati.zoo import resnet20 as itself")
    (own,) = load_companions([(f"{tmp_path / 'mine.py'}:itself", None)], loaded(GREY))
    assert own.variant == "companion(itself-2)", "that name means the network itself"
    with pytest.raises(VariantError, match="unknown variant 'companion"):
        gati.explore("gati.zoo:resnet20", data="x.npz", out="never", variants=["companion(resnet20)"])


# What it reads ----------------------------------------------------------------------------------------------


def loaded(preprocessing: Preprocessing, *, known: bool = True) -> LoadedModel:
    origin: Any = "told" if known else "default"
    return LoadedModel(nn.Identity(), "x:y", None, "", preprocessing, preprocessing_from=origin)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.05, 2)), min_size=3, max_size=3),
    st.lists(st.tuples(st.floats(0, 1), st.floats(0.05, 2)), min_size=3, max_size=3),
)
def test_it_is_given_what_its_own_preprocessing_gives(
    base: list[tuple[float, float]], own: list[tuple[float, float]]
) -> None:
    theirs, mine = (
        Preprocessing(tuple(mean for mean, _ in each), tuple(std for _, std in each)) for each in (base, own)
    )
    images = np.random.default_rng(0).integers(0, 256, (2, 4, 5, 3), dtype=np.uint8)
    reading = reading_of("it", theirs, loaded(mine), theirs(images))
    torch.testing.assert_close(Reader(reading)(theirs(images)), mine(images), rtol=1e-3, atol=1e-3)
    assert (reading.pool, reading.size) == (1, None)


@pytest.mark.parametrize(
    ("own", "pool", "size", "shape"),
    [
        (Preprocessing(crop=16, resize=20), 2, None, (16, 16)),
        (Preprocessing(crop=12), 2, (12, 12), (12, 12)),
        (Preprocessing(crop=40), 1, (40, 40), (40, 40)),
        (Preprocessing(resize=8), 4, None, (8, 8)),
        (Preprocessing(size=(32, 8)), 1, (32, 8), (32, 8)),
        (Preprocessing(), 1, None, (32, 32)),
    ],
)
def test_pictures_of_another_size(
    own: Preprocessing, pool: int, size: tuple[int, int] | None, shape: tuple[int, int]
) -> None:
    x = torch.linspace(0, 1, 32).expand(1, 3, 32, 32)
    reading = reading_of("it", Preprocessing(), loaded(own), x)
    assert (reading.pool, reading.size) == (pool, size)
    given = Reader(reading)(x)
    assert given.shape[2:] == shape
    torch.testing.assert_close(given.mean(), x.mean())
    assert bool((given.diff(dim=3) >= 0).all())


def test_a_network_that_nobody_said_anything_about_is_given_the_same() -> None:
    base = Preprocessing((0.4, 0.5, 0.6), (0.2, 0.2, 0.2))
    x = torch.randn(2, 3, 8, 8)
    reading = reading_of("it", base, loaded(Preprocessing(), known=False), x)
    given = Reader(reading)(x)
    assert torch.equal(given, x) and given.data_ptr() != x.data_ptr()


def test_a_reading_survives_json() -> None:
    for reading in (
        Reading("logits"),
        Reading("probabilities", (0.5,), (1.0,), 2, (3, 4), (1, 0)),
    ):
        assert Reading.from_json(reading.to_json()) == reading
    with pytest.raises(ValueError, match="outputs of kind 'answers'"):
        Reading.from_json({**Reading("logits").to_json(), "outputs_kind": "answers"})


# What it answers --------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.permutations(list("abcdef")), st.integers(1, 6))
def test_classes_are_found_by_their_names(own: list[str], classes: int) -> None:
    names = list("abcdef")[:classes]
    order = class_order("it", 6, own, classes, names)
    picked = own if order is None else [own[index] for index in order]
    assert picked[:classes] == names and len(picked) == classes


def test_without_names_there_must_be_as_many_classes() -> None:
    assert class_order("it", 3, None, 3, ("a", "b", "c")) is None
    assert class_order("it", 3, ("a", "b", "c"), 3, None) is None
    assert class_order("it", 3, ("x", "b", "z"), 3, ("a", "b", "c")) is None
    with pytest.raises(ModelError, match="it has class 'b' at another index than the network"):
        class_order("it", 3, ("b", "x", "z"), 3, ("a", "b", "c"))
    with pytest.raises(ModelError, match="has 4 classes and the network 3, and it has no class named 'c'"):
        class_order("it", 4, ("a", "b", "x", "y"), 3, ("a", "b", "c"))
    with pytest.raises(
        ModelError, match="has 4 classes and the network 3, and it does not name all of its classes"
    ):
        class_order("it", 4, None, 3, ("a", "b", "c"))
