"""The verb `gati query`: asks a running `gati serve`; `gati.cli` registers it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gati.cli.asking import TIMEOUT_S, AskedServer
from gati.cli.options import SERVER_URL, ServerKey, ServerUrl
from gati.errors import DataError, RequestError
from gati.units import parse_duration, percent

_BYTES, _JSON, _TEXT = "application/octet-stream", "application/json", "text/plain"
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # of images, by their number of channels
_LATE_FACTOR = 2.0  # the time after which gati serve gives up by default, in SLOs
_LONGEST_S = 3600.0  # the longest that it can be told to allow
_RECORDINGS = {".wav": "audio/wav", ".flac": "audio/flac"}


def query(
    name: Annotated[
        str, typer.Argument(metavar="PIPELINE|MODEL", help="Name of the pipeline or model in gati serve.")
    ],
    image: Annotated[
        str | None,
        typer.Argument(
            metavar="[IMAGE|RECORDING|TEXT]",
            help="An image file, a WAV or FLAC file, or a text.",
        ),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="TEXT", help="A text; repeat the option for several."),
    ] = None,
    slo: Annotated[
        str | None, typer.Option("--slo", metavar="TIME", help="Latency SLO, such as 80ms.")
    ] = None,
    url: ServerUrl = SERVER_URL,
    priority: Annotated[int | None, typer.Option(help="Requests of priority 1 are served first.")] = None,
    api_key: ServerKey = None,
) -> None:
    """Query a served pipeline or model with an image, a text or a recording; show answers, exits, latency."""
    parameters: dict[str, Any] = {}
    timeout_s = TIMEOUT_S
    if slo is not None:
        slo_s = parse_duration(slo)
        parameters["latency_slo_ms"] = 1e3 * slo_s
        timeout_s += min(_LATE_FACTOR * slo_s, _LONGEST_S)
    server = AskedServer(url, api_key, _RefusedError, timeout_s)
    if priority is not None:
        parameters["priority"] = priority
    if (image is None) == (not text):
        raise DataError("give one image file, one recording or one text, or repeat --text")
    if image is not None and _names_a_file(image) and Path(image).suffix.lower() in _RECORDINGS:
        _query_recording(server, name, Path(image), parameters)
    elif image is not None and _names_a_file(image):
        _query_image(server, name, Path(image), parameters)
    else:
        _query_texts(server, name, text or [str(image)], parameters)


def _query_texts(server: AskedServer, name: str, texts: Sequence[str], parameters: Mapping[str, Any]) -> None:
    """Send texts to a pipeline one by one, or to a model all at once."""
    try:
        encoded = [one.encode() for one in texts]
    except UnicodeEncodeError as error:  # bytes of another encoding, as the shell has passed them on
        raise DataError("the text is not UTF-8; write it in UTF-8") from error
    if _is_pipeline(server, name):
        for one in encoded:
            _show_answer(server.ask("POST", _query_of(name), parameters, one, _TEXT))
        return
    taken = {"name": "text", "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)}
    body = json.dumps({"inputs": [taken], "parameters": dict(parameters)}).encode()
    _show_answers(texts, server.ask("POST", _inference_of(name), content=body, kind=_JSON))


def _query_image(server: AskedServer, name: str, path: Path, parameters: Mapping[str, Any]) -> None:
    """Send an image file to a pipeline, or its pixels to a model."""
    content = _read(path)
    if _is_pipeline(server, name):
        _show_answer(server.ask("POST", _query_of(name), parameters, content, _BYTES))
        return
    from gati.model.pictures import open_image

    channels = server.ask("GET", f"/v2/models/{quote(name, safe='')}")["parameters"]["image_shape"][2]
    mode = _MODES.get(channels)
    if mode is None:
        raise DataError(f"{name} takes no image files: send what its network takes to {_inference_of(name)}")
    picture = open_image(path).convert(mode)
    pixels = picture.tobytes()
    taken = {
        "name": "input",
        "shape": [1, picture.height, picture.width, channels],
        "datatype": "UINT8",
        "parameters": {"binary_data_size": len(pixels)},
    }
    _infer(server, name, taken, pixels, parameters, path.name)


def _query_recording(server: AskedServer, name: str, path: Path, parameters: Mapping[str, Any]) -> None:
    """Send a recording to a pipeline or a model."""
    content = _read(path)
    if _is_pipeline(server, name):
        kind = _RECORDINGS[path.suffix.lower()]
        _show_answer(server.ask("POST", _query_of(name), parameters, content, kind))
        return
    size = {"binary_data_size": 4 + len(content)}
    taken = {"name": "recording", "shape": [1], "datatype": "BYTES", "parameters": size}
    _infer(server, name, taken, len(content).to_bytes(4, "little") + content, parameters, path.name)


def _infer(
    server: AskedServer,
    model: str,
    taken: Mapping[str, Any],
    content: bytes,
    parameters: Mapping[str, Any],
    shown: str,
) -> None:
    """Send one binary input to a model and show its answer as that of `shown`."""
    head = json.dumps({"inputs": [taken], "parameters": dict(parameters)}).encode()
    answer = server.ask(
        "POST", _inference_of(model), content=head + content, kind=_BYTES, head_length=len(head)
    )
    _show_answers([shown], answer)


def _is_pipeline(server: AskedServer, name: str) -> bool:
    return name in {each["name"] for each in server.ask("GET", "/v1/pipelines")["pipelines"]}


def _inference_of(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}/infer"


def _query_of(pipeline: str) -> str:
    return f"/v1/pipelines/{quote(pipeline, safe='')}/query"


def _names_a_file(given: str) -> bool:
    """Whether an argument is a path, not a text: it names an existing file, or is one word with a suffix."""
    return os.path.isfile(given) or (len(given.split()) == 1 and Path(given).suffix != "")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot read {path} ({error.strerror}); give an image file or a recording, or a text with --text"
        ) from error


class _RefusedError(RequestError):
    """The server's reason for refusing."""

    exit_status = 1


