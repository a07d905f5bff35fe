"""The recorded step: ops, storages, module calls and saved tensors."""
