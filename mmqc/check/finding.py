"""One line about a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "note"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """What was found.

    Attributes:
        level: ``error``: the engine refuses the checkpoint or cannot load it; ``warning``: it runs otherwise than its config says,
            or slower; ``note``: as it is.
        code: what kind, in a word or three.
        where: a module, a file, or a part of the config; with how many more there are.
        text: what is so, and what to do.
    """

    level: Level
    code: str
    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:7}  {self.code:20}  {self.where}: {self.text}"


def several(level: Level, code: str, names: Iterable[str], text: str) -> list[Finding]:
    """One finding about all of ``names``; none about none."""
    names = list(names)
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [Finding(level, code, names[0] + more, text)]
