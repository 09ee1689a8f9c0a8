"""Stores far away: a bounded cache, nothing unchecked, patience, one clear error."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.base.errors import ConfigError, DamagedError, DataError
from meshwright.data.blocks import BlockCache
from meshwright.data.ingest.plan import BuildOptions
from meshwright.data.ingest.run import build
from meshwright.data.mixture import Draws
from meshwright.data.order import MixedRows, MixedSamples, plain_order
from meshwright.data.packing import PAD, PackedRows
from meshwright.data.reader import BatchReader
from meshwright.data.remote import Patience, RemoteFile, open_remote
from meshwright.data.samples import open_samples
from meshwright.data.share import Share
from meshwright.data.store import open_store
from meshwright.data.tolerance import BadSamples
from meshwright.data.tolerant_rows import TolerantRows

BLOCK = 64
CONTENT = np.random.default_rng(0).bytes(1000)
SUMS = np.array([zlib.crc32(CONTENT[at : at + BLOCK]) for at in range(0, 1000, BLOCK)], "<u4")
AT_ONCE = Patience(tries=4, sleep=lambda _: None)


class Storage:
    """Fetches of `CONTENT`; `fault(number of the call, start)` may raise or say "damaged"."""

    def __init__(self, fault: Callable[[int, int], str | None] = lambda *_: None) -> None:
        self.fault, self.calls = fault, list[int]()
        self._lock = threading.Lock()

    def fetch(self, start: int, stop: int) -> bytes:
        with self._lock:
            self.calls.append(start // BLOCK)
            number = len(self.calls)
        found = bytearray(CONTENT[start:stop])
        if self.fault(number, start) == "damaged":
            found[0] ^= 1
        return bytes(found)


def remote(folder: Path, storage: Storage, limit: int = 10_000) -> RemoteFile:
    cache = BlockCache(folder, limit, BLOCK)
    return RemoteFile("s3://b/x", 1000, SUMS, BLOCK, storage.fetch, cache, AT_ONCE)


def test_any_range_is_what_it_was(tmp_path: Path) -> None:
    file = remote(tmp_path, Storage())
    for start, stop in ((0, 1000), (63, 65), (64, 128), (999, 1000), (5, 5), (100, 700)):
        assert file.read(start, stop) == CONTENT[start:stop]


def test_a_block_is_fetched_once_and_found_again_by_the_next_process(tmp_path: Path) -> None:
    first, second = Storage(), Storage()
    remote(tmp_path, first).read(0, 1000)
    remote(tmp_path, first).read(0, 1000)
    assert remote(tmp_path, second).read(10, 990) == CONTENT[10:990]
    assert sorted(first.calls) == list(range(16))
    assert second.calls == []


def test_the_cache_keeps_its_bound(tmp_path: Path) -> None:
    storage = Storage()
    file = remote(tmp_path, storage, limit=5 * BLOCK)
    for start in np.random.default_rng(1).integers(0, 900, 200).tolist():
        assert file.read(start, start + 100) == CONTENT[start : start + 100]
        on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert on_disk == file.cache.used_bytes <= 5 * BLOCK
    with pytest.raises(ConfigError, match="not even one block"):
        BlockCache(tmp_path, 10, BLOCK)


def test_many_threads_and_a_small_cache(tmp_path: Path) -> None:
    file = remote(tmp_path, Storage(), limit=3 * BLOCK)
    wrong = []

    def read(seed: int) -> None:
        for start in np.random.default_rng(seed).integers(0, 900, 100).tolist():
            if file.read(start, start + 100) != CONTENT[start : start + 100]:
                wrong.append(start)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert on_disk == file.cache.used_bytes <= 3 * BLOCK


def test_what_is_needed_is_fetched_side_by_side(tmp_path: Path) -> None:
    barrier = threading.Barrier(4, timeout=10)

    def together(_number: int, _start: int) -> None:
        barrier.wait()

    file = remote(tmp_path, Storage(together))
    file.fetch_spans([(0, 10), (BLOCK, 2 * BLOCK + 1), (900, 901), (5, 20)])
    assert file.traffic.fetched == 4


def test_failures_that_pass_are_tried_again(tmp_path: Path) -> None:
    waited: list[float] = []

    def fails(number: int, _start: int) -> str | None:
        if number < 3:
            raise TimeoutError("slow down")
        return "damaged" if number == 3 else None

    cache = BlockCache(tmp_path, 10_000, BLOCK)
    patience = Patience(first_s=1, longest_s=3, sleep=waited.append)
    file = RemoteFile("s3://b/x", 1000, SUMS, BLOCK, Storage(fails).fetch, cache, patience)
    assert file.read(0, 10) == CONTENT[:10]
    assert waited == [1, 2, 3]
    assert (file.traffic.failed, file.traffic.damaged) == (2, 1)


def test_errors_of_a_kind_of_storage_are_tried_again_too(tmp_path: Path) -> None:
    """botocore's, aiohttp's: they are no OSError."""

    def fails(number: int, _start: int) -> str | None:
        if number < 3:
            raise RuntimeError("connection lost")
        return None

    file = remote(tmp_path, Storage(fails))
    assert file.read(0, 10) == CONTENT[:10]
    assert file.traffic.failed == 2
    with pytest.raises(DataError, match="RuntimeError: gone; is the network") as caught:
        remote(tmp_path / "b", Storage(raising(RuntimeError("gone")))).read(0, 10)
    assert not isinstance(caught.value, DamagedError)  # so no job leaves it out as a bad sample


def test_what_is_damaged_there_is_not_asked_for_again(tmp_path: Path) -> None:
    storage = Storage(lambda *_: "damaged")
    file = remote(tmp_path, storage)
    for _ in range(3):
        with pytest.raises(DamagedError, match=r"damaged there.* \(2 tries\)"):
            file.read(0, 10)
    assert len(storage.calls) == 2


def raising(error: Exception) -> Callable[[int, int], str | None]:
    def fault(_number: int, _start: int) -> str | None:
        raise error

    return fault


@pytest.mark.parametrize(
    ("fault", "words", "calls"),
    [
        (raising(TimeoutError("slow")), "slow; is the network .* down.* .4 tries", 4),
        (raising(FileNotFoundError("no key")), "no key; has it been moved or removed", 1),
        (raising(PermissionError("denied")), "denied; has it", 1),
        (lambda *_: "damaged", "bytes 64 to 128: damaged there .the checksum differs", 2),
    ],
)
def test_failures_that_stay_are_one_clear_line(
    tmp_path: Path, fault: Callable[[int, int], str | None], words: str, calls: int
) -> None:
    storage = Storage(fault)
    with pytest.raises(DataError, match=words) as caught:
        remote(tmp_path, storage).read(70, 80)
    assert str(caught.value).startswith("s3://b/x: bytes 64 to 128")
    assert len(storage.calls) == calls


def test_a_block_that_is_damaged_in_the_cache_is_fetched_anew(tmp_path: Path) -> None:
    remote(tmp_path, Storage()).read(0, 1000)
    for path in tmp_path.iterdir():
        path.write_bytes(b"\0" + path.read_bytes()[1:])
    again = Storage()
    assert remote(tmp_path, again).read(0, 1000) == CONTENT
    assert len(again.calls) >= 15


def corpus(folder: Path, kind: str = "tokens") -> Path:
    source = folder / "in"
    source.mkdir(exist_ok=True)
    for number in range(40):
        (source / f"{number}.md").write_text(f"document {number} " * (50 + number))
    build([str(source)], folder / kind, BuildOptions(kind), 1)
    return folder / kind


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_remote_store_reads_as_the_local_one(tmp_path: Path, scheme: str) -> None:
    folder = corpus(tmp_path)
    far = open_remote(f"{scheme}{folder}", tmp_path / "cache", 1 << 20).tokens("train")
    near = open_store(folder / "train")
    order = plain_order(len(PackedRows(near, 31)), 0)
    ks = np.arange(3 * len(PackedRows(near, 31)))
    read = [MixedRows([PackedRows(store, 31)], order).read(ks) for store in (far, near)]
    assert np.array_equal(read[0], read[1])


def test_remote_samples_read_as_the_local_ones(tmp_path: Path) -> None:
    folder = corpus(tmp_path, "samples")
    far = open_remote(str(folder), tmp_path / "cache", 1 << 20).samples("train")
    near = open_samples(folder / "train")
    assert [far.read(i) for i in range(len(far))] == [near.read(i) for i in range(len(near))]


def test_wrong_addresses_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no manifest\.json.*uploaded"):
        open_remote(str(tmp_path), tmp_path / "cache", 1 << 20)
    with pytest.raises(DataError, match="cannot be opened"):
        open_remote("nonsense://x", tmp_path / "cache", 1 << 20)
    folder = corpus(tmp_path)
    far = open_remote(str(folder), tmp_path / "cache", 1 << 20)
    with pytest.raises(DataError, match="has no held_out"):
        far.tokens("held_out")
    (folder / "train.idx").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"train\.idx: damaged"):
        far.tokens("train")
    (folder / "train.idx").unlink()
    with pytest.raises(DataError, match=r"no train\.idx"):
        far.tokens("train")


def test_bad_samples_are_passed_over_only_where_allowed_and_counted(tmp_path: Path) -> None:
    folder = corpus(tmp_path, "samples")
    content = bytearray((folder / "train.bin").read_bytes())
    store = open_samples(folder / "train")
    content[int(store.offsets[3]) + 5] ^= 1
    (folder / "train.bin").write_bytes(content)
    store, bad = open_samples(folder / "train"), BadSamples(allowed=1)
    tolerant = MixedSamples([store], plain_order(len(store), 0), bad=bad)
    assert len(tolerant.read_at(drawn(range(6)))) == 5
    assert len(bad.said) == 1
    with pytest.raises(DataError, match="2 bad samples, 1 are allowed; the last: sample 3"):
        tolerant.read_at(drawn([3]))
    with pytest.raises(DataError, match=r"^sample 3 of .*damaged"):
        MixedSamples([store], plain_order(len(store), 0)).read_at(drawn([3]))


def drawn(indices: Iterable[int]) -> Draws:
    numbers = np.array(list(indices))
    return Draws(np.zeros_like(numbers), numbers)


def test_samples_are_read_in_the_order_of_the_run(tmp_path: Path) -> None:
    store = open_samples(corpus(tmp_path, "samples") / "train")
    data = MixedSamples([store], plain_order(len(store), 0))
    reader = BatchReader(data, Share(8))
    names = [sample.name for _ in range(5) for sample in next(reader).content]
    assert sorted(names) == sorted(str(number) for number in range(40))
    again = BatchReader(data, Share(20, rank=1, world=2))
    again.load_state_dict(data.state(20))
    assert [sample.name for sample in next(again).content] == names[30:]


def test_a_bad_block_pads_the_rows_that_it_is_in(tmp_path: Path) -> None:
    folder = corpus(tmp_path)
    content = bytearray((folder / "train.bin").read_bytes())
    content[-1] ^= 1  # there is one block only
    (folder / "train.bin").write_bytes(content)
    patience = Patience(tries=1)
    far = open_remote(str(folder), tmp_path / "cache", 1 << 20, patience).tokens("train")
    bad = BadSamples(allowed=2)
    rows = TolerantRows(PackedRows(far, 31), bad)
    assert (rows.read(np.array([0, 1])) == PAD).all()
    assert len(bad.said) == 2
    with pytest.raises(DataError, match="3 bad samples"):
        rows.read(np.array([2]))


@pytest.fixture
def bucket() -> Iterator[tuple[str, dict[str, Any]]]:
    """A folder of an S3 server of moto's, and fsspec's options for it."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    options: dict[str, Any] = {"key": "k", "secret": "s", "endpoint_url": f"http://{host}:{port}"}
    try:
        yield "s3://bucket/corpus", options
    finally:
        server.stop()


@pytest.mark.filterwarnings("ignore")
def test_s3(tmp_path: Path, bucket: tuple[str, dict[str, Any]]) -> None:
    fsspec = pytest.importorskip("fsspec")
    url, options = bucket
    folder = corpus(tmp_path)
    files = fsspec.filesystem("s3", **options)
    files.mkdir("bucket")
    files.put(f"{folder}/", "bucket/corpus/", recursive=True)
    far = open_remote(url, tmp_path / "cache", 1 << 20, options=options).tokens("train")
    near = open_store(folder / "train")
    rows = np.arange(len(PackedRows(near, 31)))
    assert np.array_equal(PackedRows(far, 31).read(rows), PackedRows(near, 31).read(rows))
    files.rm("bucket/corpus/train.bin")
    gone = open_remote(url, tmp_path / "other", 1 << 20, options=options).tokens("train")
    with pytest.raises(DataError, match="has it been moved or removed"):
        PackedRows(gone, 31).read(rows)
