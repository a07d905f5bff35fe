"""A plan's record: made of a solution, and the step that it stands for worked out of it again."""
