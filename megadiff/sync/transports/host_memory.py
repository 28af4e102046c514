"""Bring a bucket to the host: CPU tensors stay where they are, a GPU's go to pinned memory."""

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
    """Keep memory for buckets on the host, as much as the largest one needed."""

    def __init__(self) -> None:
        self._flat = torch.empty(0, dtype=torch.uint8)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def body(self, bucket: Bucket) -> BucketBody:
        """Return a body that is valid until the next call, and for as long as the bucket is.

        Raises ValueError for a name that comes twice.
        """
        return encode_bucket(self.tensors(bucket))

    def tensors(self, bucket: Bucket) -> Bucket:
        """Return the bucket on the CPU: without a copy where it is there already."""
        devices = {tensor.device for _, tensor in bucket}
        if all(device.type == "cpu" for device in devices):
            return bucket

        (device,) = devices
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))

        # A thread begins on GPU 0, and leaving the stream would make a context there.
        torch.cuda.set_device(device)
        # The default stream gathered the bucket.
        stream.wait_stream(torch.cuda.default_stream(device))
        with torch.cuda.stream(stream):
            laid_out = self.laid_out(bucket)

        # Once for all of the bucket's copies.
        stream.synchronize()
        return laid_out

    def laid_out(self, bucket: Bucket) -> Bucket:
        """Return copies in this object's memory."""
        manifest = bucket_manifest(bucket)
        num_bytes = flat_bytes(manifest)
        if self._flat.numel() < num_bytes:
            # Give the smaller one back first, or both would be there for a moment.
            self._flat = self._flat.new_empty(0)
            # A GPU copies to pinned memory at full speed, and without waiting for it.
            is_gpu = bucket[0][1].is_cuda
            self._flat = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_gpu)
        write_flat(bucket, self._flat)
        return list(read_flat(manifest, self._flat))
