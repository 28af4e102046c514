"""Write curves, pictures and tables for TensorBoard. Tested with tensorboard 2.21."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megadiff.observe import video
from megadiff.observe.metrics import format_number
from megadiff.observe.samples import SavedSample, picture_grid, read_pixels, shrunk
from megadiff.observe.tracker import Tracker, import_for, reward_table

# A GIF takes far more bytes than the MP4 that it is made of.
MAX_VIDEOS = 8
VIDEO_COLUMNS = 4
VIDEO_SIDE = 160
# Its own thread writes so often; to wait for it in each step would take milliseconds.
FLUSH_S = 5
PICTURE_SIDE = 512  # pixels; 16 whole pictures of 1024² would be 25 MB a step


class TensorBoardTracker(Tracker):
    """Write scalars, and of samples a grid of pictures, moving ones too, and a table.

    They are under `tensorboard/` of the run's folder.
    """

    def __init__(self, run_folder: Path, *, config: Mapping[str, Any], resume_step: int) -> None:
        module = import_for("tensorboard", "torch.utils.tensorboard")
        self._protos = import_for("tensorboard", "tensorboard.compat.proto.summary_pb2")
        # TensorBoard hides what an earlier attempt wrote from this step on: a run that starts over
        # logs step 0 anew.
        purge_step = resume_step + 1 if resume_step else 0
        self._writer = module.SummaryWriter(
            log_dir=str(run_folder / "tensorboard"), purge_step=purge_step, flush_secs=FLUSH_S
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # One event of all: add_scalar would write, and look up the time, once for each.
        make = self._protos.Summary
        values = [make.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        self._writer.file_writer.add_summary(make(value=values), step)

    def pictures(self, name: str, step: int, samples: Sequence[SavedSample]) -> None:
        pixels = [read_pixels(sample.path) for sample in samples]
        stills = [shrunk(frames, PICTURE_SIDE) for frames in pixels]
        self._writer.add_image(name, picture_grid(stills), step)
        if any(len(frames) > 1 for frames in pixels):
            rate = video.video_rate(samples[0].path)
            self._add_video(f"{name}/video", pixels[:MAX_VIDEOS], step, frames_per_s=rate)

        self._writer.add_text(f"{name}/table", markdown_table(samples), step)
        self._writer.flush()

    def _add_video(
        self, tag: str, videos: Sequence[Tensor], step: int, *, frames_per_s: Fraction
    ) -> None:
        """Write a grid of videos as an image that moves.

        SummaryWriter.add_video would need moviepy, of which it knows versions before 2 only.
        """
        small = [shrunk(frames, VIDEO_SIDE) for frames in videos]
        num_frames = max(map(len, small))
        grids = []

        for index in range(num_frames):
            # A shorter video stands still at its end.
            stills = [frames[min(index, len(frames) - 1)][None] for frames in small]
            grids.append(picture_grid(stills, columns=VIDEO_COLUMNS).permute(1, 2, 0))

        frames_FHWC = torch.stack(grids)

        image = self._protos.Summary.Image(
            height=frames_FHWC.shape[1],
            width=frames_FHWC.shape[2],
            colorspace=3,
            encoded_image_string=video.to_gif(frames_FHWC, frames_per_s=frames_per_s),
        )

        value = self._protos.Summary.Value(tag=tag, image=image)
        self._writer.file_writer.add_summary(self._protos.Summary(value=[value]), step)

    def close(self) -> None:
        self._writer.close()


def markdown_table(samples: Sequence[SavedSample]) -> str:
    """Return a row a sample, in the grid's order: its prompt and its rewards."""
    columns, values = reward_table(samples)
    head = ["", "prompt", *columns]
    rows = [head, ["---"] * len(head)]

    for number, (sample, numbers) in enumerate(zip(samples, values, strict=True), start=1):
        # A bar would begin another cell, and a line break another row.
        caption = " ".join(sample.caption.split()).replace("|", "\\|")
        rows.append([str(number), caption, *map(format_number, numbers)])

    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
