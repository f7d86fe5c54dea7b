"""Further inputs to certify on: what they are answered, and that the promise holds with them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import gati
from gati.cli import run
from gati.composition.binomial import rate_upper_bound, required_inputs
from gati.composition.certified import propose
from gati.composition.compose import compose, compose_best, compose_library
from gati.composition.composition import Composition
from gati.composition.costs import CostedLibrary
from gati.composition.engines import EngineAnswers
from gati.composition.further import Further, further_inputs
from gati.composition.ledger import Ledger, share_of_attempt
from gati.composition.outcomes import EngineOutcomes, SplitOutcomes, outcomes_of
from gati.composition.pieces import Pieces
from gati.composition.plans import Settings
from gati.composition.verdicts import replay_of
from gati.composition.walk import certify as walk
from gati.engine.backends import BACKENDS
from gati.errors import CompositionError, DataError, ModelError
from gati.evaluation.certify import certify
from gati.exploration import candidates, network
from gati.exploration.explore import explore
from gati.exploration.library import CERTIFY, SELECT, Library, TrialOutcomes
from gati.exploration.splits import held_out
from gati.model.identity import CopyCounts
from gati.types import TrialId
from tests.composition.libraries import CLASSES, make_library
from tests.composition.test_costs import costs_of
from tests.exploration.networks import digits, trained_state
from tests.exploration.quick import quick_selectors

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unbounded")]

NET = f"{Path(__file__).parent.parent / 'exploration' / 'networks.py'}:Net"
HELD_OUT, TRAINED = 600, 700


@pytest.fixture(scope="module")
def explored(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """A library of a trained network on digits, beside which lies `more.npz`, of digits it has not seen."""
    folder = tmp_path_factory.mktemp("further")
    images, labels = digits()
    order = np.random.default_rng(3).permutation(len(images))
    parts = np.split(order, (HELD_OUT, HELD_OUT + TRAINED))
    for name, rows in zip(("held", "train", "more"), parts, strict=True):
        np.savez(folder / f"{name}.npz", images=images[rows], labels=labels[rows])
    save_file(trained_state(), folder / "net.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        # a network so small is hardly slower than a lookup: here it is
        patch.setattr(candidates, "too_slow", lambda *_: "")
        quick_selectors(patch)
        library = explore(
            NET, str(folder / "net.safetensors"), data=str(folder / "held.npz"),
            train_data=str(folder / "train.npz"), out=folder / "library", blocks="blocks.[012]",
            variants=["grid(16)"], epochs=3,
        )  # fmt: skip
    cheap = 0.02 * library.manifest.profile.base_ms
    trials = [replace(trial, lookup_ms=cheap) for trial in library.trials]
    library.write_trials(trials, list(library.operating_points))
    return Library.open(library.directory)


@pytest.fixture
def library(explored: Library) -> Library:
    """The same, as if nothing had been composed yet."""
    (explored.directory / "certify_ledger.json").unlink(missing_ok=True)
    shutil.rmtree(explored.directory / "certify_inputs", ignore_errors=True)
    return explored


def more_of(library: Library) -> Path:
    return library.directory.parent / "more.npz"


def test_base_model_and_caches_answer_as_they_did_when_explored(library: Library) -> None:
    inputs, split = held_out(library)
    again = np.flatnonzero(split == CERTIFY)
    further = Further(
        inputs=inputs.subset(again),
        copies=CopyCounts.once(len(again)),
        data="again",
        identity="again",
        identities=np.empty(0, np.uint64),
    )
    own = SplitOutcomes(library, CERTIFY)
    extended = further.after(own, ())
    count = len(own)
    assert len(extended) == 2 * count
    assert np.array_equal(extended.base_class[count:], own.base_class)
    for trial in library.trials:
        if trial.status == "trained":
            found, known = extended.trial(trial.trial_id), own.trial(trial.trial_id)
            assert np.array_equal(found.predicted, np.concatenate([known.predicted, known.predicted]))
            np.testing.assert_allclose(found.score[:count], found.score[count:], atol=1e-5)


def test_they_are_counted_beside_the_own_split_as_the_engine_answers(library: Library) -> None:
    composition = compose(library.directory, accuracy=0.9, certify_data=more_of(library), backend="torch")
    certificate = composition.certificate
    assert certificate is not None and composition.exits
    new = len(np.load(more_of(library))["images"])
    own = int((library.base_outcomes().split == CERTIFY).sum())
    assert certificate.inputs == own + new
    assert certificate.further.inputs == new and "more.npz" in certificate.further.data
    losses = 0
    inputs, split = held_out(library)
    with gati.load(library.directory) as engine:
        for x in (
            inputs.images(np.flatnonzero(split == CERTIFY)),
            engine.preprocessing(np.load(more_of(library))["images"]),
        ):
            answers = [each.class_index for each in engine(x)]
            losses += sum(
                mine != base.class_index for mine, base in zip(answers, engine.base(x), strict=True)
            )
    assert certificate.losses == losses
    drop = certificate.accuracy_drop
    assert drop is not None and drop.n == own  # labels of further inputs are not asked for
    part = certificate.level / certificate.settings
    assert drop.upper_bound == pytest.approx(rate_upper_bound(drop.became_wrong, own, part))


def test_labels_make_no_difference(library: Library, tmp_path: Path) -> None:
    np.savez(tmp_path / "unlabelled.npz", images=np.load(more_of(library))["images"])
    found = [
        compose(library.directory, accuracy=0.9, certify_data=data, backend="torch").certificate
        for data in (more_of(library), tmp_path / "unlabelled.npz")
    ]
    labelled, unlabelled = (replace(each, further=None) for each in found if each is not None)
    assert labelled == unlabelled  # the very same attempt, too


def test_every_command_is_an_attempt_and_attempts_share_delta(library: Library) -> None:
    def composed(**options: object) -> Composition:
        more = {"certify_data": more_of(library), "backend": "torch"}
        return compose(library.directory, **{"accuracy": 0.9, **more, **options})  # type: ignore[arg-type]

    first = composed()
    assert first.certificate is not None and first.certificate.attempt.number == 1
    assert first.certificate.level == pytest.approx(0.75 * 0.05)
    assert first.certificate.certified and first.certified
    again = composed(name="again").certificate  # what it is called makes no difference
    assert again is not None and again.attempt.number == 1 and again.use == 1
    second = composed(accuracy=0.91).certificate
    assert second is not None and second.attempt.number == 2 and second.use == 2
    assert second.level == pytest.approx(share_of_attempt(2) * 0.05)
    assert "2nd attempt in this library, which errs with probability at most 0.63 %" in second.sentence()
    assert "This data has been used for 2 compositions" in second.sentence()
    assert "2nd use of the library's certify split" in second.sentence()
    ledger = Ledger(library.directory)
    assert [entry.settings["verb"] for entry in ledger.attempts] == ["compose", "compose"]
    assert [entry.results[0].certificate["accuracy"] for entry in ledger.attempts] == [0.9, 0.91]
    # one of `gati certify` comes after them, on data that is known to have been looked at
    third = certify(library.directory, more_of(library))
    assert (third.attempt.number, third.attempt.compositions) == (3, 3)


def test_data_may_grow_but_not_lose_inputs(library: Library, tmp_path: Path) -> None:
    images = np.load(more_of(library))["images"]
    for name, rows in {"some": images[:200], "grown": images[:300], "picked": images[20:400]}.items():
        np.savez(tmp_path / f"{name}.npz", images=rows)

    def composed(name: str) -> Composition:
        return compose(
            library.directory, accuracy=0.9, certify_data=tmp_path / f"{name}.npz", backend="torch"
        )

    counted = []
    for name in ("some", "grown", "picked"):
        certificate = composed(name).certificate
        assert certificate is not None
        counted.append((certificate.attempt.number, certificate.further.inputs, certificate.further.note))
    assert [each[:2] for each in counted] == [(1, 200), (2, 300), (3, 100)]
    assert counted[0][2] == ""
    assert "earlier attempts have counted 200 of 300 inputs, too" in counted[1][2]
    assert "earlier attempts have counted 280 of 380 inputs as part of other data" in counted[2][2]
    own = int((library.base_outcomes().split == CERTIFY).sum())
    assert own + 100 <= certificate.inputs <= own + 100 + certificate.losses


def test_what_determines_the_counts_makes_another_attempt(library: Library) -> None:
    """Other latencies or operating points may choose other caches, and so count others."""

    def attempt(of: Library, **asked: object) -> int:
        settings = replace(Settings(accuracy=0.9), **asked)  # type: ignore[arg-type]
        return further_inputs(of, more_of(of)).enter(of, settings, [of]).number

    trials, points = list(library.trials), list(library.operating_points)
    assert [attempt(library), attempt(library, name="other", threads=2)] == [1, 1]
    try:
        library.write_trials(
            [replace(each, lookup_ms=0.5 * (each.lookup_ms or 0.0)) for each in trials], points
        )
        assert attempt(Library.open(library.directory)) == 2
        library.write_trials(trials, points[:-1])
        assert attempt(Library.open(library.directory)) == 3
    finally:
        library.write_trials(trials, points)
    assert attempt(Library.open(library.directory)) == 1
    assert attempt(library, memory_limit_bytes=10**6) == 4


def test_an_attempt_is_entered_before_anything_is_counted(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise RuntimeError("killed")

    monkeypatch.setattr(Further, "after", lost)
    with pytest.raises(RuntimeError, match="killed"):
        compose(library.directory, accuracy=0.9, certify_data=more_of(library), backend="torch")
    assert [entry.results for entry in Ledger(library.directory).attempts] == [()]


def test_what_explore_has_seen_certifies_nothing(library: Library, tmp_path: Path) -> None:
    folder = library.directory.parent
    for seen in ("held", "train"):
        with pytest.raises(DataError, match="this composition was made from .*, so it proves nothing"):
            compose(library.directory, accuracy=0.9, certify_data=folder / f"{seen}.npz")
    held, more = (np.load(folder / f"{name}.npz")["images"] for name in ("held", "more"))
    np.savez(tmp_path / "mixed.npz", images=np.concatenate([held[:40], more, more[:25]])[::-1])
    further = further_inputs(library, tmp_path / "mixed.npz")
    assert (len(further), further.copies.evidence) == (len(more) + 40, len(more))
    assert further.copies.differs.sum() == len(more) + 40 + 25
    assert (
        "gati explore has already seen 40 of" in further.note
        and "25 inputs are copies of others" in further.note
    )
    mixed = tmp_path / "mixed.npz"
    composition = compose(library.directory, accuracy=0.9, certify_data=mixed, backend="torch")
    assert composition.certificate is not None
    assert composition.certificate.further.inputs == len(more)
    assert "gati explore has already seen 40 of" in composition.note
    assert not Ledger(library.directory).attempts[1:]


def test_inputs_of_another_size_are_refused_before_an_attempt_is_entered(
    library: Library, tmp_path: Path
) -> None:
    larger = np.kron(np.load(more_of(library))["images"], np.ones((1, 2, 2, 1), np.uint8))
    np.savez(tmp_path / "larger.npz", images=larger)
    message = r"larger.npz does not fit: the network takes inputs of shape \[1, 8, 8\], got \[1, 16, 16\]"
    with pytest.raises(DataError, match=message):
        compose(library.directory, accuracy=0.9, certify_data=tmp_path / "larger.npz", backend="torch")
    assert not Ledger(library.directory).attempts


def test_a_network_that_returns_nan_for_them_agrees_with_nothing(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class of such outputs is that of the first NaN, and whoever runs to the end gets the same."""
    load = network.load_network

    def damaged(*arguments: Any) -> Any:
        found = load(*arguments)
        with torch.no_grad():
            list(found.module.parameters())[-1].fill_(float("nan"))
        return found

    monkeypatch.setattr(network, "load_network", damaged)
    with pytest.raises(ModelError, match=r"the network returns NaN or infinity for \d+ of \d+ inputs"):
        compose(library.directory, accuracy=0.9, certify_data=more_of(library), backend="torch")
    assert not Ledger(library.directory).attempts


