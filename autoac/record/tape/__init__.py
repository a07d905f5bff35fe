"""The recorded step: its ops, its storages, its module calls, and what autograd saves."""
