"""A proxy that speaks OpenAI's completions and chat completions, in front of prefill and decode nodes that share a pool.

Pure: `protocol` (requests), `affinity`, `breaker`, `sse`. Shells: `nodes`, `exchange`, `app`, `cli`. README.md says what it does.
"""
