"""Output for the terminal. Functions here read records and print; they compute nothing."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gati.cli.tables import new_table, show
from gati.cli.words import counted, quoted
from gati.units import at_least, at_most, format_bytes, percent

if TYPE_CHECKING:
    from gati.composition.composition import Composition
    from gati.composition.explain import Explanation
    from gati.composition.headroom import Headroom
    from gati.composition.pareto import ParetoPoint
    from gati.engine.exits import Prediction
    from gati.evaluation.bench_result import Bench, Spread
    from gati.evaluation.by_class import Share
    from gati.evaluation.certify import Recertification
    from gati.evaluation.evaluate import Evaluation
    from gati.exploration.inspect import ModelBlocks
    from gati.exploration.library import Library
    from gati.formats.export import Exported

_LARGEST_GAIN = 100  # larger ones say only that nothing is left to compute


def error(message: str) -> None:
    """Print one line on stderr, red in a terminal, unless NO_COLOR is set."""
    line = "error: " + " ".join(message.split())
    red = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print(f"\x1b[31m{line}\x1b[0m" if red else line, file=sys.stderr)


def blocks(found: ModelBlocks) -> None:
    """Print the blocks in forward order: output shape, share of the latency, share up to the block."""
    profile = found.profile
    table = new_table("#", "block", "kind", "output", "share", "until here", left=(1, 2, 3))
    for block in profile.blocks:
        table.add_row(
            str(block.index),
            block.name,
            block.kind,
            _shape(block.output_shape),
            percent(block.latency_ms / profile.base_ms),
            percent(block.reach_ms / profile.base_ms),
        )
    show(table, "kind")
    print(
        f"{len(profile.blocks)} blocks; {profile.base_ms:.2f} ms for one input of "
        f"{_shape(found.input_shape)} on {profile.device} ({profile.backend}, "
        f"{counted(profile.threads, 'thread')})"
    )
    _disturbed(profile.disturbance)


def library(explored: Library) -> None:
    """Print the best trained variant of every block, and the file with all others."""
    profile = explored.manifest.profile
    trained = [trial for trial in explored.trials if trial.status == "trained"]
    trained.sort(key=lambda trial: (trial.saves_time(profile), _hits(trial.hit_rate_at_99)))
    best = {trial.block_index: trial for trial in trained}  # the last of each block, so the best
    columns = ("block", "best variant", "hits at 97 %", "hits at 99 %", "lookup", "memory")
    table = new_table(*columns, left=(0, 1))
    for _, trial in sorted(best.items()):
        table.add_row(
            trial.block,
            trial.variant,
            percent(_hits(trial.hit_rate_at_97)),
            percent(_hits(trial.hit_rate_at_99)),
            _milliseconds(trial.lookup_ms),
            format_bytes(trial.memory_bytes),
        )
    if best:
        show(table, "memory")
    counts = Counter(trial.status for trial in explored.trials)
    found = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    print(
        f"{counted(len(explored.trials), 'variant')}{f' ({found})' if found else ''}; all of them, with "
        f"reasons, are in {explored.directory / 'trials.csv'}"
    )
    nothing = "nothing was worth training: name variants with --variants, or blocks with --blocks"
    print(f"next: gati compose {quoted(explored.directory)}" if best else nothing)


def composition(chosen: Composition, directory: Path, explained: Sequence[Explanation] = ()) -> None:
    """Print the exits, their expected figures, and why they were chosen."""
    expected = chosen.expected
    if chosen.exits:
        table = new_table(
            "block",
            "variant",
            "selector",
            "placement",
            "hit rate",
            "hits agree",
            "exit after",
            "lookup",
            "memory",
            left=(0, 1, 2, 3),
        )
        table.columns[2].no_wrap = True
        for exit_ in chosen.exits:
            table.add_row(
                exit_.block,
                exit_.variant,
                exit_.selector,
                exit_.placement,
                percent(exit_.expected_hit_rate),
                percent(exit_.expected_agreement, digits=2),
                _milliseconds(exit_.exit_ms),
                _milliseconds(exit_.lookup_ms),
                format_bytes(exit_.memory_bytes),
            )
        show(table, "selector", "memory", "placement")
    print(
        f"expected: mean {expected.mean_latency_ms:.3f} ms against {expected.base_latency_ms:.3f} ms, "
        f"gain {expected.gain:.2f}x; {percent(expected.hit_rate)} leave early, agreement "
        f"{percent(expected.agreement, digits=2)} (target {100 * chosen.accuracy_target:.6g} %), "
        f"caches {format_bytes(expected.memory_bytes)}"
    )
    print(f"why: {_why(chosen)}")
    for each in explained:
        print(f"  {each.exit.block}: {each.sentence}")
    if chosen.headroom is not None:
        _headroom(chosen.headroom)
    if chosen.certificate is not None:
        print(f"certificate: {chosen.certificate.sentence()}")
        if drop := chosen.certificate.accuracy_drop:
            print(f"accuracy: {drop.sentence()}")
    if chosen.note and (chosen.certificate is None or chosen.note != chosen.certificate.sentence()):
        print(f"note: {chosen.note}")
    option = "" if chosen.name == "default" else f" --composition {chosen.name}"
    print(f"next: gati evaluate {quoted(directory)} --data TEST{option}")


def _headroom(found: Headroom) -> None:
    """Print the gain if one exit, or all of them, were perfect in one respect."""
    columns = ("gain if the exit's", "lookup were free", "selector were perfect", "answers were all right")
    table = new_table(*columns, left=(0,))
    for each in found.exits:
        gains = (each.free.gain, each.knowing.gain, each.right.gain)
        table.add_row(each.block, *map(_bounded, gains))
    table.add_row("all of them", _bounded(found.free.gain), _bounded(found.oracle.gain), "")
    show(table)
    basis = "replayed on the select inputs" if found.inputs else "estimated from the trials table"
    print(
        f"current gain {found.chosen.gain:.2f}x; with free lookups and perfect selectors "
        f"{_bounded(found.free_oracle.gain)}; {basis}, with the same choice of exits"
    )


def _bounded(gain: float) -> str:
    """A gain that has no limit where all leave at the input for nothing."""
    return f"{gain:.2f}x" if gain < _LARGEST_GAIN else f"over {_LARGEST_GAIN}x"


def frontier(points: Sequence[ParetoPoint], directory: Path) -> None:
    """Print the trade-off, starting with the highest agreement."""
    if not points:
        print(f"no cache in {directory} pays off at any agreement: trials.csv has the cost of each")
        return
    table = new_table("mean latency", "gain", "agreement", "certified", "memory", "exits", left=())
    for point in points:
        table.add_row(
            _milliseconds(point.mean_latency_ms),
            f"{point.gain:.2f}x",
            percent(point.agreement, digits=2),
            f"{at_least(point.certified_agreement)} %",
            format_bytes(point.memory_bytes),
            str(len(point.blocks)),
        )
    show(table, "memory")
    print(
        f"certified: all these agreements hold together with {100.0 * points[0].confidence:g} % confidence"
        f"{', in every class' if points[0].per_class else ''}; stored in {directory}/pareto.json"
    )
    if points[0].use > 1:
        from gati.composition.certificate import of_uses

        print(f"note:{of_uses(points[0].use)}")
    every = " --per-class" if points[0].per_class else ""
    print(f"next: gati compose {quoted(directory)}{every} --accuracy TARGET, or --latency TIME")


def _why(chosen: Composition) -> str:
    gap = "not proven" if chosen.gap is None else percent(chosen.gap, 2)
    alpha = "" if chosen.alpha is None else f", alpha {chosen.alpha:g}"
    basis = {"replay": "replayed on the select inputs", "table": "estimated from the trials table"}
    return (
        f"least expected latency, objective {chosen.objective}{alpha}, solver {chosen.solver}, gap {gap}; "
        f"expectations {basis[chosen.expected_from]}"
    )


def evaluation(measured: Evaluation) -> None:
    """Print the comparison with the base model, then hits and agreement of each exit."""
    if measured.note:
        print(f"note: {measured.note}")
    table = new_table("", "base", "gati", "ratio", left=(0,))
    base, ours = measured.base_latency_ms, measured.latency_ms
    for name in ("mean", "p50", "p90", "p99"):
        before, after = getattr(base, name), getattr(ours, name)
        ratio = f"{before / after:.2f}x"
        table.add_row(f"latency {name}", _milliseconds(before), _milliseconds(after), ratio)
    table.add_row("agreement", "", percent(measured.agreement, digits=2), "")
    if measured.accuracy is not None and measured.base_accuracy is not None:
        change = 100 * (measured.accuracy - measured.base_accuracy)
        table.add_row(
            "accuracy",
            percent(measured.base_accuracy, digits=2),
            percent(measured.accuracy, digits=2),
            f"{change:+.2f} points",
        )
    show(table)
    if measured.exits:
        exits = new_table("exit after", "variant", "placement", "hits", "hits agree", left=(0, 1, 2))
        for exit_ in measured.exits:
            agreement = "-" if exit_.agreement is None else percent(exit_.agreement, digits=2)
            exits.add_row(exit_.block, exit_.variant, exit_.placement, str(exit_.hits), agreement)
        show(exits, "placement")
    print(
        f"{measured.n} inputs one at a time on {measured.device} ({measured.backend}, "
        f"{counted(measured.threads, 'thread')}): gain {measured.gain:.2f}x{_marked(measured.disturbed)}, "
        f"tail ratio {measured.tail_ratio:.2f}, "
        f"{percent(measured.hit_rate)} left early, caches {format_bytes(measured.memory_bytes)}"
    )
    if measured.eager_latency_ms is not None:
        eager_ms = measured.eager_latency_ms.mean
        print(f"the module called directly takes {eager_ms:.3f} ms: {eager_ms / ours.mean:.2f} times Gati's")
    _disturbed(measured.disturbance)


def _marked(disturbed: bool) -> str:
    return " (disturbed)" if disturbed else ""


def _disturbed(note: str) -> None:
    """Print that latencies are not reliable, and why."""
    if note:
        print(f"do not quote these latencies: {note}; measure again on an idle machine")


def promise(chosen: Composition) -> None:
    """Print a warning if a composition's agreement is not certified."""
    if chosen.warning:
        print(f"note: {chosen.warning}")


