"""Ops without products of matrices: what models do to a stream, or to a part of it, between their linears."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.fuzz.grammar import Data


class Touch(nn.Module):
    """An op of one parameter, ``how``, and its number; a subclass has a method for each name."""

    def __init__(self, data: Data, width: int, builder: Any) -> None:
        super().__init__()
        self.how = data.get("how", "")
        self.factor, self.at, self.width = data.get("factor", 1.5), max(width // data.get("at", 2), 1), width

    def forward(self, x: Tensor, call: Any) -> Tensor:
        return getattr(self, f"do_{self.how}")(x, call)


class Slice(Touch):
    """A part of the channels alone is scaled, moved, read or written."""

    def do_scale(self, x: Tensor, call: Any) -> Tensor:
        return torch.cat((x[..., : self.at], x[..., self.at :] * self.factor), -1)

    def do_shift(self, x: Tensor, call: Any) -> Tensor:
        return torch.cat((x[..., : self.at] + self.factor, x[..., self.at :]), -1)

    def do_permute(self, x: Tensor, call: Any) -> Tensor:
        return x[..., list(range(self.at, self.width)) + list(range(self.at))]

    def do_in_place(self, x: Tensor, call: Any) -> Tensor:
        x = x.clone()
        x[..., self.at :] *= self.factor
        return x

    def do_mask(self, x: Tensor, call: Any) -> Tensor:
        return x * torch.where(torch.arange(self.width) < self.at, self.factor, 1.0).to(x.dtype)

    def do_roll(self, x: Tensor, call: Any) -> Tensor:
        return x + self.factor * x.roll(self.at, -1)

    def do_swap(self, x: Tensor, call: Any) -> Tensor:
        return torch.cat((x[..., self.at :], x[..., : self.at]), -1)

    def do_gather(self, x: Tensor, call: Any) -> Tensor:
        return x + self.factor * x.gather(-1, torch.full_like(x, self.at - 1, dtype=torch.long))

    def do_select(self, x: Tensor, call: Any) -> Tensor:
        return x + self.factor * x[..., self.at - 1 : self.at]

    def do_relu(self, x: Tensor, call: Any) -> Tensor:
        return torch.cat((x[..., : self.at].relu(), x[..., self.at :]), -1)

    def do_zero(self, x: Tensor, call: Any) -> Tensor:
        x = x.clone()
        x[..., : self.at] = 0
        return x

    def do_drop_add(self, x: Tensor, call: Any) -> Tensor:
        return x + F.pad(x[..., : self.at], (0, self.width - self.at)) * self.factor

    def do_narrow(self, x: Tensor, call: Any) -> Tensor:
        x = x.clone()
        x.narrow(-1, 0, self.at).mul_(self.factor)
        return x

    def do_split(self, x: Tensor, call: Any) -> Tensor:
        first, second = x.split([self.at, self.width - self.at], -1)
        return torch.cat((first * self.factor, second), -1)

    def do_index_put(self, x: Tensor, call: Any) -> Tensor:
        x = x.clone()
        x[:, :, [0, self.at - 1]] = x[:, :, [0, self.at - 1]] * self.factor
        return x

    def do_addcmul(self, x: Tensor, call: Any) -> Tensor:
        return torch.addcmul(x, x, torch.linspace(-1, 1, self.width, dtype=x.dtype), value=self.factor)

    def do_lerp(self, x: Tensor, call: Any) -> Tensor:
        return torch.lerp(x, x.flip(-1), self.factor - 1)


class Views(Touch):
    """The stream in other shapes; what goes by whole tokens may be rotated, what goes by channels may not."""

    def do_heads_scale(self, x: Tensor, call: Any) -> Tensor:
        heads = x.reshape(*x.shape[:-1], 2, self.width // 2)
        return (heads * torch.tensor([[1.0], [self.factor]], dtype=x.dtype)).reshape(x.shape)

    def do_heads_flip(self, x: Tensor, call: Any) -> Tensor:
        return x.reshape(*x.shape[:-1], 2, self.width // 2).flip(-2).reshape(x.shape)

    def do_heads_mean(self, x: Tensor, call: Any) -> Tensor:
        heads = x.unflatten(-1, (2, self.width // 2))
        return (heads + self.factor * heads.mean(-2, keepdim=True)).flatten(-2)

    def do_transpose_scale(self, x: Tensor, call: Any) -> Tensor:
        y = x.transpose(1, 2)
        return torch.cat((y[:, :2] * self.factor, y[:, 2:]), 1).transpose(1, 2)

    def do_tokens_scale(self, x: Tensor, call: Any) -> Tensor:
        return torch.cat((x[:, :1], x[:, 1:] * self.factor), 1)

    def do_tokens_cat(self, x: Tensor, call: Any) -> Tensor:
        return x + torch.cat((x[:, 1:], x[:, :1]), 1)

    def do_flatten_norm(self, x: Tensor, call: Any) -> Tensor:
        rows = x.reshape(-1, self.width)
        return (rows / (rows.square().mean(-1, keepdim=True) + 1e-3).sqrt()).reshape(x.shape)

    def do_unfold(self, x: Tensor, call: Any) -> Tensor:
        return x + F.pad(x, (0, 0, 1, 0)).unfold(1, 2, 1).mean(-1)

    def do_expand(self, x: Tensor, call: Any) -> Tensor:
        return x + self.factor * x[:, :1].expand_as(x)

    def do_stack(self, x: Tensor, call: Any) -> Tensor:
        return torch.stack((x, self.factor * x, x.flip(1)), 0).sum(0)

    def do_repeat(self, x: Tensor, call: Any) -> Tensor:
        return x.repeat(1, 2, 1)[:, : x.shape[1]] * self.factor

    def do_alias(self, x: Tensor, call: Any) -> Tensor:
        x = x.clone()
        tail = x[:, 1:]
        x[:, :2] += x[:, :2] * self.factor
        return torch.cat((x[:, :1], x[:, 1:] + tail), 1)

    def do_alias_channels(self, x: Tensor, call: Any) -> Tensor:
        x = x.clone()
        some = x[..., : self.at]
        some.mul_(self.factor)
        return x


class Reduce(Touch):
    """Something that sums, sorts or compares the channels or the tokens comes back into the stream."""

    def do_mean(self, x: Tensor, call: Any) -> Tensor:
        return x + x.mean(-1, keepdim=True)

    def do_max(self, x: Tensor, call: Any) -> Tensor:
        return x + x.amax(-1, keepdim=True)

    def do_norm(self, x: Tensor, call: Any) -> Tensor:
        return F.normalize(x, dim=-1) * self.width**0.5

    def do_std(self, x: Tensor, call: Any) -> Tensor:
        return x * x.var(-1, keepdim=True, unbiased=False)

    def do_softmax(self, x: Tensor, call: Any) -> Tensor:
        return x + x.softmax(-1)

    def do_tokens_mean(self, x: Tensor, call: Any) -> Tensor:
        return x + x.mean(1, keepdim=True)

    def do_tokens_cumsum(self, x: Tensor, call: Any) -> Tensor:
        return x + 0.3 * x.cumsum(1)

    def do_channels_cumsum(self, x: Tensor, call: Any) -> Tensor:
        return x + 0.3 * x.cumsum(-1)

    def do_argmax(self, x: Tensor, call: Any) -> Tensor:
        return x + F.one_hot(x.argmax(-1), self.width).to(x.dtype)

    def do_sort(self, x: Tensor, call: Any) -> Tensor:
        return x + x.sort(-1).values

    def do_sum_square(self, x: Tensor, call: Any) -> Tensor:
        return x / (1 + x.square().sum(-1, keepdim=True)).sqrt()

    def do_all_mean(self, x: Tensor, call: Any) -> Tensor:
        return x + x.mean() if x.numel() else x

    def do_dot(self, x: Tensor, call: Any) -> Tensor:
        return x + torch.tanh((x * x.roll(1, 1)).sum(-1, keepdim=True)) * x

    def do_outer(self, x: Tensor, call: Any) -> Tensor:
        return x + (x @ x.transpose(1, 2)).softmax(-1) @ x


class Other(Touch):
    """Two streams meet; in a program of one stream it meets itself."""

    def __init__(self, data: Data, width: int, builder: Any) -> None:
        super().__init__(data, width, builder)
        if self.how in ("project", "gate"):
            self.linear = builder.ties.linear("bias", 2 * width if self.how == "project" else width, width)

    def do_add(self, x: Tensor, call: Any) -> Tensor:
        return x + call.other

    def do_where(self, x: Tensor, call: Any) -> Tensor:
        return torch.where((torch.arange(x.shape[1]) % 3 == 1)[:, None], call.other, x)

    def do_scatter(self, x: Tensor, call: Any) -> Tensor:
        mask = (torch.arange(x.shape[1]) % 3 == 1)[:, None].expand_as(x)
        return x.masked_scatter(mask, call.other[mask])

    def do_project(self, x: Tensor, call: Any) -> Tensor:
        return x + self.linear(torch.cat((x, call.other), -1))

    def do_swap(self, x: Tensor, call: Any) -> Tensor:
        return call.other * 1.0

    def do_gate(self, x: Tensor, call: Any) -> Tensor:
        return x + self.linear(x).sigmoid() * call.other

    def do_dot(self, x: Tensor, call: Any) -> Tensor:
        return x + (x * call.other).mean(-1, keepdim=True) * x

    def do_attend(self, x: Tensor, call: Any) -> Tensor:
        return x + (x @ call.other.transpose(1, 2) / self.width).softmax(-1) @ call.other


class Small(Touch):
    """Something small that stands on a stream."""

    bias: Tensor
    gain: Tensor
    table: Tensor

    def __init__(self, data: Data, width: int, builder: Any) -> None:
        super().__init__(data, width, builder)
        if self.how in ("positions", "bias", "scale", "layer_scale"):
            shape = {"positions": (12, width), "scale": (1,)}.get(self.how, (width,))
            name = "gain" if "scale" in self.how else "bias"
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))
        if self.how == "buffer":
            self.register_buffer("table", torch.ones(12, width))

    def do_positions(self, x: Tensor, call: Any) -> Tensor:
        return x + self.bias[: x.shape[1]]

    def do_buffer(self, x: Tensor, call: Any) -> Tensor:
        return x + self.table[: x.shape[1]]

    def do_bias(self, x: Tensor, call: Any) -> Tensor:
        return x + self.bias

    def do_scale(self, x: Tensor, call: Any) -> Tensor:
        return x * self.gain

    def do_layer_scale(self, x: Tensor, call: Any) -> Tensor:
        return x * self.gain

    def do_constant(self, x: Tensor, call: Any) -> Tensor:
        return x + 1.0

    def do_loose(self, x: Tensor, call: Any) -> Tensor:
        return x + torch.linspace(-1, 1, self.width, dtype=x.dtype)

    def do_clamp(self, x: Tensor, call: Any) -> Tensor:
        return x.clamp(-2, 2)

    def do_relu(self, x: Tensor, call: Any) -> Tensor:
        return x + x.relu()

    def do_float(self, x: Tensor, call: Any) -> Tensor:
        return (x.double() * 2).to(x.dtype)

    def do_detach(self, x: Tensor, call: Any) -> Tensor:
        return 2 * x - x.detach()

    def do_clone(self, x: Tensor, call: Any) -> Tensor:
        return x.clone().contiguous()

    def do_no_grad(self, x: Tensor, call: Any) -> Tensor:
        with torch.no_grad():
            return x * 2

    def do_checkpoint(self, x: Tensor, call: Any) -> Tensor:
        return checkpoint(lambda y: y * 2, x, use_reentrant=False)

    def do_function(self, x: Tensor, call: Any) -> Tensor:
        return ScaledSome.apply(x)

    def do_vmap(self, x: Tensor, call: Any) -> Tensor:
        return torch.vmap(lambda row: row * 2)(x) if len(x) else x * 2

    def do_compare(self, x: Tensor, call: Any) -> Tensor:
        return x.masked_fill(x.abs() < 0.3, 0.0) + (x > 0.5).to(x.dtype)

    def do_out(self, x: Tensor, call: Any) -> Tensor:
        made = torch.empty_like(x)
        torch.mul(x, 1.5, out=made)
        return made

    def do_deepcopy(self, x: Tensor, call: Any) -> Tensor:
        return x + copy.deepcopy(x.detach())

    def do_through_numpy(self, x: Tensor, call: Any) -> Tensor:
        return x + torch.from_numpy(x.detach().double().numpy().clip(-1, 1)).to(x.dtype)

    def do_through_list(self, x: Tensor, call: Any) -> Tensor:
        return x + torch.tensor(x[..., :1].tolist(), dtype=x.dtype).reshape(*x.shape[:2], 1)

    def do_kept(self, x: Tensor, call: Any) -> Tensor:
        self.kept = x
        return x + self.kept.flip(1)


class ScaledSome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.cat((x[..., :3] * 2, x[..., 3:]), -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class Value(nn.Module):
    """A number leaves the graph as a Python number and comes back."""

    def __init__(self, data: Data, width: int, builder: Any) -> None:
        super().__init__()
        self.how, self.by = data["how"], data["by"]

    def forward(self, x: Tensor, call: Any) -> Tensor:
        reads: dict[str, Callable[[], float]] = {
            "item": lambda: x[0, 0, 0].item(),
            "float": lambda: float(x[0, 0, 0]),
            "tolist": lambda: x[0, :, 0].tolist()[0],
            "numpy": lambda: float(x.detach().float().numpy()[0, 0, 0]),
        }
        number = max(-2.0, min(2.0, reads[self.by]()))
        if self.how == "scale":
            return x * (1.5 + 0.5 * number)
        if self.how == "shift":
            return x + number
        if self.how == "format":
            return x * float(f"{number:.1f}")
        if self.how == "index":
            return x + x[:, : 1 + int(number > 0)].mean(1, keepdim=True)
        return x * torch.tensor([1.0 + (number > 0.3)] * x.shape[-1], dtype=x.dtype)


class Softcap(nn.Module):
    def __init__(self, data: Data, width: int, builder: Any) -> None:
        super().__init__()
        self.cap = data["cap"]

    def forward(self, x: Tensor, call: Any) -> Tensor:
        return self.cap * torch.tanh(x / self.cap)


class Dropout(nn.Module):
    def __init__(self, data: Data, width: int, builder: Any) -> None:
        super().__init__()
        self.dropout = nn.Dropout(data["p"])

    def forward(self, x: Tensor, call: Any) -> Tensor:
        return self.dropout(x)


MODULES: dict[str, Callable[..., nn.Module]] = {
    "slice": Slice,
    "views": Views,
    "reduce": Reduce,
    "other": Other,
    "touch": Small,
    "value": Value,
    "softcap": Softcap,
    "dropout": Dropout,
}
