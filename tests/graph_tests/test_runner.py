from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from blocks import MODELS

from mmqc.graph.program import Miss, Program
from mmqc.graph.record import record
from mmqc.graph.runner import PassError, run


@dataclass
class Swap:
    """Turns additions around; refuses the first."""

    name: str = "swap_operands"
    needs: frozenset[str] = frozenset()
    gives: frozenset[str] = frozenset()
    exact: bool = True
    done: list[str] = field(default_factory=list)

    def match(self, prog: Program) -> Iterator[Any]:
        adds = [n for n in prog.nodes("add") if all(hasattr(a, "op") for a in n.args)]
        yield Miss(adds[0].name, "the first")
        yield from adds[1:]

    def rewrite(self, prog: Program, site: Any) -> None:
        site.args = site.args[::-1]
        self.done.append(site.name)


def program() -> Program:
    model, batch = MODELS["pre_ln"]()
    return record(model, batch)


def test_runner__record_of_a_pass() -> None:
    prog, item = program(), Swap()
    assert run(prog, [item], {}, text=True) is prog
    (found,) = prog.records
    assert found.sites == item.done
    assert [str(m) for m in found.misses] == ["add: the first"]
    assert (found.name, found.exact, found.delta) == ("swap_operands", True, {})
    assert found.before != found.after
    assert found.ms > 0
    run(prog, [item], {})
    assert prog.records[1].before == ""


def test_runner__delta_counts_by_kind() -> None:
    class Add(Swap):
        def rewrite(self, prog: Program, site: Any) -> None:
            with prog.graph.inserting_after(site):
                new = prog.graph.call_method("neg", (site,))
            site.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    prog = program()
    run(prog, [Add()], {})
    assert prog.records[0].delta == {"neg": len(prog.records[0].sites)}


@pytest.mark.parametrize("word", ["needs", "gives"])
def test_runner__fact_that_fails_names_pass_fact_nodes_and_refusals(word: str) -> None:
    facts = {"all.well": lambda prog: [n.name for n in prog.nodes("linear")][:2] if prog.records else []}
    last = Swap("last", **{word: frozenset({"all.well"})})
    with pytest.raises(PassError) as raised:
        run(program(), [Swap(), last], facts)
    sentence = (
        f"pass 'last' {word} 'all.well', which fails at ['linear', 'linear_1']; refused earlier by ['swap_operands: add: the first'"
    )
    assert str(raised.value).startswith(sentence)


def test_runner__needs_are_checked_before_anything_is_done() -> None:
    item = Swap(needs=frozenset({"never"}))
    with pytest.raises(PassError, match=r"pass 'swap_operands' needs 'never', which fails at \['x'\]$"):
        run(program(), [item], {"never": lambda prog: ["x"]})
    assert item.done == []