def classes(measured: Evaluation) -> None:
    """Print agreement and hit rate of every class, lowest agreement first."""
    table = new_table("class", "inputs", "agreement", "95 % interval", "hit rate", "95 % interval", left=(0,))
    for each in sorted(measured.classes, key=lambda each: each.agreement.value):
        row = (*_share(each.agreement), *_share(each.hit_rate))
        table.add_row(each.name, str(each.n), *row)
    show(table, "inputs")
    print("classes are the base model's answers; intervals are exact (Clopper-Pearson), each by itself")


def _share(share: Share) -> tuple[str, str]:
    return percent(share.value), f"{at_least(share.low, 1)} - {at_most(share.high, 1)} %"


def bench(result: Bench) -> None:
    """Print every compared system, then those that were left out and why."""
    if result.note:
        print(f"note: {result.note}")
    table = new_table(
        "milliseconds", "mean", "p50", "p90", "p99", "over same engine", "over fastest", left=(0,)
    )
    clients = sorted({1, result.clients})
    columns = ("answers", "agreement", "accuracy", "left early", "memory")
    asked_by = [counted(many, "client") for many in clients]
    answers = new_table(*columns, *asked_by, left=(0,))
    for row in result.rows:
        times = row.latency_ms
        rates = [row.throughput.get(str(many)) for many in clients]
        table.add_row(
            row.name,
            *(f"{value:.3f}" for value in (times.mean, times.p50, times.p90, times.p99)),
            _over_repetitions(row.gain_same),
            _over_repetitions(row.gain_fastest),
        )
        answers.add_row(
            row.name,
            percent(row.agreement, digits=2),
            "-" if row.accuracy is None else percent(row.accuracy, digits=2),
            percent(row.hit_rate),
            format_bytes(row.memory_bytes),
            *("-" if rate is None else f"{rate.median:.0f}/s" for rate in rates),
        )
    show(table, "p90", "p50", "p99")
    show(answers, "memory", "accuracy")
    print(
        f"{counted(result.n, 'input')}, {counted(result.repetitions, 'repetition')}; gains are medians "
        f"(least-most) over repetitions; {result.fastest_words}"
    )
    for left in result.left_out:
        print(f"left out: {left.name}: {left.reason}")
    _disturbed(result.disturbance)


