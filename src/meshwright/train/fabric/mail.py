"""Frames that are awaited, and those that nobody has asked for yet."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.base.errors import RunError
from meshwright.train.fabric.frames import Key
from meshwright.train.fabric.operation import Operation


class _Early:
    """A frame that nobody has asked for yet."""

    __slots__ = ("complete", "data", "wanted")

    def __init__(self, n_bytes: int) -> None:
        self.data = memoryview(bytearray(n_bytes))
        self.complete = False
        self.wanted: tuple[memoryview, Operation] | None = None


class Mail:
    """What has come to one member, and what it waits for."""

    def __init__(self) -> None:
        self._posted: dict[Key, tuple[memoryview, Operation]] = {}
        self._early: dict[Key, _Early] = {}

    def receive(self, key: Key, place: memoryview, op: Operation) -> None:
        """Have the frame `key` in `place`; `op` waits for it. Raises RunError if it has another
        size."""
        op.missing += 1
        early = self._early.get(key)
        if early is None:
            self._posted[key] = (place, op)
        elif early.complete:
            del self._early[key]
            _fill(place, early.data, key)
            op.one_done()
        else:
            early.wanted = (place, op)

    def place_for(self, key: Key, n_bytes: int) -> memoryview:
        """Where a frame that has begun to arrive goes. Raises RunError as `receive`."""
        if (post := self._posted.get(key)) is not None:
            if len(post[0]) != n_bytes:
                raise RunError(f"{key}: {n_bytes} bytes came where {len(post[0])} were awaited")
            return post[0]
        early = self._early.get(key)  # one that has begun to arrive by another path
        if early is None or early.complete or len(early.data) != n_bytes:
            early = self._early[key] = _Early(n_bytes)
        return early.data

    def arrived(self, key: Key, place: memoryview) -> None:
        """It is complete."""
        post = self._posted.get(key)
        if post is not None and post[0] is place:
            del self._posted[key]
            post[1].one_done()
            return
        early = self._early.get(key)
        if early is None or early.data is not place:  # void
            return
        early.complete = True
        if early.wanted is not None:
            del self._early[key]
            place, op = early.wanted
            _fill(place, early.data, key)
            op.one_done()

    def abandon(self, is_old: Callable[[Key], bool]) -> None:
        """What is old is void."""
        self._posted = {key: post for key, post in self._posted.items() if not is_old(key)}
        self._early = {key: one for key, one in self._early.items() if not is_old(key)}

    def source_for(self, op: Operation) -> int | None:
        """The rank that a frame is awaited from, if `op` waits for any."""
        return next((key.source for key, (_, of) in self._posted.items() if of is op), None)


def _fill(place: memoryview, data: memoryview, key: Key) -> None:
    if len(place) != len(data):
        raise RunError(f"{key}: {len(data)} bytes came where {len(place)} were awaited")
    place[:] = data
