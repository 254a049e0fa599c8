"""The module that takes the place of a mixture's stacked experts.

    rows, offsets = the call's rows, sorted by expert (expert_call.py)
    h = gate(up_1(rows), ...)          y = down(h)          each a grouped_matmul over all experts in one launch
    static:  x_q = quantize(x', s_x[e, modality]),  one scale per expert, or one per expert and modality     x' = H x or x

Shapes:  w_q [E, N, K] int8 or packed uint8 (ops/pack.py)   s_w [E, N] or [E, N, K/g]   s_x [E, 1] or [E, 2] = (text, visual)
         z_w int8 or float16 like s_w, or none; of weight-only stacks   b [E, N]
A mixture whose two linears are modules of their own is two of these, without gate and down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

import mmqc.ops  # noqa: F401  (defines torch.ops.mmqc)
from mmqc.experts.call import ExpertCall, Rows
from mmqc.experts.pointwise import Pointwise
from mmqc.nn.integer_weight import IntegerWeight, kind_of_zero, zero_dtype
from mmqc.nn.modality import ModalityContext
from mmqc.nn.split_calls import Split
from mmqc.ops import nonfinite, quantize
from mmqc.ops.pack import packed_width, stored_bits, unpack
from mmqc.ops.straight_through import gradient_of


class QuantStack(IntegerWeight):
    """The linears of all experts with integer weights and, if ``activation_bits`` is set, statically quantized inputs.

    All state is plain buffers: ``qweight``, ``weight_scale`` and, where they apply, ``weight_zero``, ``bias`` and
    ``input_scale``.
    """

    qweight: Tensor
    weight_scale: Tensor
    weight_zero: Tensor | None
    bias: Tensor | None
    input_scale: Tensor | None

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        weight_bits: int,
        activation_bits: int | None = None,
        group_size: int = 0,
        bias: bool = False,
        input_scales: int = 0,
        hadamard: int = False,
        zero: bool | Literal["float"] = False,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__()
        if (activation_bits is None) != (input_scales == 0):
            raise ValueError("static experts have input scales, weight-only ones have none")
        if zero and input_scales:
            raise ValueError("zero points are those of weight-only experts")
        self.float_dtype = dtype  # of the experts that these stand for
        self.experts, self.in_features, self.out_features = experts, in_features, out_features
        self.weight_bits, self.activation_bits, self.group_size = weight_bits, activation_bits, group_size
        self.storage_bits = stored_bits(weight_bits, activation_bits is not None)
        stored = torch.int8 if self.storage_bits == 8 else torch.uint8
        groups = (-(-in_features // group_size),) if group_size else ()
        layout = {
            "qweight": ((experts, out_features, packed_width(in_features, self.storage_bits)), stored),
            "weight_scale": ((experts, out_features, *groups), torch.float32),
            "weight_zero": ((experts, out_features, *groups), zero_dtype(zero)) if zero else None,
            "bias": ((experts, out_features), dtype) if bias else None,
            "input_scale": ((experts, input_scales), torch.float32) if input_scales else None,
        }
        self._allocate(layout, device)
        self._init_hadamard(hadamard, device)

    def codes(self) -> Tensor:
        """The int8 codes [E, N, K]."""
        return unpack(self.qweight, self.in_features, self.storage_bits)

    def forward(self, x: Tensor, rows: Rows, visual: Tensor | None) -> Tensor:
        """Rows x [S, K], sorted by expert -> [S, N]."""
        dtype, given, row_scale = x.dtype, self.rotated(x), None
        x = given
        if self.input_scale is not None:
            column = 0 if visual is None or self.input_scale.shape[1] == 1 else visual.long()
            row_scale = self.input_scale[rows.experts(), column]
            x = quantize.codes(x, row_scale[:, None], self.activation_bits or 8)
        y = torch.ops.mmqc.grouped_matmul(
            x,
            self.qweight,
            self.weight_scale,
            rows.offsets,
            self.bias,
            row_scale,
            self.storage_bits,
            self.group_size,
            dtype,
            self.weight_zero,
        )
        if row_scale is not None and torch.is_grad_enabled() and given.requires_grad:
            stored = (self.qweight, self.weight_scale, rows.offsets, None, None, self.storage_bits, self.group_size)
            y = gradient_of(y, torch.ops.mmqc.grouped_matmul(given, *stored, dtype))
        return nonfinite.poisoned(y, given) if row_scale is not None and nonfinite.propagating else y

    def to_spec(self) -> dict[str, Any]:
        """What ``from_spec`` builds the stack from, without its values."""
        scales = 0 if self.input_scale is None else self.input_scale.shape[1]
        return {**super().to_spec(), "input_scales": scales, "zero": kind_of_zero(self.weight_zero)}

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any], experts: int, dtype: torch.dtype) -> QuantStack:
        """On the meta device."""
        options = {name: value for name, value in spec.items() if name not in ("in", "out")}
        return cls(experts, spec["in"], spec["out"], **options, dtype=dtype, device="meta")

    def extra_repr(self) -> str:
        """Sizes and scheme."""
        extras = ", hadamard=True" if self.hadamard else ""
        return f"experts={self.experts}, {self.in_features}, {self.out_features}, {self.scheme}{extras}"


class QuantExperts(nn.Module):
    """Experts with integer weights, called as the module that they replace was.

    Attributes:
        call: the signature.
        gate: what lies between ``up`` and ``down``.
        up: the stacked linears that read the module's input.
        down: the one that reads the gate; None where the module is a single stack.
        modality: the model's ModalityContext, needed iff the stacks have two input scales an expert.
        split: of the experts among ranks, of which this one has some; None where it has all.
    """

    def __init__(
        self, call: ExpertCall, up: Sequence[QuantStack], gate: Pointwise | None = None, down: QuantStack | None = None
    ) -> None:
        super().__init__()
        if (gate is None) != (down is None):
            raise ValueError("experts of two linears have a gate between them, single stacks have neither")
        self.call, self.gate = call, gate
        self.up, self.down = nn.ModuleList(up), down
        self.modality: ModalityContext | None = None
        self.split: Split | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The formula at the top of the file; ranks that have some of the experts each add up what these give."""
        y = self._of_experts(*args, **kwargs)
        return y if self.split is None else self.split.added_up(y)

    def _of_experts(self, *args: Any, **kwargs: Any) -> Tensor:
        rows = self.call.rows(args, kwargs)
        visual = self.call.visual(rows, self.call.x(args, kwargs), self.modality)
        y = [stack(rows.x, rows, visual) for stack in self.up]
        if self.gate is None or self.down is None:
            return rows.finish(y[0])
        return rows.finish(self.down(self.gate(*y), rows, visual))

    def to_spec(self) -> dict[str, Any]:
        """What ``from_spec`` builds the module from, without its values."""
        stacks = [stack for stack in self.up if isinstance(stack, QuantStack)]
        return {
            "experts": stacks[0].experts,
            "form": self.call.form,
            "names": list(self.call.names),
            "roles": list(self.call.roles),
            "up": [stack.to_spec() for stack in stacks],
            "gate": None if self.gate is None else self.gate.steps,
            "down": None if self.down is None else self.down.to_spec(),
            "modality": self.modality is not None,
            "dtype": stacks[0].float_dtype,
        }

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> QuantExperts:
        """On the meta device; its modality is attached with the model's."""
        experts, gate, down, dtype = spec["experts"], spec["gate"], spec["down"], spec["dtype"]
        call = ExpertCall(spec["form"], tuple(spec["names"]), tuple(spec["roles"]), experts)
        up = [QuantStack.from_spec(stack, experts, dtype) for stack in spec["up"]]
        return cls(
            call,
            up,
            None if gate is None else Pointwise(len(up), gate),
            None if down is None else QuantStack.from_spec(down, experts, dtype),
        )

    def extra_repr(self) -> str:
        """Form and gate."""
        return self.call.form if self.gate is None else f"{self.call.form}, {self.gate}"
