"""``flashd bench kernels`` as a command: what it reports, what it refuses."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from support import flashd_command, flashd_env, lines_on_a_terminal

from flashd import kernels
from flashd.cli.main import main
from flashd.tools.bench.kernels import legend
from flashd.tools.bench.kernels.options import VERBS
from flashd.types import NUMPY_DTYPE

ROW_KEYS = {
    "verb", "dtype", "batch", "shape", "gb_per_s", "dram_ratio", "torch_ratio", "gflops", "peak_ratio",
}  # fmt: skip
WITH_TORCH = {"read_all", "gemv", "gemm", "attention", "rmsnorm", "layernorm", "to_f32", "from_f32"}
PROMPT = 16  # tokens; more are a prompt's


def flashd(folder: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        flashd_command("bench", "kernels", *args),
        env=flashd_env(folder) | environ,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A quick run of everything."""
    done = flashd(tmp_path_factory.mktemp("bench"), "--quick", "--json")
    assert done.returncode == 0, done.stderr
    assert "too short to quote" in done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_every_verb_and_type_has_a_row(report: dict[str, Any]) -> None:
    rows = report["rows"]
    assert all(row.keys() >= ROW_KEYS for row in rows)
    assert list(dict.fromkeys(row["verb"] for row in rows)) == list(VERBS)
    for verb in ("gemv", "gemm", "ffn_rows"):
        assert {row["dtype"] for row in rows if row["verb"] == verb} == {"f32", "f16", "bf16"}
    assert {row["batch"] for row in rows if row["verb"] == "gemv"} == {1, 4, 16}
    assert {row["dtype"] for row in rows if row["verb"] == "attention"} == {"f32", "f16"}
    cases = [(row["verb"], row["dtype"], row["batch"], row["shape"]) for row in rows]
    assert len(set(cases)) == len(cases)


def test_it_says_what_it_ran_on(report: dict[str, Any]) -> None:
    assert report["simd"] in kernels.available_simd()
    assert report["native"] is kernels.NATIVE
    assert report["threads"] == kernels.threads()
    assert (report["quick"], report["rounds"]) == (True, 1)
    assert report["memory_bytes"] == 64 << 20
    assert report["torch"]
    assert report["cpu"]


def test_figures_belong_together(report: dict[str, Any]) -> None:
    rows = report["rows"]
    for row in rows:
        assert row["gb_per_s"] > 0
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median_ms"] / 1e6, rel=0.1)
        (plain,) = row["rounds_dram_gb_per_s"]
        assert row["dram_ratio"] == (None if row["compute_bound"] else row["gb_per_s"] / plain)
        if row["torch_gb_per_s"] is None:
            assert row["torch_ratio"] is None
        else:
            assert row["torch_ratio"] == row["gb_per_s"] / row["torch_gb_per_s"]
        assert row["compute_bound"] == ((row["batch"] or 0) > PROMPT and row["gflops"] is not None)
        if row["gflops"] is not None and row["batch"] >= PROMPT:
            assert row["peak_ratio"] == pytest.approx(row["gflops"] / row["sgemm_gflops"])
        else:
            assert row["peak_ratio"] is None
    assert report["dram_gb_per_s"] == median(row["dram_gb_per_s"] for row in rows)
    assert report["sgemm_gflops"] == median(row["sgemm_gflops"] for row in rows if row["sgemm_gflops"])
    assert report["sgemm_shape"] == [128, 512, 512]
    (itself,) = (row for row in rows if row["verb"] == "read_all")
    assert 0.2 < itself["dram_ratio"] < 5


def test_torch_does_what_it_can(report: dict[str, Any]) -> None:
    for row in report["rows"]:
        dense = row["verb"] == "ffn_rows" and row["shape"].endswith(" 100%")
        assert (row["torch_ratio"] is not None) == (row["verb"] in WITH_TORCH or dense), row


def test_counted_bytes(report: dict[str, Any]) -> None:
    """Weights that must be read: all of a dense layer, and of an FFN what is listed and fires."""
    for row in report["rows"]:
        assert isinstance(row["bytes"], int)
        flops = (row["gflops"] or 0) * row["median_ms"] * 1e6
        if row["verb"] in ("gemv", "gemm"):
            n, k = map(int, row["shape"].split("x"))
            assert row["bytes"] == n * k * NUMPY_DTYPE[row["dtype"]].itemsize
            assert flops == pytest.approx(2 * n * k * row["batch"])
        if row["verb"] == "ffn_rows":
            size, kind, share = row["shape"].split()
            n, d = map(int, size.split("x"))
            listed = round(n * int(share[:-1]) / 100)
            row_bytes = listed * d * NUMPY_DTYPE[row["dtype"]].itemsize
            if kind == "gated":  # SiLU is never exactly 0
                assert row["bytes"] == 3 * row_bytes
                assert flops == pytest.approx(2 * 3 * listed * d * row["batch"])
            else:
                assert row_bytes < row["bytes"] <= 2 * row_bytes
                # Of up all, of down what fired: about half for each sequence, all for a prompt.
                least, most = (1.9, 2.001) if row["compute_bound"] else (1.25, 1.75)
                assert least <= flops / (2 * listed * d * row["batch"]) <= most
        if row["verb"] == "attention":
            heads, length = row["shape"].split(" of ")
            kv_heads, width = map(int, heads.split("/")[1].split("x"))
            assert row["bytes"] == 2 * kv_heads * width * int(length) * NUMPY_DTYPE[row["dtype"]].itemsize


