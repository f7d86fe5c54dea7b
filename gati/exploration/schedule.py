"""Where to train and for how long: pure decisions, so that a reader can check them.

What serves is one composition: a student at the input and a few exits behind it. So time goes there. Costs
come first, they need no training; of the budget that is left when they are known, students get most, then
exits at a few places along the network, at even distances of time.
"""

from __future__ import annotations

from collections.abc import Sequence

from gati.types import BlockProfile

DEFAULT_EPOCHS = 9.0  # of exits; students get so many times more
STUDENT_EPOCHS = 3.0  # for each epoch of exits
DEFAULT_STUDENT_EPOCHS = 60.0  # where there is neither a budget nor a number
LEAST_EXIT_STEPS = 420  # fewer teach a predictor little, however small the data
LEAST_STUDENT_STEPS = 1200

_STUDENT_SHARE, _EXIT_SHARE = 0.70, 0.15  # of a budget; costs, selectors and measuring take the rest
_MOST_MEASURING = 0.35
_EARLIEST, _LATEST = 0.08, 0.75  # share of the base model's time at which an exit by default may sit
_EXITS_BEHIND_STUDENTS, _EXITS_ALONE = 4, 8
_ONE_STUDENT_S, _TWO_STUDENTS_S = 40 * 60.0, 2 * 3600.0
_DEAREST = 0.7  # share of the base model's time: a student rarely answers more
_DEAREST_REDUCED = 0.45  # of the reduced network, in whose place a student would be cheaper
_LEAST_LIMIT_BYTES, MOST_BYTES = 4 << 20, 32 << 20
# More teach next to nothing. In epochs, but small sets are walked more often.
_MOST_STUDENT_EPOCHS, _MOST_STUDENT_STEPS = 200, 4000
_MOST_EXIT_EPOCHS, _MOST_EXIT_STEPS = 60, 1500


# Where ----------------------------------------------------------------------------------------------------


def students_for(budget_s: float | None) -> int:
    """How many students to train: more than one share the time, so only where there is plenty of it."""
    if budget_s is None:
        return 2
    return 1 if budget_s <= _ONE_STUDENT_S else 2 if budget_s <= _TWO_STUDENTS_S else 3


def choose_widths(widths: Sequence[int], count: int) -> tuple[int, ...]:
    """The middle one of the rising `widths`, and with more `count` also those next to it, larger ones first.

    One student is a compromise; where there is time for another, it is better spent on knowing more.
    """
    middle = len(widths) // 2
    nearest = sorted(range(len(widths)), key=lambda place: (abs(place - middle), -place))
    return tuple(widths[place] for place in sorted(nearest[:count]))


def places_for(students: int) -> int:
    """At how many blocks exits are trained by default."""
    return _EXITS_BEHIND_STUDENTS if students else _EXITS_ALONE


def choose_places(reach_shares: Sequence[float], limit: int) -> tuple[int, ...]:
    """Indices of at most `limit` blocks at even distances of time, rising.

    `reach_shares` says for every block, in forward order, which share of the base model's time has passed
    at its end. Blocks before 8 % know too little, those after 75 % have nothing left to save; if all are
    there, the one nearest to that range is taken.
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
        # the rest must be enough for the remaining places
        usable = eligible[len(chosen) : len(eligible) - (limit - number - 1)]
        usable = [place for place in usable if not chosen or place > chosen[-1]]
        chosen.append(min(usable, key=lambda place: abs(reach_shares[place] - wanted)))
    return tuple(chosen)


# What cannot pay ------------------------------------------------------------------------------------------


def too_slow(lookup_ms: float, block: BlockProfile, base_ms: float) -> str:
    """Why a lookup at this block cannot pay, or "" if it may.

    A hit saves the rest of the network; a lookup slower than that never pays.
    """
    left_ms = base_ms - block.reach_ms
    if lookup_ms < left_ms:
        return ""
    return f"a lookup takes {lookup_ms:.3g} ms, the rest of the network {left_ms:.3g} ms"


def too_dear(lookup_ms: float, base_ms: float) -> str:
    """Why a student is not worth training unless requested, or "" if it may be."""
    if lookup_ms < _DEAREST * base_ms:
        return ""
    return (
        f"a lookup takes {lookup_ms:.3g} ms of the network's {base_ms:.3g} ms: more than it can save "
        f"unless it answers more than {_DEAREST:.0%} of all inputs"
    )


def dearer_than_a_student(lookup_ms: float, base_ms: float) -> str:
    """Why the reduced network is not trained in a student's place, or "" if it is.

    Arithmetic falls with pixels and blocks; what starting each remaining layer takes does not.
    """
    if lookup_ms <= _DEAREST_REDUCED * base_ms:
        return ""
    return (
        f"reduced, the network still takes {lookup_ms:.3g} of {base_ms:.3g} ms, a student less: "
        "name it with --variants"
    )


def heaviest(base_parameters: int) -> int:
    """How many bytes of weights an exit may hold by default: as many as the base model, 4 to 32 MiB."""
    return min(MOST_BYTES, max(_LEAST_LIMIT_BYTES, 4 * base_parameters))


def too_heavy(parameters: int, limit_bytes: int) -> str:
    """Why a variant with so many weights is not trained by default, or "" if it may be."""
    if 4 * parameters <= limit_bytes:
        return ""
    return (
        f"its weights take {4 * parameters / 2**20:.1f} MiB, and by default at most "
        f"{limit_bytes / 2**20:.1f} MiB are trained: name it with --variants"
    )


# How long -------------------------------------------------------------------------------------------------


def batch_size_for(training_inputs: int, largest: int = 128) -> int:
    """Inputs a step: fewer where there are few."""
    return max(8, min(largest, training_inputs // 8))


def steps_for_epochs(epochs: float, training_inputs: int, batch_size: int, *, least: int) -> int:
    """Turn passes over the training inputs into steps; small sets are walked more often."""
    return max(round(epochs * steps_an_epoch(training_inputs, batch_size)), least)


def most_steps(training_inputs: int, batch_size: int, *, students: bool) -> int:
    """So many steps are enough whatever time there is."""
    epochs, steps = (
        (_MOST_STUDENT_EPOCHS, _MOST_STUDENT_STEPS) if students else (_MOST_EXIT_EPOCHS, _MOST_EXIT_STEPS)
    )
    return max(epochs * steps_an_epoch(training_inputs, batch_size), steps)


def steps_an_epoch(training_inputs: int, batch_size: int) -> int:
    """Batches that show every input once."""
    return max(1, training_inputs // batch_size)


def reserve(measuring_s: float, left_s: float) -> float:
    """The part of the remaining time to reserve for measuring, by its expected duration.

    Never so much that nothing is learned: measuring is cut short where time is up.
    """
    return min(measuring_s, _MOST_MEASURING * left_s)


def divide_time(left_s: float, *, students: int, exits: int) -> tuple[float, float]:
    """Divide the seconds that are left for training among students and exits, 70 to 15."""
    of_students = _STUDENT_SHARE if students else 0.0
    of_exits = _EXIT_SHARE if exits else 0.0
    left_s, whole = max(0.0, left_s), of_students + of_exits
    return (left_s * of_students / whole, left_s * of_exits / whole) if whole else (0.0, 0.0)
