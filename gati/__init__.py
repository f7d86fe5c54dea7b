"""Serve trained neural networks with learned caches: an easy input leaves the network early.

Verbs of the command line that need no server, camera or trace are functions here, with the same names:

    library = gati.explore("torchvision:resnet18", "mine.pt", data="val.npz", out="runs/resnet18")
    composition = gati.compose("runs/resnet18", accuracy=0.99)
    engine = gati.load("runs/resnet18")
    predictions = engine(images)  # images: float32 [N, C, H, W], preprocessed

Names load on first use, so that `import gati` costs nothing. Rooms have nouns for names (`gati.composition`),
verbs are functions (`gati.compose`), so that neither hides the other.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from gati.errors import GatiError
from gati.version import __version__ as __version__

if TYPE_CHECKING:
    from gati.cli.demo import demo as demo
    from gati.composition.compose import compose as compose
    from gati.composition.composition import Composition as Composition
    from gati.composition.explain import Explanation as Explanation
    from gati.composition.explain import explain as explain
    from gati.composition.headroom import Headroom as Headroom
    from gati.composition.load import load as load
    from gati.composition.pareto import ParetoPoint as ParetoPoint
    from gati.composition.pareto import compose_within_latency as compose_within_latency
    from gati.composition.pareto import pareto as pareto
    from gati.engine.concurrent import ConcurrentEngine as ConcurrentEngine
    from gati.engine.engine import Engine as Engine
    from gati.engine.exits import Prediction as Prediction
    from gati.evaluation.bench import bench as bench
    from gati.evaluation.bench_result import Bench as Bench
    from gati.evaluation.certify import Recertification as Recertification
    from gati.evaluation.certify import certify as certify
    from gati.evaluation.diagnosis import Diagnosis as Diagnosis
    from gati.evaluation.doctor import doctor as doctor
    from gati.evaluation.evaluate import Evaluation as Evaluation
    from gati.evaluation.evaluate import evaluate as evaluate
    from gati.evaluation.predict import predict as predict
    from gati.evaluation.report import report as report
    from gati.exploration.explore import explore as explore
    from gati.exploration.further import explore_more as explore_more
    from gati.exploration.inspect import ModelBlocks as ModelBlocks
    from gati.exploration.inspect import blocks as blocks
    from gati.exploration.library import Library as Library
    from gati.formats.export import Exported as Exported
    from gati.formats.export import export as export

# ONNX Runtime, OpenVINO and NNCF would report to their makers how they are used; the last two fork for that.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

__all__ = [
    "Bench",
    "Composition",
    "ConcurrentEngine",
    "Diagnosis",
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
    "doctor",
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
    "Bench": "gati.evaluation.bench_result",
    "Composition": "gati.composition.composition",
    "ConcurrentEngine": "gati.engine.concurrent",
    "Diagnosis": "gati.evaluation.diagnosis",
    "Engine": "gati.engine.engine",
    "Evaluation": "gati.evaluation.evaluate",
    "Explanation": "gati.composition.explain",
    "Exported": "gati.formats.export",
    "Headroom": "gati.composition.headroom",
    "Library": "gati.exploration.library",
    "ModelBlocks": "gati.exploration.inspect",
    "ParetoPoint": "gati.composition.pareto",
    "Prediction": "gati.engine.exits",
    "Recertification": "gati.evaluation.certify",
    "bench": "gati.evaluation.bench",
    "blocks": "gati.exploration.inspect",
    "certify": "gati.evaluation.certify",
    "compose": "gati.composition.compose",
    "compose_within_latency": "gati.composition.pareto",
    "demo": "gati.cli.demo",
    "doctor": "gati.evaluation.doctor",
    "evaluate": "gati.evaluation.evaluate",
    "explain": "gati.composition.explain",
    "explore": "gati.exploration.explore",
    "explore_more": "gati.exploration.further",
    "export": "gati.formats.export",
    "load": "gati.composition.load",
    "pareto": "gati.composition.pareto",
    "predict": "gati.evaluation.predict",
    "report": "gati.evaluation.report",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'gati' has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
