"""What is quantized, and what is observed, is read off the recording."""

from small_vlm import Small, batches, request
from torch import nn

from mmqc import recipes
from mmqc.quantization.job import working
from mmqc.quantization.rewrite import record_model, rewrite
from mmqc.quantization.targets import Targets, find_targets


def targets_of(config: object, **more: object) -> Targets:
    with working(request(Small(), config, batches(), **more)) as job:
        return find_targets(job, rewrite(job, record_model(job)))


def test_targets__every_linear_with_its_place_and_what_to_observe() -> None:
    targets = targets_of(recipes.mquant(4))
    linears = {n for n, m in Small().named_modules() if isinstance(m, nn.Linear) and not n.endswith("head")}
    assert {t.module for t in targets.linears.values()} == linears == targets.watches.keys()
    assert {t.tower for t in targets.linears.values()} == {"vision", "projector", "language"}
    assert all(t.language == (".text." in t.module) for t in targets.linears.values())
    assert all(fqn == t.weight == f"{t.module}.weight" for fqn, t in targets.linears.items())
    assert all(targets.linears[f"{name}.weight"].language == watch.language for name, watch in targets.watches.items())
    assert targets.token_embeddings == ("model.text.embed.weight",)


def test_targets__rounding_to_nearest_needs_no_data_and_a_filter_takes_schemes_away() -> None:
    targets = targets_of(recipes.rtn(4, group_size=8), filter_fn=lambda module, fqn: ".text." in fqn)
    assert targets.watches == {}
    assert {t.tower for t in targets.linears.values()} == {"language"}
