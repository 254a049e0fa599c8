"""Where the bits of visual keys and values should go: finer ranges, other codes, or other layers.

    python -m examples.studies.kv_ranges_study docs-vqa --kind page --questions 50 --calibration 36
    python -m examples.studies.kv_ranges_study digits-vqa --questions 160 --calibration 48
    python -m examples.studies.kv_ranges_study --draw                    docs/results/kv_ranges.md from the figures on file

A prompt attends exactly and is run once; then its visual keys and values are rounded, scheme by scheme, and the tokens of the right
answer read them.  KL is of those tokens from the plain cache; an answer is right if every token of it is the likeliest.  Bits count
ranges of 16 bits for an end and 16 for a step.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import mmqc
from examples.studies.study import ROOT, about, read, store, table
from mmqc.kv.generate import detach
from mmqc.kv.query_moment import moment_of
from mmqc.ops.kv_round_keys import DAMPING, SWEEPS
from mmqc.ops.kv_words import BITS, unpack_words
from mmqc.recipes import calibquant
from mmqc.samples import scoring

RESULTS, PAGE = ROOT / "docs/results/kv_ranges.json", ROOT / "docs/results/kv_ranges.md"
RANGE = 32  # bits of an end and a step


@dataclass(frozen=True)
class Scheme:
    """How a layer is rounded.

    Attributes:
        bits: of each layer.
        tokens: that share a channel's range; 0: all.
        values: "channel" or "token", whose range is over a head's channels.
        queries: whether keys of 1 and 2 bits are rounded for queries.
        keys_only: values stay as they are.
    """

    bits: tuple[int, ...]
    tokens: int = 0
    values: str = "channel"
    queries: bool = False
    keys_only: bool = False

    def rounded(self, layer: int, k: Tensor, v: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
        """Visual keys and values [1, H, N, D] as a cache would give them back."""
        bits = self.bits[layer]
        shrink = 0.6 if bits == 1 else 1.0

        def keys(x: Tensor) -> Tensor:
            if self.queries and bits <= 2:
                return back(torch.ops.mmqc.kv_round_keys(x, *places(x), moment, bits, shrink, DAMPING, SWEEPS), x, bits)
            return back(torch.ops.mmqc.kv_pack(x, *places(x), bits, "channel", shrink, False), x, bits)

        def values(x: Tensor) -> Tensor:
            return back(torch.ops.mmqc.kv_pack(x, *places(x), bits, self.values, shrink, False), x, bits)

        tokens = self.tokens or k.shape[2]
        whole = [torch.cat([change(x) for x in t.split(tokens, 2)], 2) for change, t in ((keys, k), (values, v))]
        return whole[0], v if self.keys_only else whole[1]

    def average(self, tokens: float, width: int) -> float:
        """Bits of a key or value with its share of the ranges, for so many visual tokens and channels of a head."""
        keys = RANGE / min(self.tokens or tokens, tokens)
        values = RANGE / width if self.values == "token" else keys
        return sum(self.bits) / len(self.bits) + (keys + values) / 2


def places(x: Tensor) -> tuple[Tensor, Tensor]:
    """All tokens, in order."""
    return torch.arange(x.shape[2])[None], torch.tensor([x.shape[2]], dtype=torch.int32)


def back(packed: tuple[Tensor, Tensor, Tensor], x: Tensor, bits: int) -> Tensor:
    words, scale, offset = packed
    return (unpack_words(words, bits).to(scale) * scale + offset)[:, :, : x.shape[2]].to(x)


@dataclass
class Prompt:
    """One question behind its images: what the plain cache holds and says."""

    kind: str
    answer: Tensor
    visual: Tensor
    layers: list[tuple[Tensor, Tensor]]
    position: Tensor
    exact: Tensor
    first: bool

    @classmethod
    @torch.no_grad()
    def of(cls, sample: Any, question: Any) -> Prompt:
        """Run the prompt."""
        model, full = sample.model, sample.processor(question.prompt, question.images, answer=question.answer)
        inputs, cache = sample.processor(question.prompt, question.images), DynamicCache()
        length = inputs["input_ids"].shape[1]
        answer = full["input_ids"][:, length:]
        logits = model(**inputs, past_key_values=cache, use_cache=True).logits[0, -1]
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        place = torch.arange(answer.shape[1]) + length + model.model.rope_deltas[0]
        prompt = cls(
            question.kind,
            answer,
            inputs["mm_token_type_ids"][0].bool(),
            layers,
            place[None, None].expand(3, 1, -1),
            logits,
            bool(logits.argmax() == answer[0, 0]),
        )
        prompt.exact = prompt.read(model, layers)
        return prompt

    @torch.no_grad()
    def read(self, model: Any, layers: list[tuple[Tensor, Tensor]]) -> Tensor:
        """log p [T - 1, V] of the answer's tokens but the first, over these keys and values."""
        cache = DynamicCache()
        for i, (k, v) in enumerate(layers):
            cache.update(k, v, i)
        mask = torch.ones(1, layers[0][0].shape[2] + self.answer.shape[1], dtype=torch.long)
        given = {"input_ids": self.answer, "position_ids": self.position, "attention_mask": mask}
        return model(**given, past_key_values=cache, use_cache=True).logits[0, :-1].log_softmax(-1)

    def outcome(self, model: Any, scheme: Scheme, moments: list[Tensor]) -> tuple[float, float, bool]:
        """KL, agreement, and whether the answer is right."""
        layers = []
        for i, (k, v) in enumerate(self.layers):
            k, v = k.clone(), v.clone()
            k[:, :, self.visual], v[:, :, self.visual] = scheme.rounded(i, k[:, :, self.visual], v[:, :, self.visual], moments[i])
            layers.append((k, v))
        found = self.read(model, layers)
        kl = (self.exact.exp() * (self.exact - found)).sum(-1).mean()
        same = (found.argmax(-1) == self.exact.argmax(-1)).float().mean()
        return float(kl), float(same), self.right(found)

    def right(self, log_p: Tensor) -> bool:
        """Whether greedy decoding gives the right answer."""
        return self.first and bool((log_p.argmax(-1) == self.answer[0, 1:]).all())


