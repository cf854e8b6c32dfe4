"""A safetensors file in memory, filled again and again: what a save copies the device's tensors into.

The layout is https://huggingface.co/docs/safetensors: eight bytes with the header's
length, the header as JSON, the tensors one after the other. The bytes go to the file as
they lie here, so that the training waits for one copy and nothing else.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Each tensor begins at a multiple of its largest possible item.
_ALIGNED_BYTES = 8


class FileImage:
    """The bytes of a file with tensors of these names, dtypes and shapes.

    `bytes` is a tensor of uint8, pinned where the tensors lie on a CUDA device.

    Raises:
        TypeError: on construction, for a dtype that the format does not have.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._specs = _specs_of(tensors)
        # Largest items first: then all are aligned without gaps, which the format forbids.
        names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header: dict[str, dict[str, Any]] = {}
        offset = 0
        for name in names:
            tensor = tensors[name]
            if tensor.dtype not in _DTYPES:
                raise TypeError(f"{name} is of {tensor.dtype}, which safetensors does not have")
            end = offset + tensor.nbytes
            header[name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _ALIGNED_BYTES)
        begin = 8 + len(text)
        on_device = any(tensor.device.type == "cuda" for tensor in tensors.values())
        self.bytes = torch.empty(begin + offset, dtype=torch.uint8, pin_memory=on_device)
        self.bytes[:begin] = torch.frombuffer(
            bytearray(struct.pack("<Q", len(text)) + text), dtype=torch.uint8
        )
        self._places = {
            name: self.bytes[begin + start : begin + stop].view(tensors[name].dtype).view(tensors[name].shape)
            for name in names
            for start, stop in [header[name]["data_offsets"]]
        }

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these are tensors of the same names, dtypes and shapes."""
        return _specs_of(tensors) == self._specs

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies the values, and waits for the copies."""
        names = list(self._places)
        torch._foreach_copy_([self._places[name] for name in names], [tensors[name] for name in names], True)
        for device in {tensor.device for tensor in tensors.values()} - {torch.device("cpu")}:
            torch.get_device_module(device).synchronize(device)


def _specs_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, str]]:
    return {name: (tensor.dtype, tensor.shape, tensor.device.type) for name, tensor in tensors.items()}
