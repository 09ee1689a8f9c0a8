"""What users ask of a run that survives, while it goes on."""

from __future__ import annotations

from typing import Any

from meshwright.base.errors import ConfigError
from meshwright.conduct.acting import Acting
from meshwright.conduct.members import RelayoutAsked, ResizeAsked, Stage
from meshwright.conduct.shelf import other_layout


class Answering(Acting):
    """A conductor that takes up what users ask for, or says in one line why not."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request."""
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
            if lacking := self._too_few(self.state.rules.shapes.world(replicas)):
                return {"error": f"dp_replicate = {replicas}: {lacking}"}
            self.apply(ResizeAsked(replicas))
            return {"accepted": wanted, "layout": self.muster.label(replicas)}
        now = self.state.rules.shapes.replicas(len(self.state.table))
        try:
            relayout, job = other_layout(self.muster, now, wanted)
        except ConfigError as error:
            return {"error": str(error)}
        if lacking := self._too_few(relayout.world):
            return {"error": f"{relayout.after}: {lacking}"}
        self.shelf.job = job
        self.apply(RelayoutAsked(relayout))
        return {"accepted": wanted, "layout": relayout.after}

    def _too_few(self, ranks: int) -> str | None:
        """Why there will never be so many, if so."""
        if ranks <= (chips := self.state.chips):
            return None
        return f"takes {ranks} chips and the run has {chips}, spares included; ask for less"
