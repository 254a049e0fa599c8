"""The ops of the grammar as modules: each maps [B, L, W] to [B, L, W] and is built from its data by ``Builder``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.fuzz import touches
from tests.fuzz.grammar import Data
from tests.fuzz.parts import Ties, norm
from tests.fuzz.scratch import Scratch

ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "square": lambda x: x * x,
    "identity": lambda x: x,
}


@dataclass
class Call:
    """What ops may look at beside the stream."""

    ids: Tensor | None
    images: Tensor | None
    alt: bool
    streams: list[Tensor] = field(default_factory=list)
    on: int = 0

    @property
    def other(self) -> Tensor:
        """The stream beside the one that is being written, in the present step's terms."""
        return self.streams[(self.on + 1) % len(self.streams)]


class Residual(nn.Module):
    def __init__(self, data: Data, width: int, builder: Builder) -> None:
        super().__init__()
        self.pre, self.post = norm(data["pre"], width), norm(data["post"], width)
        self.body, self.write = builder.op(data["body"], width), data["write"]
        if self.write == "layer_scale":
            self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, call: Call) -> Tensor:
        y = self.post(self.body(self.pre(x), call))
        if self.write == "in_place":
            x = x.clone()
            x += y
            return x
        if self.write == "view":
            x = x.clone()
            x[:, 1:3] += y[:, 1:3]
            return x
        if self.write == "where":
            return torch.where((torch.arange(x.shape[1]) % 2 == 0)[:, None], x + y, x)
        if self.write == "none":
            return y
        if self.write == "half":
            return 0.5 * (x + y)
        return x - y if self.write == "minus" else x + (self.gain * y if self.write == "layer_scale" else y)


class Linear(nn.Module):
    def __init__(self, data: Data, width: int, builder: Builder) -> None:
        super().__init__()
        self.linear = builder.ties.linear(data["kind"], width, width)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        return self.linear(x)


class Mlp(nn.Module):
    def __init__(self, data: Data, width: int, builder: Builder) -> None:
        super().__init__()
        self.gate, self.act, inner, kind = data["gate"], data["act"], 2 * width, data["kind"]
        linear = builder.ties.linear
        self.up = linear(kind, width, 2 * inner if self.gate == "halves" else inner)
        self.down = linear(kind, inner, width)
        self.gating = linear(kind, width, inner) if self.gate == "two" else None
        self.norm, self.dropout = norm(data["norm"], inner), nn.Dropout(data["dropout"])

    def forward(self, x: Tensor, call: Call) -> Tensor:
        y, act = self.up(x), ACTS[self.act]
        if self.gating is not None:
            y = act(self.gating(x)) * y
        elif self.gate == "halves":
            a, b = y.chunk(2, -1)
            y = act(a) * b
        else:
            y = act(y) * y if self.gate == "square" else act(y)
        return self.down(self.dropout(self.norm(y)))


class Attention(nn.Module):
    def __init__(self, data: Data, width: int, builder: Builder) -> None:
        super().__init__()
        self.data, self.heads = data, data["heads"]
        self.kv_heads = self.heads // data["groups"] or 1
        self.size = width // self.heads
        linear, kind = builder.ties.linear, data["kind"]
        out, kv = self.heads * self.size, self.kv_heads * self.size
        self.sizes = [out, kv, kv]
        self.parts = nn.ModuleList([linear(kind, width, n) for n in ([sum(self.sizes)] if data["fused"] else self.sizes)])
        self.out = linear(kind, out, width)
        self.norms = nn.ModuleList([norm(data["qk_norm"], self.size) for _ in "qk"])

    def forward(self, x: Tensor, call: Call) -> Tensor:
        b, length, _ = x.shape
        parts = self.parts[0](x).split(self.sizes, -1) if self.data["fused"] else [part(x) for part in self.parts]
        q, k, v = (y.reshape(b, length, y.shape[-1] // self.size, self.size).transpose(1, 2) for y in parts)
        q, k = self.norms[0](q), self.norms[1](k)
        if self.data["rope"] and self.size % 2 == 0:
            q, k = self.turned(q), self.turned(k)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        y = self.attend(q, k, v).transpose(1, 2).reshape(b, length, self.heads * self.size)
        return self.out(y)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        causal = self.data["causal"]
        if self.data["by"] == "sdpa" and not self.data["cap"]:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        scores = q @ k.transpose(-1, -2) * self.size**-0.5
        if self.data["cap"]:
            scores = self.data["cap"] * torch.tanh(scores / self.data["cap"])
        if causal:
            length = q.shape[-2]
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        return scores.softmax(-1) @ v

    def turned(self, x: Tensor) -> Tensor:
        half = self.size // 2
        angles = torch.arange(x.shape[-2])[:, None] * 0.1 ** torch.arange(half)
        cos, sin = (torch.cat((t, t), -1).to(x.dtype) for t in (angles.cos(), angles.sin()))
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Experts(nn.Module):
    """Each token's best experts by a router, of a list of linears pairs."""

    def __init__(self, data: Data, width: int, builder: Builder) -> None:
        super().__init__()
        linear, self.top, self.write = builder.ties.linear, data["top"], data["write"]
        self.router = linear("plain", width, data["count"])
        pair = lambda: nn.Sequential(linear(data["kind"], width, width), nn.SiLU(), linear(data["kind"], width, width))  # noqa: E731
        self.experts = nn.ModuleList([pair() for _ in range(data["count"])])

    def forward(self, x: Tensor, call: Call) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        best, chosen = self.router(rows).softmax(-1).topk(self.top, -1)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            at, slot = (chosen == e).nonzero(as_tuple=True)
            if self.write == "mask":
                out = out + expert(rows) * (best * (chosen == e)).sum(-1, keepdim=True)
            elif at.numel():
                y = expert(rows[at]) * best[at, slot, None]
                if self.write == "index_add":
                    out.index_add_(0, at, y)
                else:
                    out[at] = out[at] + y
        return out.reshape(x.shape)


class Chain(nn.Module):
    def __init__(self, data: Data, width: int, builder: Builder) -> None:
        super().__init__()
        self.first, self.second = builder.op(data["first"], width), builder.op(data["second"], width)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        return self.second(self.first(x, call), call)


class TokenConv(nn.Module):
    def __init__(self, data: Data, width: int, builder: Builder) -> None:
        super().__init__()
        groups = width if data["depthwise"] else 1
        self.conv = nn.Conv1d(width, width, data["size"], padding=data["size"] // 2, groups=groups)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Library(nn.Module):
    """Layers of torch.nn that are more than a product."""

    def __init__(self, data: Data, width: int, builder: Builder) -> None:
        super().__init__()
        makes: dict[str, Callable[[], nn.Module]] = {
            "multihead": lambda: nn.MultiheadAttention(width, 2, batch_first=True),
            "encoder": lambda: nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True, norm_first=True),
            "gru": lambda: nn.GRU(width, width, batch_first=True),
            "group_norm": lambda: nn.GroupNorm(2, width),
            "batch_norm": lambda: nn.BatchNorm1d(width),
            "prelu": lambda: nn.PReLU(),
            "bilinear": lambda: nn.Bilinear(width, width, width),
            "sequential": lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)),
        }
        self.how, self.layer = data["how"], makes[data["how"]]()

    def forward(self, x: Tensor, call: Call) -> Tensor:
        if self.how == "multihead":
            return self.layer(x, x, x, need_weights=False)[0]
        if self.how == "gru":
            return self.layer(x)[0]
        if self.how in ("group_norm", "batch_norm"):
            return self.layer(x.transpose(1, 2)).transpose(1, 2)
        return self.layer(x, x) if self.how == "bilinear" else self.layer(x)


