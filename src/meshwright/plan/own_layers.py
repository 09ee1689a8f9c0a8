"""Layers of our trainer in bytes: what each keeps for its backward pass, and what it needs besides.

Every function is the shadow of one in `train/nn` or `train/parallel`: the same order, the same
tensors, sizes instead of numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.plan.own_groups import Group
from meshwright.plan.own_rank import Rank
from meshwright.plan.own_tape import Block, Graph, Value


@dataclass
class Layer:
    """What the operations of a layer share: the rank, the graph of this pass, the sequences of the
    micro-batch, and where gradients of weights go. `name` begins the keys of its weights. `tied`
    holds the gradient of a head whose table, on the same stage, is the embedding's (`both_ends`).
    """

    rank: Rank
    graph: Graph
    batch: int
    name: str
    groups: dict[str, Group]
    both_ends: bool = False
    tied: list[Block] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens inside a split region."""
        return self.batch * self.rank.job.data.seq_len // self.rank.layout.cp

    @property
    def outside(self) -> int:
        """Tokens between the layers."""
        return self.tokens // self.rank.sliced

    @property
    def size(self) -> int:
        """Bytes of an activation's number."""
        return self.rank.size

    def new(self, n_bytes: float) -> Block:
        """A temporary allocation."""
        return self.rank.new(n_bytes)

    def deliver(
        self, key: str, made: float | Block, holding: bool = False, now: bool = False
    ) -> None:
        """The gradient of weight `key` is there, or made in so many bytes. It is used and dropped
        once the operation has let go of what it kept, or `now`; if weights wait, it is kept."""
        grad = made if isinstance(made, Block) else self.new(made)
        group = self.groups[self.name + key]

        def give(_held: Block = grad) -> None:
            group.deliver(self.name + key)

        if holding and self.rank.key is not None:
            self.rank.put_off(give)
        elif now:
            give()
        else:
            self.rank.tape.after.append(give)

    # Elementary operations.

    def norm(self, x: Value, key: str, rows: int, width: int) -> Value:
        """RMS or layer norm of `rows` rows."""
        gpt2 = self.rank.spec.family == "gpt2"
        kept = [x.block, self.new((2 * self.size if gpt2 else 4) * rows)]

        def run(grad: Block) -> list[Block | None]:
            out = self.new(self.size * rows * width)
            for part in ("weight", "bias")[: 1 + gpt2]:
                self.deliver(f"{key}.{part}", self.size * width, holding=True)
            kept.clear()
            del grad
            return [out]

        return self.graph.make(self.size * rows * width, [x], run)

    def linear(self, x: Value, key: str, rows: int, n_in: int, n_out: int, size: int = 0) -> Value:
        """x @ weight.T."""
        size = size or self.size
        return self.product(x, f"{key}.weight", (rows, n_in, n_out), size, size * n_in * n_out)

    def product(
        self, x: Value, weight: str, shape: tuple[int, int, int], size: int, weight_bytes: int
    ) -> Value:
        """Rows times a matrix, or each times that of its expert; `shape` is rows, inputs, outputs.
        The gradient of the weights may be put off."""
        rank, (rows, n_in, n_out) = self.rank, shape
        flops = 2 * rows * n_in * n_out
        rank.count(flops)
        put_off = rank.layout.tp > 1 or rank.layout.splits_backward
        kept = [x.block]

        def run(grad: Block) -> list[Block | None]:
            rows_block = kept.pop()
            rank.count(flops)
            grad_x = self.new(size * rows * n_in)

            def make(_held: tuple[Block, Block] = (grad, rows_block)) -> None:
                rank.count(flops)
                self.deliver(weight, weight_bytes, now=put_off)

            if put_off:
                rank.put_off(make)
            else:
                make()
            return [grad_x]

        return self.graph.make(size * rows * n_out, [x], run)

    def add_bias(self, x: Value, key: str, rows: int, width: int) -> Value:
        """x + bias."""

        def run(grad: Block) -> list[Block | None]:
            self.deliver(f"{key}.bias", self.size * width, holding=True)
            return [grad]

        return self.graph.make(self.size * rows * width, [x], run)

    def add(self, x: Value, y: Value, n_bytes: int) -> Value:
        """x + y; both get the same gradient."""
        return self.graph.make(n_bytes, [x, y], lambda grad: [grad, grad])

    def keeping(
        self, n_bytes: float, inputs: list[Value], kept: list[Block], grads: list[float]
    ) -> Value:
        """An operation that keeps `kept` and returns gradients of these sizes."""
        held = list(kept)

        def run(grad: Block) -> list[Block | None]:
            out: list[Block | None] = [self.new(n) for n in grads]
            held.clear()
            del grad
            return out

        return self.graph.make(int(n_bytes), inputs, run)

    # Boundaries of tensor parallelism.

    def enter(self, x: Value, width: int) -> Value:
        """Into a split region; `width` channels of each token."""
        layout = self.rank.layout
        if layout.tp == 1:
            return x
        if layout.sequence_parallel:
            return self._gather(x, width)
        return self.graph.make(0, [x], lambda grad: [self._summed(grad, width)], reuse=x.block)

    def leave(self, x: Value, width: int) -> Value:
        """Out of it."""
        layout = self.rank.layout
        if layout.tp == 1:
            return x
        n_bytes = self.size * self.tokens * width
        if layout.sequence_parallel:
            out = self._scattered(x.block, width)
            return self.graph.make(0, [x], lambda g: [self._gathered(g, width)], reuse=out)
        total = self.new(n_bytes)
        self.rank.say("tp", "all_reduce", n_bytes, total)
        return self.graph.make(0, [x], lambda grad: [grad], reuse=total)

    def _gather(self, x: Value, width: int) -> Value:
        out = self._gathered(x.block, width)
        return self.graph.make(0, [x], lambda g: [self._scattered(g, width)], reuse=out)

    def _gathered(self, x: Block, width: int) -> Block:
        n_bytes = self.size * self.tokens * width
        out = self.new(n_bytes)
        self.rank.say("tp", "all_gather", n_bytes, x, out)
        if self.batch > 1:
            out = self.new(n_bytes)
        return out

    def _scattered(self, x: Block, width: int) -> Block:
        n_bytes = self.size * self.tokens * width
        slices = self.new(n_bytes) if self.batch > 1 else x
        out = self.new(n_bytes // self.rank.layout.tp)
        arriving = self.new(n_bytes)
        self.rank.say("tp", "reduce_scatter", n_bytes, slices, arriving)
        self.rank.overlap()
        return out

    def _summed(self, grad: Block, width: int) -> Block:
        n_bytes = self.size * self.tokens * width
        total = self.new(n_bytes)
        self.rank.say("tp", "all_reduce", n_bytes, total)
        self.rank.overlap()
        del grad
        return total


def split(
    graph: Graph,
    blocks: list[Block],
    values: list[Value],
    run: Callable[[list[Block]], list[Block | None]],
) -> list[Value]:
    """Several results of one operation, whose backward takes all of their gradients at once."""
    if not graph.training:
        return [Value(block) for block in blocks]
    grads: list[Block] = []
    whole = graph.make(0, values, lambda grad: run(_with(grads, grad)), reuse=blocks[0])
    assert whole.node is not None
    whole.node.gathered = grads
    return [graph.make(0, [whole], lambda grad: [grad], reuse=block) for block in blocks]


def _with(grads: list[Block], last: Block) -> list[Block]:
    grads.append(last)
    return grads


def whole(layer: Layer, q: Value, k: Value, v: Value, widths: tuple[int, int, int]) -> Value:
    """A fused kernel over whole sequences."""
    rank, spec, size = layer.rank, layer.rank.spec, layer.size
    seq = rank.job.data.seq_len
    heads, value_dim = _heads(layer), spec.value_head_dim
    tokens = layer.batch * seq
    out = layer.new(size * tokens * heads * value_dim)
    sums = layer.new(4 * tokens * heads)
    flops = tokens * heads * seq * (spec.head_dim + value_dim)
    rank.count(flops)
    kept = [q.block, k.block, v.block, out, sums]
    q_width, k_width, v_width = widths

    def run(grad: Block) -> list[Block | None]:
        rank.count(2 * flops)
        grads: list[Block | None] = [
            layer.new(size * tokens * w) for w in (q_width, k_width, v_width)
        ]
        kept.clear()
        del grad
        return grads

    return layer.graph.make(0, [q, k, v], run, reuse=out)


def _heads(layer: Layer) -> int:
    layout = layer.rank.layout
    heads = layer.rank.spec.heads // layout.tp
    return heads // layout.cp if layout.cp_method == "ulysses" else heads