def test_without_anything_to_certify_they_are_refused(library: Library, tmp_path: Path) -> None:
    with pytest.raises(CompositionError, match="nothing is certified without a confidence"):
        compose(library.directory, certify_data=more_of(library), confidence=None)
    bare = make_library(tmp_path / "bare", outcomes=False)
    with pytest.raises(CompositionError, match=r"which are missing \(outcomes/\); explore again"):
        compose(bare.directory, objective="full", certify_data=more_of(library))


@pytest.mark.parametrize("option", ["--pareto", "--latency=2ms"])
def test_the_command_line_says_what_they_do_not_go_with(option, library, capsys) -> None:
    status = run(["compose", str(library.directory), option, "--certify-data", str(more_of(library))])
    assert status == CompositionError.exit_status
    assert "error: --certify-data requires --accuracy; it works with neither" in capsys.readouterr().err


def test_the_command_line_takes_them_and_a_published_form_too(library: Library, capsys) -> None:
    arguments = ["--certify-data", str(more_of(library)), "--accuracy", "0.9", "--objective", "full"]
    assert run(["compose", str(library.directory), *arguments]) == 0
    new = len(np.load(more_of(library))["images"])
    certificate = json.loads(library.composition_path().read_text())["certificate"]
    assert certificate["n"] == HELD_OUT // 2 + new
    assert certificate["level"] == pytest.approx(0.75 * 0.05)
    assert f"of {HELD_OUT // 2 + new} inputs" in capsys.readouterr().out


