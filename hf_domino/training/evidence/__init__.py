"""What training shows of itself: evaluation, walked acceptance, norms of gradients, figures."""
