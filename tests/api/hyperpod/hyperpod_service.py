"""A real service and a real SageMaker client of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import boto3
import httpx
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

LIMIT_S = 120.0  # of anything that is waited for: a guard against hanging, not a measure
ROLE = "arn:aws:iam::000000000000:role/any"
Found = TypeVar("Found")


@dataclass(frozen=True)
class Service:
    """One that was started, and two clients of it: Amazon's, and one of the REST API."""

    url: str
    process: subprocess.Popen[str]
    client: Any
    http: httpx.Client


def _boto(url: str) -> Any:
    """With credentials that nobody looks at."""
    return boto3.client(
        "sagemaker",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="any",
        aws_secret_access_key="any",
        config=Config(retries={"max_attempts": 0}, read_timeout=LIMIT_S),
    )


@contextmanager
def running(home: Path) -> Iterator[Service]:
    """`meshwright up` on a free port; killed, as it may be at any moment, in the end."""
    at = ["--home", str(home)]
    process = subprocess.Popen(
        [sys.executable, "-m", "meshwright.cli.main", "up", *at, "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        text = ""
        while line := process.stdout.readline():
            text += line
            if line.rstrip() == "}":
                break
        url = json.loads(text)["url"]
        until(lambda: _answers(url, process), bool)  # it says where it will be before it is there
        with httpx.Client(base_url=url, timeout=LIMIT_S) as http, closing(_boto(url)) as client:
            yield Service(url, process, client, http)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _answers(url: str, process: subprocess.Popen[str]) -> bool:
    assert process.poll() is None
    try:
        return httpx.get(f"{url}/v1/service", timeout=LIMIT_S).status_code == 200
    except httpx.TransportError:
        return False


def until(look: Callable[[], Found], fits: Callable[[Found], bool]) -> Found:
    """What is seen once it fits."""
    deadline = time.monotonic() + LIMIT_S
    while not fits(seen := look()):
        assert time.monotonic() < deadline, seen
        time.sleep(0.1)
    return seen


def group(count: int = 2, **more: Any) -> dict[str, Any]:
    """An instance group."""
    return {
        "InstanceGroupName": "workers",
        "InstanceType": "ml.trn2.48xlarge",
        "InstanceCount": count,
        "ExecutionRole": ROLE,
        **more,
    }


def in_service(client: Any, name: str) -> Any:
    """The cluster, once it is."""
    return until(
        lambda: client.describe_cluster(ClusterName=name),
        lambda seen: seen["ClusterStatus"] == "InService",
    )


def refused(call: Any, **asked: Any) -> tuple[str, str]:
    """Code and message of the refusal."""
    with pytest.raises(ClientError) as caught:
        call(**asked)
    return caught.value.response["Error"]["Code"], caught.value.response["Error"]["Message"]


def listed_names(client: Any, **asked: Any) -> list[str]:
    """Of the clusters that a list has."""
    return [found["ClusterName"] for found in client.list_clusters(**asked)["ClusterSummaries"]]
