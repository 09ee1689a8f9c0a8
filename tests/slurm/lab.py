"""A Slurm cluster of several nodes on this machine: real daemons, fake chips, its own munge.

Everything is below one folder. With `network`, each node has a network namespace of its own, on a
bridge, and can be cut off.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol")
_BOUND_S = 40.0

_CONFIG = """\
ClusterName=lab
SlurmctldHost={host}({controller})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.socket
CryptoType=crypto/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_min_interval=100000,batch_sched_delay=0
GresTypes=gpu
ReturnToService=2
SlurmdTimeout={timeout}
SlurmctldTimeout=10
MessageTimeout=5
KillWait=2
JobRequeue=1
{nodes}
PartitionName=lab Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs=16 Boards=1 "
    "SocketsPerBoard=1 CoresPerSocket=16 ThreadsPerCore=1 RealMemory=1000 Gres=gpu:h100:8 "
    "State=UNKNOWN"
)


def missing() -> str | None:
    """Why no lab can be made here, in one line, if so."""
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"Slurm is not installed: no {lacking[0]} (Debian: apt install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "a lab of Slurm is made by root alone"


def no_namespaces() -> str | None:
    """Why nodes can have no network of their own, if so."""
    if shutil.which("ip") is None:
        return "no ip (Debian: apt install iproute2)"
    name = f"mwt{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode:
        return "this machine gives no network namespaces"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


@dataclass(frozen=True)
class _Wires:
    """Names of a bridge and what hangs on it; addresses are 10.B.C.1 and up."""

    tag: str
    prefix: str  # of addresses: "10.B.C."

    @property
    def bridge(self) -> str:
        return f"mwb{self.tag}"

    def space(self, number: int) -> str:
        return f"mwn{self.tag}{number}"

    def cable(self, number: int) -> str:
        return f"mwv{self.tag}{number}"

    def address(self, number: int) -> str:
        return f"{self.prefix}{10 + number}"


