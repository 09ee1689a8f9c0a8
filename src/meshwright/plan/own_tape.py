"""Bytes of a step without tensors: what is alive, what autograd keeps, and when it lets go.

A `Value` is a size that lives as long as somebody refers to it. Operations say what they keep for
their backward pass and how large the gradients are; `backward` runs them in the order in which
torch's engine does (the latest first) and drops what each has kept once it is done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

PASSING = ("temporary", "travelling")


class Block:
    """Memory of one allocation; it is given back when nobody refers to it."""

    __slots__ = ("epoch", "n_bytes", "part", "tape")

    def __init__(self, tape: Tape, n_bytes: int, part: str) -> None:
        self.tape, self.n_bytes, self.part, self.epoch = tape, n_bytes, part, tape.epoch
        tape.grow(self._where, n_bytes)

    @property
    def _where(self) -> str:
        """A passing block of an earlier pass is an activation."""
        old = self.part in PASSING and self.epoch != self.tape.epoch
        return "activations" if old else self.part

    def become(self, part: str) -> None:
        """From now on it counts as `part`."""
        self.tape.grow(self._where, -self.n_bytes)
        self.part, self.epoch = part, self.tape.epoch
        self.tape.grow(self._where, self.n_bytes)

    def resize(self, n_bytes: int) -> None:
        """It has another size."""
        self.tape.grow(self._where, n_bytes - self.n_bytes)
        self.n_bytes = n_bytes

    def __del__(self) -> None:
        self.tape.grow(self._where, -self.n_bytes)


class Tape:
    """Bytes alive by part, and by part at the moment of the peak."""

    def __init__(self) -> None:
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self.epoch = 0
        self._total = self._most = 0
        self.order = 0
        self.after: list[Callable[[], None]] = []  # once the operation under way has let go

    def grow(self, part: str, n_bytes: int) -> None:
        """`part` takes `n_bytes` more."""
        self.live[part] += n_bytes
        if part == "host":
            return
        self._total += n_bytes
        if self._total > self._most:
            self._most, self.peak = self._total, self.live.copy()

    def end_pass(self) -> None:
        """What is passing and still alive is kept for a later pass: activations."""
        kept = sum(self.live.pop(part, 0) for part in PASSING)
        self.live["activations"] += kept
        self.epoch += 1

    def block(self, n_bytes: int, part: str = "temporary") -> Block:
        """A new allocation."""
        return Block(self, n_bytes, part)

    def restart_peak(self) -> None:
        """Forget the peak so far."""
        self._most, self.peak = self._total, self.live.copy()


Deliver = Callable[[], None]


@dataclass(eq=False, slots=True)
class Value:
    """What an operation made: its memory, and the operation, if gradients go through it."""

    block: Block
    node: Node | None = None

    def held(self) -> Value:
        """The same memory, outside of the graph."""
        return Value(self.block)


@dataclass(eq=False, slots=True)
class Node:
    """An operation in the graph. `run` takes the block of its gradient and returns one for each
    of `inputs` (None: none). With `gathered` gradients are kept apart instead of added up."""

    order: int
    inputs: tuple[Node | None, ...]
    run: Callable[[Block], Sequence[Block | None]] | None
    grad: Block | None = None
    gathered: list[Block] | None = None


@dataclass
class Graph:
    """Makes operations on `tape`; without `training` nothing is kept."""

    tape: Tape
    training: bool = True
    _made: int = field(default=0)

    def leaf(self, block: Block) -> Value:
        """A value whose gradient is wanted; it stays in its node."""
        return Value(block, self._node((), None))

    def make(
        self,
        n_bytes: int,
        inputs: Sequence[Value],
        run: Callable[[Block], Sequence[Block | None]],
        reuse: Block | None = None,
    ) -> Value:
        """A result of `n_bytes` (or in the memory `reuse`); `run` keeps by its closure what the
        backward pass needs."""
        block = reuse or self.tape.block(n_bytes)
        if not self.training:
            return Value(block)
        return Value(block, self._node(tuple(x.node for x in inputs), run))

    def _node(self, inputs: tuple[Node | None, ...], run: Any) -> Node:
        self.tape.order += 1
        return Node(self.tape.order, inputs, run)


def backward(tape: Tape, root: Node, grad: Block) -> None:
    """Run the graph below `root`, whose gradient is `grad`."""
    root.grad = grad
    del grad
    waiting = {id(root): root}
    queue = [(-root.order, id(root))]
    counts = _uses(root)
    while queue:
        node = waiting.pop(heappop(queue)[1])
        if node.run is None:
            continue
        given, node.grad = node.grad, None
        run, node.run = node.run, None
        assert given is not None
        outer, tape.after = tape.after, []
        results = list(run(given))
        after, tape.after = tape.after, outer
        del run, given
        for source in node.inputs:
            result = results.pop(0)
            if source is None or result is None:
                continue
            _accumulate(tape, source, result)
            del result
            counts[id(source)] -= 1
            if not counts[id(source)]:
                waiting[id(source)] = source
                heappush(queue, (-source.order, id(source)))
        node.inputs = ()
        while after:
            after.pop(0)()


def _accumulate(tape: Tape, node: Node, grad: Block) -> None:
    if node.grad is None:
        node.grad = grad
    elif node.gathered is not None:
        node.gathered.append(node.grad)
        node.grad = grad
    else:
        node.grad = tape.block(max(grad.n_bytes, node.grad.n_bytes))


def _uses(root: Node) -> Counter[int]:
    """How many gradients each node below `root` will get."""
    counts: Counter[int] = Counter()
    seen, stack = {id(root)}, [root]
    while stack:
        for source in stack.pop().inputs:
            if source is not None:
                counts[id(source)] += 1
                if id(source) not in seen:
                    seen.add(id(source))
                    stack.append(source)
    return counts
