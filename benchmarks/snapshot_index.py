"""Measures the index of a snapshot of a model with 70 billion parameters, for many ranks.

python -m benchmarks.snapshot_index [--ranks 64,1024,4096,16384] [--json FILE]

The tensors are those of a decoder with 80 layers and their Adam moments, sharded by rows as with fsdp. All
dimensions except the first have size 1, and chunks are smaller by the same factor, so the index is as large
as that of the complete tensors. The reports and snapshot.json are those of all ranks; shards are written only
for some ranks.

`read by a rank` is what one rank reads when the run resumes, other than the values of its tensors:
snapshot.json, and the headers of the files that it needs. The table shows the largest value of three ranks.
`with half of the ranks` is the same for a run that resumes with half as many ranks.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import torch

from ddp_hpc.base.text_table import Column, table
from ddp_hpc.base.units import format_bytes
from ddp_hpc.bench import results_output
from ddp_hpc.training.snapshots.host_buffer import FileBuffer, Place, Specs
from ddp_hpc.training.snapshots.shard_file import (
    CHUNK_BYTES,
    SECTIONS,
    Header,
    WrittenShards,
    shard_file,
    write_shards,
)
from ddp_hpc.training.snapshots.shard_index import (
    ShardIndex,
    index_of,
    read_header,
    report_of_rank,
)

WIDTH = 8192
LAYER = {
    "attention.wq": 8192,
    "attention.wk": 1024,
    "attention.wv": 1024,
    "attention.wo": 8192,
    "feed_forward.w1": 28672,
    "feed_forward.w2": 8192,
    "feed_forward.w3": 28672,
    "attention_norm": 8192,
    "ffn_norm": 8192,
}
COLUMNS = [
    Column("ranks", "ranks", "{:,}".format),
    Column("snapshot_bytes", "snapshot.json", format_bytes),
    Column("report_bytes", "sent to rank 0", format_bytes),
    Column("merge_s", "merge s", "{:.1f}".format),
    Column("same_bytes", "read by a rank", format_bytes),
    Column("same_s", "in s", "{:.2f}".format),
    Column("half_bytes", "with half of the ranks", format_bytes),
    Column("all_bytes", "read by all ranks", format_bytes),
]


def rows_of_model() -> dict[str, int]:
    """The number of rows of each tensor."""
    found = {"tok_embeddings.weight": 128256, "norm.weight": 8192, "output.weight": 128256}
    for layer in range(80):
        found |= {f"layers.{layer}.{name}.weight": rows for name, rows in LAYER.items()}
    return found


def shards_of(rank: int, num_ranks: int) -> dict[str, tuple[Specs, dict[str, Place]]]:
    """The shards that a rank holds with fsdp, and their places, by section."""
    specs: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    places: dict[str, dict[str, Place]] = {section: {} for section in SECTIONS}
    for name, rows in rows_of_model().items():
        own = -(-rows // num_ranks)
        begin = rank * own
        size = min(own, rows - begin)
        if size > 0:
            for section, key in (
                ("model", name),
                ("training", f"optimizer.exp_avg/{name}"),
                ("training", f"optimizer.exp_avg_sq/{name}"),
            ):
                specs[section][key] = (size, 1), torch.float32
                places[section][key] = Place((rows, 1), (begin, 0))
        if rank == 0:
            specs["training"][f"optimizer.step/{name}"] = (), torch.float32
    specs["training"]["generators"] = (1, 5056), torch.uint8
    places["training"]["generators"] = Place((num_ranks, 5056), (rank, 0))
    return {section: (specs[section], places[section]) for section in SECTIONS if specs[section]}


def written(folder: Path | None, rank: int, num_ranks: int) -> dict[str, Any]:
    """The report of a rank, after writing its files to `folder`."""
    files, specs, places = {}, {}, {}
    for section, (of_section, of_shards) in shards_of(rank, num_ranks).items():
        specs[section], places[section] = of_section, of_shards
        files[section] = WrittenShards(2**32, 2**18, f"{rank:064x}")
        if folder is not None:
            path = folder / shard_file(section, rank)
            path.unlink(missing_ok=True)
            files[section] = write_shards(path, FileBuffer(of_section), of_shards, CHUNK_BYTES // WIDTH)
    return report_of_rank(files, specs, places)


def bytes_read() -> int:
    """The bytes that this process has read."""
    found = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    assert found is not None
    return int(found[1])


def resumed(folder: Path, rank: int, num_ranks: int) -> tuple[int, float]:
    """Returns how many bytes a rank reads to find all parts that it needs, and how many seconds it takes."""
    begin_bytes, begin_s = bytes_read(), time.perf_counter()
    about = json.loads((folder / "snapshot.json").read_text())
    for section, (specs, places) in shards_of(rank, num_ranks).items():
        index = ShardIndex(folder, about, section)
        for name, (shape, _) in specs.items():
            if name in places and name != "generators":
                offset = places[name].offset
                ends = tuple(at + size for at, size in zip(offset, shape, strict=True))
                assert list(index.parts(name, offset, ends))
    for row in range(rank, len(about["files"]["training"]), num_ranks):
        assert list(index.parts("generators", (row, 0), (row + 1, 5056)))
    return bytes_read() - begin_bytes, time.perf_counter() - begin_s


def ranks_with_rows(rank: int, num_ranks: int, num_saved: int) -> set[int]:
    """Returns the ranks of the saving job that hold rows which a rank of the resumed job needs."""
    # The rank also verifies states of random number generators that no rank needs.
    found = set(range(rank, num_saved, num_ranks))
    for _, places in shards_of(rank, num_ranks).values():
        for name, place in places.items():
            if name != "generators":
                saved = -(-place.shape[0] // num_saved)
                own = -(-place.shape[0] // num_ranks)
                last = min(place.offset[0] + own, place.shape[0]) - 1
                found |= set(range(place.offset[0] // saved, last // saved + 1))
    return found


def first_ranks(num_ranks: int) -> set[int]:
    """Returns each rank whose shards differ from those of the rank before it in their tensors or sizes."""
    found = {0}
    for rows in set(rows_of_model().values()):
        own = -(-rows // num_ranks)
        found |= {rows // own, -(-rows // own)}
    return {rank for rank in found if rank < num_ranks}


def measure(folder: Path, num_ranks: int) -> dict[str, Any]:
    """Writes the index of a snapshot, and reads it as some ranks do."""
    readers = {
        "same": [(rank, num_ranks) for rank in (1, num_ranks // 2, num_ranks - 1)],
        "half": [(rank, num_ranks // 2) for rank in (1, num_ranks // 4, num_ranks // 2 - 1)],
    }
    needed = first_ranks(num_ranks).union(
        *(ranks_with_rows(*reader, num_ranks) for found in readers.values() for reader in found)
    )
    reports = [written(folder if rank in needed else None, rank, num_ranks) for rank in range(num_ranks)]

    def header_of(section: str, rank: int) -> Header:
        return read_header(
            folder / shard_file(section, rank), WrittenShards(*reports[rank]["files"][section])
        )

    begin_s = time.perf_counter()
    text = json.dumps(index_of(reports, header_of), sort_keys=True)
    merge_s = time.perf_counter() - begin_s
    (folder / "snapshot.json").write_text(text)
    found = {name: [resumed(folder, *reader) for reader in ranks] for name, ranks in readers.items()}
    same_bytes = max(num_bytes for num_bytes, _ in found["same"])
    return {
        "name": "index",
        "ranks": num_ranks,
        "snapshot_bytes": len(text),
        "report_bytes": sum(len(zlib.compress(json.dumps(one).encode())) for one in reports),
        "merge_s": merge_s,
        "same_bytes": same_bytes,
        "same_s": max(seconds for _, seconds in found["same"]),
        "half_bytes": max(num_bytes for num_bytes, _ in found["half"]),
        "all_bytes": num_ranks * same_bytes,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="64,1024,4096,16384", help="default: %(default)s")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows = []
    for num_ranks in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory(prefix="ddp-hpc-bench-") as made:
            rows.append(measure(Path(made), num_ranks))
    print(table(COLUMNS, rows))
    results_output.save(results_output.document("snapshot_index", rows), args.json)


if __name__ == "__main__":
    main()