def test_an_engine_is_asked_what_it_answers_to_them(library: Library) -> None:
    pytest.importorskip("openvino")
    backend = "openvino-bf16" if BACKENDS["openvino-bf16"].installed() else "openvino"
    pieces = Pieces(library)
    answers = EngineAnswers(library, backend, pieces)
    settings = Settings(accuracy=0.9, confidence=None)
    contest = propose(library, settings, ["inline"], outcomes_of(library, SELECT), 300)
    setting = contest.candidates[-1]
    inputs, _ = pieces.held_out
    rows = np.arange(0, len(inputs), 7)
    elsewhere = answers.elsewhere(inputs.subset(rows))
    for asked in ((), setting):
        for here, there in zip(answers(asked), elsewhere(asked), strict=True):
            assert np.array_equal(here[rows], there)
    # only one split's inputs are run; what is chosen on one must not look at the other
    split = library.base_outcomes().split
    for shift in (0.0, 0.4, 0.2):
        asked = [replace(each, threshold=each.threshold + shift) for each in setting]
        for here, there in zip(answers(asked), answers.of_split(SELECT)(asked), strict=True):
            assert np.array_equal(here[split == SELECT], there[split == SELECT])
            assert set(there[split != SELECT]) == {-1}
    # between a stricter and a looser setting only inputs that leave elsewhere are run
    for shift in (0.3, -0.3, 0.1):
        shifted = [replace(each, threshold=each.threshold + shift) for each in setting]
        alone = EngineAnswers(library, backend, pieces)
        for here, there in zip(answers(shifted), alone(shifted), strict=True):
            assert np.array_equal(here, there)


