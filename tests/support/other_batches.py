"""A batch of the tiny Qwen2-VL with other images, texts and padding."""

from models import IMAGE, VIDEO
from torch import Tensor

from mmqc.aot.variants import taken_apart

OTHER = ((((3, 1),), ((2, 2), (4, 3))), (((1, 1),),), (((6, 2), (1, 3), (2, 2)),))


def other_batches(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    parts = taken_apart(batch, (IMAGE, VIDEO))
    assert parts is not None
    return [parts.compose(layout, left=True) for layout in OTHER]
