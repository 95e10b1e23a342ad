"""What of a module is replicated: its parameters and buffers."""
