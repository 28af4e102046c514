"""A proof is of one token, role, nonce and address, and of nothing else."""

from itertools import product

import pytest

from megadiff.rollout.proof import REPLICA, TRAINER, is_valid, new_nonce, sign

URL = "http://127.0.0.1:8000"
NONCE = "0123456789abcdef" * 2


def test_only_the_signed_triple_is_valid():
    proof = sign("secret", role=TRAINER, nonce=NONCE, url=URL)
    changes = {
        "token": ["secret", "other"],
        "role": [TRAINER, REPLICA],
        "nonce": [NONCE, "f" * 32],
        "url": [URL, "http://127.0.0.1:8001"],
    }
    for token, role, nonce, url in product(*changes.values()):
        same = (token, role, nonce, url) == ("secret", TRAINER, NONCE, URL)
        assert is_valid(proof, token, role=role, nonce=nonce, url=url) == same


@pytest.mark.parametrize("proof", [None, 7, [], "", "é", "\ud800", "0" * 64])
def test_other_values_are_no_proofs(proof):
    assert not is_valid(proof, "secret", role=TRAINER, nonce=NONCE, url=URL)


@pytest.mark.parametrize("nonce", [None, 1, "", "0" * 31, "G" * 32, f"{'0' * 31}\n", "0" * 64])
def test_a_nonce_has_one_form(nonce):
    """Else a nonce could hold a role or an address, and one text would stand for two triples."""
    proof = sign("secret", role=TRAINER, nonce=str(nonce), url=URL)
    assert not is_valid(proof, "secret", role=TRAINER, nonce=nonce, url=URL)


def test_nonces_differ():
    nonces = {new_nonce() for _ in range(100)}
    assert len(nonces) == 100 and all(len(nonce) == 32 for nonce in nonces)
