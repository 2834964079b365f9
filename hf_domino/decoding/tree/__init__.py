"""Trees of proposals: their form, how they grow, and which targets can verify them."""
