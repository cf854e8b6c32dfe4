"""Interprets the names in a trace: regions of a step, kinds of collectives, element sizes of dtypes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import lru_cache
from itertools import takewhile

from ddp_hpc.base.text_table import cut

STEP, ALL_STEPS = "ProfilerStep#", "ProfilerStep*"
"""The name of a step in traces of torch's profiler, and the name of all steps in its key averages."""

AUTOGRAD = "autograd::engine::evaluate_function"
"""The beginning of the names of the operators in which autograd runs the nodes of a backward pass."""

UPDATE = "Optimizer.step"
"""The beginning of the names of the annotations of torch's optimizers."""

# Before torch 1.9, only the nodes themselves were recorded.
_NODE = re.compile(rf"{AUTOGRAD}.*|\w+Backward\d*|torch::autograd::AccumulateGrad")

# The first name of each region is that of ddp-hpc; the others are written by torch and common trainers.
_REGIONS = {
    "data": (
        "data", "dataloader", "data_loading", "data_load", "enumerate(dataloader)", "get_batch", "next_batch",
    ),
    "forward": ("forward", "distributeddataparallel.forward", "fullyshardeddataparallel.forward"),
    # A pipeline alternates between forward and backward within one step.
    "backward": ("backward", "autograd::engine::evaluate_function", "forward and backward"),
    "optimizer": ("optimizer", "optimizer.step", "optimizer.zero_grad", "optimizer_step", "zero_grad"),
    "snapshot": ("snapshot", "checkpoint", "save_checkpoint"),
}  # fmt: skip
_REGION_OF = {name: region for region, names in _REGIONS.items() for name in names}
# Such as `FSDP::pre_forward (layers.0)`, `Backward 3` and `PP:0F3` of torch, and `attn(B)` and `mlp(W)` of
# schedules that split the backward pass into the gradients of inputs and those of weights.
_PHASE = re.compile(
    r"(?<![a-z])(?i:(forward|fwd)|(backward|bwd))(?![a-z])|\((?:(F)|([BIW]))\)|^PP:\d+(?:(F)|([BIW]))"
)

_KINDS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier", "send_recv", "reduce",
    "gather", "scatter", "send", "recv",
)  # fmt: skip
"""The collectives. A word is the first one with which it begins, as `_reduce_scatter_base` does."""
SHARED_KINDS = ("collective", "send_recv")
"""The kinds of NCCL's kernels that run several collectives; all_to_all consists of sends and receives."""
_BACKEND_ANNOTATION = re.compile(r"(gloo|nccl|mpi|ucc|xccl|hccl|rccl):(\w+)")
_ON_HOST = ("gloo", "mpi")
"""The backends whose annotations last as long as the collective; the others annotate only its launch."""
_KERNEL = re.compile(
    r"(?:nccl|rccl|oneccl|xccl)\w*?"
    r"(AllReduce|AllGather|ReduceScatter|AllToAll|Broadcast|SendRecv|Reduce|Send|Recv)",
    re.IGNORECASE,
)
# Kernels of torch's symmetric memory (CUDASymmetricMemoryOps.cu) and of DeepEP (tokens to experts).
_OTHER_KERNEL = re.compile(
    r"(?:multimem|one_shot|two_shot|symm_mem)_(all_reduce|all_gather|reduce_scatter)"
    r"|(?:deep_ep|dpsk::ep)::\w+::(dispatch|combine|cached_notify|notify_dispatch)\b"
)
_WAITING = ("c10d::", "_c10d_functional::", "record_param_comms", "c10d_functional::")

_BLOCKING = re.compile(r"(?!\w*(Async|Graph))\w*(Synchronize|Free|[Aa]lloc|Memcpy)")

# Parts of the names of torch's kernels that most of them have.
_REPEATED = re.compile(
    r"\b(at|c10)::(native|detail|cuda)::|\(anonymous namespace\)::|\(at::TensorIteratorBase&[^()]*\)"
    r"|::operator\(\)\(\) const|, (std::array|(at::detail::)?Array)<char\*, \d+(ul)?>"
)
_LAMBDA = re.compile(r"(::)?\{lambda\([^(){}]*\)#\d+\}")

_DTYPES = {
    1: ("bool", "byte", "char", "unsigned char", "signed char", "float8_e4m3fn", "c10::float8_e4m3fn"),
    2: ("short", "half", "c10::half", "bfloat16", "c10::bfloat16"),
    4: ("int", "float"),
    8: ("long", "long int", "double", "complexfloat", "c10::complex<float>"),
}
_ELEMENT_BYTES = {dtype: num_bytes for num_bytes, dtypes in _DTYPES.items() for dtype in dtypes}


_CONTEXT = 4
"""The characters that are shown before the first difference of names."""

# Most events have the name of another one.
_cached = lru_cache(10_000)


def region_of(name: str) -> str | None:
    """Returns the region in REGIONS that an annotation denotes, or None."""
    # TorchRec and torchbench mark their regions as `## forward ##`.
    return _REGION_OF.get(name.strip("# ").partition("#")[0].partition(": ")[0].strip().lower())


def region_of_event(category: str, name: str) -> str:
    """Returns the region in REGIONS that an operator, an annotation or the call of a module denotes, or an
    empty string.
    """
    if category == "python_function":
        return "forward"
    if is_node(category, name):
        return "backward"
    if (region := region_of(name)) or category == "cpu_op":
        return region or ""
    phases = {"forward" if any(found[::2]) else "backward" for found in _PHASE.findall(name)}
    return phases.pop() if len(phases) == 1 else ""


@_cached
def annotated_kind(name: str) -> str | None:
    """Returns the collective of an annotation such as `gloo:all_reduce`, or None."""
    match = _BACKEND_ANNOTATION.match(name)
    return kind_of(match[2]) if match else None


