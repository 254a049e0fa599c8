"""Random residual networks: each is a list of steps over a few streams, drawn by hypothesis, with random weights.

Streams have the same shape [2, LENGTH, WIDTH]; a step reads one or two of them and writes one.
"""

from collections.abc import Callable

import torch
from blocks import Attention, FusedAttention, Mlp, Parallel, RMSNorm
from hypothesis import strategies as st
from models import randomise
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LENGTH, VOCAB = 16, 6, 20
STREAMS = 2


class Step(nn.Module):
    """Streams to streams; ``on`` is the stream that it writes."""

    def __init__(self, on: int) -> None:
        super().__init__()
        self.on, self.other = on, (on + 1) % STREAMS


def norm(kind: str) -> nn.Module:
    made: dict[str, Callable[[], nn.Module]] = {
        "rms": RMSNorm,
        "gemma": lambda: RMSNorm(plus_one=True),
        "layer": lambda: nn.LayerNorm(WIDTH),
        "plain_layer": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
        "library_rms": lambda: nn.RMSNorm(WIDTH),
        "none": nn.Identity,
    }
    return made[kind]()


class Doubled(nn.Module):
    """2 * body(x), or a masked or padded variant of the same: what may stand between a norm and its linears."""

    def __init__(self, body: nn.Module, how: str) -> None:
        super().__init__()
        self.body, self.how = body, how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "scaled":
            return self.body(2 * x)
        if self.how == "padded":
            return self.body(F.pad(x, (0, 0, 0, 2)))[:, : x.shape[1]]
        if self.how == "masked":
            return self.body(x.masked_fill(torch.arange(x.shape[1])[:, None] == 1, 0.0))
        return self.body(x.flip(1)).flip(1) if self.how == "flipped" else self.body(x)


