"""What a rank holds of one of mmqc's linears, and the module that computes with it.

    split by outputs    rows of w_q, s_w, b; the inputs' scales whole              y_r = linear_r(x)
    split by inputs     columns of w_q, group scales; all else whole               y   = sum_r linear_r(x_r)
                        behind a Hadamard or an order of channels                  x_r = (H x)[channels of r], x gathered first
                        behind a Hadamard whose blocks the ranks can share         x_r = H_r x_r, nothing is gathered

Shapes:  x [..., K], or [..., K/R] of R ranks where the inputs are split   y [..., N], [..., N/R] where the outputs are
Exact:   a linear of ours, of the rank's size: to the bit what it would compute in a model of mmqc's.
An input scale that is found at run time is that of the channels a rank has, as in vLLM's own linears.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mmqc.checkpoint.module_spec import build_module
from mmqc.nn.integer_weight import PackedLinear
from mmqc.nn.linear import HadamardLinear
from mmqc.nn.mixed_linear import MixedLinear
from mmqc.nn.online_hadamard import OnlineHadamard
from mmqc.ops.pack import pack, unpack
from mmqc.vllm.specs import PluginError

WHOLE = ("input_scale", "outlier_index", "order")  # of a linear, whatever its outputs
BIAS = "bias"  # is vLLM's own


@dataclass(frozen=True)
class Stored:
    """A tensor of a linear on a rank.

    Attributes:
        shape: of all its parts, on this rank; of one part where it is the same for all outputs.
        dtype: of its values.
        whole: it is the same for all outputs of a part.
        width: input channels of its columns on this rank, 0 where it is not split along them.
        bits: in how many a code is stored, 0 of what is not packed.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    whole: bool = False
    width: int = 0
    bits: int = 0

    def columns(self, tensor: Tensor, rank: int, ranks: int) -> Tensor:
        """A rank's columns of the checkpoint's tensor [N, ...]."""
        if ranks == 1 or not self.width:
            return tensor
        if not self.bits or self.bits == 8:
            return tensor.chunk(ranks, 1)[rank]
        own = slice(rank * self.width, (rank + 1) * self.width)
        return pack(unpack(tensor, self.width * ranks, self.bits)[:, own], self.bits)


