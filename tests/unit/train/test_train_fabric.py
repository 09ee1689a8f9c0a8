"""The fabric: collectives against plain sums, epochs, strangers, and peers that go away."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.train.fabric.fabric import Fabric
from meshwright.train.fabric.group import FabricGroup, Groups
from meshwright.train.fabric.orders import Interrupted, Orders, Table

_BOUND_S = 20.0


class Members:
    """Members in threads of this process, and the ends of their orders."""

    def __init__(self, count: int, secrets: list[str] | None = None, tcp: bool = False) -> None:
        self.orders, self.fabrics = [], []
        hosts = ("127.0.0.1",) if tcp else ()
        for member in range(count):
            mine, theirs = socket.socketpair()
            secret = "s" if secrets is None else secrets[member]
            fabric = Fabric(member, Orders(theirs.detach()), secret, hosts)
            self.orders.append(mine)
            self.fabrics.append(fabric)
        self._tcp = tcp

    def order(self, epoch: int, members: dict[int, int], to: list[int]) -> None:
        """Send a table to the members `to`."""
        pick = slice(1, None) if self._tcp else slice(None)
        addresses = {str(f.member): f.addresses[pick] for f in self.fabrics}
        table = {"op": "table", "epoch": epoch, "members": {str(r): m for r, m in members.items()}}
        line = json.dumps({**table, "addresses": addresses}).encode() + b"\n"
        for member in to:
            self.orders[member].sendall(line)

    def begin(self, epoch: int, members: dict[int, int]) -> None:
        """Have every member enter a table."""
        self.order(epoch, members, list(range(len(self.fabrics))))
        for fabric in self.fabrics:
            table = fabric.await_table(_BOUND_S)
            assert table is not None
            fabric.enter(table)

    def run(self, work: Callable[[Fabric], Any]) -> list[Any]:
        """`work` on all at once; their results, exceptions included."""
        results: list[Any] = [None] * len(self.fabrics)

        def target(i: int) -> None:
            try:
                results[i] = work(self.fabrics[i])
            except Exception as error:
                results[i] = error

        threads = [threading.Thread(target=target, args=(i,)) for i in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_BOUND_S)
        assert not any(thread.is_alive() for thread in threads), "somebody still waits"
        return results


@contextmanager
def _members(count: int, **how: Any) -> Iterator[Members]:
    members = Members(count, **how)
    with ExitStack() as stack:
        for fabric, orders in zip(members.fabrics, members.orders, strict=True):
            stack.callback(fabric.close)
            stack.callback(orders.close)
            stack.callback(socket.socket(fileno=fabric.orders.fd).close)
        yield members


def _numbers(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4, 6])
@pytest.mark.parametrize("count", [1, 5, 40_001])
@pytest.mark.parametrize("tcp", [False, True])
def test_all_reduce_adds_up_in_rank_order(size: int, count: int, tcp: bool) -> None:
    expected = _numbers(0, count)
    for rank in range(1, size):
        expected = expected + _numbers(rank, count)

    def work(fabric: Fabric) -> Tensor:
        group = Groups(fabric)(list(range(size)))
        x = _numbers(fabric.rank, count)
        for _ in range(3):
            x = _numbers(fabric.rank, count)
            group.all_reduce(x).wait()
        return x

    with _members(size, tcp=tcp) as members:
        members.begin(1, {rank: rank for rank in range(size)})
        for result in members.run(work):
            assert torch.equal(result, expected)


@pytest.mark.parametrize("size", [2, 3])
def test_the_other_collectives(size: int) -> None:
    def work(fabric: Fabric) -> None:
        rank = fabric.rank
        group = Groups(fabric)(list(range(size)))
        largest = torch.tensor([float(rank), -float(rank)])
        pending = group.all_reduce(largest, largest=True)
        gathered = torch.empty(size, 3, dtype=torch.bfloat16)
        group.all_gather(gathered, torch.full((1, 3), rank + 0.5, dtype=torch.bfloat16)).wait()
        pending.wait()
        assert largest.tolist() == [size - 1, 0]
        assert gathered[:, 0].tolist() == [i + 0.5 for i in range(size)]
        # Rank r sends i rows to rank i, so that rank 0 gets none.
        out = torch.empty(size * rank, 2)
        x = torch.arange(sum(range(size)) * 2.0).view(-1, 2) + 100 * rank
        group.all_to_all(out, x, [rank] * size, list(range(size))).wait()
        if rank:
            start = sum(range(rank))
            rows = [torch.arange(2 * start, 2 * (start + rank)) + 100.0 * i for i in range(size)]
            assert torch.equal(out.view(-1), torch.cat(rows))
        right, left = (rank + 1) % size, (rank - 1) % size
        numbers = [torch.empty(1 << 22, dtype=torch.uint8) for _ in range(3)]
        sent = [group.send(torch.full_like(n, 10 * rank + i), right) for i, n in enumerate(numbers)]
        for i, number in enumerate(numbers):
            group.receive(number, left).wait()
            assert (number == 10 * left + i).all()
        for op in sent:
            op.wait()

    with _members(size) as members:
        members.begin(1, {rank: rank for rank in range(size)})
        assert members.run(work) == [None] * size


def test_a_spare_in_a_ranks_place_changes_no_bit() -> None:
    def work(fabric: Fabric) -> Tensor | None:
        if fabric.rank < 0:
            return None
        x = _numbers(fabric.rank, 1000)
        Groups(fabric)([0, 1, 2]).all_reduce(x).wait()
        return x

    with _members(4) as members:
        members.begin(1, {0: 0, 1: 1, 2: 2})
        before = members.run(work)
        members.begin(2, {0: 0, 1: 3, 2: 2})
        after = members.run(work)
    assert before[3] is None and after[1] is None
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[3])


def test_a_table_ends_every_wait_and_what_was_under_way_is_void() -> None:
    """Rank 1 never joins the first sum; its large message of epoch 1 is cut short by epoch 2."""

    def work(fabric: Fabric) -> Any:
        group = Groups(fabric)([0, 1])
        big = torch.full((1 << 24,), 7.0)
        try:
            if fabric.rank == 1:
                group.send(big, 0)  # more than the kernel takes: part of it stays behind
                big.zero_()
            group.all_reduce(torch.ones(3)).wait() if fabric.rank == 0 else fabric.await_table()
        except Interrupted as interrupted:
            assert interrupted.table.epoch == 2
        fabric.enter(fabric.orders.newest or Table(0, {}, {}))
        x = torch.full((3,), float(fabric.rank + 1))
        group.all_reduce(x).wait()
        return x.tolist()

    with _members(2) as members:
        members.begin(1, {0: 0, 1: 1})
        timer = threading.Timer(0.2, lambda: members.order(2, {0: 0, 1: 1}, [0, 1]))
        timer.start()
        assert members.run(work) == [[3.0] * 3] * 2
        timer.join()


def test_a_table_that_came_while_nothing_could_be_done_about_it_ends_the_next_wait() -> None:
    def work(fabric: Fabric) -> int:
        group = Groups(fabric)([0, 1])
        with fabric.undisturbed():
            members.order(2, {0: 0, 1: 1}, [fabric.rank])
            op = group.receive(torch.empty(1), 1 - fabric.rank)
            fabric.await_table(0.0)
            while fabric.orders.newest is None or fabric.orders.newest.epoch < 2:
                fabric.await_table(0.01)
        with pytest.raises(Interrupted) as found:
            op.wait()
        return found.value.table.epoch

    with _members(2) as members:
        members.begin(1, {0: 0, 1: 1})
        assert members.run(work) == [2, 2]


def test_ranks_of_a_replica_go_on_over_a_table_that_is_dealt_with_in_place() -> None:
    """Member 3 takes rank 2 while 0 and 1 are in the midst of a sum of their own."""

    def work(fabric: Fabric) -> list[float]:
        block = frozenset({0, 1}) if fabric.rank in (0, 1) else frozenset({2})
        groups = Groups(fabric, block)
        inside, outside = groups([0, 1]), groups.after([0, 1, 2])
        met: list[float] = []

        def in_place(table: Table) -> bool:
            fabric.enter(table, keep_inside=True)
            met.append(_sum(outside))
            return True

        if fabric.rank not in (0, 1):
            table = fabric.await_table(_BOUND_S)
            assert table is not None
            fabric.enter(table)
            return [_sum(outside)] if fabric.rank == 2 else []
        fabric.in_place = in_place
        if fabric.rank == 1:  # so that rank 0 is waiting for it when the table comes
            while not met:
                fabric.look()
        return [*met, _sum(inside)] if met else [_sum(inside), *met]

    with _members(4) as members:
        members.begin(1, {0: 0, 1: 1, 2: 2})
        timer = threading.Timer(0.2, lambda: members.order(2, {0: 0, 1: 1, 2: 3}, [0, 1, 2, 3]))
        timer.start()
        assert members.run(work) == [[2.0, 3.0], [3.0, 2.0], [], [3.0]]
        timer.join()


def _sum(group: FabricGroup) -> float:
    x = torch.ones(1)
    group.all_reduce(x).wait()
    return x.item()


def test_a_frame_of_a_newer_epoch_waits_for_the_table() -> None:
    def work(fabric: Fabric) -> Any:
        group = Groups(fabric)([0, 1])
        if fabric.rank == 1:
            with pytest.raises(Interrupted):
                group.receive(torch.empty(1), 0).wait()
            fabric.enter(fabric.orders.newest or Table(0, {}, {}))
        x = torch.ones(1)
        group.all_reduce(x).wait()
        return x.item()

    with _members(2) as members:
        members.begin(1, {0: 0, 1: 1})
        members.order(2, {0: 0, 1: 1}, [0])
        table = members.fabrics[0].await_table(_BOUND_S)
        assert table is not None
        members.fabrics[0].enter(table)
        timer = threading.Timer(0.2, lambda: members.order(2, {0: 0, 1: 1}, [1]))
        timer.start()
        assert members.run(work) == [2.0, 2.0]
        timer.join()


def test_a_peer_without_the_secret_is_not_heard() -> None:
    def work(fabric: Fabric) -> Any:
        x = torch.ones(1)
        try:
            FabricGroup(fabric, (0, 1), 2).all_reduce(x).wait()
        except Interrupted:
            return "waited"
        return x.item()

    with _members(2, secrets=["right", "wrong"]) as members:
        members.begin(1, {0: 0, 1: 1})
        timer = threading.Timer(0.2, lambda: members.order(2, {0: 0, 1: 1}, [0, 1]))
        timer.start()
        assert members.run(work) == ["waited", "waited"]
        timer.join()


def test_a_member_that_no_longer_holds_its_rank_is_not_heard() -> None:
    """Member 1 was replaced by member 2 and does not know: it claims the new epoch all the same,
    and is the first to send."""
    claimed = threading.Event()

    def work(fabric: Fabric) -> Any:
        group = FabricGroup(fabric, (0, 1), 2)
        if fabric.member == 0:
            x = torch.zeros(1)
            assert claimed.wait(_BOUND_S)
            group.receive(x, 1).wait()
            return x.item()
        if fabric.member == 2:
            assert claimed.wait(_BOUND_S)
        group.send(torch.tensor([float(fabric.member)]), 0).wait()
        claimed.set()
        return None

    with _members(3) as members:
        members.begin(1, {0: 0, 1: 1})
        members.order(2, {0: 0, 1: 2}, [0, 2])
        for member in (0, 2):
            table = members.fabrics[member].await_table(_BOUND_S)
            assert table is not None
            members.fabrics[member].enter(table)
        forged = Table(2, {0: 0, 1: 1}, {0: tuple(members.fabrics[0].addresses)})
        members.fabrics[1].enter(forged)
        assert members.run(work)[0] == 2.0


def test_a_peer_that_goes_away_is_no_failure() -> None:
    with _members(2) as members:
        members.begin(1, {0: 0, 1: 1})
        group0, group1 = (FabricGroup(fabric, (0, 1), 2) for fabric in members.fabrics)
        group1.send(torch.ones(1), 0).wait()
        group0.receive(torch.empty(1), 1).wait()
        members.fabrics[1].close()
        group0.send(torch.ones(1 << 16), 1).wait()  # to nobody: swallowed
        assert members.fabrics[0].await_table(0.2) is None
