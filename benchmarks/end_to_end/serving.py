"""A thousand requests by OpenAI's client to `mmqc serve`: are all answers right, does memory stay, what does a request cost?

    python -m benchmarks.end_to_end.serving [--requests 1000] [--parallel 8] [--no-compile] [--model DIRECTORY]

The sample digits-vqa, greedy, its test questions in turn with images as data URLs; a quarter of the requests stream.

First what a request costs: in one process, so that both see the same load of the machine, the server answers in a thread, and each
question is asked twice in turns, by `generate` itself in the server's generating thread and by the client. What `generate` answers
is right. Then `mmqc serve digits-vqa --warm` in a process of its own gets all requests, so many at a time; its resident memory is
read every 50 of them.

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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mmqc
from mmqc.cli.doctor import environment
from mmqc.cli.serving.command import Options, load
from mmqc.cli.serving.limits import Limits
from mmqc.cli.serving.server import application, listen
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
    questions = mmqc.samples.load("digits-vqa").questions(QUESTIONS)
    asked = [as_messages(q.prompt, q.images) for q in questions]
    found, right = in_turns(options, questions, asked)
    print(json.dumps(found, indent=1), flush=True)
    with subprocess.Popen(command(options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as server:
        log: list[str] = []
        threading.Thread(target=lambda: log.extend(server.stderr or ()), daemon=True).start()
        try:
            found |= together(options, server.pid, Client(address_of(server), asked), right)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)
    found["wrong_to_the_question"] = sum(text != q.answer for text, q in zip(right, questions, strict=True))
    found["log_lines"] = sum(" POST /v1/chat/completions 200" in line for line in log)
    found |= {"command": "python -m benchmarks.end_to_end.serving", **environment(), "exit_code": server.returncode}
    (ROOT / "benchmarks/results/serving.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: value for name, value in found.items() if name != "memory_mb"}, indent=1))


class Client:
    """OpenAI's, that asks the questions."""

    def __init__(self, address: str, asked: Sequence[Any]) -> None:
        import openai

        self.chat = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=600).chat
        self.asked = asked

    def __call__(self, i: int, stream: bool) -> tuple[str, float]:
        """The answer to question i, and its seconds."""
        start = time.perf_counter()
        given: Any = {"model": "digits", "messages": self.asked[i % QUESTIONS], "temperature": 0, "max_tokens": NEW_TOKENS}
        if stream:
            text = "".join(c.choices[0].delta.content or "" for c in self.chat.completions.create(stream=True, **given))
        else:
            text = self.chat.completions.create(**given).choices[0].message.content or ""
        return text, time.perf_counter() - start


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


def in_turns(options: argparse.Namespace, questions: Sequence[Any], asked: Sequence[Any]) -> tuple[dict[str, Any], list[str]]:
    """What direct calls and requests take, and what the direct ones answer."""
    import torch
    import uvicorn
    from transformers import GenerationConfig

    torch.set_num_threads(1)
    served = load(options.model, Options(compiled=not options.no_compile, name="digits"))
    app = application(served, Limits(), None)
    listening = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    client = Client(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", asked)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=served.processor.tokenizer.eos_token_id,
        cache_implementation="static" if served.compiled else None,
    )
    how: dict[str, Any] = {"custom_generate": mmqc.compiled_loop} if served.compiled else {}
    prompts = [served.processor.processor(q.prompt, q.images) for q in questions]
    right, calls, alone, wrong = [], [], [], 0
    try:
        for i in range(-WARM, QUESTIONS):
            start, busy = time.perf_counter(), time.process_time()
            ids = app.generation.submit(served.model.generate, **prompts[i], generation_config=config, **how).result()
            direct = time.perf_counter() - start, time.process_time() - busy
            text = served.processor.decode(ids[0, prompts[i]["input_ids"].shape[1] :])
            busy = time.process_time()
            said, took = client(i, stream=False)
            if i >= 0:
                right.append(text)
                calls.append(direct)
                alone.append((took, time.process_time() - busy))
                wrong += said != text
    finally:
        server.should_exit = True
        thread.join()
    found: dict[str, Any] = {"asked_alone": len(right), "wrong_alone": wrong}
    for name, index in (("", 0), ("processor_", 1)):
        of_calls, of_requests = ([each[index] for each in times] for times in (calls, alone))
        found[f"p50_{name}direct_ms"] = 1e3 * statistics.median(of_calls)
        found[f"p50_{name}alone_ms"] = 1e3 * statistics.median(of_requests)
        found[f"p50_{name}ratio_by_question"] = statistics.median(r / c for r, c in zip(of_requests, of_calls, strict=True))
    return found, right


def together(options: argparse.Namespace, pid: int, client: Client, right: Sequence[str]) -> dict[str, Any]:
    """All requests, so many at a time."""
    for i in range(WARM):
        client(i, stream=i % 4 == 0)
    memory, answers = [resident(pid)], []
    start = time.perf_counter()
    with ThreadPoolExecutor(options.parallel) as pool:
        for answer in pool.map(lambda i: client(i, stream=i % 4 == 0), range(options.requests)):
            answers.append(answer)
            if len(answers) % EVERY == 0:
                memory.append(resident(pid))
    seconds = time.perf_counter() - start
    return {
        "requests": options.requests,
        "parallel": options.parallel,
        "model": options.model,
        "compiled": not options.no_compile,
        "wrong": sum(text != right[i % QUESTIONS] for i, (text, _) in enumerate(answers)),
        "p50_parallel_ms": 1e3 * statistics.median(took for _, took in answers),
        "requests_per_second": options.requests / seconds,
        "ms_per_request_parallel": 1e3 * seconds / options.requests,
        "memory_mb": memory,
        "memory_growth": max(memory) / memory[0] - 1,
    }


def resident(pid: int) -> float:
    """MB of memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
