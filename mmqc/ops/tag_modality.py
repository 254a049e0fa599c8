"""The identity that carries the modality of every token into a graph that does not see ``input_ids``.

    y = x

Shapes:  x [..., K]   visual bool [...] (True: the row comes from an image or a video)   y [..., K]
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmqc.ops.define import define


def reference(x: Tensor, visual: Tensor) -> Tensor:
    """A copy of x: a functional op may not return its input."""
    del visual
    return x.clone()


def fake(x: Tensor, visual: Tensor) -> Tensor:
    """Like x; that both have the same rows is something a dynamic graph learns here."""
    if x.shape[:-1] != visual.shape:
        raise ValueError(f"visual {list(visual.shape)} has one entry for every row of x {list(x.shape)}")
    return torch.empty_like(x)


define("tag_modality(Tensor x, Tensor visual) -> Tensor", reference, fake)
torch.library.register_autograd("mmqc::tag_modality", lambda ctx, grad: (grad, None))
