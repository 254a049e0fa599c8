"""A program's data as a model, and a batch's data as its arguments.

input_ids or floats -> embed -> [images -> tower -> projector -> into the stream] -> steps -> norm -> head
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from tests.fuzz.grammar import Data
from tests.fuzz.ops import Builder, Call
from tests.fuzz.parts import norm, randomise

VOCAB, IMAGE, PATCHES, PIXELS, FEATURES = 23, 22, 3, 5, 8


class Network(nn.Module):
    """What a program says, as modules; both kinds of model are made of one."""

    def __init__(self, program: Data) -> None:
        super().__init__()
        self.program, width, builder = program, program["width"], Builder()
        self.dtype = torch.float32  # of the floating-point model
        self.embed = embedding(program.get("embed", "plain"), width) if program["input"] == "ids" else nn.Linear(FEATURES, width)
        self.second = nn.Embedding(VOCAB, width) if program["streams"] > 1 else None
        # Somebody reads the second stream, but in programs of before: what is computed for nobody counts as reached.
        self.side = nn.Linear(width, VOCAB) if program["streams"] > 1 and program.get("side") else None
        self.vision = Vision(program["image"], width, builder) if program["image"] else None
        self.steps = nn.ModuleList([builder.step(step, width) for step in program["steps"]])
        self.norm, self.head = norm(program["norm"], width), builder.ties.linear(program["head"], width, VOCAB)
        if tied(program):
            self.head.weight = self.embed.weight
        around = nn.ModuleList([self.embed, self.norm, self.head, *([self.vision] if self.vision is not None else [])])
        for data in program["hooks"]:
            builder.hook(around, data)
        self.hooked = builder.hooks

    def forward(self, ids: Tensor | None, features: Tensor | None, images: Tensor | None, alt: bool) -> Any:
        x = self.embed(ids if features is None else features)
        call = Call(ids, images, alt)
        if images is not None and self.vision is not None:
            x = self.vision(x, call)
        streams = [x] if self.second is None else [x, self.second(ids) if ids is not None else x.flip(1)]
        for data, step in zip(self.program["steps"], self.steps, strict=True):
            call.streams, call.on = streams, data["on"] % len(streams)
            streams = [step(s, call) if i == call.on else s for i, s in enumerate(streams)]
        x = streams[0]
        y = self.head(self.norm(x))
        y = y if self.side is None else y + self.side(streams[1])
        outputs = {"tensor": y, "logits": {"logits": y, "hidden": x}, "tuple": (y, x.shape[1]), "list": [y, y * 2]}
        return outputs.get(self.program["output"], x)


class Embedding(nn.Embedding):
    """Gemma's, which scales what it looks up, and one that adds learned positions."""

    def __init__(self, how: str, width: int) -> None:
        super().__init__(VOCAB, width)
        self.how, self.positions = how, nn.Embedding(12, width) if how == "positions" else None

    def forward(self, input: Tensor) -> Tensor:
        x = super().forward(input)
        return x * 4.0 if self.positions is None else x + self.positions(torch.arange(input.shape[1]))


def embedding(how: str, width: int) -> nn.Module:
    """An embedding by its name in the grammar."""
    if how in ("scaled", "positions"):
        return Embedding(how, width)
    return nn.Embedding(VOCAB, width, padding_idx=0 if how == "padding" else None, max_norm=3.0 if how == "max_norm" else None)


class Vision(nn.Module):
    """A tower and a projector, whose features are written into the stream."""

    def __init__(self, data: Data, width: int, builder: Builder) -> None:
        super().__init__()
        self.into, self.conv = data["into"], data.get("patches") == "conv"
        self.patches = nn.Conv1d(PIXELS, width, 1) if self.conv else nn.Linear(PIXELS, width)
        self.steps = nn.ModuleList([builder.step(step, width) for step in data["steps"]])
        builder.steps.clear()  # the text's steps do not come back to a tower's
        self.norm = norm(data["norm"], width)
        first = {"linear": [], "norm_linear": [nn.LayerNorm(width)], "mlp": [nn.Linear(width, width), nn.GELU()]}
        self.projector = nn.Sequential(*first[data["projector"]], nn.Linear(width, width))

    def forward(self, x: Tensor, call: Call) -> Tensor:
        assert call.images is not None
        y = self.patches(call.images.transpose(1, 2)).transpose(1, 2) if self.conv else self.patches(call.images)
        for step in self.steps:
            call.streams = [y]
            y = step(y, call)
        y = self.projector(self.norm(y))
        if self.into == "add" or call.ids is None:
            return x + y.mean(1, keepdim=True)
        if self.into == "prefix":
            return torch.cat((y, x[:, PATCHES:]), 1)
        at = (call.ids == IMAGE)[..., None].expand_as(x)
        return x.masked_scatter(at, y) if self.into == "scatter" else torch.where(at, y.mean(1, keepdim=True), x)


class Plain(nn.Module):
    """A model that nobody's library knows."""

    def __init__(self, program: Data) -> None:
        super().__init__()
        self.net = Network(program)
        if program["image"]:
            self.config = SimpleNamespace(image_token_id=IMAGE)

    def forward(
        self,
        input_ids: Tensor | None = None,
        features: Tensor | None = None,
        images: Tensor | None = None,
        use_alt: bool = False,
    ) -> Any:
        return self.net(input_ids, features, images, use_alt)


