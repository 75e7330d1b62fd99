"""Killed, interrupted, out of space, run twice: the bundle appears whole or not at all."""

from __future__ import annotations

import json
import os
import random
import signal
import time

import numpy as np
import pytest

from flashd.errors import ConversionError, OutOfSpaceError
from flashd.testing.tiny_checkpoints import write_llama, write_opt
from flashd.tools.convert import ConvertOptions, convert
from flashd.tools.convert.files import write_errors

SIZES = {
    "hidden_size": 256,
    "word_embed_proj_dim": 256,
    "ffn_dim": 1024,
    "num_hidden_layers": 6,
    "vocab_size": 8000,
}

# Commits after each tensor and each layer, and slows down, so that kills hit every phase.
SLOW = """
import time
from flashd.tools.convert import run
run._COMMIT_BYTES = 1
def progress(p):
    print(p.phase, p.done_bytes, p.total_bytes, flush=True)
    time.sleep(0.004)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_opt(tmp_path_factory.mktemp("resume") / "src", **SIZES)


@pytest.fixture(scope="module", params=["file", "zarr"])
def expected(request, source, tmp_path_factory):
    """Store kind and the files of an undisturbed conversion."""
    dest = tmp_path_factory.mktemp("expected") / "dst"
    manifest = convert(source, dest, ConvertOptions(store=request.param))
    return request.param, {entry.name: entry for entry in manifest.files}


@pytest.mark.slow
def test_ten_kills_then_the_rerun_finishes(tmp_path, source, expected, bundle, start_convert):
    store, files = expected
    rng = random.Random(f"kill {store}")
    phases, resumed = set(), 0
    for _ in range(10):
        process = start_convert(source, tmp_path / "dst", body=SLOW, store=store)
        stop_after = rng.randrange(0, 90)
        lines = []
        for line in process.stdout:
            lines.append(line.split())
            if len(lines) > stop_after:
                break
        time.sleep(rng.random() * 0.01)
        process.kill()
        process.communicate()
        phases |= {line[0] for line in lines}
        resumed += bool(lines) and int(lines[0][1]) > 0 and lines[0][0] == "resume"
        left = sorted(path.name for path in tmp_path.iterdir())
        if left == ["dst"]:  # it was faster than the signal
            bundle(tmp_path / "dst")
            break
        assert left == ["dst.partial"]
        assert not (tmp_path / "dst").exists()
    process = start_convert(source, tmp_path / "dst", store=store, overwrite=True)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
    found = bundle(tmp_path / "dst")
    assert {entry.name: entry for entry in found.manifest.files} == files
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]
    assert {"resident", "ffn"} <= phases
    assert resumed >= 3


@pytest.mark.parametrize("stop_at", ["resident", "ffn", "finish"])
def test_each_phase_resumes_without_doing_it_again(tmp_path, source, expected, bundle, monkeypatch, stop_at):
    store, files = expected
    monkeypatch.setattr("flashd.tools.convert.run._COMMIT_BYTES", 1)

    def stop(progress):
        half = progress.done_bytes > 0.6 * progress.total_bytes
        if progress.phase == stop_at and (stop_at != "ffn" or half):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "dst", ConvertOptions(store=store), stop)
    if stop_at == "resident" and not (tmp_path / "dst.partial").exists():
        return  # the very first tensor: nothing was durable, nothing is left
    durable = json.loads((tmp_path / "dst.partial/progress.json").read_text())
    if stop_at != "resident":
        assert durable["layers"] >= (1 if stop_at == "ffn" else 6)
    reads = []
    from flashd.tools.convert.sources.safetensors import SafetensorsSource

    real = SafetensorsSource.read_rows
    monkeypatch.setattr(
        SafetensorsSource, "read_rows", lambda self, name, *at: (reads.append(name), real(self, name, *at))[1]
    )
    convert(source, tmp_path / "dst", ConvertOptions(store=store), note=lambda line: pytest.fail(line))
    assert {entry.name: entry for entry in bundle(tmp_path / "dst").manifest.files} == files
    done = {f"model.decoder.layers.{layer}.fc1.weight" for layer in range(durable["layers"])}
    assert not done & set(reads)
    assert len({name for name in reads if "fc1.weight" in name}) == 6 - durable["layers"]
    if durable["layers"]:
        assert "model.decoder.embed_tokens.weight" not in reads


def test_killed_between_manifest_and_rename(tmp_path, source, expected, bundle, monkeypatch):
    store, files = expected
    from pathlib import Path

    def refuse(self, target):
        if self.name == "dst.partial":
            raise KeyboardInterrupt
        return real(self, target)

    real = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "dst", ConvertOptions(store=store))
    assert [path.name for path in tmp_path.iterdir()] == ["dst.partial"]
    inode = (tmp_path / "dst.partial/resident.safetensors").stat().st_ino
    convert(source, tmp_path / "dst", ConvertOptions(store=store))
    assert {entry.name: entry for entry in bundle(tmp_path / "dst").manifest.files} == files
    assert (tmp_path / "dst/resident.safetensors").stat().st_ino == inode


def stopped(source, dest, monkeypatch, **options):
    """A partial directory with some layers in it."""
    with monkeypatch.context() as patch:
        patch.setattr("flashd.tools.convert.run._COMMIT_BYTES", 1)

        def stop(progress):
            if progress.phase == "ffn" and progress.done_bytes > 0.6 * progress.total_bytes:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(source, dest, ConvertOptions(**options), stop)
    assert dest.with_name(dest.name + ".partial").is_dir()


@pytest.mark.parametrize("options", [{"dtype": "bf16"}, {"store": "zarr"}, {}])
def test_other_options_or_another_source_start_anew(tmp_path, bundle, monkeypatch, options):
    src = write_opt(tmp_path / "src", **SIZES)
    stopped(src, tmp_path / "dst", monkeypatch)
    if not options:
        write_opt(src, seed=1, **SIZES)  # same sizes, another time stamp
    notes = []
    convert(src, tmp_path / "dst", ConvertOptions(**options), note=notes.append)
    assert len(notes) == 1
    assert notes[0].startswith(f"{tmp_path}/dst.partial: what an earlier conversion left was made with other")
    found = bundle(tmp_path / "dst").manifest
    convert(src, tmp_path / "fresh", ConvertOptions(**options))
    assert found == bundle(tmp_path / "fresh").manifest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "fresh", "src"]


@pytest.mark.parametrize("damage", ["short", "progress", "gone"])
def test_a_damaged_partial_directory_starts_anew(tmp_path, source, expected, bundle, monkeypatch, damage):
    store, files = expected
    stopped(source, tmp_path / "dst", monkeypatch, store=store)
    partial = tmp_path / "dst.partial"
    victim = next(partial.rglob("c/0/0")) if store == "zarr" else partial / "ffn.bundle"
    if damage == "short":
        os.truncate(victim, 100)
    elif damage == "gone":
        victim.unlink()
    else:
        (partial / "progress.json").write_text('{"fingerprint": 1')
    convert(source, tmp_path / "dst", ConvertOptions(store=store))
    assert {entry.name: entry for entry in bundle(tmp_path / "dst").manifest.files} == files


def test_sigint_leaves_a_resumable_partial(tmp_path, source, expected, bundle, start_convert):
    store, files = expected
    process = start_convert(source, tmp_path / "dst", body=SLOW, store=store)
    for line in process.stdout:
        if line.startswith("ffn"):
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert [path.name for path in tmp_path.iterdir()] == ["dst.partial"]
    convert(source, tmp_path / "dst", ConvertOptions(store=store))
    assert {entry.name: entry for entry in bundle(tmp_path / "dst").manifest.files} == files


def test_two_conversions_of_one_destination(tmp_path, source, bundle, start_convert):
    process = start_convert(source, tmp_path / "dst", body=SLOW)
    assert process.stdout.readline()
    with pytest.raises(ConversionError, match=r"dst\.partial: another conversion is writing there; wait"):
        convert(source, tmp_path / "dst")
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0
    bundle(tmp_path / "dst")


def test_many_at_once_make_one_bundle(tmp_path, source, bundle, start_convert):
    processes = [start_convert(source, tmp_path / "dst") for _ in range(4)]
    results = [(process.communicate(timeout=60), process.returncode) for process in processes]
    assert sum(code == 0 for _, code in results) == 1
    for (out, err), code in results:
        assert err == ""
        assert code == 0 or "another conversion" in out or "exists" in out
    bundle(tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]


def test_existing_destination_needs_overwrite(tmp_path, source, bundle):
    convert(source, tmp_path / "dst", ConvertOptions(dtype="bf16"))
    before = (tmp_path / "dst/manifest.json").read_bytes()
    with pytest.raises(
        ConversionError, match="dst: exists; choose another place, or replace it with --overwrite"
    ):
        convert(source, tmp_path / "dst")
    assert (tmp_path / "dst/manifest.json").read_bytes() == before
    (tmp_path / "dst/calibration.json").write_text("{}")
    (tmp_path / "dst/predictors.safetensors").write_text("old")
    seen = []

    def still_there(_):
        seen.append((tmp_path / "dst/manifest.json").read_bytes() == before)

    convert(source, tmp_path / "dst", ConvertOptions(overwrite=True), still_there)
    assert seen
    assert all(seen)
    assert bundle(tmp_path / "dst").manifest.dtype == "f32"
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]


def test_overwrite_where_directories_cannot_be_swapped(tmp_path, source, bundle, monkeypatch):
    monkeypatch.setattr("flashd.tools.convert.destination._exchange", lambda *_: False)
    convert(source, tmp_path / "dst", ConvertOptions(dtype="bf16"))
    convert(source, tmp_path / "dst", ConvertOptions(overwrite=True))
    assert bundle(tmp_path / "dst").manifest.dtype == "f32"
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]


def test_overwrite_spares_what_is_no_bundle(tmp_path, source):
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst/thesis.txt").write_text("years of work")
    with pytest.raises(ConversionError, match="exists and is no flashd bundle, so it is not replaced"):
        convert(source, tmp_path / "dst", ConvertOptions(overwrite=True))
    assert (tmp_path / "dst/thesis.txt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]


@pytest.mark.parametrize("name", ["notes.txt", "ffn.zarr/notes.txt", "ffn.zarr/layers/0/c/0/1"])
@pytest.mark.parametrize("swap", [True, False])
def test_overwrite_spares_what_is_not_the_bundles(tmp_path, source, bundle, monkeypatch, name, swap):
    if not swap:
        monkeypatch.setattr("flashd.tools.convert.destination._exchange", lambda *_: False)
    convert(source, tmp_path / "dst", ConvertOptions(store="zarr", dtype="bf16"))
    (tmp_path / "dst" / name).write_text("years of work")
    with pytest.raises(ConversionError, match=f"dst: holds '{name}', which is no file of a bundle, so it is"):
        convert(source, tmp_path / "dst", ConvertOptions(overwrite=True))
    assert (tmp_path / "dst" / name).read_text() == "years of work"
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]
    (tmp_path / "dst" / name).unlink()
    convert(source, tmp_path / "dst", ConvertOptions(overwrite=True))
    assert bundle(tmp_path / "dst").manifest.dtype == "f32"


def test_a_file_that_appears_in_the_old_bundle_meanwhile(tmp_path, source):
    convert(source, tmp_path / "dst")

    def write(_):
        (tmp_path / "dst/notes.txt").write_text("years of work")

    with pytest.raises(ConversionError, match=r"dst: holds 'notes\.txt'"):
        convert(source, tmp_path / "dst", ConvertOptions(dtype="bf16", overwrite=True), write)
    assert (tmp_path / "dst/notes.txt").exists()


def test_what_has_the_name_of_a_bundle_put_aside_is_spared(tmp_path, source, bundle):
    aside = tmp_path / ".dst.replaced"
    aside.mkdir()
    (aside / "thesis.txt").write_text("years of work")
    convert(source, tmp_path / "dst")
    assert (aside / "thesis.txt").exists()
    with pytest.raises(ConversionError, match=r"\.dst\.replaced: exists and is no flashd bundle"):
        convert(source, tmp_path / "dst", ConvertOptions(overwrite=True))
    assert (aside / "thesis.txt").exists()
    bundle(tmp_path / "dst")


def test_partial_with_somebody_elses_files(tmp_path, source):
    (tmp_path / "dst.partial").mkdir()
    (tmp_path / "dst.partial/thesis.txt").write_text("years of work")
    with pytest.raises(
        ConversionError, match=r"holds 'thesis\.txt', which is no file of a bundle; move it away"
    ):
        convert(source, tmp_path / "dst")
    assert (tmp_path / "dst.partial/thesis.txt").exists()


def test_destination_through_a_symlink(tmp_path, source, bundle):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    convert(source, tmp_path / "link/dst")
    bundle(tmp_path / "real/dst")


@pytest.mark.parametrize("share", [0.02, 0.3, 0.8])
def test_out_of_space_while_writing_then_resumed(tmp_path, source, expected, bundle, start_convert, share):
    """A file size limit stands in for a full disk: the kernel stops the write in the middle."""
    store, files = expected
    biggest = max(entry.size_bytes for entry in files.values())
    limit = int(biggest * share)
    body = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n" + SLOW
    process = start_convert(source, tmp_path / "dst", body=body, store=store)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "")
    last = out.splitlines()[-1]
    assert last.startswith("OutOfSpaceError: ")
    assert "ulimit -f" in last
    assert "run the same command again, it resumes" in last
    assert not (tmp_path / "dst").exists()
    convert(source, tmp_path / "dst", ConvertOptions(store=store))
    assert {entry.name: entry for entry in bundle(tmp_path / "dst").manifest.files} == files
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]


def test_a_full_device_says_so(tmp_path):
    with (
        pytest.raises(OutOfSpaceError, match=r"dst: no space left on the disk; free some space"),
        write_errors(tmp_path / "dst"),
        open("/dev/full", "wb", buffering=0) as file,
    ):
        file.write(b"x")


def test_taken_while_another_process_finished(tmp_path, source, monkeypatch):
    """The place is free when first looked at and taken once the lock is held: nothing stays."""
    from flashd.tools.convert.destination import Destination

    real = Destination._lock

    def lock_late(self):
        real(self)
        (tmp_path / "dst").mkdir()

    monkeypatch.setattr(Destination, "_lock", lock_late)
    with pytest.raises(ConversionError, match="dst: exists"):
        convert(source, tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]


def test_zarr_resumes_after_many_layers(tmp_path, bundle, monkeypatch):
    src = write_llama(tmp_path / "src", num_hidden_layers=9)
    convert(src, tmp_path / "whole", ConvertOptions(store="zarr"))
    stopped(src, tmp_path / "dst", monkeypatch, store="zarr")
    convert(src, tmp_path / "dst", ConvertOptions(store="zarr"))
    one, other = bundle(tmp_path / "whole"), bundle(tmp_path / "dst")
    assert np.array_equal(one.rows, other.rows)
    assert one.manifest == other.manifest
