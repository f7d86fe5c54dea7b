"""Measuring a pipeline on a real cache library, and planning with what was measured."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from gati.engine.exits import Prediction
from gati.errors import DataError, PipelineError
from gati.model.data import load_data
from gati.model.preprocess import Preprocessing
from gati.pipelines import Planner, load_pipeline, parse_pipeline
from gati.pipelines.behaviours import Answers, behaviours, confidence_levels, spread
from gati.pipelines.dynamic import DynamicPolicy
from gati.pipelines.measure import Outcomes, measure_outcomes, measure_pipeline, open_engine, summarize

if TYPE_CHECKING:
    from gati.model.sequence import Data
    from tests.conftest import Demo


def test_behaviours_add_up_to_the_whole() -> None:
    draw = np.random.default_rng(0)
    confidence = draw.uniform(size=1000)
    right = draw.uniform(size=1000) < confidence
    levels = confidence_levels(confidence)
    level = (confidence[:, None] < np.array(levels)).sum(axis=1)
    answers = Answers(right, level, 1.0 + draw.uniform(size=1000))
    among = draw.uniform(size=1000) < 0.5
    overall, *after = behaviours(answers, among, {"other": answers})
    assert sum(overall.shares) == pytest.approx(1.0)
    assert np.dot(overall.shares, overall.accuracies) == pytest.approx(right[among].mean())
    assert [(one.after, one.level) for one in after] == [("other", level) for level in range(4)]
    # the same network found the same: its own level is certain, and it is right wherever it was right
    assert [one.shares[one.level or 0] for one in after] == [1.0] * 4
    assert all(one.accuracies[one.level or 0] > overall.accuracies[one.level or 0] for one in after)


@pytest.mark.parametrize(("count", "most"), [(1, 5), (5, 5), (7, 5), (3000, 200), (3001, 1000)])
def test_kept_latencies_have_the_mean_of_all(count: int, most: int) -> None:
    """The slowest of 3000 was one of 200 kept: it counted 15 times."""
    draw = np.random.default_rng(count)
    latency_ms = draw.uniform(4.0, 6.0, size=count)
    latency_ms[0] = 100.0
    kept = np.array(spread(latency_ms, most))
    assert len(kept) == min(count, most) and np.all(np.diff(kept) >= 0.0)
    assert kept.mean() == pytest.approx(latency_ms.mean(), abs=1e-3)
    assert kept.max() <= 100.0 and kept.min() >= latency_ms.min() - 1e-3
    if count <= most:
        assert kept == pytest.approx(np.sort(latency_ms), abs=1e-3)


GREY = Preprocessing(mean=(0.5,), std=(0.5,), channels=1)
SHAPES: dict[str, Any] = {
    "class_names": ["ship", "car", "cat"],
    "stages": {"only": {"options": {"one": {"library": "lib"}}}},
}


def pictures(folder: Path, *classes: str) -> Path:
    """A folder with two pictures of each class."""
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(2):
            Image.new("L", (2, 2), number).save(folder / name / f"{number}.png")
    return folder


@pytest.mark.parametrize("classes", [("car", "cat", "ship"), ("car", "ship")], ids=["all", "some"])
def test_folders_are_matched_to_classes_by_name(classes: tuple[str, ...], tmp_path: Path) -> None:
    """They are numbered in sorted order, and only those that are there: right answers were called wrong."""
    pipeline = parse_pipeline(SHAPES, measured=False)
    (option,) = pipeline.stages["only"].options.values()
    data = load_data(pictures(tmp_path / "known", *classes), GREY)
    right = np.eye(3)[[SHAPES["class_names"].index(name) for name in classes for _ in range(2)]]
    count = len(data)
    answered = Outcomes(np.ones(count), right, ("base",) * count, "torch")
    found = summarize(pipeline, {option.source: answered}, data).stages["only"]
    assert found.options["one"].accuracy == 1.0
    assert found.shares == {name: (name in classes) / len(classes) for name in SHAPES["class_names"]}


def test_classes_that_the_pipeline_does_not_name_are_told(tmp_path: Path) -> None:
    pipeline = parse_pipeline(SHAPES, measured=False)
    data = load_data(pictures(tmp_path / "known", "car", "dog"), GREY)
    with pytest.raises(DataError) as told:
        summarize(pipeline, {}, data)
    assert str(told.value) == (
        "known has class 'dog' but the pipeline names 3 classes: ship, car, cat; correct class_names, or the "
        "names in the data"
    )
    np.savez(tmp_path / "known.npz", images=np.zeros((2, 2, 2, 1), np.uint8), labels=[0, 3])
    with pytest.raises(DataError, match="known.npz has label 3 but the pipeline names 3 classes"):
        summarize(pipeline, {}, load_data(tmp_path / "known.npz", GREY))


def assert_labels(class_names: list[str], data: Data, expected: list[int]) -> None:
    """An option that answers with the expected classes is right everywhere."""
    pipeline = parse_pipeline({**SHAPES, "class_names": class_names}, measured=False)
    (option,) = pipeline.stages["only"].options.values()
    count = len(data)
    answered = Outcomes(np.ones(count), np.eye(len(class_names))[expected], ("base",) * count, "torch")
    found = summarize(pipeline, {option.source: answered}, data).stages["only"]
    assert found.options["one"].accuracy == 1.0


def test_other_names_are_refused_even_if_there_are_as_many(tmp_path: Path) -> None:
    """`Car` was called a ship: as many names were taken in their order."""
    pipeline = parse_pipeline(SHAPES, measured=False)
    data = load_data(pictures(tmp_path / "known", "Car", "Cat", "Ship"), GREY)
    with pytest.raises(DataError, match="known has class 'Car' but the pipeline names 3 classes"):
        summarize(pipeline, {}, data)


def test_folders_that_are_numbers_are_indices(tmp_path: Path) -> None:
    """Sorted as words, `10` comes before `2`."""
    names = [f"name {letter}" for letter in "abcdefghijk"]
    data = load_data(pictures(tmp_path / "known", *map(str, range(11))), GREY)
    assert data.class_names is not None and data.class_names[2] == "10"
    assert_labels(names, data, [each for each in (0, 1, 10, *range(2, 10)) for _ in range(2)])
    data = load_data(pictures(tmp_path / "other", "0", "1"), GREY)
    assert_labels(["1", "0", "2"], data, [1, 1, 0, 0])
    with pytest.raises(DataError, match="has class '0' but the pipeline names 3 classes: 1, 2, 3"):
        assert_labels(["1", "2", "3"], data, [0] * 4)


def test_only_classes_with_inputs_need_a_name(tmp_path: Path) -> None:
    """A folder without pictures made good data be refused."""
    np.savez(
        tmp_path / "known.npz",
        images=np.zeros((2, 2, 2, 1), np.uint8),
        labels=[2, 1],
        class_names=["unsorted", "cat", "ship"],
    )
    assert_labels(["ship", "car", "cat"], load_data(tmp_path / "known.npz", GREY), [0, 2])


def test_labels_without_one_of_the_datas_own_names_are_reported(tmp_path: Path) -> None:
    pipeline = parse_pipeline(SHAPES, measured=False)
    images = np.zeros((3, 2, 2, 1), np.uint8)
    np.savez(tmp_path / "known.npz", images=images, labels=np.arange(3), class_names=["car", "cat"])
    data = load_data(tmp_path / "known.npz", GREY)
    with pytest.raises(DataError, match=r"known\.npz has label 2 but names only 2 classes itself"):
        summarize(pipeline, {}, data)


class Engine:
    """Says of every picture that it is a ship; counts what it was asked."""

    preprocessing, overlapped, backend = GREY, False, "torch"
    class_names: tuple[str, ...] | None = None

    def __init__(self, classes: int = 3) -> None:
        self.asked, self.classes = 0, classes

    def __call__(self, images: torch.Tensor) -> list[Prediction]:
        self.asked += 1
        return [Prediction(0, torch.eye(self.classes)[0], "base", "")]

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr("gati.pipelines.measure.open_engine", lambda *given, **options: made)
    return made


def test_a_limit_takes_inputs_from_all_parts_of_the_data(engine: Engine, tmp_path: Path) -> None:
    """Of folders it took those of the first classes, and planned as if no others came."""
    data = load_data(pictures(tmp_path / "known", "car", "cat", "ship"), GREY)
    pipeline = parse_pipeline(SHAPES, measured=False)
    outcomes, taken = measure_outcomes(pipeline, data, limit=3)
    assert taken.labels is not None and taken.labels.tolist() == [0, 1, 2]
    assert summarize(pipeline, outcomes, taken).stages["only"].options["one"].accuracy == pytest.approx(1 / 3)
    assert len(measure_outcomes(pipeline, data, limit=7)[1]) == 6


def test_a_limit_does_not_follow_the_order_of_classes(engine: Engine, tmp_path: Path) -> None:
    """Of classes in turns, every tenth input is of the same class."""
    images = np.zeros((900, 1, 1, 1), np.uint8)
    np.savez(tmp_path / "known.npz", images=images, labels=np.arange(900) % 3)
    taken = measure_outcomes(parse_pipeline(SHAPES, measured=False), tmp_path / "known.npz", limit=100)[1]
    assert taken.labels is not None and len(taken) == 100
    assert np.bincount(taken.labels, minlength=3).min() > 20


def npy(array: Any = None, **arrays: Any) -> bytes:
    """An array as a file, or several as an archive."""
    out = io.BytesIO()
    if array is None:
        np.savez(out, **arrays)
    else:
        np.save(out, array)
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 cut off", "is not a readable .npz"),
        (npy(np.zeros((2, 2, 2, 1), np.uint8)), "is not a readable .npz"),
        (npy(other=np.zeros((2, 4), np.float32)), "has no `images`"),
        (npy(images=np.uint8(3)), "has no `images`"),
    ],
)
def test_an_archive_without_images_for_a_plain_model_is_told_in_one_line(
    content: bytes, message: str, tmp_path: Path
) -> None:
    """One that was cut off, or an array by its name, ended in an error that called for a report."""
    (tmp_path / "known.npz").write_bytes(content)
    stages = {"only": {"options": {"one": {"model": "torchvision:resnet18"}}}}
    pipeline = parse_pipeline({"class_names": ["car", "cat"], "stages": stages}, measured=False)
    with pytest.raises(DataError, match=message):
        measure_outcomes(pipeline, tmp_path / "known.npz")


def test_a_library_with_classes_in_another_order_is_refused(engine: Engine, tmp_path: Path) -> None:
    """Its accuracy was low, and no word said why."""
    folder = pictures(tmp_path / "known", "car", "cat")
    engine.class_names = ("car", "cat", "ship")
    with pytest.raises(PipelineError) as told:
        measure_outcomes(parse_pipeline(SHAPES, measured=False), folder)
    assert str(told.value) == (
        "stage 'only', option 'one': class 0 is 'car' in its library but 'ship' in class_names; correct "
        "class_names or, if the library is wrong, explore with --class-names"
    )
    assert engine.asked == 0
    own = {"only": {"options": {"one": {"library": "lib", "class_names": ["car", "cat", "ship"]}}}}
    measure_outcomes(parse_pipeline({**SHAPES, "stages": own}, measured=False), folder)
    engine.class_names = ("boat", "auto", "cat")  # other words for the same classes
    measure_outcomes(parse_pipeline(SHAPES, measured=False), folder)


def test_what_does_not_fit_is_reported_before_anything_is_measured(engine: Engine, tmp_path: Path) -> None:
    """It was told after all options had answered all inputs."""
    folder = pictures(tmp_path / "known", "car", "cat")
    stages = {"only": {"classes": ["ship"], "options": {"one": {"library": "lib"}}}}
    pipeline = parse_pipeline({**SHAPES, "stages": stages}, measured=False)
    with pytest.raises(DataError, match="no input of the data belongs to stage 'only'"):
        measure_outcomes(pipeline, folder)
    assert engine.asked == 0
    engine.classes = 4
    with pytest.raises(PipelineError, match="option 'one': 4 classes, but the pipeline names 3"):
        measure_outcomes(parse_pipeline(SHAPES, measured=False), folder)
    assert engine.asked == 4  # to warm up


@pytest.mark.slow
def test_measure_and_plan(demo: Demo, tmp_path: Path) -> None:
    digits = ", ".join(f'"{digit}"' for digit in range(10))
    cached = f'cached = {{ library = "{demo.library}" }}'
    plain = f'plain = {{ library = "{demo.library}", caches = false }}'
    file = tmp_path / "digits.toml"
    file.write_text(
        f"""
