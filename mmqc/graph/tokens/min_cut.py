"""The cheapest way to split a graph in two: Dinic's algorithm.

cut = sum of the capacities of the edges from the source's side to the sink's,  minimal
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

SOURCE, SINK = "source", "sink"
NEVER = 1 << 62  # the capacity of an edge that may not be cut


class MinCut:
    """Edges with capacities; ``source_side`` is what is left of the source."""

    def __init__(self) -> None:
        self.index: dict[Hashable, int] = {}
        self.edges: list[list[int]] = []  # per vertex: numbers of its edges
        self.to: list[int] = []
        self.room: list[int] = []
        self.source, self.sink = self.vertex(SOURCE), self.vertex(SINK)

    def vertex(self, name: Hashable) -> int:
        """The number of a vertex, new at the first request."""
        if name not in self.index:
            self.index[name] = len(self.edges)
            self.edges.append([])
        return self.index[name]

    def edge(self, a: Hashable, b: Hashable, capacity: int = NEVER) -> None:
        """What it costs if ``a`` is on the source's side and ``b`` is not."""
        for start, end, room in ((a, b, capacity), (b, a, 0)):
            self.edges[self.vertex(start)].append(len(self.to))
            self.to.append(self.vertex(end))
            self.room.append(room)

    def source_side(self) -> set[Hashable]:
        """The largest source side among the minimal cuts: all from which the sink cannot be reached."""
        while self._levels():
            at = [0] * len(self.edges)
            while self._push(at):
                pass
        reached, todo = {self.sink}, [self.sink]
        while todo:
            for number in self.edges[todo.pop()]:
                before = self.to[number]
                if self.room[number ^ 1] > 0 and before not in reached:
                    reached.add(before)
                    todo.append(before)
        return {name for name, vertex in self.index.items() if vertex not in reached}

    def _levels(self) -> bool:
        self.level = [-1] * len(self.edges)
        self.level[self.source] = 0
        todo = deque([self.source])
        while todo:
            vertex = todo.popleft()
            for number in self.edges[vertex]:
                if self.room[number] > 0 and self.level[self.to[number]] < 0:
                    self.level[self.to[number]] = self.level[vertex] + 1
                    todo.append(self.to[number])
        return self.level[self.sink] >= 0

    def _push(self, at: list[int]) -> bool:
        """Send flow along one path of the level graph; ``at`` remembers which edges lead nowhere."""
        path: list[int] = []
        vertex = self.source
        while vertex != self.sink:
            if at[vertex] < len(self.edges[vertex]):
                number = self.edges[vertex][at[vertex]]
                end = self.to[number]
                if self.room[number] > 0 and self.level[end] == self.level[vertex] + 1:
                    path.append(number)
                    vertex = end
                else:
                    at[vertex] += 1
            elif path:
                vertex = self.to[path.pop() ^ 1]
                at[vertex] += 1
            else:
                return False
        amount = min(self.room[number] for number in path)
        for number in path:
            self.room[number] -= amount
            self.room[number ^ 1] += amount
        return True
