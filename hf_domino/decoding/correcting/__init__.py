"""Parts of a rollout: candidate pools, the correction head along a block, its input products, fused kernels."""