class Branch(nn.Module):
    """Python that looks at a value, a flag or a size, and takes a way that other calls may not take.

    Where the body's output takes the stream's place, the other way has a linear of its own: a way without modules cannot be seen
    by a recording that took the other (docs/howto/calibrate.md).
    """

    def __init__(self, data: Data, width: int, builder: Builder) -> None:
        super().__init__()
        self.test, self.over, self.add = data["test"], data["over"], data["add"]
        self.body = builder.op(data["body"], width)
        self.other = None if self.add else builder.ties.linear("plain", width, width)

    def forward(self, x: Tensor, call: Call) -> Tensor:
        if not self.taken(x, call):
            return x if self.other is None else self.other(x)
        y = self.body(x, call)
        return x + y if self.add else y

    def taken(self, x: Tensor, call: Call) -> bool:
        t = self.over
        if self.test == "ids":
            return call.ids is not None and bool(call.ids[0, 0] % 3 == 0)
        tests: dict[str, Callable[[], Any]] = {
            "flag": lambda: call.alt,
            "length": lambda: x.shape[1] > 6,
            "batch": lambda: x.shape[0] > 2,
            "image": lambda: call.images is not None,
            "greater": lambda: x[0, -1, 0] > t,
            "item": lambda: x[0, 0, 1].item() > t,
            "float": lambda: float(x[0, 0, 2]) > t,
            "tolist": lambda: x[0, 0].tolist()[3] > t,
            "numpy": lambda: x.detach().float()[0, 0].numpy()[1] > t,
            "int": lambda: int(x[0, 0, 0]) >= 1,
            "any": lambda: (x[0] > t + 1).any(),
            "equal": lambda: torch.equal(x[0, 0, :2], x[0, 0, :2].clamp(-t, abs(t) + 0.5)),
            "norm": lambda: x[0].square().mean().item() > t,
            "mean": lambda: x[0].mean() > 0.05 * t,
        }
        return bool(tests[self.test]())


class Again(nn.Module):
    """An earlier step's module a second time; which one it is, the model says."""

    def __init__(self, data: Data, width: int, builder: Builder) -> None:
        super().__init__()
        before = builder.steps
        self.of = [before[data["step"] % len(before)] if before else None]
        if data["registered"]:
            self.known = self.of[0]

    def forward(self, x: Tensor, call: Call) -> Tensor:
        return x if self.of[0] is None else self.of[0](x, call)


MODULES: dict[str, Callable[..., nn.Module]] = {
    "residual": Residual,
    "linear": Linear,
    "mlp": Mlp,
    "attention": Attention,
    "experts": Experts,
    "chain": Chain,
    "library": Library,
    "token_conv": TokenConv,
    "branch": Branch,
    "again": Again,
    "scratch": Scratch,
    **touches.MODULES,
}


class Builder:
    """Makes modules of a program's data; remembers what later ones may share."""

    def __init__(self) -> None:
        self.ties = Ties()
        self.steps: list[nn.Module] = []
        self.hooks: list[tuple[nn.Module, Data]] = []

    def op(self, data: Data, width: int) -> nn.Module:
        """The module of one op."""
        made = MODULES[data["op"]](data, width, self)
        if "hook" in data:
            self.hook(made, data["hook"])
        return made

    def hook(self, module: nn.Module, data: Data) -> None:
        """Note a hook for one of the modules in this one, by its number."""
        places = [m for m in module.modules() if not isinstance(m, nn.ModuleList)]
        self.hooks.append((places[data["module"] % len(places)], data))

    def step(self, data: Data, width: int) -> nn.Module:
        """The module of an op that stands in the program's list."""
        self.steps.append(made := self.op(data, width))
        return made
