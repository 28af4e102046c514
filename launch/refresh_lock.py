"""Write launch/lock.json: name, version, file, hash and requirements of every pinned package.

    .venv/bin/python launch/refresh_lock.py          # after a change of launch/requirements-*.txt

The index is the one of pip's configuration, as for launch/setup.sh. It needs no GPU: uv chooses
the files for each set's platform, and their METADATA is read without a download of the rest. torch
of the CPU set is what that index has; the lock in git has PyTorch's CPU wheel.
"""

import email.parser
import io
import json
import re
import ssl
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import check_lock
import httpx
import uv_install
from check_lock import LAUNCH, SETS, PackageSet
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

# Some wheels need a C library as new as this: Ubuntu 22.04, Debian 12, RHEL 9.
GLIBC_MINOR = 34
# Transformer Engine's bindings have no wheel: launch/setup.sh compiles them.
WITHOUT_WHEEL = ("transformer-engine-torch",)
# What uv says when no index answers, and not that a package is missing.
NO_INDEX = re.compile(r"Failed to fetch|Could not connect|error sending request|timed out")


class NoIndexError(RuntimeError):
    """Says that no package index answered."""


def choose_files(package_set: PackageSet, timeout_s: float = 600) -> list[dict[str, Any]]:
    """Return the pins' files for the platform, as uv finds them in the index: PEP 751 packages.

    Raises RuntimeError when a pin has no file there, NoIndexError when no index answers.
    """
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "pylock.toml"
        command = [sys.executable, "-m", "uv", "pip", "compile", "--python", sys.executable]
        command += ["--quiet", "--no-deps"]
        command += ["--format", "pylock.toml", "--output-file", str(lock)]
        command += ["--python-platform", f"x86_64-manylinux_2_{GLIBC_MINOR}"]
        command += ["--python-version", package_set.pythons[0]]
        command += ["--only-binary", ":all:"]
        for name in WITHOUT_WHEEL:
            command += ["--no-binary", name]
        command += uv_install.options_of(uv_install.pip_settings())
        command += [str(LAUNCH / name) for name in package_set.files]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise NoIndexError(f"no index answered within {timeout_s:.0f} s") from error
        if done.returncode:
            failure = NoIndexError if NO_INDEX.search(done.stderr) else RuntimeError
            raise failure(done.stderr.strip())
        return tomllib.loads(lock.read_text())["packages"]


