"""One emitted configuration through the framework's own parser; run by emit_check.py in the
environment that it made. Prints what the framework understood as one line of JSON, last.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# What needs a GPU to install; only names are taken from them while a module is imported.
GPU_ONLY = (
    "transformer_engine",
    "transformer_engine_torch",
    "megatron.energon",
    "bitsandbytes",
    "qwen_vl_utils",
    "diffusers",
    "timm",
    "open_clip",
    "flashinfer",
    "nvidia_resiliency_ext",
    "rpyc",
    "ray",
)


class _Name(type):
    """A class whose attributes are such classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (importlib.import_module("torch").nn.Module,), {})


class _Module(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "2.10.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(name, (importlib.import_module("torch").nn.Module,), {})


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if any(name == known or name.startswith(f"{known}.") for known in GPU_ONLY):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        del module


def _stand_in() -> None:
    sys.meta_path.insert(0, _StandIns())


def torchtitan(folder: Path) -> Mapping[str, Any]:
    """0.3: the config function, through its ConfigManager."""
    sys.path.insert(0, str(folder))
    config = importlib.import_module("torchtitan.config").ConfigManager()
    parsed = config.parse_args(["--module", "meshwright_titan", "--config", "train"])
    return _titan(parsed)


def torchtitan_toml(folder: Path) -> Mapping[str, Any]:
    """0.2.2: the TOML, through its ConfigManager."""
    manager = importlib.import_module("torchtitan.config").ConfigManager()
    return _titan(manager.parse_args(["--job.config_file", str(folder / "train.toml")]))


def _titan(parsed: Any) -> Mapping[str, Any]:
    axes = parsed.parallelism
    return {
        "tp": axes.tensor_parallel_degree,
        "pp": axes.pipeline_parallel_degree,
        "cp": axes.context_parallel_degree,
        "ep": axes.expert_parallel_degree,
        "dp_shard": axes.data_parallel_shard_degree,
        "global_batch": parsed.training.global_batch_size,
    }


def megatron(folder: Path) -> Mapping[str, Any]:
    """The arguments that run.sh hands to torchrun, through argparse and validate_args."""
    words = (folder / "words").read_text(encoding="utf-8").split("\0")
    start = words.index("pretrain_gpt.py")
    launch = dict(zip(words[:start:2], words[1:start:2], strict=False))
    os.environ["WORLD_SIZE"] = str(int(launch["--nproc-per-node"]) * int(launch["--nnodes"]))
    connections = (folder / "connections").read_text(encoding="utf-8")
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": connections} if connections else {}
    sys.argv = [word for word in words[start:] if word]
    arguments: Any = importlib.import_module("megatron.training.arguments")
    arguments.get_device_arch_version = lambda: 9  # this and the next ask the GPU
    importlib.import_module("torch").cuda.get_device_capability = lambda: (9, 0)
    args = arguments.validate_args(arguments.parse_args())
    return {
        "tp": args.tensor_model_parallel_size,
        "pp": args.pipeline_model_parallel_size,
        "cp": args.context_parallel_size,
        "ep": args.expert_model_parallel_size,
        "dp": args.data_parallel_size,
        "layers": args.num_layers,
        "global_batch": args.global_batch_size,
    }


def megatron_bridge(folder: Path) -> Mapping[str, Any]:
    """The script's `configured`: config.json through AutoBridge, overrides through OmegaConf."""
    importlib.import_module("megatron.training.arguments")  # before the stand-ins: without TE
    _stand_in()
    sys.path.insert(0, str(folder))
    config = importlib.import_module("train").configured()
    overrides = importlib.import_module("yaml").safe_load((folder / "overrides.yaml").read_text())
    for section, keys in overrides.items():  # it takes unknown ones in silence
        unknown = [key for key in keys or () if not hasattr(getattr(config, section), key)]
        if isinstance(keys, dict) and unknown:
            raise AttributeError(f"{section} has no {unknown}")
    model = config.model
    return {
        "tp": model.tensor_model_parallel_size,
        "pp": model.pipeline_model_parallel_size,
        "cp": model.context_parallel_size,
        "ep": model.expert_model_parallel_size,
        "layers": model.num_layers,
        "global_batch": config.train.global_batch_size,
    }


def deepspeed(folder: Path) -> Mapping[str, Any]:
    """The JSON, through DeepSpeedConfig."""
    path = folder / "ds_config.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    dp = raw["train_batch_size"] // (
        raw["train_micro_batch_size_per_gpu"] * raw["gradient_accumulation_steps"]
    )
    mpu = types.SimpleNamespace(get_data_parallel_world_size=lambda: dp)
    module = importlib.import_module("deepspeed.runtime.config")
    module.dist.get_rank = lambda: 0  # asked for before the data-parallel size, which mpu gives
    made = module.DeepSpeedConfig(str(path), mpu=mpu)
    return {
        "dp": dp,
        "tp": max(1, made.tensor_parallel_config.autotp_size),
        "zero": made.zero_optimization_stage,
        "global_batch": made.train_batch_size,
    }


def colossalai(folder: Path) -> Mapping[str, Any]:
    """The script's `plugin`, with a process group of as many pretended ranks as the plan has."""
    _stand_in()
    sys.path.insert(0, str(folder))
    dist = importlib.import_module("torch.distributed")
    store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    world = int((folder / "world").read_text(encoding="utf-8"))
    dist.init_process_group("fake", store=store, rank=0, world_size=world)
    made = importlib.import_module("train").plugin()
    return {
        "tp": made.tp_size,
        "pp": made.pp_size,
        "zero": made.zero_stage,
        "mesh": list(made.pg_mesh.shape),
    }


PROBES: Mapping[str, Callable[[Path], Mapping[str, Any]]] = {
    "torchtitan": torchtitan,
    "torchtitan-toml": torchtitan_toml,
    "megatron": megatron,
    "megatron-bridge": megatron_bridge,
    "deepspeed": deepspeed,
    "colossalai": colossalai,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("framework", choices=PROBES)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    # Newer Megatron is written for Python 3.12; this one name is all that 3.11 lacks.
    if not hasattr(typing, "override"):
        typing.override = importlib.import_module("typing_extensions").override  # type: ignore[attr-defined,unused-ignore]
    understood = PROBES[given.framework](given.folder.absolute())
    sys.stdout.write(f"{json.dumps(understood)}\n")


if __name__ == "__main__":
    main()
