"""Writing and reading of records: JSON files, schemas from the records' classes, and limits of a file's contents."""
