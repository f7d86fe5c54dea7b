"""A variant that cannot be trained or measured is left out; the others do not depend on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gati
from gati.caches import build_predictor, predictors, register_predictor
from gati.cli import render
from gati.errors import DataError, ModelError, VariantError
from gati.exploration import memory, stages
from gati.exploration.augment import Augmentation
from gati.exploration.candidates import Specification, measured_costs, specify, wanted
from gati.exploration.explore import explore
from gati.exploration.failures import GAVE_NAN, noting_failure
from gati.exploration.further import explore_more
from gati.exploration.groups import Classroom, FailedTrial, TrainedTrial, measured_trials
from gati.exploration.library import Library
from gati.exploration.measure import held_out_probabilities
from gati.exploration.progress import SilentProgress
from gati.exploration.recipes import EXITS, STUDENTS
from gati.exploration.train import Learner, SharedTraining
from gati.model.data import load_data
from gati.model.load import load_model
from gati.model.preprocess import Preprocessing
from gati.model.segments import trace
from gati.types import Trial, TrialId
from tests.exploration.networks import Net, digit_files
from tests.exploration.quick import few_steps
from tests.exploration.test_defaults import profile_of
from tests.exploration.test_train import RandomInputs

NETWORKS = Path(__file__).parent / "networks.py"
NET = f"{NETWORKS}:Net"
SHAPE = (8, 8, 8)
CPU = torch.device("cpu")


class Wrapped(nn.Module):
    """A predictor whose answers `spoilt` may change, or raise instead."""

    def __init__(self, spoilt: Callable[[Tensor, nn.Module], Tensor]) -> None:
        super().__init__()
        self.inner, self.spoilt = build_predictor("grid(8)", SHAPE, 10), spoilt

    def forward(self, hidden: Tensor) -> Tensor:
        return self.spoilt(self.inner(hidden), self)


def raising(answers: Tensor, module: nn.Module) -> Tensor:
    if module.training:
        raise ValueError("one at a time\nplease")
    return answers


def raising_later(answers: Tensor, module: nn.Module) -> Tensor:
    if not module.training:
        raise TypeError("only in training")
    return answers


def nan(answers: Tensor, module: nn.Module) -> Tensor:
    return answers * torch.nan


def unreadable(answers: Tensor, module: nn.Module) -> Tensor:
    raise DataError("the disk is gone")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return digit_files(tmp_path_factory.mktemp("digits"), count=300)


@pytest.fixture(scope="module")
def classroom(files: dict[str, str]) -> Classroom:
    loaded = load_model(NET)
    held_out = load_data(files["data"], loaded.preprocessing)
    with torch.no_grad():
        base_class = loaded.module(held_out.images(np.arange(300))).argmax(1).numpy()
    train = load_data(files["train_data"], loaded.preprocessing).subset(range(64))
    split = (np.arange(300) % 3 > 0).astype(np.uint8)
    return Classroom(loaded.module, train, held_out, split, base_class, "logits", 10, 32, 0, CPU)


def training_of(
    classroom: Classroom, **spoilt: Callable[[Tensor, nn.Module], Tensor] | None
) -> SharedTraining:
    """A short training of one predictor for each name; those of None are as they should be."""
    learners = []
    for name, how in spoilt.items():
        torch.manual_seed(3)
        predictor = build_predictor("grid(8)", SHAPE, 10) if how is None else Wrapped(how)
        learners.append(Learner(TrialId(name), "blocks.1", predictor))
    return SharedTraining(
        classroom.module,
        classroom.train,
        learners,
        total_steps=6,
        batch_size=32,
        seed=0,
        augmentation=Augmentation(),
        outputs_kind="logits",
        device=CPU,
    )


def specifications(training: SharedTraining) -> list[Specification]:
    return [
        Specification(Trial(each.trial_id, 1, each.block, "grid(8)", "trained"), SHAPE)
        for each in training.learners
    ]


def weights(training: SharedTraining, name: str) -> dict[str, Tensor]:
    return next(each.predictor for each in training.learners if each.trial_id == name).state_dict()


def test_learners_are_trained_as_if_those_that_fail_were_not_there(classroom: Classroom) -> None:
    alone = training_of(classroom, good=None)
    list(alone.run())
    together = training_of(classroom, bad=raising, good=None, nan=nan)
    list(together.run())
    assert together.failures == {"bad": "ValueError: one at a time", "nan": GAVE_NAN}
    for name, tensor in weights(alone, "good").items():
        assert torch.equal(tensor, weights(together, "good")[name]), name
    found = measured_trials(classroom, together, specifications(together))
    expected = measured_trials(classroom, alone, specifications(alone))
    assert isinstance(found[1], TrainedTrial) and isinstance(expected[0], TrainedTrial)
    assert found[1].loss == expected[0].loss
    assert found[0] == FailedTrial("training or measuring it failed: ValueError: one at a time")
    assert found[2] == FailedTrial(GAVE_NAN)


def test_a_failure_is_known_to_the_run_that_resumes(classroom: Classroom, tmp_path: Path) -> None:
    first = training_of(classroom, bad=raising, good=None)
    list(first.run())
    first.save(tmp_path / "state.safetensors")
    second = training_of(classroom, bad=raising, good=None)
    second.restore(tmp_path / "state.safetensors")
    assert second.failures == first.failures and len(second.failures) == 1


def test_a_state_of_another_predictor_is_not_resumed_and_changes_nothing(
    classroom: Classroom, tmp_path: Path
) -> None:
    first = training_of(classroom, good=None, other=None)
    list(first.run())
    first.save(tmp_path / "state.safetensors")
    for changed in (training_of(classroom, good=None, other=raising), training_of(classroom, good=None)):
        assert not changed.restore(tmp_path / "state.safetensors")
        assert changed.step == 0 and not changed.finished
        list(changed.run())
        alone = training_of(classroom, good=None)
        list(alone.run())
        for name, tensor in weights(alone, "good").items():
            assert torch.equal(tensor, weights(changed, "good")[name]), name
    assert training_of(classroom, good=None, other=None).restore(tmp_path / "state.safetensors")


def test_a_predictor_that_fails_on_the_held_out_inputs_leaves_the_others(classroom: Classroom) -> None:
    training = training_of(classroom, good=None, bad=raising_later)
    list(training.run())
    good, bad = measured_trials(classroom, training, specifications(training))
    assert isinstance(good, TrainedTrial)
    assert bad == FailedTrial("training or measuring it failed: TypeError: only in training")


def test_no_more_learners_are_asked_at_a_time_than_memory_holds_answers_of(
    classroom: Classroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = training_of(classroom, one=None, two=None, bad=nan, four=None, five=None)
    list(training.run())
    expected = measured_trials(classroom, training, specifications(training))
    asked: list[int] = []

    def counted(module: nn.Module, inputs: Any, learners: Any, device: torch.device) -> Any:
        asked.append(len(learners))
        return held_out_probabilities(module, inputs, learners, device)

    monkeypatch.setattr("gati.exploration.groups.held_out_probabilities", counted)
    monkeypatch.setattr(memory, "available_bytes", lambda: 3 * 4 * 300 * 10)
    found = measured_trials(classroom, training, specifications(training))
    assert asked == [2, 2]
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, FailedTrial):
            assert one == other
            continue
        assert isinstance(other, TrainedTrial)
        np.testing.assert_allclose(one.measured.outcomes.score, other.measured.outcomes.score, atol=1e-5)


def test_no_time_is_spent_once_all_have_failed(classroom: Classroom) -> None:
    training = training_of(classroom, one=raising, two=nan)
    assert len(list(training.run())) == 1 and training.finished
    found = measured_trials(classroom, training, specifications(training))
    assert all(isinstance(each, FailedTrial) for each in found)


def test_a_lack_of_memory_is_no_fault_of_a_variant() -> None:
    failures: dict[TrialId, str] = {}
    with pytest.raises(ModelError, match="does not fit"), noting_failure(failures, TrialId("a")):
        raise ModelError("one input does not fit into memory") from torch.OutOfMemoryError(
            "CUDA out of memory"
        )
    assert not failures


class Standardising(nn.Module):
    """Divides each picture by its own contrast, which one without any does not survive."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True))


