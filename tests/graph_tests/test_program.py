import pytest
import torch
from torch import Tensor, fx

from mmqc.graph.program import VISUAL, Miss, PassRecord, Program
from mmqc.graph.text import program_text, text_diff


def program(dtype: torch.dtype = torch.float32) -> Program:
    """y = linear(x, w) + b."""
    graph = fx.Graph()
    w, b, x = graph.get_attr("w"), graph.get_attr("b"), graph.placeholder("x")
    y = graph.call_method("add", (graph.call_function(torch.nn.functional.linear, (x, w)), b))
    graph.output((y,))
    weights = {"w": torch.arange(6, dtype=dtype).reshape(2, 3), "b": torch.ones(2, dtype=dtype)}
    return Program(graph, weights, [torch.ones(1, 3, dtype=dtype)])


def plus(n: float):
    return lambda w: w + n


def test_program__derive_is_a_chain_of_float64_steps() -> None:
    prog, seen = program(torch.bfloat16), []

    def step(w: Tensor) -> Tensor:
        seen.append(w.dtype)
        return w + 2**-9

    prog.derive("w", "w + tiny", step)
    prog.derive("w", "w - tiny", plus(-(2**-9)))
    assert torch.equal(prog.value("w"), prog.weights["w"])
    assert prog.value("w").dtype == torch.bfloat16
    assert seen == [torch.float64]  # once, in float64, however often it is asked for
    assert [s.formula for s in prog.derived("w")] == ["w + tiny", "w - tiny"]
    assert prog.changed == ("w",)
    assert prog.derived("b") == ()


def test_program__derive_takes_known_weights_only() -> None:
    with pytest.raises(KeyError, match="v is no weight of this program"):
        program().derive("v", "", plus(1))


def test_program__values_follow_the_captured_weight() -> None:
    prog = program()
    prog.derive("w", "w + 1", plus(1))
    prog.weights["w"] = torch.zeros(2, 3)
    assert prog.value("w").eq(1).all()


def test_program__snapshot_stays_when_more_is_derived() -> None:
    prog = program()
    prog.derive("w", "w + 1", plus(1))
    then = prog.snapshot("w")
    prog.derive("w", "w + 10", plus(10))
    assert torch.equal(then(), prog.weights["w"].double() + 1)
    assert torch.equal(prog.value("w"), prog.weights["w"] + 11)


def test_program__forget_takes_the_value_as_given() -> None:
    prog = program()
    prog.derive("w", "w + 1", plus(1))
    value = prog.value("w")
    prog.forget("w")
    assert torch.equal(prog.weights["w"], value)
    assert torch.equal(prog.value("w"), value)
    assert prog.changed == ()
    prog.forget("b")
    assert prog.weights["b"].eq(1).all()


def test_program__value_of_an_unchanged_weight_is_the_weight() -> None:
    prog = program()
    prog.weights["w"] = torch.nn.Parameter(prog.weights["w"])
    assert not prog.value("w").requires_grad
    assert prog.value("w").data_ptr() == prog.weights["w"].data_ptr()


def test_program__replay_uses_derived_values_and_shows_every_node() -> None:
    prog, seen = program(), []
    prog.derive("w", "0", lambda w: torch.zeros_like(w))
    (out,) = prog.replay(lambda node, result, args, kwargs: seen.append(node.name))
    assert out.eq(1).all()
    assert seen == [n.name for n in prog.graph.nodes]


def test_program__constant_evaluates_weights_alone() -> None:
    prog = program()
    (b,) = [n for n in prog.graph.nodes if n.target == "b"]
    with prog.graph.inserting_after(b):
        gain = prog.graph.call_function(torch.add, (b, 1.0))
    assert prog.constant(gain).tolist() == [2.0, 2.0]
    assert prog.constant(gain).dtype == torch.float64
    assert prog.constant(gain, {"b": torch.zeros(2).double()}).tolist() == [1.0, 1.0]


def test_program__clean_keeps_writes() -> None:
    prog = program()
    x = next(n for n in prog.graph.nodes if n.op == "placeholder")
    with prog.graph.inserting_after(x):
        prog.graph.call_method("mul", (x, 2))
        prog.graph.call_method("mul_", (x, 2))
    prog.clean()
    assert [n.target for n in prog.graph.nodes if n.op == "call_method"] == ["mul_", "add"]


def test_program__visual_mask_is_the_last_placeholder_once() -> None:
    prog = program()
    prog.visual = torch.ones(1, 1, dtype=torch.bool)
    assert prog.visual_node() is prog.visual_node()
    assert [n.target for n in prog.graph.nodes if n.op == "placeholder"] == ["x", VISUAL]
    assert len(prog.inputs) == 2


def test_program__constant_node_keeps_the_first_value() -> None:
    prog = program()
    with prog.graph.inserting_before(next(iter(prog.graph.nodes))):
        prog.constant_node("h", torch.ones(2))
        prog.constant_node("h", torch.zeros(2))
    assert prog.weights["h"].eq(1).all()


def test_program__counts_by_kind() -> None:
    assert program().counts() == {"get_attr": 2, "placeholder": 1, "linear": 1, "add": 1, "output": 1}
    assert [n.name for n in program().nodes("linear", "add")] == ["linear", "add"]


def test_text__one_line_a_node_and_only_changes_in_a_diff() -> None:
    before = program_text(program())
    assert before.splitlines() == ["x = placeholder()", "linear = linear(x, w)", "add = add(linear, b)", "output = output([add])"]
    prog = program()
    (add,) = prog.nodes("add")
    with prog.graph.inserting_before(add):
        new = prog.graph.call_method("mul", (add.args[0], 2))
    new.meta["mmqc"] = ("double_it", 0)
    add.replace_input_with(add.args[0], new)
    assert text_diff(before, program_text(prog)).splitlines() == [
        "@@ -3 +3,2 @@",
        "-add = add(linear, b)",
        "+mul = mul(linear, 2)  # double_it",
        "+add = add(mul, b)",
    ]
    assert text_diff(before, before) == ""


def test_record_of_a_pass__in_words() -> None:
    record = PassRecord("fold", True, ["a", "b"], [Miss("n", "why", "w")], 1.25, {"mul": -2, "add": 0})
    assert str(record).split() == ["fold", "exact", *["2", "sites", "1", "refused", "1.2", "ms"], "mul", "-2"]
    assert str(record.misses[0]) == "w: why"
    assert str(Miss("n", "why")) == "n: why"
