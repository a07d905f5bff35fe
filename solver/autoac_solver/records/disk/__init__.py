"""How records are written and read: JSON files, the check against the records' classes, and what a file may hold."""
