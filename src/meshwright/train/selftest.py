"""The self-test of one machine: `python -m meshwright.train.selftest --processes N --home FOLDER`.

It prints one JSON object a line, `{"phase", "line", "figures"}`, as each part is done, and
`{"phase": "failed", "line"}` before it ends with 1 if something is wrong. Figures are of the whole
machine, all its cores at once, by processes that are forked from this one: as ranks are.

GFLOP/s are 1e9 multiply and add operations a second; GB are 1e9 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_MEASURE_S = 0.15  # of each figure of speed
_WIRE_BYTES = 1 << 27
_MOUNT_BYTES = 1 << 23
_BLOCK = 1 << 20
_SIZE = 384  # of the matrices
_COPIED = 1 << 24  # numbers: larger than caches
_TIMES = 5  # that a death is timed
_PATIENCE_S = 60.0
_EXACT = 64  # of the matrices whose product every process has to get right

Measure = Callable[[], float]


def say(phase: str, line: str, **figures: float) -> None:
    """One part is done."""
    sys.stdout.write(json.dumps({"phase": phase, "line": line, "figures": figures}) + "\n")
    sys.stdout.flush()


def main() -> int:
    """All parts, the fast ones first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, required=True, help="chips of this machine")
    parser.add_argument("--home", type=Path, required=True, help="folder of the cluster")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    try:
        _wire()
        _mount(options.home)
        _initialise(options.processes)
        _compute(min(cores, options.processes))
        _drill()
    except Exception as error:
        traceback.print_exc()
        say("failed", f"{type(error).__name__}: {' '.join(str(error).split())}")
        return 1
    return 0


# --- forked processes


def forked(count: int, measure: Measure) -> list[float]:
    """What `measure` gives in `count` processes that run it at once. Raises RuntimeError where one
    does not come to its end."""
    children = [_fork(measure) for _ in range(count)]
    found = []
    for pid, answer in children:
        with os.fdopen(answer, "rb") as pipe:
            ready, _, _ = select.select([pipe], [], [], _PATIENCE_S)
            said = pipe.read(8) if ready else b""
        if len(said) != 8:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found.append(struct.unpack("d", said)[0] if len(said) == 8 else None)
    if missing := sum(one is None for one in found):
        raise RuntimeError(f"{missing} of {count} processes did not come to their end")
    return [one for one in found if one is not None]


def _fork(measure: Measure) -> tuple[int, int]:
    sys.stdout.flush()
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid, ours
    try:
        os.write(theirs, struct.pack("d", measure()))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def rate(work: Callable[[], object], amount: float) -> float:
    """`amount` a second, from repeating `work`, which does so much, for `_MEASURE_S`."""
    work()
    done, begun_s = 0, time.perf_counter()
    while (took_s := time.perf_counter() - begun_s) < _MEASURE_S or not done:
        work()
        done += 1
    return done * amount / took_s


# --- without torch


