"""An exported file answers as the engine does, wherever it runs, and says what it is."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import gati
from gati.caches import LearnedCache, load_cache, save_cache
from gati.caches.selectors import selector_names
from gati.cli import run
from gati.composition.composition import Composition
from gati.composition.load import open_served
from gati.composition.walk import certify
from gati.engine.exits import BASE, EngineExit, doubtful_class, tie_tolerance
from gati.engine.graph import convert
from gati.engine.graph.pooling import average_pool, maximum_pool
from gati.engine.graph.stages import GraphStage, build_stages, float32_at_least
from gati.errors import BackendError, CutError, DataError, ModelError, StorageError
from gati.exploration.library import Library
from gati.formats.check import check_answers
from gati.model.program import packed
from gati.model.segments import INPUT, trace
from gati.types import TrialId
from tests.conftest import REPOSITORY
from tests.formats.libraries import (
    BLOCKS,
    CACHES,
    CERTIFICATE,
    CLASS_NAMES,
    PREPROCESSING,
    images,
    make_library,
    save_composition,
)

pytestmark = pytest.mark.slow

INPUTS = 120
TOLERANCE = tie_tolerance(torch.device("cpu"), torch.float32)


class Answer(NamedTuple):
    probabilities: np.ndarray[Any, np.dtype[np.float32]]
    exit: int
    score: float


Runner = Callable[[np.ndarray[Any, Any]], Answer]


def same_piece(stage: GraphStage) -> str:
    """A name that equal pieces have: of the same statements or cache, with the same weights."""
    module = stage.module
    found = hashlib.sha256(repr([(each.shape, each.dtype) for each in stage.example]).encode())
    if hasattr(module, "cache"):
        parts = {"structure": module.cache.structure, **module.cache.state_dict()}
    else:
        _, source, constants = packed(module.run)
        parts = {"source": source, "logits": getattr(module, "logits", None), **constants}
    for name, part in sorted(parts.items()):
        found.update(f"{name} {part.shape if isinstance(part, Tensor) else part!r}".encode())
        if isinstance(part, Tensor):
            found.update(part.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.fixture(scope="module", autouse=True)
def _pieces_are_converted_once() -> Iterator[None]:
    """Most tests export the same few networks, of which each piece takes a third of a second."""
    known: dict[str, onnx.ModelProto] = {}
    converted = convert._converted

    def kept(stage: GraphStage, name: str) -> onnx.ModelProto:
        key = same_piece(stage)
        if key not in known:
            known[key] = converted(stage, name)
        copy = onnx.ModelProto()
        copy.CopyFrom(known[key])
        return copy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "_converted", kept)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def library(folder: Path) -> Path:
    """A ResNet's library; tests only add compositions."""
    return make_library(folder, "resnet")


@pytest.fixture(scope="module")
def model(library: Path, folder: Path) -> Path:
    """The ResNet's file."""
    return gati.export(library, folder / "resnet.onnx").path


@pytest.fixture(scope="module")
def raw(library: Path, folder: Path) -> gati.Exported:
    """The ResNet's file that takes images as they are."""
    return gati.export(library, folder / "raw.onnx", raw_input=True)


def in_onnxruntime(path: Path) -> Runner:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # more would wait for work on cores that other tests need
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def answer(x: np.ndarray[Any, Any]) -> Answer:
        probabilities, exit, score = session.run(["probabilities", "exit", "score"], {"input": x})
        assert probabilities.dtype == score.dtype == np.float32 and exit.dtype == np.int64
        return Answer(probabilities[0], int(exit[0]), float(score[0]))

    return answer


def in_openvino(path: Path) -> Runner:
    openvino = pytest.importorskip("openvino")
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = openvino.Core().compile_model(str(path), "CPU", settings)

    def answer(x: np.ndarray[Any, Any]) -> Answer:
        result = compiled(x)
        return Answer(result["probabilities"][0].copy(), int(result["exit"][0]), float(result["score"][0]))

    return answer


def in_torch(path: Path) -> Runner:
    program = torch.export.load(path).module()

    def answer(x: np.ndarray[Any, Any]) -> Answer:
        probabilities, exit, score = program(torch.from_numpy(x))
        return Answer(probabilities[0].numpy(), int(exit), float(score))

    return answer


