"""Callbacks for trainers; each is a thin layer over `autoac.auto`, and needs its trainer's library."""
