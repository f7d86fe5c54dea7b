"""Finding the repeated units of a network, after which learned caches can sit.

A block is a child of a stage (an `nn.Sequential`, `nn.ModuleList` or subclass) at any depth. What counts as a
block, in the order tried:

* a module with at least two weight layers that is not itself a stage of such modules: residual blocks,
  inverted residuals, ConvNeXt blocks, transformer layers, fire modules;
* a dense block or a transition of a DenseNet. Single dense layers are excluded: each outputs only a few new
  channels, too few to tell the class, while a dense block outputs all of them;
* in flat stages (VGG, AlexNet), a run of convolutions up to a pooling, named after the pooling;
* in a network without stages, direct children of a repeated class (GoogLeNet's inception modules).

Stems, downsampling between stages and classifiers are not blocks: they have one weight layer or occur once.
Nor are modules called `base` or `recall`, the exits of answers that did not leave at a block.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from torch import Tensor, nn

from gati.errors import BlockError
from gati.model.hooks import forward_order
from gati.types import OTHER_EXITS

_POOLINGS = frozenset({"MaxPool2d", "AvgPool2d", "MaxPool1d", "AvgPool1d", "LPPool2d", "FractionalMaxPool2d"})
_CONVOLUTIONS = frozenset({"Conv1d", "Conv2d", "Conv3d"})
_STAGES = frozenset({"Sequential", "ModuleList"})
_DENSE_BLOCKS = frozenset({"ModuleDict", "_DenseBlock", "DenseBlock"})
_TRANSITIONS = frozenset({"_Transition", "DenseTransition"})  # nn.Sequential, unless exported
_LISTED_NAMES = 40


def find_blocks(
    module: nn.Module, pattern: str | None = None, *, example: Tensor | None = None
) -> tuple[str, ...]:
    r"""Return the qualified names of the network's blocks in forward order.

    `pattern` selects them instead: shell globs or regular expressions over module names, separated by commas
    (`layer?.*`, `blocks\.[02468]`). A glob's `*` does not match a dot, `**` does; a part that matches nothing
    as a glob is read as an expression. The order is that of registration, which is the forward order in all
    architectures above; with `example`, an input [B, ...], it is that of a forward pass, and blocks that do
    not run are excluded.

    **Raises:** `BlockError` if there are none, with names to choose from.
    """
    names = _matching(module, pattern) if pattern is not None else _automatic(module)
    if example is not None:
        names = forward_order(module, names, example)
    if not names:
        raise BlockError(
            f"no blocks found in {_kind(module)}; name them with --blocks, from: {_listing(module)}"
        )
    return tuple(names)


def _automatic(module: nn.Module) -> list[str]:
    names = _inside(module, "") or _flat_stages(module) or _repeated_children(module) or _small_units(module)
    return [name for name in names if name not in OTHER_EXITS]


def _inside(module: nn.Module, prefix: str) -> list[str]:
    """Return the blocks below `module`; `prefix` is its qualified name with a dot, or empty."""
    names: list[str] = []
    in_stage = _is_stage(module)
    dense = in_stage and any(_is_dense_block(child) for child in module.children())
    leaf_units = _leaf_units(module) if in_stage else set()
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if _is_dense_block(child) or name in leaf_units or (dense and _ends_with_pooling(child)):
            names.append(path)
        elif in_stage and not _is_stage(child) and _weight_layers(child) >= 2:
            deeper = _inside(child, f"{path}.")
            names.extend(deeper if _has_siblings(deeper) else [path])
        else:
            deeper = _inside(child, f"{path}.")
            names.extend(deeper)
    return names


def _is_stage(module: nn.Module) -> bool:
    return _is_a(module, _STAGES)


def _is_dense_block(module: nn.Module) -> bool:
    """A dict of layers with its own forward: the layers feed each other, so only the dict has an output."""
    return (
        _is_a(module, _DENSE_BLOCKS)
        and type(module).forward is not nn.ModuleDict.forward
        and _weight_layers(module) >= 2
    )


def _leaf_units(stage: nn.Module) -> set[str]:
    """Return children that are an `nn.Sequential` of plain layers, two or more with weights, if repeated."""
    units = {
        name
        for name, child in stage.named_children()
        if _is_a(child, _STAGES) and _weight_layers(child) >= 2 and not any(_grandchildren(child))
    }
    return units if len(units) >= 2 else set()


def _grandchildren(module: nn.Module) -> Iterable[bool]:
    return (any(True for _ in child.children()) for child in module.children())


def _ends_with_pooling(module: nn.Module) -> bool:
    leaves = [layer for layer in module.modules() if not any(True for _ in layer.children())]
    return _is_a(module, _STAGES | _TRANSITIONS) and len(leaves) > 1 and _is_a(leaves[-1], _POOLINGS)


def _has_siblings(names: list[str]) -> bool:
    parents = Counter(name.rpartition(".")[0] for name in names)
    return any(count >= 2 for count in parents.values())


def _flat_stages(module: nn.Module) -> list[str]:
    """Return the poolings that end runs of convolutions, in each `nn.Sequential` with at least two runs."""
    names: list[str] = []
    for path, sequence in module.named_modules():
        if not _is_a(sequence, _STAGES):
            continue
        found, convolutions = [], 0
        for name, child in sequence.named_children():
            convolutions += _is_a(child, _CONVOLUTIONS)
            if convolutions and _is_a(child, _POOLINGS):
                found.append(f"{path}.{name}" if path else name)
                convolutions = 0
        names.extend(found if len(found) >= 2 else [])
    return names


def _repeated_children(module: nn.Module) -> list[str]:
    """Return the children that contain convolutions, or their children, if a class among them is repeated."""
    # Auxiliary classifiers only run in training.
    units = {name: child for name, child in module.named_children() if _is_unit(child)}
    units = {name: child for name, child in units.items() if not _kind(child).endswith("Aux")}
    classes = Counter(_kind(child) for child in units.values())
    if max(classes.values(), default=0) < 2:
        return []
    # Inception-v3 mixes InceptionA to InceptionE; one repeated class is enough.
    names: list[str] = []
    for name, child in units.items():
        deeper = [f"{name}.{unit}" for unit in _units_of_stage(child)]
        names.extend(deeper or [name])
    return names


def _small_units(module: nn.Module) -> list[str]:
    """Return the children of stages that wrap a single weight layer, if their class is repeated."""
    names: list[str] = []
    for path, stage in module.named_modules():
        if not _is_stage(stage):
            continue
        wrapped = {
            name: type(child)
            for name, child in stage.named_children()
            if _weight_layers(child) and any(True for _ in child.children()) and not _is_stage(child)
        }
        repeated = Counter(wrapped.values())
        names += [f"{path}.{name}" if path else name for name, kind in wrapped.items() if repeated[kind] >= 2]
    return names


def _units_of_stage(module: nn.Module) -> list[str]:
    """Return the children's names if all children with weights are units of one class (timm's RegNet)."""
    weighted = {name: child for name, child in module.named_children() if _weight_layers(child)}
    one_class = len({type(child) for child in weighted.values()}) == 1
    units = all(_is_unit(child) and not _is_stage(child) for child in weighted.values())
    return list(weighted) if one_class and units else []


def _is_a(module: nn.Module, classes: frozenset[str]) -> bool:
    """Whether a module is of one of the classes, by name: an exported program knows only names."""
    if isinstance(getattr(module, "_ty", None), str):
        return _kind(module) in classes
    return any(base.__name__ in classes for base in type(module).__mro__)


def _is_unit(module: nn.Module) -> bool:
    return _weight_layers(module) >= 2 and any(_is_a(layer, _CONVOLUTIONS) for layer in module.modules())


def _weight_layers(module: nn.Module) -> int:
    """Count layers with weights of two or more dimensions: convolutions, linear and attention, not norms."""
    return sum(
        any(parameter.dim() >= 2 for parameter in layer.parameters(recurse=False))
        for layer in module.modules()
    )


def _matching(module: nn.Module, pattern: str) -> list[str]:
    names = [name for name, _ in module.named_modules() if name]
    wanted: set[str] = set()
    for part in (part.strip() for part in pattern.split(",")):
        found = [name for name in names if _glob(part).fullmatch(name)]
        wanted.update(found or _matching_expression(names, part))
    if not wanted:
        raise BlockError(f"no module of {_kind(module)} matches {pattern!r}; choose from: {_listing(module)}")
    return [name for name in names if name in wanted]


def _matching_expression(names: list[str], part: str) -> list[str]:
    try:
        expression = re.compile(part)
    except re.error:  # meant as a glob
        return []
    return [name for name in names if expression.fullmatch(name)]


def _glob(part: str) -> re.Pattern[str]:
    """Compile a shell glob over dotted names: `**` matches dots, `*` and `?` do not."""
    pieces = re.split(r"(\*\*|\*|\?|\[[^\]]+\])", part)
    meaning = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    return re.compile(
        "".join(
            meaning.get(p)
            or (p.replace("[!", "[^") if p.startswith("[") and p.endswith("]") else re.escape(p))
            for p in pieces
        )
    )


def _kind(module: nn.Module) -> str:
    exported_class = getattr(module, "_ty", None)
    if not isinstance(exported_class, str):
        return type(module).__name__
    kind = exported_class.rpartition(".")[2]
    # A list is never called, so that an exported program gives it the class of what is in it.
    inside = {name: getattr(child, "_ty", None) for name, child in module.named_children()}
    is_list = exported_class in inside.values() and all(map(str.isdecimal, inside))
    return "ModuleList" if is_list and kind != "Sequential" else kind


def _listing(module: nn.Module) -> str:
    names = [name for name, child in module.named_modules() if name and _weight_layers(child)]
    if not names:
        return "(it has no submodules with weights)"
    more = f", and {len(names) - _LISTED_NAMES} more" if len(names) > _LISTED_NAMES else ""
    return ", ".join(names[:_LISTED_NAMES]) + more
