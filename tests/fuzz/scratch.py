"""Straight-line programs over three tensors that may lie in each other's memory: who reads what, before and after a write."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor, int], Tensor]  # the target's and the source's tensors [B, L, W] and a place among the channels


def _assigned(target: Tensor, place: Any, value: Tensor) -> Tensor:
    target[place] = value
    return target


def _added(target: Tensor, place: Any, value: Tensor) -> Tensor:
    target[place] += value
    return target


def _halves_written(target: Tensor, source: Tensor, at: int) -> Tensor:
    left, right = target.split((at, target.shape[-1] - at), -1)
    left.mul_(2), right.copy_(source[..., at:])
    return target


def _through_heads(target: Tensor, source: Tensor, at: int) -> Tensor:
    heads = target.view(*target.shape[:2], 2, -1)
    heads[:, :, 1] = source.reshape(heads.shape)[:, :, 0]
    return target


# what a name becomes; of those that return the target, the other names that lie in its memory see it too
MAKES: dict[str, Step] = {
    "2 * {s}": lambda t, s, at: 2 * s,
    "{t} + {s}": lambda t, s, at: t + s,
    "{t} - {s}": lambda t, s, at: t - s,
    "{s} / 3": lambda t, s, at: s / 3,
    "{s}": lambda t, s, at: s,
    "{s}.clone()": lambda t, s, at: s.clone(),
    "{s}.contiguous()": lambda t, s, at: s.contiguous(),
    "{s}.view(...)": lambda t, s, at: s.reshape(-1, s.shape[-1]).view(s.shape),
    "{s}.to(same)": lambda t, s, at: s.to(s.dtype),
    "tanh({s})": lambda t, s, at: s.tanh(),
    "cat({s} at, {t} at)": lambda t, s, at: torch.cat((s[..., :at], t[..., at:]), -1),
    "cat({s} end, {s} at)": lambda t, s, at: torch.cat((s[..., at:], s[..., :at]), -1),
    "stack({s}, {t})[0]": lambda t, s, at: torch.stack((s, t))[0],
    "stack({s}, {t}).mean(0)": lambda t, s, at: torch.stack((s, t)).mean(0),
    "chunk({s} + {t})": lambda t, s, at: torch.cat((s, t), 1).chunk(2, 1)[1],
    "{s}.flip(1)": lambda t, s, at: s.flip(1),
    "where(tokens, {s}, {t})": lambda t, s, at: torch.where((torch.arange(s.shape[1]) % 2 == 0)[:, None], s, t),
    "where(channels, {s}, {t})": lambda t, s, at: torch.where(torch.arange(s.shape[-1]) < at, s, t),
    "{t} += {s}": lambda t, s, at: t.add_(s),
    "{t} *= 3": lambda t, s, at: t.mul_(3),
    "{t}.copy_({s})": lambda t, s, at: t.copy_(s),
    "{t}.relu_()": lambda t, s, at: t.relu_(),
    "{t}.lerp_({s})": lambda t, s, at: t.lerp_(s, 0.25),
    "{t}[..., :at] = {s}": lambda t, s, at: _assigned(t, (..., slice(at)), s[..., :at]),
    "{t}[..., at:] = {s} start": lambda t, s, at: _assigned(t, (..., slice(t.shape[-1] - at, None)), s[..., :at]),
    "{t}[..., ::2] += {s}": lambda t, s, at: _added(t, (..., slice(None, None, 2)), s[..., ::2]),
    "{t}[:, 1:] = {s}": lambda t, s, at: _assigned(t, (slice(None), slice(1, None)), s[:, 1:]),
    "{t}[:, 1:] += {s} before": lambda t, s, at: _added(t, (slice(None), slice(1, None)), s[:, :-1].clone()),
    "{t}[..., at] = 1": lambda t, s, at: _assigned(t, (..., at), torch.ones((), dtype=t.dtype)),
    "{t}[mask] = {s}": lambda t, s, at: _assigned(t, s > 0, s[s > 0]),
    "{t}[rows] = {s}": lambda t, s, at: _assigned(t, (slice(None), torch.tensor([0, -1])), s[:, [0, -1]]),
    "{t} halves": _halves_written,
    "{t} heads": _through_heads,
    "{t}.index_add_({s})": lambda t, s, at: t.index_add_(-1, torch.tensor([0, at]), s[..., [1, 0]]),
    "{t}.masked_fill_({s})": lambda t, s, at: t.masked_fill_(s > 1, 0.5),
    "add(out={t})": lambda t, s, at: torch.add(s, 1, out=t),
}
PAIRS = tuple(permutations("abc", 2))


def _said(how: str, t: str, s: str) -> str:
    return f"{t} = {how.format(t=t, s=s)}"


STEPS: dict[str, tuple[str, str, Step]] = {_said(how, t, s): (t, s, step) for how, step in MAKES.items() for t, s in PAIRS}
OFTEN = ("2 * {s}", "{t} + {s}", "{s} / 3", "{t}[..., :at] = {s}", "{t}[..., at:] = {s} start", "{t} halves", "{t} heads")
NAMES = ("", *STEPS, *(_said(how, t, s) for how in OFTEN * 4 for t, s in PAIRS))
ENDS = ("b", "c", "a", "b + c", "a and b")


class Scratch(nn.Module):
    """``a`` is the stream or a copy of it, ``b`` and ``c`` what linears make of it; then up to six steps."""

    def __init__(self, data: dict[str, Any], width: int, builder: Any) -> None:
        super().__init__()
        self.data, self.at = data, max(width // data["at"], 1)
        self.first, self.second, self.last = (builder.ties.linear(data["kind"], width, width) for _ in range(3))

    def forward(self, x: Tensor, call: Any) -> Tensor:
        held = {"a": x if self.data["stream"] else x.clone(), "b": self.first(x), "c": self.second(x)}
        for name in (self.data[f"step {i}"] for i in range(COUNT)):
            if name:
                t, s, step = STEPS[name]
                held[t] = step(held[t], held[s], self.at)
        a, b, c = held.values()
        end = self.data["end"]
        if end == "a and b":
            return a + self.last(b)
        return self.last({"a": a, "b": b, "c": c, "b + c": b + c}[end])


COUNT = 6
CHOICES = {
    "kind": ("plain", "bias"),
    "at": (2, 4),
    "stream": (False, False, True),
    "end": ENDS,
    **{f"step {i}": NAMES for i in range(COUNT)},
}
