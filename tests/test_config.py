from __future__ import annotations

import os
from pathlib import Path

import pytest

from flashd.config import resolve, runtime_dir
from flashd.errors import ConfigError


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('model = "from-file"\nmax_sessions = 2\nmax_queue = 3\nthreads = 1\n')
    env = {"FLASHD_CONFIG": str(path), "FLASHD_MAX_SESSIONS": "5", "FLASHD_MAX_QUEUE": "6"}
    config = resolve({"max_sessions": 7, "max_queue": None}, env)
    assert (config.model, config.max_sessions, config.max_queue, config.threads) == (
        str(tmp_path / "from-file"), 7, 6, 1,
    )  # fmt: skip
    assert config.kv_dtype == "f16"


def test_the_file_is_found_in_the_configuration_directory(tmp_path: Path) -> None:
    (tmp_path / "flashd").mkdir()
    (tmp_path / "flashd" / "config.toml").write_text('model = "m"\n')
    assert resolve({}, {"XDG_CONFIG_HOME": str(tmp_path)}).model == str(tmp_path / "flashd" / "m")


@pytest.mark.parametrize(
    ("text", "env", "message"),
    [
        ("modle = 'x'", {}, "unknown key 'modle'"),
        ("model = ", {}, r"config\.toml: not valid TOML"),
        ("model = 3", {}, r"config\.toml: model is 3, expected a text"),
        ("threads = true", {}, "threads is True, expected a whole number"),
        ("threads = 1.5", {}, r"threads is 1\.5, expected a whole number"),
        ("", {}, "no model"),
        ("model = 'x'", {"FLASHD_THREADS": "many"}, "expected a whole number"),
        ("model = 'x'", {"FLASHD_MAX_SESSIONS": "0"}, "expected 1 to 16"),
        ("model = 'x'\nkv_dtype = 'int4'", {}, "expected one of: f16, f32"),
    ],
)
def test_a_wrong_setting_says_what_is_wrong(
    tmp_path: Path, text: str, env: dict[str, str], message: str
) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        resolve({}, {"FLASHD_CONFIG": str(path), **env})


def test_a_missing_file_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({}, {"FLASHD_CONFIG": str(tmp_path / "none.toml")})
    assert str(caught.value).count("none.toml") == 1


def test_a_missing_base_directory_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"):
        runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path / "nowhere")})
    assert not (tmp_path / "nowhere").exists()


def test_a_runtime_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert runtime_dir(env).stat().st_mode & 0o777 == 0o700
    os.chmod(tmp_path / "flashd", 0o777)
    with pytest.raises(ConfigError, match="private"):
        runtime_dir(env)


def test_a_runtime_directory_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "flashd").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="private"):
        runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)})
