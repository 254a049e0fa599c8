"""Specs as checkpoints hold them: every kind of module, word for word."""

import json

import pytest
import torch

from mmqc.checkpoint.checksum import CheckpointError
from mmqc.checkpoint.field_types import SPEC
from mmqc.checkpoint.module_spec import KINDS, build_module, module_spec

WEIGHT = {"in": 12, "out": 5, "weight_bits": 4, "group_size": 4, "hadamard": True, "bias": True}
STACK = {**WEIGHT, "activation_bits": 8, "input_scales": 2, "zero": False}
WEIGHT_ONLY = {
    **{"kind": "quant_linear", **WEIGHT, "activation_bits": None, "integer_scales": False, "input_scales": 0, "outliers": 0},
    **{"zero": True, "float8": False, "modality": False, "dtype": "bfloat16"},
}
STATIC = WEIGHT_ONLY | {"activation_bits": 8, "integer_scales": "int8", "input_scales": 2, "outliers": 1, "zero": False}
WRITTEN = {
    "weight-only": WEIGHT_ONLY,
    "static": STATIC,
    "integer scales of 32 bits": STATIC | {"integer_scales": True},
    "float8": STATIC | {"integer_scales": False, "group_size": 0, "weight_bits": 8, "float8": True},
    "experts": {
        **{"kind": "quant_experts", "experts": 3, "form": "routed", "names": ["x", "index", "weights"]},
        **{"roles": ["x", "index", "weights"], "up": [STACK], "gate": [], "down": STACK | {"in": 5, "group_size": 0}},
        **{"modality": False, "dtype": "float32"},
    },
    "experts of one stack": {
        **{"kind": "quant_experts", "experts": 3, "form": "sorted", "names": ["x", "counts"], "roles": ["x", "counts"]},
        **{"up": [STACK | {"zero": True, "activation_bits": None, "input_scales": 0}], "gate": None, "down": None},
        **{"modality": False, "dtype": "float16"},
    },
    "two precisions": {
        **{"kind": "mixed_linear", "out": 5, "widths": [10, 2], "stored": [4, 8], "activation": [4, 8], "weight_bits": 4},
        **{"hadamard": True, "order": True, "bias": True, "dtype": "float32"},
    },
    "rounded keys": {
        **{"kind": "kv_rounder", "size": 16, "inner": "sdpa", "dtype": "float32"},
        "spec": {"bits": 4, "high_bits": 8, "high_fraction": 0.125, "basis": "principal"},
    },
    "query moment": {"kind": "query_moment", "heads": 2, "width": 16},
    "plain norm": {"kind": "rms_norm", "size": 7, "eps": 1e-5, "weight": False, "bias": False, "dtype": None},
    "norm": {"kind": "rms_norm", "size": 7, "eps": 1e-5, "weight": True, "bias": True, "dtype": "bfloat16"},
    "rotated norm": {
        **{"kind": "rotated_norm", "size": 12, "eps": 1e-5, "centre": True, "bias": True, "seed": 3, "before": None},
        **{"after": True, "dtype": "float32"},
    },
    "rotated RMSNorm": {
        **{"kind": "rotated_norm", "size": 12, "eps": 1e-5, "centre": False, "bias": False, "seed": 3, "before": False},
        **{"after": None, "dtype": "bfloat16"},
    },
    "by token": {
        **{"kind": "token_linear", "in": 12, "out": 5, "weight_bits": 8, "group_size": 0, "bias": True, "hadamard": False},
        **{"float8": True, "float8_weight": True, "dtype": "bfloat16"},
    },
    "floats of 4 bits": {
        **{"kind": "float4_linear", "in": 40, "out": 5, "form": "nvfp4", "bias": True, "hadamard": True, "outliers": 2},
        "dtype": "bfloat16",
    },
    "Hadamard": {"kind": "hadamard_linear", "in": 12, "out": 5, "bias": False, "dtype": "float32"},
    "plain": {"kind": "plain_linear", "in": 12, "out": 5, "bias": True, "dtype": "float32"},
    "adapters": {
        **{"kind": "adapted_linear", "in": 12, "out": 5, "names": ["a", "b"], "widths": [2, 3], "biases": [True, False]},
        "dtype": "bfloat16",
    },
}


@pytest.mark.parametrize("name", WRITTEN)
def test_build_module__describes_itself_as_it_was_saved(name):
    spec = json.loads(json.dumps(WRITTEN[name]))
    module = build_module(spec)
    assert json.loads(json.dumps(module_spec(module))) == spec
    assert all(tensor.is_meta for tensor in module.state_dict().values())


def test_written__has_every_kind():
    assert {spec["kind"] for spec in WRITTEN.values()} == set(KINDS)


def test_written__every_key_has_a_type():
    assert {key for spec in WRITTEN.values() for key in spec} <= SPEC.keys()


@pytest.mark.parametrize("name", WRITTEN)
def test_build_module__an_unknown_key_is_refused(name):
    with pytest.raises(CheckpointError, match=r"here: .*surprise"):
        build_module(WRITTEN[name] | {"surprise": 1}, where="here")


def test_build_module__models_saved_before_there_were_such_linears():
    old = {key: value for key, value in WEIGHT_ONLY.items() if key not in ("integer_scales", "zero", "float8")}
    assert module_spec(build_module(old)) == WEIGHT_ONLY | {"zero": False}


def test_build_module__where_zero_lies():
    for zero, dtype in ((True, torch.int8), ("float", torch.float16)):
        linear = build_module(WEIGHT_ONLY | {"zero": zero})
        assert linear.weight_zero.dtype == dtype
        assert module_spec(linear) == WEIGHT_ONLY | {"zero": zero}
    with pytest.raises(CheckpointError, match="zero = 'somewhere'"):
        build_module(WEIGHT_ONLY | {"zero": "somewhere"})


def test_build_module__state():
    """Names, shapes and dtypes of what a checkpoint holds of a linear with every part."""
    state = {name: (tuple(t.shape), t.dtype) for name, t in build_module(STATIC, {"bfloat16": torch.float16}).state_dict().items()}
    assert state == {
        "qweight": ((5, 6), torch.uint8),
        "weight_scale": ((5,), torch.float32),
        "group_scale": ((5, 3), torch.int8),
        "bias": ((5,), torch.float16),
        "input_scale": ((2,), torch.float32),
        "outlier_index": ((1,), torch.int64),
        "outlier_weight": ((5, 1), torch.float16),
    }
    mixed = {name: (tuple(t.shape), t.dtype) for name, t in build_module(WRITTEN["two precisions"]).state_dict().items()}
    assert mixed == {
        "qweight": ((5, 5), torch.uint8),
        "qweight_1": ((5, 2), torch.int8),
        "weight_scale": ((5, 2), torch.float32),
        "weight_sum": ((5, 2), torch.int32),
        "order": ((12,), torch.int64),
        "bias": ((5,), torch.float32),
    }
