"""Training a draft head for a target, from nothing but the target and the text that this machine ships."""
