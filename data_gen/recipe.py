"""What a synthetic file holds, said completely, and the name and fingerprint that follow from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod

from ddp_hpc.errors import RequestError, nearest
from ddp_hpc.h5_layout import FORMAT_VERSION

_FLOATS = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2}
_INTEGERS = {"uint8": 1, "int16": 2, "int32": 4, "int64": 8}
DTYPE_BYTES = {**_FLOATS, **_INTEGERS}
DISTRIBUTIONS = ("uniform", "normal", "learnable", "tokens")

# Ten times as many are drawn from 32 bits, see `synthetic`.
MAX_VOCAB = 2**28

# HDF5 and NumPy 1 stop at 32 axes, and one is the samples'.
MAX_AXES = 31
# HDF5 and the file systems count bytes in signed 64 bits.
MAX_BYTES = 2**62
MAX_SEED = 2**63 - 1
# The map of `learnable` is held in memory while the file is written.
MAX_MAP_ENTRIES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the bytes of `src` and `tgt`: equal recipes, equal data.

    The defaults are the main job's: 2048 samples of src (1, 512) and tgt (20, 512).

    Raises:
        RequestError: for a value that no file can have.
    """

    num_samples: int = 2048
    src_shape: tuple[int, ...] = (1, 512)
    """Shape of one sample of src, without the axis of samples."""
    tgt_shape: tuple[int, ...] = (20, 512)
    """Shape of one sample of tgt, without the axis of samples."""
    dtype: str = "float32"
    seed: int = 0
    distribution: str = "uniform"
    """`uniform`: both in [0, 1). `normal`: both standard normal. `learnable`: src in [0, 1), tgt a fixed
    linear map of src plus noise. `tokens`: integers, tgt = (3 * src + 1) mod vocab_size, save for a tenth
    of its elements, which are random."""
    vocab_size: int = 256
    """Of `tokens` alone: they are 0 to vocab_size - 1."""
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise RequestError(f"num_samples {self.num_samples}: a file needs at least 1 sample")
        for name, shape in (("src_shape", self.src_shape), ("tgt_shape", self.tgt_shape)):
            if not 1 <= len(shape) <= MAX_AXES or min(shape) < 1:
                raise RequestError(
                    f"{name} {','.join(map(str, shape)) or '()'}: 1 to {MAX_AXES} sizes of at least 1 "
                    "are needed; write them such as 20,512"
                )
        if self.dtype not in DTYPE_BYTES:
            hint = nearest(self.dtype, tuple(DTYPE_BYTES))
            raise RequestError(f"dtype {self.dtype!r} is none of {', '.join(DTYPE_BYTES)}{hint}")
        if self.distribution not in DISTRIBUTIONS:
            hint = nearest(self.distribution, DISTRIBUTIONS)
            raise RequestError(
                f"distribution {self.distribution!r} is none of {', '.join(DISTRIBUTIONS)}{hint}"
            )
        self._check_kind_of_values()
        if not 0 <= self.seed <= MAX_SEED:
            raise RequestError(f"seed {self.seed} is not within 0 to 2**63 - 1")
        if self.num_bytes > MAX_BYTES:
            raise RequestError(
                f"{self.num_samples} samples of these shapes are {self.num_bytes} bytes, "
                "more than any file can hold; ask for fewer samples or smaller shapes"
            )
        map_entries = prod(self.src_shape) * prod(self.tgt_shape)
        if self.distribution == "learnable" and map_entries > MAX_MAP_ENTRIES:
            raise RequestError(
                f"a learnable map from {prod(self.src_shape)} to {prod(self.tgt_shape)} values has "
                f"{map_entries} entries, more than {MAX_MAP_ENTRIES}; "
                "use smaller shapes or --distribution uniform"
            )

    def _check_kind_of_values(self) -> None:
        is_tokens = self.distribution == "tokens"
        dtypes = _INTEGERS if is_tokens else _FLOATS
        if self.dtype not in dtypes:
            raise RequestError(
                f"{self.distribution} values cannot be {self.dtype}; use dtype {', '.join(dtypes)}"
                + ("" if is_tokens else ", or the distribution tokens")
            )
        if not is_tokens:
            if self.vocab_size != type(self).vocab_size:
                raise RequestError(
                    f"vocab_size {self.vocab_size} is for tokens and the distribution is "
                    f"{self.distribution}; leave it out, or use the distribution tokens"
                )
            return
        most = min(MAX_VOCAB, 2 ** (8 * _INTEGERS[self.dtype] - (self.dtype != "uint8")))
        if not 2 <= self.vocab_size <= most:
            raise RequestError(
                f"vocab_size {self.vocab_size} is not within 2 to {most}, all that fit {self.dtype}"
            )
        if self.tgt_shape != self.src_shape:
            src, tgt = (",".join(map(str, shape)) for shape in (self.src_shape, self.tgt_shape))
            raise RequestError(
                f"tgt_shape {tgt} is not src_shape {src}, and of tokens each target is made from one of src; "
                "ask for the same shape twice"
            )

    @property
    def fields(self) -> dict[str, object]:
        """The recipe as it stands in the file: JSON types only."""
        as_json: dict[str, object] = json.loads(json.dumps({"kind": "synthetic", **asdict(self)}))
        # It came later: recipes that do not use it keep their fingerprints.
        if self.distribution != "tokens":
            del as_json["vocab_size"]
        return as_json

    @property
    def fingerprint(self) -> str:
        """64 hex digits that two recipes share only when they are equal."""
        return fingerprint(self.fields)

    @property
    def bytes_per_sample(self) -> int:
        """Bytes of one sample of src and of tgt together."""
        return (prod(self.src_shape) + prod(self.tgt_shape)) * DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes of the two arrays, without the few kilobytes that describe them."""
        return self.num_samples * self.bytes_per_sample


def canonical_json(fields: Mapping[str, object]) -> str:
    """One spelling for equal fields: sorted keys, no spaces, ASCII."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def fingerprint(fields: Mapping[str, object]) -> str:
    """SHA-256 of the canonical JSON, in hex."""
    return hashlib.sha256(canonical_json(fields).encode("ascii")).hexdigest()


def default_file_name(recipe: Recipe, suffix: str = ".h5") -> str:
    """A name that tells the recipe, with the first 8 digits of its fingerprint.

    >>> default_file_name(Recipe())
    'synthetic-2048-1x512-20x512-float32-seed0-dc1ba503.h5'
    """
    src, tgt = ("x".join(map(str, shape)) for shape in (recipe.src_shape, recipe.tgt_shape))
    return (
        f"synthetic-{recipe.num_samples}-{src}-{tgt}-{recipe.dtype}-seed{recipe.seed}-"
        f"{recipe.fingerprint[:8]}{suffix}"
    )


def parse_shape(text: str) -> tuple[int, ...]:
    """Sizes of `20,512`, spaces allowed.

    Raises:
        RequestError: for anything else, sizes below 1 included.
    """
    words = [word.strip() for word in text.split(",")]
    # isdecimal alone takes digits of other scripts.
    if not all(word.isascii() and word.isdecimal() and len(word) <= 18 and int(word) for word in words):
        raise RequestError(
            f"shape {text!r} is not a list of sizes, so no shape; "
            "write positive sizes with commas, such as 20,512"
        )
    return tuple(map(int, words))
