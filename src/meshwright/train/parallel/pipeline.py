"""Runs a schedule on one rank's pipeline stages: the actions say what, this file says how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshwright.base.pulse import Phase
from meshwright.plan.schedule import Action
from meshwright.train.documents import document_ids, positions_in_documents
from meshwright.train.loss import IGNORE, HeadLoss, count_valid
from meshwright.train.mesh import Mesh
from meshwright.train.nn.decoder import Decoder
from meshwright.train.nn.dropout import Draws
from meshwright.train.nn.linear import WeightGradients
from meshwright.train.nn.passing import Pass
from meshwright.train.parallel.context import local_order
from meshwright.train.parallel.data import DataParallel
from meshwright.train.parallel.mail import Mail, open_channels
from meshwright.train.parallel.messages import Wiring
from meshwright.train.saved import ActivationStore


@dataclass
class StepSums:
    """Sums over the micro-batches of a step: loss and valid targets on the last stage, router
    losses on every stage with experts."""

    loss: Tensor
    penalty: Tensor
    tokens: Tensor | int = 0


@dataclass(frozen=True)
class RunKind:
    """What a pass through a schedule is for: `gradients`, those of `loss_scale` times the loss, for
    which activations are kept; or to count the `routing` alone; or neither, an evaluation. `draws`
    is what dropout goes by."""

    gradients: bool
    loss_scale: float = 1.0
    routing: bool = True
    draws: Draws | None = None


@dataclass
class _InFlight:
    """A micro-batch between its forward and its backward."""

    received: Tensor | None
    output: Tensor


@dataclass
class _State:
    """One pass through a schedule."""

    kind: RunKind
    mail: Mail
    sums: StepSums
    last: dict[int, int]  # place in the order of each stage's last weight gradients
    order: Tensor  # place in the whole sequence of each of this rank's tokens
    in_flight: dict[tuple[int, int], _InFlight] = field(default_factory=dict)


@dataclass(frozen=True)
class Feed:
    """How tokens become passes: `end_of_text` ends a document where attention stays inside."""

    dtype: torch.dtype
    device: torch.device
    end_of_text: int | None


class Pipeline:
    """This rank's stages of the model, ready to execute schedules."""

    def __init__(
        self,
        stages: dict[int, Decoder],
        data: DataParallel,
        mesh: Mesh,
        feed: Feed,
        later: WeightGradients,
        head_loss: HeadLoss,
        activations: ActivationStore,
    ) -> None:
        self._stages, self._data, self._mesh, self._feed = stages, data, mesh, feed
        self._later, self._head_loss, self._activations = later, head_loss, activations
        layout = mesh.layout
        self._wiring = Wiring(layout.schedule, layout.pp, layout.virtual_stages)
        if feed.device.type == "cuda":
            open_channels(mesh, self._wiring, feed.device)

    def run(self, orders: Sequence[Sequence[Action]], batches: Tensor, kind: RunKind) -> StepSums:
        """Execute this rank's of `orders` on `batches` [micro_batches, sequences, seq_len + 1]."""
        mine = orders[self._mesh.at.pp]
        # All at once: a copy for each micro-batch would wait each time for what the chip has to do.
        batches = batches.to(self._feed.device, non_blocking=True)
        state = self._begin(orders, mine, batches, kind)
        needs = [self._wiring.needs(action) for action in mine]
        with torch.set_grad_enabled(kind.gradients):
            for i, action in enumerate(mine):
                for message in needs[i : i + 2]:
                    if message is not None:
                        state.mail.post(message)
                self._execute(state, i, action, batches)
        state.mail.finish()
        return state.sums

    def _begin(
        self,
        orders: Sequence[Sequence[Action]],
        mine: Sequence[Action],
        batches: Tensor,
        kind: RunKind,
    ) -> _State:
        layout, device = self._mesh.layout, self._feed.device
        _, sequences, length = batches.shape
        split = layout.cp * (layout.tp if layout.sequence_parallel else 1)
        hidden = next(iter(self._stages.values())).spec.hidden
        shape = (sequences, (length - 1) // split, hidden)
        like = torch.empty(shape, dtype=self._feed.dtype, device=device)
        mail = Mail(self._mesh, self._wiring, like, window=2 * layout.virtual_stages + 2)
        mail.expect(orders)
        finals = ("backward", "backward_weight")
        last = {action.stage: i for i, action in enumerate(mine) if action.kind in finals}
        zero = torch.zeros((), device=device)
        for model in self._stages.values():
            model.reach(length - 1, device)
        order = local_order(length - 1, layout.cp, self._mesh.cp.index, layout.cp_method)
        order = order.to(device, non_blocking=True)
        return _State(kind, mail, StepSums(zero.clone(), zero.clone()), last, order)

    def abandon(self) -> None:
        """Forget a pass that was interrupted."""
        self._later.forget()

    def _execute(self, state: _State, i: int, action: Action, batches: Tensor) -> None:
        phase = Phase.FORWARD if action.kind == "forward" else Phase.BACKWARD
        self._mesh.clock.enter(phase)
        if action.kind == "forward":
            self._forward(state, action, batches[action.micro_batch])
            return
        last = state.last[action.stage] == i
        if action.kind == "backward":
            self._data.begin_pass(action.stage, last)
            self._backward(state, action)
            self._later.flush(None)
            self._data.end_pass(action.stage)
        elif action.kind == "backward_input":
            self._later.key = (action.stage, action.micro_batch)
            self._backward(state, action)
            self._later.key = None
            self._data.release_layers(action.stage)
        else:
            self._data.begin_pass(action.stage, last)
            self._later.flush((action.stage, action.micro_batch))
            self._data.end_pass(action.stage)

    def _forward(self, state: _State, action: Action, tokens: Tensor) -> None:
        model, needed = self._stages[action.stage], self._wiring.needs(action)
        received = None if needed is None else state.mail.take(needed)
        if received is not None and state.kind.gradients:
            received = received.detach().requires_grad_()
        inputs, targets, about = self._passing(model, tokens, state)
        if state.kind.draws is not None:
            about.draws = state.kind.draws.of(action.micro_batch, self._feed.device)
        with self._activations.keeping():
            output = model(inputs if received is None else received, about)
            if model.last:
                output = self._head_loss(output, model.head_weight, targets, state.kind.loss_scale)
        if about.penalty is not None:
            state.sums.penalty += about.penalty
        if model.last:
            state.sums.loss += output.detach()
            state.sums.tokens += count_valid(targets)
        elif (message := self._wiring.gives(action)) is not None:
            state.mail.give(message, output.detach())
        if state.kind.gradients:
            key = (action.stage, action.micro_batch)
            state.in_flight[key] = _InFlight(received, output)

    def _passing(
        self, model: Decoder, tokens: Tensor, state: _State
    ) -> tuple[Tensor, Tensor, Pass]:
        """This rank's inputs and targets [sequences, seq / cp] among `tokens`, and their pass."""
        kind, order = state.kind, state.order
        inputs, targets = tokens[:, :-1].clamp_min(0), tokens[:, 1:]
        documents = places = None
        if self._feed.end_of_text is not None:
            # What follows the end of a document is nothing that the document could foretell.
            targets = targets.masked_fill(inputs == self._feed.end_of_text, IGNORE)
            documents = document_ids(inputs, self._feed.end_of_text)
            places = positions_in_documents(documents)[:, order]
        about = Pass(
            rope=model.rope_at(order if places is None else places),
            order=order,
            documents=documents,
            places=places,
            training=kind.gradients or kind.routing,
            loss_scale=kind.loss_scale,
        )
        return inputs[:, order], targets[:, order], about

    def _backward(self, state: _State, action: Action) -> None:
        flight = state.in_flight.pop((action.stage, action.micro_batch))
        needed = self._wiring.needs(action)
        if needed is None:
            grad = torch.full_like(flight.output, state.kind.loss_scale)
        else:
            grad = state.mail.take(needed)
        torch.autograd.backward(flight.output, grad)
        if (message := self._wiring.gives(action)) is not None:
            assert flight.received is not None and flight.received.grad is not None
            state.mail.give(message, flight.received.grad)
