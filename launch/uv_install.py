"""`uv pip install` into this Python's environment, from where pip's configuration says.

uv installs in parallel, in a fraction of pip's time, but reads neither pip.conf nor PIP_*
variables: a host that is set up for pip would need a second configuration.
"""

import ast
import subprocess
import sys

PYPI = "https://pypi.org/simple"
# pip's name of a setting → uv's option, once for each of its values.
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}
SECTIONS = ("global", "install", ":env:")  # a later one overrules


def pip_settings() -> dict[str, str]:
    """Return what `pip config list` says, by the settings' names."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    sections: dict[str, dict[str, str]] = {section: {} for section in SECTIONS}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.partition(".")
        if section in sections:
            sections[section][name] = ast.literal_eval(value)
    settings: dict[str, str] = {}
    for section in SECTIONS:
        settings |= sections[section]
    return settings


def options_of(settings: dict[str, str]) -> list[str]:
    """Return uv's options for pip's settings."""
    # As pip does: the best version of any index, not that of the first that has the package.
    options = ["--index-strategy", "unsafe-best-match", "--system-certs"]
    # Of one version uv takes the first index's wheel, even where another index has a fitter one. So
    # the main index, which has all wheels, comes before mirrors that may lack some.
    if "extra-index-url" in settings:
        options += ["--index", settings.get("index-url", PYPI)]
    for name, option in OPTIONS.items():
        for value in settings.get(name, "").split():
            options += [option, value]
    if "cert" in settings:
        options += ["--cert", settings["cert"]]
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    return options


def main() -> int:
    """Run uv with these arguments. Returns its exit code."""
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    return subprocess.call([*command, *options_of(pip_settings()), *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
