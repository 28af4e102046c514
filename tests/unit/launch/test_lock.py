"""The pins fit each other and exist: launch/check_lock.py, on the lock and on an index."""

import hashlib
import json
import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

LAUNCH = Path(__file__).parents[3] / "launch"
SETS = ("cpu", "gpu")


@pytest.fixture
def check_lock(monkeypatch):
    """The script as a module; its neighbours can be imported as well."""
    monkeypatch.syspath_prepend(str(LAUNCH))
    import check_lock

    yield check_lock
    for name in ("check_lock", "refresh_lock", "uv_install"):
        sys.modules.pop(name, None)


@pytest.fixture
def folder(tmp_path):
    """A copy of launch/ whose files a test may change."""
    shutil.copytree(LAUNCH, tmp_path / "launch")
    return tmp_path / "launch"


def change_pin(folder: Path, name: str, old: str, new: str) -> None:
    """Change a pin in the requirements and in the lock, as refresh_lock.py would."""
    path = folder / f"requirements-{name}.txt"
    assert f"\n{old}\n" in path.read_text()
    path.write_text(path.read_text().replace(f"\n{old}\n", f"\n{new}\n"))
    package, _, version = new.partition("==")
    lock = json.loads((folder / "lock.json").read_text())
    lock[name][package]["version"] = version
    (folder / "lock.json").write_text(json.dumps(lock))


@pytest.mark.parametrize("name", SETS)
def test_pins_meet_what_the_packages_require(check_lock, name):
    assert check_lock.problems(name) == []


def test_a_pin_that_violates_a_requirement_is_named_with_both(check_lock, folder):
    change_pin(folder, "cpu", "tokenizers==0.22.2", "tokenizers==0.1.0")
    (line, *_) = [line for line in check_lock.problems("cpu", folder) if "transformers: " in line]
    assert "tokenizers is pinned to 0.1.0" in line
    assert "accepted.toml" in line


def test_a_required_package_that_is_not_pinned_is_named(check_lock, folder):
    path = folder / "requirements-gpu.txt"
    path.write_text(path.read_text().replace("\ncwevals==0.0.1b1\n", "\n"))
    lines = check_lock.problems("gpu", folder)
    assert any("wandb: cwevals==0.0.1b1, but cwevals is not in the list" in line for line in lines)
    assert any("cwevals 0.0.1b1 is in lock.json, but pinned nowhere" in line for line in lines)


def test_an_accepted_violation_must_still_be_one(check_lock, folder):
    change_pin(folder, "gpu", "packaging==26.3", "packaging==25.0")
    (line,) = check_lock.problems("gpu", folder)
    assert "veomni: packaging<26.0,>=23.0 is accepted, but not violated" in line


def test_the_lock_must_be_refreshed_after_a_change(check_lock, folder):
    path = folder / "requirements-cpu.txt"
    path.write_text(path.read_text().replace("\nzipp==4.1.2\n", "\nzipp==4.1.1\n"))
    (line,) = check_lock.problems("cpu", folder)
    assert "zipp is pinned to 4.1.1, but lock.json has 4.1.2; run launch/refresh_lock.py" in line


def test_every_pin_runs_on_every_python_that_setup_takes(check_lock, folder):
    lock = json.loads((folder / "lock.json").read_text())
    lock["cpu"]["zipp"]["python"] = ">=3.12"
    (folder / "lock.json").write_text(json.dumps(lock))
    assert check_lock.problems("cpu", folder) == [
        "cpu: zipp needs Python >=3.12, but launch/setup.sh takes 3.11.5"
    ]


def test_setup_takes_the_pythons_that_are_checked(check_lock):
    oldest = {}
    for name, package_set in check_lock.SETS.items():
        oldest[name] = ", ".join(package_set.pythons[0].split("."))
    text = f'declare -A OLDEST=([cpu]="{oldest["cpu"]}" [gpu]="{oldest["gpu"]}")'
    assert text in (LAUNCH / "setup.sh").read_text()


