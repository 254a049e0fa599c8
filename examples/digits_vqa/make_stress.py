"""Measure where the base sample can be made hard to quantize, and store the recipe of "digits-vqa-stress".

`python -m examples.digits_vqa.make_stress` writes `mmqc/samples/digits_vqa/stress.safetensors` (a few kilobytes) and prints the
ratios reached. The targets are those that papers report of large models: channels 20 to 100 times the rest, visual
tokens' range 20 to 40 times that of text tokens.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import torch

from mmqc import samples
from mmqc.samples import stress
from mmqc.samples.processor import IMAGE

BATCHES = 64


class Observer:
    """Absolute maxima per channel of every linear's input and second moments at norms, by modality."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.visual = model, torch.zeros(0, dtype=torch.bool)
        self.largest: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        self.moment: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        self.handles = [model.register_forward_pre_hook(self._start, with_kwargs=True)]
        for name, m in model.named_modules():
            if isinstance(m, torch.nn.Linear) and name != "lm_head":
                self.handles.append(m.register_forward_pre_hook(lambda m, x, name=name: self._linear(name, x[0])))
            elif "norm" in name or name.endswith("ln_q"):
                self.handles.append(m.register_forward_pre_hook(lambda m, x, name=name: self._norm(name, x[0])))

    def _start(self, _model: torch.nn.Module, _args: tuple, kwargs: dict) -> None:
        self.visual = (kwargs["input_ids"] == IMAGE).flatten()

    def _parts(self, name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x.detach().flatten(0, -2)
        return {"visual": x[self.visual], "text": x[~self.visual]} if "language_model" in name else {"visual": x}

    def _linear(self, name: str, x: torch.Tensor) -> None:
        for part, rows in self._parts(name, x).items():
            largest = rows.abs().amax(0)
            self.largest[name][part] = largest.maximum(self.largest[name].get(part, largest))

    def _norm(self, name: str, x: torch.Tensor) -> None:
        if name.endswith("layers.0.input_layernorm"):
            self._linear("language_model (its input)", x)
        for part, rows in self._parts(name, x).items():
            rows = rows - rows.mean(-1, keepdim=True) if "visual" in name else rows
            rows = rows / rows.pow(2).mean(-1, keepdim=True).sqrt()
            self.moment[name][part] = self.moment[name].get(part, 0) + rows.T.double() @ rows.double() / len(rows)

    @classmethod
    @torch.no_grad()
    def run(cls, model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> Observer:
        self = cls(model)
        for b in batches:
            model(**b)
        for handle in self.handles:
            handle.remove()
        return self


def principal_axes(seen: Observer, count: int) -> torch.Tensor:
    """The axes of the vision stream, as its norms see it, that hold most energy."""
    total = sum(m["visual"] for name, m in seen.moment.items() if "visual" in name)
    return torch.linalg.eigh(total).eigenvectors[:, -count:].flip(1).T.contiguous()


def modal_axis(seen: Observer) -> torch.Tensor:
    """The axis a of the decoder's stream with the largest visual over text energy: a generalized eigenvector [1, D]."""
    sites = [m for name, m in seen.moment.items() if "language_model.layers" in name]
    visual, text = (sum(m[part] for m in sites) for part in ("visual", "text"))
    # A tenth of the mean energy as a floor: an axis that is merely empty for text is not of interest.
    text = text + 0.1 * text.trace() / len(text) * torch.eye(len(text), dtype=text.dtype)
    root = torch.linalg.cholesky(text).inverse()
    axis = root.T @ torch.linalg.eigh(root @ visual @ root.T).eigenvectors[:, -1]
    return (axis / axis.norm())[None]


def clamp_scale(target: torch.Tensor) -> torch.Tensor:
    """Only ever larger, and rounded to eighths, so that the recipe reads well."""
    return (target.clamp(min=1) * 8).round() / 8


def gains(seen: Observer, sites: list[str], count: int, ratio: float) -> torch.Tensor:
    """Gains [sites, count] that bring the visual tokens' maximum on the concentrated channels to `ratio` times the rest.

    The rest is the text tokens' range in the decoder and the median channel in the vision tower.
    """
    rows, channels = [], list(stress.CHANNELS[:count])
    for site in sites:
        parts = {k: v.view(-1, 256).amax(0) for k, v in seen.largest[site].items()}
        rest = parts["text"].max() if "text" in parts else parts["visual"].median()
        rows.append(ratio * rest / parts["visual"][channels])
    return clamp_scale(torch.stack(rows))


def hidden(seen: Observer, layers: int, count: int, ratio: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden channels that visual tokens excite more than text tokens, scaled to `ratio` times the text tokens' range.

    A channel reaches that only as far as the text tokens' own values on it stay within their range.
    """
    channels, scales = [], []
    for i in range(layers):
        parts = seen.largest[f"model.language_model.layers.{i}.mlp.down_proj"]
        visual, text = parts["visual"], parts["text"]
        reach = (visual / text.clamp(min=1e-9)).clamp(max=ratio) * (visual > visual.median())
        index = (reach + 1e-6 * visual).topk(count).indices
        channels.append(index)
        scales.append(reach[index] * text.max() / visual[index])
    return torch.stack(channels), clamp_scale(torch.stack(scales))


def values(seen: Observer, names: list[str], heads: int, group: int, ratio: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value channel of each head, scaled to `ratio` times its input's median channel."""
    channels, scales = [], []
    for name in names:
        parts = seen.largest[name]
        both = torch.stack(list(parts.values())).amax(0)
        head = both.view(heads, group, -1).amax(1)
        top = head.max(1)
        channels.append(torch.arange(heads) * head.shape[1] + top.indices)
        scales.append(ratio * both.median() / top.values)
    return torch.stack(channels), clamp_scale(torch.stack(scales))


def make_recipe(sample: samples.Sample, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Measure the base, then the turned base; choose gains and scales from those."""
    batches = sample.calibration(BATCHES)
    base = Observer.run(sample.model, batches)
    recipe = {"vision.axes": principal_axes(base, args.axes), "text.axes": modal_axis(base)}
    model = stress.turned(sample.model, recipe).float()
    seen = Observer.run(model, batches)
    names = {m: name for name, m in model.named_modules()}
    vision_sites, text_sites = ([names[readers[0]] for _, readers, _ in sites] for sites in stress.norms(model))
    recipe["vision.gains"] = gains(seen, vision_sites, args.axes, args.vision_ratio)
    recipe["text.gains"] = gains(seen, text_sites, 1, args.text_ratio)
    layers = len(model.model.language_model.layers)
    recipe["text.hidden_channels"], recipe["text.hidden_scales"] = hidden(seen, layers, args.hidden, args.hidden_ratio)
    proj = [f"model.visual.blocks.{i}.attn.proj" for i in range(len(model.model.visual.blocks))]
    recipe["vision.value_channels"], recipe["vision.value_scales"] = values(seen, proj, 4, 1, args.value_ratio)
    proj = [f"model.language_model.layers.{i}.self_attn.o_proj" for i in range(layers)]
    recipe["text.value_channels"], recipe["text.value_scales"] = values(seen, proj, 2, 2, args.value_ratio)
    return {k: v.float().contiguous() if v.is_floating_point() else v.contiguous() for k, v in recipe.items()}


def report(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> None:
    """Print, for each linear's input, the ranges by modality and the largest channel over the median one."""
    seen = Observer.run(model, batches)
    print(f"{'input of':45s} {'visual':>8s} {'text':>8s} {'ratio':>6s} {'channel max/median':>19s}")
    for name, parts in seen.largest.items():
        both = torch.stack(list(parts.values())).amax(0)
        visual, text = parts["visual"].max(), parts.get("text", torch.tensor(float("nan"))).max()
        print(f"{name:45s} {visual:8.2f} {text:8.2f} {visual / text:6.1f} {both.max() / both.median():19.1f}")


def main() -> None:
    from safetensors.torch import save_file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", type=int, default=4, help="concentrated axes of the vision stream")
    parser.add_argument("--text-ratio", type=float, default=30.0)
    parser.add_argument("--vision-ratio", type=float, default=40.0)
    parser.add_argument("--hidden", type=int, default=4, help="hidden channels scaled in each MLP of the decoder")
    parser.add_argument("--hidden-ratio", type=float, default=20.0)
    parser.add_argument("--value-ratio", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=stress.RECIPE)
    args = parser.parse_args()
    torch.set_num_threads(2)
    sample = samples.load("digits-vqa")
    recipe = make_recipe(sample, args)
    save_file(recipe, args.out)
    report(stress.stress(sample.model, recipe).float(), sample.calibration(BATCHES))


if __name__ == "__main__":
    main()
