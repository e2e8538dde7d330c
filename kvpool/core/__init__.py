"""What decides in kvpool. Pure: no I/O, clock, thread, lock, environment or log; imports the standard library, numpy, xxhash and
librt (packed arrays)."""
