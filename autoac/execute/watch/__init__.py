"""Warnings about steps that run otherwise than planned: other ops, larger inputs, more modules, another autocast."""