class Transposed(nn.Module):
    """x @ W.T + b with a weight that no nn.Linear owns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(WIDTH, WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


class Experts(nn.Module):
    """A router and stacked experts: each token's best one, written back by ``how``."""

    def __init__(self, how: str, count: int = 3, inner: int = 12) -> None:
        super().__init__()
        self.how, self.router = how, nn.Parameter(torch.zeros(count, WIDTH))
        transposed = how == "bmm"
        self.up = nn.Parameter(torch.zeros(count, WIDTH, 2 * inner) if transposed else torch.zeros(count, 2 * inner, WIDTH))
        self.down = nn.Parameter(torch.zeros(count, inner, WIDTH) if transposed else torch.zeros(count, WIDTH, inner))

    def gated(self, y: Tensor) -> Tensor:
        gate, up = y.chunk(2, -1)
        return F.silu(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        scores = F.linear(rows, self.router).softmax(-1)
        if self.how == "bmm":
            every = rows.expand(len(self.up), -1, -1) * scores.T[..., None]
            return torch.bmm(self.gated(torch.bmm(every, self.up)), self.down).sum(0).reshape(x.shape)
        best, out = scores.argmax(-1), torch.zeros_like(rows)
        for e in best.unique():
            at = (best == e).nonzero().flatten()
            y = F.linear(self.gated(F.linear(rows[at], self.up[e])), self.down[e]) * scores[at, e, None]
            if self.how == "index_add":
                out.index_add_(0, at, y)
            else:
                out[at] = y
        return out.reshape(x.shape)


class Convolved(nn.Module):
    """A convolution over the tokens, behind an average over pairs of them."""

    def __init__(self, padding: int) -> None:
        super().__init__()
        self.conv, self.padding = nn.Conv1d(WIDTH, WIDTH, 3 if padding else 1, padding=padding), padding

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.avg_pool1d(x.transpose(1, 2), 2, 1, padding=1)[..., : x.shape[1]]
        return self.conv(pooled).transpose(1, 2)


class Product(nn.Module):
    """down(u * v) of two linears, or of one with itself, or of the halves of one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up, self.down = how, nn.Linear(WIDTH, 24), nn.Linear(24 if how != "halves" else 12, WIDTH)
        self.other = nn.Linear(WIDTH, 24)

    def forward(self, x: Tensor) -> Tensor:
        u = self.up(x)
        if self.how == "halves":
            a, b = u.chunk(2, -1)
            return self.down(F.gelu(a) * b)
        return self.down(u * u if self.how == "square" else u * self.other(x))


class Residual(Step):
    """x + after(body(norm(x))), perhaps in place, perhaps with a gain per channel on the branch."""

    def __init__(self, on: int, kind: str, body: str, after: str, how: str, write: str) -> None:
        super().__init__(on)
        bodies: dict[str, Callable[[], nn.Module]] = {
            "mlp": Mlp,
            "gated": lambda: Mlp(gated=True, bias=False),
            "linear": lambda: nn.Linear(WIDTH, WIDTH),
            "attention": Attention,
            "fused": FusedAttention,
            "qk_norm": lambda: Attention(qk_norm=True, bias=True),
            "transposed": Transposed,
            "experts_index_add": lambda: Experts("index_add"),
            "experts_setitem": lambda: Experts("setitem"),
            "experts_bmm": lambda: Experts("bmm"),
            "product": lambda: Product("two"),
            "square": lambda: Product("square"),
            "halves": lambda: Product("halves"),
            "conv": lambda: Convolved(0),
            "padded_conv": lambda: Convolved(1),
        }
        self.norm, self.body, self.after = norm(kind), Doubled(bodies[body](), how), norm(after)
        self.write, self.scale = write, nn.Parameter(torch.ones(WIDTH))

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        x = xs[self.on]
        y = self.after(self.body(self.norm(x)))
        if self.write == "in_place":
            x = x.clone()
            x += y
        elif self.write == "view":
            x = x.clone()
            x[:, 1:3] += y[:, 1:3]
        elif self.write == "layer_scale":
            x = x + self.scale * y
        else:
            x = x + y if self.write == "add" else 0.5 * x - y
        return [*xs[: self.on], x, *xs[self.on + 1 :]]


class Two(Step):
    """Both branches of one norm."""

    def __init__(self, on: int, kind: str) -> None:
        super().__init__(on)
        self.block = Parallel(norm(kind), Mlp(), Attention(bias=True))

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        return [*xs[: self.on], self.block(xs[self.on]), *xs[self.on + 1 :]]


class Meet(Step):
    """The streams meet: one takes the other's place at some tokens, is added, or is brought over by a linear."""

    def __init__(self, on: int, how: str) -> None:
        super().__init__(on)
        self.how, self.linear = how, nn.Linear(2 * WIDTH, WIDTH)
        self.norms = nn.ModuleList([RMSNorm(), nn.LayerNorm(WIDTH), nn.LayerNorm(2 * WIDTH)])

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        x, y = xs[self.on], xs[self.other]
        mask = (torch.arange(LENGTH) % 3 == 1)[:, None].expand_as(x)
        if self.how == "where":
            x = torch.where(mask, y, x)
        elif self.how == "scatter":
            x = x.masked_scatter(mask, y[mask])
        elif self.how == "add":
            x = x + y
        elif self.how == "cat_channels":
            x = x + self.linear(torch.cat((self.norms[0](x), self.norms[1](y)), -1))
        elif self.how in ("merge", "merge_and_norm"):
            merged = (self.norms[1](y) if self.how == "merge" else y).reshape(2, LENGTH // 2, 2 * WIDTH)
            merged = merged if self.how == "merge" else self.norms[2](merged)
            x = x + self.linear(merged).repeat_interleave(2, 1)
        else:
            x = x + torch.cat((y[:, 1:], y[:, :1]), 1).mean(1, keepdim=True)
        return [*xs[: self.on], x, *xs[self.on + 1 :]]


class Touch(Step):
    """Something small that stands on a stream: positions, a factor, a permutation, a non-linearity, a constant."""

    def __init__(self, on: int, how: str) -> None:
        super().__init__(on)
        self.how = how
        self.positions = nn.Parameter(torch.zeros(1, LENGTH, WIDTH))
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.layer, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.bias, self.scalar = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(1))
        self.register_buffer("table", torch.linspace(-1, 1, LENGTH * WIDTH).reshape(LENGTH, WIDTH))
        self.loose = torch.linspace(-1, 1, WIDTH, dtype=torch.float64)

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        x = xs[self.on]
        steps: dict[str, Callable[[], Tensor]] = {
            "positions": lambda: x + self.positions,
            "buffer": lambda: x + self.table,
            "loose": lambda: x + self.loose,
            "class_token": lambda: torch.cat((self.token.expand(len(x), -1, -1), x), 1)[:, :LENGTH],
            "bias": lambda: x + self.bias,
            "scalar": lambda: x * self.scalar.tanh() / 2,
            "per_token": lambda: x * torch.arange(1.0, LENGTH + 1)[:, None],
            "flip_channels": lambda: x.flip(-1),
            "add_rolled": lambda: x + x.roll(4, -1),
            "swap_halves": lambda: torch.cat((x[..., WIDTH // 2 :], x[..., : WIDTH // 2]), -1),
            "relu": lambda: x + F.relu(x),
            "start": lambda: self.layer(x),
            "row_gate": lambda: x + x * self.gate(x).sigmoid(),
            "row_product": lambda: x * (1 + self.gate(self.layer(x))),
            "row_quotient": lambda: x / (1 + self.gate(self.layer(x)).square()),
            "quotient_of_rows": lambda: x + self.gate(self.layer(x)) / (1 + self.other(x).square()),
            "add_normed": lambda: x + self.layer(x),
            "constant": lambda: x + 1.0,
            "ones": lambda: torch.cat((torch.ones_like(x[:, :1]), x[:, 1:]), 1),
            "drop": lambda: F.dropout(x, 0.5, training=False).to(x.dtype).contiguous(),
        }
        return [*xs[: self.on], steps[self.how](), *xs[self.on + 1 :]]


TOUCHES = [
    "positions",
    "buffer",
    "loose",
    "class_token",
    "bias",
    "scalar",
    "per_token",
    "flip_channels",
    "add_rolled",
    "swap_halves",
    "relu",
    "start",
    "row_gate",
    "row_product",
    "row_quotient",
    "quotient_of_rows",
    "add_normed",
    "constant",
    "ones",
    "drop",
]


class Network(nn.Module):
    """Embeddings, steps, norm, head; a step may stand in the list twice, a head may be tied."""

    def __init__(self, steps: list[Step], last: str, tied: bool) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(VOCAB, WIDTH) for _ in range(STREAMS)])
        self.steps, self.norm = nn.ModuleList(steps), norm(last)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embeddings[0].weight

    def forward(self, input_ids: Tensor) -> Tensor:
        xs = [embed((input_ids + i) % VOCAB) for i, embed in enumerate(self.embeddings)]
        for step in self.steps:
            xs = step(xs)
        return self.head(self.norm(xs[0]))


NORMS = ("rms", "layer", "gemma", "plain_layer", "library_rms")
BODIES = (
    "mlp",
    "gated",
    "linear",
    "attention",
    "fused",
    "qk_norm",
    "transposed",
    "experts_index_add",
    "experts_setitem",
    "experts_bmm",
    "conv",
    "padded_conv",
    "product",
    "square",
    "halves",
)


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """A network of two to six steps, mostly Pre-LN branches."""
    on = st.integers(0, STREAMS - 1)
    kinds = st.sampled_from(NORMS)
    residual = st.builds(
        Residual,
        on,
        kinds,
        st.sampled_from(BODIES),
        st.sampled_from(("none", "none", "none", *NORMS)),
        st.sampled_from(("plain", "plain", "plain", "scaled", "padded", "masked", "flipped")),
        st.sampled_from(("add", "add", "add", "in_place", "view", "layer_scale", "minus")),
    )
    meet = st.builds(Meet, on, st.sampled_from(("where", "scatter", "add", "cat_channels", "merge", "merge_and_norm", "mean")))
    other = st.one_of(meet, st.builds(Two, on, kinds), st.builds(Touch, on, st.sampled_from(TOUCHES)))
    with torch.random.fork_rng():
        steps = draw(st.lists(st.one_of(residual, residual, other), min_size=2, max_size=5))
        if draw(st.integers(0, 3)) == 0:
            steps.append(steps[draw(st.integers(0, len(steps) - 1))])
        network = Network(steps, draw(st.sampled_from(NORMS)), draw(st.booleans()))
    return randomise(network, draw(st.integers(0, 5))).eval()
