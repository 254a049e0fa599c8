"""Shipped trained models with their processor, calibration data and evaluation.

    sample = mmqc.samples.load("digits-vqa")
    mmqc.quantize_(sample.model, mmqc.recipes.mquant(), calibration=sample.calibration(32))
    sample.evaluate(sample.model)["accuracy"]

| name              | what it is                                                                        |
|-------------------|-----------------------------------------------------------------------------------|
| digits-vqa        | a Qwen2-VL of 7 million parameters that answers questions about handwritten digits |
| digits-vqa-stress | the same function in coordinates that are hard to quantize (`samples/stress.py`)   |
| docs-vqa          | a Qwen2-VL of 19 million parameters that reads documents; its 40 MB are not in the wheel |

Nothing here touches the network. torch, transformers and scikit-learn are imported when a sample is loaded, not before.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmqc.samples.sample import Sample

NAMES = ("digits-vqa", "digits-vqa-stress", "docs-vqa")
MARK = "mmqc_sample"  # a sample's name in its model's config, and so in the config.json of whatever is made from it

__all__ = ["MARK", "NAMES", "Sample", "folder", "load"]


def load(name: str) -> Sample:
    """Load a shipped sample: `.model .processor .calibration(n) .prompts(n) .evaluate(model, n)`.

    Args:
        name: "digits-vqa", "digits-vqa-stress" or "docs-vqa".

    Raises:
        ValueError: no sample has that name.
        SampleMissingError: the files of docs-vqa are not here; says where to get them.
    """
    from mmqc.samples.sample import Sample

    if name not in NAMES:
        raise ValueError(f"no sample named {name!r}; the shipped samples are {', '.join(map(repr, NAMES))}")
    sample = Sample.load(name)
    setattr(sample.model.config, MARK, name)
    return sample


def folder(name: str) -> Path:
    """Where a sample's config and weights are.

    Raises:
        SampleMissingError: the files of docs-vqa are not here; says where to get them.
    """
    from mmqc.samples.docs import place

    if name == "docs-vqa":
        return place.folder("config.json")
    return Path(__file__).parent / "digits_vqa"


def __getattr__(name: str) -> Any:
    if name == "Sample":
        from mmqc.samples.sample import Sample

        return Sample
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
