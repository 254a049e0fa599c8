"""What a program may consist of: each op's parameters and the values that each may take, the simplest value first.

A program is plain data (JSON).  Its steps are ops from [B, L, W] to [B, L, W]; an op may hold others (``Child``).  A value that
stands in a tuple several times is drawn as much more often.  Drawing, counting and shrinking read nothing but these tables;
``ops.py`` says what each op computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.fuzz.scratch import CHOICES as SCRATCH

Data = dict[str, Any]


@dataclass(frozen=True)
class Child:
    """A parameter that is an op: one of these names."""

    names: tuple[str, ...]


NORMS = (
    *("rms",) * 4,
    *("layer",) * 3,
    "rms_bare",
    "layer_bare",
    "layer_no_bias",
    "gemma",
    "library_rms",
    "rms_cast",
    "own_layer",
    "doubled_layer",
)
SOMETIMES = ("none",) * 12 + NORMS
LINEARS = (
    *("plain",) * 8,
    *("bias",) * 8,
    "conv1d",
    "falcon",
    "doubled",
    "weight_norm",
    "matmul",
    "einsum",
    "conv1x1",
    "functional",
    "buffer",
    "borrowed",
    "sliced",
    "computed",
    "tied_a",
    "tied_b",
)
ACTS = ("relu", "silu", "gelu", "tanh", "square", "identity")
WRITES = (*("add",) * 6, "in_place", "minus", "layer_scale", "half", "view", "where", "none")

BODIES = (*("mlp",) * 5, *("attention",) * 5, *("linear",) * 3, "experts", "chain", "token_conv", "branch", "library", "scratch")
ODD = ("slice", "views", "reduce", "branch", "value", "other", "touch", "again", "softcap", *("scratch",) * 3)
CHAINED = (*("linear",) * 4, "mlp", "slice", "views", "reduce", "softcap", "touch", "dropout")

Choices = tuple[Any, ...]
OPS: Mapping[str, Mapping[str, Choices | Child]] = {
    "residual": {"pre": (*NORMS, "none"), "body": Child(BODIES), "post": SOMETIMES, "write": WRITES},
    "linear": {"kind": LINEARS},
    "mlp": {
        "kind": LINEARS,
        "act": ACTS,
        "gate": ("none", "none", "two", "two", "halves", "square"),
        "norm": SOMETIMES,
        "dropout": (0, 0, 0, 0.5),
    },
    "attention": {
        "kind": LINEARS,
        "heads": (1, 2, 4),
        "groups": (1, 1, 2),
        "fused": (False, False, True),
        "rope": (False, True),
        "causal": (False, True),
        "qk_norm": SOMETIMES,
        "cap": (0, 0, 0, 5.0),
        "by": ("softmax", "sdpa"),
    },
    "experts": {"count": (2, 3, 4), "top": (1, 2), "write": ("index_add", "setitem", "mask"), "kind": ("plain", "bias")},
    "chain": {"first": Child(CHAINED), "second": Child(CHAINED)},
    "library": {"how": ("multihead", "encoder", "gru", "group_norm", "batch_norm", "prelu", "bilinear", "sequential")},
    "token_conv": {"size": (3, 1), "depthwise": (False, True)},
    "branch": {
        "test": (
            "flag",
            "flag",
            "flag",
            "length",
            "batch",
            "image",
            "ids",
            "greater",
            "item",
            "float",
            "tolist",
            "numpy",
            "int",
            "any",
            "equal",
            "norm",
            "mean",
        ),
        "over": (1.0, 0.3, 2.0, -0.5),
        "body": Child(("linear", "mlp", "residual", "slice", "softcap", "touch", "experts")),
        "add": (True, False),
    },
    "value": {"how": ("scale", "shift", "index", "length", "format"), "by": ("item", "float", "tolist", "numpy")},
    "slice": {
        "how": (
            "scale",
            "shift",
            "permute",
            "in_place",
            "mask",
            "roll",
            "swap",
            "gather",
            "select",
            "relu",
            "zero",
            "drop_add",
            "narrow",
            "split",
            "index_put",
            "addcmul",
            "lerp",
        ),
        "at": (2, 4, 8),
        "factor": (3.0, 1.1, 1.001, -1.0, 1.00001),
    },
    "views": {
        "how": (
            "heads_scale",
            "transpose_scale",
            "tokens_scale",
            "tokens_cat",
            "flatten_norm",
            "unfold",
            "heads_flip",
            "heads_mean",
            "expand",
            "stack",
            "repeat",
            "alias",
            "alias_channels",
        ),
        "factor": (1.5, 1.01),
    },
    "reduce": {
        "how": (
            "mean",
            "max",
            "norm",
            "std",
            "softmax",
            "tokens_mean",
            "tokens_cumsum",
            "channels_cumsum",
            "argmax",
            "sort",
            "sum_square",
            "all_mean",
            "dot",
            "outer",
        ),
    },
    "other": {"how": ("add", "where", "scatter", "project", "swap", "gate", "dot", "attend")},
    "touch": {
        "how": (
            "positions",
            "buffer",
            "bias",
            "scale",
            "layer_scale",
            "constant",
            "loose",
            "clamp",
            "relu",
            "float",
            "detach",
            "clone",
            "no_grad",
            "checkpoint",
            "function",
            "vmap",
            "compare",
            "out",
            "deepcopy",
            "through_numpy",
            "through_list",
            "kept",
        ),
    },
    "again": {"step": (0, 1, 2), "registered": (False, True)},
    "softcap": {"cap": (5.0, 1.0)},
    "scratch": SCRATCH,
    "dropout": {"p": (0.5,)},
}

STEPS = (*("residual",) * 20, *ODD)
TOWER_STEPS = (*("residual",) * 8, "touch", "slice")

SHELL: Mapping[str, Choices] = {
    "width": (16, 16, 8, 12, 24, 32, 64),
    "input": ("ids", "ids", "ids", "ids", "float"),
    "streams": (1, 1, 1, 1, 2),
    "embed": (*("plain",) * 7, "scaled", "padding", "max_norm", "positions"),
    "norm": (*NORMS, "none"),
    "head": (*("plain",) * 6, "bias", "bias", "conv1d", "falcon", "matmul"),
    "tied": (False, False, False, True),
    "output": ("tensor", "tensor", "logits", "logits", "tuple", "stream", "list"),
    "shell": ("plain", "plain", "plain", "pretrained"),
}
IMAGE: Mapping[str, Choices] = {
    "into": ("scatter", "scatter", "scatter", "add", "where", "prefix"),
    "projector": ("linear", "linear", "mlp", "norm_linear"),
    "norm": ("none", "none", *NORMS),
    "patches": ("linear", "linear", "conv"),
}
HOOKS = ("count", "count", "times", "before", "keyword", "in_place")

RECIPES = (
    *("rotate()",) * 12,
    *("rotate(everywhere=True)",) * 4,
    "rotate(online=False)",
    "rotate() | w8",
    "rotate() | w8",
    "rtn(8)",
    "rtn(8)",
    "rtn(8) without data",
    "rtn(4, group_size=8)",
    "gptq(8)",
    "awq(8, None)",
    "rtn(8, 8)",
    "mquant(8, msq=False)",
    "mquant(8)",
    "mquant(8, solver='rtn')",
    "quarot(8, 8)",
    "smoothquant(8, 8)",
    "resq(8, kv_bits=None)",
)
DTYPES = ("float64", "float64", "float64", "float32", "float32", "bfloat16")
CHANGES = ("in_place", "data", "assign", "parameter", "module")
WAYS = (*("plain",) * 12, "again", "threads", "copied", "state", "saved", "train", "functional")
