"""The conductor in `simulation.py`: the effects around `takeover.decide`, without processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshwright.base.errors import ConfigError
from meshwright.base.events import Kind
from meshwright.conduct.actions import (
    Action,
    Kill,
    KillAll,
    Launch,
    Record,
    Revive,
    SendTable,
    StopMembers,
)
from meshwright.conduct.members import (
    Begun,
    Condemned,
    Dying,
    Ended,
    Event,
    Executing,
    Heard,
    Held,
    NodeGone,
    NodeUp,
    Ready,
    RelayoutAsked,
    Stage,
    TableLost,
    Tick,
    Up,
)
from meshwright.conduct.muster import Muster, adopted
from meshwright.conduct.protocol import Exit
from meshwright.conduct.reach import Probe, Reached
from meshwright.conduct.shelf import other_layout
from meshwright.conduct.simulated import Line, SimAgent

if TYPE_CHECKING:
    from meshwright.conduct.simulation import Simulation


class SimConductor:
    """The effects around `decide`, as `surviving._Conductor` has them."""

    def __init__(self, world: Simulation, adopt: bool) -> None:
        self.world, self.alive = world, True
        self.clock = world.clock
        floor = (world.generation - 1) * world.epochs_of_one
        self.state = world.muster.first_state(self.clock.now_s, floor)
        self.taken: dict[int, tuple[int, int]] = {}  # by node: which agent, and its last report
        self.table_line: dict[str, Any] | None = None
        self.hellos: dict[int, dict[str, Any]] | None = {} if adopt else None
        self.progress_s: dict[int, float] = {}
        self.agents: dict[int, SimAgent] = {}
        self.muster = world.muster
        self.shelf = world.shelf()
        if adopt:
            self.clock.after(3.0, self._adopt)
        self.clock.after(0.5, self._tick)

    def ear(self, node: int, agent: SimAgent, line: Line) -> Callable[[dict[str, Any]], None]:
        """What hears an agent on one line."""

        def hear(said: dict[str, Any]) -> None:
            if self.alive and line.open:
                self._hear(node, agent, said)

        return hear

    def _hear(self, node: int, agent: SimAgent, said: dict[str, Any]) -> None:
        if said["event"] == "hello":
            if self.hellos is not None:
                self.hellos[node] = said
            else:
                self._greet(node, said)
            return
        if said["event"] == "beat":
            _, taken = self.taken.get(node, (0, 0))
            if self.hellos is None and self.state.nodes[node].alive:
                self._send(node, {"op": "ack", "n": taken, "at": said["at"]})
            progressed = said["progress"] > self.progress_s.get(node, -1.0)
            self.progress_s[node] = said["progress"]
            self.apply(Heard(node, progressed))
            for number, frozen_s in said["frozen"]:
                if frozen_s >= self.state.limits.frozen_s:
                    self.apply(Condemned(number, "frozen", frozen_s))
            return
        if self.hellos is not None:  # known from its hello, and said again once it is greeted
            return
        known, taken = self.taken.get(node, (id(agent), 0))
        if known == id(agent) and said["n"] <= taken:
            return
        self.taken[node] = (id(agent), said["n"])
        for _ in range(self.clock.random.choice((1, 1, 1, 2))):  # twice does no harm
            self._take(said)

    def _take(self, said: dict[str, Any]) -> None:
        match said["event"]:
            case "up":
                self.apply(Up(said["member"], ("x",)))
                self.apply(Ready(said["member"]))
            case "executing":
                self.apply(Executing(said["member"], *said["at"]))
            case "held":
                self.shelf.step = self.world.step
                self.apply(Held(said["member"], said["epoch"]))
            case "dying":
                self.apply(Dying(said["member"]))
            case "exit":
                fields = {key: value for key, value in said.items() if key not in ("event", "n")}
                self.apply(Ended(said["member"], Exit(**fields), "died"))

    def _greet(self, node: int, hello: dict[str, Any]) -> None:
        living = frozenset(member["member"] for member in hello["members"])
        agent = self.world.agents[node]
        fresh = self.agents.get(node, agent) is not agent
        self.agents[node] = agent
        up = NodeUp(node, self.world.muster.slots(node), living, fresh)
        ends = [Ended(fields["member"], Exit(**fields), "died") for fields in hello["ended"]]
        self.apply(up, *ends)
        for number in self.state.living():
            if self.state.members[number].node == node and number not in hello["launched"]:
                self._send(node, {"op": "launch", "member": number})
        if self.table_line is not None:
            self._send(node, self.table_line)

    def _adopt(self) -> None:
        if not self.alive or self.hellos is None:
            return
        hellos, living = self.hellos, [a for a in self.world.agents.values() if a.alive]
        if not any(hello["table"] for hello in hellos.values()) and self.world.step:
            if living:  # they will answer, or end
                self.clock.after(3.0, self._adopt)
            else:
                self.state = replace(self.state, stage=Stage.OVER, failure="nobody to adopt")
            return
        self.hellos = None
        step = self.world.step
        self.state, self.table_line = adopted(self.state, hellos, step)
        through = None if self.table_line is None else self.table_line["through"]
        self.muster = Muster(self.shelf.adopt(self.muster.job, through))
        rules = replace(self.state.rules, shapes=self.muster.shapes, keeping=self.muster.keeping)
        self.state = replace(self.state, rules=rules)
        for node, hello in hellos.items():
            self._greet(node, hello)
            agent = self.world.agents[node]
            for _, said in list(agent.kept):
                self._take(said)
        for node, agent in self.world.agents.items():
            if not agent.alive:
                self.apply(NodeGone(node, "its agent died"))
        if through is not None and through["saving"]:
            self.apply(TableLost())

    def ask_layout(self, wanted: dict[str, int]) -> None:
        """A user wants another layout."""
        state = self.state
        if self.hellos is not None or state.relayout or state.stage is not Stage.RUNNING:
            return
        now = state.rules.shapes.replicas(len(state.table))
        try:
            relayout, self.shelf.job = other_layout(self.muster, now, wanted)
        except ConfigError:  # it has that one already
            return
        self.apply(RelayoutAsked(relayout))

    def heard_step(self, step: int) -> None:
        """Some rank has begun the next step."""
        if self.hellos is None:
            self.apply(Begun(step + 1))

    def _tick(self) -> None:
        if self.alive and self.state.stage is not Stage.OVER:
            if self.hellos is None:
                self.apply(Tick())
            self.clock.after(0.5, self._tick)

    def apply(self, *events: Event) -> None:
        """As the real one."""
        if not self.alive or self.hellos is not None:
            return
        before, failure = self.state.table, self.state.failure
        self.state, actions = self.world.decide(self.state, events, self.clock.now_s)
        if failure is None and self.state.failure is not None:
            self.world.check_failure(self.state.failure)
        for action in actions:
            if isinstance(action, SendTable):
                self.world.check_table(before, action, self.state)
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case SendTable(epoch, members, lost):
                held = {str(rank): number for rank, number in enumerate(members)}
                line = {"op": "table", "epoch": epoch, "members": held, "lost": list(lost)}
                line["goal"] = self.state.goal
                line["homes"] = {str(m): self.state.members[m].node for m in members}
                if action.through == "load":
                    self.shelf.load()
                    assert self.shelf.job is not None
                    self.muster = Muster(self.shelf.job)
                saves = action.through == "save"
                line["through"] = self.shelf.save() if saves else self.shelf.through
                self.table_line = line
                self.world.tables[epoch] = line
                self._send_all(line)
            case Kill(number):
                self._send_all({"op": "kill", "member": number})
            case KillAll():
                self._send_all({"op": "kill_all"})
            case StopMembers(numbers):
                self._send_all({"op": "stop", "members": numbers})
            case Launch(node, number):
                self._send(node, {"op": "launch", "member": number})
            case Revive(node):
                self.world.revive(node)
            case Probe(asked_s, nodes):
                for node in nodes:
                    self._try(node, asked_s, nodes)
            case Record(kind):
                self.world.alerts += kind == Kind.ALERT
                self.world.takeovers += kind == Kind.TAKEOVER_DONE
                self.world.relayouts += kind == Kind.RESIZED

    def _try(self, node: int, asked_s: float, nodes: tuple[int, ...]) -> None:
        """An agent says whom it does not reach, if its line lasts as long."""
        line = self.world.agents[node].line

        def answer() -> None:
            if line is not None and line.open:
                self.apply(Reached(node, asked_s, self.world.unreached(node, nodes)))

        self.clock.after(self.clock.random.uniform(0.02, 0.8), answer)

    def _send_all(self, request: dict[str, Any]) -> None:
        for node in self.world.agents:
            self._send(node, request)

    def _send(self, node: int, request: dict[str, Any]) -> None:
        agent = self.world.agents[node]
        if agent.line is not None and agent.line.open:
            agent.line.send("down", lambda: agent.obey(request))
