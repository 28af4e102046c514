"""Draw pictures with a replica, score them, and look at them: cells for a notebook or an editor.

`python examples/notebook.py` runs all of them from the repository's root, on any CPU.
"""

# %% What is served, and where the picture goes
import logging
import os
import sys

import torch
from PIL import Image

from megadiff import Replica, score

MODEL = "assets/shapes"
OUT = os.environ.get("NOTEBOOK_OUT", "notebook.png")
PROMPTS = ["a red star", "two blue circles", "a green square left of a yellow triangle"]
logging.basicConfig(level="INFO")

# %% Draw: the replica starts here, and ends with the block
with Replica(MODEL) as replica:
    groups = replica.sample(PROMPTS, num_samples=8)

# %% Score: 1 for exactly what the caption asks for
rewards = score(groups, ["examples.shapes.reward:ShapesStrictReward"])
for group, reward in zip(groups, rewards["total"].tolist(), strict=True):
    sys.stdout.write(f"{sum(reward) / len(reward):4.0%}  {group.prompt.text}\n")

# %% Look: a row for each prompt, the best first
rows = []
for group, reward_G in zip(groups, rewards["total"], strict=True):
    order = reward_G.argsort(descending=True, stable=True)
    rows.append(torch.cat(list(group.pixels_GFHWC[order, 0]), dim=1))
Image.fromarray(torch.cat(rows).numpy()).save(OUT)
sys.stdout.write(f"{OUT}\n")
