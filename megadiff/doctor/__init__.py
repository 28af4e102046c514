"""`megadiff doctor`: look at the machine, the model and the config before a run does."""
