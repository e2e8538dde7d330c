"""What decides in kvpool. Pure: no I/O, clock, thread, lock, environment or logging; imports the standard library, numpy and xxhash."""
