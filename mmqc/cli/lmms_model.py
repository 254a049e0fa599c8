"""The model that lmms-eval asks under the name "mmqc": a directory of mmqc's or of transformers', or a sample by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lmms_eval.api.instance import GenerationResult, TokenCounts  # pyright: ignore[reportMissingImports]
from lmms_eval.api.model import lmms  # pyright: ignore[reportMissingImports]
from tqdm import tqdm

import mmqc
from mmqc.cli import jobs, source
from mmqc.cli.chat_data import DataError, Example, encode
from mmqc.cli.evaluation import to_device
from mmqc.samples import NAMES

GREEDY = {"max_new_tokens": 1024, "temperature": 0.0, "top_p": None, "num_beams": 1}  # where a task does not say


class LmmsModel(lmms):
    """A chat model of lmms-eval.

    Args:
        pretrained: a directory with a processor, or a sample's name.
        device: where it runs; default: cuda, if there is one.
        compiled: whether answers come through ``mmqc.compiled_loop`` (greedy ones alone do).
        batch_size: 1; prompts are asked one by one.

    Raises:
        DataError: the directory has no processor; another batch size; words that this model does not know.
    """

    is_simple = False

    def __init__(
        self, pretrained: str, device: str | None = None, compiled: bool = False, batch_size: int | str = 1, **unknown: Any
    ) -> None:
        super().__init__()
        if unknown:
            raise DataError(f"--model_args of mmqc: there is no {', '.join(unknown)}; there are pretrained, device and compiled")
        if int(batch_size) != 1:
            raise DataError(f"batch_size {batch_size}: mmqc asks one prompt at a time; leave it out")
        name = source.sample_of(pretrained, None)
        sample = None if name is None else mmqc.samples.load(name)
        self.processor = jobs.processor_of(pretrained, sample)
        loaded: Any = sample.model if sample is not None and pretrained in NAMES else jobs.load_model(pretrained)
        self.model: Any = loaded.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
        self.compiled = compiled

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def batch_size(self) -> int:
        """Prompts are asked one by one."""
        return 1

    def generate_until(self, requests: Sequence[Any]) -> list[Any]:
        """An answer for each request, up to what its task stops at."""
        answers = []
        for request in tqdm(requests, desc="Model Responding", disable=self.rank != 0):
            context, to_messages, given, doc, task, split = request.args
            answer = self.answer(to_messages, self.task_dict[task][split][doc], given)
            self.cache_hook.add_partial("generate_until", (context, given), answer.text)
            answers.append(answer)
        return answers

    @torch.no_grad()
    def answer(self, to_messages: Callable[[Any], Any], doc: Any, given: Mapping[str, Any]) -> Any:
        """The model's answer to the messages that a task makes of a document."""
        options = {**GREEDY, **given}
        stops = options.pop("until", None) or []
        if not options["temperature"]:
            options |= {"do_sample": False, "temperature": None, "top_p": None}
        if self.compiled and not options.get("do_sample") and options["num_beams"] == 1:
            options |= {"custom_generate": mmqc.compiled_loop, "cache_implementation": "static"}
        prompt = to_device(encode(self.processor, example(to_messages(doc)), answer=False), self.model)
        new = self.model.generate(**prompt, **options)[0, prompt["input_ids"].shape[1] :]
        text = getattr(self.processor, "tokenizer", self.processor).decode(new, skip_special_tokens=True)
        for stop in [stops] if isinstance(stops, str) else stops:
            text = text.split(stop)[0] if stop else text
        return GenerationResult(text=text.strip(), token_counts=TokenCounts(output_tokens=len(new)))

    def loglikelihood(self, requests: Sequence[Any]) -> list[Any]:
        """Not here: tasks for chat models ask for answers.

        Raises:
            NotImplementedError: always; says what to use.
        """
        raise NotImplementedError("mmqc in lmms-eval generates; for log-likelihoods take `mmqc eval`, or lm-evaluation-harness")

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[Any]:
        """Not here.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("mmqc in lmms-eval answers one prompt at a time; tasks of several rounds are not supported")


def example(messages: Sequence[Mapping[str, Any]]) -> Example:
    """A task's messages as ours.

    Raises:
        DataError: one holds a video or sound.
    """

    def part(content: Mapping[str, Any]) -> dict[str, Any]:
        if content["type"] == "image":
            image = content["url"]
            return {"type": "image", "image": image.convert("RGB") if hasattr(image, "convert") else image}
        if content["type"] != "text":
            raise DataError(f"a task asks with a {content['type']}; mmqc's model takes text and images")
        return dict(content)

    return Example(tuple({"role": m["role"], "content": [part(c) for c in m["content"]]} for m in messages))
