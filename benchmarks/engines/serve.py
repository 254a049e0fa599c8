"""Answers and speed of a checkpoint in vLLM, on GPUs.  **Not run yet**: it was written where no GPU had vLLM.

    python -m benchmarks.engines.serve FLOAT_DIR DATA --out out/float.json
    python -m benchmarks.engines.serve DIR DATA --load-format mmqc --ranks 2 --out out/w4a8.json
    python -m benchmarks.engines.serve AWQ_DIR DATA --lend linears attention --out out/lent.json

DIR is what ``model.save_pretrained`` or ``mmqc.save_pretrained(model, DIR, engine=...)`` wrote, without --load-format then; DATA a
folder with data.jsonl (docs/howto/command_line.md).  Greedy.  Seconds are of the second of two runs: the first one captures graphs.

    right           answers that are the expected one, white space aside
    first_seconds   one prompt until its first token
    tokens_a_second of all prompts at once
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import time
from pathlib import Path
from typing import Any

from mmqc.cli.chat_data import Example, read_examples


def messages(example: Example) -> list[dict[str, Any]]:
    """As OpenAI's clients say it, images in data URLs."""
    return [{**message, "content": [part(content) for content in message["content"]]} for message in example.messages]


def part(content: dict[str, Any]) -> dict[str, Any]:
    """A text as it is, an image as a data URL."""
    if content["type"] != "image":
        return content
    file = io.BytesIO()
    content["image"].save(file, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def timed(engine: Any, prompts: list[Any], tokens: int) -> tuple[list[Any], float]:
    """Answers, and the seconds of the second run."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    how = SamplingParams(temperature=0.0, max_tokens=tokens)
    engine.chat(prompts, how, use_tqdm=False)
    start = time.perf_counter()
    found = engine.chat(prompts, how, use_tqdm=False)
    return found, time.perf_counter() - start


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("data", type=Path)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--lend", nargs="*", choices=["linears", "attention"], help="what is mmqc's of a model that is not")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from vllm import LLM, __version__  # pyright: ignore[reportMissingImports]

    examples = list(read_examples(args.data))
    most = max(len(example.images) for example in examples)
    engine = LLM(
        args.checkpoint,
        load_format=args.load_format,
        tensor_parallel_size=args.ranks,
        mm_encoder_tp_mode="data",
        additional_config={} if args.lend is None else {"mmqc": args.lend},
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": most},
    )
    prompts = [messages(example) for example in examples]
    _, first = timed(engine, prompts[:1], 1)
    found, seconds = timed(engine, prompts, args.tokens)
    answers = [one.outputs[0].text.strip() for one in found]
    result = {
        "vllm": __version__,
        "checkpoint": args.checkpoint,
        "ranks": args.ranks,
        "lent": args.lend,
        "right": sum(a == example.answer.strip() for a, example in zip(answers, examples, strict=True)),
        "questions": len(examples),
        "first_seconds": first,
        "tokens_a_second": sum(len(one.outputs[0].token_ids) for one in found) / seconds,
        "answers": answers,
    }
    print(json.dumps({key: value for key, value in result.items() if key != "answers"}, indent=1))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
