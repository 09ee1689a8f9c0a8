"""A step of our trainer in bytes: the schedule's passes, the reduction, the update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from meshwright.plan.activations import recompute_plan
from meshwright.plan.own_attention import attention as attention_half
from meshwright.plan.own_groups import Group
from meshwright.plan.own_head import embed, loss
from meshwright.plan.own_layers import Layer
from meshwright.plan.own_mail import Mail
from meshwright.plan.own_mlp import feed_forward
from meshwright.plan.own_rank import Rank
from meshwright.plan.own_tape import Block, Graph, Node, Value, backward
from meshwright.plan.own_weights import stage_groups
from meshwright.plan.schedule import Action, build, stages_of
from meshwright.plan.stages import stage_layers

Run = Callable[[Layer, Value], Value]


@dataclass
class _Stage:
    layers: range
    first: bool
    last: bool
    tables: list[Group]
    of_layers: list[list[Group]]
    by_key: dict[str, Group] = field(default_factory=dict)

    @property
    def groups(self) -> list[Group]:
        """All of them, in the trainer's order."""
        return [*self.tables, *(group for groups in self.of_layers for group in groups)]


@dataclass
class _Flight:
    received: Value | None
    output: Value


class Step:
    """One step of `rank`; `run` fills its tape and counters."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        job, layout = rank.job, rank.layout
        ranges = stage_layers(job.model, layout, job.data.seq_len)
        self.last_stage = layout.virtual_stages - 1
        self.stages: dict[int, _Stage] = {}
        for number in stages_of(rank.at.pp, layout.schedule, layout.pp, layout.chunks):
            ends = number == 0, number == self.last_stage
            tables, of_layers = stage_groups(rank, ranges[number], *ends)
            stage = _Stage(ranges[number], *ends, tables, of_layers)
            stage.by_key = {key: group for group in stage.groups for key in group.keys}
            self.stages[number] = stage
        self.groups = [group for stage in self.stages.values() for group in stage.groups]
        self.recompute = recompute_plan(job)
        self.micro_batches = job.data.global_batch // (layout.dp * layout.micro_batch)
        activation = rank.size * layout.micro_batch * job.data.seq_len * job.model.hidden
        self.mail = Mail(rank, activation // (layout.cp * rank.sliced))
        self.flights: dict[tuple[int, int], _Flight] = {}
        self.fixed = self._fixed()

    def _fixed(self) -> list[Block]:
        """Tokens, rotary tables and state of routers, which lie there before the step."""
        rank, job = self.rank, self.rank.job
        layout, spec, seq = rank.layout, rank.spec, job.data.seq_len
        tokens = 8 * self.micro_batches * layout.micro_batch * (seq + 1)
        tables = 8 * seq * spec.rope_dim * len(self.stages)
        moes = sum(spec.is_moe(i) for stage in self.stages.values() for i in stage.layers)
        return [rank.tape.block(n, "other") for n in (tokens, tables, moes * 32 * spec.n_experts)]

    def run(self) -> None:
        """Walk through the step."""
        rank, layout = self.rank, self.rank.layout
        rank.tape.restart_peak()
        orders = build(layout.schedule, layout.pp, layout.chunks, self.micro_batches)
        mine = orders[rank.at.pp]
        like = rank.new(self.mail.n_bytes)
        self.mail.expect(orders)
        finals = ("backward", "backward_weight")
        last = {action.stage: i for i, action in enumerate(mine) if action.kind in finals}
        for i, action in enumerate(mine):
            for following in mine[i : i + 2]:
                self.mail.post(self.mail.needs(following))
            self._execute(action, last.get(action.stage) == i)
            rank.tape.end_pass()
        self.mail.finish()
        del like
        rank.phase = "backward"
        self._finish()
        self._update()

    # Passes.

    def _execute(self, action: Action, last: bool) -> None:
        rank, stage = self.rank, self.stages[action.stage]
        key = (action.stage, action.micro_batch)
        rank.phase = "forward" if action.kind == "forward" else "backward"
        if action.kind == "forward":
            self._forward(action, stage)
            return
        if action.kind != "backward_input":
            for group in stage.groups:
                group.begin_pass(last)
        if action.kind == "backward":
            self._backward(action)
            rank.flush(None)
        elif action.kind == "backward_input":
            rank.key = key
            self._backward(action)
            rank.key = None
            for group in stage.groups:
                group.release_early()
        else:
            rank.flush(key)

    def _forward(self, action: Action, stage: _Stage) -> None:
        rank, job = self.rank, self.rank.job
        layout, seq = rank.layout, job.data.seq_len
        needed = self.mail.needs(action)
        graph = Graph(rank.tape)
        received = None if needed is None else graph.leaf(self.mail.take(needed))
        local = layout.micro_batch * seq // layout.cp
        whole = rank.new(8 * layout.micro_batch * seq)
        rope = rank.new(8 * seq // layout.cp * job.model.rope_dim) if job.model.rope_dim else None
        inputs, targets = rank.new(8 * local), rank.new(8 * local)
        del whole
        layer = self._layer(graph, stage, "")
        self._gather_tables(stage)
        x = embed(layer, inputs) if received is None else received
        for i in range(len(stage.layers)):
            x = self._layer_forward(stage, i, x, rope, graph)
        if stage.last:
            x = layer.norm(x, "norm", layer.outside, job.model.hidden)
            x = layer.enter(x, job.model.hidden)
            x = loss(layer, x, targets)
        elif (message := self.mail.gives(action)) is not None:
            self.mail.give(message, x.block)
        self.flights[action.stage, action.micro_batch] = _Flight(received, x)

    def _layer(self, graph: Graph, stage: _Stage, name: str) -> Layer:
        both = stage.first and stage.last
        return Layer(self.rank, graph, self.rank.layout.micro_batch, name, stage.by_key, both)

    def _gather_tables(self, stage: _Stage) -> None:
        for group in stage.tables:
            if group.frees:
                group.gather()

    def _layer_forward(
        self, stage: _Stage, i: int, x: Value, rope: Block | None, graph: Graph
    ) -> Value:
        """Layer `i` of the stage, with what stage 3 of ZeRO gathers and frees around it."""
        groups, number = stage.of_layers, stage.layers[i]
        after = groups[i + 1] if i + 1 < len(groups) else []
        before = groups[i - 1] if i else []
        frees = self.rank.layout.zero_stage == 3
        if frees:
            _gather(groups[i], after)
        layer = self._layer(graph, stage, f"layers.{number}.")
        out = self._halves(layer, number, x, rope)
        if not frees:
            return out
        for group in groups[i]:
            group.release()

        def gathered(grad: Block) -> list[Block | None]:
            _gather(groups[i], before)
            return [grad]

        return graph.make(0, [out], gathered, reuse=out.block)

    def _halves(self, layer: Layer, number: int, x: Value, rope: Block | None) -> Value:
        parts = self.recompute[number]

        def attention(layer: Layer, x: Value) -> Value:
            return attention_half(layer, x, rope)

        def mlp(layer: Layer, x: Value) -> Value:
            return feed_forward(layer, x, number)

        def both(layer: Layer, x: Value) -> Value:
            return mlp(layer, attention(layer, x))

        if len(parts) == 2:
            return self._recomputed(layer, both, x)
        for part, run in (("attention", attention), ("mlp", mlp)):
            x = self._recomputed(layer, run, x) if part in parts else run(layer, x)
        return x

    def _recomputed(self, layer: Layer, run: Run, x: Value) -> Value:
        """Keeps only the input; the backward pass runs it again."""
        rank, tape = self.rank, self.rank.tape
        once = Graph(tape, training=False)
        out = run(_on(layer, once), x.held())
        kept = [x.block]

        def again(grad: Block) -> list[Block | None]:
            rank.phase = "recompute"
            graph = Graph(tape)
            start = graph.leaf(kept.pop())
            made = run(_on(layer, graph), start)
            rank.phase = "backward"
            assert made.node is not None and start.node is not None
            backward(tape, made.node, grad)
            del made
            return [start.node.grad]

        return layer.graph.make(0, [x], again, reuse=out.block)

    def _backward(self, action: Action) -> None:
        flight = self.flights.pop((action.stage, action.micro_batch))
        needed = self.mail.needs(action)
        grad = self.rank.new(4) if needed is None else self.mail.take(needed)
        node: Node | None = flight.output.node
        assert node is not None
        backward(self.rank.tape, node, grad)
        message = self.mail.gives(action)
        if message is not None:
            assert flight.received is not None and flight.received.node is not None
            block = flight.received.node.grad
            assert block is not None
            self.mail.give(message, block)

    # The end of the step.

    def _finish(self) -> None:
        rank, grad = self.rank, self.rank.grad_size
        rank.finish_scatters()
        for group in self.groups:
            group.finish()
        spans = [span for group in self.groups for span in group.spans()]
        partial = sum(n for weight, n in spans if weight.partial)
        if partial:
            rank.say("tp", "all_reduce", grad * partial, rank.new(grad * partial))
        self._sum_tied([n for weight, n in spans if weight.tied])
        layers = sum(rank.spec.is_moe(i) for stage in self.stages.values() for i in stage.layers)
        if layers:
            rank.say("lanes", "all_reduce", 8 * layers * rank.spec.n_experts)
        rank.say("world", "all_reduce", 56)

    def _sum_tied(self, copies: list[int]) -> None:
        rank = self.rank
        ends = len({0, self.mail.at(self.last_stage)})
        if len(copies) == 1 and ends > 1:
            n_bytes = rank.grad_size * copies[0]
            rank.say("ends", "all_reduce", n_bytes, rank.new(n_bytes), size=ends)

    def _update(self) -> None:
        rank = self.rank
        for run in (0, 1):
            if rank.grad_size != 4:
                for group in self.groups:
                    rank.new(4 * group.runs()[run])
        for group in self.groups:
            group.start_refresh()
        for group in self.groups:
            if group.gathering is not None:
                group.gather()


def _gather(groups: list[Group], upcoming: list[Group]) -> None:
    for group in groups:
        group.gather()
    for group in upcoming:
        group.start_gather()


def _on(layer: Layer, graph: Graph) -> Layer:
    return Layer(layer.rank, graph, layer.batch, layer.name, layer.groups)
