"""A thousand requests by OpenAI's client to `mmqc serve`: are all answers right, does memory stay, what does a request cost?

    python -m benchmarks.end_to_end.serving [--requests 1000] [--parallel 8] [--no-compile] [--model DIRECTORY]

The sample digits-vqa, greedy, its test questions in turn with images as data URLs; a quarter of the requests stream. The server is
a process of its own (`mmqc serve digits-vqa --warm`); right is what `generate` with the same loop answers to the prompt in the
client's process, which also gives the time of a direct call: 200 times a direct call and a request in turns. Then all requests, so
many at a time; resident memory of the server is read every 50 of them.

Writes benchmarks/results/serving.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mmqc
from mmqc.cli.doctor import environment
from mmqc.samples.chat import as_messages

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS, WARM, NEW_TOKENS, EVERY = 200, 20, 80, 50


def main() -> None:
    """Measure, print and write."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--requests", type=int, default=1000)
    arguments.add_argument("--parallel", type=int, default=8)
    arguments.add_argument("--no-compile", action="store_true")
    arguments.add_argument("--model", default="digits-vqa", help="the sample, or a directory that it was quantized to")
    options = arguments.parse_args()
    with subprocess.Popen(command(options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as server:
        log: list[str] = []
        threading.Thread(target=lambda: log.extend(server.stderr or ()), daemon=True).start()
        try:
            found = measure(options, server, address_of(server))
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)
    found["log_lines"] = sum(" POST /v1/chat/completions 200" in line for line in log)
    found |= {"command": "python -m benchmarks.end_to_end.serving", **environment(), "exit_code": server.returncode}
    (ROOT / "benchmarks/results/serving.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in found.items() if name != "memory_mb"}, indent=1))


def command(options: argparse.Namespace) -> list[str]:
    """The server's."""
    more = ["--no-compile"] if options.no_compile else ["--warm"]
    return [sys.executable, "-m", "mmqc.cli", "serve", options.model, "--port", "0", "--name", "digits", *more]


def address_of(server: subprocess.Popen[str]) -> str:
    """Where it listens, once it says so."""
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", flush=True)
        if address := re.search(r" at (http://\S+?),", line):
            return address[1]
    raise RuntimeError("the server ended before it listened")


def measure(options: argparse.Namespace, server: subprocess.Popen[str], address: str) -> dict[str, Any]:
    """Requests alone, requests in parallel, and direct calls, all over the same questions."""
    import openai

    sample = mmqc.samples.load("digits-vqa")
    questions = sample.questions(QUESTIONS)
    asked = [as_messages(q.prompt, q.images) for q in questions]
    client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=600)

    def ask(i: int, stream: bool) -> tuple[int, str, float]:
        start = time.perf_counter()
        given: Any = {"model": "digits", "messages": asked[i % QUESTIONS], "temperature": 0, "max_tokens": NEW_TOKENS}
        if stream:
            text = "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(stream=True, **given))
        else:
            text = client.chat.completions.create(**given).choices[0].message.content or ""
        return i % QUESTIONS, text, time.perf_counter() - start

    answer = direct(options, sample)
    prompts = [sample.processor(q.prompt, q.images) for q in questions]
    right, calls, alone = {}, [], []
    for i in range(-WARM, QUESTIONS):  # in turns, so that both see the same load of the machine
        text, took = answer(prompts[i])
        asking = ask(i, stream=False)
        if i >= 0:
            right[i] = text
            calls.append(took)
            alone.append(asking)
    memory, done = [resident(server.pid)], 0
    start = time.perf_counter()
    together: list[tuple[int, str, float]] = []
    with ThreadPoolExecutor(options.parallel) as pool:
        for answered in pool.map(lambda i: ask(i, stream=i % 4 == 0), range(options.requests)):
            together.append(answered)
            done += 1
            if done % EVERY == 0:
                memory.append(resident(server.pid))
    seconds = time.perf_counter() - start
    return {
        "requests": options.requests,
        "parallel": options.parallel,
        "model": options.model,
        "compiled": not options.no_compile,
        "wrong": sum(text != right[i] for i, text, _ in (*alone, *together)),
        "wrong_to_the_question": sum(text != questions[i].answer for i, text in right.items()),
        "p50_direct_ms": 1e3 * statistics.median(calls),
        "p50_alone_ms": 1e3 * statistics.median(took for *_, took in alone),
        "mean_direct_ms": 1e3 * statistics.mean(calls),
        "mean_alone_ms": 1e3 * statistics.mean(took for *_, took in alone),
        "p50_parallel_ms": 1e3 * statistics.median(took for *_, took in together),
        "requests_per_second": options.requests / seconds,
        "ms_per_request_parallel": 1e3 * seconds / options.requests,
        "memory_mb": memory,
        "memory_growth": max(memory) / memory[0] - 1,
    }


def direct(options: argparse.Namespace, sample: Any) -> Callable[[Any], tuple[str, float]]:
    """Asks ``generate`` itself, with the server's loop: the answer, and its seconds."""
    from transformers import GenerationConfig

    from mmqc.cli.jobs import load_model

    model = sample.model if options.model == "digits-vqa" else load_model(options.model)
    config = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=sample.processor.tokenizer.eos_token_id)
    loop: dict[str, Any] = {}
    if not options.no_compile:
        config.cache_implementation, loop = "static", {"custom_generate": mmqc.compiled_loop}

    def answer(prompt: Any) -> tuple[str, float]:
        start = time.perf_counter()
        ids = model.generate(**prompt, generation_config=config, **loop)[0, prompt["input_ids"].shape[1] :]
        took = time.perf_counter() - start
        return sample.processor.decode(ids), took

    return answer


def resident(pid: int) -> float:
    """MB of memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
