"""Where to train and for how long, as pure functions.

A composition typically has one student at the input and a few exits after it, so the time goes to these.
Costs are measured first, since they need no training. Students get most of the remaining budget, then exits
at a few blocks that are spaced evenly in time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gati.errors import DataError
from gati.exploration.pace import SHOWINGS, Pace, Rounds, affordable_steps
from gati.exploration.recipes import Recipe
from gati.types import BlockProfile
from gati.units import format_bytes, percent

DEFAULT_EPOCHS = 9.0  # of exits, without a budget or a number of epochs
STUDENT_EPOCHS = 3.0  # for each epoch of exits, if the number of epochs is given
DEFAULT_STUDENT_EPOCHS = 60.0  # without a budget or a number of epochs
LEAST_EXIT_STEPS = 420  # with fewer, a predictor learns little even from small data
LEAST_STUDENT_STEPS = 1200

_STUDENT_SHARE, _EXIT_SHARE = 0.70, 0.15  # of a budget; costs, selectors and measuring take the rest
_MOST_MEASURING = 0.35
_EARLIEST, _LATEST = 0.08, 0.75  # range of default exits, as a share of the base model's time
_EXITS_BEHIND_STUDENTS, _EXITS_ALONE = 4, 8
_ONE_STUDENT_S, _TWO_STUDENTS_S = 40 * 60.0, 2 * 3600.0
_AS_FAST = 1.1
_MOST_STUDENT_SHARE = 0.7  # of the base model's time: a student rarely has a higher hit rate
_MOST_REDUCED_SHARE = (
    0.45  # of the base model's time; above it, a student is cheaper than the reduced network
)
_LEAST_LIMIT_BYTES, MOST_BYTES = 4 << 20, 32 << 20
_COPIES = 4  # of the weights in training
# More steps improve almost nothing. The larger of the two limits holds.
_MOST_STUDENT_EPOCHS, _MOST_STUDENT_STEPS = 200, 4000
_MOST_EXIT_EPOCHS, _MOST_EXIT_STEPS = 60, 1500
_LARGEST_BATCH = 128  # inputs
_PROBING_SHARE = 0.2  # of the time of a group, at most, to time a few of its steps
_FEW_PROBES, _LEAST_PROBED = 3, 2  # steps, of which the first chooses an engine, and inputs of each
_DEAR_ANSWERS, _MOST_SHOWINGS = 4.0, 30.0  # relative to the rest of a step; of each view that is answered
_WORTH_QUANTISING, _WORTH_QUANTISING_S = 300, 120.0  # batches to answer, and seconds that it takes
_LARGEST_OVERRUN = 0.05  # share of the budget that the only step of a training may take beyond its time
_MOST_FOR_EXITS = 0.35  # share of the time left that a few steps and measuring of exits may take
_FEWEST_EXIT_STEPS = 8  # what exits learn in fewer steps is worth nothing


# Where ----------------------------------------------------------------------------------------------------


def check_duration(epochs: float | None, budget_s: float | None) -> None:
    """Raise `DataError` for a number of epochs, or a budget, that is not above 0 and finite."""
    if epochs is not None and not 0 < epochs < math.inf:
        raise DataError(f"epochs must be above 0 and finite (got {epochs:g})")
    if budget_s is not None and not 0 < budget_s < math.inf:
        raise DataError(
            f"the budget must be above 0 and finite (got {budget_s:g} s): leave it out for no limit"
        )


def students_for(budget_s: float | None) -> int:
    """How many students to train. They share the time, so there are several only if there is plenty of it."""
    if budget_s is None:
        return 2
    return 1 if budget_s <= _ONE_STUDENT_S else 2 if budget_s <= _TWO_STUDENTS_S else 3


def widest_as_fast(width: int, lookup_ms: Mapping[int, float]) -> int:
    """The widest of the students whose lookups take no longer than that of `width`, but for 10 %."""
    limit_ms = lookup_ms[width] * _AS_FAST
    return max(each for each, taken_ms in lookup_ms.items() if each >= width and taken_ms <= limit_ms)


def places_for(students: int) -> int:
    """The default number of blocks at which exits are trained."""
    return _EXITS_BEHIND_STUDENTS if students else _EXITS_ALONE


def choose_places(reach_shares: Sequence[float], limit: int) -> tuple[int, ...]:
    """Indices of at most `limit` blocks that are spaced evenly in time, ascending.

    `reach_shares` is, for every block in forward order, the share of the base model's time that has passed
    at its end. Before 8 % the hidden output says too little; after 75 % there is too little left to save. If
    no block is in between, the one nearest to that range is chosen.
    """
    eligible = [place for place, share in enumerate(reach_shares) if _EARLIEST <= share <= _LATEST]
    if not eligible:
        early = [place for place, share in enumerate(reach_shares) if share < _EARLIEST]
        return tuple(early[-1:] if early else range(min(1, len(reach_shares))))
    if len(eligible) <= limit:
        return tuple(eligible)
    first, last = reach_shares[eligible[0]], reach_shares[eligible[-1]]
    chosen: list[int] = []
    for number in range(limit):
        wanted = first + (last - first) * number / max(1, limit - 1)
        # leave enough blocks for the remaining choices
        usable = eligible[len(chosen) : len(eligible) - (limit - number - 1)]
        usable = [place for place in usable if not chosen or place > chosen[-1]]
        chosen.append(min(usable, key=lambda place: abs(reach_shares[place] - wanted)))
    return tuple(chosen)


# What cannot pay ------------------------------------------------------------------------------------------


def too_slow(lookup_ms: float, block: BlockProfile, base_ms: float) -> str:
    """Why a lookup at this block cannot pay off, or "" if it may.

    A hit saves the rest of the network; a lookup that takes longer never pays off.
    """
    left_ms = base_ms - block.reach_ms
    if lookup_ms < left_ms:
        return ""
    return f"a lookup takes {lookup_ms:.3g} ms, the rest of the network {left_ms:.3g} ms"


def too_dear(lookup_ms: float, base_ms: float) -> str:
    """Why a student is not trained by default, or "" if it is."""
    if lookup_ms < _MOST_STUDENT_SHARE * base_ms:
        return ""
    return (
        f"a lookup takes {lookup_ms:.3g} ms of the network's {base_ms:.3g} ms: more than it can save "
        f"unless it answers more than {percent(_MOST_STUDENT_SHARE, 0)} of all inputs"
    )


def dearer_than_a_student(lookup_ms: float, base_ms: float) -> str:
    """Why the reduced network is not trained instead of a student, or "" if it is.

    Fewer pixels and blocks need less arithmetic, but the time to start each remaining layer stays.
    """
    if lookup_ms <= _MOST_REDUCED_SHARE * base_ms:
        return ""
    return (
        f"reduced, the network still takes {lookup_ms:.3g} of {base_ms:.3g} ms, a student less: "
        "name it with --variants"
    )


def heaviest(base_parameters: int) -> int:
    """The largest weights of a default exit in bytes: as large as the base model's, within 4 to 32 MiB."""
    return min(MOST_BYTES, max(_LEAST_LIMIT_BYTES, 4 * base_parameters))


