"""Models that one process saves and several load, each its part: what all of them answer."""

from pathlib import Path
from typing import Any

import torch

TOKENS = 6


def family(name: str) -> tuple[Any, list[dict[str, Any]]]:
    """(model, batches); "olmo2 of 4" has heads for 4 ranks, the others for 2."""
    if name == "sample":
        import mmqc

        sample = mmqc.samples.load("digits-vqa")
        return sample.model, sample.calibration(3)
    from tiny_families import FAMILIES, _text

    kind, _, heads = name.partition(" of ")
    model, batch = _text(kind, num_key_value_heads=int(heads)) if heads else FAMILIES[name]()
    return model, [batch]


def config(name: str) -> Any:
    """A recipe with widths that the small models have."""
    from mmqc import recipes as r

    return {
        "w8a8": lambda: r.rtn(8, 8),
        "w4a16": lambda: r.rtn(4, group_size=4),
        "w4a8": lambda: r.rtn(4, 8),
        "asymmetric": lambda: r.gptq(4, 16, symmetric=False),
        "w3a16": lambda: r.rtn(3, group_size=9),
        "mquant": lambda: r.mquant(4, solver="rtn"),
        "blocks": lambda: r.mquant(4, solver="rtn", tensor_parallel=4),
        "rotate in blocks": lambda: r.rotate(tensor_parallel=4),
        "integer scale": lambda: r.integer_scale(4, 8, 4),
        "resq": lambda: r.resq(solver="rtn"),
        "awq": lambda: r.awq(4, 16),
        "rotate": lambda: r.rotate(online=False),
        "kv": lambda: r.rtn(8).replace(kv=r.calibquant(2).kv),
    }[name]()


def save(folder: Path, case: str) -> dict[str, Any]:
    """Quantize and save "family/recipe"; what one process answers."""
    import mmqc

    kind, recipe, *_ = case.split("/")
    model, batches = family(kind)
    mmqc.quantize_(model, config(recipe), batches, progress=False)
    model.save_pretrained(folder / case)
    torch.save(batches[0], folder / case / "batch.pt")
    return {**answer(model, batches[0]), "bytes": size_of(model)}


@torch.no_grad()
def answer(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Logits and greedy tokens."""
    logits = model(**batch).logits.float()
    tokens = model.generate(**batch, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
    return {"logits": logits, "tokens": tokens[:, -TOKENS:]}


@torch.no_grad()
def compiled(model: Any, batch: dict[str, Any], **cache: Any) -> dict[str, Any]:
    """Logits of the compiled model, called twice, and tokens of ``compiled_loop``; how often graphs could not be recorded."""
    from torch._dynamo.utils import counters

    import mmqc

    mode = {"mode": "reduce-overhead"} if model.device.type == "cuda" else {}
    call = torch.compile(model, backend="mmqc", **mode)
    logits = [call(**batch).logits.float().clone() for _ in range(2)]
    how = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False, "custom_generate": mmqc.compiled_loop}
    tokens = [model.generate(**batch, **how, **cache)[:, -TOKENS:] for _ in range(2)]
    return {"logits": logits, "tokens": tokens, "skips": counters["inductor"]["cudagraph_skips"]}


def branches(group: Any, recipe: str = "w8a8") -> tuple[Any, Any, dict[str, Any]]:
    """(whole, this rank's part, batch) of one layer with two residual branches of gated products."""
    import copy

    from blocks import Mlp, RMSNorm, Text, ids
    from models import randomise

    import mmqc
    from mmqc.nn.split_calls import share

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms, self.bodies = (torch.nn.ModuleList(make() for _ in range(2)) for make in (RMSNorm, lambda: Mlp(gated=True)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for norm, body in zip(self.norms, self.bodies, strict=True):
                x = x + body(norm(x))
            return x

    torch.manual_seed(0)
    whole, batch = randomise(Text(Layer())).eval(), ids()
    mmqc.quantize_(whole, config(recipe), [batch], progress=False)
    part = copy.deepcopy(whole)
    for body in part.blocks[0].bodies:
        for name, how in (("gate", (False, True, False)), ("up", (False, True, False)), ("down", (True, False, True))):
            share(body.get_submodule(name), name, *how, group)
    return whole, part, batch


@torch.no_grad()
def compiled_branches() -> dict[str, Any]:
    """What the ranks answer together, compiled, once as if they shared memory; and what one answers alone."""
    from mmqc.kernels.shared.inboxes import OPENED

    found = {}
    OPENED.why_not = lambda name, x: None  # type: ignore[method-assign]  (the ops are the group's sums on a CPU)
    for recipe, options in (("w8a8", {}), ("blocks", {"collectives": "shared"})):
        whole, part, batch = branches(torch.distributed.group.WORLD, recipe)
        call = torch.compile(part, backend="mmqc", fullgraph=True, options=options)
        found[recipe] = (whole(**batch), part(**batch), call(**batch), [b.down.split.by for b in part.blocks[0].bodies])
    return found


def size_of(model: Any) -> int:
    """Bytes of what our linears hold."""
    from mmqc.nn.integer_weight import PackedLinear

    linears = [m for n, m in model.named_modules() if isinstance(m, PackedLinear) and ".layers." in n and "vis" not in n]
    return sum(t.numel() * t.element_size() for m in linears for t in m._buffers.values() if t is not None)


def load(folder: Path, case: str, **options: Any) -> Any:
    """The model of a case, shared by the ranks."""
    import transformers
    from transformers.distributed import DistributedConfig

    import mmqc  # noqa: F401

    name = transformers.AutoConfig.from_pretrained(folder / case).architectures[0]
    plan = DistributedConfig(**{"tp_plan": "auto", **options})
    return getattr(transformers, name).from_pretrained(folder / case, distributed_config=plan)


def loaded(folder: Path, case: str) -> dict[str, Any]:
    """What a rank answers, how it shares which linear, and what it says to what it cannot do."""
    try:
        model = load(folder, case)
    except ValueError as error:
        return {"error": str(error)}
    batch = {name: value.to(model.device) for name, value in torch.load(folder / case / "batch.pt").items()}
    found = answer(model, batch)
    if case.endswith("/compiled"):
        cache = {} if "/kv/" in case else {"cache_implementation": "static"}
        return {**found, "compiled": compiled(model, batch, **cache), "bytes": size_of(model)}
    splits = {n: (m.split.by, m.split.reason) for n, m in model.named_modules() if getattr(m, "split", None)}
    refused = []
    for what in (lambda: model.save_pretrained(folder / "again"), lambda: model(**batch)):
        try:
            what()
        except ValueError as error:
            refused.append(str(error))
    return {**found, "splits": splits, "bytes": size_of(model), "refused": refused}
