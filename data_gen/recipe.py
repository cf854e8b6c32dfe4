"""The complete description of a synthetic file, its fingerprint and its default name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod

from ddp_hpc.base.data_file_layout import FORMAT_VERSION
from ddp_hpc.base.errors import RequestError, nearest

DTYPE_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
DISTRIBUTIONS = ("uniform", "learnable")

# HDF5 and NumPy 1 support up to 32 axes, including the sample axis.
MAX_AXES = 31
MAX_SEED = 2**63 - 1
# The linear map of the distribution `learnable` is kept in memory while the file is written.
MAX_MAP_ENTRIES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that determines the bytes of `src` and `tgt`, so that equal recipes give equal data.

    The defaults are the synthetic data of `python -m ddp_hpc.train`: 2048 samples of src (1, 512) and
    tgt (20, 512).

    Raises:
        RequestError: a value is invalid.
    """

    num_samples: int = 2048
    src_shape: tuple[int, ...] = (1, 512)
    """Shape of one sample of src, without the sample axis."""
    tgt_shape: tuple[int, ...] = (20, 512)
    """Shape of one sample of tgt, without the sample axis."""
    dtype: str = "float32"
    seed: int = 0
    distribution: str = "uniform"
    """`uniform`: src and tgt in [0, 1). `learnable`: tgt is a linear map of this src plus noise."""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise RequestError(f"num_samples must be at least 1 (got {self.num_samples})")
        for name, shape in (("src_shape", self.src_shape), ("tgt_shape", self.tgt_shape)):
            if not 1 <= len(shape) <= MAX_AXES or min(shape) < 1:
                raise RequestError(
                    f"{name} must be 1 to {MAX_AXES} sizes of at least 1, such as 20,512 "
                    f"(got {','.join(map(str, shape)) or '()'})"
                )
        for name, known in (("dtype", tuple(DTYPE_BYTES)), ("distribution", DISTRIBUTIONS)):
            if (value := getattr(self, name)) not in known:
                hint = nearest(value, known)
                raise RequestError(f"{name} {value!r} is not one of {', '.join(known)}{hint}")
        if not 0 <= self.seed <= MAX_SEED:
            raise RequestError(f"seed must be in the range 0 to 2**63 - 1 (got {self.seed})")
        map_entries = prod(self.src_shape) * prod(self.tgt_shape)
        if self.distribution == "learnable" and map_entries > MAX_MAP_ENTRIES:
            raise RequestError(
                f"the learnable map from {prod(self.src_shape)} to {prod(self.tgt_shape)} values has "
                f"{map_entries} entries; at most {MAX_MAP_ENTRIES} are supported. "
                "Use smaller shapes or --distribution uniform."
            )

    @property
    def fields(self) -> dict[str, object]:
        """The recipe as stored in the file, with JSON types only."""
        as_json: dict[str, object] = json.loads(json.dumps({"kind": "synthetic", **asdict(self)}))
        return as_json

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the recipe as 64 hex digits, which are equal only for equal recipes."""
        return fingerprint(self.fields)

    @property
    def bytes_per_sample(self) -> int:
        """The size in bytes of one sample of src and tgt together."""
        return (prod(self.src_shape) + prod(self.tgt_shape)) * DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """The size of the two arrays in bytes, without the few kilobytes of metadata."""
        return self.num_samples * self.bytes_per_sample


def canonical_json(fields: Mapping[str, object]) -> str:
    """Returns the same JSON text for all equal fields: keys are sorted, no spaces, ASCII only."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def fingerprint(fields: Mapping[str, object]) -> str:
    """Returns the SHA-256 of the canonical JSON in hex."""
    return hashlib.sha256(canonical_json(fields).encode("ascii")).hexdigest()


def default_file_name(recipe: Recipe, suffix: str = ".h5") -> str:
    """Returns a file name that describes the recipe and ends with the first 8 digits of its fingerprint.

    >>> default_file_name(Recipe())
    'synthetic-2048-1x512-20x512-float32-seed0-dc1ba503.h5'
    """
    src, tgt = ("x".join(map(str, shape)) for shape in (recipe.src_shape, recipe.tgt_shape))
    return (
        f"synthetic-{recipe.num_samples}-{src}-{tgt}-{recipe.dtype}-seed{recipe.seed}-"
        f"{recipe.fingerprint[:8]}{suffix}"
    )


def parse_shape(text: str) -> tuple[int, ...]:
    """Parses comma-separated sizes such as `20,512`; spaces are allowed.

    Raises:
        RequestError: the text is not a list of positive integers.
    """
    sizes = [size.strip() for size in text.split(",")]
    # isdecimal() alone would also accept digits of other scripts.
    if not all(size.isascii() and size.isdecimal() and len(size) <= 18 and int(size) for size in sizes):
        raise RequestError(f"invalid shape {text!r}; use comma-separated positive sizes, such as 20,512")
    return tuple(map(int, sizes))
