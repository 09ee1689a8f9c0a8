"""How a program asks the service: the same REST that everybody has."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meshwright.base.errors import ConflictError, InputError, NotFoundError, RunError

if TYPE_CHECKING:
    import httpx

_TIMEOUT_S = 30.0
_TRIES = 3


class Client:
    """A context manager. Writes carry an idempotency key and may be sent again when the line
    breaks: the service does them once."""

    def __init__(self, url: str) -> None:
        """Of a service at `url`, as `http://127.0.0.1:8470`."""
        import httpx  # here: commands that ask nothing of a service start without it

        self.url = url.rstrip("/")
        self._broken = httpx.TransportError
        # No proxy of the environment: the service is on this machine.
        self._http = httpx.Client(base_url=self.url, timeout=_TIMEOUT_S, trust_env=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, **query: Any) -> Any:
        """The answer to a read. Raises as `send`."""
        return self.send("GET", path, query=query)

    def items(self, path: str, **query: Any) -> Iterator[dict[str, Any]]:
        """All items of a list, page by page."""
        cursor: str | None = None
        while True:
            page = self.get(path, **query, **({"cursor": cursor} if cursor else {}))
            yield from page["items"]
            cursor = page["cursor"]
            if cursor is None:
                return

    def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> Any:
        """The answer. `key`: of a write that somebody may have sent already.

        Raises NotFoundError, ConflictError or InputError with the service's line, RunError if it
        does not answer.
        """
        key = key or secrets.token_hex(16)
        headers = {} if method == "GET" else {"Idempotency-Key": key}
        wanted = {key: value for key, value in (query or {}).items() if value is not None}
        for left in reversed(range(_TRIES)):
            try:
                answer = self._http.request(
                    method, f"/v1{path}", json=body, params=wanted, headers=headers
                )
                break
            except self._broken as error:
                if not left:
                    raise self._absent(error) from error
        if answer.is_success:
            return answer.json()
        raise _error(answer)

    def events(self, after: int | None = None, **query: Any) -> Iterator[dict[str, Any]]:
        """What happens, as it happens; without end. Raises RunError when the line breaks."""
        wanted = {key: value for key, value in query.items() if value is not None}
        if after is not None:
            wanted["after"] = after
        try:
            with self._http.stream(
                "GET", "/v1/events/stream", params=wanted, timeout=_TIMEOUT_S
            ) as answer:
                if not answer.is_success:
                    answer.read()
                    raise _error(answer)
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        yield json.loads(line.removeprefix("data: "))
        except self._broken as error:
            raise self._absent(error) from error

    def _absent(self, error: Exception) -> RunError:
        return RunError(
            f"{self.url}: no service answers there ({error}); start one by `meshwright up`, or "
            "name another by --url or MESHWRIGHT_URL"
        )


def _error(answer: httpx.Response) -> InputError | RunError:
    try:
        title = str(answer.json()["title"])
    except (ValueError, KeyError):
        title = f"the service answered {answer.status_code}"
    if answer.status_code == 404:
        return NotFoundError(title)
    if answer.status_code == 409:
        return ConflictError(title)
    return InputError(title) if answer.status_code < 500 else RunError(title)
