"""Small dialogues whose last prompt mostly sounds like a farewell."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from gati.evict.trace.dialogues import Dialogue, Utterance

_FAREWELLS = ("thanks a lot, bye", "no, that is all", "goodbye then", "that was everything, thank you")
_WISHES = ("find me a", "is there another", "i would prefer a", "and what about some", "book the second")
_THINGS = ("table", "flight", "concert", "doctor", "house", "bus", "film", "hotel", "song", "haircut")


def talks(count: int, *, seed: int = 0, clear: float = 0.9, longest: int = 8) -> list[Dialogue]:
    """Dialogues of up to `longest` prompts; the share `clear` of the last ones says goodbye."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        prompts = chance.randint(1, longest)
        messages: list[Utterance] = []
        for turn in range(1, prompts + 1):
            leaving = chance.random() < (clear if turn == prompts else (1.0 - clear) / 2.0)
            wish = f"{chance.choice(_WISHES)} {chance.choice(_THINGS)} {chance.randint(1, 99)}"
            messages.append(Utterance(True, chance.choice(_FAREWELLS) if leaving else wish))
            answer = " ".join(chance.choice(_THINGS) for _ in range(chance.randint(2, 12)))
            messages.append(Utterance(False, f"here you are: {answer}"))
        found.append(Dialogue(f"{seed}-{number}", tuple(messages)))
    return found


def write(path: Path, dialogues: Sequence[Dialogue]) -> Path:
    """Write dialogues as JSON lines."""
    rows = [
        {
            "id": each.name,
            "messages": [
                {"role": "user" if message.user else "assistant", "content": message.text}
                for message in each.messages
            ],
        }
        for each in dialogues
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