def compare(
    library: Path, runner: Runner, inputs: int = INPUTS, composition: str = "default"
) -> Counter[str]:
    """Ask file and engine the same inputs, one at a time; returns how many left where.

    A score that rounding could push over its threshold, or two classes it could swap, may go either way;
    such inputs must be few.
    """
    served = open_served(library, composition=composition)
    engine = served.engine
    names = [*(leaving.block for leaving in engine.exits), BASE]
    stages = build_stages(engine.traced, engine.exits, served.library.manifest.outputs_kind)  # type: ignore[arg-type]
    left: Counter[str] = Counter()
    doubtful = 0
    for x in PREPROCESSING(images(inputs)):
        (expected,) = engine(x[None])
        got = runner(x[None].numpy())
        scores = [float(score) for _, score in stages.trail(x[None]) if score is not None]
        close = any(abs(s - t) <= TOLERANCE for s, t in zip(scores, stages.thresholds, strict=True))
        close |= bool(doubtful_class(expected.probabilities[None], TOLERANCE))
        left[expected.exit] += 1
        if close:
            doubtful += 1
            continue
        assert names[got.exit] == expected.exit
        assert int(got.probabilities.argmax()) == expected.class_index
        np.testing.assert_allclose(got.probabilities, expected.probabilities.numpy(), atol=1e-4)
        if scores:
            assert got.score == pytest.approx(scores[min(got.exit, len(scores) - 1)], abs=1e-4)
    assert doubtful <= inputs // 20
    return left


# The same answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [in_onnxruntime, in_openvino])
def test_the_file_answers_as_the_engine_does(
    library: Path, model: Path, start: Callable[[Path], Runner]
) -> None:
    left = compare(library, start(model))
    assert set(left) == {*BLOCKS["resnet"], BASE}  # so every branch was asked


@pytest.mark.parametrize(("kind", "first"), [("mobilenet", 1), ("vgg", 1), ("vit", 0)])
def test_networks_of_every_kind_are_exported(kind: str, first: int, tmp_path: Path) -> None:
    """With the caches that the first of them may have; the ResNet has all three."""
    places = BLOCKS[kind][:2]
    library = make_library(tmp_path, kind, CACHES[first : first + 2], places)
    written = gati.export(library, tmp_path / "model.onnx")
    assert written.exits == places
    left = compare(library, in_onnxruntime(written.path), inputs=60)
    assert set(left) == {*places, BASE}
    compare(library, in_openvino(written.path), inputs=30)


ENTERED = (INPUT, "layer1.0", "layer2.0")


@pytest.fixture(scope="module")
def entered(folder: Path) -> Path:
    """A library with an exit at the network's input and two after blocks."""
    caches = (("student(4)", "margin"), *CACHES[:2])
    (folder / "entered").mkdir()
    return make_library(folder / "entered", "resnet", caches, ENTERED)


def test_an_exit_at_the_input_is_exported(entered: Path, tmp_path: Path) -> None:
    written = gati.export(entered, tmp_path / "model.onnx")
    assert written.exits == ENTERED
    raw = gati.export(entered, tmp_path / "raw.onnx", raw_input=True)
    for start in (in_onnxruntime, in_openvino):
        assert set(compare(entered, start(written.path), inputs=60)) == {*ENTERED, BASE}
        runner, number = start(raw.path), iter(images(60))
        left = compare(entered, lambda _, runner=runner, number=number: runner(next(number)[None]), 60)
        assert left[INPUT] > 0


def test_a_torch_program_answers_as_the_engine_does(entered: Path, tmp_path: Path) -> None:
    written = gati.export(entered, tmp_path / "model.pt2", format="pt2")
    left = compare(entered, in_torch(written.path), inputs=50)
    assert set(left) == {*ENTERED, BASE}
    notes = {"gati.json": ""}
    torch.export.load(written.path, extra_files=notes)
    assert json.loads(notes["gati.json"])["composition"] == "default"
    assert str(REPOSITORY).encode() not in written.path.read_bytes()


def test_without_exits_the_file_is_the_plain_network(library: Path, tmp_path: Path) -> None:
    save_composition(Library(library), [], name="none")
    written = gati.export(library, tmp_path / "plain.onnx", composition="none")
    assert written.exits == ()
    assert "If" not in {node.op_type for node in onnx.load(written.path).graph.node}
    for start in (in_onnxruntime, in_openvino):
        assert compare(library, start(written.path), 30, "none") == {BASE: 30}
    answer = in_onnxruntime(written.path)(PREPROCESSING(images(1)).numpy())
    assert answer.exit == 0
    assert np.isnan(answer.score)


