"""Pure tensor math of flow-matching samplers. Imported by the trainer and by the replicas alike, so that they agree."""
