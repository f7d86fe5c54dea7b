"""How many inputs fit into memory at a time.

On CPUs a process that needs too much memory is killed without a word, so the memory of a batch is estimated
before: from the tensors that one and two inputs need. GPUs raise an error, which halves the batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gati.errors import GatiError, ModelError
from gati.units import format_bytes

_CPU = torch.device("cpu")
_SPARE = 1 / 8
USABLE = 0.7  # share of the available memory: libraries need up to a quarter more, for workspaces
_CERTAIN = 0.25  # share of the available memory that needs no measurement
# Memory of a network's activations, relative to its inputs; networks for tokens make vectors of numbers.
_TIMES_INPUT, _TIMES_TOKENS = 500, 10_000
_UNLIMITED = 1 << 60  # control groups of version 1 have such a limit if they have none

T = TypeVar("T")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of main memory that this process may still use; None if the system does not say.

    The control groups of the process limit it, too, as in containers.
    """
    of_machine = _numbers(root / "proc/meminfo").get("MemAvailable:")
    found = [] if of_machine is None else [1024 * of_machine]
    for folder in _control_groups(root):
        for limit, used, kept in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, now = _number(folder / limit), _number(folder / used)
            if most is not None and now is not None and most < _UNLIMITED:
                # the system drops what it keeps of files before it ends a process
                found.append(max(0, most - now + _numbers(folder / "memory.stat").get(kept, 0)))
    return min(found, default=None)


def free_bytes(device: torch.device) -> int | None:
    """Bytes of a device's memory that this process may still use; None if the system does not say."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()


def spare_bytes(most: int, device: torch.device = _CPU) -> int:
    """How much of a device's memory may keep what could be computed again: `most`, or an eighth of it."""
    free = free_bytes(device)
    return most if free is None else min(most, int(_SPARE * free))


def _control_groups(root: Path) -> Iterator[Path]:
    """The folders of the groups that limit this process, from the innermost outwards."""
    mounted = root / "sys/fs/cgroup"
    listed = root / "proc/self/cgroup"
    for line in listed.read_text(encoding="utf-8").splitlines() if listed.is_file() else ():
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        top = mounted / kinds
        own = top / path.strip("/")
        yield from (each for each in (own, *own.parents) if each == top or top in each.parents)