@pytest.mark.parametrize("start", range(0, len(selector_names()), 3))
def test_every_selector_is_exported_and_its_score_that_is_not_a_number_is_a_miss(
    start: int, tmp_path: Path
) -> None:
    """Three to a network, and with one hit of any of them that has no score an input would leave there."""
    selectors = selector_names()[start : start + 3]
    directory = make_library(tmp_path, "resnet", tuple(("conv2d(3,1)", selector) for selector in selectors))
    written = gati.export(directory, tmp_path / "model.onnx")
    assert len(compare(directory, in_onnxruntime(written.path), inputs=60)) == len(selectors) + 1
    library = Library(directory)
    for number in range(len(selectors)):
        cache = load_cache(library.cache_path(TrialId(f"trial-{number}")))
        with torch.no_grad():
            list(cache.predictor.parameters())[-1].fill_(float("nan"))
        save_cache(library.cache_path(TrialId(f"trial-{number}")), cache)
    written = gati.export(directory, tmp_path / "model.onnx")
    x = PREPROCESSING(images(1)).numpy()
    for start_of in (in_onnxruntime, in_openvino):
        answer = start_of(written.path)(x)
        assert answer.exit == len(selectors)
        assert np.isfinite(answer.probabilities).all()


def test_images_can_go_in_as_they_are(library: Path, raw: gati.Exported) -> None:
    assert (raw.input_shape, raw.input_type) == ((1, 32, 32, 3), "uint8")
    for start in (in_onnxruntime, in_openvino):
        runner, number = start(raw.path), iter(images(60))
        compare(library, lambda x, runner=runner, number=number: runner(next(number)[None]), 60)


