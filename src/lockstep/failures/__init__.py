"""The failure channel: makes a failure of one rank known on all. This room knows nothing of modules or gradients."""
