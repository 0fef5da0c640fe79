"""What the kernel says of this machine, its processes and their connections. Looks, changes nothing.

A fact that a kernel does not offer reads as None or as the simplest machine; nothing here raises for it.
"""