def local_spec(name: str, spec: Mapping[str, Any], outputs: int, ranks: int) -> dict[str, Any]:
    """The spec of a rank's linear: so many outputs, and a share of the inputs where ``ranks`` is more than one.

    Raises:
        PluginError: its inputs cannot be split like that.
    """
    local = {**spec, "out": outputs, "bias": False}
    if ranks == 1:
        return local
    own = own_blocks(spec, ranks)
    local |= {key: False for key in ("hadamard", "order") if key in spec} | ({"hadamard": own} if own else {})
    if spec["kind"] == "hadamard_linear" and own <= 1:  # whose spec has a number of blocks, or no such key
        local |= {"kind": "hadamard_linear" if own else "plain_linear"}
        local.pop("hadamard", None)
    split: dict[str, int] = {f"part {p}": width for p, width in enumerate(spec.get("widths", ()))} or {"its inputs": spec["in"]}
    for what, width in split.items():
        unit = ranks * max(spec.get("group_size", 0), 1)
        if width % unit:
            groups = f" in groups of {spec['group_size']}" if unit > ranks else ""
            raise PluginError(f"{name}: {width} channels ({what}){groups} cannot be split over {ranks} ranks; serve with fewer")
    if "widths" in spec:
        return {**local, "widths": [width // ranks for width in spec["widths"]]}
    return {**local, "in": spec["in"] // ranks}


def own_blocks(spec: Mapping[str, Any], ranks: int) -> int:
    """Blocks of the Hadamard in front of a linear that are a rank's own; 0 where they reach over ranks, or there are none."""
    blocks = int(spec.get("hadamard", 0))
    return blocks // ranks if blocks > 1 and blocks % ranks == 0 and not spec.get("order") and "widths" not in spec else 0


def layout(name: str, spec: Mapping[str, Any], outputs: Sequence[int], ranks: int) -> dict[str, Stored]:
    """The tensors of a rank's linear by their name in the checkpoint; ``ranks``: over which its inputs are split.

    Args:
        name: what errors call it.
        spec: of the whole linear.
        outputs: of every part on this rank.
        ranks: 1 where inputs are not split.
    """
    local = build_module(local_spec(name, spec, sum(outputs), ranks))
    full = build_module(dict(spec))
    grouped = bool(spec.get("group_size"))
    found: dict[str, Stored] = {}
    for own, tensor in local.state_dict().items():
        if own not in WHOLE:
            width, bits = _columns(local, own, tensor, grouped)
            found[own] = Stored(tuple(tensor.shape), tensor.dtype, width=width, bits=bits)
    same = {own: tensor for own, tensor in full.state_dict().items() if own in WHOLE}
    return found | {own: Stored(tuple(tensor.shape), tensor.dtype, whole=True) for own, tensor in same.items()}


def _columns(module: nn.Module, own: str, tensor: Tensor, grouped: bool) -> tuple[int, int]:
    """(input channels, bits) of a tensor that is split along its inputs; (0, 0) of one that is not."""
    if isinstance(module, MixedLinear) and own.startswith("qweight"):
        part = module._names().index(own)
        return module.widths[part], module.stored[part]
    if own == "qweight":
        assert isinstance(module, PackedLinear)
        return module.in_features, module.storage_bits
    if own == "weight" or (grouped and tensor.dim() == 2 and own in ("weight_scale", "weight_zero", "group_scale")):
        return tensor.shape[1], 0
    return 0, 0


class Gathered(OnlineHadamard):
    """H x of the whole x, and of that the channels of a rank: what a linear behind a Hadamard reads where its inputs are split."""

    def __init__(self, inputs: int, hadamard: int, channels: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.in_features, self.gather = inputs, gather
        self._init_hadamard(hadamard, channels.device)
        self.register_buffer("channels", channels, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K/R] -> [..., K/R]."""
        return self.rotated(self.gather(x)).index_select(-1, self.get_buffer("channels"))


class Shard(nn.Module):
    """A rank's part of a linear; several of ours where parts that vLLM joins have input scales of their own."""

    def __init__(self, before: nn.Module | None, linears: Sequence[nn.Module]) -> None:
        super().__init__()
        self.before, self.linears = before, nn.ModuleList(linears)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K or K/R] -> [..., N]."""
        x = x if self.before is None else self.before(x)
        outputs = [linear(x) for linear in self.linears]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def build(
    name: str,
    spec: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    outputs: Sequence[int],
    *,
    bias: Tensor | None = None,
    visual: Any = None,
    rank: int = 0,
    ranks: int = 1,
    gather: Callable[[Tensor], Tensor] | None = None,
) -> Shard:
    """The module of a rank.

    Args:
        name: what errors call it.
        spec: of the whole linear.
        tensors: as ``layout`` says; of several parts those that are the same for all outputs are stacked.
        outputs: of every part on this rank.
        bias: [N], or none.
        visual: with ``rows(x)``, of a linear with a scale per modality.
        rank: of ``ranks`` over which the inputs are split.
        ranks: 1 where they are not.
        gather: [..., K/R] of every rank -> [..., K].
    """
    whole = {n: t if len(outputs) > 1 else t[None] for n, t in tensors.items() if n in WHOLE}
    ends = [0, *torch.tensor(outputs).cumsum(0).tolist()]
    starts = [p for p in range(len(outputs)) if p == 0 or any(not torch.equal(t[p], t[p - 1]) for t in whole.values())]
    before = None
    if ranks > 1:
        order = whole["order"][0] if "order" in whole else None
        before = _before(spec, order, rank, ranks, gather, next(iter(tensors.values())).device)
        tensors, whole = _of_rank(spec, tensors, whole, rank, ranks)
    linears = []
    for p, end in pairwise([*starts, len(outputs)]):
        rows = slice(ends[p], ends[end])
        own = {n: t[rows] for n, t in tensors.items() if n not in WHOLE} | {n: t[p] for n, t in whole.items()}
        local = local_spec(name, spec, ends[end] - ends[p], ranks)
        linears.append(_linear(local, own, None if bias is None else bias[rows], visual))
    return Shard(before, linears)


def _before(
    spec: Mapping[str, Any],
    order: Tensor | None,
    rank: int,
    ranks: int,
    gather: Callable[[Tensor], Tensor] | None,
    device: torch.device,
) -> Gathered | None:
    """What is computed of the whole input for the channels that the rank reads; None where they are those it is given."""
    widths = list(spec.get("widths", ())) or [spec["in"]]
    hadamard = spec.get("hadamard", spec["kind"] == "hadamard_linear")
    if own_blocks(spec, ranks):
        return None
    if not hadamard and order is None and len(widths) == 1:
        return None
    assert gather is not None
    places = torch.arange(sum(widths), device=device) if order is None else order
    channels = torch.cat([part.chunk(ranks)[rank] for part in places.split(widths)])
    return Gathered(sum(widths), hadamard, channels, gather)


def _of_rank(
    spec: Mapping[str, Any], tensors: Mapping[str, Tensor], whole: Mapping[str, Tensor], rank: int, ranks: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors where inputs are split: sums of a rank's codes, and the outliers that lie in its channels."""
    tensors = dict(tensors)
    whole = {own: tensor for own, tensor in whole.items() if own != "order"}  # the channels come in it
    if "weight_sum" in tensors:
        names = sorted(own for own in tensors if own.startswith("qweight"))
        sizes = zip(names, spec["widths"], spec["stored"], strict=True)
        sums = [unpack(tensors[own], width // ranks, bits).sum(1, dtype=torch.int32) for own, width, bits in sizes]
        tensors["weight_sum"] = torch.stack(sums, 1)
    if "outlier_index" in whole:
        width = spec["in"] // ranks
        places = whole["outlier_index"][0] - rank * width
        inside = (places >= 0) & (places < width)
        whole["outlier_index"] = places[inside][None]
        tensors["outlier_weight"] = tensors["outlier_weight"][:, inside]
    return tensors, whole


def _linear(local: Mapping[str, Any], own: Mapping[str, Tensor], bias: Tensor | None, visual: Any) -> nn.Module:
    """One of ours that holds these tensors."""
    if local["kind"] == "hadamard_linear":
        return HadamardLinear.from_parts(own["weight"], bias, local.get("hadamard", 1))
    module: Any = build_module(local)
    if local["kind"] == "plain_linear":
        module.weight = nn.Parameter(own["weight"], requires_grad=False)
        module.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        return module
    none = own.get("outlier_index") is not None and not len(own["outlier_index"])
    module._fill({**own, **dict.fromkeys(("outlier_index", "outlier_weight") if none else ()), "bias": bias})
    if local.get("input_scales") == 2:
        module.modality = visual
    return module.eval()
