"""Stands in for Mooncake: only `mooncake.store`, on kvpool. Do not install it beside Mooncake itself."""
