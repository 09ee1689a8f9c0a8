"""The page at `/`: files that speak the same API as everybody else, and need nothing else."""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request, Response

from meshwright.base.errors import NotFoundError

router = APIRouter(include_in_schema=False)

_FOLDER = Path(__file__).parent.parent / "page"
_MEDIA = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Asked for again each time, and answered by 304: after an update nobody has the old page.
    "Cache-Control": "no-cache",
    # No script or style but these files, no other host, and no frame around it.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@router.get("/")
def index(request: Request) -> Response:
    """The page."""
    return _answer(request, "index.html")


@router.get("/page/{name}")
def part(name: str, request: Request) -> Response:
    """One of its files."""
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    if name not in _names():
        raise NotFoundError(f"/page/{name}: there is no such file; the page is at /")
    body, tag = _file(name)
    headers = _HEADERS | {"ETag": tag}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=_MEDIA[Path(name).suffix], headers=headers)


@lru_cache(maxsize=1)
def _names() -> frozenset[str]:
    return frozenset(path.name for path in _FOLDER.iterdir() if path.suffix in _MEDIA)


@lru_cache(maxsize=32)
def _file(name: str) -> tuple[bytes, str]:
    body = (_FOLDER / name).read_bytes()
    return body, f'"{sha256(body).hexdigest()[:32]}"'
