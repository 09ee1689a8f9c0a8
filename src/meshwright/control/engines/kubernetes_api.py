"""What we ask of a Kubernetes API server, over HTTP."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from meshwright.base.errors import ConfigError, RunError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # in every pod
_CALL_S = 0.9
_MANAGER = "meshwright"
NODES = "/api/v1/nodes"


@dataclass(frozen=True)
class Access:
    """Where the server is, and who we are to it."""

    url: str
    token: str = ""
    authority: str = ""  # file of its certificate authority

    @classmethod
    def of_pod(cls, environment: Mapping[str, str]) -> Access:
        """That of a service which runs in the cluster. Raises ConfigError elsewhere."""
        host = environment.get("KUBERNETES_SERVICE_HOST", "")
        if not host:
            raise ConfigError(
                "kube_api", "", "this is no pod; give the address of the API server by --kube-api"
            )
        port = environment.get("KUBERNETES_SERVICE_PORT", "443")
        name = f"[{host}]" if ":" in host else host
        token = _ACCOUNT / "token"
        authority = _ACCOUNT / "ca.crt"
        return cls(
            f"https://{name}:{port}",
            token.read_text().strip() if token.exists() else "",
            str(authority) if authority.exists() else "",
        )


class KubeApi:
    """Calls that are bounded in time. Each raises RunError, in one line, where the server does not
    answer or refuses."""

    def __init__(self, access: Access) -> None:
        verify = ssl.create_default_context(cafile=access.authority) if access.authority else True
        headers = {"Authorization": f"Bearer {access.token}"} if access.token else {}
        self._url = access.url
        self._client = httpx.Client(
            base_url=access.url, headers=headers, verify=verify, timeout=_CALL_S
        )

    def get(self, path: str) -> dict[str, Any] | None:
        """An object; None if there is none."""
        return self._call("GET", path)

    def list(self, path: str, selector: str) -> list[dict[str, Any]]:
        """The objects with these labels."""
        found = self._call("GET", path, params={"labelSelector": selector}) or {}
        items: list[dict[str, Any]] = found.get("items", [])
        return items

    def apply(self, path: str, document: Mapping[str, Any]) -> None:
        """Server-side apply: make it so, whether it was there or not."""
        params = {"fieldManager": _MANAGER, "force": "true"}
        self._patch(path, document, "application/apply-patch+yaml", params)

    def merge(self, path: str, change: Mapping[str, Any]) -> None:
        """Change some fields of an object."""
        self._patch(path, change, "application/merge-patch+json", {"fieldManager": _MANAGER})

    def delete(self, path: str) -> None:
        """With all that it owns; it may be gone."""
        self._call("DELETE", path, params={"propagationPolicy": "Foreground"})

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def _patch(
        self, path: str, document: Mapping[str, Any], kind: str, params: dict[str, str]
    ) -> None:
        text = json.dumps(document)  # which is YAML as well
        done = self._call(
            "PATCH", path, params=params, content=text, headers={"Content-Type": kind}
        )
        if done is None:
            raise RunError(f"{self._url}{path}: there is no such thing")

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any] | None:
        try:
            answer = self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise RunError(f"{self._url} does not answer: {why}") from error
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        try:
            found: dict[str, Any] = answer.json()
        except ValueError as error:
            raise RunError(f"{self._url}{path}: answers no JSON") from error
        if answer.is_error:
            said = found.get("message", answer.reason_phrase)
            raise RunError(f"{self._url}{path}: {answer.status_code} {said}")
        return found
