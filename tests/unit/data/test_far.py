"""Builds far away: what is kept of them here, and the blocks that processes share out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from meshwright.base.errors import ConfigError, DamagedError, DataError
from meshwright.data.built import has_held_out, open_build
from meshwright.data.checksums import BLOCK_BYTES, block_sums
from meshwright.data.documents import WithDocuments
from meshwright.data.far import block_cache, is_far, mirror
from meshwright.data.ingest.plan import BuildOptions
from meshwright.data.ingest.run import build
from meshwright.data.opening import Reading, open_tokens
from meshwright.data.order import MixedRows, plain_order
from meshwright.data.packing import PAD, PackedRows
from meshwright.data.store import open_store, write_store
from meshwright.data.tolerance import BadSamples
from meshwright.data.tolerant_rows import TolerantRows
from meshwright.data.windows import Windows

VOCAB = 257


@pytest.fixture
def built(tmp_path: Path) -> Path:
    rows = [{"text": f"text {number} " * (3 + number % 5)} for number in range(90)]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    build([str(source)], tmp_path / "built", BuildOptions(held_out=0.2), processes=1)
    return tmp_path / "built"


def test_addresses_are_told_from_paths() -> None:
    assert is_far("s3://bucket/x") and is_far("file:///x")
    assert not is_far("/x/y") and not is_far("python-stdlib") and not is_far("c:/x")


def test_a_far_build_reads_as_the_same_one_here(tmp_path: Path, built: Path) -> None:
    url = f"file://{built}/"
    here = mirror(url, tmp_path / "cache")
    assert not list(here.glob("*.bin"))
    found = open_build(url, "bpe", VOCAB, here)
    assert has_held_out(found)
    near = open_build(str(built), "bpe", VOCAB)
    kept = ("tokenizer_sha256", "tokens", "manifest_sha256")
    assert [found.manifest[key] for key in kept] == [near.manifest[key] for key in kept]
    assert found.manifest["source"] == url
    for part in ("train_prefix", "held_out_prefix"):
        read = []
        for prepared in (found, near):
            store = open_tokens(getattr(prepared, part), Reading(cache_bytes=BLOCK_BYTES))
            rows = Windows(store, 31)
            read.append(MixedRows([rows], plain_order(len(rows), 0)).read(np.arange(40)))
        assert np.array_equal(read[0], read[1])


def test_a_mirror_is_made_once_and_only_whole(tmp_path: Path, built: Path) -> None:
    cache = tmp_path / "cache"
    first = mirror(f"file://{built}", cache)
    (built / "train.idx").unlink()
    assert mirror(f"file://{built}", cache) == first  # nothing is fetched but the manifest
    with pytest.raises(DataError, match=r"no train\.idx: .*uploaded"):
        mirror(f"file://{built}", tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []
    (built / "train.idx").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"train\.idx: damaged \(its hash differs\)"):
        mirror(f"file://{built}", tmp_path / "other")
    (built / "manifest.json").write_text('{"files": 3}')
    with pytest.raises(DataError, match="is not one of ours"):
        mirror(f"file://{built}", tmp_path / "other")


def test_files_of_a_manifest_stay_in_their_folder(tmp_path: Path, built: Path) -> None:
    path = built / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"]["../../evil"] = {"bytes": 1, "sha256": "0"}
    path.write_text(json.dumps(manifest))
    mirror(f"file://{built}", tmp_path / "cache")  # it is not even looked for
    assert not list(tmp_path.rglob("evil"))


def test_too_small_a_cache_is_told(tmp_path: Path, built: Path) -> None:
    here = mirror(f"file://{built}", tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"data\.cache_bytes = 1000: 3 processes need 262144"):
        open_tokens(here / "train", Reading(cache_bytes=1000, processes=3))


OTHER = """
import sys
from pathlib import Path
from meshwright.data.far import block_cache
cache = block_cache(Path(sys.argv[1]), 4000, 4, 100)
print(cache.folder.name, cache.limit_bytes, flush=True)
sys.stdin.read()
"""


def test_each_process_has_a_part_of_the_cache_and_leaves_it_to_the_next(tmp_path: Path) -> None:
    mine = block_cache(tmp_path, 4000, 4, 100)
    assert mine is block_cache(tmp_path, 4000, 4, 100)  # whatever is opened in this process
    assert (mine.folder.name, mine.limit_bytes) == ("0", 1000)
    command = [sys.executable, "-c", OTHER, str(tmp_path)]
    pipe = subprocess.PIPE
    for _ in range(2):
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "1 1000\n"


def test_parts_of_processes_that_are_no_more_are_removed(tmp_path: Path) -> None:
    for name in ("0", "2", "7"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{'a' * 24}.0").write_bytes(b"x")
        (tmp_path / f"{name}.lock").touch()
    block_cache(tmp_path, 3000, 3, 100)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["0", "2"]


def damaged_store(folder: Path) -> Path:
    """Three blocks of 16-bit ids, of which the second has a flipped bit and an id too many."""
    prefix = folder / "train"
    items = 3 * BLOCK_BYTES // 2
    with write_store(prefix, 300, 0) as writer:
        writer.extend(np.full(items, 7), np.array([items]))
    path = prefix.with_suffix(".bin")
    prefix.with_suffix(".crc").write_bytes(block_sums(path).tobytes())
    content = bytearray(path.read_bytes())
    content[BLOCK_BYTES + 101] ^= 2  # id 7 becomes 519
    path.write_bytes(content)
    return prefix


def test_blocks_of_a_local_store_are_checked_where_asked(tmp_path: Path) -> None:
    prefix = damaged_store(tmp_path)
    plain = open_tokens(prefix)
    store = open_tokens(prefix, Reading(verify=True))
    half = BLOCK_BYTES // 2
    for place in (slice(0, 9), slice(5, half), slice(2 * half, 3 * half), slice(0, 0)):
        assert np.array_equal(store.tokens[place], plain.tokens[place])
    assert store.n_tokens == plain.n_tokens
    where = f"train.bin: bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES}: damaged"
    for place in (slice(half - 1, half + 1), slice(2 * half - 1, 2 * half)):
        with pytest.raises(DamagedError, match=where):
            store.tokens[place]
    prefix.with_suffix(".crc").unlink()
    with pytest.raises(DataError, match=r"no checksums beside it.*data\.verify"):
        open_tokens(prefix, Reading(verify=True))


def test_bad_rows_are_padding_for_every_reader(tmp_path: Path) -> None:
    """Without checksums the one whose id the model does not have; with them all of the block."""
    prefix, length = damaged_store(tmp_path), 1023
    for verify, bad in ((False, 1), (True, BLOCK_BYTES // 2 // 1024)):
        readers = []
        for _ in range(2):
            rows = PackedRows(open_tokens(prefix, Reading(verify=verify)), length)
            readers.append(TolerantRows(rows, BadSamples(allowed=None), 300))
        order = np.random.default_rng(1).permutation(len(readers[0]))
        whole = readers[0].read(order)
        parts = [readers[1].read(part) for part in np.array_split(order[::-1], 7)]
        assert np.array_equal(whole, np.concatenate(parts)[::-1])
        padding = (whole == PAD).all(1)
        assert padding.sum() == bad
        assert np.array_equal((whole == PAD).any(1), padding)
        assert set(readers[0].why) == set(order[padding].tolist())
        mixed = MixedRows([readers[0]], plain_order(len(readers[0]), 0))
        batch = WithDocuments(mixed).read_at(mixed.order.at(np.arange(len(readers[0]))))
        assert np.array_equal(batch.documents == -1, batch.tokens == PAD)
    with pytest.raises(DataError, match=r"row 128 of .*token id 519 is outside model\.vocab = 300"):
        TolerantRows(PackedRows(open_store(prefix), length), BadSamples(), 300).read(order)
