"""What the variables of NCCL, libfabric, oneCCL, MPI and HDF5 control, as comments for job scripts.

Profiles set the values. In a script, the comment above a variable gives the reason for the value, from the
table `[why]` of the profile. The comment at the end of the line says what the variable controls. Sources:
NCCL's user guide (env.html), libfabric's fi_cxi(7) and fi_mr(3), oneCCL's developer guide (Environment
Variables), Cray MPICH's intro_mpi(3), UCX's `ucx_info -c -f`, PyTorch's notes on distributed communication.
"""

from __future__ import annotations

MEANINGS = {
    "CCL_ATL_TRANSPORT": "oneCCL communicates through MPI, or directly through libfabric (ofi)",
    "CCL_KVS_MODE": "how the ranks of oneCCL exchange their addresses at the start",
    "CCL_PROCESS_LAUNCHER": "the launcher interface from which oneCCL reads the rank and the number of ranks",
    "CUDA_VISIBLE_DEVICES": "local rank i uses the i-th GPU of this list",
    "FI_CXI_RDZV_PROTO": "the protocol of libfabric for large messages (fi_cxi.7)",
    "FI_CXI_RDZV_EAGER_SIZE": "bytes of a large message that are sent before the receiver answers",
    "FI_CXI_RDZV_GET_MIN": "bytes from which on the receiver fetches the rest of a large message",
    "FI_CXI_RDZV_THRESHOLD": "larger messages are sent in this way; 0: all",
    "FI_CXI_DEFAULT_CQ_SIZE": "entries of libfabric's completion queues, which must not overflow",
    "FI_CXI_DEFAULT_TX_SIZE": "number of send operations of libfabric that can be pending",
    "FI_CXI_DISABLE_HOST_REGISTER": "1: libfabric does not register its buffers in host memory with the GPU",
    "FI_CXI_RX_MATCH_MODE": "messages are matched by the network card (hardware), by libfabric, or by both",
    "FI_MR_CACHE_MONITOR": "how libfabric notices that the program frees memory that it uses for transfers",
    "GLOO_SOCKET_IFNAME": "network interface of PyTorch's gloo backend",
    "HDF5_USE_FILE_LOCKING": "FALSE: HDF5 does not lock files",
    "MPICH_GPU_SUPPORT_ENABLED": "1: Cray MPICH accepts GPU memory; 0: host memory only",
    "MPICH_OFI_NIC_POLICY": "a rank uses the network card nearest to its GPU (GPU) or its cores (NUMA)",
    "NCCL_COLLNET_ENABLE": "1: NCCL may use collectives that the network plugin provides",
    "NCCL_CROSS_NIC": "1: a ring or tree of NCCL may use different network cards on different nodes",
    "NCCL_IB_DISABLE": "1: NCCL does not use InfiniBand",
    "NCCL_IB_RETRY_CNT": "how often InfiniBand repeats a transfer before it fails",
    "NCCL_IB_TIMEOUT": "timeout of an InfiniBand transfer: 4.096 us * 2^value",
    "NCCL_NCHANNELS_PER_NET_PEER": "number of NCCL's channels between two ranks on different nodes",
    "NCCL_NET": "NCCL's network plugin; without this line, NCCL uses slow TCP if the plugin is missing",
    "NCCL_NET_GDR_LEVEL": "network cards access the memory of GPUs up to this distance (PHB: same NUMA node)",
    "NCCL_PROTO": "protocols that NCCL may use; after ^, protocols that it must not use",
    "NCCL_SHM_DISABLE": "1: NCCL does not use shared memory between ranks of a node",
    "NCCL_SOCKET_IFNAME": "network interface with which NCCL connects the ranks",
    "UCX_RC_TIMEOUT": "time that UCX waits for the acknowledgement of an InfiniBand transfer",
}
"""Maps the name of a variable to a description of what it controls."""
