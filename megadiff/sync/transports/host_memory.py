"""Where the tensors of a bucket lie when they travel from the host: where they are, or in pinned memory beside a GPU."""

from __future__ import annotations

import torch

from megadiff.sync.bucket import (
    Bucket,
    BucketBody,
    bucket_manifest,
    encode_bucket,
    flat_bytes,
    read_flat,
    write_flat,
)


class HostMemory:
    """Brings buckets to the host. What it takes for that is kept for the next one: as much as the largest bucket."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def body(self, bucket: Bucket) -> BucketBody:
        """Valid until the next call, and for as long as the bucket is. Raises ValueError for a name that comes twice."""
        return encode_bucket(self.tensors(bucket))

    def tensors(self, bucket: Bucket) -> Bucket:
        """On the CPU: those that are there as they are. From a GPU all of a bucket are copied at once, and waited for once."""
        devices = {tensor.device for _, tensor in bucket}
        if all(device.type == "cpu" for device in devices):
            return bucket
        (device,) = devices
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.default_stream(device))  # which gathered the bucket
        with torch.cuda.stream(stream):
            laid_out = self.laid_out(bucket, pinned=True)
        stream.synchronize()
        return laid_out

    def laid_out(self, bucket: Bucket, *, pinned: bool) -> Bucket:
        """Copies in this object's memory. pinned: a GPU copies there at full speed, and without waiting for it."""
        manifest = bucket_manifest(bucket)
        num_bytes = flat_bytes(manifest)
        if self._flat.numel() < num_bytes:
            self._flat = self._flat.new_empty(0)  # gives the smaller one back first
            self._flat = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        write_flat(bucket, self._flat)
        return list(read_flat(manifest, self._flat))
