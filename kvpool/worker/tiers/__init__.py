"""Where a worker keeps bytes: DRAM (memfds that local clients map) and SSD (slab files). Shells without decisions.

Which block lies where, and what is evicted, is decided in `kvpool.core.blocks`; when bytes move is `kvpool.worker.mover`'s.
"""
