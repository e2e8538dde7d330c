"""What the tests share: real processes, a relay that misbehaves on order, self-naming payloads, leak checks, waiting."""