def calibrated(sample: Any, bits: int, batches: list[Any]) -> tuple[tuple[int, ...], list[Tensor]]:
    """The bits that ``quantize_`` finds for the layers, and their queries' moments."""
    model = copy.deepcopy(sample.model)
    report = mmqc.quantize_(model, calibquant(bits, by_layer=True), calibration=batches, progress=False)
    detach(model)
    moments = [m for m in map(moment_of, model.modules()) if m is not None]
    assert report.config.kv is not None
    return report.config.kv.layer_bits, moments


def schemes(bits: int, found: tuple[int, ...]) -> Iterator[tuple[str, Scheme]]:
    """By name."""
    alike = (bits,) * len(found)
    yield "bits by layer", Scheme(found, queries=True)
    yield "bits by layer, a range for 64 tokens", Scheme(found, 64, queries=True)
    if bits not in BITS:
        return
    yield "one range a channel", Scheme(alike)
    yield "one range a channel, keys alone", Scheme(alike, keys_only=True)
    for tokens in (128, 64, 32):
        yield f"a range for {tokens} tokens", Scheme(alike, tokens)
    yield "a range for 32 tokens, values by token (KIVI)", Scheme(alike, 32, "token")
    if bits <= 2:
        yield "keys for queries", Scheme(alike, queries=True)
        yield "a range for 64 tokens, keys for queries", Scheme(alike, 64, queries=True)


