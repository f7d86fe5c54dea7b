"""Retrained caches hit more on what the stream became, keep the promise, and leave the base model alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gati.adaptation.contenders import NewCaches
from gati.adaptation.renewal import _worth_it, candidate_blocks
from gati.adaptation.retrain import Retrained, retrain
from gati.adaptation.scene import nearest_scene, scene_signature
from gati.adaptation.settings import AdaptSettings
from gati.adaptation.tune import TuneRecipe
from gati.adaptation.window import Window, split_window
from gati.composition.load import Served, open_served
from gati.engine.engine import Engine
from gati.errors import AdaptError, CompositionError
from gati.model.entry import INPUT
from gati.versions.engines import Graphs, open_version, save_version
from tests.adaptation.deployed import BLOCKS, FAMILIAR, STRANGE, make_deployed, stream, window_of

PATIENT = TuneRecipe(epochs=12.0, limit_s=600.0, learning_rate=3e-3)
NEW = NewCaches(("blocks.0",), recipe=replace(PATIENT, epochs=20.0))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_deployed(tmp_path_factory.mktemp("deployed"))


@pytest.fixture(scope="module")
def window(served: Served) -> Window:
    """What came lately: digits that the deployed caches have never seen."""
    return window_of(served.engine.traced, stream(STRANGE, 590, seed=2))


@pytest.fixture(scope="module")
def retrained(served: Served, window: Window) -> Retrained:
    original = window_of(served.engine.traced, stream(FAMILIAR, 200, seed=3))
    return retrain(served, window, original=original, recipe=PATIENT, new=NEW, version="v2")


def rates(engine: Engine, x: Tensor) -> tuple[float, float]:
    """Share of inputs that hit, and agreement over all."""
    answers, base = engine(x), engine.reference(x).tolist()
    hits = [answer.exit != "base" for answer in answers]
    agrees = [answer.class_index == other for answer, other in zip(answers, base, strict=True)]
    return float(np.mean(hits)), float(np.mean(agrees))


def test_retrained_caches_hit_more_on_the_shifted_stream_and_claim_no_certificate(
    served: Served, retrained: Retrained, tmp_path: Path
) -> None:
    assert retrained.better
    assert retrained.certificate.deployed is not None
    assert retrained.after.certified and retrained.after.agreement >= 0.95
    # The same scans, with other noise, are on both sides: on unseen ones it may well be less than 0.95.
    assert retrained.composition.certificate is None
    version = open_version(served, save_version(tmp_path / "v2", retrained.composition, retrained.exits))
    later = stream(STRANGE, 290, seed=9, unseen=True)
    old_rate, _ = rates(served.engine, later)
    new_rate, agreement = rates(version.engine, later)
    assert new_rate > old_rate + 0.15
    assert agreement >= 0.9


def test_measurements_are_those_of_the_inputs_kept_back(
    served: Served, window: Window, retrained: Retrained
) -> None:
    rows = split_window(len(window), 0.5).certify
    hit_rate, agreement = rates(served.engine, window.inputs[rows])
    assert (retrained.before.n, retrained.after.n) == (len(rows), len(rows))
    assert retrained.before.hit_rate == pytest.approx(hit_rate)
    assert retrained.before.agreement == pytest.approx(agreement)
    assert retrained.certificate.inputs == len(rows)
    expected = retrained.composition.expected
    assert expected.mean_latency_ms == retrained.after.mean_latency_ms > 0.0
    assert expected.gain == pytest.approx(expected.base_latency_ms / expected.mean_latency_ms)
    assert [e.block for e in retrained.composition.exits] == [e.block for e in retrained.exits]


def test_a_saved_version_answers_as_before_it_was_saved(
    served: Served, retrained: Retrained, tmp_path: Path
) -> None:
    x = stream(STRANGE, 100, seed=4)
    made = Engine(served.engine.traced, retrained.exits)
    save_version(tmp_path / "v2", retrained.composition, retrained.exits)
    for engine in (
        open_version(open_served(served.library.directory), tmp_path / "v2").engine,
        open_version(served, tmp_path / "v2").engine,
    ):
        for answer, other in zip(engine(x), made(x), strict=True):
            assert answer.exit == other.exit and torch.equal(answer.probabilities, other.probabilities)
        assert engine.version.startswith("v2@")


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_a_version_on_a_backend_that_compiles_graphs(
    retrained: Retrained, tmp_path: Path, backend: str
) -> None:
    pytest.importorskip(backend)
    served = make_deployed(tmp_path, backend=backend)
    composition = replace(retrained.composition, backend=backend)
    save_version(tmp_path / "v2", composition, retrained.exits)
    graphs = Graphs(served.engine.traced.blocks)
    for _ in range(2):  # converted, then as it was kept
        engine = open_version(served, tmp_path / "v2", graphs=graphs).engine
        made = Engine(served.engine.traced, retrained.exits)
        x = stream(STRANGE, 30, seed=4)
        for answer, other in zip(engine(x), made(x), strict=True):
            assert (answer.exit, answer.class_index) == (other.exit, other.class_index)
            torch.testing.assert_close(answer.probabilities, other.probabilities, atol=1e-4, rtol=1e-3)
    assert (tmp_path / "v2" / "graphs" / f"{backend}.onnx").is_file()


def test_the_base_model_and_the_serving_caches_stay_bit_for_bit(tmp_path: Path) -> None:
    served = make_deployed(tmp_path)
    modules = [served.module, *(leaving.cache for leaving in served.engine.exits)]
    before = [{key: value.clone() for key, value in module.state_dict().items()} for module in modules]
    x = stream(FAMILIAR, 20, seed=5)
    answers = served.engine(x)
    recent = window_of(served.engine.traced, stream(STRANGE, 200, seed=6))
    retrain(served, recent, recipe=PATIENT, new=NEW)
    for module, state in zip(modules, before, strict=True):
        assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
        assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())
    for answer, other in zip(served.engine(x), answers, strict=True):
        assert torch.equal(answer.probabilities, other.probabilities)


def test_what_nothing_can_foretell_is_left_to_the_base_model(served: Served) -> None:
    """Answers drawn at random: the old caches are found out, and no new one gets to answer much."""
    guesses = np.random.default_rng(0).integers(0, 10, 700)
    result = retrain(served, Window(stream(FAMILIAR, 700, seed=8), guesses), recipe=PATIENT, new=NEW)
    assert not result.before.certified and result.before.broken and result.before.agreement < 0.95
    assert result.after.hit_rate < 0.1 and result.after.agreement >= 0.95


def test_a_cache_that_training_ruins_does_not_take_the_place_of_a_good_one(served: Served) -> None:
    """A learning rate that destroys every weight: whatever is deployed still keeps the promise."""
    familiar = window_of(served.engine.traced, stream(FAMILIAR, 700, seed=7))
    result = retrain(served, familiar, recipe=replace(PATIENT, learning_rate=1e3))
    assert {leaving.trial_id for leaving in result.composition.exits} <= {"trial-1", "trial-2"}
    assert result.after.certified


def test_a_new_version_that_is_slower_is_not_better(retrained: Retrained) -> None:
    slower = replace(retrained, before=replace(retrained.after, mean_latency_ms=0.1))
    assert not slower.better


@pytest.mark.parametrize(("broken", "better"), [(False, False), (True, True)])
def test_old_exits_need_not_be_proven_again_but_must_not_be_disproven(
    retrained: Retrained, broken: bool, better: bool
) -> None:
    """Caches certified on thousands of inputs against slower ones that hardly hit, on a few hundred."""
    before = replace(retrained.after, mean_latency_ms=0.1, certified=False, broken=broken)
    assert replace(retrained, before=before).better is better


@pytest.mark.parametrize("alarmed", [False, True])
def test_after_an_alarm_the_old_exits_have_to_prove_themselves(retrained: Retrained, alarmed: bool) -> None:
    before = replace(retrained.after, mean_latency_ms=0.1, certified=False, broken=False)
    assert _worth_it(replace(retrained, before=before), alarmed=alarmed) is alarmed


def test_a_target_that_the_window_cannot_certify_is_not_deployed(served: Served, window: Window) -> None:
    result = retrain(served, window, recipe=PATIENT, accuracy=0.999)
    assert not result.better and result.certificate.deployed is None
    assert "takes at least 2995" in result.certificate.sentence()


def test_training_stops_when_its_time_is_up(served: Served, window: Window) -> None:
    ticks = iter(range(10_000_000))
    result = retrain(
        served, window, recipe=TuneRecipe(epochs=1e6, limit_s=50.0), clock=lambda: float(next(ticks))
    )
    assert all(seconds < 60.0 for name, seconds in result.seconds.items() if name.startswith("train"))


def test_hidden_outputs_that_are_known_are_not_computed_again(served: Served, window: Window) -> None:
    known = window.collected(served.engine.traced, [leaving.block for leaving in served.engine.exits])
    blind = replace(known, inputs=torch.full_like(known.inputs, float("nan")))
    one, other = (retrain(served, each, recipe=PATIENT) for each in (window, blind))
    assert one.after == other.after


def test_collected_hidden_outputs_are_the_blocks_own(served: Served, window: Window) -> None:
    block = "blocks.1"
    found: list[Tensor] = []
    handle = served.module.get_submodule(block).register_forward_hook(
        lambda m, i, output: found.append(output)
    )
    with torch.no_grad():
        served.module(window.inputs[:10])
    handle.remove()
    hidden = window.collected(served.engine.traced, [block, "blocks.3"]).hidden
    torch.testing.assert_close(hidden[block][:10], found[0])


def test_recent_inputs_weigh_more(served: Served) -> None:
    """Two streams in one window; the weights decide which of them is learned."""
    mixed = torch.cat((stream(FAMILIAR, 350, seed=1), stream(STRANGE, 350, seed=2)))
    order = np.random.default_rng(0).permutation(700)
    base = window_of(served.engine.traced, mixed[order])
    strange = order >= 350
    only = [replace(base, weights=np.where(part, 1.0, 0.0)) for part in (strange, ~strange)]
    made = []
    for each in only:
        result = retrain(served, each, new=NEW, accuracy=0.6, recipe=PATIENT)
        made.append(result)
    assert made[0].exits and made[1].exits
    assert any(
        not torch.equal(one, other)
        for one, other in zip(
            made[0].exits[0].cache.state_dict().values(),
            made[1].exits[0].cache.state_dict().values(),
            strict=False,
        )
    )


@pytest.mark.parametrize("held_share", [0.3, 0.4, 0.5])
def test_each_input_of_a_window_has_one_part(held_share: float) -> None:
    parts = split_window(2400, held_share)
    assert sorted(np.concatenate(parts).tolist()) == list(range(2400))
    assert len(parts.select) + len(parts.certify) == pytest.approx(2400 * held_share, abs=101)
    assert abs(len(parts.select) - len(parts.certify)) <= 100


def test_training_misses_nothing_that_happened() -> None:
    assert split_window(700, 0.5).fit.max() > split_window(700, 0.5).certify.min()


def test_neighbours_are_mostly_dealt_together() -> None:
    part = np.zeros(700, dtype=np.int64)
    parts = split_window(700, 0.5)
    part[parts.select], part[parts.certify] = 1, 2
    assert int((np.diff(part) != 0).sum()) < 70


def test_an_old_scene_is_found_again() -> None:
    day, night = stream(STRANGE, 100, seed=1), stream(STRANGE, 100, seed=2) * 0.3
    signatures = [scene_signature(day), scene_signature(night)]
    assert nearest_scene(signatures, scene_signature(stream(STRANGE, 60, seed=3)), 0.05) == 0
    assert nearest_scene(signatures, scene_signature(stream(STRANGE, 60, seed=4) * 0.3), 0.05) == 1
    assert nearest_scene(signatures, scene_signature(1.0 - day), 0.05) is None
    assert nearest_scene([], signatures[0], 0.05) is None


def test_what_passes_by_does_not_change_the_scene() -> None:
    empty = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)).repeat(50, 1, 1, 1)
    busy = empty.clone()
    busy[::3, :, 8:24, 8:24] = 1.0
    assert nearest_scene([scene_signature(empty)], scene_signature(busy), 1e-3) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_class": np.zeros(3, dtype=np.int64)}, "has 590 inputs, but 3 of base_class"),
        ({"weights": np.full(590, -1.0)}, "weights of a window must be finite and none below 0"),
    ],
)
def test_a_window_that_fits_itself_not_is_refused(
    window: Window, change: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(AdaptError, match=message):
        replace(window, **change)  # type: ignore[arg-type]


def test_what_cannot_be_retrained_is_said_in_one_line(served: Served, window: Window) -> None:
    few = Window(window.inputs[:40], window.base_class[:40])
    with pytest.raises(AdaptError, match="a window of 40 inputs is too small to retrain on"):
        retrain(served, few)
    with pytest.raises(AdaptError, match="no block 'blocks.9' to train caches at; there are blocks.0"):
        retrain(served, window, new=NewCaches(("blocks.9",)))
    with pytest.raises(AdaptError, match="no place for student.4. at block 'blocks.1'; what reads the input"):
        retrain(served, window, new=NewCaches(("blocks.1",), ("student(4)",)))


def test_an_exit_at_the_input_is_retrained(tmp_path: Path) -> None:
    """On a stream of other digits the student goes on learning; new caches are tried after blocks only."""
    served = make_deployed(tmp_path, variants={INPUT: "student(8)", BLOCKS[2]: "grid(16)"})
    assert INPUT not in candidate_blocks(served, AdaptSettings())
    seen = window_of(served.engine.traced, stream((0, 1, 2, 3), 600, seed=3))
    found = retrain(served, seen, seed=0)
    assert INPUT in {leaving.block for leaving in found.exits}
    save_version(tmp_path / "v2", found.composition, found.exits)
    x = stream((0, 1, 2, 3), 200, seed=4, unseen=True)
    engine = open_version(served, tmp_path / "v2").engine
    answers = engine(x)
    left = [answer for answer in answers if answer.exit == INPUT]
    reference = dict(enumerate(engine.reference(x).tolist()))
    agree = [answer.class_index == reference[row] for row, answer in enumerate(answers)]
    assert len(left) > 20 and sum(agree) > 0.9 * len(agree)


def test_a_version_of_another_base_model_is_refused(
    served: Served, retrained: Retrained, tmp_path: Path
) -> None:
    foreign = replace(retrained.composition, checkpoint_sha256="0" * 64)
    save_version(tmp_path / "v2", foreign, retrained.exits)
    with pytest.raises(CompositionError, match="was made for checkpoint 000000000000"):
        open_version(served, tmp_path / "v2")
    with pytest.raises(AdaptError, match="there is a version in .* already"):
        save_version(tmp_path / "v2", foreign, retrained.exits)
    assert not list(tmp_path.glob(".v2*"))
