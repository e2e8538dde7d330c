"""Policies of the tiers, each behind a seam of its own: which block leaves next (`eviction`). Pure; the worker chooses."""
