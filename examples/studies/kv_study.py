"""What a quantized KV cache costs on the sample: transcriptions of at least 36 digits, generated token by token.

    python -m examples.studies.kv_study [--questions 128] [--calibration 16] [--out docs/results/kv_cache.json]
    python -m examples.studies.kv_study --page docs/results/kv_cache.json          the page beside it, from the figures

Recovery is the digits right with the cache over those with the plain one.  tau and the moments of queries come from calibration
prompts, whose scans are not those of the questions.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import mmqc
from mmqc.kv.generate import detach
from mmqc.recipes import calibquant, global_range, kivi
from mmqc.samples import scoring

ROOT = Path(__file__).resolve().parents[2]

QUERIES = {"search": "none", "rounding": "queries"}
NEAREST = {"search": "none", "rounding": "nearest"}
FULL = {"shrink_keys": 1.0, "shrink_values": 1.0}
METHODS: dict[str, Any] = {
    "1 bit, no tau": calibquant(1, **QUERIES),
    "1 bit, nearest codes, no tau": calibquant(1, **NEAREST),
    "2 bits, no tau": calibquant(2, search="none"),
    "4 bits": calibquant(4),
    "8 bits": calibquant(8),
    "1 bit, no tau, values with one range": calibquant(1, values="tensor", **QUERIES),
    "1 bit, no tau, values by token": calibquant(1, values="token", **QUERIES),
    "1 bit, no tau, full range": calibquant(1, **QUERIES, **FULL),
    "1 bit, nearest codes, no tau, full range": calibquant(1, **NEAREST, **FULL),
    "1 bit, nearest codes, full range": calibquant(1, rounding="nearest", **FULL),
    "1 bit, nearest codes, full range, by layer": calibquant(1, rounding="nearest", **FULL | {"search": "layer"}),
    "1 bit, nearest codes, full range, the authors' tau": calibquant(1, tau=((0.0, 3.0),), **NEAREST, **FULL),
    "1 bit, no tau, text in 8 bits": calibquant(1, text_bits=8, text_window=16, **QUERIES),
    "1 bit, no tau, text in 4 bits": calibquant(1, text_bits=4, text_window=16, **QUERIES),
    "KIVI, 2 bits": kivi(2),
    "KIVI, 1 bit": kivi(1),
    "one range, 2 bits": global_range(2),
    "one range, 1 bit": global_range(1),
    "1 bit": calibquant(1),
    "1 bit, nearest codes": calibquant(1, rounding="nearest"),
    "2 bits": calibquant(2),
}
BARS = {"8 bits": 0.995, "4 bits": 0.995, "2 bits": 0.98, "2 bits, no tau": 0.98, "1 bit": 0.93, "1 bit, no tau": 0.93}


def accuracies(model: Any, sample: Any, questions: list[Any]) -> np.ndarray:
    """Of every transcription, the fraction of its digits that are right."""
    order, out = sorted(range(len(questions)), key=lambda i: len(questions[i].answer)), np.zeros(len(questions))
    for start in range(0, len(order), 32):
        index = order[start : start + 32]
        answers = scoring.greedy_answers(model, sample.processor, [questions[i] for i in index])
        for i, answer in zip(index, answers, strict=True):
            out[i] = scoring.accuracy("image", answer, questions[i].answer)
    return out


def sizes(model: Any, sample: Any, questions: list[Any]) -> dict[str, float]:
    """Visual tokens of a prompt, and how many times smaller they are."""
    prompt = sample.processor(questions[0].prompt, questions[0].images)
    cache = mmqc.QuantizedCache(model)
    with torch.no_grad():
        model(**prompt, past_key_values=cache, use_cache=True)
    found = cache.sizes()
    return {"visual_tokens": int(prompt["mm_token_type_ids"].sum()), "smaller": found["visual_plain"] / found["visual"]}


def large(bits: int, tokens: int = 8192, width: int = 128) -> float:
    """How many times smaller than 16 bits the keys of one head are, with their scales and offsets, by the op's own output."""
    order, count = torch.arange(tokens)[None], torch.tensor([tokens], dtype=torch.int32)
    made = torch.ops.mmqc.kv_pack(torch.randn(1, 1, tokens, width), order, count, bits, "channel", 1.0, False)
    return 2 * tokens * width / (sum(t.numel() * t.element_size() for t in made) + 4)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The figures so far, after every method: what is there is good for a page if the rest is cut off."""
    sample = mmqc.samples.load("digits-vqa")
    model = sample.model
    questions = [q for q in sample.questions(5 * args.questions) if q.kind == "image"]
    calibration = sample.calibration(5 * args.calibration)[4::5]
    digits = [sum(c.isdigit() for c in q.answer) for q in questions]
    plain = accuracies(model, sample, questions)
    rows: dict[str, Any] = {}
    data = {
        "command": f"python -m examples.studies.kv_study --questions {args.questions} --calibration {args.calibration}",
        "device": platform.machine() + " CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "questions": len(questions),
        "digits": [min(digits), max(digits)],
        "plain": plain.mean(),
        "rows": rows,
        "bars": BARS,
        "smaller_at_8192": {str(bits): large(bits) for bits in (8, 4, 2, 1)},
    }
    for name, config in METHODS.items():
        start, rng = time.perf_counter(), np.random.default_rng(0)
        report = mmqc.quantize_(model, config, calibration=calibration, progress=False)
        kv = report.config.kv
        assert kv is not None
        found = accuracies(model, sample, questions)
        draws = rng.integers(len(plain), size=(2000, len(plain)))
        low, high = np.quantile(found[draws].mean(1) / plain[draws].mean(1), [0.025, 0.975])
        rows[name] = {"recovery": found.mean() / plain.mean(), "low": low, "high": high, "bits": kv.bits, "tau": kv.tau}
        rows[name] |= {**sizes(model, sample, questions), "seconds": time.perf_counter() - start}
        print(f"{rows[name]['recovery']:.4f} [{low:.4f}, {high:.4f}]  {name}  tau {kv.tau}", flush=True)
        detach(model)
        yield data


def page(data: dict[str, Any]) -> str:
    """Markdown."""
    low, high = data["digits"]
    lines = [
        "# Quantized KV cache: the sample",
        "",
        f"`{data['command']}` on {data['device']}, float32, torch {data['torch']}, transformers {data['transformers']}.  "
        f"{data['questions']} transcriptions of {low} to {high} digits from `digits-vqa`, greedy; the plain cache gets "
        f"{data['plain']:.4f} of the digits right.  Recovery is relative to that, with a bootstrap 95 % interval over questions.",
        "",
        "| cache | recovery | interval | tau | bar |",
        "|---|---|---|---|---|",
    ]
    for name, row in data["rows"].items():
        tau = ", ".join(f"({a:g}, {b:g})" for a, b in row["tau"]) or "none"
        least = data["bars"].get(name)
        bar = "" if least is None else f"{least} {'met' if row['recovery'] >= least else 'missed'}"
        lines.append(f"| {name} | {row['recovery']:.4f} | {row['low']:.4f} … {row['high']:.4f} | {tau} | {bar} |")
    one = data["rows"].get("1 bit, no tau", next(iter(data["rows"].values())))
    lines += [
        "",
        "Visual tokens, keys and values with their scales, offsets and counts, against 16 bits:",
        "",
        "| bits | times smaller at 8,192 visual tokens (head width 128) |",
        "|---|---|",
        *(f"| {bits} | {value:.2f} |" for bits, value in data["smaller_at_8192"].items()),
        "",
        f"The sample's first prompt has {one['visual_tokens']} visual tokens and heads of 64: {one['smaller']:.2f} times at "
        f"{one['bits']} bit, because the scales of a channel are shared by few tokens.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=128)
    parser.add_argument("--calibration", type=int, default=48)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/kv_cache.json")
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    path = args.page or args.out
    for data in measure(args) if args.page is None else ():
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(json.loads(path.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
