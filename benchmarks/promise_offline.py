"""How often a certified composition breaks its promise: full commands on a population with known truth.

    python -m benchmarks.promise_offline [--draws 2000] [--json FILE]

The population has 60,000 synthetic inputs with the answers of a base model, three caches and three
reduced-precision engines that lose answers themselves, so the true agreement of every setting is known.
Everything is as close to the target as possible, where errors are most likely: the engines' own losses lie
just above the tolerance, and the select split, drawn once, is one on which they seem well below it.

Each draw takes a new random certify split from the population and runs the command's code on it:

* `auto`: `gati compose --backend auto` over float32 and the three engines (`sharing.deploy_one`);
* `per_class`: the same in float32, with `--per-class`: false if any class is below the target;
* `pareto`: `gati compose --pareto`: false if any agreement reported as certified is not reached;
* `certify`: `gati certify --write` ten times in a row on new data, with a composition that is just below the
  target: false if any attempt certifies it.

Each row also shows the same draws with every test at the full delta (`unshared`), as `auto` and `certify`
once did. A row passes if the share of false draws is at most delta plus two standard errors. Proposals depend
only on the select split, so they are made once for all draws. For the first draws of `auto` the full command
also runs on files and must deploy the same composition. Takes about 6 minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gati.composition import compose as composing
from gati.composition.certificate import Certificate
from gati.composition.certified import Proposal, propose
from gati.composition.composition import Composition
from gati.composition.cost_files import BackendCosts
from gati.composition.costs import CostedLibrary
from gati.composition.ledger import Ledger
from gati.composition.outcomes import EngineOutcomes, SplitOutcomes, outcomes_of
from gati.composition.pareto import count_frontier, frontier_of
from gati.composition.plans import Settings
from gati.composition.problem import Candidate
from gati.composition.sharing import FIRST, Entrant, Hope, deploy_one, enter
from gati.composition.verdicts import counts_of, replay_of
from gati.evaluation.certify import verdict
from gati.exploration.library import CERTIFY, SELECT, BaseOutcomes, Library, Manifest, TrialOutcomes
from gati.types import BlockProfile, Profile, Trial, TrialId

ACCURACY, DELTA = 0.95, 0.05
CLASSES, BLOCKS = 3, 3
POPULATION, SELECTED, CERTIFIED = 60_000, 800, 600
ATTEMPTS = 10
# backend: speedup over float32, and its own loss; 0.05 is tolerated
ENGINES = {
    "openvino-bf16": (2.0, 0.0502),
    "onnxruntime-int8": (2.5, 0.0502),
    "openvino-int8": (3.0, 0.0502),
}
JUST_BELOW = 0.0502  # error rate of the composition that `certify` tests
CHECKED = 10  # draws on which the full command also runs
PARETO_POINTS = 16
IN_MEMORY = "/dev/shm"  # for ledgers, which are flushed to disk at every change

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Population:
    """All inputs: answers of the base model and the caches, and the inputs that engines lose."""

    base_class: Ints  # [n]
    trials: dict[TrialId, TrialOutcomes]
    lost: dict[str, Bools]  # by backend, [n]


class Rows(Library):
    """Some inputs of a population as an in-memory library, all in one split."""

    def __init__(self, library: Library, population: Population, rows: Ints, split: int) -> None:
        super().__init__(library.directory)
        self.__dict__["manifest"] = library.manifest
        self.__dict__["trials"] = library.trials
        self.population, self.rows, self.split = population, rows, split

    def base_outcomes(self) -> BaseOutcomes:
        """Same as for a library on disk."""
        base = self.population.base_class[self.rows]
        return BaseOutcomes(base, base, np.full(len(self.rows), self.split, dtype=np.uint8))

    def outcomes(self, trial_id: TrialId) -> TrialOutcomes:
        """Same as for a library on disk."""
        whole = self.population.trials[trial_id]
        return TrialOutcomes(whole.score[self.rows], whole.predicted[self.rows])


class LossyEngine:
    """An engine that loses some inputs at any exit, and otherwise follows the tables."""

    def __init__(self, library: Library, lost: Bools) -> None:
        self._library, self._lost = library, lost
        self._base = library.base_outcomes().base_class

    def of_split(self, split: int) -> LossyEngine:
        """Return itself: all answers are known."""
        return self

    def __call__(self, setting: Sequence[Candidate]) -> tuple[Ints, Ints]:
        """Return the exit and the class of each input."""
        left_at = np.full(len(self._base), len(setting))
        answer = np.where(self._lost, (self._base + 1) % CLASSES, self._base)
        for position, candidate in enumerate(setting):
            outcomes = self._library.outcomes(candidate.trial_id)
            new = (left_at == len(setting)) & (outcomes.score >= np.float32(candidate.threshold))
            left_at[new] = position
            answer[new & ~self._lost] = outcomes.predicted[new & ~self._lost]
        return left_at, answer

    def announce(self, path: Sequence[Sequence[Candidate]]) -> None:
        """There is nothing to be shared."""

    def ask(self, path: Sequence[Sequence[Candidate]]) -> None:
        """Do nothing: there is nothing to convert."""

    def keep(self, exits: object) -> None:
        """Do nothing: there is no graph to write."""


@dataclass(frozen=True)
class World:
    """A population, a library whose select split is drawn from it, and engines for that library."""

    population: Population
    library: Library
    selected: Ints

    def draw(self, random: np.random.Generator, inputs: int = CERTIFIED) -> Ints:
        """Draw inputs to certify on."""
        return random.integers(0, POPULATION, inputs)

    def split(self, library: Library, rows: Ints) -> SplitOutcomes:
        """Return these inputs as the certify split, with the answers of `library`'s engine."""
        backend = library.manifest.profile.backend
        held = Rows(library, self.population, rows, CERTIFY)
        if backend not in ENGINES:
            return SplitOutcomes(held, CERTIFY)
        engine: Any = LossyEngine(held, self.population.lost[backend][rows])
        return EngineOutcomes(held, CERTIFY, engine)

    def engine(self, backend: str, certified: Ints) -> CostedLibrary:
        """Return the library on a reduced-precision engine."""
        rows = np.concatenate([self.selected, certified])
        reduced = CostedLibrary(self.library, _costs(self.library, backend))
        reduced.__dict__["answers"] = LossyEngine(self.library, self.population.lost[backend][rows])
        return reduced

    def truth(self, proposal: Proposal, candidates: tuple[Candidate, ...]) -> float:
        """Return the true agreement; with `per_class`, that of the worst class."""
        whole = self.split(proposal.library, np.arange(POPULATION))
        replay = replay_of(proposal.library, proposal.settings, candidates, whole)
        counts = counts_of(proposal.library, proposal.settings, replay, whole)
        return 1.0 - max(losses / inputs for losses, inputs in counts)

    @cached_property
    def entrants(self) -> tuple[Entrant, ...]:
        """The engines that `gati compose --backend auto` admits, based on the select split alone."""
        settings, no_draw = settings_of(), self.draw(np.random.default_rng(0))

        def proposed(library: Library) -> Proposal:
            return propose(library, settings, ["inline"], outcomes_of(library, SELECT), CERTIFIED)

        hopes = []
        for backend in ENGINES:
            other = self.engine(backend, no_draw)
            at_best_ms = proposed(other.at_best()).hoped_ms(CERTIFIED, FIRST)
            assert at_best_ms is not None
            hopes.append(Hope(backend, at_best_ms, cache(partial(proposed, other))))
        return enter(proposed(self.library), hopes, CERTIFIED)


