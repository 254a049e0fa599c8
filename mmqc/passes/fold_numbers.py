"""A number that is read out of a tensor of known numbers is computed from these.

    n = item(cumsum(tensor([h0 * w0, h1 * w1]))[1])  ->  n = h0 * w0 + h1 * w1

Shapes:  tensors of at most ``MOST`` whole numbers, whose sizes are constants
Why:     towers put the sizes of their images into a small tensor, and read where each begins and ends: the rows of a mask, the
         lengths of a split.  Read, it is a number that only data says: Inductor cannot write to a slice up to one, and on a GPU the
         host waits for it.
Needs:   nothing
Gives:   nothing
Exact:   yes, where no sum or product is beyond 2**63
Refuses: numbers that were computed in other ways, or lie where the graph writes to.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, fx

from mmqc.graph.kinds import kind
from mmqc.graph.memory import written
from mmqc.graph.program import Miss, Program, copy_meta
from mmqc.graph.runner import Pass
from mmqc.graph.sizes import EXAMPLE, value_of

MOST = 1024
READS = frozenset(("item", "_local_scalar_dense"))


class Number:
    """A number of the graph, or what arithmetic makes of such."""

    def __init__(self, what: fx.Node | Callable[..., Any], *args: Any) -> None:
        self.what, self.args = what, args


def _arithmetic(operation: Callable[..., Any], *, turned: bool = False) -> Callable[[Any, Any], Number]:
    return lambda a, b: Number(operation, b, a) if turned else Number(operation, a, b)


for _name in ("add", "sub", "mul", "floordiv"):
    setattr(Number, f"__{_name}__", _arithmetic(getattr(operator, _name)))
    setattr(Number, f"__r{_name}__", _arithmetic(getattr(operator, _name), turned=True))


@dataclass(frozen=True)
class Site:
    """A read, and the number that it gives."""

    read: fx.Node
    number: Number | int

    def __str__(self) -> str:
        return f"{self.read.name} of known numbers"


@dataclass(frozen=True)
class FoldNumbers(Pass):
    name = "fold_numbers"

    def match(self, prog: Program) -> Iterator[Site | Miss]:
        """Every read of a tensor of known numbers."""
        changed = written(prog)
        known: dict[fx.Node, Any] = {}
        for node in prog.graph.nodes:
            source = known.get(node.all_input_nodes[0]) if is_read(node) else None
            if source is not None:
                known[node] = source.item()
                yield Site(node, known[node])
            elif node not in changed and (numbers := numbers_of(node, known)) is not None:
                known[node] = numbers

    def rewrite(self, prog: Program, site: Site) -> None:
        """As arithmetic."""
        made: dict[int, Any] = {}

        def emit(number: Any) -> Any:
            if not isinstance(number, Number):
                return number
            if isinstance(number.what, fx.Node):
                return number.what
            if id(number) not in made:
                args = tuple(map(emit, number.args))
                new = made[id(number)] = prog.graph.call_function(number.what, args)
                copy_meta(new, site.read, self.name, 0)
                new.meta[EXAMPLE] = number.what(*(value_of(a) if isinstance(a, fx.Node) else a for a in args))
            return made[id(number)]

        with prog.graph.inserting_before(site.read):
            new = emit(site.number)
        site.read.replace_all_uses_with(new)


def is_read(node: fx.Node) -> bool:
    """Whether the host reads a number there."""
    return kind(node).removesuffix(".default") in READS and len(node.all_input_nodes) == 1


def numbers_of(node: fx.Node, known: Mapping[fx.Node, Any]) -> Any:
    """The numbers of a tensor of whole numbers, as an array; None where they are not known."""
    value, word = value_of(node), kind(node)
    small = isinstance(value, Tensor) and all(type(n) is int for n in value.shape) and value.numel() <= MOST
    if not small or value.dtype != torch.int64 or not node.args or word not in RULES:
        return None
    try:
        args = [_known(a, known) for a in node.args]
        found = _array(RULES[word](*args, **{_KEYWORDS.get(k, k): v for k, v in node.kwargs.items() if k not in _ELSEWHERE}))
    except (IndexError, KeyError, TypeError, ValueError):  # what is not known, and other forms of a call
        return None
    return found if found.shape == tuple(value.shape) else None


def _known(value: Any, known: Mapping[fx.Node, Any]) -> Any:
    """An operand in known numbers; KeyError where there is another."""
    if isinstance(value, fx.Node):
        number = isinstance(value_of(value), int | torch.SymInt) and not isinstance(value_of(value), bool)
        return known[value] if value in known or not number else Number(value)
    return type(value)(_known(v, known) for v in value) if isinstance(value, list | tuple) else value


def _array(numbers: Any) -> Any:
    return numpy.asarray(numbers, dtype=object)


def _whole(numbers: Any) -> Any:
    found = _array(numbers)
    if not all(type(n) in (int, Number) for n in found.flat):
        raise TypeError("a tensor of whole numbers is made of others")
    return found


def _by_element(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: operation(_array(a), _array(b))


def _same(x: Any, *_: Any) -> Any:
    return x


RULES: dict[str, Callable[..., Any]] = {
    "tensor": _whole,
    "getitem": operator.getitem,
    "cumsum": numpy.cumsum,
    "prod": numpy.prod,
    "sum": numpy.sum,
    **{name: _by_element(getattr(operator, name)) for name in ("add", "sub", "mul", "floordiv")},
    "floor_divide": _by_element(operator.floordiv),
    **dict.fromkeys(("clone", "contiguous", "cpu", "detach", "long", "to"), _same),
}
_KEYWORDS = {"dim": "axis", "keepdim": "keepdims"}
_ELSEWHERE = frozenset(("device", "dtype", "pin_memory"))  # the result is of whole numbers, wherever it lies
