"""Stages of a pipeline send each other the right tensors, in an order that both sides know."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.plan.layout import Schedule
from meshwright.plan.schedule import Action, Orders, build, forwards_only
from meshwright.train.comm import Clock, Pending
from meshwright.train.parallel.mail import Mail
from meshwright.train.parallel.messages import Message, Wiring

SCHEDULES: list[tuple[Schedule, int, int]] = [
    ("gpipe", 3, 1),
    ("1f1b", 4, 1),
    ("interleaved", 2, 2),
    ("interleaved", 3, 2),
    ("zbv", 2, 2),
    ("zbv", 3, 2),
    ("dualpipev", 2, 2),
    ("dualpipev", 3, 2),
]
MICRO_BATCHES = (1, 3, 8)


def all_orders(schedule: Schedule, pp: int, chunks: int) -> list[Orders]:
    return [make(schedule, pp, chunks, m) for make in (build, forwards_only) for m in MICRO_BATCHES]


@pytest.mark.parametrize(("schedule", "pp", "chunks"), SCHEDULES)
def test_what_is_sent_is_what_is_needed(schedule: Schedule, pp: int, chunks: int) -> None:
    wiring = Wiring(schedule, pp, pp * chunks)
    for orders in all_orders(schedule, pp, chunks):
        for to in range(pp):
            needed = Counter(
                m
                for action in orders[to]
                if (m := wiring.needs(action)) is not None and not _is_local(wiring, m)
            )
            sent = Counter(
                m for source in range(pp) for m in wiring.sent(orders[source], source, to)
            )
            assert needed == sent
            assert set(needed.values()) <= {1}


def _sender(wiring: Wiring, message: Message) -> int:
    return wiring.rank_of(message.stage + (1 if message.kind == "gradient" else -1))


def _is_local(wiring: Wiring, message: Message) -> bool:
    return _sender(wiring, message) == wiring.rank_of(message.stage)


def test_messages_go_out_in_the_order_of_the_actions() -> None:
    wiring = Wiring("1f1b", 2, 2)
    orders = build("1f1b", 2, 1, 3)
    down = [(m.kind, m.stage, m.micro_batch) for m in wiring.sent(orders[0], 0, 1)]
    up = [(m.kind, m.stage, m.micro_batch) for m in wiring.sent(orders[1], 1, 0)]
    assert down == [("activation", 1, i) for i in range(3)]
    assert up == [("gradient", 0, i) for i in range(3)]
    assert list(wiring.sent(orders[0], 0, 0)) == []


def test_the_ends_of_a_pipeline_wait_for_nobody() -> None:
    wiring = Wiring("zbv", 2, 4)
    assert wiring.needs(Action("forward", 0, 0)) is None
    assert wiring.needs(Action("backward_input", 3, 0)) is None
    assert wiring.gives(Action("forward", 3, 0)) is None
    assert wiring.gives(Action("backward_input", 0, 0)) is None
    weights = Action("backward_weight", 1, 0)
    assert wiring.needs(weights) is None and wiring.gives(weights) is None
    assert wiring.needs(Action("backward", 1, 5)) == Message("gradient", 1, 5)
    assert wiring.gives(Action("backward_input", 1, 5)) == Message("gradient", 0, 5)


class Post:
    """A network on which the n-th receive from a rank gets the n-th send to it, as gloo and NCCL
    do; sends do not wait."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent: dict[tuple[int, int, str], list[Tensor]] = {}
        self.received: Counter[tuple[int, int, str]] = Counter()
        self.kept: dict[int, list[weakref.ref[Tensor]]] = {}
        self.most_kept: Counter[int] = Counter()

    def keep(self, rank: int, x: Tensor) -> None:
        """Note how many tensors exist that `rank` has sent, `x` among them."""
        every = (*self.kept.get(rank, ()), weakref.ref(x))
        self.kept[rank] = [one for one in every if one() is not None]
        self.most_kept[rank] = max(self.most_kept[rank], len(self.kept[rank]))


class Line:
    """The axis of rank `me` for one direction."""

    def __init__(self, post: Post, me: int, name: str) -> None:
        self.post, self.me, self.name = post, me, name

    def send(self, x: Tensor, index: int) -> Pending:
        with self.post.changed:
            self.post.keep(self.me, x)
            self.post.sent.setdefault((self.me, index, self.name), []).append(x.clone())
            self.post.changed.notify_all()
        return Pending(None, Clock())

    def receive(self, out: Tensor, index: int) -> Pending:
        way = (index, self.me, self.name)
        place = self.post.received[way]
        self.post.received[way] += 1

        def arrive() -> None:
            with self.post.changed:
                come = lambda: len(self.post.sent.get(way, ())) > place  # noqa: E731
                assert self.post.changed.wait_for(come, timeout=5), f"nothing came on {way}"
                out.copy_(self.post.sent[way][place])

        return Pending(None, Clock(), arrive)


