"""The lower bounds that SECURITY.md names are those that are installed with."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


def test_lower_bounds_are_those_of_the_advisories(repository: Path) -> None:
    """Whoever adds a dependency looks it up, and says so."""
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    bounds = dict(re.findall(r"^([\w.-]+)(?:\[\w+\])?>=([\d.]+)", "\n".join(wanted), re.MULTILINE))
    told = (repository / "SECURITY.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([\w.-]+) \| ([\d.]+) \|", told, re.MULTILINE))
    (others,) = re.findall(r"affects the others at the versions allowed: ([^.]+)\.", told)
    assert len(rows) >= 14
    assert {name: bounds.get(name) for name in rows} == rows
    assert sorted(bounds.keys() - rows.keys()) == re.split(r",\s+", others)


@pytest.mark.slow
def test_engines_report_nothing_to_their_makers(repository: Path, tmp_path: Path) -> None:
    """Each command sent an event for OpenVINO to Google Analytics, and one for ONNX Runtime to Microsoft."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("openvino")
    program = """
import gati
import numpy, onnxruntime
from onnx import TensorProto, helper
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "one", [x], [y])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": numpy.ones(1, numpy.float32)})
import openvino
openvino.convert_model
"""
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(repository)}  # they look for CI and caches
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=tmp_path, check=True)
    assert not list(tmp_path.iterdir()), "they note there who they say it is"
