"""The session with which a training script starts, and the watch over a group that is there already."""