def make_world(directory: Path, *, hard_class: int | None = None) -> World:
    """Make a population, draw a select split that flatters the engines, and write the library.

    With `hard_class`, the caches are hardly ever wrong on other classes.
    """
    random = np.random.default_rng(0)
    common = 1.0 / CLASSES if hard_class is None else 0.8  # enough of the hard class for fine steps
    often = np.full(CLASSES, (1.0 - common) / (CLASSES - 1))
    often[hard_class or 0] = common
    base_class = random.choice(CLASSES, POPULATION, p=often)
    hardness = random.uniform(size=POPULATION)
    trials = {}
    for block in range(BLOCKS):
        right = hardness + random.normal(0, 0.1, POPULATION) < 0.6 + 0.35 * (block + 1) / BLOCKS
        if hard_class is not None:
            right |= base_class != hard_class
        score = 6.0 * (right - 0.5) - hardness + random.normal(0, 1.0, POPULATION)
        answers = np.where(right, base_class, (base_class + 1) % CLASSES)
        trials[TrialId(f"trial-{block}")] = TrialOutcomes(score.astype(np.float32), answers)
    lost = {}
    for backend, (_, rate) in ENGINES.items():
        mask = np.zeros(POPULATION, dtype=bool)
        mask[random.permutation(POPULATION)[: round(rate * POPULATION)]] = True
        lost[backend] = mask
    population = Population(base_class, trials, lost)
    flattering = np.ones(POPULATION)
    for mask in lost.values():
        flattering[mask] = 0.3
    selected = random.choice(POPULATION, SELECTED, replace=False, p=flattering / flattering.sum())
    library = Library(directory)
    library.write_manifest(_manifest())
    library.write_trials([_trial(block, trial_id) for block, trial_id in enumerate(trials)], [])
    world = World(population, library, selected)
    write_outcomes(world, world.draw(random))
    return World(population, Library.open(directory), selected)


