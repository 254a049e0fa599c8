"""Decoding by bits of the cache, a tiny shape on a CPU: what is measured is decoding, and the batch is the largest that fits."""

import json
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.end_to_end import kv_throughput, kv_throughput_runs
from benchmarks.end_to_end.kv_throughput_model import SHAPES, Shape, cache_bytes, decoder, filled, shape_of
from benchmarks.end_to_end.kv_throughput_runs import Bench, Row, Settings
from mmqc import QuantizedCache

CPU = torch.device("cpu")
TINY = Settings((16, 2), (1e-4, 3e-4), visual=48, text=4, tokens=6, steps=2, ways=("dynamic", "eager"))


@pytest.mark.parametrize("bits", [16, 2])
@torch.no_grad()
def test_filled__decodes_from_where_it_says(bits: int) -> None:
    model = decoder(SHAPES["tiny"], CPU, torch.float32, 100)
    cache = filled(model, bits, 3, 40, 5, 4)
    assert int(cache.get_seq_length()) == 45
    assert isinstance(cache, QuantizedCache) == (bits < 16)
    tokens = torch.zeros(3, 1, dtype=torch.int64)
    out = model(input_ids=tokens, position_ids=torch.full((3, 1), 45), past_key_values=cache, use_cache=True).logits
    assert bool(out.isfinite().all())
    assert int(cache.get_seq_length()) == 46
    plain = 2 * 2 * 2 * 3 * 49 * 16 * 4  # K and V, layers, KV heads, batch, tokens, width, bytes
    if bits == 16:
        assert cache_bytes(cache) == plain
    else:
        assert cache.sizes()["visual"] < plain / 8


@pytest.mark.slow
def test_bench__takes_the_largest_batch_that_fits() -> None:
    torch.manual_seed(0)
    bench = Bench(SHAPES["tiny"], TINY, CPU)
    rows = list(bench.rows())
    assert [(r.bits, r.way, r.budget) for r in rows] == [
        (16, "dynamic", 3e-4),
        (16, "dynamic", 1e-4),
        (16, "eager", 3e-4),
        (16, "eager", 1e-4),
        (2, "eager", 3e-4),
        (2, "eager", 1e-4),
    ]
    for row in rows:
        one = bench.run(row.bits, row.way, row.batch + 1, 1)[1]
        assert not row.why
        assert row.memory <= row.budget < one
        assert row.throughput == row.batch / row.step > 0
    assert rows[4].batch > 2 * rows[2].batch
    data = kv_throughput_runs.summary(TINY, SHAPES["tiny"], rows, "cpu")
    assert json.loads(json.dumps(data))["rows"] == data["rows"]
    assert data["over_16_bits"]["2 bits eager over dynamic, 0.0003 GB"] == rows[4].throughput / rows[0].throughput


def test_bench__a_failure_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(SHAPES["tiny"], Settings((16,), (1.0, 1e-9), 8, 2, 4, 1, ("graph", "eager"), 2), CPU)
    rows = list(bench.rows())
    assert "need a CUDA device" in rows[0].why
    assert rows[1].why.startswith("one sequence takes")
    assert rows[2].batch == 2
    monkeypatch.setattr(bench, "start", float("-inf"))
    bench.settings = Settings((16,), (1.0,), 8, 2, 4, 1, ("eager",), 2, seconds=1.0)
    assert [r.why for r in bench.rows()] == ["no time left"]


def test_settings_and_shapes() -> None:
    assert Settings((16, 1), ways=("eager", "compiled")).cases == [(16, "eager"), (16, "compiled"), (1, "compiled")]
    ordered = Settings((16, 1), ways=("compiled", "graph")).cases
    assert ordered == [(16, "graph"), (1, "graph"), (16, "compiled"), (1, "compiled")]
    for wrong, message in (({"ways": ("fast",)}, "ways"), ({"bits": (3,)}, "bits"), ({"tokens": 0}, "positive")):
        with pytest.raises(ValueError, match=message):
            Settings(**wrong)
    with pytest.raises(ValueError, match="no model directory"):
        shape_of("nothing")
    model = decoder(SHAPES["tiny"], CPU, torch.float32, 10)
    assert Shape.of(model.config) == SHAPES["tiny"]


def test_cli__table_json_and_plot(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    out, png = tmp_path / "kv.json", tmp_path / "kv.png"
    words = [
        "tiny",
        "-b",
        "16",
        "-b",
        "1",
        "--budget",
        "0.0002",
        "--visual",
        "32",
        "--tokens",
        "4",
        "--steps",
        "1",
        "--text",
        "2",
        "--device",
        "cpu",
    ]
    app = typer.Typer()
    app.command()(kv_throughput.kv)
    result = CliRunner().invoke(app, [*words, "--json", str(out), "--plot", str(png)])
    assert result.exit_code == 0, result.output
    assert "tokens/s" in result.output
    data = json.loads(out.read_text())
    assert [Row(**r).batch > 0 for r in data["rows"]] == [True, True]
    assert png.read_bytes().startswith(b"\x89PNG")
    refused = CliRunner().invoke(app, ["tiny", "--way", "fast"])
    assert isinstance(refused.exception, ValueError)


@pytest.mark.gpu
def test_bench__on_cuda_all_ways() -> None:
    settings = Settings((16, 1), (0.5,), 512, 16, 20, 8, ("dynamic", "eager", "compiled", "graph"), 64)
    rows = list(Bench(SHAPES["tiny"], settings, torch.device("cuda")).rows())
    assert [row.why for row in rows] == [""] * 6
    assert all(0 < row.memory <= row.budget for row in rows)


@pytest.mark.slow
def test_bench__the_compiled_step_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        del inputs
        graphs.append(graph)
        return graph

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, fullgraph, dynamic, options: real(f, backend=backend, fullgraph=fullgraph))
    bench = Bench(SHAPES["tiny"], Settings((16, 1), (1.0,), 48, 4, 20, 8, ("compiled",), 3), CPU)
    rows = list(bench.rows())
    assert [row.why for row in rows] == ["", ""]
    assert len(graphs) == 2
