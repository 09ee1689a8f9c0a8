"""Definitions for clouds: as they were when last looked at, and as the clouds' own models want."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import botocore.session
import botocore.validate
import pytest
import yaml

from meshwright.base.errors import ConfigError
from meshwright.control.emit import EMITTERS
from meshwright.control.spec import ClusterSpec

GOLDEN = Path(__file__).parents[2] / "golden" / "emit"

SPECS: dict[str, dict[str, Any]] = {
    "default": {"name": "sixty-four"},
    "p5": {
        "name": "big",
        "instance": "p5",
        "engine": "slurm",
        "nodes": 16,
        "spares": 8,
        "partition": "train",
        "storage": {"nodes": 4, "capacity_tb": 20, "bandwidth_gb_s": 3},
        "network": {"subnet": "subnet-0123456789abcdef0"},
        "encryption": {"key": "kms:alias/meshwright"},
        "labels": {"team": "a & b"},
    },
    "eks": {"name": "Kube", "instance": "p5en", "engine": "kubernetes", "namespace": "research"},
}


@pytest.mark.parametrize("target", EMITTERS)
@pytest.mark.parametrize("name", SPECS)
def test_what_is_written_is_what_it_was(name: str, target: str) -> None:
    """`make golden` writes it anew."""
    for file, text in EMITTERS[target](ClusterSpec.model_validate(SPECS[name])).items():
        path = GOLDEN / name / target / file
        if os.environ.get("REGENERATE_GOLDEN") == "1":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.read_text() == text, path


@pytest.mark.parametrize("name", SPECS)
def test_hyperpod_takes_it(name: str) -> None:
    """By the model that the cloud's own client goes by: names, types, limits and choices."""
    files = EMITTERS["hyperpod"](ClusterSpec.model_validate(SPECS[name]))
    request = json.loads(files["create-cluster.json"])
    assert _faults(request) == []
    for wrong in (
        {**request, "Nodes": 4},
        {**request, "NodeRecovery": "Sometimes"},
        {key: value for key, value in request.items() if key != "ClusterName"},
    ):
        assert _faults(wrong), "the check finds nothing"


def test_an_instance_that_no_cloud_has() -> None:
    for target in ("hyperpod", "parallelcluster"):
        with pytest.raises(ConfigError, match=r"instance = 'mi300x': no AWS instance type"):
            EMITTERS[target](ClusterSpec(name="x", instance="mi300x"))
    with pytest.raises(ConfigError, match=r"no such instance.*did you mean \"trn2\""):
        EMITTERS["jobset"](ClusterSpec(name="x", instance="trn22"))


def test_all_pods_of_a_jobset_have_a_node_of_their_own() -> None:
    files = EMITTERS["jobset"](ClusterSpec(name="x", nodes=5, spares=17, chips_per_node=16))
    [made] = yaml.safe_load_all(files["jobset.yaml"])
    groups = {group["name"]: group["template"]["spec"] for group in made["spec"]["replicatedJobs"]}
    assert {name: spec["completions"] for name, spec in groups.items()} == {
        "lead": 1,
        "nodes-0": 3,
        "spares-3": 2,
    }
    named: list[str] = []
    for spec in list(groups.values())[1:]:
        affinity = spec["template"]["spec"]["affinity"]["nodeAffinity"]
        [term] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        names = term["matchExpressions"][0]["values"]
        assert len(names) == spec["completions"]
        named += names
    assert named == [f"x-{number}" for number in range(5)]


def _faults(request: dict[str, Any]) -> list[str]:
    model = botocore.session.get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateCluster").input_shape
    report = botocore.validate.ParamValidator().validate(request, shape)
    found = [report.generate_report()] if report.has_errors() else []
    return found + _wrong_choices(request, shape, "")


def _wrong_choices(value: Any, shape: Any, path: str) -> list[str]:
    """What botocore leaves to the service: choices of words."""
    if shape.type_name == "structure":
        members = shape.members
        parts = [(value[key], members[key], f"{path}.{key}") for key in value if key in members]
    elif shape.type_name == "list":
        parts = [(one, shape.member, f"{path}[{n}]") for n, one in enumerate(value)]
    else:
        enum = getattr(shape, "enum", [])
        return [f"{path} = {value}"] if enum and value not in enum else []
    return [fault for part in parts for fault in _wrong_choices(*part)]