def write_outcomes(world: World, certified: Ints) -> None:
    """Write the answers of base model and caches for the select split and these certify inputs."""
    rows = np.concatenate([world.selected, certified])
    split = np.repeat(np.array([SELECT, CERTIFY], dtype=np.uint8), (len(world.selected), len(certified)))
    base = world.population.base_class[rows]
    world.library.write_base_outcomes(BaseOutcomes(base, base, split))
    for trial_id, whole in world.population.trials.items():
        world.library.write_outcomes(trial_id, TrialOutcomes(whole.score[rows], whole.predicted[rows]))


def _manifest() -> Manifest:
    reach_ms = [0.1 + 0.3 * (block + 1) for block in range(BLOCKS)]
    blocks = tuple(
        BlockProfile(block, f"layer{block}", "Block", (8 + block, 4, 4), 0.3, reach_ms[block])
        for block in range(BLOCKS)
    )
    return Manifest(
        model_source="made:up",
        checkpoint_path=None,
        checkpoint_sha256="ab" * 32,
        preprocessing={},
        class_names=None,
        classes=CLASSES,
        outputs_kind="logits",
        input_shape=(3, 32, 32),
        profile=Profile("torch", "cpu", 1, 1.5, blocks),
        seed=0,
        counts={"train": 0, "select": SELECTED, "certify": CERTIFIED},
        data={},
        settings={},
        versions={},
        complete=True,
    )


def _trial(block: int, trial_id: TrialId) -> Trial:
    return Trial(
        trial_id=trial_id,
        block_index=block,
        block=f"layer{block}",
        variant="pool(64)",
        status="trained",
        selector="max_probability",
        parameters=1000,
        memory_bytes=4000,
        lookup_ms=0.02,
    )


def _costs(library: Library, backend: str) -> BackendCosts:
    speed, _ = ENGINES[backend]
    known = library.manifest.profile
    blocks = tuple(
        replace(each, latency_ms=each.latency_ms / speed, reach_ms=each.reach_ms / speed)
        for each in known.blocks
    )
    profile = replace(known, backend=backend, base_ms=known.base_ms / speed, blocks=blocks)
    shapes = ["x".join(map(str, block.output_shape)) for block in blocks]
    return BackendCosts(profile, 0.0, {f"{shape} pool(64)": 0.01 for shape in shapes})


# Scenarios: each returns a function that says whether a draw breaks a promise, with and without shares


Judge = Callable[[np.random.Generator, bool], bool]


def settings_of(*, per_class: bool = False) -> Settings:
    """Return the settings of the commands."""
    return Settings(accuracy=ACCURACY, confidence=1.0 - DELTA, slowdown=None, per_class=per_class)


def auto(world: World) -> Judge:
    """`gati compose --backend auto`."""
    truths: dict[tuple[str, tuple[Candidate, ...]], float] = {}

    def broken(random: np.random.Generator, shared: bool) -> bool:
        rows = world.draw(random)
        taking_part = world.entrants if shared else [replace(each, share=1.0) for each in world.entrants]
        proposal, plan = deploy_one(taking_part, lambda each: world.split(each.library, rows))
        chosen = plan.choice.candidates
        key = proposal.library.manifest.profile.backend, chosen
        if key not in truths:
            truths[key] = world.truth(proposal, chosen)
        return truths[key] < ACCURACY

    return broken


def per_class(_: World) -> Judge:
    """`gati compose --per-class` in float32, with a single hard class; one walk uses all of delta."""
    folder = tempfile.TemporaryDirectory()
    world = make_world(Path(folder.name), hard_class=0)
    select = outcomes_of(world.library, SELECT)
    proposal = propose(world.library, settings_of(per_class=True), ["inline"], select, CERTIFIED)
    truths = [world.truth(proposal, candidates) for candidates in proposal.candidates]

    def broken(random: np.random.Generator, shared: bool, _kept: object = folder) -> bool:
        _, position = proposal.walk(world.split(world.library, world.draw(random, 2 * CERTIFIED)))
        return position is not None and truths[position] < ACCURACY

    return broken