class Deciding(Standardising):
    """Has an answer even where its hidden outputs are NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).nan_to_num()


def taught(
    network: nn.Module, blank: int, block: str, variant: str, shape: tuple[int, ...], batch_size: int = 16
) -> SharedTraining:
    """A training with 64 pictures, of which the first are blank."""
    inputs = RandomInputs(64)
    inputs.tensor[:blank] = 0.5
    torch.manual_seed(3)
    return SharedTraining(
        network.eval(),
        inputs,
        [Learner(TrialId("t"), block, build_predictor(variant, shape, 10))],
        total_steps=8,
        batch_size=batch_size,
        seed=0,
        augmentation=Augmentation(),
        outputs_kind="logits",
        device=CPU,
        recipe=STUDENTS if block == "input" else EXITS,
        feature_block="net.blocks.3" if block == "input" else None,
        engine="torch",
    )


@pytest.mark.parametrize(
    ("block", "variant", "shape"),
    [("net.blocks.1", "grid(8)", SHAPE), ("input", "student(8)", (1, 8, 8))],
    ids=["exits", "students"],
)
def test_inputs_that_the_network_answers_with_nan_spoil_no_learner(
    block: str, variant: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    for blank, batch_size in ((3, 16), (44, 2)):  # a few of a batch, and whole batches
        training = taught(Standardising(), blank, block, variant, shape, batch_size)
        losses = list(training.run())
        assert len(losses) == 8 and np.isfinite(losses).all() and not training.failures
        assert training.unanswered_batches
        assert all(torch.isfinite(tensor).all() for tensor in weights(training, "t").values())
    training.save(tmp_path / "state.safetensors")
    resumed = taught(Standardising(), 44, block, variant, shape, 2)
    assert resumed.restore(tmp_path / "state.safetensors")
    assert resumed.unanswered_batches == training.unanswered_batches
    nothing = taught(Standardising(), 64, block, variant, shape)
    assert len(list(nothing.run())) == 4, "a round in which no input has an answer"
    assert nothing.failures == {"t": GAVE_NAN}
    hasty, share = taught(Standardising(), 64, block, variant, shape), iter((0.0, 0.5, 1.0))
    assert len(list(hasty.run(lambda: next(share)))) == 2, "time has ended it before"
    assert hasty.failures == {"t": GAVE_NAN}


def test_an_input_whose_hidden_outputs_alone_are_nan_still_teaches_its_answer() -> None:
    training = taught(Deciding(), 3, "input", "student(8)", (1, 8, 8))
    assert np.isfinite(list(training.run())).all()
    assert training.unanswered_batches == 0 and not training.failures
    assert all(torch.isfinite(tensor).all() for tensor in weights(training, "t").values())


def test_inputs_that_cannot_be_read_are_no_fault_of_a_variant(classroom: Classroom) -> None:
    with pytest.raises(DataError, match="the disk is gone"):
        list(training_of(classroom, one=unreadable, good=None).run())


class _OfCodes(nn.Module):
    """Embeds the first of an input's numbers, which are from 0 to 1."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding(x.flatten(1)[:, 0].round().long())


