"""Sorts kernels by what they compute, by their names and those of the operators that launched them.

The names are those of cuBLAS, cuDNN, CUTLASS, hipBLASLt (Tensile), MIOpen, Composable Kernel, Triton, FBGEMM,
vLLM, SGLang and torch itself, as found in public traces.
"""

from __future__ import annotations

import re

from ddp_hpc.trace.event_names import SHARED_KINDS, annotated_kind, kernel_kind

# The first match determines the kind. Kernels of Inductor have the names of all operators that they fuse, and
# those that compute a convolution as a matrix product have both names.
_EXPERTS = "mixture of experts"
_ACTIVATION = "(swiglu|silu)"
_WORDS = (
    (_EXPERTS, "(?<![a-z])moe|matmul_ogs|^_finalize_matmul_scatter|_routing_|bitmatrix|^_topk_forward"),
    ("attention", "^triton_tem\\w*attention"),
    ("matrix products", "^triton_tem"),
    ("normalization", "^triton_(red|per)\\w*(_norm|rsqrt)|rms_?norm"),
    ("softmax and reductions", "^triton_(red|per)"),
    ("elementwise", "^triton_|rotary|rope_|upsample|kernel_with_index"),
    # Of kernels that compute an activation and quantize its result, the activation is the kind.
    ("elementwise", f"^(?!.*gemm|bmm_).*{_ACTIVATION}((?!{_ACTIVATION})\\w)*_(forward|backward|and|cast)"),
    ("quantization", "quantize|_quant_kernel|fp8_quant|fp8_?(rowwise|qparam)|_cast_(to|back|and)_|cast_back"),
    ("embedding and indexing", "split_(embedding|eb_)|embedding_codegen|bounds_check"),
    ("embedding and indexing", "index_copy|kv_indices|^(void )?rocprim(?!.*reduce)"),
    ("pooling", "(max|avg|average)_?pool|pooling"),
    ("parameter updates", "adam|adagrad|\\bsgd|lamb_|optimizer"),
    ("copies", "reshape_and_cache|copyfunctor|\\bcopy<|dma_request"),
    ("attention", "flash|fmha|attn|attention|\\bsage_|\\bmha_|\\bmla_|^reduce_segments"),
    ("convolution", "(?<!_type)conv(?!ert)|winograd|wgrad|dgrad|fprop|igemm|implicit_?gemm|scudnn|\\bfft2d_"),
    ("convolution", "(cask|cutlass)_cudnn|im2d?2?col"),
    ("normalization", "(?<!vector_)(?<!foreach_)norm(?!twoops|ops|al(_|\\b))|bn_[fb]w|gammabeta|welford"),
    ("normalization", "miopenbn|rowwisemoments|fusedparamscuda|internalgradientscuda"),
    ("matrix products", "\\bscal_kernel"),
    ("copies", "^mem(cpy|set)|(direct|float\\d+)_?copy|catarray|transpose|nchw_?(to|2)nhwc|nhwc_?(to|2)nchw"),
    ("copies", "copy_(async|kernel|tensor)|kv_?cache(?!datatype)|::copy_|::cat\\b|contiguous"),
    ("matrix products", "(?<!fb)gemm|gemv|matmul|cijk_|\\bbmm|::(add|b|badd)?mm\\b|nvjet|xmma|wgmma|cublas"),
    ("matrix products", "splitkreduce|dot_kernel|::linear\\b"),
    ("embedding and indexing", "embedding|_embs_|ind(ex|ices)|gather|scatter|permute|masked_|topk"),
    ("embedding and indexing", "sort|unique|histogram|scan|mapping|cub::device(?!reduce)"),
    ("embedding and indexing", "offsets_range|to_dense|bucketize|token_ids|compute_position|cumsum|nonzero"),
    ("embedding and indexing", "expand_to|repeat_interleave|dispatch_layout|count_expert|aux_fi"),
    ("softmax and reductions", "softmax|reduce(?!d)|loss|lpnorm|normtwo|(vector|foreach)_norm|argm(ax|in)"),
    ("softmax and reductions", "finalize|::(sum|mean|max|min|amax|amin|any|all)\\b|cross_entropy"),
    ("elementwise", "elementwise|multi_tensor_apply|fill|dropout|distribution|activation|act_and_mul|sqrt"),
    ("elementwise", "silu|gelu|relu|swiglu|tensorop|epilogue|scale((?!scale)\\w)*tensor"),
    ("elementwise", "::(add|mul|div|sub)_?\\b"),
    ("elementwise", "sigmoid|tanh|threshold|clamp|nan_to|recip|normal_|uniform_|bernoulli|randint"),
    ("elementwise", "::(where|pow|neg|log2?|exp|[gl][et]|eq)\\b"),
)
# Annotations of a program, such as attn(B), say where a kernel was launched, but not what it does.
_OPERATOR = re.compile("[\\w.:#]+")
_RULES = tuple((kind, re.compile(words, re.IGNORECASE)) for kind, words in _WORDS)
# Those of torch_tb_profiler (kineto, tb_plugin/torch_tb_profiler/profiler/tensor_core.py), and of cuBLAS for
# H100, CUTLASS and FlashAttention. The names of Triton's kernels do not show whether they use Tensor Cores.
_TENSOR_CORES = re.compile(
    "[hs]884|[hsc]1688|hmma|i8816|16816|dgrad_1x1_stride_2x2|first_layer_wgrad_kernel|conv1x1|conv2d_c1_k1"
    "|direct_group|xmma_(implicit_|sparse_|warp_specialized_implicit_)?gemm|xmma_sparse_conv"
    "|Cijk_\\w*_MI\\d|_MFMA|gtcx\\d?_|[_:]xdl|Xdl"  # AMD: Tensile, MIOpen, Composable Kernel
    "|nvjet|tensorop|wgmma|tensor\\d+x\\d+x\\d+|flash_fwd_(splitkv_)?kernel|flash_bwd_dq|FlashAttn[FB]wd|compute_attn_ws|fmhaSm\\d+|^bmm_\\w+_t\\d+x\\d+x\\d+u\\d|(fp8|FP8)\\w*::GemmKernel"
)
# The types in the names of kernels of cuBLAS, CUTLASS, Triton, and Tensile (such as Cijk_Ailk_Bljk_BBS).
_DATA_TYPES = (
    ("FP4", "fp4|e2m1"),
    # vLLM's Fp8KVCacheDataType 0 (kAuto) is the type of the model, without FP8.
    ("FP8", "fp8(?!kvcachedatatype\\)0)|e4m3|e5m2|float8"),
    ("BFloat16", "bf16|bfloat16|Cijk_[a-z]+_[a-z]+_(b[bs]|4xi)"),
    ("Half", "half|f16|fp16|h884|h1688|h16816|hgemm|Cijk_[a-z]+_[a-z]+_h"),
    ("TF32", "tf32"),
    ("float", "float|f32|sgemm|s884|s1688|scudnn|Cijk_[a-z]+_[a-z]+_s"),
)
PRODUCTS = (_EXPERTS, "matrix products", "attention", "convolution")
"""The kinds that consist of matrix products, at least for the most part."""
KINDS = (*dict.fromkeys(kind for kind, _ in _WORDS), "other")