def _over_repetitions(gain: Spread) -> str:
    return f"{gain.median:.2f} ({gain.min:.2f}-{gain.max:.2f})"


def recertification(found: Recertification, name: str, *, written: bool) -> None:
    """Print the verdict, the accuracy drop, the earlier certificate, and the effect on the composition."""
    if found.note:
        print(f"note: {found.note}")
    print(f"certificate: {found.sentence()}")
    if found.accuracy_drop is not None:
        print(f"accuracy: {found.accuracy_drop.sentence()}")
    print(f"{percent(found.hit_rate)} of requests left early")
    print(f"before: {found.comparison}")
    if written and found.certificate.deployed is None:
        print(
            f"note: NOT CERTIFIED: composition '{name}' stays, marked as not certified; "
            "compose again, or certify on more data"
        )


def counter(what: str) -> Callable[[int, int], None]:
    """Return a callback that updates one line on stderr; it is silent without a terminal."""

    def count(done: int, total: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done >= total else ""
            print(f"\r{done} of {total} {what}", end=end, file=sys.stderr, flush=True)

    return count


def predictions(inputs: Sequence[str], answers: Sequence[Prediction]) -> None:
    """Print name or text, class, probability and exit of every input."""
    table = new_table("input", "class", "probability", "left after", left=(0, 1, 3))
    for given, answer in zip(inputs, answers, strict=True):
        name = answer.class_name or str(answer.class_index)
        probability = float(answer.probabilities[answer.class_index])
        table.add_row(given, name, percent(probability), answer.exit)
    show(table)


def exported(written: Exported) -> None:
    """Print the file, its inputs and outputs, and its exits."""
    size = f", {format_bytes(written.size_bytes)}" if written.size_bytes else ""  # of a pipe it is not known
    print(f"{written.path}: {written.format}{size}")
    takes = f"{written.input_type} {_shape(written.input_shape)}"
    print(f"input: one {takes}; outputs: probabilities, exit and score")
    places = [f"{index} after {block}" for index, block in enumerate(written.exits)]
    print(f"exits: {', '.join([*places, f'{len(places)} at the end'])}")
    print(f"checked: {written.checked_inputs} random inputs give the engine's answers")
    if written.note:
        print(f"note: {written.note}")


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} ms"


def _hits(rate: float | None) -> float:
    return 0.0 if rate is None else rate
