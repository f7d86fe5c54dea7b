"""Serve trained neural networks with learned caches: an easy input leaves the network early.

Every verb of the command line is a function here, with the same name:

    library = gati.explore("torchvision:resnet18", data="val.npz", out="runs/resnet18")
    composition = gati.compose("runs/resnet18", accuracy=0.99)
    engine = gati.load("runs/resnet18")
    predictions = engine(images)  # images: float32 [N, C, H, W], preprocessed

Names load on first use, so that `import gati` costs nothing. Some verbs have the name of the room where their
work is done: `gati.compose` is a module that can be called (`gati.verb`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gati.errors import GatiError
from gati.version import __version__ as __version__

if TYPE_CHECKING:
    from gati.bench.bench import bench as bench
    from gati.bench.result import Bench as Bench
    from gati.compose.compose import compose as compose
    from gati.compose.composition import Composition as Composition
    from gati.compose.explain import Explanation as Explanation
    from gati.compose.explain import explain as explain
    from gati.compose.headroom import Headroom as Headroom
    from gati.compose.pareto import ParetoPoint as ParetoPoint
    from gati.compose.pareto import compose_within_latency as compose_within_latency
    from gati.compose.pareto import pareto as pareto
    from gati.demo import demo as demo
    from gati.explore.explore import explore as explore
    from gati.explore.further import explore_more as explore_more
    from gati.explore.library import Library as Library
    from gati.export.export import Exported as Exported
    from gati.export.export import export as export
    from gati.report.report import report as report
    from gati.runtime.certify import Recertification as Recertification
    from gati.runtime.certify import certify as certify
    from gati.runtime.concurrent import ConcurrentEngine as ConcurrentEngine
    from gati.runtime.engine import Engine as Engine
    from gati.runtime.engine import Prediction as Prediction
    from gati.runtime.evaluate import Evaluation as Evaluation
    from gati.runtime.evaluate import evaluate as evaluate
    from gati.runtime.inspect import ModelBlocks as ModelBlocks
    from gati.runtime.inspect import blocks as blocks
    from gati.runtime.load import load as load
    from gati.runtime.predict import predict as predict

__all__ = [
    "Bench",
    "Composition",
    "ConcurrentEngine",
    "Engine",
    "Evaluation",
    "Explanation",
    "Exported",
    "GatiError",
    "Headroom",
    "Library",
    "ModelBlocks",
    "ParetoPoint",
    "Prediction",
    "Recertification",
    "__version__",
    "bench",
    "blocks",
    "certify",
    "compose",
    "compose_within_latency",
    "demo",
    "evaluate",
    "explain",
    "explore",
    "explore_more",
    "export",
    "load",
    "pareto",
    "predict",
    "report",
]

_HOMES = {
    "Bench": "gati.bench.result",
    "Composition": "gati.compose.composition",
    "ConcurrentEngine": "gati.runtime.concurrent",
    "Engine": "gati.runtime.engine",
    "Evaluation": "gati.runtime.evaluate",
    "Explanation": "gati.compose.explain",
    "Exported": "gati.export.export",
    "Headroom": "gati.compose.headroom",
    "Library": "gati.explore.library",
    "ModelBlocks": "gati.runtime.inspect",
    "ParetoPoint": "gati.compose.pareto",
    "Prediction": "gati.runtime.engine",
    "Recertification": "gati.runtime.certify",
    "bench": "gati.bench",
    "blocks": "gati.runtime.inspect",
    "certify": "gati.runtime.certify",
    "compose": "gati.compose",
    "compose_within_latency": "gati.compose.pareto",
    "demo": "gati.demo",
    "evaluate": "gati.runtime.evaluate",
    "explain": "gati.compose.explain",
    "explore": "gati.explore",
    "explore_more": "gati.explore.further",
    "export": "gati.export",
    "load": "gati.runtime.load",
    "pareto": "gati.compose.pareto",
    "predict": "gati.runtime.predict",
    "report": "gati.report",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'gati' has no attribute {name!r}")
    home = import_module(_HOMES[name])
    if home.__name__ == f"gati.{name}":  # a room that is called: importing it has bound it here
        return home
    value: object = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