def test_filters_threads_and_simd(tmp_path: Path) -> None:
    level = kernels.available_simd()[-1]
    cases = ("--verb", "gemv,crc32c", "--verb", "topk_union", "--dtype", "f16,f32", "--batch", "4")
    how = ("--quick", "--json", "--no-torch", "--threads", "1", "--rounds", "2")
    done = flashd(tmp_path, *how, *cases, FLASHD_SIMD=level)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["simd"], report["threads"], report["torch"]) == (level, 1, None)
    rows = report["rows"]
    assert {(row["verb"], row["dtype"], row["batch"]) for row in rows} == {
        ("gemv", "f32", 4),
        ("gemv", "f16", 4),
        ("topk_union", "f32", 4),
    }
    for row in rows:
        assert len(row["rounds_gb_per_s"]) == 2
        assert row["gb_per_s"] == median(row["rounds_gb_per_s"])
        pairs = zip(row["rounds_gb_per_s"], row["rounds_dram_gb_per_s"], strict=True)
        assert row["dram_ratio"] == median(own / plain for own, plain in pairs)
        assert (row["torch_gb_per_s"], row["torch_ratio"], row["rounds_torch_gb_per_s"]) == (None, None, [])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--verb", "gemv,gemw"), f"unknown verb 'gemw'; known: {', '.join(VERBS)}"),
        (("--dtype", "f64"), "unknown dtype 'f64'; known: f32, f16, bf16, u8"),
        (("--verb", "gemv,ffn_dots"), "ffn_dots and ffn_down are measured together as ffn_rows"),
        (("--batch", "one"), "--batch is 'one', expected a number"),
        (("--batch", "1,"), "--batch has an empty item: '1,'"),
        (("--batch", "256", "--quick"), "has batch 256; batches are 1, 4, 16, 32"),
        (("--batch", "3", "--verb", "topk_union"), "has batch 3; batches are 1, 4"),
        (("--batch", "0"), "batch is 0, expected at least 1"),
        (("--rounds", "0"), "rounds is 0, expected 1 to 1000"),
        (("--threads", "257"), "threads is 257, expected 1 to 256"),
        (("--verb", "rope", "--dtype", "f16", "--batch", "3"), "no case of rope has dtype f16 and batch 3"),
    ],
)
def test_wrong_arguments_name_what_is_expected(
    args: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["flashd", "bench", "kernels", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert said in line


def test_without_torch_the_column_is_empty(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from flashd.cli.main import main; "
        "sys.argv = ['flashd', *'bench kernels --quick --verb gemv,gemm --dtype f32'.split()]; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=flashd_env(tmp_path), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "torch: it is not installed; nothing to compare with" in done.stderr
    header, *rows = (line.split("\t") for line in done.stdout.splitlines() if "\t" in line)
    shown = [dict(zip(header, row, strict=True)) for row in rows]
    assert {row["VERB"] for row in shown} == {"gemv", "gemm"}
    assert {row["xTORCH"] for row in shown} == {"-"}
    assert all((row["/SGEMM"] == "-") == (int(row["BATCH"]) < PROMPT) for row in shown)
    assert all((row["/DRAM"] == "-") == (row["VERB"] == "gemm") for row in shown)
    assert "float32 matrix product [128,512] x [512,512]" in done.stdout
    assert "of NumPy" in done.stdout
    assert "SHAPE: gemv, gemm: n x k of weights\n" in done.stdout


def test_help_names_all_that_the_report_has(
    report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["flashd", "bench", "kernels", "--help"])
    with pytest.raises(SystemExit):
        main()
    words = set(re.findall(r"\w+", capsys.readouterr().out))
    assert words >= {*report, *report["rows"][0], *VERBS, *kernels.available_simd()} - {"numpy"}
    assert {name for names, _, _ in legend.SHAPES for name in names} == set(VERBS)


def test_no_other_command_imports_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from flashd.cli.main import app; import flashd.tools.bench.kernels.run; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], env=flashd_env(tmp_path), check=True, timeout=60)


def test_a_terminal_of_80_columns_is_enough(tmp_path: Path) -> None:
    args = ("--quick", "--no-torch", "--verb", "ffn_rows,attention,topk_union")
    lines = lines_on_a_terminal(80, tmp_path, "bench", "kernels", *args)
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("ffn_rows    bf16 ") for line in lines)
    assert any(f"SIMD level {kernels.simd_level()}" in line for line in lines)


def test_ctrl_c_ends_with_130(tmp_path: Path) -> None:
    command = flashd_command("bench", "kernels", "--quick", "--no-torch", "--rounds", "1000")
    with subprocess.Popen(command, env=flashd_env(tmp_path), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "measuring" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130, rest
    assert "error" not in rest
