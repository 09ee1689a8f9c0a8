"""Mixture of experts: a router, experts that each see the tokens sent to them, a shared expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from meshwright.models.spec import ModelSpec
from meshwright.plan.experts import Placement, initial
from meshwright.train.nn.boundary import Boundary, stay
from meshwright.train.nn.feed_forward import SwiGLU
from meshwright.train.nn.grouped import Counts, Grouped, combine, gated, spread
from meshwright.train.nn.passing import Pass
from meshwright.train.nn.router import Route, Router, tally


class Experts(Grouped):
    """SwiGLU experts: stacked weights gate, up [places, ffn, hidden], down [places, hidden, ffn].

    Shapes are read from the weights, so the module serves any slice of the places or the widths.
    """

    def __init__(self, n_experts: int, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(n_experts, ffn_hidden, hidden))
        self.up = nn.Parameter(torch.empty(n_experts, ffn_hidden, hidden))
        self.down = nn.Parameter(torch.empty(n_experts, hidden, ffn_hidden))

    def forward(self, rows: Tensor, counts: Counts) -> Tensor:
        """Rows [n, hidden] sorted by place, counts[p] of them for place p, to [n, hidden]."""
        gate = self.product("gate", rows, counts)
        up = self.product("up", rows, counts)
        return self.product("down", gated(gate, up, counts), counts)


Dispatch = Callable[[Tensor, Tensor, Experts], Tensor]


def run_here(rows: Tensor, counts: Tensor, experts: Experts) -> Tensor:
    """The dispatch of a rank that has all experts. Rows [n, hidden] sorted by place, counts int64
    [places]; the experts' results in the order of `rows`."""
    out: Tensor = experts(rows, counts.tolist())
    return out


class MoE(nn.Module):
    """routed(x) * routed_scaling + shared(x). Input and output [batch, seq, hidden].

    `dispatch` brings rows to their experts and back. `enter` and `leave` mark the routed part where
    every tp rank holds a slice of each expert's width; the shared expert has its own.
    `hosts` int64 [experts, most places of one] are the places of each expert, `host_counts` how
    many; a token takes one of them by its index.
    """

    hosts: Tensor
    host_counts: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.router = Router(spec)
        self.experts = Experts(spec.n_experts, spec.hidden, spec.expert_ffn_hidden)
        shared = spec.n_shared_experts * spec.expert_ffn_hidden
        self.shared = SwiGLU(spec.hidden, shared) if shared else None
        self.enter: Boundary = stay
        self.leave: Boundary = stay
        self.dispatch: Dispatch = run_here
        self.placement = initial(spec.n_experts, 0, 1)
        self.host(self.placement)

    def host(self, placement: Placement) -> None:
        """From now on tokens go to the places of `placement`; the weights must be there."""
        self.placement = placement
        most = max(map(len, placement.places))
        rows = [[places[i % len(places)] for i in range(most)] for places in placement.places]
        device = self.router.counts.device
        hosts = torch.tensor(rows, device=device)
        counts = torch.tensor([len(places) for places in placement.places], device=device)
        self.register_buffer("hosts", hosts, persistent=False)
        self.register_buffer("host_counts", counts, persistent=False)

    def move_state(self, device: torch.device) -> None:
        """Bring all state that is no parameter to `device`."""
        for module in (self, self.router):
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffer.to(device))

    def forward(self, x: Tensor, about: Pass) -> Tensor:
        routed = self.leave(self._routed(self.enter(x), about))
        return routed if self.shared is None else routed + self.shared(x, about)

    def _routed(self, x: Tensor, about: Pass) -> Tensor:
        route = self.router(x, about)
        weights = route.weights.flatten(0, 1)
        order, counts = self._assign(route)
        rows = spread(x.flatten(0, 1), order, weights.shape[1])
        done = self.dispatch(rows, counts, self.experts)
        return combine(done, order, weights).view_as(x)

    def _assign(self, route: Route) -> tuple[Tensor, Tensor]:
        """Assignments (token * top_k + choice) sorted by place, dropped ones left out, and how many
        each place has. Within a place tokens keep their order."""
        experts = route.experts.flatten(0, 1)
        token = torch.arange(experts.shape[0], device=experts.device)[:, None]
        place = self.hosts[experts, token % self.host_counts[experts]].flatten()
        n_places = len(self.placement.experts)
        if route.kept is not None:
            place = place.masked_fill(~route.kept.flatten(), n_places)
        order = torch.argsort(place, stable=True)
        counts = tally(place, n_places + 1)[:n_places]
        if route.kept is not None:
            order = order[: int(counts.sum())]
        return order, counts