def test_the_example_runs_without_gati(raw: gati.Exported, tmp_path: Path) -> None:
    np.savez(tmp_path / "images.npz", images=images(4))
    program = REPOSITORY / "examples" / "run_exported.py"
    assert "import gati" not in program.read_text() and "from gati" not in program.read_text()
    done = subprocess.run(
        [sys.executable, str(program), str(raw.path), "images.npz"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4
    assert any(f"class {name} with" in done.stdout for name in CLASS_NAMES)


def test_the_example_says_which_file_it_takes(model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "images.npz", images=images(1))
    program = REPOSITORY / "examples" / "run_exported.py"
    done = subprocess.run(
        [sys.executable, str(program), str(model), str(tmp_path / "images.npz")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == f"{model} takes preprocessed inputs: export it again with --raw-input\n"


# What is in the file ----------------------------------------------------------------------------------------


def test_the_graph_is_nested_and_valid(model: Path) -> None:
    loaded = onnx.load(model)
    onnx.checker.check_model(loaded, full_check=True)
    assert {entry.domain: entry.version for entry in loaded.opset_import} == {"": 18}
    graph, depth = loaded.graph, 0
    while graph.node[-1].op_type == "If":
        depth += 1
        branches = {attribute.name: attribute.g for attribute in graph.node[-1].attribute}
        assert len(branches["then_branch"].node) == 3  # the answer is there already
        graph = branches["else_branch"]
    assert depth == 3
    assert graph.initializer  # the weights lie where they are used
    assert str(REPOSITORY) not in str(loaded)  # nothing of the machine it was made on


def test_metadata_says_what_the_file_is(library: Path, model: Path) -> None:
    notes = onnxruntime.InferenceSession(str(model)).get_modelmeta().custom_metadata_map
    manifest = Library(library).manifest
    assert json.loads(notes["certificate"]) == CERTIFICATE.to_json()
    assert tuple(json.loads(notes["class_names"])) == CLASS_NAMES
    assert json.loads(notes["preprocessing"]) == manifest.preprocessing
    assert notes["checkpoint_sha256"] == manifest.checkpoint_sha256
    assert (notes["gati_version"], notes["composition"]) == (gati.__version__, "default")
    assert (notes["accuracy_target"], notes["input"]) == ("0.9", "preprocessed")
    exits = json.loads(notes["exits"])
    assert [leaving["block"] for leaving in exits] == list(BLOCKS["resnet"])
    assert [leaving["selector"] for leaving in exits] == ["network", "margin", "entropy"]
    assert CERTIFICATE.sentence() in onnx.load(model).doc_string


def test_a_triton_folder_describes_its_model(library: Path, tmp_path: Path) -> None:
    written = gati.export(library, tmp_path / "models" / "digits", format="triton")
    files = {str(file.relative_to(written.path)) for file in written.path.rglob("*") if file.is_file()}
    assert files == {"1/model.onnx", "config.pbtxt", "labels.txt"}
    config = (written.path / "config.pbtxt").read_text()
    assert 'name: "digits"\nbackend: "onnxruntime"\nmax_batch_size: 0\n' in config
    assert '{ name: "input", data_type: TYPE_FP32, dims: [ 1, 3, 32, 32 ] }' in config
    assert '{ name: "exit", data_type: TYPE_INT64, dims: [ 1 ] }' in config
    assert "instance_group [ { kind: KIND_CPU } ]" in config  # elsewhere float32 may be rounded to TF32
    assert (written.path / "labels.txt").read_text().split() == list(CLASS_NAMES)
    compare(library, in_onnxruntime(written.path / "1" / "model.onnx"), 20)
    none = tmp_path / "no library"  # what is in the way is told before anything is read or converted
    with pytest.raises(StorageError, match="digits already exists; remove it or give another folder"):
        gati.export(none, written.path, format="triton")
    with pytest.raises(StorageError, match="models: it is a folder; give the name of a file"):
        gati.export(none, tmp_path / "models")
    assert list(written.path.parent.iterdir()) == [written.path]


@pytest.mark.parametrize(
    "threshold", [0.1, 0.5, 1.0, -0.3, 1e30, -1e300, 1e300, 0.7000000000000001, 1e-46, -1e-46]
)
def test_a_threshold_as_float32_decides_the_same(threshold: float) -> None:
    single = np.float32(float32_at_least(threshold))
    with np.errstate(over="ignore"):
        around = [single, np.nextafter(single, np.float32(-np.inf)), np.nextafter(single, np.float32(np.inf))]
    for score in (*around, np.float32(np.nan)):
        assert (float(score) >= threshold) == (score >= single)


# What goes wrong --------------------------------------------------------------------------------------------


def test_nothing_is_written_where_the_file_would_answer_otherwise(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gati.formats import export as room

    def onnx_runner(path: Path, name: str) -> Callable[[Tensor], tuple[Tensor, int]]:
        return lambda x: (torch.full((5,), 0.2), 0)

    target = tmp_path / "model.onnx"
    target.write_bytes(b"the one before")
    monkeypatch.setattr(room, "onnx_runner", onnx_runner)
    with pytest.raises(ModelError, match="the exported network .* nothing was written"):
        gati.export(library, target)
    assert target.read_bytes() == b"the one before"
    assert list(tmp_path.iterdir()) == [target]


def test_the_check_lets_rounding_decide_only_where_it_can(library: Path) -> None:
    served = open_served(library)
    stages = build_stages(served.engine.traced, served.engine.exits, "logits")
    x = PREPROCESSING(images(1))
    scores = [float(score) for _, score in stages.trail(x) if score is not None]
    tied = replace(stages, thresholds=(scores[0] + 1e-6, scores[1] - 1.0, 9.0))
    answers = [probabilities for probabilities, _ in stages.trail(x)]
    for exit in (0, 1):
        check_answers(lambda _, exit=exit: (answers[exit], exit), tied, [(x, x)])
    with pytest.raises(ModelError, match="takes exit 2 where the engine takes exit 1"):
        check_answers(lambda _: (answers[2], 2), tied, [(x, x)])
    with pytest.raises(ModelError, match="probabilities that differ from the engine's by 1"):
        check_answers(lambda _: (answers[1] + 1.0, 1), tied, [(x, x)])
    with pytest.raises(ModelError, match="probabilities that differ from the engine's by nan"):
        check_answers(lambda _: (answers[1] * float("nan"), 1), tied, [(x, x)])


def test_a_missing_package_is_named(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "onnxscript" else there(name, *rest)
    )
    with pytest.raises(
        BackendError, match=r"needs onnxscript, which is not installed; pip install 'gati\[exp"
    ):
        gati.export(library, tmp_path / "model.onnx")


def test_what_cannot_be_exported_is_one_line(library: Path, tmp_path: Path) -> None:
    resized, there = tmp_path / "resized", tmp_path / "x"
    resized.mkdir()
    directory = make_library(resized, "vgg")
    other = Library(directory)
    preprocessing = {**other.manifest.preprocessing, "resize": 40, "crop": 32}
    other.write_manifest(replace(other.manifest, preprocessing=preprocessing))
    for call, kind, message in (
        (lambda: gati.export(library, there, format="tflite"), BackendError, "unknown format 'tflite'"),
        (lambda: gati.export(directory, there, raw_input=True), DataError, "resizes to 40 and crops to 32"),
        (lambda: gati.export(library, there, format="pt2", raw_input=True), DataError, "a pt2 file"),
        (lambda: gati.export(library, "/proc/nowhere/x.onnx"), StorageError, "cannot write /proc/nowhere"),
    ):  # fmt: skip
        with pytest.raises(kind, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
    assert not there.exists()


class Shared(nn.Module):
    """Two tensors cross the cut; they share memory, and the second half writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        view = hidden.view(-1, 8)
        hidden += 1.0
        hidden = torch.relu(hidden) + view
        result: Tensor = self.last(hidden)
        return result


def test_a_network_whose_cut_shares_memory_is_refused_or_right() -> None:
    module = Shared().eval().requires_grad_(False)
    traced = trace(module, torch.randn(2, 8), ["first"])
    leaving = EngineExit("first", LearnedCache("fc(4)", (8,), 4, "margin"), 9.0)
    x = torch.randn(1, 8)
    try:
        stages = build_stages(traced, [leaving], "logits")
    except CutError as refusal:
        assert "share memory" in str(refusal)
    else:
        torch.testing.assert_close(stages.trail(x)[-1][0], module(x).softmax(1)[0])


class Unknown(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x)[:, :4]


def test_an_operator_that_onnx_lacks_is_named() -> None:
    from gati.engine.graph.assemble import assemble

    traced = trace(Unknown().eval(), torch.randn(2, 8), [])
    expected = r"cannot export segment_0 to ONNX: .*bessel_j0.*--format pt2"
    with pytest.raises(ModelError, match=expected) as caught:
        assemble(build_stages(traced, [], "logits"), "unknown")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(8, 8), (7, 5), (3, 9), (1, 1)])
@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (4, 4), (3, 5)])
def test_adaptive_pooling_is_written_out_right(shape: tuple[int, int], grid: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *shape)
    torch.testing.assert_close(average_pool(x, grid), nn.functional.adaptive_avg_pool2d(x, grid))
    assert torch.equal(maximum_pool(x, grid)[0], nn.functional.adaptive_max_pool2d(x, grid))


def test_the_command_says_what_it_wrote(
    library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", str(library), "--out", str(tmp_path / "m.onnx"), "--raw-input"]) == 0
    said = capsys.readouterr().out
    assert "input: one uint8 1x32x32x3; outputs: probabilities, exit and score" in said
    assert "exits: 0 after layer1.0, 1 after layer2.0, 2 after layer3.0, 3 at the end" in said


def test_a_composition_that_is_not_certified_says_so_in_the_file_too(library: Path, tmp_path: Path) -> None:
    composition = Composition.load(Library(library).composition_path())
    failed = replace(composition, name="failed", certificate=certify([(300, 500)], 0.9, 0.05))
    for chosen in (failed, replace(composition, name="unproven", certificate=None, confidence=None)):
        chosen.save(Library(library).composition_path(chosen.name))
        written = gati.export(library, tmp_path / f"{chosen.name}.onnx", composition=chosen.name)
        assert written.note.startswith("NOT CERTIFIED: nothing proves that at least 90 % of answers")
        assert written.note in onnx.load(written.path).doc_string
    assert "300 of 500 inputs were answered differently" in onnx.load(tmp_path / "failed.onnx").doc_string


def test_a_certificate_of_reduced_precision_is_not_in_the_file(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gati.engine.backends.torch.TorchBackend.precision", "bf16")
    written = gati.export(library, tmp_path / "model.onnx")
    assert "compose with --backend openvino or onnxruntime" in written.note
    metadata = {entry.key: entry.value for entry in onnx.load(tmp_path / "model.onnx").metadata_props}
    assert json.loads(metadata["certificate"]) is None
