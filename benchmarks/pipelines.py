"""Run the example pipeline under five SLOs: static, equal, proportional and dynamic, with and without caches.

    python -m benchmarks.pipelines collect LIBRARIES --known KNOWN.npz --unseen UNSEEN.npz --out FOLDER
    python -m benchmarks.pipelines table FOLDER
    python -m benchmarks.pipelines live FOLDER --unseen UNSEEN.npz --slo 5.0

LIBRARIES has the cache libraries resnet20, resnet32 and resnet56, each with `--composition NAME`.
`collect` runs every engine on every image of KNOWN and UNSEEN twice, alternately and in shuffled order.
Options are measured on KNOWN alone, which is all that policies see. `table` replays each policy request by
request on the answers and latencies of UNSEEN: those of the first run for the root, those of the second for
its followers. `live` executes the policies for real, alternating request by request.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gati.pipelines import Labelled, Pipeline, Planner, load_pipeline, register_policy
from gati.pipelines.measure import Outcomes, measure_outcomes, open_engine, summarize
from gati.pipelines.measurements import measurements_file
from gati.pipelines.policies import Choice, StaticPlan

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "pipeline" / "pipeline.toml"
KINDS = ("plain", "caches", "both")
POLICIES = ("static", "best-static", "equal", "proportional", "dynamic")
TIGHTNESS = (0.0, 0.2, 0.4, 0.7, 1.0)  # from the fastest to the slowest plain options of all stages

Ask = Callable[[str, str, int], tuple[Labelled, float]]  # stage, option, input -> answer, latency_ms


@register_policy("best-static")
class BestStatic:
    """The best plan that fixes every option in advance, by exhaustive search; for a root and followers.

    Also an example of a custom policy.
    """

    def __init__(self, pipeline: Pipeline, attainment: float) -> None:
        self.attainment = attainment
        names = list(pipeline.stages)
        choices = product(*(stage.options for stage in pipeline.stages.values()))
        self.plans = [dict(zip(names, options, strict=True)) for options in choices]
        self.accuracies = []
        self.latencies_ms = []  # per plan: sums over its paths, with each path's share
        root = pipeline.stages[pipeline.input]
        for plan in self.plans:
            first = root.options[plan[root.name]]
            accuracy, sums = 0.0, []
            for edge in pipeline.edges_from[root.name]:
                share = sum(s for s, label in zip(root.shares, root.labels, strict=True) if edge.holds(label))
                second = pipeline.stages[edge.target].options[plan[edge.target]]
                accuracy += share * first.measured_accuracy * second.measured_accuracy
                pairs = np.add.outer(first.measured_latency.values_ms, second.measured_latency.values_ms)
                chances = [option.measured_latency.probabilities for option in (first, second)]
                weights = np.outer(*chances)
                order = np.argsort(pairs.ravel())
                sums.append((share, pairs.ravel()[order], np.cumsum(weights.ravel()[order])))
            self.accuracies.append(accuracy)
            self.latencies_ms.append(sums)

    def begin(self, latency_slo_ms: float) -> StaticPlan:
        """Return the most accurate plan that meets the SLO often enough, else the one that meets it most."""
        in_time = [sum(self._part(path, latency_slo_ms) for path in sums) for sums in self.latencies_ms]
        enough = [index for index, share in enumerate(in_time) if share >= self.attainment]
        best = max(enough, key=self.accuracies.__getitem__) if enough else int(np.argmax(in_time))
        plan = self.plans[best]
        return StaticPlan({stage: Choice(option, latency_slo_ms) for stage, option in plan.items()})

    @staticmethod
    def _part(path: tuple[float, Any, Any], latency_slo_ms: float) -> float:
        share, sums, cumulated = path
        within = int(np.searchsorted(sums, latency_slo_ms, side="right"))
        return share * float(cumulated[within - 1]) if within else 0.0


class Row(NamedTuple):
    """One policy at one SLO, over all inputs."""

    slo_ms: float
    options: str
    policy: str
    accuracy: float
    right_in_time: float
    mean_latency_ms: float
    attainment: float


def main() -> int:
    """Run one of the three steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    collecting = steps.add_parser("collect")
    collecting.add_argument("libraries", type=Path)
    collecting.add_argument("--known", type=Path, required=True)
    collecting.add_argument("--unseen", type=Path, required=True)
    collecting.add_argument("--out", type=Path, required=True)
    collecting.add_argument("--composition", default="pipeline")
    replaying = steps.add_parser("table")
    replaying.add_argument("folder", type=Path)
    executing = steps.add_parser("live")
    executing.add_argument("folder", type=Path)
    executing.add_argument("--unseen", type=Path, required=True)
    executing.add_argument("--slo", type=float, required=True)
    executing.add_argument("--limit", type=int, default=2000)
    arguments = parser.parse_args()
    if arguments.step == "collect":
        collect(arguments.libraries, arguments.known, arguments.unseen, arguments.out, arguments.composition)
    elif arguments.step == "table":
        show(table(arguments.folder))
    else:
        show(live(arguments.folder, arguments.unseen, arguments.slo, arguments.limit))
    return 0