# The verb ---------------------------------------------------------------------------------------------------


class Notes(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def families() -> Iterator[None]:
    """Predictors of a user, which are registered no longer than these tests run."""
    with pytest.MonkeyPatch.context() as patch:
        for registry in ("_PREDICTORS", "_READS"):
            patch.setattr(predictors, registry, dict(getattr(predictors, registry)))

        @register_predictor("raising")
        def of_raising(hidden_shape: tuple[int, ...], classes: int, number: int) -> nn.Module:
            return Wrapped(raising)

        @register_predictor("raising-input", reads="input")
        def of_raising_input(hidden_shape: tuple[int, ...], classes: int, number: int) -> nn.Module:
            return nn.Sequential(nn.Flatten(), nn.Linear(64, classes), _Fails())

        @register_predictor("refusing")
        def of_refusing(hidden_shape: tuple[int, ...], classes: int, number: int) -> nn.Module:
            return Wrapped(lambda answers, module: answers.view(7, -1))

        @register_predictor("fewer-classes")
        def of_fewer(hidden_shape: tuple[int, ...], classes: int) -> nn.Module:
            return nn.Sequential(nn.Flatten(), nn.Linear(prod(hidden_shape), classes - 3))

        @register_predictor("of-the-batch")
        def of_the_batch(hidden_shape: tuple[int, ...], classes: int) -> nn.Module:
            return Wrapped(lambda answers, module: answers - answers.mean(0))

        kept: dict[tuple[int, ...], nn.Module] = {}

        @register_predictor("kept")
        def of_kept(hidden_shape: tuple[int, ...], classes: int) -> nn.Module:
            layers = nn.Sequential(nn.Flatten(), nn.Linear(prod(hidden_shape), classes))
            return kept.setdefault(hidden_shape, layers)

        @register_predictor("with-codes", reads="input")
        def of_codes(hidden_shape: tuple[int, ...], classes: int) -> nn.Module:
            return _OfCodes(classes)

        @register_predictor("changing")
        def of_changing(hidden_shape: tuple[int, ...], classes: int, number: int) -> nn.Module:
            return build_predictor(f"fc({_BUILT['width']})", hidden_shape, classes)

        @register_predictor("nan")
        def of_nan(hidden_shape: tuple[int, ...], classes: int, number: int) -> nn.Module:
            return Wrapped(nan)

        yield


_BUILT = {"width": 8}  # by a user's code


class _Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return raising(x, self)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, families: None) -> Iterator[None]:
    few_steps(monkeypatch)
    yield


