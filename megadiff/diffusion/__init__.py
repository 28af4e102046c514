"""Pure tensor math of flow-matching samplers, which trainer and replicas share to agree."""
