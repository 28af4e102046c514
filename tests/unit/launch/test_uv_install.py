"""Packages come from where pip's configuration says, whichever program installs them."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = runpy.run_path(str(ROOT / "launch/uv_install.py"))
PYPI = "https://pypi.org/simple"
ALWAYS = ["--index-strategy", "unsafe-best-match", "--system-certs"]


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, []),
        ({"index-url": "https://a/simple"}, ["--default-index", "https://a/simple"]),
        (
            {"extra-index-url": "https://a https://b"},
            ["--index", PYPI, "--index", "https://a", "--index", "https://b"],
        ),
        (
            {"index-url": "https://main", "extra-index-url": "https://a"},
            ["--index", "https://main", "--default-index", "https://main", "--index", "https://a"],
        ),
        ({"find-links": "/wheels", "timeout": "180"}, ["--find-links", "/wheels"]),
        ({"cert": "/a b.pem"}, ["--cert", "/a b.pem"]),
        ({"no-index": "1", "trusted-host": "a"}, ["--allow-insecure-host", "a", "--no-index"]),
        ({"no-index": "false"}, []),
    ],
)
def test_a_setting_of_pip_is_an_option_of_uv(settings, options):
    assert SCRIPT["options_of"](settings) == [*ALWAYS, *options]


def test_an_environment_variable_overrules_a_section_and_that_the_file(monkeypatch, tmp_path):
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://global\nextra-index-url = https://a\n    https://b\n"
        "find-links = /global\n[install]\nindex-url = https://install\nfind-links = /install\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_FIND_LINKS", "/environment")
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    settings = SCRIPT["pip_settings"]()
    assert settings["index-url"] == "https://install"
    assert settings["extra-index-url"].split() == ["https://a", "https://b"]
    assert settings["find-links"] == "/environment"


@pytest.mark.parametrize("lock", ["cpu", "gpu"])
def test_both_locks_pin_uv(lock):
    assert "\nuv==" in (ROOT / f"launch/requirements-{lock}.txt").read_text()