class FuzzConfig(PretrainedConfig):
    model_type = "mmqc_fuzz"

    def __init__(self, program: Data | None = None, **rest: Any) -> None:
        self.program = program
        if program and program["image"]:
            self.image_token_id = IMAGE
        super().__init__(**rest)


class Pretrained(PreTrainedModel):
    """The same as a model of transformers, which can be saved."""

    config_class = FuzzConfig

    def __init__(self, config: FuzzConfig) -> None:
        super().__init__(config)
        assert config.program is not None
        self.net = Network(config.program)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Weights come from a seed or from a file."""

    forward = Plain.forward


class Hook:
    """A forward hook, one that only counts or one that changes what passes."""

    def __init__(self, what: str) -> None:
        self.what, self.calls = what, 0

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.calls += 1
        if self.what == "in_place" and isinstance(output, Tensor) and output.is_floating_point():
            output.mul_(1.5)
        return output * 1.5 if self.what == "times" and isinstance(output, Tensor) else None

    def before(self, module: nn.Module, args: Any) -> Any:
        self.calls += 1
        return (args[0] * 0.5, *args[1:]) if args and isinstance(args[0], Tensor) and args[0].is_floating_point() else None

    def keyword(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        self.calls += 1

    def put(self, module: nn.Module) -> None:
        if self.what == "before":
            module.register_forward_pre_hook(self.before)
        elif self.what == "keyword":
            module.register_forward_hook(self.keyword, with_kwargs=True)
        else:
            module.register_forward_hook(self.after)


def tied(program: Data) -> bool:
    """Whether the head has the embedding's weight."""
    return program["tied"] and program["input"] == "ids" and program["head"] in ("plain", "bias", "falcon")


def build(program: Data, dtype: torch.dtype) -> nn.Module:
    """The model with its weights and hooks, in eval mode; the hooks are also in its list ``hooks``."""
    model: Any = Pretrained(FuzzConfig(program)) if program["shell"] == "pretrained" else Plain(program)
    randomise(model, program["seed"])
    model = model.eval().to(dtype)
    model.net.dtype = dtype
    net = model.net
    model.hooks = [Hook(data["what"]) for _, data in net.hooked]
    for (module, _), hook in zip(net.hooked, model.hooks, strict=True):
        hook.put(module)
    del net.hooked
    return model.requires_grad_(False)


def batch(program: Data, data: Data, dtype: torch.dtype) -> Data:
    """The keyword arguments of one call."""
    g = torch.Generator().manual_seed(data["seed"])
    size, length, image = data["batch"], max(data["length"], PATCHES if data["image"] else 1), data["image"]
    arguments: Data = {}
    if program["input"] == "ids":
        ids = torch.randint(0, IMAGE, (size, length), generator=g)
        if image:
            for row in range(size):
                start = int(torch.randint(0, length - PATCHES + 1, (1,), generator=g))
                ids[row, start : start + PATCHES] = IMAGE
        arguments["input_ids"] = ids
    else:
        arguments["features"] = torch.randn(size, length, FEATURES, generator=g, dtype=torch.float64).to(dtype)
    if image:
        arguments["images"] = torch.randn(size, PATCHES, PIXELS, generator=g, dtype=torch.float64).to(dtype)
    if data["alt"]:
        arguments["use_alt"] = True
    return arguments


def features(program: Data) -> set[str]:
    """What a program has, in words: ops with their main parameter, norms, linears, ways in and out."""
    found = {f"output={program['output']}", f"input={program['input']}", f"shell={program['shell']}", f"norm={program['norm']}"}
    found |= {f"hook={h['what']}" for h in program["hooks"]} | {f"head={program['head']}"}
    found |= {f"embed={program['embed']}"} if program.get("embed", "plain") != "plain" else set()
    found |= {"streams=2"} if program["streams"] > 1 else set()
    found |= {"tied"} if tied(program) else set()
    todo = [*program["steps"]]
    if program["image"]:
        found |= {f"image={program['image']['into']}"}
        found |= {f"norm={program['image']['norm']}"} if program["image"]["norm"] != "none" else set()
        todo += program["image"]["steps"]
    while todo:
        op = todo.pop()
        todo += [v for k, v in op.items() if isinstance(v, dict) and k != "hook"]
        found |= {f"hook={op['hook']['what']}"} if "hook" in op else set()
        found |= {op["op"]} | {f"{op['op']}.{k}={op[k]}" for k in ("how", "test", "kind", "write", "act", "gate") if k in op}
        found |= {f"norm={op[k]}" for k in ("pre", "post", "norm", "qk_norm") if op.get(k, "none") != "none"}
    return found


def text(program: Data) -> str:
    """The program as Python-like lines, for notes."""

    def said(op: Data) -> str:
        rest = ", ".join(
            f"{k}={said(v) if isinstance(v, dict) and k != 'hook' else v!r}" for k, v in op.items() if k not in ("op", "on")
        )
        return f"{op['op']}({rest})"

    image = program["image"]
    shell = {k: v for k, v in program.items() if k not in ("steps", "image", "hooks")}
    lines = [f"program({', '.join(f'{k}={v!r}' for k, v in shell.items())})"]
    if image:
        lines.append(f"  image(into={image['into']!r}, projector={image['projector']!r}, norm={image['norm']!r})")
    steps = itertools.chain((("  tower", s) for s in (image or {}).get("steps", ())), ((" ", s) for s in program["steps"]))
    lines += [f"  {where} x{step['on'] % program['streams']} = {said(step)}" for where, step in steps]
    lines += [f"  hook {h}" for h in program["hooks"]]
    return "\n".join(lines)
