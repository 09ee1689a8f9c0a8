"""What is compiled into fewer kernels, on GPUs alone; a CPU rank never pays for the compiler.

Compiled is what is a function of tensors and nothing else. A layer, or a half of one, is compiled
whole where it consists of that: products, norms, rotation, attention to a whole sequence, gate and
residual become a few kernels around the products. The compiler would have to stop at, or lose, what
does more, so a half with any of it is left as it is but for the pieces between:

- collectives of tensor, context and expert parallelism, which block, are timed and run beside work;
- weight gradients that are put off, which a queue keeps for later;
- FP8, which asks the chip what it can multiply, matrix by matrix;
- routed experts, whose sizes are read from the chip in the middle of the pass;
- dropout, which hashes the number of the step into a key.

The pieces are rotation, gate and, in FP8, quantisation, whose many small kernels would eat what its
products gain. The loss is compiled too: fp32 copies of the logits then exist nowhere. Recomputation
and the hooks that gather weights and reduce gradients stand around layers, outside of all this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from meshwright.plan.layout import Layout
from meshwright.train.loss import Entropy, cross_entropy
from meshwright.train.nn.attention import Attention, LatentAttention, attend_whole
from meshwright.train.nn.block import Block
from meshwright.train.nn.boundary import stay
from meshwright.train.nn.decoder import Decoder
from meshwright.train.nn.feed_forward import GeluMLP, SwiGLU, gate_by_silu
from meshwright.train.nn.grouped import Grouped
from meshwright.train.nn.linear import Linear
from meshwright.train.nn.rope import rotate
from meshwright.train.precision.fp8 import Fp8
from meshwright.train.precision.quantise import quantise

Compiler = Callable[..., Any]
BlockMethod = Literal["both", "attention", "feed_forward"]

_VERSIONS = 64  # of one function, before the compiler gives it up


def apply_compile(model: Decoder, layout: Layout, device: torch.device) -> None:
    """Compile what can be of `model`, whose parallelism and arithmetic must have been applied, if
    `layout` asks for it and `device` is a GPU."""
    if wanted(layout, device):
        compile_parts(model, _torch_compiler())


def loss_for(layout: Layout, device: torch.device) -> Entropy:
    """The cross-entropy that `HeadLoss` uses, compiled under the same conditions."""
    if not wanted(layout, device):
        return cross_entropy
    compiled: Entropy = _torch_compiler()(cross_entropy)
    return compiled


def wanted(layout: Layout, device: torch.device) -> bool:
    """Whether anything is compiled."""
    return layout.compile and device.type == "cuda"


def _torch_compiler() -> Compiler:
    """torch's. It makes a version of a function for each kind of input: of layers and halves a
    model needs few, but its matrices have many combinations of size and stride."""
    import torch._dynamo  # costs seconds

    torch._dynamo.config.recompile_limit = max(_VERSIONS, torch._dynamo.config.recompile_limit)
    return torch.compile


def compile_parts(model: Decoder, compiler: Compiler) -> None:
    """Give whole layers and halves of `model`, and the pieces of the others, to `compiler`."""
    if model.spec.dropout == 0:
        for block in model.blocks.values():
            for part in whole_parts(block):
                setattr(block, part, compiler(getattr(block, part)))
    pieces = {"rotate": compiler(rotate), "gated": compiler(gate_by_silu)}
    for module in model.modules():
        if isinstance(module, Attention | LatentAttention):
            module.rotate = pieces["rotate"]
        elif isinstance(module, SwiGLU):
            module.gated = pieces["gated"]
    _compile_quantisation(model, compiler)


def whole_parts(block: Block) -> Iterator[BlockMethod]:
    """What runs pure parts of `block`, the largest one alone where a pass can run it."""
    attention, feed_forward = _pure_attention(block.attn), _pure_feed_forward(block.mlp)
    if attention and feed_forward and len(block.recompute) != 1:
        yield "both"
        return
    if attention:
        yield "attention"
    if feed_forward:
        yield "feed_forward"


def _pure_attention(attention: Attention | LatentAttention) -> bool:
    return attention.attend is attend_whole and _alone(attention)


def _pure_feed_forward(feed_forward: nn.Module) -> bool:
    return isinstance(feed_forward, SwiGLU | GeluMLP) and _alone(feed_forward)


def _alone(module: Attention | LatentAttention | SwiGLU | GeluMLP) -> bool:
    """Whether its products are plain ones whose gradients come at once, and no collective bounds
    them."""
    linears = [m for m in module.modules() if isinstance(m, Linear)]
    plain = all(linear.later is None and linear.arithmetic is None for linear in linears)
    return plain and module.enter is stay and module.leave is stay


def _compile_quantisation(model: Decoder, compiler: Compiler) -> None:
    """One compiled function for all: it fits itself to sizes that it has not seen."""
    compiled = None
    for module in model.modules():
        if isinstance(module, Linear | Grouped) and isinstance(module.arithmetic, Fp8):
            compiled = compiled or compiler(quantise)
            module.arithmetic = replace(module.arithmetic, quantise=compiled)
