"""Makes a failure of one rank known on all; this room knows nothing of modules or gradients."""