def _wire() -> None:
    """Between two processes, over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_PATIENCE_S)
        pid, answer = _fork(lambda: _send(server.getsockname()[1]))
        os.close(answer)
        try:
            line, _ = server.accept()
            with line:
                line.settimeout(_PATIENCE_S)
                begun_s, got, buffer = time.perf_counter(), 0, bytearray(_BLOCK)
                while count := line.recv_into(buffer):
                    got += count
                took_s = time.perf_counter() - begun_s
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if got != _WIRE_BYTES:
        raise RuntimeError(f"{got} of {_WIRE_BYTES} bytes came over loopback")
    speed = got / took_s / 1e9
    say("wire", f"loopback carries {speed:.2f} GB/s from one process to another", wire_gb_s=speed)


def _send(port: int) -> float:
    with socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S) as line:
        block = bytes(_BLOCK)
        for _ in range(_WIRE_BYTES // _BLOCK):
            line.sendall(block)
    return 0.0


def _mount(home: Path) -> None:
    """The folder of the cluster takes what is written to it, and gives it back."""
    home.mkdir(parents=True, exist_ok=True)
    data = os.urandom(_MOUNT_BYTES)
    with tempfile.TemporaryFile(dir=home) as file:
        begun_s = time.perf_counter()
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        took_s = time.perf_counter() - begun_s
        file.seek(0)
        if file.read() != data:
            raise RuntimeError(f"{home} gives back other bytes than were written")
    speed = _MOUNT_BYTES / took_s / 1e9
    say("mount", f"its folder takes {speed:.2f} GB/s to the disk", write_gb_s=speed)


# --- with torch


def _initialise(processes: int) -> None:
    """Every chip is a process that can be forked, and that multiplies correctly."""
    import torch

    torch.set_num_threads(1)
    begun_s = time.perf_counter()
    wrong = sum(forked(processes, _errs))
    if wrong:
        raise RuntimeError(f"{wrong:g} of {processes} processes multiply wrongly")
    took_s = time.perf_counter() - begun_s
    say(
        "initialise",
        f"{processes} processes forked, and each multiplied correctly, in {took_s:.2f} s",
        processes=processes,
        fork_s=took_s,
    )


def _errs() -> float:
    """1 if a product of whole numbers, which floats hold exactly, is wrong."""
    import torch

    whole = torch.arange(_EXACT * _EXACT).reshape(_EXACT, _EXACT) % 7
    product = whole.float() @ whole.float().T
    return float(not torch.equal(product.long(), whole @ whole.T))


def _compute(processes: int) -> None:
    import torch

    fp32 = sum(forked(processes, lambda: _products(torch.float32)))
    bf16 = sum(forked(processes, lambda: _products(torch.bfloat16)))
    line = f"{fp32:.1f} GFLOP/s in fp32, {bf16:.1f} in bf16, by {processes} processes at once"
    say("compute", line, fp32_gflops=fp32, bf16_gflops=bf16)
    if wrong := sum(forked(processes, _forgets)):
        raise RuntimeError(f"memory of {wrong:g} of {processes} processes holds other bytes")
    held = processes * 4.0 * _COPIED
    say("memory", f"{held / 1e6:.0f} MB held what was written there", checked_bytes=held)
    copied = sum(forked(processes, _copies))
    say("bandwidth", f"memory moves {copied:.1f} GB/s", memory_gb_s=copied)
    how, product = fp8_product()
    flops = 2 * _SIZE**3 / 1e9
    fp8 = sum(forked(processes, lambda: rate(product, flops)))
    say("fp8", f"{fp8:.1f} GFLOP/s in fp8, by {how}", fp8_gflops=fp8)


def _products(dtype: torch.dtype) -> float:
    """GFLOP/s of one process."""
    import torch

    left = torch.randn(_SIZE, _SIZE).to(dtype)
    return rate(lambda: left @ left, 2 * _SIZE**3 / 1e9)


def _forgets() -> float:
    """1 if memory does not give back the numbers that were written there."""
    import torch

    written = torch.arange(_COPIED, dtype=torch.int32)
    return float(int(written.sum(dtype=torch.int64)) != _COPIED * (_COPIED - 1) // 2)


def _copies() -> float:
    """GB/s that one process reads and writes."""
    import torch

    source = torch.ones(_COPIED, dtype=torch.float32)
    target = torch.empty_like(source)
    return rate(lambda: target.copy_(source), 2 * 4 * _COPIED / 1e9)


def fp8_product() -> tuple[str, Callable[[], object]]:
    """How this build of torch multiplies in fp8, in words, and a product of `_SIZE`."""
    import torch

    left = torch.randn(_SIZE, _SIZE).to(torch.float8_e4m3fn)
    one = torch.tensor(1.0)

    def scaled() -> Any:
        return torch._scaled_mm(left, left.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)

    def widened() -> Any:
        return left.float() @ left.t().float()

    try:
        scaled()
    except (RuntimeError, NotImplementedError, AttributeError):
        return "widening to fp32, for this build of torch has no scaled product", widened
    return "the scaled product of torch", scaled


def _drill() -> None:
    """How long it takes to see that a process was killed."""
    times = sorted(_death_s() for _ in range(_TIMES))
    seen_s = times[_TIMES // 2]
    say(
        "drill",
        f"a killed process is seen after {seen_s * 1e3:.1f} ms",
        seen_s=seen_s,
        worst_s=times[-1],
    )


def _death_s() -> float:
    pid, answer = _fork(_sleep)
    pidfd = os.pidfd_open(pid)
    try:
        begun_s = time.perf_counter()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        if not select.select([pidfd], [], [], _PATIENCE_S)[0]:
            raise RuntimeError(f"process {pid} was killed and is not seen to be dead")
        return time.perf_counter() - begun_s
    finally:
        os.waitpid(pid, 0)
        os.close(pidfd)
        os.close(answer)


def _sleep() -> float:
    time.sleep(_PATIENCE_S)
    return 0.0


if __name__ == "__main__":
    sys.exit(main())
