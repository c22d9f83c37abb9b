"""Sources that several families of kinds name."""

PAPER = "How to Think About Asymptotic Times in Transformer Forward Passes"
SEQUENCE_PARALLELISM = "Korthikanti et al. 2022, arXiv:2205.05198"
EINSUM = "matrix calculus of Y = X W"
NCCL = "NVIDIA NCCL user guide, collective operations"
