"""Compare an exported early-exit network with the engine and with the plain network on the same runtimes.

    python benchmarks/exported.py LIBRARY --data TEST.npz --composition NAME

All contenders answer the same inputs in turn, one at a time, in one process. ONNX Runtime and OpenVINO
(float32) run the files with a plain session; `base` is the same network exported without exits. Each time is
the minimum over repetitions of that input, which reduces the effect of other programs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

import gati
from gati.composition.composition import Composition
from gati.errors import GatiError
from gati.exploration.library import Library
from gati.model.data import load_data

Answer = tuple[int, int]  # class, exit
WARM_UP = 50


class Runner(NamedTuple):
    """A function that answers one input; `before` and `after` are not timed."""

    run: Callable[[npt.NDArray[np.float32]], Answer]
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None


def main() -> int:
    """Measure and print one JSON document to stdout."""
    arguments = parse_arguments()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            files = export_both(arguments.library, arguments.composition, Path(scratch))
            with gati.load(arguments.library, composition=arguments.composition) as engine:
                data = load_data(str(arguments.data), engine.preprocessing, what="test data")
                inputs = [data.images([row]).numpy() for row in range(min(arguments.limit, len(data)))]
                runners = make_runners(engine, files, arguments.threads)
                times_ms, answers = measure(runners, inputs, arguments.repetitions)
                blocks = [leaving.block for leaving in engine.exits]
    except GatiError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    print(json.dumps(report(times_ms, answers, blocks), indent=1))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="an .npz that explore has not seen")
    parser.add_argument("--composition", default="default")
    parser.add_argument("--limit", type=int, default=500, help="inputs")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, help="threads of every runtime; default: each runtime's own")
    return parser.parse_args()


def export_both(library: Path, composition: str, scratch: Path) -> dict[str, Path]:
    """Export the composition, and the same network without exits, to ONNX files."""
    opened = Library.open(library)
    view = Library(scratch / "library")  # keeps the plain composition out of the user's library
    view.directory.mkdir()
    for entry in library.resolve().iterdir():
        if entry.name != "compositions":
            (view.directory / entry.name).symlink_to(entry)
    chosen = Composition.load(opened.composition_path(composition))
    replace(chosen, name="base", exits=(), certificate=None).save(view.composition_path("base"))
    return {
        "gati": gati.export(library, scratch / "gati.onnx", composition=composition).path,
        "base": gati.export(view.directory, scratch / "base.onnx", composition="base").path,
    }


def make_runners(engine: gati.Engine, files: dict[str, Path], threads: int | None) -> dict[str, Runner]:
    """Return functions of one preprocessed input, by name."""
    runners: dict[str, Runner] = {"engine": of_engine(engine), "engine base": of_engine(engine, base=True)}
    for name, path in files.items():
        runners[f"onnxruntime {name}"] = in_onnxruntime(path, threads)
        runners[f"openvino {name}"] = in_openvino(path, threads)
    return runners


def of_engine(engine: gati.Engine, *, base: bool = False) -> Runner:
    exits = {leaving.block: index for index, leaving in enumerate(engine.exits)}
    ask = engine.base if base else engine

    def run(x: npt.NDArray[np.float32]) -> Answer:
        (answer,) = ask(torch.from_numpy(x))
        return answer.class_index, exits.get(answer.exit, len(exits))

    # Overlapped lookups reserve cores, which the other runners need back.
    return Runner(run) if base else Runner(run, engine.open, engine.close)


def in_onnxruntime(path: Path, threads: int | None) -> Runner:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    # Several runtimes share the cores; spinning threads of one would starve the others.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(x: npt.NDArray[np.float32]) -> Answer:
        probabilities, exit, _ = session.run(None, {"input": x})
        return int(probabilities.argmax()), int(exit[0])

    return Runner(run)


def in_openvino(path: Path, threads: int | None) -> Runner:
    import openvino

    settings: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    if threads is not None:
        settings["INFERENCE_NUM_THREADS"] = threads
    request = openvino.Core().compile_model(str(path), "CPU", settings).create_infer_request()

    def run(x: npt.NDArray[np.float32]) -> Answer:
        request.infer({"input": x}, share_inputs=True, share_outputs=True)
        probabilities, exit = request.get_output_tensor(0).data, request.get_output_tensor(1).data
        return int(probabilities.argmax()), int(exit[0])

    return Runner(run)


def measure(
    runners: dict[str, Runner], inputs: list[npt.NDArray[np.float32]], repetitions: int
) -> tuple[dict[str, npt.NDArray[np.float64]], dict[str, list[Answer]]]:
    """Return milliseconds and answers of all runners, measured alternately."""
    times_ms = {name: np.full(len(inputs), np.inf) for name in runners}
    answers: dict[str, list[Answer]] = {name: [(0, 0)] * len(inputs) for name in runners}
    order = list(runners)
    for repetition in range(-1, repetitions):  # the first is warm-up
        for index, x in enumerate(inputs if repetition >= 0 else inputs[:WARM_UP]):
            order.append(order.pop(0))
            for name in order:
                took_ms, answers[name][index] = timed(runners[name], x)
                if repetition >= 0:
                    times_ms[name][index] = min(times_ms[name][index], took_ms)
    return times_ms, answers


def timed(runner: Runner, x: npt.NDArray[np.float32]) -> tuple[float, Answer]:
    """Time one request, after an untimed one that brings the network back into the CPU caches."""
    runner.before()
    runner.run(x)
    start = time.perf_counter_ns()
    answer = runner.run(x)
    took_ms = (time.perf_counter_ns() - start) / 1e6
    runner.after()
    return took_ms, answer


def report(
    times_ms: dict[str, npt.NDArray[np.float64]], answers: dict[str, list[Answer]], blocks: list[str]
) -> dict[str, Any]:
    """Return latencies, gains over the same runtime's base, and whether files and engine agree."""
    engine = answers["engine"]
    left_at = np.array([exit for _, exit in engine])
    early = left_at < len(blocks)
    rows = {}
    for name, taken in times_ms.items():
        row: dict[str, Any] = {"mean_ms": taken.mean(), "p50_ms": np.median(taken)}
        row["p99_ms"] = np.percentile(taken, 99)
        if name.endswith("base"):
            rows[name] = _rounded(row)
            continue
        base = times_ms["engine base" if name == "engine" else name.replace("gati", "base")]
        row["gain"] = base.mean() / taken.mean()
        row["median_gain"] = np.median(base) / np.median(taken)
        row["tail_ratio"] = np.percentile(taken, 99) / np.percentile(base, 99)
        row["early_ms"], row["late_ms"] = taken[early].mean(), taken[~early].mean()
        row["late_over_base"] = np.median(taken[~early]) / np.median(base[~early])
        pairs = list(zip(answers[name], engine, strict=True))
        row["same_class_as_engine"] = np.mean([one[0] == other[0] for one, other in pairs])
        row["same_exit_as_engine"] = np.mean([one[1] == other[1] for one, other in pairs])
        rows[name] = _rounded(row)
    hits = {block: int((left_at == index).sum()) for index, block in enumerate([*blocks, "base"])}
    agreement = np.mean([a[0] == b[0] for a, b in zip(engine, answers["engine base"], strict=True)])
    return {"n": len(engine), "agreement": round(float(agreement), 4), "left_after": hits, "times": rows}


def _rounded(row: dict[str, Any]) -> dict[str, float]:
    return {key: round(float(value), 4) for key, value in row.items()}


if __name__ == "__main__":
    sys.exit(main())
