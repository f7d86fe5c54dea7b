"""What a new process imports."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import REPOSITORY

__all__ = ["heavy_imports_of"]

# Slow to import, and nothing of it is needed to serve a small network of the user's own.
HEAVY = frozenset({
    "torch._dynamo", "torch._inductor", "sympy", "onnx", "onnxscript", "nncf", "scipy", "sklearn", "pandas",
    "matplotlib", "torchvision", "timm", "transformers", "tokenizers", "ray", "gurobipy", "highspy", "cv2",
    "av", "fsspec", "fastapi",
})  # fmt: skip


def heavy_imports_of(program: str, *arguments: str) -> set[str]:
    """Run a Python program in a process of its own, and return which slow modules it has at its end."""
    told = [sys.executable, "-c", f"{program}\nimport sys\nprint(*sys.modules)", *arguments]
    done = subprocess.run(told, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    assert "torch" in imported
    return HEAVY.intersection(imported)