def _written(message: Message) -> Tensor:
    kind = float(message.kind == "gradient")
    return torch.tensor([kind, float(message.stage), float(message.micro_batch)])


def _play(mail: Mail, wiring: Wiring, order: Sequence[Action], ahead: int) -> list[Message]:
    """Execute `order` as the pipeline does, with receives posted `ahead` actions early; the
    messages that were not what they should have been."""
    wrong = []
    needs = [wiring.needs(action) for action in order]
    for i, action in enumerate(order):
        for message in needs[i : i + ahead]:
            if message is not None:
                mail.post(message)
        needed = needs[i]
        if needed is not None and not torch.equal(mail.take(needed), _written(needed)):
            wrong.append(needed)
        if (message := wiring.gives(action)) is not None:
            mail.give(message, _written(message))
    mail.finish()
    return wrong


def _run(
    schedule: Schedule,
    pp: int,
    chunks: int,
    orders: Orders,
    told: Orders,
    window: int = 99,
    post: Post | None = None,
) -> list[Any]:
    """Play `orders` on a thread a rank, each of which was `told` what the others do."""
    wiring, results = Wiring(schedule, pp, pp * chunks), [None] * pp
    post = post or Post()

    def rank(me: int) -> None:
        lines = {name: Line(post, me, name) for name in ("down", "up")}
        mesh: Any = SimpleNamespace(at=SimpleNamespace(pp=me), **lines)
        mail = Mail(mesh, wiring, torch.empty(3), window)
        mail.expect(told)
        results[me] = _play(mail, wiring, orders[me], ahead=2)  # type: ignore[call-overload]

    threads = [threading.Thread(target=rank, args=(me,), daemon=True) for me in range(pp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return results


@pytest.mark.parametrize(("schedule", "pp", "chunks"), SCHEDULES)
def test_every_action_gets_its_own_message(schedule: Schedule, pp: int, chunks: int) -> None:
    for orders in all_orders(schedule, pp, chunks):
        assert _run(schedule, pp, chunks, orders, orders) == [[]] * pp


def test_an_answer_says_what_its_sender_had_by_then() -> None:
    wiring, orders = Wiring("1f1b", 2, 2), build("1f1b", 2, 1, 3)
    answers = dict(wiring.replies(orders[1], 1, 0))
    assert answers == {Message("gradient", 0, i): [Message("activation", 1, i)] for i in range(3)}
    assert list(wiring.replies(orders[0], 0, 0)) == []


def _most_kept(schedule: Schedule, pp: int, chunks: int, micro_batches: int) -> list[int]:
    """The most tensors that each rank kept at once of those it had sent."""
    orders, post = build(schedule, pp, chunks, micro_batches), Post()
    assert _run(schedule, pp, chunks, orders, orders, post=post) == [[]] * pp
    return [post.most_kept[rank] for rank in range(pp)]


@pytest.mark.parametrize("pp", [2, 8])
def test_little_more_is_kept_than_waits_for_its_backward(pp: int) -> None:
    kept = _most_kept("1f1b", pp, 1, 16)
    assert all(most <= pp - rank + 1 for rank, most in enumerate(kept)), kept


@pytest.mark.parametrize(("schedule", "pp", "chunks"), SCHEDULES[1:])
def test_more_micro_batches_keep_no_more(schedule: Schedule, pp: int, chunks: int) -> None:
    few, many = (_most_kept(schedule, pp, chunks, n) for n in (12, 24))
    assert few == many


def test_few_sends_under_way_are_enough() -> None:
    orders = build("dualpipev", 2, 2, 8)
    assert _run("dualpipev", 2, 2, orders, orders, window=1) == [[]] * 2


def test_receives_in_another_order_are_seen() -> None:
    """The receiver believes that the sender goes by micro-batches backwards."""
    orders = build("gpipe", 2, 1, 3)
    told = [[*reversed(orders[0][:3]), *orders[0][3:]], orders[1]]
    assert any(_run("gpipe", 2, 1, orders, told))


def test_a_stage_of_the_same_rank_gets_the_tensor_itself() -> None:
    """The turn of a V."""
    wiring = Wiring("zbv", 2, 4)
    mesh: Any = SimpleNamespace(at=SimpleNamespace(pp=1), down=None, up=None)
    mail = Mail(mesh, wiring, torch.empty(3), 1)
    mail.expect(build("zbv", 2, 2, 1))
    message, x = Message("activation", 2, 0), torch.ones(3)
    mail.give(message, x)
    mail.post(message)
    assert mail.take(message) is x