def runs_on_host(name: str) -> bool:
    """Returns whether an annotation is a collective that lasts as long as the annotation."""
    match = _BACKEND_ANNOTATION.match(name)
    return match is not None and match[1] in _ON_HOST


def is_node(category: str, name: str) -> bool:
    """Returns whether an event is a node of autograd's graph in a backward pass."""
    return category == "cpu_op" and _NODE.fullmatch(name) is not None


@_cached
def kernel_kind(name: str) -> str | None:
    """Returns the collective of a kernel such as `ncclDevKernel_AllReduce_Sum_f32_RING_LL`, or None.

    For `ncclDevKernel_Generic`, whose kind is unknown, it is "collective".
    """
    if match := _KERNEL.search(name):
        return kind_of(match[1])
    if match := _OTHER_KERNEL.search(name):
        return match[1] or f"all_to_all ({match[2]})"
    return "collective" if name.startswith(("ncclDevKernel", "ncclKernel")) else None


def kind_of(word: str) -> str:
    """Returns the canonical name of a collective, whose spelling depends on the backend."""
    letters = re.sub(r"[^a-z]", "", word.lower())
    return next((kind for kind in _KINDS if letters.startswith(kind.replace("_", ""))), word)


def can_block(name: str) -> bool:
    """Returns whether a call of the runtime can wait for the device, as `cudaFree` does."""
    return _BLOCKING.match(name) is not None


def waits(name: str) -> bool:
    """Returns whether an operator computes nothing, but calls a communication backend or waits for it."""
    return name.startswith(_WAITING)


def element_bytes(dtype: str) -> int:
    """Returns the size of an element in bytes, or 0 for an unknown type."""
    return _ELEMENT_BYTES.get(dtype.strip().lower(), 0)


def busbw_factor(kind: str, num_ranks: int) -> float:
    """Returns the ratio of bus bandwidth to algorithm bandwidth, as in PERFORMANCE.md of nccl-tests."""
    if num_ranks < 2:
        return 1.0
    if kind == "all_reduce":
        return 2 * (num_ranks - 1) / num_ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        return (num_ranks - 1) / num_ranks
    return 1.0


def bus_bandwidth(kind: str, num_ranks: int, num_bytes: int, dur_s: float | None) -> float:
    """Returns the bus bandwidth of a collective in bytes/s; 0 if its size or duration is unknown."""
    return busbw_factor(kind, num_ranks) * num_bytes / dur_s if dur_s else 0.0


@_cached
def shapes_of(dims: bytes, types: bytes = b"") -> str:
    """Returns the shapes and the data types of tensors as text.

    >>> shapes_of(b"[[32, 3, 7], [], [64]]", b'["c10::Half", "Scalar", "c10::Half"]')
    '32x3x7, 64 (Half)'
    """
    shapes = re.findall(r"\[([\s\d,]*\d)", dims.decode(errors="replace"))
    words = re.findall(r'"(?:c10::)?([^"]*)"', types.decode(errors="replace"))
    dtypes = dict.fromkeys(word for word in words if word and not word.startswith(("Scalar", "Generic")))
    text = ", ".join("x".join(re.findall(r"\d+", shape)) for shape in shapes)
    return f"{text} ({', '.join(dtypes)})" if text and dtypes else text


@_cached
def shortened(name: str, limit: int) -> str:
    """Returns the name of a kernel in at most `limit` characters; `...` replaces the middle of a longer one.

    A C++ function of which the parameters do not fit is written without them, and then also without the parts
    that the names of most kernels have.

    >>> shortened("void multi_tensor_apply_kernel<AdamFunctor<float>, float>(int, int volatile*)", 40)
    'multi_tensor_apply_kern...float>, float>'
    """
    if len(name) <= limit:
        return name
    forms = _forms(name)
    if (fitting := next((form for form in reversed(forms) if len(form) <= limit), None)) is not None:
        return fitting
    name = forms[0]
    tail = (limit - 3) * 2 // 5
    return f"{name[: limit - 3 - tail]}...{name[len(name) - tail :]}"


def _forms(name: str) -> tuple[str, ...]:
    """Returns a name without the parts that most names have, with the lambdas among them, without parameters
    only, and whole.
    """
    has_parameters = name.endswith(")") and (end := _parameters(name)) > 0
    function = name[:end].removeprefix("void ") if has_parameters else name
    plain = _REPEATED.sub("", function)
    return _LAMBDA.sub("", plain), plain, function, name


def distinguished(names: Iterable[str], limit: int) -> dict[str, str]:
    """Returns different shortened names: those that would be equal show where they differ, and if this is not
    enough, a number.
    """
    short = {name: shortened(name, limit) for name in names}
    num, heads = Counter(short.values()), defaultdict[str, list[str]](list)
    for name, text in short.items():
        if num[text] > 1:
            heads[text[: limit // 2]].append(name)
    for same in heads.values():
        of_all = zip(*map(_forms, same), strict=True)
        forms = next(forms for forms in of_all if len(set(forms)) == len(same))
        pairs = zip(min(forms), max(forms), strict=False)
        same_until = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        begin = max(same_until - _CONTEXT, head := limit // 3)
        for name, form in zip(same, forms, strict=True):
            short[name] = cut(f"{form[:head]}{'...' * (begin > head)}{form[begin:]}", limit)
    seen: Counter[str] = Counter()
    for name, text in short.items():
        seen[text] += 1
        short[name] += f" #{seen[text]}" if seen[text] > 1 else ""
    return short


def _parameters(name: str) -> int:
    """Returns the offset of the bracket that opens the parameters at the end of a name, or -1."""
    depth = 0
    for at in range(len(name) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(name[at], 0)
        if depth == 0:
            return at
    return -1
