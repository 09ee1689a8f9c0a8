"""torchtitan's side of `gpu.py`: the configuration it imports, and what its log says.

torchtitan 0.3 takes its configuration from a function of a module, here `configured`, which reads
the case from the environment. The model is torchtitan's own Llama 3 of that size, cut to as many
layers as ours. Its tokens are random like ours: with a data loader and a tokenizer of its own it
would need files that it does not bring along. Compiled, without recomputation, the loss in chunks,
CUDA graphs and everything else as it comes.
"""

# mypy: disable-error-code="import-not-found,misc"
# torchtitan is not installed where this is checked, so its classes have no types.

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

CASE = "MESHWRIGHT_GPU_CASE"  # in the environment: a `gpu_case.Case` as JSON

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_STEP = re.compile(
    r"step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>\S+)\s+grad_norm:\s*\S+\s+"
    r"memory:\s*(?P<gib>[\d.]+)GiB\S*\s+tps:\s*(?P<tps>[\d,]+)"
)


@dataclass(frozen=True)
class Logged:
    """One step of torchtitan's log; tokens per second are those of the step alone."""

    step: int
    loss: float
    memory_gib: float
    tokens_per_s: float


def logged_steps(log: str) -> list[Logged]:
    """The steps that torchtitan's log reports, in order; other lines are of no interest."""
    return [
        Logged(
            step=int(found["step"]),
            loss=float(found["loss"]),
            memory_gib=float(found["gib"]),
            tokens_per_s=float(found["tps"].replace(",", "")),
        )
        for found in _STEP.finditer(_COLOUR.sub("", log))
    ]


def configured() -> Any:
    """The `Trainer.Config` of the case in the environment."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import CompileConfig, TrainingConfig
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.trainer import Trainer

    case = json.loads(os.environ[CASE])
    model = _model(case["flavour"], case["layers"], fp8=case["precision"] == "fp8")
    loader, tokenizer = _random_tokens(case["vocab"])
    return Trainer.Config(
        model_spec=model,
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model))
        ),
        optimizer=default_adamw(lr=case["lr"]),
        training=TrainingConfig(
            local_batch_size=case["batch"], seq_len=case["seq_len"], steps=case["steps"]
        ),
        dataloader=loader,
        tokenizer=tokenizer,
        metrics=MetricsProcessor.Config(log_freq=1),
        compile=CompileConfig(enable=True),
        activation_checkpoint=None,
    )


def _model(flavour: str, layers: int, fp8: bool) -> Any:
    from torchtitan.components.quantization import Float8LinearConverter
    from torchtitan.models.llama3 import model_registry

    converters = None
    if fp8:  # row-wise; the head stays in bf16 as ours does
        skipped = Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=True)
        converters = [skipped]
    spec = model_registry(flavour, converters=converters)
    spec.model.layers = spec.model.layers[:layers]
    return spec


def _random_tokens(vocab: int) -> tuple[Any, Any]:
    """Configurations of a data loader that draws tokens, and of a tokenizer that does nothing."""
    import torch
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer

    class RandomTokens(BaseDataLoader):
        """Sequences of one document each."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, *, seq_len: int, local_batch_size: int, **_: Any) -> None:
            self.shape = (local_batch_size, seq_len + 1)

        def __iter__(self) -> Iterator[Any]:
            draw = torch.Generator().manual_seed(0)
            batch, length = self.shape
            places = torch.arange(length - 1).expand(batch, -1).contiguous()
            while True:
                tokens = torch.randint(vocab, self.shape, generator=draw)
                yield {"input": tokens[:, :-1], "positions": places}, tokens[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """There is none."""

    class NoTokenizer(BaseTokenizer):
        """Nobody asks it."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, **_: Any) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return vocab

    return RandomTokens.Config(), NoTokenizer.Config()
