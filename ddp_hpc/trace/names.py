"""What the names in a trace mean: regions of a step, kinds of collectives, sizes of their elements."""

from __future__ import annotations

import re

# Ours come first; the rest are what torch itself, its DataLoader and common trainers write.
_REGIONS = {
    "data": ("data", "dataloader", "data_loading", "enumerate(dataloader)", "get_batch", "next_batch"),
    "forward": ("forward", "distributeddataparallel.forward", "fullyshardeddataparallel.forward"),
    # One pass of a pipeline is both, by turns.
    "backward": ("backward", "autograd::engine::evaluate_function", "forward and backward"),
    "optimizer": ("optimizer", "optimizer.step", "optimizer.zero_grad", "optimizer_step"),
    "snapshot": ("snapshot", "checkpoint", "save_checkpoint"),
}
_REGION_OF = {name: region for region, names in _REGIONS.items() for name in names}

_KINDS = {
    "allreduce": "all_reduce",
    "allreducecoalesced": "all_reduce",
    "allgather": "all_gather",
    "allgatherbase": "all_gather",
    "allgatherintotensorcoalesced": "all_gather",
    "reducescatter": "reduce_scatter",
    "reducescatterbase": "reduce_scatter",
    "reducescattertensorcoalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoallbase": "all_to_all",
    "alltoallv": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "sendrecv": "send_recv",
}
_BACKEND_ANNOTATION = re.compile(r"(?:gloo|nccl|mpi|ucc|xccl|hccl|rccl):(\w+)")
_KERNEL = re.compile(
    r"(?:nccl|rccl|oneccl|xccl)\w*?"
    r"(AllReduce|AllGather|ReduceScatter|AllToAll|Broadcast|SendRecv|Reduce|Send|Recv)",
    re.IGNORECASE,
)
_WAITING = ("c10d::", "_c10d_functional::", "record_param_comms", "c10d_functional::")

_ELEMENT_BYTES = {
    "float": 4,
    "double": 8,
    "half": 2,
    "c10::half": 2,
    "bfloat16": 2,
    "c10::bfloat16": 2,
    "byte": 1,
    "char": 1,
    "unsigned char": 1,
    "signed char": 1,
    "short": 2,
    "int": 4,
    "long": 8,
    "long int": 8,
    "bool": 1,
    "c10::float8_e4m3fn": 1,
    "float8_e4m3fn": 1,
    "c10::complex<float>": 8,
    "complexfloat": 8,
}


def region_of(name: str) -> str | None:
    """The region of REGIONS that an annotation stands for."""
    return _REGION_OF.get(name.partition("#")[0].partition(": ")[0].strip().lower())


def annotated_kind(name: str) -> str | None:
    """The collective of an annotation such as `gloo:all_reduce`."""
    found = _BACKEND_ANNOTATION.match(name)
    return kind_of(found[1]) if found else None


def kernel_kind(name: str) -> str | None:
    """The collective of a device's kernel such as `ncclDevKernel_AllReduce_Sum_f32_RING_LL`.

    `ncclDevKernel_Generic` does not say which: "collective".
    """
    if found := _KERNEL.search(name):
        return kind_of(found[1])
    return "collective" if name.startswith(("ncclDevKernel", "ncclKernel")) else None


def kind_of(word: str) -> str:
    """One spelling for a collective, whichever way a backend writes it; an unknown one as it is."""
    return _KINDS.get(re.sub(r"[^a-z]", "", word.lower()), word)


def waits(name: str) -> bool:
    """Whether an operator only hands over to a backend, or waits for one: it computes nothing."""
    return name.startswith(_WAITING)


def element_bytes(dtype: str) -> int:
    """Bytes of an element; 0 for a type that is not known."""
    return _ELEMENT_BYTES.get(dtype.strip().lower(), 0)


def busbw_factor(kind: str, num_ranks: int) -> float:
    """Bus over algorithm bandwidth: what a link carries, as nccl-tests' PERFORMANCE.md derives it."""
    if num_ranks < 2:
        return 1.0
    if kind == "all_reduce":
        return 2 * (num_ranks - 1) / num_ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (num_ranks - 1) / num_ranks
    return 1.0
