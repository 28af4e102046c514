"""An evaluation shared by several ranks is the one of a single process: same samples, figures and
images. The images are on rank 0 alone, as hundreds of ranks would have no room for all of them.
"""

import json
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megadiff.config.rewards import RewardConfig
from megadiff.config.schema import Config, RolloutConfig
from megadiff.observe.evaluation import to_json
from megadiff.parallel.mesh import init_mesh, resolve_layout
from megadiff.rewards.score import Scorer
from megadiff.train.evaluate import evaluate, spread
from megadiff.types import Prompt
from tests.distributed.ranks import run_ranks
from tests.stub_fleet import StubFleet, finish

PROMPTS = [
    Prompt(text=f"a red wall {n}", id=f"{n:016x}", fields={"task": "ab"[n % 2]}) for n in range(5)
]
ROLLOUT = RolloutConfig(height=8, width=8, num_inference_steps=4, batch_size=2)


def _worker(out: str, world_size: int, sp: int) -> None:
    mesh = init_mesh(
        resolve_layout(dp=0, sp=sp, tp=1, dp_replicate=1, world_size=world_size), "cpu"
    )
    with closing(Scorer({"color": RewardConfig(type="color")}, num_workers=1)) as scorer:
        outcome = evaluate(
            StubFleet(),
            finish,
            scorer,
            spread(PROMPTS, 23),
            Config(seed=3, rollout=ROLLOUT),
            adapter=None,  # none of the prompts brings an image
            policy_version=4,
            mesh=mesh,
            model="stub",
        )
    folder = Path(out) / str(mesh.rank)
    folder.mkdir()
    (folder / "evaluation.json").write_text(json.dumps(to_json(outcome.evaluation)))
    save_file(outcome.images, folder / "images.safetensors")


def _found(folder: Path) -> tuple[str, dict[str, list]]:
    images = load_file(folder / "images.safetensors")
    return (folder / "evaluation.json").read_text(), {
        name: images[name].tolist() for name in sorted(images)
    }


@pytest.mark.parametrize("world_size, sp", [(2, 1), (2, 2), (7, 1)])  # 7 ranks: more than prompts
def test_every_layout_finds_the_same(tmp_path, world_size, sp):
    folders = [tmp_path / "alone", tmp_path / "shared"]
    for folder, size, peers in zip(folders, (1, world_size), (1, sp), strict=True):
        folder.mkdir()
        run_ranks(_worker, size, str(folder), size, peers)
    expected = _found(tmp_path / "alone" / "0")
    assert json.loads(expected[0])["num_samples"] == 23 and len(expected[1]) == 23
    for rank in range(world_size):
        images = expected[1] if rank == 0 else {}
        assert _found(tmp_path / "shared" / str(rank)) == (expected[0], images)
