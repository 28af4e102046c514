"""Reward remote: let servers score, in another environment or on another machine.

GET / → {"ready": true}. POST /score → {"scores": [a number or null for each sample]}; its body is
an npz with pixels [N, F, H, W, 3] uint8, and samples, the UTF-8 bytes of a JSON list of
{"prompt", "negative_prompt", "id", "images", "fields", "index"}. images: numbers k of arrays
image_k, the bytes of the files that the prompt names. 4xx, with {"error": …}, is not retried.
`megadiff score` is such a server, see server.py.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megadiff.rewards.answers import WrongAnswer, samples_text
from megadiff.rewards.base import Reward, RewardContext, RewardSample, ScoreFailed
from megadiff.rewards.http_pool import HttpPool, bearer_header

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "MEGADIFF_SCORE_TOKEN"


class RemoteReward(Reward):
    """Ask servers that speak this module's protocol.

    url: one server, or a list of equal ones. samples_per_call: of a group in one request; None is
    the whole group, which a reward that compares needs. workers: requests in flight. timeout_s,
    deadline_s: see HttpPool. token_env: the environment variable with the servers' bearer token;
    "" for MEGADIFF_SCORE_TOKEN, which need not be set.
    """

    def __init__(
        self,
        *,
        url: str | Sequence[str],
        samples_per_call: int | None = None,
        workers: int = 8,
        timeout_s: float = 60.0,
        deadline_s: float = 240.0,
        token_env: str = "",
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers={workers}, must be at least 1")
        self.samples_per_call = samples_per_call
        self.workers = workers
        self.deadline_s = deadline_s
        headers = bearer_header(token_env, default=TOKEN_VARIABLE)
        self._pool = HttpPool(url, timeout_s=timeout_s, deadline_s=deadline_s, headers=headers)

    def open(self, context: RewardContext) -> None:
        """Ask every server whether it scores. Raises ValueError for one that does not say so."""
        for url in self._pool.urls:
            try:
                answer = self._pool.get("/", url=url)
            except ScoreFailed as error:
                answer = error
            if answer != {"ready": True}:
                raise ValueError(
                    f'{url} is no scorer: GET / must answer {{"ready": true}}, got: '
                    f"{answer!s:.500}; start one there with `megadiff score`, or mend "
                    "reward.<name>.args.url"
                )

    def score(self, samples: Sequence[RewardSample]) -> list[float | None]:
        answer = self._pool.post("/score", content=samples_to_npz(samples))
        scores = answer.get("scores") if isinstance(answer, dict) else None
        if not isinstance(scores, list):
            raise WrongAnswer(
                f"{samples_text(samples)}: {' or '.join(self._pool.urls)} answered "
                f'{answer!r:.200}, must be {{"scores": [{len(samples)} numbers or null]}}'
            )
        if None in scores:
            logger.warning(
                "reward %r: the server could not score %d of %d samples of prompt %.200r; "
                "its log has the reason",
                self.name,
                scores.count(None),
                len(scores),
                samples[0].prompt.text,
            )
        return scores

    def figures(self) -> Mapping[str, float]:
        return self._pool.figures()

    def close(self) -> None:
        self._pool.close()


def _row(sample: RewardSample, files: Sequence[str]) -> dict[str, object]:
    prompt = sample.prompt
    return {
        "prompt": prompt.text,
        "negative_prompt": prompt.negative_text,
        "id": prompt.id,
        "images": [files.index(file) for file in prompt.images],
        "fields": prompt.fields,
        "index": sample.sample_index,
    }


def samples_to_npz(samples: Sequence[RewardSample]) -> bytes:
    """Return the body of POST /score."""
    # Each once, though all samples of a group have them.
    files: list[str] = []
    for sample in samples:
        files += [file for file in sample.prompt.images if file not in files]
    rows: Any = [_row(sample, files) for sample in samples]
    # What JSON cannot hold goes as a string: dates of a parquet file, and NaN, which Python would
    # write bare.
    rows = json.loads(json.dumps(rows, default=str), parse_constant=str)

    arrays: dict[str, Any] = {
        "pixels": np.stack([sample.pixels for sample in samples]),
        "samples": np.frombuffer(json.dumps(rows).encode(), np.uint8),
    }
    for number, file in enumerate(files):
        arrays[f"image_{number}"] = np.fromfile(file, np.uint8)

    body = io.BytesIO()
    # Not compressed: zlib needs 25 times as long as the copy, and photographs hardly shrink.
    np.savez(body, **arrays)
    return body.getvalue()