class Lab:
    """The cluster. `env` is what clients of it need in their environment."""

    partition = "lab"

    def __init__(self, root: Path, nodes: int, network: bool = False, timeout_s: int = 10) -> None:
        self.root = root
        self.names = [f"n{number:02d}" for number in range(1, nodes + 1)]
        self.config = root / "slurm.conf"
        self.env = {"SLURM_CONF": str(self.config)}
        tag = secrets.token_hex(2)
        subnet = f"10.{200 + int(tag[:2], 16) % 50}.{int(tag[2:], 16)}."
        self.wires = _Wires(tag, subnet) if network else None
        self._timeout_s = timeout_s
        self._munged = 0

    @property
    def address(self) -> str:
        """Of this machine, as nodes see it."""
        return f"{self.wires.prefix}1" if self.wires else "127.0.0.1"

    # --- as a whole

    def up(self) -> None:
        """Start all of it, until every node is idle."""
        for name in ("munge", "state", "log", "run", "spool", "dev"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)
        (self.root / "munge").chmod(0o700)
        key = self.root / "munge" / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        for chip in range(8):  # a chip without its file does not count
            os.mknod(self.root / "dev" / f"gpu{chip}", 0o20666, os.makedev(1, 3))
        if self.wires:
            self._lay()
        self._configure()
        run = self.root / "run"
        run.chmod(0o755)
        munged = ["munged", f"--key-file={key}", f"--socket={run / 'munge.socket'}"]
        munged += [f"--pid-file={run / 'munged.pid'}", f"--log-file={self.root / 'log/munged.log'}"]
        _call([*munged, f"--seed-file={self.root / 'munge/seed'}", "--num-threads=2", "--force"])
        self.start_controller()
        for name in self.names:
            self.start_node(name)
        self.wait(lambda: self.states() == dict.fromkeys(self.names, "idle"), "nodes are not idle")

    def down(self) -> None:
        """End every process of it, and take its network away."""
        for name in self.names:
            self.kill_node(name)
        for daemon in ("slurmctld", "munged"):
            self._kill(self.root / "run" / f"{daemon}.pid", signal.SIGKILL)
        if self.wires:
            for number in range(len(self.names)):
                _try(["ip", "link", "del", self.wires.cable(number)])
                _try(["ip", "netns", "del", self.wires.space(number)])
            _try(["ip", "link", "del", self.wires.bridge])

    def _configure(self) -> None:
        host = socket.gethostname()
        lines = []
        for number, name in enumerate(self.names):
            where, address, port = (
                (name, self.wires.address(number), 6818)
                if self.wires
                else (host, "127.0.0.1", _free_port())
            )
            lines.append(_NODE.format(name=name, host=where, address=address, port=port))
        self.config.write_text(
            _CONFIG.format(
                host=host,
                controller=self.address,
                port=_free_port(),
                root=self.root,
                timeout=self._timeout_s,
                nodes="\n".join(lines),
            )
        )
        gres = [
            f"NodeName={n} Name=gpu Type=h100 File={self.root}/dev/gpu[0-7]" for n in self.names
        ]
        (self.root / "gres.conf").write_text("\n".join(gres) + "\n")

    def _lay(self) -> None:
        assert self.wires
        bridge = self.wires.bridge
        _call(["ip", "link", "add", bridge, "type", "bridge"])
        _call(["ip", "addr", "add", f"{self.wires.prefix}1/24", "dev", bridge])
        _call(["ip", "link", "set", bridge, "up"])
        for number in range(len(self.names)):
            space, cable = self.wires.space(number), self.wires.cable(number)
            _call(["ip", "netns", "add", space])
            peer = ["type", "veth", "peer", "name", "eth0", "netns", space]
            _call(["ip", "link", "add", cable, *peer])
            _call(["ip", "link", "set", cable, "master", bridge, "up"])
            address = f"{self.wires.address(number)}/24"
            _call(["ip", "-n", space, "addr", "add", address, "dev", "eth0"])
            for device in ("eth0", "lo"):
                _call(["ip", "-n", space, "link", "set", device, "up"])

    # --- its parts

    def start_controller(self) -> None:
        """slurmctld, which answers when this returns."""
        _call(["slurmctld", "-f", str(self.config)], self.env)
        self.wait(lambda: self.ask("scontrol", "ping").count("UP"), "slurmctld does not answer")

    def kill_controller(self) -> None:
        """SIGKILL: what it has not written down is lost."""
        self._kill(self.root / "run" / "slurmctld.pid", signal.SIGKILL)

    def start_node(self, name: str) -> None:
        """slurmd of one node."""
        inside: list[str] = []
        if self.wires:  # `ip netns exec` would hide cgroups
            space = self.wires.space(self.names.index(name))
            inside = ["nsenter", f"--net=/run/netns/{space}"]
        _call([*inside, "slurmd", "-N", name, "-f", str(self.config)], self.env)

    def mend(self) -> None:
        """All nodes as they were at first."""
        for name in self.names:
            if not (self.root / "run" / f"slurmd.{name}.pid").exists():
                self.start_node(name)
            self.ask("scontrol", "update", f"nodename={name}", "state=resume")
        self.wait(lambda: self.states() == dict.fromkeys(self.names, "idle"), "nodes are not idle")

    def kill_node(self, name: str) -> None:
        """SIGKILL to slurmd and to everything that it has started."""
        self._kill(self.root / "run" / f"slurmd.{name}.pid", signal.SIGKILL)
        for _ in range(3):  # they may be starting others
            for pid in self.processes_of(name):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def processes_of(self, name: str) -> list[int]:
        """Steps of a node and what they run, slurmd apart; by what they have open or know."""
        log, here = str(self.root / "log" / f"slurmd.{name}.log"), f"SLURMD_NODENAME={name}"
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with suppress(OSError):
                words = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                mine = f"SLURM_CONF={self.config}" in words and here in words
                if mine or any(str(fd.readlink()) == log for fd in (entry / "fd").iterdir()):
                    found.append(int(entry.name))
        return found

    def stopped(self, name: str) -> list[int]:
        """Processes of a node that are held still: an agent without its lease does that."""
        found = []
        for pid in self.processes_of(name):
            with suppress(OSError):
                stat = Path(f"/proc/{pid}/stat").read_text()
                found += [pid] if stat.rpartition(")")[2].split()[0] == "T" else []
        return found

    def cut(self, name: str) -> None:
        """Take the node off the network."""
        assert self.wires
        _call(["ip", "link", "set", self.wires.cable(self.names.index(name)), "down"])

    def heal(self, name: str) -> None:
        """Put it back."""
        assert self.wires
        _call(["ip", "link", "set", self.wires.cable(self.names.index(name)), "up"])

    # --- what it says

    def ask(self, *words: str) -> str:
        """What a command of Slurm writes; nothing where it fails."""
        done = subprocess.run(
            words, env={**os.environ, **self.env}, capture_output=True, text=True, check=False
        )
        return done.stdout

    def states(self) -> dict[str, str]:
        """Of each node, in Slurm's words."""
        lines = self.ask("sinfo", "-h", "-N", "-p", self.partition, "-o", "%N|%T").split()
        return dict(line.split("|") for line in lines)

    def jobs(self) -> list[dict[str, str]]:
        """All that it knows, ended ones too."""
        keys = ("id", "name", "state", "nodes", "reason", "comment")
        lines = self.ask("squeue", "-h", "-t", "all", "-o", "%i|%j|%T|%N|%r|%k").splitlines()
        return [dict(zip(keys, line.split("|"), strict=True)) for line in lines]

    def wait(self, what: Callable[[], object], words: str, bound_s: float = _BOUND_S) -> None:
        """Until it is true; not for ever."""
        deadline_s = time.monotonic() + bound_s
        while not what():
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{words}: {self.states()} {self.jobs()}\n{self.logs()}")
            time.sleep(0.05)

    def logs(self) -> str:
        """The end of what the controller wrote."""
        log = self.root / "log" / "slurmctld.log"
        return log.read_text()[-2000:] if log.exists() else ""

    def _kill(self, pid_file: Path, number: int) -> None:
        with suppress(OSError, ValueError):
            pid = int(pid_file.read_text())
            os.kill(pid, number)
            self.wait(lambda: _ended(pid), f"process {pid} does not end")
            pid_file.unlink()


@contextmanager
def lab(root: Path, nodes: int, network: bool = False, timeout_s: int = 10) -> Iterator[Lab]:
    """A lab that is up, and gone afterwards."""
    made = Lab(root, nodes, network, timeout_s)
    try:
        made.up()
        yield made
    finally:
        made.down()


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _call(words: list[str], env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        words,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=_BOUND_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def _try(words: list[str]) -> None:
    subprocess.run(words, capture_output=True, check=False)
