"""The conductor of a run that survives: the effects around `takeover.decide`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from meshwright.base.errors import RunError
from meshwright.base.events import Kind
from meshwright.conduct.answering import Answering
from meshwright.conduct.bench import Bench
from meshwright.conduct.conductor import Outcome, Status, describe, last_line
from meshwright.conduct.decide import first_cause
from meshwright.conduct.fleet import Asked, Cut, Dead, Fleet, Heard, Hello, Report
from meshwright.conduct.ledger import Ledger
from meshwright.conduct.limits import Limits, limits
from meshwright.conduct.members import (
    Begun,
    Condemned,
    Corrupt,
    Disputed,
    Dying,
    Ended,
    Executing,
    Held,
    NodeGone,
    NodeUp,
    Ready,
    Stage,
    StopAsked,
    TableLost,
    Tick,
    Unlinked,
    Up,
)
from meshwright.conduct.members import Heard as HeardOf
from meshwright.conduct.muster import Muster, adopted
from meshwright.conduct.protocol import Exit, Message, member_log_path, signal_name
from meshwright.conduct.quarantine import given_up, keep_out
from meshwright.conduct.reach import Reached
from meshwright.conduct.rundir import RunDir, living_agents, read_lines
from meshwright.conduct.shelf import Memory, Shelf
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
        Kind.NODE_BACK,
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
    # What members of several machines are to see cannot be in the memory of one.
    memory = Memory(rundir.path) if fleet.here is None else Memory(rundir.path, rundir.path)
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


class _Conductor(Answering):
    """The whole of it."""

    def follow(self, adopt: bool) -> None:
        """Start or adopt the agents, and act on all that happens until the run is over."""
        if not (self._adopt() if adopt else self._start()):
            return
        while self.state.stage is not Stage.OVER:
            looked_s = time.monotonic()
            for heard in self.fleet.poll(_POLL_S):
                self._hear(heard)
            if self.ends:  # those who died together are replaced together
                ends, self.ends = self.ends, []
                self.apply(*ends)
            for _ in range(self.stop_requests() - self.asked):
                self.asked += 1
                self.apply(StopAsked())
            self.apply(Tick(looked_s))
            self.revive()

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
        known = given_up(read_lines(self.rundir.events))
        self.state = keep_out(self.state, known, time.monotonic() - time.time())
        self.state = replace(self.state, member_floor=self.rundir.next_member())
        for node, hello in hellos.items():
            self._greet(node, hello)
        for node in set(range(self.muster.nodes)) - set(living_agents(self.rundir.path)):
            self.apply(NodeGone(node, f"the agent of node {node} died"))
        for heard in later:
            self._hear(heard)
        if through is not None and through["saving"]:
            self.apply(TableLost())
        return True

    # --- what is heard

    def _hear(self, heard: Heard) -> None:
        match heard:
            case Hello(node, fields):
                self._greet(node, fields)
            case Report(node, fields) if fields["event"] == "beat":
                self._beat(node, fields)
            case Report(node, fields) if fields["event"] == "reach":
                self.apply(Reached(node, fields["at"], frozenset(fields["missing"])))
            case Report(node, fields):
                if not self.fleet.taken(node, fields["n"]):
                    self._take(fields)
            case Cut(node):
                self.apply(Unlinked(node))
            case Dead(node):
                self.apply(NodeGone(node, f"the agent of node {node} died"))
            case Asked(link, fields):
                link.send(self.answer(fields))

    def _greet(self, node: int, hello: dict[str, Any]) -> None:
        living = {member["member"]: member for member in hello["members"]}
        fresh = self.instances.get(node, hello["instance"]) != hello["instance"]
        self.instances[node] = hello["instance"]
        up = NodeUp(node, self.muster.slots(node), frozenset(living), fresh)
        self.apply(up, *(_ended(Exit(**fields)) for fields in hello["ended"]))
        missing = [
            number
            for number in self.state.living()
            if self.state.members[number].node == node and number not in hello["launched"]
        ]
        self.launch(node, missing)
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
            self.apply(Up(member, tuple(message["addresses"])))
        elif kind == Kind.EXECUTING:
            self.apply(Executing(member, message["epoch"], message["step"]))
        elif kind == Kind.HELD:
            self._held(message)
        elif kind == Kind.RUN_INTERRUPTED:  # every rank may say so; told once, at the end
            self.saved_step = message["step"]
        elif kind == Kind.PROGRESS:
            self.step_of_rank[message["rank"]] = message["step"]
            if message["step"] > self.state.step:
                self.apply(Begun(message["step"]))
            self.ledger.on_event(message)
        elif kind == Kind.LINK:
            self._see_links(message)
        elif kind == Kind.METRICS:
            self.ledger.measure(message)
        elif kind == Kind.CORRUPT:
            self._keep(message)
            self._accuse(message)
        else:
            self._keep(message)

    def _held(self, message: Message) -> None:
        if message["epoch"] == self.state.epoch:
            self.shelf.step = message["step"]
            if message["error"] is not None:
                self.shelf.give_up()
        self.apply(Held(message["member"], message["epoch"], message["error"]))

    def _is_stale(self, message: Message) -> bool:
        """Whether it speaks for a rank that another member holds now."""
        rank, member = message["rank"], message.get("member")
        table = self.state.table
        return member is not None and 0 <= rank < len(table) and table[rank] != member

    def _keep(self, message: Message) -> None:
        if message["kind"] == Kind.SPARE_READY:  # said anew at every table
            known = self.state.members.get(message["member"])
            self.apply(Ready(message["member"]))
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
            self.apply(*(Corrupt(member, found["what"]) for member in found["members"]))
        else:
            what = (
                f"step {found['step']}: {found['what']}, and it cannot be told which is right; go "
                f"back to the last checkpoint: meshwright train {self.rundir.path} --resume"
            )
            self.apply(Disputed(found["epoch"], what, found["redo"]))

    # --- verdicts

    def _see_links(self, message: Message) -> None:
        seen, lost = self.bench.see_links(message, self.state, time.monotonic())
        for path in lost:
            self.ledger.record(Kind.ALERT, {"what": str(path), "node": path.nodes[0]})
        self.apply(seen)

    def _beat(self, node: int, beat: dict[str, Any]) -> None:
        if self.state.nodes[node].alive:  # else it has to come anew
            self.fleet.acknowledge(node, beat["at"], self.state.limits.lease_agent_s)
        progressed, stepped = self.bench.take(node, beat["samples"], beat["epoch"], self.state)
        self.apply(HeardOf(node, progressed))
        if stepped:
            self.apply(self._limits())
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
        self.apply(Condemned(verdict.member, cause, stalled_s))
        said = {"rank": verdict.rank, "member": verdict.member, "step": pulse.step, "phase": phase}
        self.ledger.store({"kind": Kind.HANG, **said, "stalled_s": stalled_s, "cause": cause})

    def _own_up(self, end: Exit) -> None:
        """Say so where a verdict proves wrong: its member got on before it was killed."""
        if (before := self.bench.proved_alive(end.member, end.progress)) is not None:
            phase = before.pulse.phase.name.lower()
            what = f"was given up in {phase} and got on before it was killed"
            said = {"rank": before.rank, "member": end.member, "step": before.pulse.step}
            self.ledger.store({"kind": Kind.FALSE_ALARM, **said, "what": what})

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
