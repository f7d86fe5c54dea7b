"""Caches of other kinds: companions, overlapped lookups, and those of texts at several lengths."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gati.adaptation.contenders import StepTimes, Work
from gati.adaptation.contest import Contender, Costs, Laid, exits_of, replay_deployed
from gati.adaptation.deployments import Deployed
from gati.adaptation.lookups import LookupCosts
from gati.adaptation.probe import can_probe
from gati.adaptation.renewal import Renewal, _tried, candidate_variants
from gati.adaptation.rest import Rest
from gati.adaptation.settings import AdaptSettings
from gati.adaptation.tune import TuneRecipe
from gati.adaptation.window import Window, split_window
from gati.caches import Companion, LearnedCache, Reading, build_predictor
from gati.composition.replay import ExitCost, exit_costs
from gati.engine.engine import Engine
from gati.engine.exits import BASE, EngineExit
from gati.engine.placement import WorkerLookups
from gati.errors import AdaptError
from gati.model.entry import INPUT
from gati.model.inputs import TensorInputs
from gati.model.lengths import TracedSequences, with_lengths
from gati.model.packed import packed
from gati.model.preprocess import Preprocessing
from gati.model.segments import trace
from gati.priority import RunningRequests, alongside
from gati.types import TrialId
from gati.variants import ITSELF
from tests.adaptation.deployed import BASE_MS, CLASSES, STRANGE, make_deployed, stream, window_of
from tests.engine.networks import inputs, selective_exits, traced_network
from tests.text_networks import LONGEST, VOCABULARY, reader


@pytest.mark.slow
def test_lookups_of_the_network_itself_in_8_bit_integers_do_not_rest(tmp_path: Path) -> None:
    """They were charged its FLOPs in float32, more than the network takes, and rested nearly always."""
    served = make_deployed(tmp_path, variants={INPUT: "student(8)"})
    itself = Companion.of(served.module, Reading("logits"), torch.rand(2, 1, 8, 8), tmp_path)
    cache = LearnedCache(ITSELF, (1, 8, 8), CLASSES, "maximum-probability", predictor=itself)
    chosen, taken_ms = served.composition, 0.45 * BASE_MS
    exits = (replace(chosen.exits[0], variant=ITSELF, lookup_ms=taken_ms, exit_ms=taken_ms),)
    leaving = EngineExit(INPUT, cache, 0.6, "inline", ITSELF, cache.memory_bytes)
    engine = served.model.engine_of([leaving], "default", "torch")
    rest = Rest()
    rest.replaced(
        LookupCosts(served)
        .corrected(replace(served, engine=engine, composition=replace(chosen, exits=exits)))
        .composition
    )
    assert not any(rest.answered(BASE if number % 10 == 0 else INPUT) for number in range(200))


def test_what_an_overlapped_lookup_costs_a_miss_is_kept() -> None:
    """A retrained version had forgotten it, and 0.3 of the lookup was assumed."""
    cache: Any = SimpleNamespace(variant="grid(16)", selector_name="maximum-probability", memory_bytes=1)
    score, said = np.array([0.9, 0.1], np.float32), np.zeros(2, np.int64)
    kept = {
        block: Contender(TrialId(block), block, cache, "overlapped", 2.0, 1.5, score, said)
        for block in ("a", "b")
    }
    costs = Costs(20.0, {"a": 3.0, "b": 6.0}, {"a": 0, "b": 1})
    deployed: Any = [SimpleNamespace(block=block, threshold=0.5) for block in kept]
    replayed = replay_deployed(deployed, kept, costs, said, np.arange(2))
    exits = exits_of(Laid(tuple((each, 0.5) for each in kept.values()), replayed), costs)
    assert exit_costs(exits) == [ExitCost(3.0, 2.0, 1.5), ExitCost(6.0, 2.0, 1.5)]


@pytest.mark.slow
def test_estimated_lookups_cost_a_miss_more_too(tmp_path: Path) -> None:
    served = make_deployed(tmp_path)
    costs, chosen = LookupCosts(served), served.composition
    exits = tuple(
        replace(each, placement="overlapped", lookup_ms=1e-6, penalty_ms=9e-7, exit_ms=1e-3)
        for each in chosen.exits
    )
    corrected = costs.corrected(replace(served, composition=replace(chosen, exits=exits))).composition
    for each in corrected.exits:
        assert each.penalty_ms == pytest.approx(0.3 * each.lookup_ms, rel=0.1)
    reach_ms = [cost.reach_ms for cost in exit_costs(corrected.exits)]
    profile = served.library.manifest.profile
    share = {each.name: each.reach_ms / profile.base_ms for each in profile.blocks}
    expected = [chosen.expected.base_latency_ms * share[each.block] for each in exits]
    assert reach_ms == pytest.approx(expected)


@pytest.mark.slow
def test_caches_compete_with_the_cost_of_a_miss_that_was_measured(tmp_path: Path) -> None:
    made = make_deployed(tmp_path)
    exits = tuple(replace(each, placement="overlapped", penalty_ms=0.07) for each in made.composition.exits)
    served = replace(made, composition=replace(made.composition, exits=exits))
    traced = served.engine.traced
    seen = window_of(traced, stream(STRANGE, 100, seed=2)).collected(traced, {each.block for each in exits})
    work = Work(served, seen, None, split_window(100, 0.25), StepTimes(lambda: 0.0), seed=0)
    found = [*work.deployed(), *work.retrained(TuneRecipe(epochs=1.0))]
    assert [each.penalty_ms for each in found] == [0.07] * 4


def window(count: int) -> Window:
    return Window(inputs(count), np.zeros(count, dtype=np.int64))


def version(placement: str = "inline") -> Deployed:
    served: Any = SimpleNamespace(
        engine=Engine(traced_network(), selective_exits(traced_network(), placement))
    )
    return Deployed(0, served)


def test_a_version_that_is_tried_reserves_no_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that serves has reserved them: its thread, and the one that retrains, had one core less."""
    opened: list[WorkerLookups] = []
    monkeypatch.setattr(WorkerLookups, "open", opened.append)
    assert _tried(version("overlapped"), window(9)) == _tried(version(), window(9))
    assert not opened