def kernel_category(name: str, operator: str = "") -> str:
    """Returns what a kernel or a copy does: one of KINDS, or a collective such as `all_reduce`.

    `operator` is what launched it. Unless it is an annotation, it decides for kernels whose names do not.
    """
    if collective := kernel_kind(name):
        return (collective in SHARED_KINDS and annotated_kind(operator)) or collective
    texts = (name, operator) if _OPERATOR.fullmatch(operator) else (name,)
    if _RULES[0][1].search(texts[-1]) and not name.startswith("Mem"):
        return _EXPERTS  # all that such an operator does, such as its routing
    matches = (kind for text in texts for kind, words in _RULES if words.search(text))
    kind = next(matches, "other")
    # Libraries compute convolutions as matrix products.
    return "convolution" if kind == "matrix products" and "convolution" in operator else kind


def uses_tensor_cores(name: str, kind: str) -> float | None:
    """Returns 1 if the name of a kernel shows that it uses Tensor Cores or AMD's matrix cores, and None if it
    computes matrix products, and its name shows neither this nor the data type float.
    """
    if _TENSOR_CORES.search(name):
        return 1.0
    return None if kind in PRODUCTS and data_type(name) != "float" else 0.0


def data_type(name: str) -> str:
    """Returns the smallest data type in the name of a kernel that computes matrix products.

    >>> data_type("_matmul_ogs_NNT_bf16xbf16xmxfp4")  # FP4 is the type of weights only
    'FP4 with BFloat16'
    """
    found = [dtype for dtype, words in _DATA_TYPES if re.search(words, name, re.I)]
    return " with ".join(found[: 1 + ("FP4" in found)]) or "unknown"
