"""Shares: the global batch of a step is cut into a fixed number of them, and added in a fixed order.

So gradients have the same bits on any number of ranks.
"""
