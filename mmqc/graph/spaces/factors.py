"""Spaces that an operation makes channel by channel from another one: which channel of the one each of the other is.

    y = a ∘ x      y = relu(x)        a factor per channel on x is one on y

Shapes:  x, y [*, n]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from mmqc.graph.spaces.coordinates import compact, distinct
from mmqc.graph.spaces.space import Space
from mmqc.graph.spaces.spaces import Spaces


def owners(spaces: Spaces) -> Tensor:
    """Which space each class of coordinates lies in, by number; -1 for none."""
    owner = torch.full((int(spaces.classes.max()) + 1 if spaces.classes.numel() else 0,), -1)
    for i, space in enumerate(spaces):
        owner[space.classes] = i
    return owner


def source_of(spaces: Spaces, owner: Tensor, space: Space, nodes: Sequence[fx.Node], side: int) -> tuple[Space, Tensor] | None:
    """The space of the operands on this side of ``nodes``, and the channel of ``space`` that each of its channels becomes.

    None unless the two correspond one to one, weights alone write the operand, and nothing but these nodes reads it.
    """
    pairs, others = [], set()
    for node in nodes:
        for other in (a for i, a in enumerate(node.args) if i != side):
            others |= set(_spaces_of(spaces, owner, other))
        above, below = (spaces.found.shadows.get(n) if isinstance(n, fx.Node) else None for n in (node.args[side], node))
        if not isinstance(above, Tensor) or not isinstance(below, Tensor) or above.shape != below.shape:
            return None
        pair = torch.stack(compact(above, below)).reshape(2, -1)
        if not bool((pair >= 0).all()):
            return None
        pairs.append(spaces.classes[pair.long()])
    both = torch.cat(pairs, 1)
    keys = distinct(both[0] * len(owner) + both[1])
    classes = torch.stack((keys // len(owner), keys % len(owner)))
    numbers = owner[classes[0]].unique().tolist()
    if len(numbers) != 1 or numbers[0] < 0 or numbers[0] in others:  # of others: a square
        return None
    factor = spaces.spaces[numbers[0]]
    one_to_one = classes.shape[1] == factor.width == space.width and len(classes[1].unique()) == space.width
    alone = factor.inside and not (factor.readers or factor.norms or factor.mean_pins) and factor.writers
    if not (one_to_one and alone) or {n for n, _ in factor.pins} - set(nodes):
        return None
    place = torch.full((len(owner),), -1)
    place[space.classes] = torch.arange(space.width)
    below = dict(zip(classes[0].tolist(), place[classes[1]].tolist(), strict=True))
    return factor, torch.tensor([below[c] for c in factor.classes.tolist()])


def _spaces_of(spaces: Spaces, owner: Tensor, operand: object) -> list[int]:
    """Numbers of the spaces on which an operand's channels lie."""
    ids = spaces.found.shadows.get(operand) if isinstance(operand, fx.Node) else None
    if not isinstance(ids, Tensor):
        return []
    few = compact(ids)[0]
    return owner[spaces.classes[few[few >= 0].long()]].unique().tolist()


def is_between(space: Space) -> bool:
    """Whether operations alone write a space and linears alone read it."""
    return not (space.writers or space.pins or space.norms or space.mean_pins or space.inputs or space.outputs or space.gains)