def supported_tags(python: str) -> dict[Tag, int]:
    """Return the tags of wheels that the platform takes, with their rank, best first."""
    major, minor = python.split(".")[:2]
    version = (int(major), int(minor))
    platforms = [f"manylinux_2_{number}_x86_64" for number in range(GLIBC_MINOR, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    platforms.append("linux_x86_64")
    tags = list(cpython_tags(version, platforms=platforms))
    tags += compatible_tags(version, f"cp{major}{minor}", platforms)
    return {tag: rank for rank, tag in enumerate(tags)}


def best_file(package: dict[str, Any], ranks: dict[Tag, int]) -> dict[str, Any]:
    """Return the file of a package that is installed: the wheel of best rank, else the source."""
    best = None
    best_rank = len(ranks)
    for wheel in package.get("wheels", []):
        tags = parse_wheel_filename(file_name(wheel))[3]
        rank = min((ranks[tag] for tag in tags if tag in ranks), default=len(ranks))
        if rank < best_rank:
            best = wheel
            best_rank = rank
    return best or package["sdist"]


def file_name(archive: dict[str, Any]) -> str:
    """Return the name of an archive's file."""
    return unquote(archive["url"].rpartition("/")[2])


class Client:
    """Reads files of an index, whole or in part, from any thread."""

    def __init__(self, certificates: str | None) -> None:
        context = ssl.create_default_context(cafile=certificates)
        transport = httpx.HTTPTransport(verify=context, retries=5)
        self.http = httpx.Client(transport=transport, follow_redirects=True, timeout=60)

    def read(self, url: str, span: str = "") -> bytes:
        """Return a file's bytes; with a span such as "0-99", only these.

        Raises httpx.HTTPStatusError when the index refuses.
        """
        if url.startswith("file://"):
            return Path(unquote(urlsplit(url).path)).read_bytes()
        answer = self.http.get(url, headers={"Range": f"bytes={span}"} if span else {})
        answer.raise_for_status()
        return answer.content


class RemoteFile(io.RawIOBase):
    """A file of known size that is read over HTTP, in parts, so that zipfile can open it."""

    def __init__(self, client: Client, url: str, size: int) -> None:
        self.client = client
        self.url = url
        self.size = size
        self.position = 0

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that it can be read from anywhere."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        self.position = start + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer from here on."""
        end = min(self.position + len(buffer), self.size)
        if end <= self.position:
            return 0
        data = self.client.read(self.url, f"{self.position}-{end - 1}")
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def metadata_of(client: Client, archive: dict[str, Any]) -> str:
    """Return an archive's METADATA, with as little of a download as the index allows."""
    url = archive["url"]
    if url.endswith(".tar.gz"):
        with tarfile.open(fileobj=io.BytesIO(client.read(url))) as source:
            name = min((name for name in source.getnames() if "/PKG-INFO" in name), key=len)
            member = source.extractfile(name)
            assert member is not None
            return member.read().decode()
    if url.startswith("http"):
        try:
            return client.read(f"{url}.metadata").decode()
        except httpx.HTTPStatusError as error:
            # An index need not have it (PEP 658).
            if error.response.status_code != 404:
                raise
        remote = RemoteFile(client, url, archive["size"])
        stream: Any = io.BufferedReader(remote, 256 * 1024)
    else:
        stream = io.BytesIO(client.read(url))
    with zipfile.ZipFile(stream) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        return wheel.read(name).decode()


def applies(requirement: Requirement, extras: set[str], environment: dict[str, str]) -> bool:
    """Say whether a requirement counts in an environment, with some extras of its package."""
    if requirement.marker is None:
        return True
    for extra in ("", *extras):
        if requirement.marker.evaluate({**environment, "extra": extra}):
            return True
    return False


def active_requirements(
    texts: dict[str, list[str]], first_extras: dict[str, set[str]], environment: dict[str, str]
) -> dict[str, list[str]]:
    """Return the requirements of every package that count, its asked-for extras included."""
    extras = {package: set(first_extras.get(package, ())) for package in texts}
    while True:
        asked = sum(len(names) for names in extras.values())
        active: dict[str, list[str]] = {}
        for package, lines in texts.items():
            active[package] = []
            for line in lines:
                requirement = Requirement(line)
                if not applies(requirement, extras[package], environment):
                    continue
                active[package].append(f"{requirement.name}{requirement.specifier}")
                extras.get(canonicalize_name(requirement.name), set()).update(requirement.extras)
        # An extra may ask for an extra of another package.
        if sum(len(names) for names in extras.values()) == asked:
            return {package: sorted(set(lines)) for package, lines in active.items()}


def environment_of(python: str) -> dict[str, str]:
    """Return the markers' values on the platform of a set."""
    full = python if python.count(".") == 2 else f"{python}.0"
    return {
        "python_version": ".".join(python.split(".")[:2]),
        "python_full_version": full,
        "implementation_name": "cpython",
        "implementation_version": full,
        "platform_python_implementation": "CPython",
        "platform_machine": "x86_64",
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "platform_release": "",
        "platform_version": "",
    }


def lock_set(package_set: PackageSet, client: Client) -> dict[str, Any]:
    """Return a set's entries of the lock, by the packages' canonical names."""
    packages = choose_files(package_set)
    python = package_set.pythons[0]
    ranks = supported_tags(python)
    archives = {package["name"]: best_file(package, ranks) for package in packages}
    with ThreadPoolExecutor(8) as pool:
        texts = pool.map(lambda archive: metadata_of(client, archive), archives.values())
        metadata = {
            name: email.parser.HeaderParser().parsestr(text)
            for name, text in zip(archives, texts, strict=True)
        }
    requires = active_requirements(
        {name: fields.get_all("Requires-Dist", []) for name, fields in metadata.items()},
        package_set.extras,
        environment_of(python),
    )
    entries = {}
    for name, archive in sorted(archives.items()):
        entries[name] = {
            "version": metadata[name]["Version"],
            "file": file_name(archive),
            "sha256": archive["hashes"]["sha256"],
            "python": metadata[name].get("Requires-Python", ""),
            "requires": requires[name],
        }
    return entries


def differences(set_name: str, timeout_s: float = 600) -> list[str]:
    """Return where the index differs from a set's lock: a pin without a file, other bits.

    Raises NoIndexError when no index answers.
    """
    try:
        packages = choose_files(SETS[set_name], timeout_s)
    except NoIndexError:
        raise
    except RuntimeError as error:
        return [f"{set_name}: {error}"]
    locked = check_lock.read_lock()[set_name]
    lines = []
    for package in packages:
        entry = locked.get(package["name"])
        archives = [*package.get("wheels", [])]
        if "sdist" in package:
            archives.append(package["sdist"])
        for archive in archives:
            if entry is None or file_name(archive) != entry["file"]:
                continue
            digest = archive["hashes"]["sha256"]
            if digest != entry["sha256"]:
                lines.append(
                    f"{set_name}: {entry['file']} has sha256 {digest} in the index, "
                    f"but {entry['sha256']} in lock.json"
                )
    return lines


def main() -> None:
    """Write the lock, a line for each package so that its changes can be read."""
    client = Client(uv_install.pip_settings().get("cert"))
    blocks = []
    for set_name, package_set in SETS.items():
        entries = lock_set(package_set, client)
        lines = [f"  {json.dumps(name)}: {json.dumps(entries[name])}" for name in entries]
        blocks.append(f"{json.dumps(set_name)}: {{\n" + ",\n".join(lines) + "\n}")
    (LAUNCH / "lock.json").write_text("{\n" + ",\n".join(blocks) + "\n}\n")


if __name__ == "__main__":
    main()
