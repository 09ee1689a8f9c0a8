"""Runs a schedule on one pipeline stage: the actions say what, this file says how.

Activations go to the next stage, gradients to the one before. Receives are posted one action ahead,
and a send is waited for only once its receipt is certain or another has followed it, so neither
side blocks the other and no more is kept than is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.plan.schedule import Action
from meshwright.train.comm import Pending
from meshwright.train.loss import count_valid, summed_loss
from meshwright.train.mesh import Mesh
from meshwright.train.nn.decoder import Decoder
from meshwright.train.parallel.data import DataParallel


@dataclass
class StepSums:
    """What the last stage counts over the micro-batches of a step; zero on other stages."""

    loss: Tensor
    tokens: int = 0


@dataclass
class _Transfer:
    """A tensor on its way; it must live until the transfer is done."""

    buffer: Tensor
    pending: Pending


@dataclass
class _InFlight:
    """A micro-batch between its forward and its backward."""

    received: Tensor | None
    output: Tensor
    sent: _Transfer | None


@dataclass
class _State:
    """The sends, receives and micro-batches of one pass through a schedule."""

    sums: StepSums
    posted: dict[Action, _Transfer] = field(default_factory=dict)
    sent: list[_Transfer] = field(default_factory=list)
    in_flight: dict[int, _InFlight] = field(default_factory=dict)


class PipelineStage:
    """This rank's stage of the model, ready to execute schedules."""

    def __init__(
        self,
        model: Decoder,
        data: DataParallel,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.model, self.data, self.mesh = model, data, mesh
        self.dtype, self.device = dtype, device

    def run(self, actions: Sequence[Action], batches: Tensor) -> StepSums:
        """Execute `actions` on `batches` [micro_batches, sequences, seq_len + 1] of token ids.

        Returns the summed loss and the number of valid targets on the last stage. Without any
        backward action nothing is kept for one.
        """
        state = _State(StepSums(torch.zeros((), device=self.device)))
        last_backward = max((i for i, a in enumerate(actions) if a.kind == "backward"), default=-1)
        with torch.set_grad_enabled(last_backward >= 0):
            for i, action in enumerate(actions):
                for upcoming in actions[i : i + 2]:
                    self._post_receive(state, upcoming, batches)
                if action.kind == "forward":
                    self._forward(state, action, batches[action.micro_batch], last_backward >= 0)
                else:
                    self.data.begin_backward(last=i == last_backward)
                    self._backward(state, action)
                    self.data.end_backward()
        for transfer in state.sent:
            transfer.pending.wait()
        return state.sums

    def _forward(self, state: _State, action: Action, tokens: Tensor, keep: bool) -> None:
        inputs, targets = tokens[:, :-1].clamp_min(0), tokens[:, 1:]
        received = self._take_received(state, action)
        if received is not None:
            received.requires_grad_(keep)
        output = self.model(inputs if received is None else received, seq_len=inputs.shape[1])
        sent = None
        if self.mesh.last_stage:
            output = summed_loss(output, targets, self.mesh.tp)
            state.sums.loss += output.detach()
            state.sums.tokens += count_valid(targets)
        else:
            sent = self._send(output.detach(), self.mesh.at.pp + 1)
        if keep:
            state.in_flight[action.micro_batch] = _InFlight(received, output, sent)
        elif sent is not None:
            _keep_until_next(state, sent)

    def _backward(self, state: _State, action: Action) -> None:
        flight = state.in_flight.pop(action.micro_batch)
        grad = self._take_received(state, action)
        if flight.sent is not None:
            flight.sent.pending.wait()  # its gradient has come back, so it has arrived
        torch.autograd.backward(flight.output, grad)
        if flight.received is not None:
            assert flight.received.grad is not None
            _keep_until_next(state, self._send(flight.received.grad, self.mesh.at.pp - 1))

    def _source(self, action: Action) -> int | None:
        """The stage that `action` waits for; None at the ends of the pipeline."""
        stage = self.mesh.at.pp
        if action.kind == "forward":
            return None if self.mesh.first_stage else stage - 1
        return None if self.mesh.last_stage else stage + 1

    def _post_receive(self, state: _State, action: Action, batches: Tensor) -> None:
        source = self._source(action)
        if source is None or action in state.posted:
            return
        _, sequences, length = batches.shape
        seq = (length - 1) // (self.mesh.tp.size if self.mesh.layout.sequence_parallel else 1)
        shape = (sequences, seq, self.model.spec.hidden)
        buffer = torch.empty(shape, dtype=self.dtype, device=self.device)
        work = dist.irecv(buffer, src=self.mesh.pp.ranks[source], group=self.mesh.pp.group)
        state.posted[action] = _Transfer(buffer, Pending(work, self.mesh.clock))

    def _take_received(self, state: _State, action: Action) -> Tensor | None:
        received = state.posted.pop(action, None)
        if received is None:
            return None
        received.pending.wait()
        return received.buffer

    def _send(self, x: Tensor, stage: int) -> _Transfer:
        x = x.contiguous()
        work = dist.isend(x, dst=self.mesh.pp.ranks[stage], group=self.mesh.pp.group)
        return _Transfer(x, Pending(work, self.mesh.clock))


def _keep_until_next(state: _State, sent: _Transfer) -> None:
    """Hold on to a send; wait for the one before it, which the receiver takes first."""
    for earlier in state.sent:
        earlier.pending.wait()
    state.sent = [sent]
