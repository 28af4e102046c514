"""What a process says of the code that it samples by."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megadiff.process import versions


def test_the_digest_follows_what_samples_and_nothing_else(tmp_path: Path) -> None:
    package = tmp_path / "megadiff"
    shutil.copytree(versions.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    digest = versions.sources_digest(package)
    assert digest == versions.sources_digest(versions.PACKAGE)
    for name in ("report/charts.py", "algorithms/new.py"):
        (package / name).write_text("edited = True\n")
    assert versions.sources_digest(package) == digest

    for name in ("types.py", "models/rotary.py", "rollout/worker/new.py"):
        with (package / name).open("a") as file:
            file.write("edited = True\n")
        before = digest
        digest = versions.sources_digest(package)
        assert digest != before
    (package / "rollout/worker/new.py").rename(package / "rollout/worker/newer.py")
    assert versions.sources_digest(package) != digest


def test_a_process_is_of_the_code_that_it_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    versions.sampling_code.cache_clear()
    code = versions.sampling_code()
    assert code["megadiff"] == versions.sources_digest(versions.PACKAGE)
    assert list(code) == ["megadiff", "torch", "vllm-omni"]
    monkeypatch.setattr(versions, "sources_digest", lambda package: "another")
    assert versions.sampling_code() == code
