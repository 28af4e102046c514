"""How a replica starts and ends: settings that cannot work, other addresses, SIGTERM, and vllm-omni
0.26 in place of the installed version.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest

from megadiff.rollout.client.client import ReplicaClient, ReplicaError
from megadiff.rollout.server.server import GRACE_S
from megadiff.tensors.fingerprint import fingerprint
from tests.e2e.pushes import folder_weights
from tests.e2e.recompute import gap
from tests.e2e.replica import (
    PROMPT,
    REQUEST,
    SAMPLING,
    bound_lora_serves_and_sleeps,
    image,
    push,
    start,
)
from tests.e2e.servers import ENVIRONMENT, ROOT
from tests.transformer_engine import deadly_transformer_engine


def serve_and_fail(*arguments: object, **environment: str) -> tuple[int, str]:
    """Return (exit code, stderr)."""
    done = subprocess.run(
        [sys.executable, "-m", "megadiff.cli.serve", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**ENVIRONMENT, **environment},
    )
    return done.returncode, done.stderr


def test_settings_that_cannot_work_end_before_anything_is_loaded(
    tiny_model: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, text = serve_and_fail(tiny_model, "--port", port)
    assert code == 2 and f"port {port} on 127.0.0.1 is in use" in text
    assert text.startswith("error: ") and text.count("\n") == 1  # vllm-omni writes as it loads
    code, text = serve_and_fail(tiny_model, "--port", 0, "--host", "0.0.0.0", MEGADIFF_TOKEN="")
    assert code == 2 and "set MEGADIFF_TOKEN or give --token-file" in text
    code, text = serve_and_fail(tiny_model, "--port", 0, "--token=secret")
    assert code == 2 and "--token is gone" in text and "--token-file FILE" in text
    secret = tmp_path / "secret"
    secret.write_text("a-secret-of-20-chars")
    secret.chmod(0o640)
    code, text = serve_and_fail(tiny_model, "--port", 0, "--token-file", secret)
    assert code == 2 and "has mode 0640" in text and f"chmod 600 {secret}" in text
    code, text = serve_and_fail(tmp_path / "nowhere", "--port", 0)
    assert code == 2 and "does not exist" in text and "Traceback" not in text


def test_token_parent_and_sigterm(tiny_model: Path, tmp_path: Path) -> None:
    """Another address needs the token. At SIGTERM it takes its registry entry back, finishes the
    call it has, which takes longer than a moment, and ends.
    """
    secret = tmp_path / "secret"
    secret.write_text("a-secret-of-20-chars\n")
    secret.chmod(0o600)
    server = start(
        tiny_model,
        tmp_path,
        *("--host", "0.0.0.0", "--token-file", str(secret)),
        fresh=True,
        # peft would import it
        overlay=str(deadly_transformer_engine(tmp_path)),
    )
    url = server.client.url.replace("0.0.0.0", "127.0.0.1")
    try:
        assert httpx.get(f"{url}/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for path in ("/rl/generate", "/v1/images/generations", "/metrics"):
                assert httpx.post(f"{url}{path}", headers=headers, json={}).status_code == 401
        client = ReplicaClient(url, "replica-7", token="a-secret-of-20-chars")
        assert len(client.generate(REQUEST).latents_GSLC) == 4

        slow = replace(REQUEST, sampling=replace(SAMPLING, num_inference_steps=800))
        with ThreadPoolExecutor() as pool:
            call = pool.submit(client.generate, slow)
            while not client.health()["in_flight"]:
                assert not call.done()
            os.kill(server.process.pid, signal.SIGTERM)
            signalled_s = time.monotonic()
            assert len(call.result().latents_GSLC) == 4
            assert time.monotonic() - signalled_s > 2 * GRACE_S
        assert server.process.wait(20) == 0
        assert not list(server.registry.iterdir())
    finally:
        server.end()


def test_vllm_omni_0_26(tiny_model: Path, tmp_path: Path) -> None:
    """The GPU host's version, laid over the installed one.

    Its worker is a process of its own, and must not be left.
    """
    overlay = os.environ.get("MEGADIFF_OVERLAY026", "")
    if not Path(overlay, "vllm_omni").is_dir():
        pytest.skip(
            "MEGADIFF_OVERLAY026 names no folder with vllm-omni 0.26 (see docs: pip install "
            "--target)"
        )
    weights = folder_weights(tiny_model, ("transformer",))
    # peft would import Transformer Engine, here in the worker's process as well
    front = f"{deadly_transformer_engine(tmp_path)}{os.pathsep}{overlay}"
    server = start(tiny_model, tmp_path, fresh=True, overlay=front)
    client, workers = server.client, []
    try:
        assert client.health()["vllm_omni"].startswith("0.26.")
        group = client.generate(REQUEST)
        assert gap(tiny_model, group) <= 1e-6
        assert (
            gap(
                tiny_model,
                client.generate(replace(REQUEST, sampling=replace(SAMPLING, true_cfg_scale=4.0))),
            )
            <= 1e-4
        )
        longer = replace(
            REQUEST,
            prompt=replace(PROMPT, text="a much longer prompt", id="cd" * 8),
            sample_indices=(0, 1),
        )
        batched, other = client.draw([REQUEST, longer]).groups
        assert (
            batched.conditioning["prompt_embeds"].shape == group.conditioning["prompt_embeds"].shape
        )
        assert max(gap(tiny_model, batched), gap(tiny_model, other)) <= 1e-6
        before = image(client)
        changed = {name: tensor * 1.1 for name, tensor in weights.items()}
        held = push(client, changed, version=1, model=tiny_model)
        assert held == {name: fingerprint(tensor) for name, tensor in changed.items()}
        assert image(client) != before
        client.sleep()
        push(client, changed, version=1, model=tiny_model)
        with pytest.raises(ReplicaError, match=r"requests\[1\] .* too long"):
            client.draw([REQUEST, replace(REQUEST, prompt=replace(PROMPT, text="🐱" * 2000))])
        assert client.generate(replace(REQUEST, policy_version=1)).policy_version == 1
        bound_lora_serves_and_sleeps(client, tiny_model, weights, version=2)
        workers = psutil.Process(server.process.pid).children(recursive=True)
        assert workers
    finally:
        server.end()
    gone, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
