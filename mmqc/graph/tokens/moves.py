"""Put nodes into modality order, one by one, each step leaving the program exact.

    n = f(x, y, z)   ->   n = P^-1 f(P x, P y, z)          P (P^-1 x) is x: gathers between neighbours cancel

``f`` commutes with P (token_rules.py), so any set of nodes may be treated, in any order; what remains are the gathers at
the set's edges.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from mmqc.graph.kinds import kind, mutates
from mmqc.graph.memory import written
from mmqc.graph.program import Program, copy_meta
from mmqc.graph.sizes import Sizes, is_sequence, sizes
from mmqc.graph.tokens.rules import TokenRules
from mmqc.graph.tokens.tokens import nested
from mmqc.graph.tokens.uses import Use, Uses

PENDING = "tokens"  # meta: the axis of the tokens of a node that a later pass puts into modality order
KEYS = "tokens_keys"  # meta: attention whose keys and values a later pass puts into modality order
MOVED = "tokens_moved"  # meta: the node computes in modality order
BACK = "tokens_back"  # meta: the gather that gives a node's value in sequence order again


@dataclass
class Moves:
    """The permutation's nodes, and the gathers made with them."""

    prog: Program
    order: fx.Node
    inverse: fx.Node
    flat: bool
    in_place: set[fx.Node]
    nested: dict[fx.Node, fx.Node]

    @classmethod
    def begin(cls, prog: Program, visual: fx.Node, flat: bool, name: str) -> Moves:
        """Compute the permutation behind the mask."""
        placeholders = [n for n in prog.graph.nodes if n.op == "placeholder"]
        last = placeholders[-1] if visual.op == "placeholder" else visual
        with prog.graph.inserting_after(last):
            pair = prog.graph.call_function(torch.ops.mmqc.modality_order.default, (visual, flat))
        with prog.graph.inserting_after(pair):
            order = prog.graph.call_function(operator.getitem, (pair, 0))
        with prog.graph.inserting_after(order):
            inverse = prog.graph.call_function(operator.getitem, (pair, 1))
        for node in (pair, order, inverse):
            copy_meta(node, visual, name, 0)
        return cls(prog, order, inverse, flat, written(prog), nested(prog))

    @classmethod
    def known(cls, prog: Program) -> Moves:
        """Those that an earlier pass began."""
        pair = prog.nodes("modality_order")[0]
        order, inverse = sorted(pair.users, key=lambda n: n.args[1])  # type: ignore[arg-type, return-value]
        return cls(prog, order, inverse, bool(pair.args[1]), written(prog), nested(prog))

    @staticmethod
    def rows(prog: Program) -> Sizes:
        """Batch and length of the tokens that have an order."""
        return sizes(prog.nodes("modality_order")[0].args[0]) or ()

    @classmethod
    def rules(cls, prog: Program) -> TokenRules:
        """What commutes with a permutation of each sequence."""
        return TokenRules(*cls.rows(prog))

    def conjugate(self, node: fx.Node, axis: int, uses: Uses, name: str, site: int = 0) -> None:
        """Let ``node`` compute in modality order; its users read it through a gather back."""
        for operand, use in uses.items():
            self.replace(node, operand, use, name, site)
        node.meta[MOVED] = node.meta.pop(PENDING, axis)
        if is_sequence(node):
            return  # all its users are elements of it, and are moved too
        use = Use(axis, len(sizes(node) or ()))
        with self.prog.graph.inserting_after(node):
            back = self.gather(node, self.inverse, use)
        node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
        copy_meta(back, node, name, site)
        back.meta[BACK] = True
        back.meta.update({k: node.meta[k] for k in ("example_value", "shape", "dtype") if k in node.meta})
        for user in list(back.users):
            if self.gathers(user, back, self.order, use):
                user.replace_all_uses_with(node)
                self.prog.graph.erase_node(user)

    def settle(self, node: fx.Node, name: str) -> None:
        """Let a node that an earlier pass left pending compute in modality order."""
        axis = node.meta[PENDING]
        uses = self.rules(self.prog).operands(node, axis)
        assert not isinstance(uses, str)
        self.conjugate(node, axis, uses, name)

    def replace(self, node: fx.Node, operand: fx.Node, use: Use, name: str, site: int) -> None:
        """Give ``node`` its operand in modality order."""
        now = operand
        if operand not in node.all_input_nodes:  # it was moved since the site was found
            now = next(u for u in operand.users if BACK in u.meta)
        node.replace_input_with(now, self.entered(now, use, node, name, site))

    def entered(self, operand: fx.Node, use: Use, reader: fx.Node, name: str, site: int) -> fx.Node:
        """``operand`` in modality order: what it was gathered back from, a known gather, or a new one."""
        if is_sequence(operand) and MOVED in operand.meta:
            return operand
        if BACK in operand.meta and self.gathers(operand, operand.args[0], self.inverse, use):
            return operand.args[0]  # type: ignore[return-value]
        return self.permuted(operand, use, reader, name, site)

    def permuted(self, operand: fx.Node, use: Use, reader: fx.Node, name: str, site: int) -> fx.Node:
        """A gather into modality order, shared by all readers unless memory is written to in between."""
        alone = operand in self.in_place
        for user in operand.users:
            if self.gathers(user, operand, self.order, use) and not (alone and self.stale(user, reader)):
                return user
        where = reader if alone else max(operand, self.inverse)
        where = self.nested.get(where, where)
        insert = self.prog.graph.inserting_before if alone else self.prog.graph.inserting_after
        with insert(_last_placeholder(where)):
            made = self.gather(operand, self.order, use)
        copy_meta(made, reader, name, site)
        return made

    def stale(self, made: fx.Node, reader: fx.Node) -> bool:
        """Whether something is written in place between a gather and a reader of what it gathers."""
        node = made
        while node is not reader and node.op != "output":
            if mutates(node):
                return True
            node = node.next
        return node is not reader

    def gathers(self, node: fx.Node, x: object, index: fx.Node, use: Use) -> bool:
        """Whether ``node`` is the gather of ``x`` by ``index``."""
        same = kind(node) in ("gather_rows", "gather_tokens") and node.args[:2] == (x, index)
        return same and (self.flat or node.args[2:] == (use.axis, use.rank))

    def gather(self, x: fx.Node, index: fx.Node, use: Use) -> fx.Node:
        """The gather of this permutation's form."""
        if self.flat:
            return self.prog.graph.call_function(torch.ops.mmqc.gather_rows.default, (x, index))
        return self.prog.graph.call_function(torch.ops.mmqc.gather_tokens.default, (x, index, use.axis, use.rank))


def _last_placeholder(node: fx.Node) -> fx.Node:
    """The node, or the last placeholder behind it: nothing may stand between placeholders."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node
