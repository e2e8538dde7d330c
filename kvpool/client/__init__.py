"""The client: the blocking face (client, namespace), the mirror of the index, and the async face (aio)."""
