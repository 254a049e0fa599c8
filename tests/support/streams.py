"""Lists of blocks whose forward does more than hand each block's output to the next."""

import torch
from blocks import Branch, Mlp, RMSNorm, Text
from torch import Tensor, nn


class Between(nn.Module):
    """Something happens between the blocks: out of place, in place, or arguments that only later blocks get."""

    def __init__(self, how: str) -> None:
        super().__init__()
        body = Text(*(Branch(RMSNorm(), Mlp()) for _ in range(3)))
        self.body, self.how = body, how
        self.calls = [0, 0, 0]

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.body.embed(input_ids)
        for i, block in enumerate(self.body.blocks):
            if i == 2:
                x = {"outside": lambda x: x * 2, "in place": lambda x: x.mul_(2), "none": lambda x: x}[self.how](x)
            x = block(x)
            self.calls[i] += 1
        return self.body.head(self.body.norm(x))


class Masked(nn.Module):
    """Each block has arguments beside the stream: one for all, one for the odd ones, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(40, 16), nn.ModuleList(Layer() for _ in range(4))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        a = torch.linspace(0, 1, input_ids.shape[1])[:, None]
        b = (input_ids > 10).to(x.dtype)[..., None]
        for i, layer in enumerate(self.layers):
            x, _ = layer(x, (a, b if i % 2 else a), length=input_ids.shape[1], flag=True)
        return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = RMSNorm(), Mlp()

    def forward(self, x: Tensor, masks: tuple[Tensor, Tensor], *, length: int, flag: bool) -> tuple[Tensor, None]:
        return x + self.mlp(self.norm(x) * masks[0] + masks[1]) / length, None
