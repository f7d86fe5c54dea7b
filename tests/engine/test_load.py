"""From files to an engine, an evaluation and predictions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from gati.caches import LearnedCache, save_cache
from gati.cli import run
from gati.composition.composition import Composition
from gati.composition.load import load, open_served
from gati.engine.backends import BACKENDS
from gati.engine.backends.base import Path as EnginePath
from gati.engine.backends.torch import TorchBackend
from gati.engine.engine import Engine
from gati.engine.threads import one_thread
from gati.errors import BackendError, CompositionError, DataError, LibraryError, ModelError
from gati.evaluation.evaluate import evaluate
from gati.evaluation.predict import predict
from gati.exploration.library import Library
from gati.exploration.network import example_of, load_network, probe_of
from gati.guard.standing import identity_of
from gati.model.segments import TracedModel
from gati.types import TrialId
from services.inference.opening import Opener
from services.inference.settings import InferenceSettings
from tests.engine import networks
from tests.engine.networks import BLOCKS, CLASSES, network, traced_network
from tests.engine.served import exit_at, images, rewrite
from tests.permissions import close


def one_request() -> Tensor:
    return torch.randn(1, 1, 6, 6, generator=torch.Generator().manual_seed(0))


def test_an_engine_answers_with_the_checkpoint_the_caches_and_the_class_names(directory: Path) -> None:
    with load(directory) as engine:
        (answer,) = engine(one_request())
        (base,) = engine.base(one_request())
    with torch.inference_mode():
        expected = network(seed=5)(one_request()).softmax(1)[0]
    assert torch.equal(base.probabilities, expected)
    assert answer.exit in BLOCKS[:2]  # the second cache takes everything
    assert answer.class_name == ("north", "east", "south", "west")[answer.class_index]
    assert answer.version.startswith("default@")


def test_a_composition_has_the_name_of_its_file_for_all_who_open_it(directory: Path) -> None:
    """`gati serve` and `gati stream` watched a copied one under two identities."""
    path = Library(directory).composition_path()
    shutil.copy(path, path.with_name("copy.json"))
    opener = Opener(InferenceSettings(name="m", library=directory, threads=1, workers=1))
    stored, known = Composition.load(path), set()
    for name in ("default", "copy"):
        with one_thread():  # which restores the number that the opener sets
            opened, streamed = opener.open(name, None), open_served(directory, composition=name)
        assert opened.composition == streamed.composition == replace(stored, name=name)
        assert opened.engine.version == streamed.engine.version
        known.add(identity_of(streamed.composition))
        opened.runner.close()
    assert len(known) == 2 and identity_of(stored) in known, "whose evidence an earlier Gati stored"


def test_an_evaluation_has_every_promised_field(directory: Path, tmp_path: Path) -> None:
    test = tmp_path / "test.npz"
    np.savez(test, images=images(30), labels=np.arange(30) % CLASSES)
    told: list[tuple[int, int]] = []
    evaluation = evaluate(directory, test, progress=lambda done, of: told.append((done, of)))
    fields = json.loads(evaluation.to_json())
    latency = {"mean", "p50", "p90", "p99"}
    assert fields["n"] == 30
    assert set(fields["latency_ms"]) == set(fields["base_latency_ms"]) == latency
    assert set(fields["eager_latency_ms"]) == latency
    assert fields["hit_rate"] == 1.0
    assert sum(leaving["hits"] for leaving in fields["exits"]) == 30
    assert {"block", "variant", "threshold", "placement", "hits", "agreement"} <= set(fields["exits"][0])
    assert fields["gain"] == fields["base_latency_ms"]["mean"] / fields["latency_ms"]["mean"]
    assert fields["tail_ratio"] == fields["latency_ms"]["p99"] / fields["base_latency_ms"]["p99"]
    assert fields["backend"] == "torch"
    assert fields["memory_bytes"] > 0
    assert told[-1] == (30, 30)


def test_agreement_and_accuracy_are_those_of_the_answers(directory: Path, tmp_path: Path) -> None:
    pictures = images(40)
    with load(directory) as engine:
        x = engine.preprocessing(pictures)
        answers = np.array([prediction.class_index for prediction in engine(x)])
        base = np.array([prediction.class_index for prediction in engine.base(x)])
    np.savez(tmp_path / "test.npz", images=pictures, labels=base)
    evaluation = evaluate(directory, tmp_path / "test.npz", repetitions=2)
    assert evaluation.agreement == pytest.approx(np.mean(answers == base))
    assert evaluation.accuracy == evaluation.agreement
    assert evaluation.base_accuracy == 1.0


def test_without_labels_the_accuracies_are_null(directory: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "test.npz", images=images(9))
    evaluation = evaluate(directory, tmp_path / "test.npz", limit=4)
    assert evaluation.n == 4
    assert evaluation.accuracy is None
    assert evaluation.base_accuracy is None
    assert '"accuracy": null' in evaluation.to_json()


def test_a_composition_without_exits_serves_the_base_model(directory: Path, tmp_path: Path) -> None:
    rewrite(directory, exits=())
    np.savez(tmp_path / "test.npz", images=images(5))
    evaluation = evaluate(directory, tmp_path / "test.npz")
    assert (evaluation.hit_rate, evaluation.agreement, evaluation.exits) == (0.0, 1.0, ())


def test_an_exit_that_never_hits_has_no_agreement(directory: Path, tmp_path: Path) -> None:
    rewrite(directory, exits=(exit_at(0, 1e30),))
    np.savez(tmp_path / "test.npz", images=images(5))
    assert evaluate(directory, tmp_path / "test.npz").exits[0].agreement is None


def test_image_files_are_classified_in_order(directory: Path, tmp_path: Path) -> None:
    pictures = images(3)
    paths = [tmp_path / f"{index}.png" for index in range(3)]
    for path, picture in zip(paths, pictures, strict=True):
        Image.fromarray(picture[:, :, 0]).save(path)
    predictions = predict(directory, paths)
    with load(directory) as engine:
        expected = engine(engine.preprocessing(pictures))
    assert [p.class_name for p in predictions] == [e.class_name for e in expected]


def test_bad_requests_are_refused_in_one_line(directory: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "empty.npz", images=images(0))
    np.savez(tmp_path / "large.npz", images=np.zeros((2, 7, 7, 1), dtype=np.uint8))
    for call, kind, message in (
        (lambda: load(tmp_path / "nowhere"), LibraryError, "no cache library in"),
        (lambda: load(directory, composition="other"), CompositionError, "no composition 'other'"),
        (lambda: load(directory, device="tpu9"), BackendError, "unknown device 'tpu9'; choose cpu or cuda"),
        (lambda: load(directory, device="meta"), BackendError, "unknown device 'meta'"),
        (lambda: load(directory, device="cuda:99"), BackendError, "device 'cuda:99' is not available here"),
        (lambda: load(directory, threads=0), BackendError, "threads is 0; give 1 to 1024"),
        (lambda: load(directory, threads=100_000), BackendError, "threads is 100000; give 1 to 1024"),
        (lambda: evaluate(directory, tmp_path / "none.npz"), DataError, "none.npz"),
        (lambda: evaluate(directory, tmp_path / "large.npz"), DataError, r"6, 6\], got \[1, 1, 7, 7\]"),
        (lambda: evaluate(directory, tmp_path / "empty.npz"), DataError, "empty|no images"),
        (lambda: evaluate(directory, tmp_path / "empty.npz", limit=0), DataError, "limit is 0; at least 1"),
        (lambda: predict(directory, []), DataError, "image"),
    ):  # fmt: skip
        with pytest.raises(kind, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_changed_checkpoint_is_refused(directory: Path) -> None:
    save_file(network(seed=6).state_dict(), directory.parent / "weights.safetensors")
    with pytest.raises(LibraryError, match="was made from weights .*restore the old checkpoint"):
        load(directory)


@pytest.mark.parametrize("moved", ["checkpoint", "code"])
def test_a_network_that_has_moved_is_named_with_the_library_that_needs_it(
    directory: Path, tmp_path: Path, moved: str
) -> None:
    """Users of a library did not say that path: those who explored it did."""
    own = Path(shutil.copy(networks.__file__, tmp_path / "own.py"))
    library = Library(directory)
    library.write_manifest(replace(library.manifest, model_source=f"{own}:Network"))
    load(directory).close()
    gone = own if moved == "code" else tmp_path / "weights.safetensors"
    gone.unlink()
    with pytest.raises(ModelError) as refused:
        load(directory)
    assert str(refused.value) == (
        f"the library in {directory} was made from {gone}, which is not there any more: put it back, or "
        "repeat the gati explore command of this library with its new place"
    )


@pytest.mark.parametrize("closed", ["checkpoint", "code"])
def test_a_network_in_a_closed_folder_is_not_said_to_be_gone(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """To look whether it is there ended in an error of its own, which hid the reason."""
    library, home = Library(directory), tmp_path / "home"
    home.mkdir()
    moved = Path(shutil.move(tmp_path / "weights.safetensors", home))
    source = library.manifest.model_source
    if closed == "code":
        (tmp_path / "own.py").write_text("import not_installed")
        source = f"{tmp_path / 'own.py'}:Network"
    library.write_manifest(replace(library.manifest, model_source=source, checkpoint_path=str(moved)))
    close(monkeypatch, home)
    reason = {
        "checkpoint": f"cannot read checkpoint {moved}: Permission denied; check its permissions",
        "code": "own.py failed .*No module named .not_installed.",
    }
    with pytest.raises(ModelError, match=reason[closed]):
        load(directory)


def probed(library: Library, source: Path) -> str:
    """Make a library of a network with code of its own in `source`; returns the code."""
    code = Path(networks.__file__).read_text(encoding="utf-8")
    source.write_text(code, encoding="utf-8")
    manifest = replace(library.manifest, model_source=f"{source}:Network")
    library.write_manifest(manifest)
    found = load_network(library, torch.device("cpu"))
    example = example_of(library.preprocessing, found.traced.input_shape)
    library.write_manifest(replace(manifest, probe=probe_of(found, example)))
    return code


def test_changed_code_with_the_same_checkpoint_is_refused(directory: Path, tmp_path: Path) -> None:
    """The certificate, the caches and kept graphs are about what the network computed when they were made."""
    library, source = Library(directory), tmp_path / "own.py"
    code = probed(library, source)
    load(directory).close()
    source.write_text(code.replace("hidden.mean((2, 3))", "hidden.amax((2, 3))"), encoding="utf-8")
    with pytest.raises(
        LibraryError,
        match="Network has the same weights .* computes a different result: .*gati explore again",
    ):
        load(directory)
    source.write_text(code.replace("hidden += x", "hidden = hidden + x"), encoding="utf-8")
    load(directory).close()  # it computes the same


def test_code_that_gives_caches_something_else_to_read_is_refused(directory: Path, tmp_path: Path) -> None:
    """The same scores, but blocks begin with the ReLU that they ended with."""
    library, source = Library(directory), tmp_path / "own.py"
    changed = probed(library, source)
    for old, new in (
        ("hidden = self.conv(x)", "x = torch.relu(x)\n        hidden = self.conv(x)"),
        ("return torch.relu(hidden)", "return hidden"),
        (
            "hidden.mean((2, 3)))\n        return result",
            "torch.relu(hidden).mean((2, 3)))\n        return result",
        ),
    ):
        assert changed.count(old) == 1
        changed = changed.replace(old, new)
    load(directory).close()
    source.write_text(changed, encoding="utf-8")
    with pytest.raises(LibraryError, match="Network has the same weights .* computes a different result: "):
        load(directory)
    probe = library.manifest.probe
    assert probe is not None and set(probe.hidden) == {block.name for block in library.manifest.blocks}
    document = json.loads(library.manifest_path.read_text(encoding="utf-8"))
    del document["probe"]["hidden"]
    library.manifest_path.write_text(json.dumps(document), encoding="utf-8")
    with load(directory) as engine:  # as an older Gati explored it: the scores are the same
        (base,) = engine.base(one_request())
    with torch.inference_mode():
        assert torch.equal(base.probabilities, network(seed=5)(one_request()).softmax(1)[0])


def test_a_composition_for_another_checkpoint_is_refused(directory: Path) -> None:
    rewrite(directory, checkpoint_sha256="0" * 64)
    with pytest.raises(CompositionError, match="was made for checkpoint 000000000000, but the library"):
        load(directory)


def test_a_missing_or_foreign_cache_is_refused(directory: Path) -> None:
    library = Library(directory)
    foreign = LearnedCache("pool-linear(64)", (4, 6, 6), CLASSES, "maximum-probability")
    save_cache(library.cache_path(TrialId("trial-0")), foreign)
    with pytest.raises(LibraryError, match=r"takes \[4, 6, 6\], but block 'blocks.0' outputs \[8, 6, 6\]"):
        load(directory)
    library.cache_path(TrialId("trial-0")).unlink()
    with pytest.raises(LibraryError, match="trial-0.safetensors is not a learned cache"):
        load(directory)
    rewrite(directory, exits=(replace(exit_at(0, 0.5), trial_id=TrialId("../trial-0")),))
    with pytest.raises(LibraryError, match=r"'\.\./trial-0' cannot be the name of a cache"):
        load(directory)


def test_a_cache_other_than_the_one_composed_is_refused(directory: Path) -> None:
    """It may fit as well, but nothing was counted on it."""
    library, names = Library(directory), [TrialId(f"trial-{index}") for index in (0, 1)]
    exits = [replace(exit_at(at, 0.5), cache_sha256=library.cache_sha256(names[at])) for at in (0, 1)]
    rewrite(directory, exits=tuple(exits))
    load(directory).close()
    other = LearnedCache("pool-linear(64)", (8, 6, 6), CLASSES, "maximum-probability")
    save_cache(library.cache_path(names[1]), other)
    with pytest.raises(CompositionError, match=r"trial-1.safetensors is not the .*: run gati compose again"):
        load(directory)
    rewrite(directory, exits=(exits[0], exit_at(1, 0.5)))
    load(directory).close()  # as an older Gati composed it
    save_cache(library.cache_path(names[0]), other)
    with pytest.raises(CompositionError, match=r"trial-0.safetensors is not the cache") as caught:
        load(directory)
    assert "\n" not in str(caught.value)


def test_thresholds_too_high_to_reach_leave_every_answer_to_the_base_model(directory: Path) -> None:
    rewrite(directory, exits=(exit_at(0, 1e30), exit_at(1, 1e30)))
    with load(directory, threads=torch.get_num_threads()) as engine:
        for x in (one_request(), one_request().repeat(3, 1, 1, 1)):
            for answer, base in zip(engine(x), engine.base(x), strict=True):
                assert answer.exit == "base"
                assert torch.equal(answer.probabilities, base.probabilities)


class FailingSegments(TorchBackend):
    """A runtime whose segments fail when they first run, with an error of its own."""

    name = "failing"
    error: Exception = KeyError("no kernel for Conv\nin node 7")

    def path(self, traced: TracedModel, blocks: Sequence[str]) -> EnginePath:
        def fails(*_: Tensor) -> Any:
            raise self.error

        plain = super().path(traced, blocks)
        return EnginePath(plain.base, tuple(replace(each, run=fails) for each in plain.segments))


def test_a_backend_that_cannot_run_the_network_is_named_in_one_line(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(BACKENDS, "failing", FailingSegments)
    rewrite(directory, backend="failing")
    with pytest.raises(BackendError, match=r"^backend 'failing' cannot run this network \(KeyE") as caught:
        load(directory)
    assert str(caught.value).endswith("; run gati compose with another --backend")
    assert "\n" not in str(caught.value)
    Image.fromarray(images(1)[0, :, :, 0]).save(directory / "one.png")
    assert run(["predict", str(directory), str(directory / "one.png")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: {caught.value}"


@pytest.mark.parametrize("error", [MemoryError("too little"), torch.OutOfMemoryError("CUDA out of memory")])
def test_too_little_memory_is_not_blamed_on_the_backend(
    error: Exception, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service gives a version up after a BackendError, but memory may come back."""
    monkeypatch.setattr(FailingSegments, "error", error)
    monkeypatch.setitem(BACKENDS, "failing", FailingSegments)
    rewrite(directory, backend="failing")
    with pytest.raises(type(error)):
        load(directory)


def test_an_engine_without_preprocessing_says_so() -> None:
    with pytest.raises(BackendError, match="made without preprocessing; preprocess the inputs yourself"):
        Engine(traced_network()).preprocessing  # noqa: B018
