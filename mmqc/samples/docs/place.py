"""Where docs-vqa's weights and glyphs are: in the repository, not in the wheel, for which they are too large."""

from __future__ import annotations

import os
from pathlib import Path

from mmqc.errors import MmqcError

VARIABLE = "MMQC_SAMPLES"
NAME = "docs_vqa"


class SampleMissingError(MmqcError, FileNotFoundError):
    """A sample's files are not installed: says where they are and where to put them."""


def folder(holds: str) -> Path:
    """The folder of the sample's files.

    Args:
        holds: A file that is needed of it.

    Raises:
        SampleMissingError: that is neither beside the package nor where the variable MMQC_SAMPLES says.
    """
    places = [Path(__file__).parents[1] / NAME]
    if os.environ.get(VARIABLE):
        places.insert(0, Path(os.environ[VARIABLE]) / NAME)
    for place in places:
        if (place / holds).exists():
            return place
    raise SampleMissingError(
        f"the files of 'docs-vqa' (40 MB) are in mmqc's repository, not in mmqc's wheel: copy mmqc/samples/{NAME} from there to "
        f"a folder and set {VARIABLE} to that folder (looked for {holds} in {', '.join(map(str, places))})"
    )
