"""The names of the datasets and attributes in data files, for the code that writes and reads the files.

HDF5 files have contiguous datasets `src` and `tgt`, whose first axis is the sample axis; the test split has
the same names in the group `test/`. `.pt` files (a dict) and `.safetensors` files use the same names as
keys, such as `test/src`, and store the attributes as dict entries or as metadata.
"""

from __future__ import annotations

FORMAT_VERSION = 1

SRC = "src"
TGT = "tgt"
TEST_GROUP = "test"
TEST_SRC = f"{TEST_GROUP}/{SRC}"
TEST_TGT = f"{TEST_GROUP}/{TGT}"

ATTR_FORMAT_VERSION = "format_version"
ATTR_SEED = "seed"
ATTR_GENERATOR = "generator"
ATTR_CREATED = "created"
ATTR_RECIPE = "recipe"
ATTR_FINGERPRINT = "fingerprint"
ATTR_NUM_CLASSES = "num_classes"
ATTR_SOURCE = "source"

# NumPy and HDF5 do not support bfloat16: the dataset contains uint16, and this attribute is "bfloat16".
ATTR_DTYPE = "dtype"
BFLOAT16 = "bfloat16"

HDF5_SUFFIXES = (".h5", ".hdf5")
PT_SUFFIX = ".pt"
SAFETENSORS_SUFFIX = ".safetensors"
SUFFIXES = (*HDF5_SUFFIXES, PT_SUFFIX, SAFETENSORS_SUFFIX)

# The dtype codes of the safetensors format, https://huggingface.co/docs/safetensors.
SAFETENSORS_DTYPES = {
    "float16": "F16",
    BFLOAT16: "BF16",
    "float32": "F32",
    "float64": "F64",
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
}
