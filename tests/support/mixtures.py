"""Small mixtures of experts in the forms in which transformers' models hold them: stacked parameters, a loop or a product."""

from typing import Any

import torch
from blocks import VOCAB, WIDTH, RMSNorm
from models import randomise
from torch import Tensor, nn
from torch.nn import functional as F

import mmqc
from mmqc.experts.modules import QuantExperts

INNER, EXPERTS, CHOSEN = 12, 5, 2


class Routed(nn.Module):
    """A loop over the experts that some token chose: [E, out, in], a gate of two halves."""

    def __init__(self, scaled: float = 1.0) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(EXPERTS, 2 * INNER, WIDTH))
        self.down = nn.Parameter(torch.zeros(EXPERTS, WIDTH, INNER))
        self.scaled = scaled

    def expert(self, x: Tensor, e: int) -> Tensor:
        gate, up = F.linear(x, self.up[e]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[e])

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in index.unique().tolist():
            token, place = torch.where(index == e)
            y = self.expert(x[token], e) * weights[token, place, None] * self.scaled
            out.index_add_(0, token, y.to(out.dtype))
        return out


class Interleaved(Routed):
    """[E, in, out], biases, gate and up channels in turns, clamped."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(EXPERTS, WIDTH, 2 * INNER))
        self.down = nn.Parameter(torch.zeros(EXPERTS, INNER, WIDTH))
        self.up_bias = nn.Parameter(torch.zeros(EXPERTS, 2 * INNER))
        self.down_bias = nn.Parameter(torch.zeros(EXPERTS, WIDTH))

    def expert(self, x: Tensor, e: int) -> Tensor:
        both = x @ self.up[e] + self.up_bias[e]
        gate, up = both[..., ::2], both[..., 1::2]
        gate, up = gate.clamp(max=0.7), up.clamp(min=-0.7, max=0.7)
        return ((up + 1) * gate * torch.sigmoid(1.7 * gate)) @ self.down[e] + self.down_bias[e]


class Separate(Routed):
    """Gate and up in a parameter each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(EXPERTS, INNER, WIDTH))
        self.up = nn.Parameter(torch.zeros(EXPERTS, INNER, WIDTH))

    def expert(self, x: Tensor, e: int) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.gate[e]), approximate="tanh") * F.linear(x, self.up[e]), self.down[e])


class Normalised(Routed):
    """What lies between the stacks mixes rows."""

    def expert(self, x: Tensor, e: int) -> Tensor:
        gate, up = F.linear(x, self.up[e]).chunk(2, dim=-1)
        return F.linear(torch.softmax(gate, 0) * up, self.down[e])


class Scaled(Routed):
    """Another parameter has a say."""

    def __init__(self) -> None:
        super().__init__()
        self.per_expert = nn.Parameter(torch.ones(EXPERTS))

    def expert(self, x: Tensor, e: int) -> Tensor:
        return super().expert(x, e) * self.per_expert[e]


class Batched(nn.Module):
    """Every expert computes every token; the router multiplied the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(EXPERTS, WIDTH, 2 * INNER))
        self.down = nn.Parameter(torch.zeros(EXPERTS, INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(EXPERTS, -1, WIDTH)
        gate, up = torch.bmm(rows, self.up).chunk(2, dim=-1)
        return torch.bmm(F.silu(gate) * up, self.down).view(-1, WIDTH)


class Sorted(nn.Module):
    """One stack of linears; the caller sorted the rows."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(EXPERTS, inputs, outputs))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        parts = x.split(counts.tolist())
        return torch.cat([part @ self.weight[e] for e, part in enumerate(parts)])


class Mixture(nn.Module):
    """x + experts(norm(x)) between an embedding and a head; ``allowed`` experts only are ever chosen."""

    def __init__(self, experts: nn.Module, allowed: int = EXPERTS) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.norm, self.router, self.allowed = RMSNorm(), nn.Linear(WIDTH, EXPERTS, bias=False), allowed
        self.experts, self.batched = experts, isinstance(experts, Batched)

    def forward(self, input_ids: Tensor) -> Tensor:
        h = self.embed(input_ids)
        x = self.norm(h).reshape(-1, WIDTH)
        scores = self.router(x)[:, : self.allowed].softmax(-1)
        weights, index = scores.topk(CHOSEN)
        if self.batched:
            share = torch.zeros(len(x), EXPERTS, dtype=x.dtype, device=x.device).scatter(1, index, weights)
            y = self.experts((x[None] * share.T[..., None]).reshape(-1, WIDTH)).view(EXPERTS, -1, WIDTH).sum(0)
        elif isinstance(self.experts, nn.Sequential):
            order = index.flatten().argsort(stable=True)
            counts = index.flatten().bincount(minlength=EXPERTS)
            gate, up = self.experts[0](x[order // CHOSEN], counts).chunk(2, dim=-1)
            back = self.experts[1](F.silu(gate) * up, counts)[order.argsort()]
            y = (back.view(-1, CHOSEN, WIDTH) * weights[..., None]).sum(1)
        else:
            y = self.experts(x, index, weights)
        return self.head(h + y.view(h.shape))


FORMS: dict[str, Any] = {
    "routed": Routed,
    "interleaved": Interleaved,
    "separate": Separate,
    "batched": Batched,
    "sorted": lambda: nn.Sequential(Sorted(WIDTH, 2 * INNER), Sorted(INNER, WIDTH)),
}


def mixture(form: str = "routed", allowed: int = EXPERTS, seed: int = 0) -> Mixture:
    """A float64 model with random weights."""
    model = randomise(Mixture(FORMS[form](), allowed), seed).double().eval()
    assert isinstance(model, Mixture)
    return model


def tokens(rows: int = 4, length: int = 25, seed: int = 0) -> dict[str, Tensor]:
    """A batch."""
    return {"input_ids": torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))}


def experts_of(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantExperts)}


def quantized(model, recipe, batches=None):
    report = mmqc.quantize_(model, recipe, batches or [tokens()], progress=False)
    return model, report


def logits(model, batch):
    with torch.no_grad():
        return model(**batch)


def by_hand(model, batch):
    """For every expert the rows that it sees, and what its second linear reads, from the routing in plain torch."""
    h = model.embed(batch["input_ids"])
    x = model.norm(h).reshape(-1, h.shape[-1])
    index = model.router(x)[:, : model.allowed].softmax(-1).topk(CHOSEN).indices
    rows, inner = [], []
    for e in range(EXPERTS):
        mine = x[(index == e).any(-1)]
        gate, up = F.linear(mine, model.experts.up[e]).chunk(2, dim=-1)
        rows.append(mine.detach())
        inner.append((F.silu(gate) * up).detach())
    return rows, inner
