"""A supervised run's images are counted, and what is wrong with them is named, before it trains."""

import json

import pytest
from PIL import Image

from megadiff.cli.train import main
from tests.e2e.captioned import SETTINGS, trainer_of_images, write_images, write_rows
from tests.e2e.servers import replicas_of


@pytest.fixture(scope="module")
def trainer(tmp_path_factory, tiny_model):
    return trainer_of_images(tmp_path_factory.mktemp("sft"), tiny_model)


@pytest.mark.parametrize(
    ("images", "text"),
    [
        (
            "nowhere",
            "nowhere: no such file or folder; give a folder with metadata.jsonl, a .parquet or "
            ".tar file, or module:Class",
        ),
        ("empty", "empty: holds none of them; need metadata.jsonl"),
        (
            "uncaptioned",
            (
                "metadata.jsonl:2: no caption among the keys ['file_name']; name it caption or "
                "text or prompt"
            ),
        ),
        ("absent", "absent/9.png does not exist; restore it or remove the row"),
    ],
)
def test_wrong_data_are_refused_before_anything_starts(trainer, capsys, images, text):
    folder = trainer.folder / images
    if images != "nowhere":
        folder.mkdir()
    if images in ("uncaptioned", "absent"):
        write_rows(folder, [{"file_name": "0.png", "text": "a"}, {"file_name": "0.png"}])
        Image.new("RGB", (64, 64)).save(folder / "0.png")
    if images == "absent":
        write_rows(folder, [{"file_name": "9.png", "text": "a"}])
    assert (
        main([*trainer.command(*SETTINGS, f"data.images={folder}", name=images)[3:], "--dry-run"])
        == 2
    )
    assert text in capsys.readouterr().err
    assert not (trainer.folder / images / "run").exists()


def test_dry_run_counts_images(trainer, capsys):
    overrides = [*SETTINGS, f"data.images={trainer.folder / 'images'}"]
    assert main([*trainer.command(*overrides)[3:], "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (
        plan["num_prompts"],
        plan["samples_per_step"],
        plan["microbatches_per_update_and_rank"],
    ) == (6, 4, 2)


def test_a_cut_image_ends_the_run_and_its_replica(trainer):
    """Found while data are encoded, when the replica has been started already."""
    folder = trainer.folder / "cut"
    write_images(folder)
    (folder / "4.png").write_bytes((folder / "4.png").read_bytes()[:2000])
    evaluation = ["eval.every=10", f"eval.prompts={trainer.folder / 'held_out.txt'}"]
    result = trainer.run(*SETTINGS, f"data.images={folder}", *evaluation, name="of_cut")
    assert result.code == 1
    assert "metadata.jsonl:5 (4.png): 2000 bytes that are no readable image" in result.stderr
    assert "Traceback" not in result.stderr
    assert replicas_of(trainer.folder / "of_cut") == []
    assert not list((trainer.folder / "cache").glob(".writing_*"))
