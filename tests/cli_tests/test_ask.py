"""One question: the answer, its speed, what ran."""

import re
from types import SimpleNamespace

import pytest
import torch
from commands import invoke
from own_model import processor, write_data, write_model
from torch import nn

import mmqc
from mmqc.cli import ask
from mmqc.cli.chat_data import DataError


def test_ask__from_the_shell_on_a_model_of_ones_own(tmp_path) -> None:
    write_model(tmp_path / "model")
    write_data(tmp_path / "data")
    out, image = str(tmp_path / "out"), str(tmp_path / "data" / "0.png")
    assert invoke("quantize", str(tmp_path / "model"), "--recipe", "rtn", "--w", "8", "--out", out).exit_code == 0
    result = invoke("ask", out, "--image", image, "w10 w20", "--max-new-tokens", "4", "--device", "cpu")
    assert result.exit_code == 0, result.output
    answer, times, ran = result.output.strip().splitlines()[-3:]
    assert re.search(r"w\d+( w\d+)*$", answer)  # a progress bar may stand in front
    assert re.fullmatch(r"\d tokens: the first after \d+ ms(, then [\d.]+ tokens/s)?", times)
    assert re.fullmatch(r"linears: \d+ in W8A16, 1 in floating point; eager on cpu, float32", ran)
    (tmp_path / "no.png").write_bytes(b"no image")
    for name, words in (("none.png", "does not exist"), ("no.png", "no image that PIL can read")):
        result = invoke("ask", out, "--image", str(tmp_path / name), "w10")
        assert result.exit_code == 3
        assert words in result.output


class Model(nn.Module):
    """Gives three tokens more than it was given, through its streamer as transformers' ``generate`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.calls: list[dict] = []

    def generate(self, input_ids, streamer=None, **options):
        self.calls.append(options)
        new = torch.tensor([[11, 12, 13]])
        if streamer is not None:
            streamer.put(input_ids)
            for token in new[0]:
                streamer.put(token)
            streamer.end()
        return torch.cat((input_ids, new), 1)


def test_ask__counts_tokens_behind_the_first_and_compiles_before_it_times(tmp_path) -> None:
    write_data(tmp_path, 1)
    asked = ask.example("w10 w20", [tmp_path / "0.png"])
    assert [part["type"] for part in asked.messages[0]["content"]] == ["image", "text"]
    model = Model()
    said = ask.ask(model, processor(), asked, 5)
    assert (said.text, said.tokens) == ("w11 w12 w13", 3)
    assert said.tokens_per_s > 0
    ask.ask(model, processor(), asked, 5, compiled=True)
    assert [call.get("custom_generate") for call in model.calls] == [None, mmqc.compiled_loop, mmqc.compiled_loop]
    with pytest.raises(DataError, match="does not exist"):
        ask.example("w10", [tmp_path / "none.png"])


def test_ran__names_schemes_adapters_and_cache() -> None:
    from mmqc.nn.adapted_linear import AdaptedLinear, LowRank

    model = Model()
    assert ask.ran(model, False) == "linears: 1 in floating point; eager on cpu, float32"
    term = LowRank(torch.zeros(1, 2), torch.zeros(2, 1), None)
    model.head = AdaptedLinear(model.head, {"mine": term})
    model.config = SimpleNamespace(quantization_config=SimpleNamespace(config={"kv": {"bits": 2}}))
    told = "linears: 1 in floating point; adapters: mine; a KV cache of 2 bits; mmqc.compiled_loop on cpu, float32"
    assert ask.ran(model, True) == told
