"""Check the pinned packages: against each other, and with --index against a package index.

launch/lock.json holds what the wheels of the pins say of themselves; launch/refresh_lock.py writes
it. Every pin is installed without a resolver, so a requirement of a package that the pins do not
meet goes unseen by pip: each of these is in launch/accepted.toml with the reason why it is safe.

    .venv/bin/python launch/check_lock.py            # needs no network
    .venv/bin/python launch/check_lock.py --index    # does every pin exist, with the same bits?
"""

import argparse
import json
import re
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

LAUNCH = Path(__file__).parent


@dataclass(frozen=True)
class PackageSet:
    """What is installed together, and where.

    files: of launch/, each with one pin a line.
    pythons: the oldest and the newest that launch/setup.sh takes.
    extras: by package; their requirements are checked as well, though nobody asks for them.
    """

    files: tuple[str, ...]
    pythons: tuple[str, str]
    extras: dict[str, set[str]] = field(default_factory=dict)


SETS = {
    "cpu": PackageSet(("requirements-cpu.txt",), ("3.11.5", "3.12")),
    "gpu": PackageSet(
        ("requirements-gpu.txt", "requirements-te.txt"),
        ("3.12", "3.12"),
        # The versions that VeOmni is developed with on GPUs.
        {"veomni": {"gpu"}},
    ),
}


def read_pins(names: tuple[str, ...], folder: Path = LAUNCH) -> dict[str, str]:
    """Return the version of every package that the files pin, by its canonical name.

    Raises ValueError for a line that is no pin, and for a package that is pinned twice.
    """
    pins: dict[str, str] = {}
    for name in names:
        for number, line in enumerate((folder / name).read_text().splitlines(), 1):
            text = line.partition("#")[0].strip()
            if not text:
                continue
            pin = re.fullmatch(r"([\w.-]+)==([\w.!+]+)", text)
            if pin is None:
                raise ValueError(f"{name}:{number}: '{text}' is not PACKAGE==VERSION")
            package = canonicalize_name(pin[1])
            if package in pins:
                raise ValueError(f"{name}:{number}: {package} is pinned twice; delete one line")
            pins[package] = pin[2]
    return pins


def read_lock(folder: Path = LAUNCH) -> dict[str, dict[str, Any]]:
    """Return the locked packages of every set, by their canonical names."""
    return json.loads((folder / "lock.json").read_text())


def read_accepted(set_name: str, folder: Path = LAUNCH) -> dict[str, str]:
    """Return the violations that are accepted for a set, with their reasons."""
    entries = tomllib.loads((folder / "accepted.toml").read_text())["accepted"]
    accepted: dict[str, str] = {}
    for entry in entries:
        if set_name in entry["sets"]:
            for violation in entry["violations"]:
                accepted[violation] = entry["reason"]
    return accepted


def disagreements(pins: dict[str, str], locked: dict[str, Any]) -> list[str]:
    """Return how the requirement files and the lock differ."""
    lines = []
    for package in sorted(pins.keys() | locked.keys()):
        pin = pins.get(package)
        entry = locked.get(package)
        if entry is None:
            lines.append(f"{package}=={pin} is pinned, but not in lock.json")
        elif pin is None:
            lines.append(f"{package} {entry['version']} is in lock.json, but pinned nowhere")
        elif Version(entry["version"]) not in SpecifierSet(f"=={pin}"):
            lines.append(f"{package} is pinned to {pin}, but lock.json has {entry['version']}")
    return lines


def violations(pins: dict[str, str], locked: dict[str, Any]) -> dict[str, str]:
    """Return each requirement that the pins do not meet, with what is pinned instead."""
    unmet = {}
    for package, entry in locked.items():
        for text in entry["requires"]:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            pin = pins.get(name)
            if pin is None:
                unmet[f"{package}: {name}{requirement.specifier}"] = "is not in the list"
                continue
            version = locked.get(name, {}).get("version", pin)
            if Version(version).public != Version(pin).public:
                version = pin
            if not requirement.specifier.contains(version, prereleases=True):
                unmet[f"{package}: {name}{requirement.specifier}"] = f"is pinned to {pin}"
    return unmet


def unfit_pythons(package_set: PackageSet, locked: dict[str, Any]) -> list[str]:
    """Return the packages that do not run on every Python that launch/setup.sh takes."""
    lines = []
    for package, entry in locked.items():
        bound = SpecifierSet(entry.get("python", ""))
        for python in package_set.pythons:
            if not bound.contains(python):
                lines.append(f"{package} needs Python {bound}, but launch/setup.sh takes {python}")
    return lines


def problems(set_name: str, folder: Path = LAUNCH) -> list[str]:
    """Return what is wrong with a set's pins, as far as the lock says."""
    package_set = SETS[set_name]
    pins = read_pins(package_set.files, folder)
    locked = read_lock(folder)[set_name]
    accepted = read_accepted(set_name, folder)
    unmet = violations(pins, locked)

    lines = [f"{line}; run launch/refresh_lock.py" for line in disagreements(pins, locked)]
    lines += unfit_pythons(package_set, locked)
    for violation, instead in unmet.items():
        if violation not in accepted:
            name = re.split(r"[^\w.-]", violation.partition(": ")[2])[0]
            lines.append(
                f"{violation}, but {name} {instead}; change a pin, or accept it in accepted.toml"
            )
    for violation in sorted(accepted.keys() - unmet.keys()):
        lines.append(f"{violation} is accepted, but not violated; delete it from accepted.toml")
    return [f"{set_name}: {line}" for line in lines]


def main() -> int:
    """Check all sets. Returns 1 when something is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--index", action="store_true", help="ask a package index as well")
    index = parser.parse_args().index
    lines = []
    for set_name in SETS:
        lines += problems(set_name)
        if index:
            # It needs uv and a network, which the check of the lock must not.
            from refresh_lock import differences

            lines += differences(set_name)
    for line in lines:
        sys.stderr.write(f"{line}\n")
    if not lines:
        sys.stdout.write("lock: pins, lock.json and accepted.toml agree\n")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