def _numbers(path: Path) -> dict[str, int]:
    """The numbers of a file with a name and a number in each line."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else ()
    pairs = [line.split()[:2] for line in lines if len(line.split()) > 1]
    return {name: int(value) for name, value in pairs if value.isdigit()}


def _number(path: Path) -> int | None:
    """The number in a file; None if there is none, as "max"."""
    content = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return int(content) if content.isdigit() else None


# What a batch needs ---------------------------------------------------------------------------------------


class MemoryNeed(NamedTuple):
    """Bytes of tensors that a computation needs at a time, at most."""

    fixed_bytes: int
    input_bytes: int  # per input of a batch

    def inputs_in(self, memory_bytes: float) -> int:
        """The largest batch that fits, at least 1."""
        return max(1, int((memory_bytes - self.fixed_bytes) / max(1, self.input_bytes)))


def need_of(run: Callable[[int], Any], few: int = 1) -> MemoryNeed:
    """The need of `run(inputs)`, from what lives after each operator with `few` inputs and twice as many.

    The moments at which most lives may differ: with few inputs it may be when gradients of all weights
    exist, with many when all activations do. So the most of each is added.
    """
    small, large = _living_bytes(run, few), _living_bytes(run, 2 * few)
    if len(small) != len(large):  # other operators, for what reason ever: only the peaks are comparable
        small, large = small.max(keepdims=True), large.max(keepdims=True)
    each = np.maximum(0, large - small) // few
    return MemoryNeed(max(0, int((small - few * each).max())), int(each.max()))


def may_be_short(example: Tensor, inputs: int, times: float = 1.0) -> bool:
    """Whether `inputs` inputs like those of `example` [B, ...] might not fit, so that it is worth measuring.

    `times` is for computations that need more memory than the network's answers. False on GPUs.
    """
    available = available_bytes() if example.device.type == "cpu" else None
    if available is None:
        return False
    of_an_input = example.nbytes / max(1, len(example))
    of_an_input *= times * (_TIMES_INPUT if example.is_floating_point() else _TIMES_TOKENS)
    return inputs * of_an_input > _CERTAIN * available


def fitting(most: int, need: MemoryNeed, least: int = 1) -> int:
    """How many inputs, up to `most`, fit into the available memory at a time; at least `least`.

    Powers of two below `most`, so that a little more or less memory makes no difference.
    """
    available = available_bytes()
    inputs = most if available is None else need.inputs_in(USABLE * available)
    return most if inputs >= most else max(least, 1 << (inputs.bit_length() - 1))


def fitting_by(run: Callable[[npt.NDArray[np.int64]], object], example: Tensor, most: int) -> int:
    """How many inputs, up to `most`, fit at a time, by what `run` needs for the indices of a few of them.

    It is measured only where memory may be short for `most` inputs like those of `example` [B, ...].
    """
    if not may_be_short(example, most):
        return most
    return fitting(most, need_of(lambda few: run(np.arange(few))))


def _living_bytes(run: Callable[[int], Any], inputs: int) -> npt.NDArray[np.int64]:
    """Bytes of tensors that live after each operator of `run(inputs)`."""
    with _Watch() as watch:
        run(inputs)
    return np.array([0, *watch.living_bytes])


class _Watch(TorchDispatchMode):
    """Adds up the tensors that operators return, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.living_bytes: list[int] = []
        self._now = 0
        self._living: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        for each in tree_iter(found):
            if isinstance(each, Tensor) and each.layout == torch.strided:  # others have no storage
                self._note(each.untyped_storage())
        self.living_bytes.append(self._now)
        return found

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._living:
            return

        def freed(_: Any) -> None:
            self._now -= size
            del self._living[key]

        self._now += size
        self._living[key] = weakref.ref(storage, freed)


# Lack of memory -------------------------------------------------------------------------------------------


def is_lack_of_memory(error: BaseException | None) -> bool:
    """Whether torch had too little memory, on a GPU or on the CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def halved(inputs: int, error: BaseException, least: int = 1) -> int:
    """Half a batch, after `error`. Raises `ModelError` for one of `least` inputs, and any other `error`."""
    if not is_lack_of_memory(error):
        raise error
    if inputs <= least:
        raise _too_large(least) from error
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return max(least, inputs // 2)


def in_batches(
    count: int, most: int, run: Callable[[npt.NDArray[np.int64]], T], first: int | None = None
) -> Iterator[T]:
    """Yield `run(indices)` for all `count` indices in order, at most `most` at a time.

    If memory is short, batches are halved from then on. If `first` is given, the first batch has so many, and
    each later one twice as many as the one before.

    **Raises:** `ModelError` if one input does not fit.
    """
    start, size = 0, most if first is None else min(first, most)
    while start < count:
        indices = np.arange(start, min(start + size, count))
        try:
            found = run(indices)
        except Exception as error:
            size = most = halved(len(indices), error)
            continue
        yield found
        start += len(indices)
        size = min(most, 2 * size)


@contextmanager
def lack_of_memory_told() -> Iterator[None]:
    """Turn torch's errors about a lack of memory into a `ModelError`."""
    try:
        yield
    except GatiError:
        raise
    except Exception as error:
        if is_lack_of_memory(error):
            raise _too_large() from error
        raise


def _too_large(inputs: int = 1) -> ModelError:
    free = f"{format_bytes(available_bytes() or 0)} of main memory"
    if torch.cuda.is_available():
        free += f" and {format_bytes(torch.cuda.mem_get_info()[0])} of the GPU's"
    what = "one input does" if inputs == 1 else f"{inputs} inputs do"
    return ModelError(
        f"{what} not fit into memory with this network ({free} are free): stop other programs, use a machine "
        "with more memory, or smaller inputs (--resize, --max-length)"
    )
