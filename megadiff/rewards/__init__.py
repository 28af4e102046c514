"""Score samples by rewards, one file each. Only this table names them."""

REWARDS = {
    "clip": "megadiff.rewards.clip:ClipReward",
    "color": "megadiff.rewards.color:ColorReward",
    "frame": "megadiff.rewards.frame:FrameReward",
    "geneval": "megadiff.rewards.geneval:GenevalReward",
    "jpeg_size": "megadiff.rewards.jpeg_size:JpegSizeReward",
    "motion": "megadiff.rewards.motion:MotionReward",
    "ocr": "megadiff.rewards.ocr:OcrReward",
    "remote": "megadiff.rewards.remote:RemoteReward",
    "temporal_consistency": "megadiff.rewards.motion:TemporalConsistencyReward",
    "variety": "megadiff.rewards.variety:VarietyReward",
    "vlm": "megadiff.rewards.vlm:VlmReward",
}
