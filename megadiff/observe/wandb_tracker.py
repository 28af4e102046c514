"""Log to Weights & Biases, online or into files (WANDB_MODE=offline). Tested with wandb 0.31.0."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from megadiff.observe import video
from megadiff.observe.samples import SavedSample, read_pixels
from megadiff.observe.tracker import Tracker, import_for, reward_table

ID_NAME = "wandb_id"
DATA_DIR = "WANDB_DATA_DIR"
THUMBNAIL_SIDE = 128  # pixels, of a table's pictures; those beside it are whole


class WandbTracker(Tracker):
    """Log to a Weights & Biases run, which a resumed run continues by the id in its folder.

    Raises ValueError where wandb is missing or refuses to start.
    """

    def __init__(self, run_folder: Path, *, config: Mapping[str, Any], resume_step: int) -> None:
        self._wandb = import_for("wandb", "wandb")
        id_path = run_folder / ID_NAME
        # A run that starts over in the same folder is another one to W&B.
        if not (resume_step and id_path.exists()):
            id_path.write_text(uuid.uuid4().hex[:8], "utf-8")

        # Else tables and pages wait in the home folder, where an offline run's files are not.
        self._sets_data_dir = DATA_DIR not in os.environ
        if self._sets_data_dir:
            os.environ[DATA_DIR] = str(run_folder.resolve() / "wandb")

        try:
            self._run = self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "megadiff"),
                name=run_folder.name,
                id=id_path.read_text("utf-8").strip(),
                dir=str(run_folder),
                config=dict(config),
                resume="allow",
                # A notebook's own run stays its own.
                reinit="create_new",
            )
        except self._wandb.Error as error:
            self._end_service()
            raise ValueError(
                f"track has wandb, which does not start: {error}. Log in with `wandb login`, set "
                "WANDB_MODE=offline and sync later, or take wandb out of track"
            ) from error

        # A resumed run repeats steps, which wandb's own counter refuses: plot over ours.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def pictures(self, name: str, step: int, samples: Sequence[SavedSample]) -> None:
        media = [self._medium(sample) for sample in samples]
        self._run.log({"step": step, name: media, f"{name}/table": self._table(samples)})

    def _medium(self, sample: SavedSample) -> Any:
        """Return the sample's file as it is: a video plays at its own rate."""
        caption = sample.caption
        if sample.reward is not None:
            caption += f" · {sample.reward:.3f}"
        if sample.path.suffix == video.SUFFIX:
            return self._wandb.Video(str(sample.path), caption=caption, format="mp4")

        return self._wandb.Image(str(sample.path), caption=caption)

    def _table(self, samples: Sequence[SavedSample]) -> Any:
        """Return a row a sample: its picture, its rewards and its identity."""
        rewards, values = reward_table(samples)
        identity = ("prompt_id", "sample_index", "policy_version")
        table = self._wandb.Table(columns=["step", "picture", "prompt", *rewards, *identity])

        for sample, numbers in zip(samples, values, strict=True):
            picture = self._wandb.Image(_thumbnail(sample.path))
            whose = [getattr(sample, name) for name in identity]
            table.add_data(sample.step, picture, sample.caption, *numbers, *whose)

        return table

    def page(self, path: Path) -> None:
        artifact = self._wandb.Artifact(f"report-{self._run.id}", type="report")
        artifact.add_file(str(path), name=path.name)
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()
        self._end_service()

    def _end_service(self) -> None:
        """End W&B's background process, which would stay until this one ends."""
        # A run of the notebook around us still needs it.
        if self._wandb.run is None:
            self._wandb.teardown()
        if self._sets_data_dir:
            os.environ.pop(DATA_DIR, None)


def _thumbnail(path: Path) -> Image.Image:
    """Return a small picture, of a video its middle frame."""
    frames = read_pixels(path).numpy()
    return Image.fromarray(video.shrunk_frame(frames[len(frames) // 2], THUMBNAIL_SIDE))
