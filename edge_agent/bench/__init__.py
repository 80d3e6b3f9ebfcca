"""The user's own numbers on the user's own machine: direct against speculative decoding, and a peer beside them."""
