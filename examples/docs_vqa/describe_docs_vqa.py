"""How docs-vqa was trained and how uneven it came out: `python -m examples.docs_vqa.describe_docs_vqa [--log log.json]`.

Writes docs/results/docs_vqa_model.json and .png: the training's curves, and for every linear of both towers the largest entry of
its input at visual and at text tokens (MQuant, arXiv:2502.00425, figure 2) and the largest channel over the median one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mmqc
from examples.studies.study import ROOT, about, store
from mmqc.report.plots import COLOURS, MUTED, WIDE, figure

FIGURES = ROOT / "docs/results/docs_vqa_model.json"
PICTURE = FIGURES.with_suffix(".png")
PROMPTS = 18
CURVES = ("seconds", "answer", "tokens", "exact", "characters")


@torch.no_grad()
def ranges(sample: Any, count: int = PROMPTS) -> dict[str, dict[str, float]]:
    """Of every linear's input: the largest absolute entry at visual and at text tokens, and its channels' unevenness."""
    channels: dict[tuple[str, str], torch.Tensor] = {}
    visual = torch.zeros(0, dtype=torch.bool)

    def watch(name: str, module: nn.Module) -> Any:
        def hook(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0].detach().abs().flatten(0, -2)
            parts = {"visual": x} if ".visual." in name else {"visual": x[visual], "text": x[~visual]}
            for which, rows in parts.items():
                new = rows.amax(0)
                old = channels.get((name, which))
                channels[name, which] = new if old is None else torch.maximum(old, new)

        return module.register_forward_pre_hook(hook)

    linears = {n: m for n, m in sample.model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}
    handles = [watch(name, module) for name, module in linears.items()]
    for batch in sample.calibration(count):
        visual = batch["mm_token_type_ids"].flatten() > 0
        sample.model(**batch, use_cache=False)
    for handle in handles:
        handle.remove()
    found: dict[str, dict[str, float]] = {}
    for (name, which), most in channels.items():
        figures = {which: most.max(), f"{which} over median": most.max() / most.median().clamp(min=1e-9)}
        found.setdefault(name, {}).update({key: float(f"{value.item():.4g}") for key, value in figures.items()})
    return found


def draw(data: dict[str, Any]) -> None:
    """Curves on the left; on the right the inputs of the linears, in order."""
    with figure(3.6, columns=2, width=WIDE) as (fig, (left, right)):
        curve, of = data["curve"], {name: i for i, name in enumerate(CURVES)}
        minutes = [row[0] / 60 for row in curve]
        for name, style in (("tokens", "-"), ("exact", "--"), ("characters", ":")):
            right_share = [100 * row[of[name]] for row in curve]
            left.plot(minutes, right_share, style, label=name, color=MUTED if style == ":" else COLOURS["text"])
        left.set_xlabel("minutes of training, starts included")
        left.set_ylabel("right, %")
        left.legend(loc="lower center")
        loss = left.twinx()
        loss.plot(minutes, [row[of["answer"]] for row in curve], color=COLOURS["visual"])
        loss.set_yscale("log")
        loss.set_ylabel("loss of answers, nats")
        for which in ("visual", "text"):
            at = [(i, row[which]) for i, row in enumerate(data["inputs"].values()) if which in row]
            right.plot(*zip(*at, strict=True), ".", label=f"{which} tokens", color=COLOURS[which])
        right.set_yscale("log")
        right.set_xlabel("linears in their order: vision, projector, language")
        right.set_ylabel("largest |input|")
        right.legend()
        fig.savefig(PICTURE, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path, help="log.json of the training; without it the curve stays as it is on file")
    args = parser.parse_args()
    if args.log:
        rows = [row for row in json.loads(args.log.read_text(encoding="utf-8")) if "answer" in row]
        curve = [[row[name] for name in CURVES] for row in rows]
    else:
        curve = json.loads(FIGURES.read_text(encoding="utf-8"))["curve"]
    found = ranges(mmqc.samples.load("docs-vqa"))
    store(FIGURES, dict(about=about("python -m examples.docs_vqa.describe_docs_vqa"), curve=curve, inputs=found), indent=None)
    draw(json.loads(FIGURES.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