def explored(files: dict[str, str], out: Path, *variants: str, **options: Any) -> Library:
    return explore(NET, **files, out=out, variants=variants, blocks="blocks.[12]", epochs=0.5, **options)


@pytest.mark.slow
def test_a_failed_variant_is_a_row_with_its_reason_and_the_rest_goes_on(
    files: dict[str, str],
    tmp_path: Path,
    quick: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = Notes()
    names = ("raising-input(1)", "grid(16)", "raising(1)", "nan(1)")
    library = explored(files, tmp_path / "out", *names, progress=said)
    rows = {(trial.block, trial.variant): trial for trial in Library(library.directory).trials}
    assert len(rows) == 7
    for (block, variant), trial in rows.items():
        assert trial.status == ("trained" if variant == "grid(16)" else "failed")
        if trial.status == "failed":
            assert f"left out {variant} at {block}: {trial.reason}" in said.notes
            assert trial.agreement is None and not library.cache_path(trial.trial_id).exists()
    assert (
        rows["blocks.1", "raising(1)"].reason == "training or measuring it failed: ValueError: one at a time"
    )
    assert rows["blocks.2", "nan(1)"].reason.startswith("its training gave NaN")
    assert {point.trial_id for point in library.operating_points} == {
        trial.trial_id for trial in rows.values() if trial.status == "trained"
    }
    gati.compose(library.directory, accuracy=0.8, backend="torch", confidence=None)
    gati.report(library.directory, out=tmp_path / "report.html")
    render.library(library)
    assert "5 failed" in capsys.readouterr().out
    further = explore_more(library.directory, epochs=0.1)
    assert sum(trial.status == "failed" for trial in further.trials) == 5


@pytest.mark.slow
def test_a_predictor_whose_code_has_changed_since_is_not_trained_further_and_the_others_are(
    files: dict[str, str], tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = explored(files, tmp_path / "out", "changing(1)", "grid(16)")
    monkeypatch.setitem(_BUILT, "width", 12)
    said = Notes()
    explore_more(library.directory, epochs=2.0, progress=said)
    (done,) = json.loads((library.directory / "training" / "rounds.json").read_text())["rounds"]
    names = {place: f"blocks.{place}--changing-1--r2" for place in (1, 2)}
    assert set(done["left_out"]) == set(names.values())
    assert all("Error(s) in loading state_dict" in reason for reason in done["left_out"].values())
    trained = {*done["better"], *done["no_better"]}
    assert trained == {f"blocks.{place}--grid-16--r2" for place in (1, 2)}
    assert sum(note.startswith("left out changing(1)") for note in said.notes) == 2
    assert Library.open(library.directory).trials[0].status in ("trained", "replaced")


@pytest.mark.slow
def test_if_nothing_is_left_that_is_an_error_and_another_command_may_begin(
    files: dict[str, str], tmp_path: Path, quick: None
) -> None:
    with pytest.raises(ModelError, match=r"no variant could be trained; nan\(1\) at blocks.1: .*--variants"):
        explored(files, tmp_path / "out", "raising(1)", "nan(1)")
    assert not (tmp_path / "out" / "manifest.json").exists()
    library = explored(files, tmp_path / "out", "grid(16)")
    assert {trial.status for trial in library.trials} == {"trained"}


@pytest.mark.slow
def test_neither_do_failures_and_what_was_left_out_make_a_library(
    files: dict[str, str], tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command would then say for ever that it has finished."""
    monkeypatch.setattr(stages, "too_slow_for_exits", lambda *_: "no time")
    with pytest.raises(ModelError, match=r"no variant could be trained; raising-input\(1\) at input"):
        explored(files, tmp_path / "out", "raising-input(1)", "grid(16)", budget_s=600.0)
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("variant", ["kept", "with-codes"])
def test_builders_that_do_more_than_build_are_measured(variant: str, families: None) -> None:
    """Counting weights on the meta device first left a module without data behind; codes must stay codes."""
    torch.manual_seed(1)
    network = Net().eval().requires_grad_(False)
    model = trace(network, torch.randn(2, 1, 8, 8).sigmoid(), ["input", "blocks.1"])
    asked = wanted([variant], "blocks.1" if variant != "with-codes" else "input", 1)
    rows = specify(model, network, profile_of(model), asked, measured_costs(model, network, 1.0))
    assert {row.trial.lookup_ms is not None for row in rows if row.trial.variant == variant} == {True}


@pytest.mark.slow
def test_a_lookup_that_raises_is_refused_before_any_training(
    files: dict[str, str], tmp_path: Path, quick: None
) -> None:
    with pytest.raises(
        VariantError, match=r"variant refusing\(1\) cannot read a hidden output of shape"
    ) as caught:
        explored(files, tmp_path / "out", "refusing(1)")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ("fewer-classes", r"returns \[1, 7\] for one input; return logits of shape \[1, 10\]"),
        ("of-the-batch", "answers an input otherwise among others than alone"),
    ],
)
def test_a_lookup_that_gives_no_answer_of_its_own_is_refused_before_any_training(
    files: dict[str, str], tmp_path: Path, quick: None, variant: str, reason: str
) -> None:
    """Fewer classes were trained without a word; what depends on the batch was certified in batches."""
    with pytest.raises(VariantError, match=f"variant {variant} {reason}"):
        explored(files, tmp_path / "out", variant)
    assert not (tmp_path / "out").exists()


class FailsInTheLight(nn.Module):
    """A companion that gives NaN for a picture that is white everywhere."""

    preprocessing = Preprocessing((0.0,), (1.0,), channels=1)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 10, 3)

    def forward(self, x: Tensor) -> Tensor:
        dark = x.amin((1, 2, 3)).unsqueeze(1) < 1
        return torch.where(dark, self.conv(x).mean((2, 3)), torch.nan)


def test_a_network_that_gives_nan_is_refused_with_the_number_of_all_such_inputs(
    files: dict[str, str], tmp_path: Path, quick: None
) -> None:
    images = np.load(files["data"])["images"]
    images[3], images[299] = 128, 129  # in the first batch and in the last
    np.savez(tmp_path / "val.npz", images=images)
    options: dict[str, Any] = {"data": str(tmp_path / "val.npz"), "train_data": files["train_data"]}
    with pytest.raises(ModelError, match="returns NaN or infinity for 2 of 300 inputs"):
        explore(f"{__file__}:Standardising", **options, out=tmp_path / "out", mean=(0.0,), std=(1.0,))
    assert not (tmp_path / "out" / ".state").exists()


@pytest.mark.slow
def test_a_companion_that_gives_nan_is_refused_by_name(
    files: dict[str, str], tmp_path: Path, quick: None
) -> None:
    images = np.load(files["data"])["images"]
    images[299] = 255  # beyond those that a companion is tried on first
    np.savez(tmp_path / "val.npz", images=images)
    with pytest.raises(
        ModelError, match=r"companion\(FailsInTheLight\) gives NaN for 1 of 300 held-out inputs"
    ):
        explore(
            NET,
            files["checkpoint"],
            data=str(tmp_path / "val.npz"),
            train_data=files["train_data"],
            out=tmp_path / "out",
            variants=(),
            companions=[(f"{__file__}:FailsInTheLight", None)],
        )
    assert not (tmp_path / "out" / ".state").exists(), "the next command may leave it out"


def test_variants_whose_caches_would_have_one_name_are_refused(
    files: dict[str, str], tmp_path: Path, families: None
) -> None:
    """One of them was left out without a word."""
    for family in ("net", "net-2"):

        @register_predictor(family)
        def of_net(hidden_shape: tuple[int, ...], classes: int, *numbers: int) -> nn.Module:
            return build_predictor("grid(8)", hidden_shape, classes)

    with pytest.raises(VariantError) as refused:
        explored(files, tmp_path / "out", "net-2(64)", "net(3)", "net(2,64)")
    assert str(refused.value) == (
        "the caches net-2(64) and net(2,64) would both be stored as net-2-64: register one of them under "
        "another name, such as one that does not end in a number"
    )
    assert not (tmp_path / "out").exists()
