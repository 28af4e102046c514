"""Stand in for Transformer Engine in a replica: peft finds no `pytorch` in it, and goes on."""