def too_heavy(parameters: int, limit_bytes: int) -> str:
    """Why a variant with `parameters` weights is not trained by default, or "" if it is."""
    if 4 * parameters <= limit_bytes:
        return ""
    return (
        f"its weights take {4 * parameters / 2**20:.1f} MiB, and the default limit is "
        f"{limit_bytes / 2**20:.1f} MiB: name it with --variants"
    )


def too_large(parameters: int, free_bytes: int | None) -> str:
    """Why a variant with `parameters` weights cannot be trained in that much memory, or "" if it can.

    Training keeps four copies: the weights, their gradients, and two moments.
    """
    needed = _COPIES * 4 * parameters
    if free_bytes is None or needed <= free_bytes:
        return ""
    return (
        f"training its weights takes {format_bytes(needed)} of memory, and "
        f"{format_bytes(free_bytes)} are free"
    )


# How long -------------------------------------------------------------------------------------------------


def batch_size_for(training_inputs: int) -> int:
    """Inputs per step; fewer if there are few training inputs."""
    return max(8, min(_LARGEST_BATCH, training_inputs // 8))


def steps_for_epochs(epochs: float, training_inputs: int, batch_size: int, *, least: int) -> int:
    """Convert epochs to steps; `least` gives small data sets more epochs."""
    return max(round(epochs * steps_an_epoch(training_inputs, batch_size)), least)


def most_steps(training_inputs: int, batch_size: int, *, students: bool) -> int:
    """The most steps that are useful, however much time there is."""
    epochs, steps = (
        (_MOST_STUDENT_EPOCHS, _MOST_STUDENT_STEPS) if students else (_MOST_EXIT_EPOCHS, _MOST_EXIT_STEPS)
    )
    return max(epochs * steps_an_epoch(training_inputs, batch_size), steps)


def useful_rounds(training_inputs: int, batch_size: int, recipe: Recipe) -> Rounds | None:
    """The useful rounds of views of the training inputs; None for a recipe whose views never repeat."""
    fewest = recipe.rounds
    if fewest is None:
        return None
    if recipe.enough_views is None:
        return Rounds(fewest, fewest, fewest)
    an_epoch = steps_an_epoch(training_inputs, batch_size)
    epochs = most_steps(training_inputs, batch_size, students=True) // an_epoch
    most = epochs // SHOWINGS
    enough = min(math.ceil(recipe.enough_views / max(1, training_inputs)), most)
    if recipe.kept_views is not None:
        most = min(most, recipe.kept_views // max(1, training_inputs))
    return Rounds(fewest, enough, most)


def rounds_of_steps(steps: int, training_inputs: int, batch_size: int, recipe: Recipe) -> int | None:
    """Rounds of views in `steps` steps of a recipe; None if its views never repeat."""
    useful = useful_rounds(training_inputs, batch_size, recipe)
    an_epoch = steps_an_epoch(training_inputs, batch_size)
    return None if useful is None else useful.in_steps(steps, steps_per_round=an_epoch)


def answered_batches(
    left_s: float, pace: Pace, training_inputs: int, batch_size: int, recipe: Recipe
) -> int | None:
    """How many batches of views to answer if answers are dear and leave too few steps; None if not.

    With the usual rounds, a slow network answers all the time: each view is shown once, in a few steps. So
    answers get the time that is left by as many steps as students need, and by as many as show each of the
    fewest rounds twice. If that is less than half, they get half, unless steps would show each view more than
    30 times.
    """
    useful = useful_rounds(training_inputs, batch_size, recipe)
    if useful is None or pace.answer_s < _DEAR_ANSWERS * pace.learn_s:
        return None
    an_epoch = steps_an_epoch(training_inputs, batch_size)
    needed = max(LEAST_STUDENT_STEPS, SHOWINGS * useful.fewest * an_epoch)
    _, steps = _with_whole_rounds(left_s, pace, training_inputs, batch_size, recipe)
    if steps >= needed:
        return None
    half = left_s / 2 / pace.answer_s
    enough = left_s / (pace.answer_s + _MOST_SHOWINGS * pace.learn_s)
    others = (left_s - needed * pace.learn_s) / pace.answer_s
    most = max(useful.fewest, useful.enough) * an_epoch
    return max(1, min(most, int(max(half, enough, others))))


class ProbeSize(NamedTuple):
    """How many steps to time, and with how many inputs each."""

    steps: int
    batch_size: int


def probe_size(usual: ProbeSize, answer_s: float, allowed_s: float, engine_calls: int) -> ProbeSize:
    """The steps to time before a training that may take `allowed_s` seconds.

    They are as usual unless they take too much of that time, because an answer takes `answer_s` seconds per
    input; choosing an engine for answers needs `engine_calls` further batches.
    """
    most_inputs = _PROBING_SHARE * allowed_s / answer_s if answer_s > 0 else math.inf
    if (usual.steps + engine_calls) * usual.batch_size <= most_inputs:
        return usual
    steps = min(usual.steps, _FEW_PROBES)
    inputs = int(most_inputs / (steps + engine_calls))
    return ProbeSize(steps, min(usual.batch_size, max(_LEAST_PROBED, inputs)))


def is_worth_a_step(step_s: float, allowed_s: float, budget_s: float | None) -> bool:
    """Whether a training of `allowed_s` seconds may begin: a step fits, or exceeds the budget by little."""
    return step_s <= allowed_s or budget_s is None or step_s <= _LARGEST_OVERRUN * budget_s


def too_slow_for_exits(step_s: float, held_out_s: float, left_s: float) -> str:
    """Why exits are not trained behind students, or "" if they are.

    A step runs the network on a batch, in `step_s` seconds, and measuring runs it on all held-out inputs.
    """
    least_s = _FEWEST_EXIT_STEPS * step_s + held_out_s
    if least_s <= _MOST_FOR_EXITS * left_s:
        return ""
    return (
        f"a few steps and measuring take {least_s:.0f} of the {left_s:.0f} seconds that are left, in which "
        "students learn more: give it more time"
    )


class Affordable(NamedTuple):
    """Steps that fit into a time, rounds of views as `rounds_of_steps`, and batches a round if not all."""

    steps: int
    rounds: int | None
    places: int | None


def affordable(
    left_s: float, pace: Pace, training_inputs: int, batch_size: int, recipe: Recipe, *, students: bool
) -> Affordable:
    """The useful steps that fit into a time, and which views they show."""
    an_epoch = steps_an_epoch(training_inputs, batch_size)
    answered = answered_batches(left_s, pace, training_inputs, batch_size, recipe)
    places: int | None = None
    if answered is None:
        rounds, steps = _with_whole_rounds(left_s, pace, training_inputs, batch_size, recipe)
    else:
        rounds = math.ceil(answered / an_epoch)
        places = answered // rounds
        steps = affordable_steps(left_s, pace, steps_per_round=places, rounds=rounds)
    most = most_steps(training_inputs, batch_size, students=students)
    return Affordable(min(steps, most), rounds, places)


def _with_whole_rounds(
    left_s: float, pace: Pace, training_inputs: int, batch_size: int, recipe: Recipe
) -> tuple[int | None, int]:
    """The rounds of views of all inputs, and the steps that fit into a time with them."""
    an_epoch = steps_an_epoch(training_inputs, batch_size)
    useful = useful_rounds(training_inputs, batch_size, recipe)
    rounds = None if useful is None else useful.within(left_s, pace, steps_per_round=an_epoch)
    return rounds, affordable_steps(left_s, pace, steps_per_round=an_epoch, rounds=rounds)


def pays_quantising(left_s: float, pace: Pace, training_inputs: int, batch_size: int, recipe: Recipe) -> bool:
    """Whether students of pictures wait for answers so long that 8-bit integers pay, which halve the time.

    Quantising a network takes as long as answering a few dozen batches, and no less than seconds.
    """
    if pace.answer_s + pace.learn_s <= 0:
        return False
    steps, rounds, places = affordable(left_s, pace, training_inputs, batch_size, recipe, students=True)
    shown = steps if rounds is None else rounds * (places or steps_an_epoch(training_inputs, batch_size))
    answered = min(steps, shown)
    return answered >= _WORTH_QUANTISING and answered * pace.answer_s >= _WORTH_QUANTISING_S


def steps_an_epoch(training_inputs: int, batch_size: int) -> int:
    """Batches per epoch."""
    return max(1, training_inputs // batch_size)


def reserve(measuring_s: float, left_s: float, needed_s: float = 0.0) -> float:
    """Seconds of the remaining time to reserve for measuring, which should take `measuring_s`.

    At most a fixed share, so that time is left for training; measuring is cut short if it needs more. But of
    the time left, it gets the `needed_s` that cannot be cut.
    """
    return max(min(measuring_s, _MOST_MEASURING * left_s), min(needed_s, left_s))


def divide_time(left_s: float, *, students: int, exits: int) -> tuple[float, float]:
    """Divide the seconds that are left for training between students and exits, 70 to 15."""
    of_students = _STUDENT_SHARE if students else 0.0
    of_exits = _EXIT_SHARE if exits else 0.0
    left_s, whole = max(0.0, left_s), of_students + of_exits
    return (left_s * of_students / whole, left_s * of_exits / whole) if whole else (0.0, 0.0)
