"""Prove that trainer and replica know the same token, without sending it.

A proof is HMAC-SHA256 over role, nonce and url. The url ties it to one address. A stranger that
passes a trainer's challenge on to a real replica gets nothing: the replica signs its own address,
and the trainer expects the one that it called.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from urllib.parse import urlsplit

TRAINER = "trainer"
REPLICA = "replica"
MIN_TOKEN_CHARS = 16
# a file's name has at most 255, those of temporary files beside it included
NAME_BYTES = 200
NAME_RULE = f"1 to {NAME_BYTES} bytes of printable text without '/'"
_TOKEN = re.compile(r"[!-~]+")
_URL = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}")
# The form is fixed so that a signed text can be taken apart in one way only.
_NONCE = re.compile(r"[0-9a-f]{32}")


def check_token(token: str, *, source: str = "MEGADIFF_TOKEN") -> str:
    """Return a token that a header can hold. Raises ValueError, which does not show it."""
    problem = ""
    if not _TOKEN.fullmatch(token):
        problem = "has some that are not visible ASCII"
    elif len(token) < MIN_TOKEN_CHARS:  # whoever is sent a proof could guess it
        problem = f"is shorter than {MIN_TOKEN_CHARS}"
    if problem:
        raise ValueError(
            f"the token of {source}, {len(token)} characters, {problem}; draw one with: "
            "python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return token


def new_nonce() -> str:
    """Draw 32 hex digits that nobody can foresee."""
    return secrets.token_hex(16)


def sign(token: str, *, role: str, nonce: str, url: str) -> str:
    """Return the proof in hex. url: the replica's address, as its announcement names it.

    Role and nonce have fixed forms and the url comes last: no two triples give the same text.
    """
    text = "\n".join(("megadiff", role, nonce, url))
    return hmac.new(token.encode(), text.encode(), "sha256").hexdigest()


def is_valid(proof: object, token: str, *, role: str, nonce: object, url: str) -> bool:
    """Tell whether proof is sign() of the same token, role, nonce and url."""
    if not isinstance(proof, str) or not isinstance(nonce, str) or not _NONCE.fullmatch(nonce):
        return False
    expected = sign(token, role=role, nonce=nonce, url=url)
    # In constant time: how long it takes must not tell how much of the proof is right.
    return hmac.compare_digest(proof.encode(errors="replace"), expected.encode())


def is_loopback(host: str) -> bool:
    """Tell whether a host is on loopback; a name other than localhost counts as elsewhere."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_name(name: object) -> bool:
    """Tell whether it can be a replica's name, whose announcement is the file NAME.json."""
    if not isinstance(name, str) or not name.isprintable() or "/" in name:
        return False
    return 1 <= len(name.encode()) <= NAME_BYTES


def is_url(url: object) -> bool:
    """Tell whether it is http[s]://HOST:PORT, and the standard library can take it apart."""
    if not isinstance(url, str) or not _URL.fullmatch(url):
        return False
    try:
        parts = urlsplit(url)  # as httpcore and is_loopback() do
        return bool(parts.hostname) and parts.port is not None
    except ValueError:  # [:::] is no address, 99999 no port
        return False
