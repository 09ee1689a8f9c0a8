"""Builds: every kind of source, the same bytes whatever the processes, whole after a kill."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import tarfile
import wave
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import meshwright.data.ingest.run as run
from meshwright.base.errors import ConfigError, DataError, MeshwrightError
from meshwright.data.ingest.filters import Rules
from meshwright.data.ingest.part import build_part
from meshwright.data.ingest.plan import BuildOptions
from meshwright.data.ingest.readers import read_unit
from meshwright.data.ingest.records import Keys, Unit
from meshwright.data.ingest.run import build, identity_of, read_manifest
from meshwright.data.ingest.sources import find_units
from meshwright.data.ingest.verify import described, faults, open_built, open_together
from meshwright.data.samples import open_samples
from meshwright.data.store import open_store

SHARED = Path(__file__).parents[5] / "shared" / "data"
TEXTS = ["To be, or not to be.", "That is the question.", "Whether 'tis nobler in the mind."]


def texts_of(folder: Path, part: str = "train") -> list[str]:
    store = open_store(folder / part)
    return [
        bytes(store.document(i)[:-1].astype(np.uint8)).decode() for i in range(store.n_documents)
    ]


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


def write_jsonl_gz(path: Path) -> None:
    with gzip.open(path, "wt") as stream:
        stream.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS)


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        for number, text in enumerate(TEXTS):
            info = tarfile.TarInfo(f"{number:03}.txt")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))


def write_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for number, text in enumerate(TEXTS):
            archive.writestr(f"{number:03}.txt", text)


def write_mds(path: Path) -> None:
    path.mkdir()
    samples = [
        struct.pack("<I", len(text)) + struct.pack("<q", number) + text.encode()
        for number, text in enumerate(TEXTS)
    ]
    config = b"{}"
    offsets = np.cumsum([4 * (len(samples) + 2) + len(config), *map(len, samples)])
    shard = struct.pack("<I", len(samples)) + offsets.astype("<u4").tobytes() + config
    (path / "shard.00000.mds").write_bytes(shard + b"".join(samples))
    about = {
        "format": "mds",
        "compression": None,
        "column_names": ["number", "text"],
        "column_encodings": ["int", "str"],
        "column_sizes": [8, None],
        "raw_data": {"basename": "shard.00000.mds", "bytes": int(offsets[-1])},
    }
    (path / "index.json").write_text(json.dumps({"version": 2, "shards": [about]}))


def write_parquet(path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": TEXTS, "n": [1, 2, 3]}), path)


def write_hugging_face(path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    path.mkdir()
    table = arrow.table({"text": TEXTS})
    file = str(path / "data-00000.arrow")
    with arrow.OSFile(file, "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (path / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000.arrow"}]})
    )


def write_folder(path: Path) -> None:
    path.mkdir()
    for number, text in enumerate(TEXTS):
        (path / f"{number}.md").write_text(text)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_jsonl),
        ("a.jsonl.gz", write_jsonl_gz),
        ("a.tar", write_tar),
        ("a.zip", write_zip),
        ("mds", write_mds),
        ("a.parquet", write_parquet),
        ("hf", write_hugging_face),
        ("folder", write_folder),
    ],
)
def test_every_kind_of_source_gives_its_texts(tmp_path: Path, name: str, write: object) -> None:
    write(tmp_path / name)  # type: ignore[operator]
    manifest = build([str(tmp_path / name)], tmp_path / "out", BuildOptions(), 1)
    assert texts_of(tmp_path / "out") == TEXTS
    assert manifest["train"] == {"documents": 3, "tokens": sum(map(len, TEXTS)) + 3}
    assert list(faults(tmp_path / "out")) == []


def test_processes_change_no_byte(tmp_path: Path) -> None:
    for number in range(6):
        lines = [json.dumps({"text": f"document {n} of file {number}"}) for n in range(50)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    sources = [str(tmp_path / f"{number}.jsonl") for number in range(6)]
    options = BuildOptions(held_out=0.1)
    one = build(sources, tmp_path / "one", options, 1)
    two = build(sources, tmp_path / "two", options, 2)
    assert one == two
    assert 0 < one["held_out"]["documents"] < 100


def test_a_jsonl_that_is_cut_into_ranges_loses_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    for size in range(1, 120, 7):
        monkeypatch.setattr("meshwright.data.ingest.sources.RANGE_BYTES", size)
        out = tmp_path / f"out{size}"
        build([str(tmp_path / "a.jsonl")], out, BuildOptions(), 1)
        assert texts_of(out) == TEXTS


def test_a_killed_build_goes_on_with_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "in")
    sources, out = [str(tmp_path / "in")], tmp_path / "out"
    built: list[str] = []
    real = build_part

    def dies(unit: Unit, *rest: object) -> None:
        if unit.path.name == "1.md" and "1.md" not in built:
            built.append("1.md")
            raise KeyboardInterrupt
        built.append(f"{unit.path.name} whole")
        real(unit, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "build_part", dies)
    with pytest.raises(KeyboardInterrupt):
        build(sources, out, BuildOptions(), 1)
    assert not out.exists()
    build(sources, out, BuildOptions(), 1)
    assert built == ["0.md whole", "1.md", "1.md whole", "2.md whole"]
    assert texts_of(out) == TEXTS
    assert not out.with_name("out.building").exists()


def test_a_build_killed_at_any_rename_is_the_same_in_the_end(tmp_path: Path) -> None:
    """What is there is renamed into place, so these are the moments that differ."""
    write_jsonl(tmp_path / "in.jsonl")
    sources, options = [str(tmp_path / "in.jsonl")], BuildOptions(held_out=0.4)
    whole = build(sources, tmp_path / "whole", options, 1)
    for moment in range(1, 100):
        out = tmp_path / f"out{moment}"
        killed = dies_at_rename(moment, partial(build, sources, out, options, 1))
        assert out.exists() == (not killed)
        if not killed:
            break
        assert build(sources, out, options, 1) == whole
        assert list(faults(out)) == []
        assert not out.with_name(f"{out.name}.building").exists()
    assert 5 < moment < 99  # each moment that there is


def dies_at_rename(moment: int, work: Callable[[], object]) -> bool:
    """Do `work` in a fork that is gone when it renames a file for the so manieth time."""
    pid = os.fork()
    if not pid:
        left, replace, rename = [moment], Path.replace, Path.rename

        def counted(real: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
            def renamed(path: Path, target: Path) -> Path:
                left[0] -= 1
                if not left[0]:
                    os._exit(9)
                return real(path, target)

            return renamed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "replace", counted(replace))
            patch.setattr(Path, "rename", counted(rename))
            work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def test_progress_goes_from_nothing_to_all(tmp_path: Path) -> None:
    write_folder(tmp_path / "in")
    told: list[tuple[str, float]] = []
    report = lambda what, done: told.append((what, done))  # noqa: E731
    build([str(tmp_path / "in")], tmp_path / "out", BuildOptions(), 1, report)
    shares = [done for _, done in told]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert [what for what, _ in told if what.startswith("read ")] == [
        f"read {n}.md" for n in range(3)
    ]


def test_an_unfinished_build_is_not_mixed_with_another(tmp_path: Path) -> None:
    write_folder(tmp_path / "in")
    (tmp_path / "in" / "3.md").write_bytes(b"\xff")
    sources, out = [str(tmp_path / "in")], tmp_path / "out"
    with pytest.raises(DataError, match=r"3\.md: not UTF-8"):
        build(sources, out, BuildOptions(), 1)
    (tmp_path / "in" / "3.md").unlink()
    other = BuildOptions(held_out=0.4)
    with pytest.raises(ConfigError, match="unfinished build with other options"):
        build(sources, out, other, 1)
    build(sources, out, other, 1, restart=True)
    assert read_manifest(out)["options"]["held_out"] == 0.4


def test_copies_are_left_out(tmp_path: Path) -> None:
    words = [f"word{n}" for n in range(300)]
    near = " ".join([*words[:150], "changed", *words[151:]])
    rows = ["short", " ".join(words), "short", near, " ".join(reversed(words))]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    for dedup, kept in (("none", 5), ("exact", 4), ("minhash", 3)):
        out = tmp_path / dedup
        manifest = build([str(tmp_path / "a.jsonl")], out, BuildOptions(dedup=dedup), 1)
        assert manifest["train"]["documents"] == kept
    assert manifest["removed"] == {"exact copy": 1, "near copy": 1}
    assert texts_of(tmp_path / "minhash") == [rows[0], rows[1], rows[4]]


def test_rules_and_licences_leave_out_and_count(tmp_path: Path) -> None:
    rows = [
        {"text": "a good text of some length", "licence": "CC0"},
        {"text": "tiny", "licence": "CC0"},
        {"text": "#### %%%% @@@@ !!!! ....", "licence": "CC0"},
        {"text": "another text, of no licence that is allowed", "license": "secret"},
        {"text": "a text whose licence is that of the rest"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    options = BuildOptions(
        rules=Rules(least_chars=10, least_letters=0.6), licence="MIT", licences=("CC0", "MIT")
    )
    manifest = build([str(tmp_path / "a.jsonl")], tmp_path / "out", options, 1)
    assert manifest["removed"] == {"least_chars": 1, "least_letters": 1, "licence secret": 1}
    assert manifest["licences"] == {"CC0": 1, "MIT": 1}


@pytest.mark.skipif(not SHARED.is_dir(), reason="no corpora beside the repository")
def test_images_with_captions_and_proteins_become_samples(tmp_path: Path) -> None:
    build([str(SHARED / "image_text" / "emoji32.zip")], tmp_path / "e", BuildOptions("samples"), 1)
    images = open_samples(tmp_path / "e" / "train")
    with zipfile.ZipFile(SHARED / "image_text" / "emoji32.zip") as archive:
        png = [name for name in archive.namelist() if name.endswith(".png")]
        kept = {images.read(i).name: images.read(i).fields for i in range(len(images))}
        assert len(kept) == len(png) == 1581
        assert kept[png[7].removesuffix(".png")]["png"] == archive.read(png[7])
        rows = map(json.loads, archive.read("captions.jsonl").splitlines())
        captions = {row["file"]: row["caption"] for row in rows}
        assert kept[png[7].removesuffix(".png")]["caption"].decode() == captions[png[7]]
    photos = str(SHARED / "image_text" / "photos160.zip")
    manifest = build([photos], tmp_path / "f", BuildOptions("samples"), 1)
    assert manifest["train"]["documents"] == sum(manifest["licences"].values()) == 17
    assert "unknown" not in manifest["licences"]
    proteome = str(SHARED / "protein" / "proteome_938293.faa")
    manifest = build([proteome], tmp_path / "p", BuildOptions(dedup="none"), 1)
    assert manifest["train"]["documents"] == 2100
    assert texts_of(tmp_path / "p")[0][0] == "M"
    chains = str(SHARED / "protein" / "pdb_chains.jsonl")
    build([chains], tmp_path / "c", BuildOptions("samples"), 1)
    assert set(open_samples(tmp_path / "c" / "train").read(0).fields) >= {"sequence", "sse", "id"}


def test_frames_of_a_folder_belong_together_by_name(tmp_path: Path) -> None:
    clip = tmp_path / "in" / "clip"
    clip.mkdir(parents=True)
    for number in range(3):
        (clip / f"{number:04}.jpg").write_bytes(bytes([number]) * 50)
        (clip / f"{number:04}.json").write_text(json.dumps({"licence": "CC0", "frame": number}))
    manifest = build([str(tmp_path / "in")], tmp_path / "out", BuildOptions("samples"), 1)
    store = open_samples(tmp_path / "out" / "train")
    assert len(store) == 3
    assert dict(store.read(1).fields)["jpg"] == bytes([1]) * 50
    assert manifest["licences"] == {"CC0": 3}


def test_audio_with_what_is_said_of_it(tmp_path: Path) -> None:
    """As an AudioFolder with its metadata, and as the rows of a parquet file of Hugging Face."""
    folder = tmp_path / "speech"
    folder.mkdir()
    sounds = [wav(number) for number in range(3)]
    rows = [{"file_name": f"{n}.wav", "transcription": TEXTS[n]} for n in range(3)]
    for number, sound in enumerate(sounds):
        (folder / f"{number}.wav").write_bytes(sound)
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [folder]
    if arrow := pytest.importorskip("pyarrow"):
        audio = [{"bytes": sound, "path": f"{n}.wav"} for n, sound in enumerate(sounds)]
        table = arrow.table({"wav": audio, "transcription": TEXTS})
        sources.append(tmp_path / "speech.parquet")
        pytest.importorskip("pyarrow.parquet").write_table(table, sources[1])
    for source in sources:
        out = tmp_path / f"out-{source.name}"
        build([str(source)], out, BuildOptions("samples"), 1)
        store = open_samples(out / "train")
        found = [store.read(index).fields for index in range(len(store))]
        assert [fields["wav"] for fields in found] == sounds
        assert [fields["transcription"].decode() for fields in found] == TEXTS


def wav(number: int) -> bytes:
    stream = io.BytesIO()
    with wave.open(stream, "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(np.full(80, number, "<i2").tobytes())
    return stream.getvalue()


def test_a_flipped_bit_is_found_and_its_place_told(tmp_path: Path) -> None:
    write_folder(tmp_path / "in")
    for kind in ("tokens", "samples"):
        out = tmp_path / kind
        build([str(tmp_path / "in")], out, BuildOptions(kind), 1)
        content = bytearray((out / "train.bin").read_bytes())
        content[len(content) // 2] ^= 1
        (out / "train.bin").write_bytes(content)
        assert "train.bin: bytes 0 to" in next(faults(out))
    with pytest.raises(DataError, match="damaged"):
        for index in range(3):
            open_samples(tmp_path / "samples" / "train").read(index)


def test_other_faults_of_a_build_are_told(tmp_path: Path) -> None:
    write_folder(tmp_path / "in")
    out = tmp_path / "out"
    build([str(tmp_path / "in")], out, BuildOptions(), 1)
    (out / "train.idx").write_bytes((out / "train.idx").read_bytes()[:-1])
    assert any("the manifest tells" in fault for fault in faults(out))
    (out / "train.bin").unlink()
    assert any("is gone" in fault for fault in faults(out))
    with pytest.raises(DataError, match=r"no manifest\.json"):
        list(faults(tmp_path))


def test_stores_of_two_tokenizers_never_meet(tmp_path: Path) -> None:
    from meshwright.data.tokenizer import load_tokenizer

    write_folder(tmp_path / "in")
    write_tokenizer(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json").size == 257
    build([str(tmp_path / "in")], tmp_path / "a", BuildOptions(), 1)
    own = BuildOptions(tokenizer=str(tmp_path / "tokenizer.json"))
    build([str(tmp_path / "in")], tmp_path / "b", own, 1)
    assert len(open_together([tmp_path / "a", tmp_path / "a"], "train")) == 2
    with pytest.raises(DataError, match="ids of one mean nothing to the other"):
        open_together([tmp_path / "a", tmp_path / "b"], "train")
    with pytest.raises(DataError, match="has no tokens for held_out"):
        open_built(tmp_path / "a", "held_out")
    assert identity_of(tmp_path / "a") != identity_of(tmp_path / "b")


def write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=257,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    path.write_text(backend.to_str())


def test_inspect_says_what_is_there(tmp_path: Path) -> None:
    write_folder(tmp_path / "in")
    build([str(tmp_path / "in")], tmp_path / "out", BuildOptions(), 1)
    document = described(tmp_path / "out", 16)
    assert document["dtype"] == "uint16"
    assert document["packing"]["rows"] == -(-document["train"]["tokens"] // 17)
    assert document["document_tokens"]["most"] == max(map(len, TEXTS)) + 1


def prepare_damage(path: Path, what: str) -> tuple[str, BuildOptions]:
    options = BuildOptions()
    source = path / {
        "parquet": "a.parquet",
        "gz": "a.jsonl.gz",
        "tar": "a.tar",
        "zip": "a.zip",
        "fasta": "a.faa",
    }.get(what, "a.jsonl")
    if what == "mds":
        write_mds(path / "mds")
        shard = path / "mds" / "shard.00000.mds"
        shard.write_bytes(b"\xff" * shard.stat().st_size)
        source = path / "mds"
    elif what == "mds gone":
        write_mds(path / "mds")
        (path / "mds" / "shard.00000.mds").unlink()
        source = path / "mds"
    elif what == "row":
        source.write_text('{"text": "fine"}\n{"text": "torn\n')
    elif what == "key":
        write_jsonl(source)
        options = BuildOptions(keys=Keys("body"))
    elif what == "nothing":
        source.write_text("")
    elif what == "filtered":
        write_jsonl(source)
        options = BuildOptions(rules=Rules(least_chars=10**6))
    elif what == "gz":
        write_jsonl_gz(source)
        source.write_bytes(source.read_bytes()[:-20])
    elif what == "binary":
        source = path / "a.txt"
        source.write_bytes(b"a\0b")
    elif what == "splits":
        source = path / "hf"
        source.mkdir()
        (source / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    else:
        source.write_bytes(b"\x50\x4b garbage" * 100)
    return str(source), options


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("parquet", "damaged"),
        ("gz", "damaged"),
        ("tar", "damaged"),
        ("zip", "damaged"),
        ("fasta", "FASTA begins"),
        ("mds", "damaged"),
        ("mds gone", "is in the index of its data set but not there"),
        ("row", "byte 17"),
        ("key", "name the key with --text-key"),
        ("nothing", "is empty"),
        ("filtered", "no document is left for train .left out: 3 by least_chars"),
        ("binary", "is not text"),
        ("splits", "holds the splits train, test"),
        ("absent", "is empty|damaged|no such file"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(tmp_path: Path, what: str, words: str) -> None:
    if what == "parquet":
        pytest.importorskip("pyarrow")
    source, options = prepare_damage(tmp_path, what)
    if what == "absent":
        Path(source).unlink()
    with pytest.raises(MeshwrightError, match=words) as caught:
        build([source], tmp_path / "out", options, 1)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "write"),
    [("a.jsonl", write_jsonl), ("a.tar", write_tar), ("a.zip", write_zip), ("a.txt", write_jsonl)],
)
def test_what_vanishes_while_it_is_built_is_named(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    write(tmp_path / name)
    (unit,) = find_units([str(tmp_path / name)], "tokens")
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=rf"{name}: cannot be read: .*is it still there\?"):
        list(read_unit(unit, Keys()))


def test_a_text_that_grows_while_it_is_built_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text")
    (unit,) = find_units([str(path)], "tokens")
    path.write_text("some text and more")
    with pytest.raises(DataError, match=r"a\.txt: changed while it was being read; run again"):
        list(read_unit(unit, Keys()))


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"needs pyarrow; install meshwright\[data\]"):
        build([str(tmp_path / "a.parquet")], tmp_path / "out", BuildOptions(), 1)


def test_wrong_options() -> None:
    with pytest.raises(ConfigError, match="one of none, exact, minhash"):
        BuildOptions(dedup="fuzzy")
    with pytest.raises(ConfigError, match="share"):
        BuildOptions(held_out=1.0)
