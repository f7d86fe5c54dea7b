"""The verb `gati doctor`, and how its diagnosis looks in a terminal; `gati.cli` registers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import gati
from gati.cli import options
from gati.cli.tables import new_table, show
from gati.cli.words import counted
from gati.units import parse_duration, percent

if TYPE_CHECKING:
    from gati.evaluation.diagnosis import CheapestLookup, DataForecast, Diagnosis, ExploreForecast

_REFUSED = 2
_WORTH = 1.5  # gain for which the output states the required hit rate


def doctor(
    model: options.Model,
    data: Annotated[
        str | None, typer.Option(metavar="VAL", help="As for gati explore; random inputs if not given.")
    ] = None,
    checkpoint: options.Checkpoint = None,
    train_data: Annotated[str | None, typer.Option(metavar="MORE", help="As for gati explore.")] = None,
    unique: Annotated[bool, typer.Option("--unique", help="As for gati explore.")] = False,
    pattern: Annotated[
        str | None, typer.Option("--blocks", metavar="PATTERN", help="Only blocks that match.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(metavar="HEIGHTxWIDTH", help="Input size, if --data is not given.")
    ] = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="The time that gati explore would get.")
    ] = options.EXPLORE_BUDGET,
    confidence: Annotated[float, typer.Option(help="Confidence of the certificates.")] = 0.95,
    within: Annotated[
        str, typer.Option(metavar="TIME", help="Skip remaining checks after this time.")
    ] = "60s",
    mean: options.Mean = None,
    std: options.Std = None,
    resize: options.Resize = None,
    sample_rate: options.SampleRate = None,
    seconds: options.Seconds = None,
    tokenizer: options.TokenizerFile = None,
    max_length: options.MaxLength = None,
    text_column: options.TextColumn = None,
    label_column: options.LabelColumn = None,
    json_file: options.JsonFile = None,
) -> None:
    """Estimate what Gati can do for a network, without training or writing anything.

    Shows where the network can be cut, its latency on every available engine, the largest gain that the
    cheapest caches allow, how long gati explore takes, and which agreement the data can certify. If explore
    would refuse something, the output says what to do, and the exit status is 2.
    """
    from gati.files import atomic_write_text

    found = gati.doctor(
        model,
        checkpoint,
        data=data,
        train_data=train_data,
        unique=unique,
        blocks=pattern,
        size=options.size_of(size),
        mean=options.numbers("--mean", mean),
        std=options.numbers("--std", std),
        resize=resize,
        budget_s=parse_duration(budget),
        confidence=confidence,
        sample_rate=sample_rate,
        seconds=seconds,
        tokenizer=tokenizer,
        max_length=max_length,
        text_column=text_column,
        label_column=label_column,
        within_s=parse_duration(within),
    )
    _show(found)
    if json_file is not None:
        atomic_write_text(json_file, found.to_json())
    if found.refused:
        raise typer.Exit(_REFUSED)


def _show(found: Diagnosis) -> None:
    _show_network(found)
    _show_engines(found)
    _show_bound(found.best)
    if found.explore is not None:
        _show_explore(found.explore)
    if found.data is not None:
        _show_data(found.data)
    for finding in found.findings:
        print(f"{'refused' if finding.refuses else 'note'}: {finding.about}: {finding.message}")
    print(f"checked in {found.seconds:.0f} s; nothing was written")


def _show_network(found: Diagnosis) -> None:
    size = f"{found.parameters / 1e6:.2f} million weights"
    if found.profile is None:
        why = "cannot be explored in this form" if found.refused else "was not examined in the time"
        print(f"{found.model} ({size}) {why}, see below")
        return
    profile = found.profile
    lookups = {lookup.block: lookup for lookup in found.lookups}
    table = new_table(
        *("#", "block", "kind", "output", "share", "until here"),
        *("cheapest lookup", "gain if all leave", "if half"),
        left=(1, 2, 3, 6),
    )
    for block in profile.blocks:
        lookup = lookups.get(block.name)
        table.add_row(
            str(block.index),
            block.name,
            block.kind,
            "x".join(map(str, block.output_shape)),
            percent(block.latency_ms / profile.base_ms),
            percent(block.reach_ms / profile.base_ms),
            "" if lookup is None else f"{lookup.variant} {lookup.lookup_ms:.3f} ms",
            "" if lookup is None else f"{lookup.gain(1.0):.2f}x",
            "" if lookup is None else f"{lookup.gain(0.5):.2f}x",
        )
    show(table, "kind", "#", "output")
    shape = "x".join(map(str, found.input_shape or ()))
    print(
        f"{found.model} ({size}) can be cut at {counted(len(profile.blocks), 'place')}; "
        f"{profile.base_ms:.2f} ms for one input of {shape} ({profile.backend}, "
        f"{counted(profile.threads, 'thread')})"
    )
    if profile.disturbance:
        print(f"note: these latencies may be wrong: {profile.disturbance}")


def _show_engines(found: Diagnosis) -> None:
    for engine in found.engines:
        if engine.base_ms is None:
            print(f"engine {engine.name}: not measured: {engine.reason}")
        else:
            mark = ", the fastest measured" if engine == found.fastest else ""
            print(f"engine {engine.name} ({engine.precision}): {engine.base_ms:.3f} ms{mark}")


def _show_bound(best: CheapestLookup | None) -> None:
    if best is None:
        return
    share = best.share_for(_WORTH)
    required = "out of reach" if share is None else f"reached if {percent(share, 0)} leave there"
    print(
        f"the gain on torch is at most {best.gain(1.0):.1f}x, if every input left after "
        f"{best.variant} at {best.block}; {_WORTH:g}x is {required}"
    )


def _show_explore(forecast: ExploreForecast) -> None:
    places = len({block for block, _ in forecast.exits})
    trained = [f"{', '.join(forecast.at_the_input)} at the input"] if forecast.at_the_input else []
    if forecast.exits:
        trained.append(f"{counted(len(forecast.exits), 'exit')} at {counted(places, 'block')}")
    print(
        f"explore would train {' and '.join(trained) or 'nothing'}; "
        f"measuring takes about {_duration(forecast.measuring_s)}"
    )
    passes = [
        f"{count:.0f} passes {where} ({_duration(each_s)} each)"
        for count, each_s, where in (
            (forecast.input_passes, forecast.input_pass_s, "at the input"),
            (forecast.exit_passes, forecast.exit_pass_s, "of the exits"),
        )
        if count is not None and each_s is not None
    ]
    print(f"in {_duration(forecast.budget_s)} that is about {' and '.join(passes) or 'no training'}")
    if forecast.usual_s is not None:
        print(f"without a budget, the default number of passes takes about {_duration(forecast.usual_s)}")


def _show_data(data: DataForecast) -> None:
    copies = "" if data.exact else " (not checked for copies)"
    print(
        f"{data.inputs} inputs: {data.certify} to certify on, {data.select} to select on, "
        f"{data.train} to train on{copies}"
    )
    table = new_table(
        "agreement",
        f"certifiable for one engine at {100 * data.confidence:g} % confidence",
        "inputs of --data needed",
        left=(1,),
    )
    for target in data.targets:
        table.add_row(
            f"{target.accuracy:g}",
            _certifiable(target.losses_allowed),
            str(target.held_out_needed),
        )
    show(table)


def _certifiable(losses: int | None) -> str:
    """Whether an agreement can be certified, and with how many different answers."""
    if losses is None:
        return "no"
    if losses == 0:
        return "without a different answer"
    return f"with up to {counted(losses, 'different answer')}"


def _duration(seconds: float) -> str:
    if seconds < 1.0:
        return f"{1e3 * seconds:.0f} ms"
    if seconds < 120.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200.0 else f"{seconds / 3600:.1f} h"