def pareto(world: World) -> Judge:
    """`gati compose --pareto`; without shares, each limit uses the full delta."""
    settings, select = settings_of(), outcomes_of(world.library, SELECT)
    proposal = propose(world.library, settings, ["inline"], select, CERTIFIED)
    truths: dict[tuple[tuple[str, ...], tuple[float, ...]], float] = {}

    def true(trials: tuple[str, ...], thresholds: tuple[float, ...]) -> float:
        key = trials, thresholds
        if key not in truths:
            pairs = zip(trials, thresholds, strict=True)
            setting = [
                Candidate(
                    trial_id=TrialId(t),
                    block_index=int(t[-1]),
                    variant="",
                    threshold=at,
                    hit_rate=0,
                    accuracy=0,
                    lookup_ms=0,
                    penalty_ms=0,
                    memory_bytes=0,
                )
                for t, at in pairs
            ]
            truths[key] = world.truth(proposal, tuple(setting))
        return truths[key]

    chosen = frontier_of(proposal.contest, select, PARETO_POINTS)
    unshared = replace(settings, confidence=max(1e-9, 1.0 - len(chosen) * DELTA))

    def broken(random: np.random.Generator, shared: bool) -> bool:
        split = world.split(world.library, world.draw(random))
        asked = settings if shared else unshared
        found = count_frontier(world.library, asked, proposal.contest, chosen, select, split)
        return any(
            point.certified_agreement > true(point.trials, point.thresholds) + 1e-12 for point, _ in found
        )

    return broken


def certify(world: World) -> Judge:
    """`gati certify --write`, repeated `ATTEMPTS` times on new data."""

    def drawn(random: np.random.Generator) -> Callable[..., Certificate]:
        base = world.population.base_class[world.draw(random)]
        answer = np.where(random.random(len(base)) < JUST_BELOW, (base + 1) % CLASSES, base)
        return partial(verdict, world.library, answer, base, ACCURACY, DELTA, per_class=False)

    def broken(random: np.random.Generator, shared: bool) -> bool:
        judges = [drawn(random) for _ in range(ATTEMPTS)]
        passed = any(judge(share=1.0).deployed is not None for judge in judges)
        if not (passed and shared):
            return passed  # with less than the full delta, none of them would pass, either
        with tempfile.TemporaryDirectory(dir=IN_MEMORY if Path(IN_MEMORY).is_dir() else None) as folder:
            ledger, certified = Ledger(Path(folder)), False
            for number, judge in enumerate(judges):
                new = np.arange(number * CERTIFIED, (number + 1) * CERTIFIED, dtype=np.uint64)
                attempt = ledger.attempt("a composition", f"data {number}", {"delta": DELTA}, new)
                found = judge(share=attempt.share)
                ledger.conclude(attempt, found.to_json(), written=True)
                certified |= found.deployed is not None
        return certified

    return broken


SCENARIOS: dict[str, Callable[[World], Judge]] = {
    "auto": auto,
    "per_class": per_class,
    "pareto": pareto,
    "certify": certify,
}


def allowed(draws: int) -> float:
    """Return delta plus two standard errors."""
    return DELTA + 2.0 * (DELTA * (1.0 - DELTA) / draws) ** 0.5


def false_share(judge: Judge, draws: int, *, shared: bool) -> float:
    """Return the share of draws that break a promise."""
    random = np.random.default_rng(1)
    return sum(judge(random, shared) for _ in range(draws)) / draws


def whole_command(world: World, certified: Ints) -> Composition:
    """Run `gati.compose` on files, with these certify inputs."""
    write_outcomes(world, certified)
    others = [world.engine(backend, certified) for backend in ENGINES]
    before = composing.choose_backend, composing.reduced_precisions
    composing.choose_backend = lambda opened, *_: opened
    composing.reduced_precisions = lambda *_: others
    try:
        return composing.compose(
            world.library.directory, accuracy=ACCURACY, confidence=1.0 - DELTA, slowdown=None
        )
    finally:
        composing.choose_backend, composing.reduced_precisions = before


def check_against_whole_command(world: World, draws: int) -> None:
    """Check that the two halves deploy the same as the full command. Raises AssertionError."""
    random = np.random.default_rng(1)
    for _ in range(draws):
        rows = world.draw(random)
        proposal, plan = deploy_one(world.entrants, lambda each, rows=rows: world.split(each.library, rows))
        composition = whole_command(world, rows)
        assert composition.backend == proposal.library.manifest.profile.backend
        assert composition.exits == plan.exits
        assert composition.certificate is not None and plan.certificate is not None
        assert composition.certificate.tested == plan.certificate.tested


def main() -> None:
    """Run every scenario and print the table as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table = []
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder))
        check_against_whole_command(world, CHECKED)
        for name, scenario in SCENARIOS.items():
            judge = scenario(world)
            shared, unshared = (false_share(judge, arguments.draws, shared=each) for each in (True, False))
            row = {"command": name, "draws": arguments.draws, "delta": DELTA, "false": shared}
            row |= {"allowed": allowed(arguments.draws), "holds": shared <= allowed(arguments.draws)}
            table.append({**row, "unshared": unshared})
            print(json.dumps(table[-1]), file=sys.stderr, flush=True)
    text = json.dumps(table, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    sys.exit(not all(row["holds"] for row in table))


if __name__ == "__main__":
    main()
