"""The conductor of a run that survives: the effects around `takeover.decide`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshwright.base.errors import ConfigError, RunError
from meshwright.base.events import Kind
from meshwright.conduct.bench import Bench
from meshwright.conduct.conductor import Outcome, Status, describe, last_line
from meshwright.conduct.decide import first_cause
from meshwright.conduct.fleet import Asked, Cut, Dead, Fleet, Heard, Hello, Report
from meshwright.conduct.ledger import Ledger
from meshwright.conduct.limits import Limits, limits
from meshwright.conduct.members import (
    Action,
    Begun,
    Condemned,
    Corrupt,
    Disputed,
    Dying,
    Ended,
    Event,
    Executing,
    Held,
    Kill,
    KillAll,
    Launch,
    NodeGone,
    NodeUp,
    Ready,
    Record,
    RelayoutAsked,
    ResizeAsked,
    Revive,
    SendTable,
    Stage,
    State,
    StopAsked,
    StopMembers,
    TableLost,
    Tick,
    Unlinked,
    Up,
)
from meshwright.conduct.members import Heard as HeardOf
from meshwright.conduct.muster import Muster, adopted
from meshwright.conduct.protocol import Exit, Message, member_log_path, signal_name
from meshwright.conduct.quarantine import quarantined
from meshwright.conduct.rundir import RunDir, living_agents, read_lines
from meshwright.conduct.shelf import Memory, Shelf, other_layout
from meshwright.conduct.takeover import decide
from meshwright.conduct.verdicts import Frozen, Verdict

_log = logging.getLogger(__name__)

_ADOPTION_S = 10.0  # for agents to find out that they have a conductor again
_POLL_S = 0.05  # how long a request to stop, or that time has passed, may go unseen
_EPOCHS_OF_ONE = 1_000_000  # tables that one conductor can give
_UNSAVED = "stopped before its state was saved; --resume goes on from the last checkpoint"
_OWN_KINDS = frozenset(
    {
        Kind.RUN_STARTED,
        Kind.RANK_LOST,
        Kind.RUN_FINISHED,
        Kind.RUN_FAILED,
        Kind.TAKEOVER_DONE,
        Kind.RESIZED,
        Kind.HANG,
        Kind.STRAGGLER,
        Kind.QUARANTINED,
        Kind.FALSE_ALARM,
        Kind.ALERT,
    }
)


def run(
    fleet: Fleet,
    rundir: RunDir,
    muster: Muster,
    entry: str,
    args: Mapping[str, Any],
    on_event: Callable[[Message], None],
    stop_requests: Callable[[], int],
    *,
    started: Mapping[str, Any] | None = None,
    adopt: bool = False,
) -> Outcome:
    """As `conductor.run`, but a rank that is lost is given to a spare.

    `adopt`: the agents of an earlier conductor still live; nothing is launched before they have
    said what they have. The run ends as failed only where nobody is left who holds the state, no
    chip is free or losses repeat; then no process is left.
    Raises RunError if the run directory cannot be written.
    """
    now_s = time.monotonic()
    fleet.open(rundir)
    memory = Memory(rundir.path)
    if not adopt:
        memory.sweep()
    conductor = _Conductor(
        fleet=fleet,
        rundir=rundir,
        muster=muster,
        entry=entry,
        args=args,
        ledger=Ledger(
            rundir,
            muster,
            on_event,
            metrics_step=rundir.last_step(),
            step=(started or {}).get("resumed_from") or 0,
        ),
        bench=Bench(muster),
        shelf=Shelf(memory.make),
        stop_requests=stop_requests,
        state=muster.first_state(now_s, (fleet.generation - 1) * _EPOCHS_OF_ONE),
    )
    try:
        conductor.ledger.store({"kind": Kind.RUN_STARTED, "world": muster.world, **(started or {})})
        try:
            conductor.follow(adopt)
        except RunError as error:
            return conductor.ledger.conclude(Status.FAILED, str(error))
        return conductor.judge()
    finally:
        conductor.shelf.close()
        fleet.close()


@dataclass
class _Conductor:
    fleet: Fleet
    rundir: RunDir
    muster: Muster
    entry: str
    args: Mapping[str, Any]
    ledger: Ledger
    bench: Bench
    shelf: Shelf
    stop_requests: Callable[[], int]
    state: State
    asked: int = 0
    saved_step: int | None = None
    longest_save_s: float = 0.0
    step_of_rank: dict[int, int] = field(default_factory=dict)
    log_start_bytes: dict[str, int] = field(default_factory=dict)
    table_line: dict[str, Any] | None = None
    to_revive: set[int] = field(default_factory=set)
    ends: list[Ended | Dying] = field(default_factory=list)
    instances: dict[int, str] = field(default_factory=dict)  # of the agents, by node

    def follow(self, adopt: bool) -> None:
        """Start or adopt the agents, and act on all that happens until the run is over."""
        if not (self._adopt() if adopt else self._start()):
            return
        while self.state.stage is not Stage.OVER:
            for heard in self.fleet.poll(_POLL_S):
                self._hear(heard)
            if self.ends:  # those who died together are replaced together
                ends, self.ends = self.ends, []
                self._apply(*ends)
            for _ in range(self.stop_requests() - self.asked):
                self.asked += 1
                self._apply(StopAsked())
            self._apply(Tick())
            self._revive()

    def _start(self) -> bool:
        while not self.fleet.wait_warm(_POLL_S):
            if self.stop_requests():
                return False
        for log in self.rundir.logs.iterdir():
            self.log_start_bytes[log.name] = log.stat().st_size
        for node in range(self.muster.nodes):
            self.fleet.spawn(node, self.state.limits.lease_agent_s)
        return True

    def _adopt(self) -> bool:
        """Know what the agents of an earlier conductor know."""
        expected = set(living_agents(self.rundir.path))
        hellos: dict[int, dict[str, Any]] = {}
        later: list[Heard] = []
        # By then agents that are cut off have ended their members.
        deadline_s = time.monotonic() + _ADOPTION_S + self.state.limits.lease_conductor_s
        while not expected <= hellos.keys() and time.monotonic() < deadline_s:
            if self.stop_requests():
                return False
            for heard in self.fleet.poll(_POLL_S):
                if isinstance(heard, Hello):
                    hellos[heard.node] = heard.fields
                else:
                    later.append(heard)
        if not any(hello["table"] for hello in hellos.values()) and self.ledger.metrics_step:
            raise RunError(f"the agents of nodes {sorted(expected)} live and do not answer")
        self.state, self.table_line = adopted(self.state, hellos, self.ledger.metrics_step)
        through = None if self.table_line is None else self.table_line.get("through")
        self.muster = self.ledger.muster = Muster(self.shelf.adopt(self.muster.job, through))
        self.state = replace(
            self.state,
            rules=replace(self.state.rules, shapes=self.muster.shapes, keeping=self.muster.keeping),
        )
        self.bench.take_layout(self.muster)
        given_up = quarantined(read_lines(self.rundir.events)) & self.state.members.keys()
        self.state = replace(self.state, quarantined=frozenset(given_up))
        for node, hello in hellos.items():
            self._greet(node, hello)
        for node in set(range(self.muster.nodes)) - set(living_agents(self.rundir.path)):
            self._apply(NodeGone(node, f"the agent of node {node} died"))
        for heard in later:
            self._hear(heard)
        if through is not None and through["saving"]:
            self._apply(TableLost())
        return True

    def _revive(self) -> None:
        if self.to_revive and self.fleet.wait_warm(0.0):
            nodes, self.to_revive = self.to_revive, set()
            for node in nodes:
                try:
                    self.fleet.spawn(node, self.state.limits.lease_agent_s)
                except RunError as error:  # the others can still go on
                    what = f"node {node} cannot be started again: {error}"
                    self.ledger.store({"kind": Kind.ALERT, "what": what, "node": node})

    # --- what is heard

    def _apply(self, *events: Event) -> None:
        self.state, actions = decide(self.state, events, time.monotonic())
        for action in actions:
            self._act(action)

    def _hear(self, heard: Heard) -> None:
        match heard:
            case Hello(node, fields):
                self._greet(node, fields)
            case Report(node, fields) if fields["event"] == "beat":
                self._beat(node, fields)
            case Report(node, fields):
                if not self.fleet.taken(node, fields["n"]):
                    self._take(fields)
            case Cut(node):
                self._apply(Unlinked(node))
            case Dead(node):
                self._apply(NodeGone(node, f"the agent of node {node} died"))
            case Asked(link, fields):
                link.send(self._answer(fields))

    def _greet(self, node: int, hello: dict[str, Any]) -> None:
        living = {member["member"]: member for member in hello["members"]}
        fresh = self.instances.get(node, hello["instance"]) != hello["instance"]
        self.instances[node] = hello["instance"]
        up = NodeUp(node, self.muster.slots(node), frozenset(living), fresh)
        self._apply(up, *(_ended(Exit(**fields)) for fields in hello["ended"]))
        missing = [
            number
            for number in self.state.living()
            if self.state.members[number].node == node and number not in hello["launched"]
        ]
        self._launch(node, missing)
        if self.table_line is not None:
            self.fleet.send(node, {"op": "order", "line": self.table_line})

    def _take(self, report: dict[str, Any]) -> None:
        match report["event"]:
            case "said":
                message = report["message"]
                self._listen({**message, "kind": Kind(message["kind"])})
            case "exit":
                fields = {k: v for k, v in report.items() if k not in ("event", "n")}
                self._own_up(Exit(**fields))
                self.ends.append(_ended(Exit(**fields)))
            case "dying":
                ago_s = max(0.0, time.time() - report["ts"])
                self.ends.append(Dying(report["member"], ago_s))
            case "refused":
                raise RunError(f"an agent could not start members: {report['error']}")

    def _listen(self, message: Message) -> None:
        kind, member = message["kind"], message.get("member", -1)
        if kind in _OWN_KINDS:
            _log.warning("member %s may not say %s: dropped", member, kind)
        elif self._is_stale(message):
            _log.warning("member %s has lost rank %s: dropped", member, message["rank"])
        elif kind == Kind.MEMBER_UP:
            self._apply(Up(member, tuple(message["addresses"])))
        elif kind == Kind.EXECUTING:
            self._apply(Executing(member, message["epoch"], message["step"]))
        elif kind == Kind.HELD:
            self._held(message)
        elif kind == Kind.RUN_INTERRUPTED:  # every rank may say so; told once, at the end
            self.saved_step = message["step"]
        elif kind == Kind.PROGRESS:
            self.step_of_rank[message["rank"]] = message["step"]
            if message["step"] > self.state.step:
                self._apply(Begun(message["step"]))
            self.ledger.on_event(message)
        elif kind == Kind.LINK:
            self._see_links(message)
        elif kind == Kind.METRICS:
            self.ledger.measure(message)
        elif kind == Kind.CORRUPT:
            self._keep(message)
            self._accuse(message)
        elif kind != Kind.PEER_GONE:
            self._keep(message)

    def _held(self, message: Message) -> None:
        if message["epoch"] == self.state.epoch:
            self.shelf.step = message["step"]
            if message["error"] is not None:
                self.shelf.give_up()
        self._apply(Held(message["member"], message["epoch"], message["error"]))

    def _is_stale(self, message: Message) -> bool:
        """Whether it speaks for a rank that another member holds now."""
        rank, member = message["rank"], message.get("member")
        table = self.state.table
        return member is not None and 0 <= rank < len(table) and table[rank] != member

    def _keep(self, message: Message) -> None:
        if message["kind"] == Kind.SPARE_READY:  # said anew at every table
            known = self.state.members.get(message["member"])
            self._apply(Ready(message["member"]))
            if known is None or known.ready:
                return
        if message["kind"] == Kind.CHECKPOINT_COMMITTED:
            self.longest_save_s = max(self.longest_save_s, message["save_s"])
            if message["step"] > self.shelf.step:
                self.shelf.clear()
        self.ledger.store_said(message)

    def _accuse(self, found: Message) -> None:
        """Take the word of a member for what it has found of itself or of its twins."""
        if found["certain"]:
            self._apply(*(Corrupt(member, found["what"]) for member in found["members"]))
        else:
            what = (
                f"step {found['step']}: {found['what']}, and it cannot be told which is right; go "
                f"back to the last checkpoint: meshwright train {self.rundir.path} --resume"
            )
            self._apply(Disputed(found["epoch"], what, found["redo"]))

    # --- verdicts

    def _see_links(self, message: Message) -> None:
        seen, lost = self.bench.see_links(message, self.state, time.monotonic())
        for path in lost:
            self.ledger.record(Kind.ALERT, {"what": str(path), "node": path.nodes[0]})
        self._apply(seen)

    def _beat(self, node: int, beat: dict[str, Any]) -> None:
        self.fleet.acknowledge(node, beat["at"], self.state.limits.lease_agent_s)
        progressed, stepped = self.bench.take(node, beat["samples"], self.state)
        self._apply(HeardOf(node, progressed))
        if stepped:
            self._apply(self._limits())
            for slow in self.bench.slow():
                self.ledger.store({"kind": Kind.STRAGGLER, **asdict(slow)})
        if self.state.stage in (Stage.RUNNING, Stage.TAKING_OVER):
            for verdict in self.bench.verdicts(self.state, time.monotonic()):
                self._condemn(verdict)

    def _limits(self) -> Limits:
        """Out of the user's setting, and what was measured."""
        return limits(
            self.state.limits.longest_stall_s,
            self.bench.step_log.step_times_s,
            self.bench.evaluate_quiet_s,
            self.longest_save_s,
        )

    def _condemn(self, verdict: Verdict) -> None:
        pulse = self.bench.condemn(verdict.member).pulse
        phase = pulse.phase.name.lower()
        if isinstance(verdict, Frozen):
            stalled_s, cause = verdict.frozen_s, f"frozen in {phase} (state {verdict.state})"
        else:
            stalled_s, cause = verdict.stalled_s, f"hung in {phase}"
        self._apply(Condemned(verdict.member, cause, stalled_s))
        said = {"rank": verdict.rank, "member": verdict.member, "step": pulse.step, "phase": phase}
        self.ledger.store({"kind": Kind.HANG, **said, "stalled_s": stalled_s, "cause": cause})

    def _own_up(self, end: Exit) -> None:
        """Say so where a verdict proves wrong: its member got on before it was killed."""
        if (before := self.bench.proved_alive(end.member, end.progress)) is not None:
            phase = before.pulse.phase.name.lower()
            what = f"was given up in {phase} and got on before it was killed"
            said = {"rank": before.rank, "member": end.member, "step": before.pulse.step}
            self.ledger.store({"kind": Kind.FALSE_ALARM, **said, "what": what})

    # --- requests of users

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take up what a user asks for, or say in one line why not."""
        wanted = request.get("layout")
        if request.get("op") != "resize" or not isinstance(wanted, dict):
            return {"error": f"no such request: {request.get('op')!r}"}
        if self.state.stage not in (Stage.RUNNING, Stage.TAKING_OVER) or self.state.relayout:
            busy = "changing its layout" if self.state.relayout else self.state.stage.name.lower()
            return {"error": f"the run is {busy}; try again when it runs"}
        replicas = wanted.get("dp_replicate")
        sizes = self.state.rules.shapes.sizes
        if wanted.keys() == {"dp_replicate"} and len(sizes) > 1:  # without a detour
            if replicas not in sizes:
                takes = ", ".join(str(size) for size in sizes)
                return {"error": f"dp_replicate = {replicas}: this job runs with {takes}"}
            self._apply(ResizeAsked(replicas))
            return {"accepted": wanted, "layout": self.muster.label(replicas)}
        now = self.state.rules.shapes.replicas(len(self.state.table))
        try:
            relayout, self.shelf.job = other_layout(self.muster, now, wanted)
        except ConfigError as error:
            return {"error": str(error)}
        self._apply(RelayoutAsked(relayout))
        return {"accepted": wanted, "layout": relayout.after}

    # --- what is done

    def _act(self, action: Action) -> None:
        match action:
            case SendTable():
                if action.through == "load":
                    self._take_layout()
                self.table_line = self._table_line(action)
                self.fleet.send_all({"op": "order", "line": self.table_line})
            case Kill(member):
                node = self.state.members[member].node if member in self.state.members else None
                request = {"op": "signal", "signal": "SIGKILL", "members": [member]}
                self.fleet.send_all(request) if node is None else self.fleet.send(node, request)
            case KillAll():
                self.fleet.send_all({"op": "signal", "signal": "SIGKILL"})
            case StopMembers(members):
                asked = {"members": list(members)}
                self.fleet.send_all({"op": "order", "line": {"op": "stop"}, **asked})
                self.fleet.send_all({"op": "signal", "signal": "SIGTERM", **asked})
            case Launch(node, member):
                self._launch(node, [member])
            case Revive(node):
                self.to_revive.add(node)
            case Record(kind, fields):
                self.ledger.record(kind, fields)

    def _table_line(self, action: SendTable) -> dict[str, Any]:
        replicas = action.dp_replicate
        return {
            "op": "table",
            "epoch": action.epoch,
            "members": {str(rank): member for rank, member in enumerate(action.members)},
            "addresses": {
                str(number): list(member.addresses)
                for number, member in self.state.members.items()
                if member.up
            },
            "homes": {str(m): self.state.members[m].node for m in action.members},
            "lost": list(action.lost),
            "shadows": {str(rank): member for rank, member in action.shadows.items()},
            "resize": None if replicas is None else {"layout": self.muster.layout(replicas)},
            "through": self.shelf.save() if action.through == "save" else self.shelf.through,
        }

    def _take_layout(self) -> None:
        """All begin anew in the layout that was asked for, from what they have saved."""
        self.shelf.load()
        assert self.shelf.job is not None
        self.muster = self.ledger.muster = Muster(self.shelf.job)
        self.bench.take_layout(self.muster)

    def _launch(self, node: int, members: list[int]) -> None:
        if members:
            world = self.muster.world
            self.fleet.send(
                node,
                {
                    "op": "launch",
                    "entry": self.entry,
                    "world": world,
                    "log_dir": str(self.rundir.logs.resolve()),
                    "args": dict(self.args),
                    "members": [[m, m if m < world else -1] for m in members],
                },
            )

    # --- the end

    def judge(self) -> Outcome:
        """How the run ended, after it is over."""
        state = self.state
        saved = self.ledger.committed_step >= self.muster.job.job.steps
        done = saved or set(state.table) <= state.returned
        if state.failure is None and self.saved_step is not None:
            self.ledger.step = self.saved_step
            return self.ledger.conclude(Status.INTERRUPTED, None)
        if state.failure is None and (
            done or self.ledger.committed_step >= self.muster.job.job.steps
        ):
            return self.ledger.conclude(Status.FINISHED, None)
        if state.stop_asked and not state.deaths:
            return self.ledger.conclude(Status.INTERRUPTED, _UNSAVED)
        return self.ledger.conclude(Status.FAILED, self._why())

    def _why(self) -> str:
        cause = first_cause(self.state.deaths)
        said = [self.state.failure] if self.state.failure else []
        if cause is not None:
            log = member_log_path(self.rundir.logs, cause.member)
            line = last_line(log, self.log_start_bytes.get(log.name, 0))
            said.append(describe(cause, self.step_of_rank.get(cause.rank), line, log))
        return "; ".join(said) or "the run was lost"


def _ended(end: Exit) -> Ended:
    if end.signal is not None:
        cause = f"died by {signal_name(end.signal)}"
    else:
        cause = "left early" if end.code == 0 else f"failed with exit code {end.code}"
    return Ended(end.member, end, cause, max(0.0, time.time() - end.ts))