class_names = [{digits}]
edges = [{{ from = "root", to = "low", when = "low" }}, {{ from = "root", to = "high", when = "high" }}]
[stages.root.groups]
low = ["0", "1", "2", "3", "4"]
high = ["5", "6", "7", "8", "9"]
[stages.root.options]
{cached}
{plain}
[stages.low]
classes = ["0", "1", "2", "3", "4"]
[stages.low.options]
{cached}
[stages.high]
classes = ["5", "6", "7", "8", "9"]
[stages.high.options]
{plain}
""",
        encoding="utf-8",
    )
    test = demo.folder / "test.npz"
    command = [sys.executable, "-m", "gati", "pipeline", "measure", str(file)]
    command += ["--data", str(test), "--limit", "120"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "after root says low" in said.stdout
    found = load_pipeline(file)
    root = found.stages["root"]
    assert sum(root.shares) == pytest.approx(1.0)
    assert all(0.5 < option.measured_accuracy <= 1.0 for option in root.options.values())
    forecast = DynamicPolicy(found, 0.95).forecast(1e6)
    assert 0.5 < forecast.worth <= forecast.attainment <= 1.0 + 1e-9
    archive = np.load(test)
    run = Planner(found).begin(1e6)
    while not run.done:
        step = run.start(run.ready[0], 0.0)
        option = found.stages[step.stage].options[step.option]
        with open_engine(option.source) as engine:
            assert engine.preprocessing is not None
            prediction = engine(engine.preprocessing(archive["images"][:1]))[0]
        answer = option.label(prediction.probabilities.numpy())
        run.finish(step.stage, answer.label, 0.0, answer.confidence)
    assert run.answer in found.stages[str(run.output)].labels
    with pytest.raises(DataError, match="limit is 1; at least 2 inputs are needed"):
        measure_pipeline(file, test, limit=1)
