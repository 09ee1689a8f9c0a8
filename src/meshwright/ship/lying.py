"""Which tensors of a Hugging Face model lie in a store as they are needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.checkpoint.holding import Holding
from meshwright.checkpoint.reader import Reader
from meshwright.checkpoint.spans import Span, raw_spans
from meshwright.ship.hf_tensors import FLOAT32_BYTES, Weight


@dataclass(frozen=True)
class Lies:
    """Answers for one commit. `stored_name` gives what the store calls our parameter."""

    reader: Reader
    stored_name: Callable[[str], str]

    @property
    def holding(self) -> Holding:
        """The store."""
        return self.reader.holding

    def __call__(self, weight: Weight) -> list[Span] | None:
        """Where the bytes of a tensor are, in fp32; None if it must be made of what is read."""
        stretches = weight.stretches()
        if stretches is None:
            return None
        found: list[Span] = []
        begin = 0
        for part, first, stop in stretches:
            name = self.stored_name(part.name)
            if self.reader.dtype(name) != "float32" or self.reader.shape(name) != part.whole:
                return None
            spans = raw_spans(self.reader, name, first, stop)
            if spans is None:
                return None
            found += (replace(span, to=span.to + begin) for span in spans)
            begin += (stop - first) * FLOAT32_BYTES
        return found