def test_every_locked_file_has_its_hash(check_lock):
    for name, locked in check_lock.read_lock().items():
        for package, entry in locked.items():
            assert len(bytes.fromhex(entry["sha256"])) == 32, f"{name}: {package}"


@pytest.mark.parametrize("line", ["zipp>=4", "zipp", "zipp==4.1.2\nzipp==4.1.2"])
def test_a_line_that_is_no_pin_is_refused(check_lock, folder, line):
    (folder / "requirements-te.txt").write_text(line)
    with pytest.raises(ValueError, match="requirements-te.txt:"):
        check_lock.read_pins(("requirements-te.txt",), folder)


def test_a_requirement_of_an_extra_counts_where_somebody_asks_for_it(check_lock):
    import refresh_lock

    texts = {
        "a": ["b[fast]", "c; python_version < '3.12'"],
        "b": ["d[deep]; extra == 'fast'", "e; extra == 'slow'"],
        "d": ["f>=1; extra == 'deep'"],
    }
    active = refresh_lock.active_requirements(texts, {}, refresh_lock.environment_of("3.12"))
    assert active == {"a": ["b"], "b": ["d"], "d": ["f>=1"]}
    asked = refresh_lock.active_requirements(
        texts, {"b": {"slow"}}, refresh_lock.environment_of("3.11.5")
    )
    assert asked["a"] == ["b", "c"]
    assert asked["b"] == ["d", "e"]
    assert Requirement(asked["d"][0]).name == "f"


@pytest.mark.parametrize("name", SETS)
def test_every_pin_exists_for_its_platform(check_lock, name):
    """Skipped without a package index; launch/check_lock.py --index is the same, by hand."""
    from refresh_lock import NoIndexError, differences

    try:
        lines = differences(name, timeout_s=20)
    except NoIndexError as error:
        pytest.skip(f"no package index: {str(error)[:200]}")
    assert lines == []


@pytest.fixture
def local_index(check_lock, tmp_path, monkeypatch):
    """A package index in a folder, with one wheel; a set of packages, and a lock of it."""
    import refresh_lock

    wheels = tmp_path / "wheels"
    wheels.mkdir()
    metadata = "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\nRequires-Dist: other>=2\n"
    with zipfile.ZipFile(wheels / "demo-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("demo-1.0.dist-info/METADATA", metadata)
        wheel.writestr("demo-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("demo-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(refresh_lock, "LAUNCH", tmp_path)
    (tmp_path / "demo.txt").write_text("demo==1.0\n")
    package_set = check_lock.PackageSet(("demo.txt",), ("3.12", "3.12"))
    monkeypatch.setitem(check_lock.SETS, "demo", package_set)
    locked = refresh_lock.lock_set(package_set, refresh_lock.Client(None))
    monkeypatch.setattr(check_lock, "read_lock", lambda: {"demo": locked})
    return tmp_path, locked


def test_the_lock_has_what_the_wheel_says(local_index):
    folder, locked = local_index
    data = (folder / "wheels/demo-1.0-py3-none-any.whl").read_bytes()
    assert locked["demo"]["sha256"] == hashlib.sha256(data).hexdigest()
    assert locked["demo"]["requires"] == ["other>=2"]


def test_a_pin_that_no_index_has_is_named(local_index):
    from refresh_lock import differences

    folder, _ = local_index
    assert differences("demo") == []
    (folder / "demo.txt").write_text("demo==1.1\n")
    (line,) = differences("demo")
    assert "demo==1.1" in line


def test_other_bits_of_the_same_name_are_named(local_index):
    from refresh_lock import differences

    _, locked = local_index
    locked["demo"]["sha256"] = "0" * 64
    (line,) = differences("demo")
    assert "demo-1.0-py3-none-any.whl has sha256" in line


def test_an_index_that_does_not_answer_is_no_verdict(local_index, monkeypatch):
    from refresh_lock import NoIndexError, differences

    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    monkeypatch.setenv("UV_NO_CACHE", "1")
    with pytest.raises(NoIndexError):
        differences("demo")
