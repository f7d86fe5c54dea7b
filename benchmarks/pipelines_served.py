"""Compare policies of a pipeline through `gati serve`: static, offline, live and an oracle.

    gati pipeline measure PIPELINE.toml --data KNOWN.npz
    python -m benchmarks.pipelines_served PIPELINE.toml --known KNOWN.npz --unseen UNSEEN.npz [--json FILE]

PIPELINE is a root with followers, like `examples/pipeline`, whose stages all have the same options. One
server hosts it under the policies `static` and `dynamic` with offline measurements, under `dynamic` with
figures updated from traffic, and once per plan that fixes the options of root and followers. One client sends
every image to each of them over a socket, in rotating order. It counts correct answers, correct answers
within the SLO (refusals count as wrong), and latencies at the client.

`best fixed` and `cheapest fixed` are chosen per SLO by their results on KNOWN, served in the same way;
`oracle` takes for each image of UNSEEN the fastest fixed plan that is correct in time. SLOs lie between the
95th percentiles of the fastest and the slowest fixed plan, both served. Before each row, every policy gets
`--warm-up` images of KNOWN with that SLO, so that the figures can adapt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import tomllib
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.serving import Connection, message, serving
from gati.pipelines.measurements import measurements_file

POLICIES = {"static": ("static", False), "offline": ("dynamic", False), "live": ("dynamic", True)}
PATIENT_MS = 10_000.0
PREFIX = "served-benchmark-"

Floats = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


class Outcomes(NamedTuple):
    """Outcomes of images, [n] each: correct, refused, and milliseconds."""

    right: Bools
    refused: Bools
    latency_ms: Floats


class Row(NamedTuple):
    """One policy at one SLO; shares are of all images, latencies of those answered."""

    slo_ms: float
    policy: str
    right: float
    right_in_time: float
    in_time: float
    refused: float
    mean_ms: float
    p95_ms: float
    gain: float  # mean latency of `static` / own mean latency
    options: dict[str, float]  # share of each option among the stages that ran


class Images(NamedTuple):
    """Images as requests for any pipeline, with their labels."""

    tensors: list[bytes]
    labels: list[str]


def main() -> int:
    """Run all measurements; print a table to stderr and JSON to stdout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("pipeline", type=Path)
    parser.add_argument("--known", type=Path, required=True)
    parser.add_argument("--unseen", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=2000, help="images of UNSEEN")
    parser.add_argument(
        "--calibrate", type=int, default=400, help="images of KNOWN used to choose the fixed plans"
    )
    parser.add_argument("--warm-up", type=int, default=300)
    parser.add_argument("--tightness", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    document = tomllib.loads(asked.pipeline.read_text(encoding="utf-8"))
    names = document["class_names"]
    known, unseen = load(asked.known, names, asked.calibrate), load(asked.unseen, names, asked.limit)
    with ExitStack() as until_done:
        config, fixed = prepare(asked.pipeline, document, until_done)
        port = until_done.enter_context(serving(config))
        before = os.getloadavg()
        rows = asyncio.run(measure(port, fixed, known, unseen, asked))
    show(rows)
    load_average = {"before": before, "after": os.getloadavg()}
    result = json.dumps({"load": load_average, "rows": [row._asdict() for row in rows]}, indent=1)
    print(result)
    if asked.json is not None:
        asked.json.write_text(result + "\n", encoding="utf-8")
    return 0


def load(path: Path, names: list[str], limit: int) -> Images:
    """Load the first images of an archive."""
    archive = np.load(path)
    images, labels = archive["images"][:limit], archive["labels"][:limit]
    return Images([tensor(image) for image in images], [names[label] for label in labels.tolist()])


def tensor(image: Any) -> bytes:
    """Return header and data of an inference request, without parameters, as `ask` sends it."""
    data = np.ascontiguousarray(image[None]).tobytes()
    head = {
        "name": "input",
        "shape": [1, *image.shape],
        "datatype": "UINT8",
        "parameters": {"binary_data_size": len(data)},
    }
    return json.dumps(head).encode() + b"\n" + data


def prepare(path: Path, document: dict[str, Any], until_done: ExitStack) -> tuple[Path, list[str]]:
    """Write the fixed pipelines and the configuration next to PIPELINE; return its path and their names."""
    measured = json.loads(measurements_file(path).read_text(encoding="utf-8"))
    root = next(name for name in document["stages"] if all(edge["to"] != name for edge in document["edges"]))
    options = list(document["stages"][root]["options"])
    lines = ["late_factor = 20.0"]
    for name, (policy, live) in POLICIES.items():
        lines += entry(name, path.name, policy, live)
    fixed = []
    text = path.read_text(encoding="utf-8")
    for first, second in product(options, options):
        name = f"{first}-{second}"
        keep = {stage: first if stage == root else second for stage in document["stages"]}
        file = path.with_name(f"{PREFIX}{name}.toml")
        write(until_done, file, only(text, keep))
        stages = {
            stage: {**found, "options": {keep[stage]: found["options"][keep[stage]]}}
            for stage, found in measured["stages"].items()
        }
        write(until_done, measurements_file(file), json.dumps({**measured, "stages": stages}))
        lines += entry(name, file.name, "static", False)
        fixed.append(name)
    config = path.with_name(f"{PREFIX}serve.toml")
    write(until_done, config, "\n".join(lines) + "\n")
    return config, fixed


def entry(name: str, file: str, policy: str, live: bool) -> list[str]:
    """Return a pipeline's lines of the configuration."""
    return [f"[pipelines.{name}]", f'file = "{file}"', f'policy = "{policy}"', f"live = {str(live).lower()}"]


def only(text: str, keep: dict[str, str]) -> str:
    """Keep one option per stage of a pipeline's TOML; each option is a line below `[stages.NAME.options]`."""
    written, stage = [], None
    for line in text.splitlines():
        if line.startswith("["):
            parts = line.strip("[]").split(".")
            stage = parts[1] if parts[0] == "stages" and parts[-1] == "options" else None
        name = line.partition("=")[0].strip()
        if stage is None or line.startswith("[") or name in ("", keep[stage]):
            written.append(line)
    return "\n".join(written) + "\n"


def write(until_done: ExitStack, file: Path, text: str) -> None:
    """Write a file and delete it at the end."""
    file.write_text(text, encoding="utf-8")
    until_done.callback(file.unlink)


async def measure(
    port: int, plans: list[str], known: Images, unseen: Images, asked: argparse.Namespace
) -> list[Row]:
    """Measure all rows."""
    rows = []
    async with Connection(port) as connection:
        await run(connection, plans, known, PATIENT_MS, 30)
        tried = await run(connection, plans, known, PATIENT_MS)
        everything = await run(connection, plans, unseen, PATIENT_MS)
        tails = [float(np.quantile(found.latency_ms, 0.95)) for found, _ in tried.values()]
        least, most = min(tails), max(tails)
        for share in asked.tightness:
            slo_ms = round(least + share * (most - least), 2)
            best = max(plans, key=lambda name: right_in_time(tried[name][0], slo_ms))
            cheapest = min(plans, key=lambda name: float(tried[name][0].latency_ms.mean()))
            contenders = {**{name: name for name in POLICIES}, "best fixed": best, "cheapest fixed": cheapest}
            await run(connection, list(contenders.values()), known, slo_ms, asked.warm_up)
            found = await run(connection, list(contenders.values()), unseen, slo_ms)
            base_ms = mean_ms(found["static"][0])
            for name, pipeline in contenders.items():
                title = name if name == pipeline else f"{name}: {pipeline}"
                rows.append(row(slo_ms, title, *found[pipeline], base_ms))
            chosen = oracle([each for each, _ in everything.values()], slo_ms)
            rows.append(row(slo_ms, "oracle", chosen, {}, base_ms))
            show(rows[-len(contenders) - 1 :])
    return rows


async def run(
    connection: Connection, pipelines: list[str], images: Images, slo_ms: float, limit: int | None = None
) -> dict[str, tuple[Outcomes, dict[str, int]]]:
    """Send every image to every pipeline in rotating order; also return how often each option ran."""
    names = list(dict.fromkeys(pipelines))
    found: dict[str, list[tuple[bool, bool, float]]] = {name: [] for name in names}
    ran: dict[str, dict[str, int]] = {name: {} for name in names}
    for index, (data, label) in enumerate(zip(images.tensors[:limit], images.labels, strict=False)):
        for place in range(len(names)):
            name = names[(index + place) % len(names)]
            request = query(name, data, slo_ms)
            began = time.perf_counter()
            status, body = await connection.ask(request)
            took_ms = 1e3 * (time.perf_counter() - began)
            if status not in (200, 429, 504):
                raise SystemExit(f"status {status}: {body.decode()[:300]}")
            answer = json.loads(body) if status == 200 else {"label": None, "stages": []}
            found[name].append((answer["label"] == label, status != 200, took_ms))
            for stage in answer["stages"]:
                ran[name][stage["option"]] = ran[name].get(stage["option"], 0) + 1
    return {
        name: (Outcomes(*(np.array(column) for column in zip(*each, strict=True))), ran[name])
        for name, each in found.items()
    }


def query(pipeline: str, data: bytes, slo_ms: float) -> bytes:
    """Return the HTTP request."""
    head, _, tensor = data.partition(b"\n")
    parameters = json.dumps({"latency_slo_ms": slo_ms}).encode()
    header = b'{"inputs": [' + head + b'], "parameters": ' + parameters + b"}"
    length = f"Inference-Header-Content-Length: {len(header)}"
    return message(f"/v1/pipelines/{pipeline}/query", header + tensor, length)


def right_in_time(found: Outcomes, slo_ms: float) -> float:
    """Return the share of images with a correct answer within the SLO."""
    return float((found.right & (found.latency_ms <= slo_ms)).mean())


def mean_ms(found: Outcomes) -> float:
    """Return the mean latency of answered images."""
    return float(found.latency_ms[~found.refused].mean()) if not found.refused.all() else float("nan")


def oracle(plans: list[Outcomes], slo_ms: float) -> Outcomes:
    """Pick for each image the fastest plan that is correct in time, else the fastest of all."""
    latency_ms = np.stack([plan.latency_ms for plan in plans])
    good = np.stack([plan.right for plan in plans]) & (latency_ms <= slo_ms)
    price = np.where(good, latency_ms, np.where(good.any(axis=0), np.inf, latency_ms))
    best, every = price.argmin(axis=0), np.arange(price.shape[1])
    return Outcomes(good.any(axis=0), np.zeros(price.shape[1], bool), latency_ms[best, every])


def row(slo_ms: float, name: str, found: Outcomes, ran: dict[str, int], base_ms: float) -> Row:
    """Summarise one policy at one SLO."""
    answered = found.latency_ms[~found.refused]
    total = sum(ran.values())
    return Row(
        slo_ms,
        name,
        float(found.right.mean()),
        right_in_time(found, slo_ms),
        float((~found.refused & (found.latency_ms <= slo_ms)).mean()),
        float(found.refused.mean()),
        mean_ms(found),
        float(np.quantile(answered, 0.95)) if answered.size else float("nan"),
        base_ms / mean_ms(found),
        {option: round(count / total, 3) for option, count in sorted(ran.items())},
    )


def show(rows: list[Row]) -> None:
    """Print a table to stderr."""
    head = f"{'SLO ms':>7} {'policy':32} {'right':>7} {'in time':>8} {'met':>7} {'refused':>7} {'mean':>7}"
    print(f"{head} {'p95':>7} {'gain':>5}  options", file=sys.stderr)
    for r in rows:
        print(
            f"{r.slo_ms:7.2f} {r.policy:32} {r.right:7.2%} {r.right_in_time:8.2%} {r.in_time:7.2%} "
            f"{r.refused:7.2%} {r.mean_ms:7.2f} {r.p95_ms:7.2f} {r.gain:5.2f}  {r.options}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    sys.exit(main())
