"""Digests of tensors on the host and on a device, and exact arithmetic on recorded scalars."""
