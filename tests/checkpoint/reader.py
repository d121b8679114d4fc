"""A reader of checkpoints that knows docs/checkpoint_format.md, json and numpy, and nothing of infinity."""

import json
import math
import os

import numpy as np

DTYPES = {"fp32": "<f4", "fp16": "<f2", "bf16": "<u2", "int16": "<i2"}
BLOCK = 4 << 20
TABLE = np.arange(256, dtype=np.uint32)
for _ in range(8):
    TABLE = np.where(TABLE & 1, (TABLE >> 1) ^ 0x82F63B78, TABLE >> 1).astype(np.uint32)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ int(TABLE[(crc ^ byte) & 255])
    return crc ^ 0xFFFFFFFF


def metadata(path):
    text = np.fromfile(path, np.uint8).tobytes()
    begin, end = len('{"body":'), text.rindex(b',"crc32c":')
    assert json.loads(text)["crc32c"] == crc32c(text[begin:end]), f"{path} is damaged"
    return json.loads(text)["body"]


def shard_places(shape, dim, ranges):
    """Where a shard's elements lie in the flattened tensor."""
    places = np.arange(math.prod(shape)).reshape(shape)
    return places.take([at for begin, end in ranges for at in range(begin, end)], dim).reshape(-1)


def read(folder, manifest, tensor, kind):
    """All elements of one kind of a tensor, flat, as they are in the files."""
    info = manifest["tensors"][tensor]
    whole = np.empty(math.prod(info["shape"]), DTYPES[{"remainder": "int16", "param": info["dtype"]}.get(kind, "fp32")])
    seen = 0
    for rank in manifest["ranks"]:
        index = metadata(os.path.join(folder, rank["name"]))
        for name, its_kind, dtype, start, numel, number, offset, *shard in index["arrays"]:
            if (name, its_kind) != (tensor, kind):
                continue
            file, at, nbytes, crcs = index["extents"][number]
            extent = np.fromfile(os.path.join(folder, file), np.uint8, nbytes, offset=at).tobytes()
            for block, crc in enumerate(crcs):
                assert crc == crc32c(extent[block * BLOCK : (block + 1) * BLOCK]), f"{file} is damaged"
            places = slice(start, start + numel)
            if shard and shard[0] is not None:
                places = shard_places(info["shape"], *index["shards"][shard[0]])[places]
            whole[places] = np.frombuffer(extent, DTYPES[dtype], numel, offset)
            seen += numel
    assert seen == whole.size
    return whole


def master(folder, tensor):
    """The fp32 master weights of a tensor, in its shape."""
    manifest = metadata(os.path.join(folder, "manifest.json"))
    tensor = manifest["tied"].get(tensor, tensor)
    info = manifest["tensors"][tensor]
    values = read(folder, manifest, tensor, "master" if "master" in info["kinds"] else "param")
    if info["dtype"] == "bf16":
        remainder = read(folder, manifest, tensor, "remainder") if "remainder" in info["kinds"] else 0
        values = ((values.astype(np.int64) << 16) + remainder).astype(np.uint32).view(np.float32)
    return values.astype(np.float32).reshape(info["shape"])