# Made of numbers: what more inputs allow, and whether the promise holds -------------------------------------

ACCURACY, DELTA = 0.95, 0.05


class Rows(SplitOutcomes):
    """Some inputs of a split."""

    def __init__(self, whole: SplitOutcomes, rows: np.ndarray) -> None:
        self.library, self.inputs, self.label = whole.library, whole.inputs[rows], None
        self.base_class, self.copies = whole.base_class[rows], whole.copies.of(rows)
        self._whole, self._rows = whole, rows

    def trial(self, trial_id: TrialId) -> TrialOutcomes:
        whole = self._whole.trial(trial_id)
        return TrialOutcomes(whole.score[self._rows], whole.predicted[self._rows])


def drawn(population: SplitOutcomes, library: Library, rows: np.ndarray) -> Further:
    """Further inputs from a large library of the same caches, already answered."""
    some = Rows(population, rows)
    outcomes = {trial.trial_id: some.trial(trial.trial_id) for trial in library.trials}
    return Further(
        inputs=None,
        copies=some.copies,
        data="drawn",
        identity="drawn",
        identities=np.empty(0, np.uint64),
        base_class=some.base_class,
        outcomes=outcomes,
    )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def population(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return make_library(tmp_path_factory.mktemp("population") / "p", quality=3.0, inputs=20_000, certify=0)


@pytest.fixture(scope="module")
def everything(population: Library) -> SplitOutcomes:
    return SplitOutcomes(population, SELECT)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("numbers")
    return make_library(folder / "library", quality=3.0, inputs=800, certify=300, seed=1)


def test_more_inputs_allow_a_larger_share_of_losses(numbers: Library, everything: SplitOutcomes) -> None:
    settings = Settings(accuracy=ACCURACY, slowdown=None)
    found = [
        compose_library(numbers, settings, further=drawn(everything, numbers, np.arange(count)), share=0.75)
        for count in (100, 1500, 15_000)
    ]
    certificates = [each.certificate for each in found if each.certificate is not None]
    assert [each.inputs for each in certificates] == [400, 1800, 15_300]
    allowed = [each.losses / each.inputs for each in certificates]
    assert allowed == sorted(allowed) and allowed[2] > allowed[0] + 0.01
    assert found[2].expected.mean_latency_ms < found[0].expected.mean_latency_ms


def test_too_few_of_its_own_can_be_enough_with_further_ones(
    tmp_path: Path, everything: SplitOutcomes
) -> None:
    small = make_library(tmp_path / "small", quality=3.0, inputs=800, certify=40, seed=1)
    settings = Settings(accuracy=ACCURACY, slowdown=None)
    assert len(SplitOutcomes(small, CERTIFY)) < required_inputs(ACCURACY, DELTA)
    assert not compose_library(small, settings).exits
    further = drawn(everything, small, np.arange(1000))
    assert compose_library(small, settings, further=further, share=0.75).exits


def false_share(wrong: np.ndarray, accuracy: float, draws: int, *, shared: bool) -> float:
    """How often a user who adds inputs until a composition just below the target passes is told it holds.

    `wrong` says it of every input of a population. 300 of its own and, in each attempt, 300 new ones beside
    them; the own ones are never looked at alone.
    """
    random = np.random.default_rng(7)
    false = 0
    for _ in range(draws):
        drawn = wrong[random.integers(0, len(wrong), (1 + ATTEMPTS, 300))].sum(axis=1)
        for attempt in range(1, 1 + ATTEMPTS):
            share = share_of_attempt(attempt) if shared else 1.0
            counts = (int(drawn[0] + drawn[attempt]), 600)
            if walk([counts], accuracy, DELTA, share=share).deployed is not None:
                false += 1
                break
    return false / draws


ATTEMPTS, DRAWS = 6, 1000


def test_the_promise_holds_however_often_inputs_are_added(
    numbers: Library, everything: SplitOutcomes
) -> None:
    settings = Settings(accuracy=ACCURACY, slowdown=None)
    proposal = propose(numbers, settings, ["inline"], SplitOutcomes(numbers, SELECT), 600)
    wrong = replay_of(numbers, settings, proposal.candidates[-1], everything).wrong
    accuracy = 1.0 - wrong.mean() + 2e-4  # just above what is true
    allowed = DELTA + 2 * (DELTA * (1 - DELTA) / DRAWS) ** 0.5
    assert false_share(wrong, accuracy, DRAWS, shared=True) <= allowed
    assert false_share(wrong, accuracy, DRAWS, shared=False) > allowed


def test_whole_compositions_with_further_inputs_are_false_no_more_often_than_their_share(
    numbers: Library, everything: SplitOutcomes
) -> None:
    """The path of settings walked on its own inputs and on further ones, drawn anew each time."""
    settings = Settings(accuracy=ACCURACY, slowdown=None)
    proposal = propose(numbers, settings, ["inline"], SplitOutcomes(numbers, SELECT), 600)
    rates = [replay_of(numbers, settings, each, everything).wrong.mean() for each in proposal.candidates]
    # the path must pass the target, else nothing false could be deployed
    assert rates[0] < 1 - ACCURACY < rates[-1]
    random = np.random.default_rng(5)
    false = 0
    for _ in range(200):
        rows = random.integers(0, len(everything), 600)
        further = drawn(everything, numbers, rows[300:])
        certificate, position = proposal.walk(
            further.after(Rows(everything, rows[:300]), proposal.candidates), 0.75
        )
        assert not certificate.tested or certificate.tested[0].inputs == 600
        false += position is not None and rates[position] > 1 - ACCURACY
    level = 0.75 * DELTA
    assert false / 200 <= level + 2 * (level * (1 - level) / 200) ** 0.5


class Coarse:
    """An engine that loses every 200th input's class."""

    def __init__(self, outcomes: SplitOutcomes | dict, base: np.ndarray) -> None:
        self._trial = outcomes
        self._base = base

    def of_split(self, split: int) -> Coarse:
        return self

    def announce(self, path) -> None:
        """There is nothing to be shared."""

    def ask(self, path) -> None:
        """All is known."""

    def elsewhere(self, further: Further) -> Coarse:
        assert further.base_class is not None
        return Coarse(further.outcomes, further.base_class)

    def __call__(self, setting):
        left_at = np.full(len(self._base), len(setting))
        lost = np.arange(len(self._base)) % 200 == 0
        answer = np.where(lost, (self._base + 1) % CLASSES, self._base)
        for position, candidate in enumerate(setting):
            outcomes = self._trial[candidate.trial_id]
            new = (left_at == len(setting)) & (outcomes.score >= np.float32(candidate.threshold))
            left_at[new] = position
            answer[new] = outcomes.predicted[new]
        return left_at, answer


def test_engines_of_reduced_precision_share_what_the_attempt_may_err_with(
    numbers: Library, everything: SplitOutcomes
) -> None:
    further = drawn(everything, numbers, np.arange(2000))
    further.inputs = further  # type: ignore[assignment]  # what the stand-in for an engine is asked
    reduced = CostedLibrary(numbers, costs_of(numbers, "openvino-int8", 4.0))
    known = {trial.trial_id: numbers.outcomes(trial.trial_id) for trial in numbers.trials}
    engine = Coarse(known, numbers.base_outcomes().base_class)
    reduced.__dict__["answers"] = engine
    settings = Settings(accuracy=ACCURACY, slowdown=0.5)
    library, composition = compose_best(numbers, [reduced], settings, further, 0.75)
    certificate = composition.certificate
    assert certificate is not None and library is reduced
    assert sum(each.share_of_delta for each in certificate.engines) <= 0.75 + 1e-12
    assert certificate.level < 0.75 * 0.05
    assert certificate.inputs == 300 + 2000
    chosen = propose(reduced, settings, ["inline"], outcomes_of(reduced, SELECT), 2300)
    exits = [(leaving.trial_id, leaving.threshold) for leaving in composition.exits]
    (setting,) = (
        each for each in chosen.candidates if [(one.trial_id, one.threshold) for one in each] == exits
    )
    own = EngineOutcomes(reduced, CERTIFY, engine)  # type: ignore[arg-type]
    lost = [
        (engine(setting)[1][own.inputs] != own.base_class).sum(),
        (engine.elsewhere(further)(setting)[1] != further.base_class).sum(),
    ]
    assert certificate.losses == sum(lost)
