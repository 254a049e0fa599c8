"""How unevenly a weight's magnitude is spread: the incoherence μ that rotations are meant to lower.

    μ(W) = max |W_ij| sqrt(m n) / |W|_F

Shapes:  W [m, n], or [experts, m, n]: then the worst expert's
Why:     1 means that all entries have one magnitude, sqrt(m n) that a single one is not zero; the error of rounding with
         one scale grows with μ (QuIP, arXiv:2307.13304, Definition 1).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.linear import contraction
from mmqc.graph.program import SLICE, Program
from mmqc.graph.spaces.spaces import Spaces
from mmqc.graph.spaces.towers import towers


def incoherence(weight: Tensor) -> float:
    """μ of a matrix, the largest μ in a stack of matrices; 1 where all is zero, NaN where there are no values to look at."""
    if weight.is_meta or not weight.numel() or type(weight.detach()) is not Tensor:
        return math.nan
    return max(_of_matrix(matrix) for matrix in weight.detach().reshape(-1, *weight.shape[-2:]))


def _of_matrix(weight: Tensor) -> float:
    low, high = torch.aminmax(weight)
    parts = weight.split(max(1, SLICE // weight.shape[-1]))  # an embedding in float64 would be gigabytes
    norm = math.sqrt(sum(float(torch.linalg.vector_norm(p, dtype=torch.float64)) ** 2 for p in parts))
    return max(float(high), -float(low)) * math.sqrt(weight.numel()) / norm if norm else 1.0


def incoherences(prog: Program) -> dict[str, float]:
    """μ of every weight that a linear multiplies by, by name, as ``prog.weights`` has it.

    That is the captured value until the rewrites are written back, and the rewritten one after: no second copy is made.
    """
    return {fqn: incoherence(prog.stored(fqn)) for fqn in _linear_weights(prog)}


def weight_towers(prog: Program) -> dict[str, str]:
    """The tower of each of these weights."""
    places = towers(prog, Spaces.of(prog, pins=False))
    return {fqn: places.get(node, "language") for fqn, node in _linear_weights(prog).items()}


def _linear_weights(prog: Program) -> dict[str, fx.Node]:
    """Weights that linears multiply by, and a node that does."""
    uses = ((node, contraction(prog, node)) for node in prog.graph.nodes if kind(node) != "conv")
    return {use.fqn: node for node, use in uses if use is not None}
