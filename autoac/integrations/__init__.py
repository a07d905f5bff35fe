"""Callbacks for trainers; each is a thin file on `autoac.auto`, and needs its trainer's library."""