def collect(libraries: Path, known: Path, unseen: Path, out: Path, composition: str) -> None:
    """Write both pipelines with their measurements, and the results of every engine on the unseen inputs."""
    out.mkdir(parents=True, exist_ok=True)
    text = EXAMPLE.read_text(encoding="utf-8")
    lines = text.replace('"pipeline"', f'"{composition}"').splitlines()
    plain = [line.replace(f'composition = "{composition}"', "caches = false") for line in lines]
    pairs = zip(lines, plain, strict=True)
    both = [line if line == without else f"{line}\nplain-{without}" for line, without in pairs]
    for kind, several in zip(KINDS, (plain, lines, both), strict=True):
        written = "\n".join(several)
        for network in ("resnet20", "resnet32", "resnet56"):
            place = libraries.resolve() / network
            written = written.replace(f'library = "{network}"', f'library = "{place}"')
        (out / f"{kind}.toml").write_text(written, encoding="utf-8")
    pipelines = {kind: load_pipeline(out / f"{kind}.toml", measured=False) for kind in KINDS}
    arrays, images = [dict(np.load(path)) for path in (known, unseen)], out / "images.npz"
    counts = [len(array["labels"]) for array in arrays]
    order = np.random.default_rng(0).permutation(sum(counts))  # slow moments affect both data sets
    joined = {key: np.concatenate([array[key] for array in arrays])[order] for key in ("images", "labels")}
    np.savez(images, **joined)
    from_known = np.flatnonzero(order < counts[0])
    from_unseen = np.argsort(order)[counts[0] :]
    found: dict[str, Any] = {"labels": arrays[1]["labels"]}
    for turn in range(2):
        outcomes, data = measure_outcomes(pipelines["both"], images)
        if turn == 0:
            options = {source: pick(one, from_known) for source, one in outcomes.items()}
            for pipeline in pipelines.values():
                summarize(pipeline, options, data.subset(from_known)).save(
                    measurements_file(pipeline.path or out)
                )
        for source, one in outcomes.items():
            found[f"{key_of(source)}/{turn}/latency_ms"] = one.latency_ms[from_unseen]
            found[f"{key_of(source)}/{turn}/probabilities"] = one.probabilities[from_unseen]
    images.unlink()
    np.savez(out / "outcomes.npz", **found)


def pick(outcomes: Outcomes, indices: Any) -> Outcomes:
    """Return the outcomes of some inputs."""
    exits = tuple(outcomes.exits[index] for index in indices)
    return Outcomes(outcomes.latency_ms[indices], outcomes.probabilities[indices], exits, outcomes.backend)


def key_of(source: Any) -> str:
    """Return a name for an engine."""
    return f"{source.directory.name}-{source.composition or 'plain'}"


def table(folder: Path) -> list[Row]:
    """Replay all policies at five SLOs."""
    arrays = dict(np.load(folder / "outcomes.npz"))
    pipelines = {kind: load_pipeline(folder / f"{kind}.toml") for kind in KINDS}
    rows = []
    for slo_ms in slos(pipelines["plain"]):
        for kind, pipeline in pipelines.items():
            ask = replayed(pipeline, arrays)
            for policy in POLICIES:
                planner = Planner(pipeline, policy)
                answers = [query(planner, slo_ms, ask, index) for index in range(len(arrays["labels"]))]
                rows.append(row(planner, slo_ms, kind, answers, arrays["labels"]))
    return rows


def slos(plain: Pipeline) -> list[float]:
    """Return SLOs between the latencies of the fastest and the slowest options."""
    ends = []
    for pick in (min, max):
        need = {
            name: pick(option.measured_latency.quantile_ms(0.95) for option in stage.options.values())
            for name, stage in plain.stages.items()
        }
        ends.append(need["root"] + max(need["vehicles"], need["animals"]))
    return [round(ends[0] + share * (ends[1] - ends[0]), 2) for share in TIGHTNESS]