def test_requests_pass_while_a_version_is_tried() -> None:
    class Counted(RunningRequests):
        passed = 0

        def let_pass(self) -> float:
            self.passed += 1
            return 0.0

    requests = Counted()
    with alongside(requests):
        _tried(version(), window(40))
    assert requests.passed >= 5


@pytest.fixture(scope="module")
def sequences() -> Any:
    """A network that runs texts at 16 or 48 tokens."""
    mask = (np.arange(LONGEST) < np.array([[LONGEST], [3]])).astype(np.int64)
    ids = np.random.default_rng(0).integers(1, VOCABULARY, mask.shape) * mask
    tensors = TensorInputs.of({"input_ids": ids, "attention_mask": mask}, "test")
    module, shares = packed(reader().eval(), tensors), ((16, 0.5), (LONGEST, 0.5))
    preprocessing = replace(Preprocessing(), tensors=tensors, lengths=shares)
    traced = trace(module, tensors.example(), ["encoder.layers.0"])
    found = with_lengths(traced, module, tensors.example(), preprocessing)
    return SimpleNamespace(engine=SimpleNamespace(traced=found))


def test_what_is_learned_of_texts_says_the_same_at_every_length(sequences: Any) -> None:
    """Retraining and proofs run them at the longest length, requests at the shortest one that fits."""
    traced = sequences.engine.traced
    assert isinstance(traced, TracedSequences) and traced.lengths is not None
    x, block = traced.lengths.example(16, 8), "encoder.layers.0"
    with torch.inference_mode():
        long, short = (
            each.cut([block])[0].run(rows)[0]
            for each, rows in ((traced, x), (traced.at(16), x[..., :16].contiguous()))
        )
        for variant in candidate_variants(sequences, AdaptSettings()):
            predictor = build_predictor(variant, traced.hidden_shapes[block], 3).eval()
            torch.testing.assert_close(predictor(long), predictor(short), rtol=1e-4, atol=1e-4)


def test_it_is_said_that_other_variants_are_tried_for_texts(
    sequences: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """`--variants scene(...)` became tokens-mean in silence."""
    engine = SimpleNamespace(traced=sequences.engine.traced)
    chosen = SimpleNamespace(expected=SimpleNamespace(base_latency_ms=1.0))
    served: Any = SimpleNamespace(engine=engine, composition=chosen)
    unused: Any = None
    Renewal(unused, served, AdaptSettings(), unused, clock=lambda: 0.0)
    assert re.search(r"new caches are of tokens-mean\(256\): .* scene\(.*\) reads one only", caplog.text)


def test_a_variant_that_reads_one_length_only_is_refused_for_texts(sequences: Any) -> None:
    with pytest.raises(AdaptError, match=r"^grid\(16\) reads sequences of one length, .* tokens-mean\(256\)"):
        candidate_variants(sequences, AdaptSettings(variants=("tokens-first(8)", "grid(16)")))


@pytest.mark.parametrize(("variant", "may"), [("tokens-mean(8)", True), ("scene(8,64,64)", False)])
def test_a_cache_that_reads_one_length_is_proven_by_its_engine_alone(
    sequences: Any, variant: str, may: bool
) -> None:
    """A probe runs it at the longest length: 15 of 560 such answers agreed where the engine's did not."""
    engine = SimpleNamespace(
        traced=sequences.engine.traced, precision="f32", exits=[SimpleNamespace(variant=variant)]
    )
    served: Any = SimpleNamespace(engine=engine, composition=SimpleNamespace(backend="torch"))
    assert can_probe(served) is may
