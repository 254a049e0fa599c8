"""docs/first_screen.png, the picture of the README: one page of handwriting, and what three models read on it.

    python -m benchmarks.pages.first_screen

The sample in coordinates that are hard to quantize (digits-vqa-stress), in float32, in W4A8 with one static scale a tensor, and in
W4A8 by MQuant; 32 prompts of calibration. The page is the first of the evaluation's transcriptions; digits that are wrong are red.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import mmqc
from mmqc import recipes
from mmqc.quantization.convert import size_of

PICTURE = Path(__file__).resolve().parents[2] / "docs/first_screen.png"
STATIC = recipes.mquant(4, msq=False, rotate=False, suppress=False)
MODELS = (("float32", None), ("W4A8, one scale a tensor", STATIC), ("W4A8 by mmqc", recipes.mquant(4)))
BLACK, RED, GREY = "#1f2328", "#cf222e", "#59636e"


def main() -> None:
    """Ask the three models, and draw."""
    sample = mmqc.samples.load("digits-vqa-stress")
    question = next(q for q in sample.questions() if q.kind == "image")
    answers = []
    for name, config in MODELS:
        model: Any = copy.deepcopy(sample.model)
        if config is not None:
            mmqc.quantize_(model, config, calibration=sample.calibration(32), progress=False)
        size = size_of(model) / 1e6
        prompt = sample.processor(question.prompt, question.images)
        ids = model.generate(**prompt, max_new_tokens=len(question.answer) + 1, do_sample=False)
        said = sample.processor.decode(ids[0, prompt["input_ids"].shape[1] :])
        answers.append((name, size, said))
        print(f"{name:28s} {size:5.1f} MB  {said}")
    print(f"{'right':38s} {question.answer}")
    draw(question.images[0], question.question, question.answer, answers)


def draw(page: Any, question: str, right: str, answers: list[tuple[str, float, str]]) -> None:
    """The page on the left, the answers on the right, a row each."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, text) = plt.subplots(1, 2, figsize=(11, 2.9), width_ratios=(1, 3.1), dpi=130, facecolor="white")
    left.imshow(page, interpolation="nearest")
    left.axis("off")
    text.axis("off")
    text.set(xlim=(0, 100), ylim=(0, 10))
    text.text(0, 9.2, f'"{question}"', fontsize=13, color=GREY, style="italic")
    for row, (name, size, said) in enumerate(answers):
        y = 6.6 - 2.9 * row
        text.text(0, y + 1.05, f"{name}, {size:.1f} MB", fontsize=11, color=GREY)
        for place, letter in enumerate(said[: len(right)]):
            wrong = letter != right[place]
            text.text(place * 1.95, y - 0.2, letter, fontsize=13, family="monospace", color=RED if wrong else BLACK)
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Software": None})


if __name__ == "__main__":
    main()