def replayed(pipeline: Pipeline, arrays: dict[str, Any]) -> Ask:
    """Return collected answers and latencies."""

    def ask(stage: str, option: str, index: int) -> tuple[Labelled, float]:
        chosen = pipeline.stages[stage].options[option]
        key = f"{key_of(chosen.source)}/{int(stage != pipeline.input)}"
        label = chosen.label(arrays[f"{key}/probabilities"][index])
        return label, float(arrays[f"{key}/latency_ms"][index])

    return ask


def live(folder: Path, unseen: Path, slo_ms: float, limit: int) -> list[Row]:
    """Execute every policy for real on every input, one after the other, in rotating order."""
    archive = np.load(unseen)
    images, labels = archive["images"][:limit], archive["labels"][:limit]
    contenders = []
    for kind in KINDS:
        pipeline = load_pipeline(folder / f"{kind}.toml")
        sources = {option.source for stage in pipeline.stages.values() for option in stage.options.values()}
        engines = {source: open_engine(source) for source in sources}
        ask = executed(pipeline, engines, images)
        contenders += [(kind, Planner(pipeline, policy), ask) for policy in POLICIES]
    answers: list[list[Answer]] = [[] for _ in contenders]
    for index in range(-20, len(images)):  # the first ones are warm-up
        for place in range(len(contenders)):
            turn = (index + place) % len(contenders)
            answer = query(contenders[turn][1], slo_ms, contenders[turn][2], abs(index))
            if index >= 0:
                answers[turn].append(answer)
    return [
        row(planner, slo_ms, kind, found, labels)
        for (kind, planner, _), found in zip(contenders, answers, strict=True)
    ]


def executed(pipeline: Pipeline, engines: dict[Any, Any], images: Any) -> Ask:
    """Return live answers of the engines."""

    def ask(stage: str, option: str, index: int) -> tuple[Labelled, float]:
        chosen = pipeline.stages[stage].options[option]
        engine = engines[chosen.source]
        x = engine.preprocessing(images[index : index + 1])
        start = time.perf_counter_ns()
        label = chosen.label(engine(x)[0].probabilities.numpy())
        return label, (time.perf_counter_ns() - start) / 1e6

    return ask


class Answer(NamedTuple):
    """The answer to one query."""

    label: str
    latency_ms: float


def query(planner: Planner, slo_ms: float, ask: Ask, index: int) -> Answer:
    """Send one input through the pipeline, stage by stage."""
    run = planner.begin(slo_ms)
    elapsed_ms = 0.0
    while not run.done:
        step = run.start(run.ready[0], elapsed_ms)
        found, latency_ms = ask(step.stage, step.option, index)
        elapsed_ms += latency_ms
        run.finish(step.stage, found.label, elapsed_ms, found.confidence)
    return Answer(run.answer or "", elapsed_ms)


def row(planner: Planner, slo_ms: float, kind: str, answers: list[Answer], labels: Any) -> Row:
    """Summarise one policy at one SLO."""
    names = [*planner.pipeline.stages["vehicles"].labels, *planner.pipeline.stages["animals"].labels]
    order = sorted(names)  # the classes of CIFAR-10 are numbered in alphabetical order
    right = np.array([answer.label == order[label] for answer, label in zip(answers, labels, strict=True)])
    latency_ms = np.array([answer.latency_ms for answer in answers])
    met = latency_ms <= slo_ms
    return Row(
        slo_ms,
        kind,
        planner.policy,
        float(right.mean()),
        float((right & met).mean()),
        float(latency_ms.mean()),
        float(met.mean()),
    )


def show(rows: list[Row]) -> None:
    """Print a table to stderr and JSON to stdout."""
    head = f"{'SLO ms':>7} {'options':8} {'policy':13} {'right':>7} {'in time':>8} {'mean ms':>8} {'met':>7}"
    print(head, file=sys.stderr)
    for r in rows:
        print(
            f"{r.slo_ms:7.2f} {r.options:8} {r.policy:13} {r.accuracy:7.2%} {r.right_in_time:8.2%} "
            f"{r.mean_latency_ms:8.2f} {r.attainment:7.2%}",
            file=sys.stderr,
        )
    print(json.dumps([r._asdict() for r in rows], indent=1))


if __name__ == "__main__":
    sys.exit(main())