def measure(options: argparse.Namespace) -> None:
    sample = mmqc.samples.load(options.sample)
    asked = [q for q in sample.questions() if options.kind in (None, q.kind)][: options.questions]
    prompts = [Prompt.of(sample, q) for q in asked]
    tokens = sum(float(p.visual.sum()) for p in prompts) / len(prompts)
    width, batches = prompts[0].layers[0][0].shape[-1], sample.calibration(options.calibration)
    rows = []
    for bits in options.bits:
        found, moments = calibrated(sample, bits, batches)
        for name, scheme in schemes(bits, found):
            seen = [p.outcome(sample.model, scheme, moments) for p in prompts]
            kl, same, right = (list(each) for each in zip(*seen, strict=True))
            rows.append({
                "bits": bits, "scheme": name, "layers": scheme.bits, "average": round(scheme.average(tokens, width), 2), "kl": kl,
                "agreement": sum(same) / len(same), "right": sum(right),
            })  # fmt: skip
            print(bits, name, f"KL {scoring.bootstrap(kl)}  right {sum(right)}", flush=True)
    data = read(RESULTS) if RESULTS.exists() else {}
    rows += [row for row in data.get(options.sample, {"rows": []})["rows"] if row["bits"] not in options.bits]
    data[options.sample] = {
        "about": about(f"python -m examples.studies.kv_ranges_study {options.sample} {options.arguments}"),
        "kind": options.kind,
        "visual": round(tokens),
        "right": sum(p.right(p.exact) for p in prompts),
        "rows": sorted(rows, key=lambda row: row["bits"]),
    }
    store(RESULTS, data, indent=None)


def section(name: str, data: dict[str, Any]) -> str:
    """One sample's table."""
    head = ("bits", "scheme", "bits with ranges", "KL", "agreement", "right answers")
    rows = []
    for row in data["rows"]:
        kl = scoring.bootstrap(row["kl"])
        layers = f" ({' '.join(map(str, row['layers']))})" if len(set(row["layers"])) > 1 else ""
        interval = f"{kl.mean:.2g} [{max(kl.low, 0):.2g}, {kl.high:.2g}]"
        rows.append((
            str(row["bits"]), row["scheme"] + layers, f"{row['average']:.2f}", interval, f"{100 * row['agreement']:.1f}",
            str(row["right"]),
        ))  # fmt: skip
    count = len(data["rows"][0]["kl"])
    what = f"{count} questions{' of kind ' + data['kind'] if data['kind'] else ''}, {data['visual']} visual tokens on average"
    stamp = ", ".join(f"{key} {value}" for key, value in data["about"].items())
    return f"## {name}\n\n{what}; with the plain cache {data['right']} answers are right.\n\n{table(head, rows)}\n\n{stamp}\n"


def draw() -> None:
    """The page from the file."""
    text = """# Ranges and bits of the KV cache

Where bits of visual keys and values are worth most ([what is stored](../explanation/calibquant.md)): in finer ranges, in codes
chosen for queries, or in other layers. KL is in nats a token from the plain cache, with 95 % intervals of a bootstrap over
questions; agreement of the likeliest tokens is in percent; an answer is right if all of its tokens are the likeliest. "Bits with
ranges" counts 16 bits for an end and 16 for a step; the cache has 32 for each, and one pair a channel for all visual tokens that
came together. Rounded values in front of plain attention; what decoding through the cache gives is on [another page](docs_vqa.md).

"""
    PAGE.write_text(text + "\n".join(section(name, data) for name, data in read(RESULTS).items()), encoding="utf-8")


def main() -> None:
    """Measure, or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sample", nargs="?", default="docs-vqa")
    parser.add_argument("--kind", help="questions of this kind alone")
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--calibration", type=int, default=36)
    parser.add_argument("--bits", type=int, nargs="*", default=[2, 3, 4], help="on average; others stay on file")
    parser.add_argument("--draw", action="store_true", help="only make the page")
    options = parser.parse_args()
    kind = f"--kind {options.kind} " if options.kind else ""
    options.arguments = f"{kind}--questions {options.questions} --calibration {options.calibration}"
    if not options.draw:
        measure(options)
    draw()


if __name__ == "__main__":
    main()
