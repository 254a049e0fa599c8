"""Threads that share a model whose cache is packed by modality, with images of other sizes in every prompt."""

import sys
import threading

import pytest
import torch

import mmqc
from mmqc import recipes

THREADS, CALLS = 4, 6
RECIPES = {
    "calibquant": recipes.calibquant(bits=2),
    "both": recipes.mquant(8, solver="rtn").replace(kv=recipes.calibquant(bits=2).kv),
}


@pytest.fixture(scope="module")
def sample():
    return mmqc.samples.load("digits-vqa")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@torch.no_grad()
def test_threads__get_the_tokens_of_one_thread(sample, recipe):
    model = mmqc.samples.load("digits-vqa").model
    prompts = sample.calibration(6)
    mmqc.quantize_(model, recipe, prompts[:3], progress=False)
    assert len({p["input_ids"].shape for p in prompts}) > 1 or len({p["pixel_values"].shape for p in prompts}) > 1

    def ask(prompt):
        return model.generate(**prompt, max_new_tokens=3, do_sample=False)

    wanted, wrong = [ask(p) for p in prompts], []

    def work(number):
        for i in range(CALLS):
            n = (number * 5 + i) % len(prompts)
            try:
                with torch.no_grad():
                    wrong.extend([] if torch.equal(ask(prompts[n]), wanted[n]) else [(number, n)])
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert wrong == []