def _show_answer(answer: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.tree import Tree

    met = {True: "SLO met", False: "SLO missed", None: "no SLO"}[answer["slo_met"]]
    slo = "" if answer["latency_slo_ms"] is None else f" of {answer['latency_slo_ms']:.9g} ms"
    tree = Tree(f"[bold]{escape(answer['label'])}[/bold]  {answer['latency_ms']:.1f} ms{slo}, {met}")
    for stage in answer["stages"]:
        left = f"left after {stage['exit']}" if stage["from_cache"] else "ran to the end"
        label, likely = f"[bold]{escape(stage['label'])}[/bold]", percent(stage["probability"], 0)
        branch = tree.add(f"{escape(stage['stage'])}: {label} ({likely})")
        ran = f"{stage['option']} ({stage['model']}, version {stage['version']}) {left}"
        budget = f" of {stage['budget_ms']:.1f} ms" if slo else ""  # otherwise a share of the timeout
        branch.add(escape(f"{ran}; {stage['latency_ms']:.1f} ms{budget}"))
    for name in answer["skipped"]:
        tree.add(f"[dim]{escape(name)}: skipped[/dim]")
    Console(highlight=False).print(tree)


def _show_answers(inputs: Sequence[str], answer: Mapping[str, Any]) -> None:
    from gati.cli.tables import new_table, show

    values = {each["name"]: each["data"] for each in answer["outputs"]}
    classes = len(values["probabilities"]) // len(inputs)
    table = new_table("input", "class", "probability", "left after", left=(0, 1, 3))
    rows = zip(inputs, values["class_index"], values["class_name"], values["exit"], strict=True)
    for number, (given, index, name, place) in enumerate(rows):
        probability = values["probabilities"][number * classes + index]
        table.add_row(given, name, percent(probability), place)
    show(table)
    parameters = answer["parameters"]
    print(f"version {answer['model_version']}, {parameters['latency_ms']:.1f} ms")
    if "promise" in parameters:
        print(parameters["promise"])
