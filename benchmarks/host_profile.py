"""The functions in which the host's time goes, as lines for a file of results."""

from __future__ import annotations

import cProfile
import io
import pstats
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def slowest(watch: cProfile.Profile, by: str = "tottime", lines: int = 40) -> list[str]:
    """The first ``lines`` of a profile sorted ``by`` a column of pstats, without this machine's folders."""
    out = io.StringIO()
    pstats.Stats(watch, stream=out).sort_stats(by).print_stats(lines)
    text = re.sub(r"/\S*site-packages/", "", out.getvalue().replace(f"{ROOT}/", ""))
    return [line.strip() for line in text.splitlines() if line.strip()]
