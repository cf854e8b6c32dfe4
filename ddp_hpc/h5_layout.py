"""The names of datasets and attributes in a data file, which the generator writes and the reader expects.

HDF5 files have contiguous datasets `src` and `tgt`, whose first dimension is the sample; a test split is in
the group `test/` under the same names. `.pt` (a dict) and `.safetensors` use the same names as keys,
including `test/src`, and store the attributes as dict entries or as metadata.
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

# NumPy and HDF5 do not have bfloat16: the dataset contains uint16, and this attribute states its real type.
ATTR_DTYPE = "dtype"
BFLOAT16 = "bfloat16"

HDF5_SUFFIXES = (".h5", ".hdf5")
PT_SUFFIX = ".pt"
SAFETENSORS_SUFFIX = ".safetensors"
SUFFIXES = (*HDF5_SUFFIXES, PT_SUFFIX, SAFETENSORS_SUFFIX)
