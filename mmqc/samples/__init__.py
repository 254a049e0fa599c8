"""Shipped trained models with their processor, calibration data and evaluation.

    sample = mmqc.samples.load("digits-vqa")
    mmqc.quantize_(sample.model, mmqc.recipes.mquant(), calibration=sample.calibration(32))
    sample.evaluate(sample.model)["accuracy"]

| name              | what it is                                                                        |
|-------------------|-----------------------------------------------------------------------------------|
| digits-vqa        | a Qwen2-VL of 7 million parameters that answers questions about handwritten digits |
| digits-vqa-stress | the same function in coordinates that are hard to quantize (`samples/stress.py`)   |

Nothing here touches the network. transformers and scikit-learn are imported when a sample is loaded, not before.
"""

from mmqc.samples.sample import NAMES, Sample

__all__ = ["NAMES", "Sample", "load"]


def load(name: str) -> Sample:
    """Load a shipped sample: `.model .processor .calibration(n) .prompts(n) .evaluate(model, n)`.

    Args:
        name: "digits-vqa" or "digits-vqa-stress".

    Raises:
        ValueError: no sample has that name.
    """
    if name not in NAMES:
        raise ValueError(f"no sample named {name!r}; the shipped samples are {', '.join(map(repr, NAMES))}")
    return Sample.load(name)
