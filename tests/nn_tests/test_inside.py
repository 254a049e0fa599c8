import copy
import threading
import warnings

import pytest
import torch
from models import randomise, tiny_qwen2_vl
from often import often

import mmqc
from mmqc.nn.inside import InsideError, InsideWarning, outward
from mmqc.versions import ENCODERS

BASE, TOWER = "model", "model.visual"


@pytest.fixture(scope="module")
def rotated():
    model, inputs = tiny_qwen2_vl()
    model = randomise(model)
    before = copy.deepcopy(model)
    mmqc.quantize_(model, mmqc.recipes.rotate(), [inputs], progress=False)
    return before, model, inputs


@pytest.fixture(params=often(("quantized", "saved", "copied"), "saved"))
def one(request, rotated, tmp_path):
    """The float model, a rotated one, and what both take."""
    before, model, inputs = rotated
    if request.param == "saved":
        model.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path)
    return before, copy.deepcopy(model) if request.param == "copied" else model, inputs


def test_inside__hidden_states_are_refused(one):
    before, model, inputs = one
    plain = before(**inputs, output_hidden_states=True).hidden_states
    assert len(plain) > 1
    with pytest.raises(InsideError, match=r"the stream that model.* gives was rewritten .* not the original model's; take them"):
        model(**inputs, output_hidden_states=True)
    with pytest.raises(InsideError):
        model.generate(**inputs, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True)
    model.config.output_hidden_states = True
    try:
        with pytest.raises(InsideError):
            model(**inputs)
        assert model(**inputs, output_hidden_states=False).hidden_states is None
    finally:
        model.config.output_hidden_states = False


def test_inside__refused_when_compiled_too(rotated):
    _, model, inputs = rotated
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(InsideError):
        compiled(**inputs, output_hidden_states=True)


@torch.no_grad()
def test_inside__what_encoders_made_is_left_out(one):
    """transformers 5.23 and newer return it; of a rewritten model it would be in other coordinates."""
    before, model, inputs = one
    out, plain = model(**inputs), before(**inputs)
    assert type(out) is type(plain)
    assert not set(ENCODERS) & set(out)
    assert set(out) == set(plain) - set(ENCODERS)
    assert all(getattr(out, name, None) is None for name in ENCODERS)


@torch.no_grad()
def test_inside__a_part_by_itself_warns_of_other_values(one):
    before, model, inputs = one
    with pytest.warns(InsideWarning, match=rf"^{BASE} runs by itself: the stream that it gives was rewritten"):
        states = model.model(**inputs).last_hidden_state
    assert (states - before.model(**inputs).last_hidden_state).norm() > 0.1 * states.norm()
    image = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
    with pytest.warns(InsideWarning, match=rf"^{TOWER} runs by itself"):
        model.get_image_features(**image)


@pytest.mark.slow
def test_inside__the_whole_model_warns_of_nothing(one):
    _, model, inputs = one
    with warnings.catch_warnings():
        warnings.simplefilter("error", InsideWarning)
        model(**inputs)
        assert model.generate(**inputs, max_new_tokens=3).shape[1] > inputs["input_ids"].shape[1]
        torch.compile(model, backend="eager")(**inputs)


def test_inside__in_another_thread(rotated):
    _, model, inputs = rotated
    caught = []

    def work():
        with warnings.catch_warnings():
            warnings.simplefilter("error", InsideWarning)
            try:
                model(**inputs)
                model.model(**inputs)
            except InsideWarning as warning:
                caught.append(str(warning))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(caught) == 1
    assert caught[0].startswith(f"{BASE} runs")


def test_inside__nothing_where_nothing_was_rewritten():
    model, inputs = tiny_qwen2_vl()
    before = copy.deepcopy(model)
    mmqc.quantize_(model, mmqc.recipes.rtn(8), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", InsideWarning)
        model.model(**inputs)
    states = (m(**inputs, output_hidden_states=True).hidden_states for m in (before, model))
    assert all((a - b).norm() < 0.1 * a.norm() for a, b in zip(*states, strict=True))


def test_outward__members_of_lists_and_no_deeper():
    model, _ = tiny_qwen2_vl()
    names = {name for name, _ in outward(model)}
    assert {"model", "model.language_model", "model.visual", "model.language_model.layers.0", "model.visual.blocks.1"} <= names
    assert not any("attn" in name or "mlp." in name for name in names)
