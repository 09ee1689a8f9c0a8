"""Whatever is sent to the service: it never fails, and every answer is as its OpenAPI says.

Requests are made up from the OpenAPI by schemathesis, right ones and wrong ones.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import schemathesis
from api_service import Service
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = 300 if os.environ.get("CHAOS") == "all" else 8
TOO_LARGE = 413
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_answers_are_as_described(service: Service, mode: GenerationMode) -> None:
    service.cluster(f"contract-{mode.value}", nodes=1, spares=0)
    whole = schemathesis.openapi.from_url(f"{service.url}/v1/openapi.json")
    schema = whole.exclude(operation_id="StreamEvents")  # which has no end
    tried = 0
    for found in schema.get_all_operations():
        operation: Any = found.ok()  # type: ignore[union-attr]
        if mode is GenerationMode.NEGATIVE and not operation.body and not operation.query:
            continue  # nothing that could be wrong

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            answer = case.call()
            if answer.status_code != TOO_LARGE:  # which nothing but its size says of a body
                case.validate_response(answer, checks=CHECKS)

        ask()
        tried += 1
    assert tried > 10


def test_the_description_is_whole(service: Service) -> None:
    found = service.raw("GET", "/v1/openapi.json").json()
    assert found["openapi"].startswith("3.1")
    names = {one["operationId"] for path in found["paths"].values() for one in path.values()}
    assert {
        *("CreateTrainiumCluster", "DescribeClusterHardware", "SubmitTrainingJob", "InjectFault"),
        *("ListEvents", "CreatePlan", "ListCheckpoints", "ExplainTrainingJob", "BulkClusterAction"),
    } <= names
    assert "HTTPValidationError" not in found["components"]["schemas"]
