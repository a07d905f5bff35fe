"""Engines that carry plans out, and the code that attaches their programs to modules."""
