"""mgpu-agent: shares NVIDIA GPUs between the containers of one Linux node."""

__version__ = "0.1.0"
