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
        "integer scale": lambda: r.integer_scale(4, 8, 4),
        "resq": lambda: r.resq(solver="rtn"),
        "awq": lambda: r.awq(4, 16),
        "rotate": lambda: r.rotate(online=False),
        "kv": lambda: r.rtn(8).replace(kv=r.calibquant(2).kv),
    }[name]()


def save(folder: Path, case: str) -> dict[str, Any]:
    """Quantize and save "family/recipe"; what one process answers."""
    import mmqc

    kind, recipe = case.split("/")
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
    batch = torch.load(folder / case / "batch.pt")
    found = answer(model, batch)
    splits = {n: (m.split.by, m.split.reason) for n, m in model.named_modules() if hasattr(m, "split")}
    refused = []
    for what in (lambda: model.save_pretrained(folder / "again"), lambda: model(**batch)):
        try:
            what()
        except ValueError as error:
            refused.append(str(error))
    return {**found, "splits": splits, "bytes": size_of(model), "refused": refused}
