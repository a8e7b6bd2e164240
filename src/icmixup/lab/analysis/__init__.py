"""Behaviour of trained networks on images between two classes: the last figure of the paper."""
